"""What the build needs on this machine, checked before it starts rather than missed minutes later."""

from __future__ import annotations

import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hvd_sparse.cli.horovod_wheel.key import first_line, torch_build
from hvd_sparse.cli.horovod_wheel.options import Options

OLDEST_CMAKE = (3, 13)


@dataclass(frozen=True)
class Need:
    """Something that is missing.

    Attributes:
        name: the tool, as a user would search for it.
        reason: what it is for, or where it was looked for.
        debian: Debian package that has it, or "".
        pip: PyPI package that has it, or "".
    """

    name: str
    reason: str
    debian: str = ""
    pip: str = ""


def missing(options: Options, environ: Mapping[str, str], compiler: Sequence[str]) -> list[Need]:
    """Everything that the build would stumble over, in one list."""
    needs = _programs(environ, compiler) + _python_parts()
    if not options.frameworks:
        needs.append(Need("a framework", f"{sys.executable} has neither torch nor tensorflow: install one first"))
    if options.mpi and shutil.which("mpicxx", path=environ.get("PATH")) is None:
        needs.append(Need("mpicxx", "for --mpi", debian="libopenmpi-dev openmpi-bin"))
    if options.nccl:
        needs += _cuda_parts(options, environ)
    return needs


def report(needs: Sequence[Need]) -> str:
    """The message for a list of missing things, with the commands that help."""
    lines = ["the build cannot start; missing on this machine:"]
    lines += [f"  {need.name}: {need.reason}" for need in needs]
    debian = " ".join(need.debian for need in needs if need.debian)
    pip = " ".join(need.pip for need in needs if need.pip)
    if debian:
        lines.append(f"On Debian or Ubuntu: apt-get install -y {debian}")
    if pip:
        lines.append(f"Python packages: {sys.executable} -m pip install {pip}")
    return "\n".join(lines)


def _programs(environ: Mapping[str, str], compiler: Sequence[str]) -> list[Need]:
    path = environ.get("PATH")
    needs = []
    if shutil.which(compiler[0], path=path) is None:
        needs.append(Need(compiler[0], "the C++ compiler (CXX names another one)", debian="g++"))
    cmake = environ.get("HOROVOD_CMAKE", "cmake")
    if shutil.which(cmake, path=path) is None:
        needs.append(Need(cmake, "at least version 3.13 (HOROVOD_CMAKE names another one)", debian="cmake"))
    else:
        found = re.search(r"(\d+)\.(\d+)", first_line([cmake, "--version"]))
        if found is not None and tuple(map(int, found.groups())) < OLDEST_CMAKE:
            needs.append(Need("a newer cmake", f"at least version 3.13, found {found.group()}", debian="cmake"))
    if shutil.which("make", path=path) is None:
        needs.append(Need("make", "runs the compilation", debian="make"))
    return needs


def _python_parts() -> list[Need]:
    needs = []
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        needs.append(Need("Python.h", f"Python's headers, looked for in {include}", debian=package))
    modules = {"pip": "runs the build", "setuptools": "runs the build", "packaging": "Horovod's build imports it"}
    for module, reason in modules.items():
        if find_spec(module) is None:
            needs.append(Need(f"the Python package {module}", reason, pip=module))
    if find_spec("wheel") is None and find_spec("setuptools._vendor.wheel") is None:
        needs.append(Need("the Python package wheel", "packs the result", pip="wheel"))
    return needs


def _cuda_parts(options: Options, environ: Mapping[str, str]) -> list[Need]:
    if options.cuda_home is None:
        reason = "for --nccl: name the CUDA toolkit's folder with --cuda-home (or in HOROVOD_CUDA_HOME or CUDA_HOME)"
        return [Need("nvcc", reason)]
    needs = []
    if "torch" in options.frameworks and torch_build().get("cuda") == "none":
        needs.append(Need("a PyTorch for CUDA", "for --nccl: the one installed is for CPUs"))
    nvcc = options.cuda_home / "bin" / "nvcc"
    if not nvcc.exists():
        needs.append(Need("nvcc", f"for --nccl, looked for at {nvcc}: --cuda-home must be the CUDA toolkit's folder"))
    places = [options.nccl_home] if options.nccl_home else [options.cuda_home, Path("/usr"), Path("/usr/local")]
    headers = [place / "include" / "nccl.h" for place in places]
    if environ.get("HOROVOD_NCCL_INCLUDE"):
        headers.append(Path(environ["HOROVOD_NCCL_INCLUDE"]) / "nccl.h")
    if not any(header.exists() for header in headers):
        looked = " and ".join(map(str, headers))
        needs.append(
            Need("nccl.h", f"for --nccl, looked for at {looked}: --nccl-home names NCCL's folder", debian="libnccl-dev")
        )
    return needs
