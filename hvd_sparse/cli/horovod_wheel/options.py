"""What to build: the options of one wheel, and the environment that tells Horovod's build about them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from hvd_sparse.cli.errors import UsageError

# Distributions that provide each framework, the usual one first.
FRAMEWORKS: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "tensorflow": (
        "tensorflow",
        "tensorflow-cpu",
        "tensorflow-gpu",
        "tensorflow-rocm",
        "tensorflow-macos",
        "intel-tensorflow",
        "tf-nightly",
        "tf-nightly-cpu",
    ),
}

# Horovod's name of a framework in HOROVOD_WITH_* and HOROVOD_WITHOUT_*.
HOROVOD_NAMES = {"torch": "PYTORCH", "tensorflow": "TENSORFLOW"}

# Variables of the user that reach the compilation. Every other HOROVOD_* variable is dropped, so that the options alone
# say what is built and a variable that is meant for run time (HOROVOD_CPU_OPERATIONS, say) does not change the wheel.
PASSED_THROUGH = (
    "HOROVOD_BUILD_ARCH_FLAGS",
    "HOROVOD_BUILD_CUDA_CC_LIST",
    "HOROVOD_CMAKE",
    "HOROVOD_DEBUG",
    "HOROVOD_NCCL_INCLUDE",
    "HOROVOD_NCCL_LIB",
    "HOROVOD_NCCL_LINK",
)
COMPILER_VARIABLES = ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CUDAFLAGS")


@dataclass(frozen=True)
class Options:
    """What the wheel contains.

    Attributes:
        frameworks: distribution name and version of each framework, by the framework's name.
        cuda_home: CUDA toolkit, for `nccl`.
        nccl_home: folder with NCCL's `include` and `lib`; None: where the compiler looks anyway.
    """

    gloo: bool = True
    mpi: bool = False
    nccl: bool = False
    cuda_home: Path | None = None
    nccl_home: Path | None = None
    frameworks: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def installed_frameworks() -> dict[str, tuple[str, str]]:
    """Distribution name and version of each framework of this environment, without importing it."""
    found = {}
    for framework, distributions in FRAMEWORKS.items():
        for distribution in distributions:
            try:
                found[framework] = (distribution, metadata.version(distribution))
                break
            except metadata.PackageNotFoundError:
                continue
    return found


def chosen_frameworks(names: str | None, installed: Mapping[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """The frameworks to build for.

    Args:
        names: value of `--frameworks`, separated by commas; None: all that are installed.
    """
    if names is None:
        return dict(installed)
    chosen = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name not in FRAMEWORKS:
            known = ", ".join(FRAMEWORKS)
            raise UsageError(
                f"`--frameworks` must be names out of {known}, joined by commas. Received: --frameworks={names}."
            )
        if name not in installed:
            raise UsageError(
                f"`--frameworks` names {name}, which is not installed: run `pip install {name}` first or leave it out. "
                f"Received: --frameworks={names}."
            )
        chosen[name] = installed[name]
    if not chosen:
        raise UsageError(f"`--frameworks` must name at least one framework. Received: --frameworks={names}.")
    return chosen


def find_cuda_home(given: str | None, environ: Mapping[str, str]) -> Path | None:
    """The CUDA toolkit: the one given, else the environment's, else the usual place."""
    for candidate in (given, *(environ.get(name) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"))):
        if candidate:
            return Path(candidate).expanduser().resolve()
    usual = Path("/usr/local/cuda")
    return usual if usual.is_dir() else None


def horovod_variables(options: Options, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that tell Horovod's build what to do, those of the user that it honours included."""
    variables = {name: environ[name] for name in (*PASSED_THROUGH, *COMPILER_VARIABLES) if environ.get(name)}
    for name, wanted in (("GLOO", options.gloo), ("MPI", options.mpi), ("MXNET", False)):
        variables[f"HOROVOD_WITH_{name}" if wanted else f"HOROVOD_WITHOUT_{name}"] = "1"
    for framework, name in HOROVOD_NAMES.items():
        variables[f"HOROVOD_WITH_{name}" if framework in options.frameworks else f"HOROVOD_WITHOUT_{name}"] = "1"
    if options.gloo != options.mpi:  # with both, the launcher decides
        variables["HOROVOD_CPU_OPERATIONS"] = "GLOO" if options.gloo else "MPI"
    if options.nccl:
        variables["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        variables["HOROVOD_CUDA_HOME"] = str(options.cuda_home)
        if options.nccl_home is not None:
            variables["HOROVOD_NCCL_HOME"] = str(options.nccl_home)
    return variables


def build_environment(
    options: Options, environ: Mapping[str, str], wrapper: Path, jobs: int, path: Sequence[Path] = ()
) -> dict[str, str]:
    """The whole environment of the compilation.

    Args:
        wrapper: stands for the C++ compiler.
        jobs: compilations at once.
        path: folders that come first in PATH.
    """
    result = {name: value for name, value in environ.items() if not name.startswith("HOROVOD_")}
    result.update(horovod_variables(options, environ))
    result["CXX"] = str(wrapper)
    result["MAKEFLAGS"] = f"-j{jobs}"
    # Gloo asks for a CMake of 2012, which CMake 4 refuses unless told to go on.
    result["CMAKE_POLICY_VERSION_MINIMUM"] = "3.5"
    # TensorFlow, imported by Horovod's build to learn its flags, is talkative.
    result["TF_CPP_MIN_LOG_LEVEL"] = "3"
    if options.nccl and options.cuda_home is not None:
        path = [*path, options.cuda_home / "bin"]
    result["PATH"] = os.pathsep.join([*map(str, path), environ.get("PATH", os.defpath)])
    return result
