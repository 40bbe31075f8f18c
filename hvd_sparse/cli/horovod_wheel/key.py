"""The cache key: everything that decides what is inside a wheel, and a hash of it.

Nothing here imports a framework: that takes seconds, and a cached wheel must be found at once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_sparse.cli.horovod_wheel import HOROVOD_VERSION, RECIPE_VERSION
from hvd_sparse.cli.horovod_wheel.options import Options, horovod_variables
from hvd_sparse.cli.horovod_wheel.process import capture

Key = dict[str, Any]


def compute_key(options: Options, environ: Mapping[str, str], compiler: Sequence[str], sdist_sha256: str) -> Key:
    """The key of a wheel as plain values, fit for JSON.

    Args:
        compiler: command of the C++ compiler, may hold arguments.
        sdist_sha256: of the source archive.
    """
    key: Key = {
        "horovod": HOROVOD_VERSION,
        "recipe": RECIPE_VERSION,
        "sdist_sha256": sdist_sha256,
        "python": " ".join((platform.python_implementation(), *platform.python_version_tuple()[:2])),
        "abi": sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag,
        "platform": sysconfig.get_platform(),
        "libc": " ".join(platform.libc_ver()),
        # Horovod compiles for the CPU at hand: machines of several kinds may share a home folder.
        "cpu_flags": cpu_flags(),
        "compiler": compiler_version(compiler),
        "frameworks": {name: " ".join(found) for name, found in sorted(options.frameworks.items())},
        "options": {"gloo": options.gloo, "mpi": options.mpi, "nccl": options.nccl},
        "environment": horovod_variables(options, environ),
    }
    if "torch" in options.frameworks:
        key["torch_build"] = torch_build()
        if key["torch_build"].get("cuda", "none") != "none":
            # With such a PyTorch, Horovod compiles its CUDA parts also without --nccl, if PyTorch finds a toolkit.
            key["cuda_toolkit"] = last_line(
                [str(environ.get("CUDA_HOME", "/usr/local/cuda")) + "/bin/nvcc", "--version"]
            )
    if options.mpi:
        key["mpi"] = first_line(["mpicxx", "--showme:version"]) or first_line(["mpicxx", "-v"])
    if options.nccl and options.cuda_home is not None:
        key["nvcc"] = last_line([str(options.cuda_home / "bin" / "nvcc"), "--version"])
    return key


def key_hash(key: Key) -> str:
    """A short name for a key, equal for equal keys."""
    text = json.dumps(key, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compiler_version(compiler: Sequence[str]) -> str:
    """First line of the compiler's `--version`, or "missing"."""
    return first_line([*compiler, "--version"]) or "missing"


def torch_build(folder: Path | None = None) -> dict[str, str]:
    """PyTorch's C++ ABI and its CUDA and ROCm versions, read from its files.

    Args:
        folder: of the torch package; found in this environment by default.
    """
    if folder is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or not spec.submodule_search_locations:
            return {}
        folder = Path(next(iter(spec.submodule_search_locations)))
    version = _text(folder / "version.py")
    config = _text(folder / "share" / "cmake" / "Torch" / "TorchConfig.cmake")
    abi = re.search(r"_GLIBCXX_USE_CXX11_ABI=(\d)", config)
    found = {"cxx11_abi": abi.group(1) if abi else "1"}  # recent versions have the new ABI only and do not say so
    for name in ("cuda", "hip"):
        match = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)", version, re.MULTILINE)
        found[name] = match.group(1) if match else "none"
    return found


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Those instruction sets of this machine that Horovod's build switches on."""
    match = re.search(r"^flags\s*:(.*)$", _text(cpuinfo), re.MULTILINE)
    present = match.group(1).split() if match else []
    return " ".join(flag for flag in ("avx", "f16c", "fma") if flag in present)


def first_line(command: Sequence[str]) -> str:
    """First line that a command prints, or "" when it cannot run."""
    return next(iter(_lines(command)), "")


def last_line(command: Sequence[str]) -> str:
    """Last line that a command prints, or "" when it cannot run."""
    return next(reversed(_lines(command)), "")


def _lines(command: Sequence[str]) -> list[str]:
    code, lines = capture(command, timeout=20)
    return lines if code == 0 else []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
