"""Builds the Horovod wheel for the frameworks of this environment, or finds it in the cache.

Horovod's release does not compile beside current PyTorch and TensorFlow. This command compiles its source archive from
PyPI with C++17 and without the XLA operations of TensorFlow (HOROVOD_ENABLE_XLA_OPS=1, off by default). The wheel is
kept under a key of every version and option that matters, so the next call takes a second. Prints the wheel's path.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path

from hvd_sparse.cli.errors import CommandError, UsageError
from hvd_sparse.cli.horovod_wheel import compilation, needs, source
from hvd_sparse.cli.horovod_wheel.cache import WheelCache, check_wheel, default_folder
from hvd_sparse.cli.horovod_wheel.key import Key, compute_key, key_hash
from hvd_sparse.cli.horovod_wheel.options import (
    Options,
    build_environment,
    chosen_frameworks,
    find_cuda_home,
    installed_frameworks,
)
from hvd_sparse.cli.horovod_wheel.process import capture

EXAMPLES = """\
examples:
  hvd-sparse build-horovod --install                       build for what is installed, and install the wheel
  hvd-sparse build-horovod --frameworks torch --dest .     for PyTorch alone, a copy of the wheel here
  hvd-sparse build-horovod --mpi --no-gloo --jobs 8        over MPI, eight compilations at once
  hvd-sparse build-horovod --nccl --cuda-home /usr/local/cuda
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    what = parser.add_argument_group("what to build")
    what.add_argument("--gloo", action=argparse.BooleanOptionalAction, default=True, help="Gloo on CPUs (default: yes)")
    what.add_argument("--mpi", action="store_true", help="MPI on CPUs; needs mpicxx")
    what.add_argument("--nccl", action="store_true", help="NCCL on GPUs; needs a framework built for CUDA")
    what.add_argument("--cuda-home", metavar="DIR", help="CUDA toolkit (default: CUDA_HOME, else /usr/local/cuda)")
    what.add_argument("--nccl-home", metavar="DIR", help="folder with NCCL's include and lib (default: the system's)")
    what.add_argument("--frameworks", metavar="LIST", help="torch,tensorflow or one of them (default: those installed)")
    what.add_argument("--sdist", metavar="FILE", help=f"use this {source.SDIST_NAME} in place of a download")
    where = parser.add_argument_group("where and how")
    where.add_argument("--install", action="store_true", help="install the wheel into this environment")
    where.add_argument("--dest", metavar="DIR", help="also put a copy of the wheel there")
    where.add_argument("--cache-dir", metavar="DIR", help="default: ${XDG_CACHE_HOME:-~/.cache}/hvd_sparse")
    where.add_argument("--jobs", metavar="N", help="compilations at once, each up to 2 GB (default: one per CPU)")
    where.add_argument("--log", metavar="FILE", help="the build's full log (default: in the cache)")
    where.add_argument("--force", action="store_true", help="build even when the cache has the wheel")
    where.add_argument("--print-key", action="store_true", help="print the cache key and stop")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    options = read_options(args)
    jobs = read_jobs(args.jobs)
    sdist = source.check_sdist(args.sdist) if args.sdist is not None else None
    cache = WheelCache(Path(args.cache_dir).expanduser().resolve() if args.cache_dir else default_folder(os.environ))
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    digest = source.sha256(sdist) if sdist is not None else source.SDIST_SHA256
    key = compute_key(options, os.environ, compiler, digest)
    if args.print_key:
        print(json.dumps({"hash": key_hash(key), **key}, indent=2, sort_keys=True))
        return 0
    dest = make_folder(Path(args.dest).expanduser().resolve(), "--dest") if args.dest else None
    wheel = None if args.force else cache.find(key)
    if wheel is None:
        absent = needs.missing(options, os.environ, compiler)
        if absent:
            raise CommandError(needs.report(absent))
        make_folder(cache.folder, "--cache-dir")
        log = read_log(args.log, cache.folder / "logs" / f"{key_hash(key)}.log")
        with cache.lock(key):
            # Whoever held the lock before may have built it meanwhile.
            wheel = None if args.force else cache.find(key)
            wheel = wheel or build(options, cache, key, sdist, compiler, jobs, log)
    if dest is not None:
        with contextlib.suppress(shutil.SameFileError):
            shutil.copy2(wheel, dest)
        wheel = dest / wheel.name
    if args.install:
        install(wheel)
    print(wheel)
    return 0


def read_options(args: argparse.Namespace) -> Options:
    """What to build, from the command line."""
    if not args.gloo and not args.mpi:
        raise UsageError("`--no-gloo` needs `--mpi`: Horovod starts over one of them. Received: --no-gloo alone.")
    for name in ("cuda_home", "nccl_home"):
        value, option = getattr(args, name), "--" + name.replace("_", "-")
        if value is not None and not args.nccl:
            raise UsageError(f"`{option}` only has a meaning with `--nccl`: add it. Received: {option}={value}.")
        if value is not None and not Path(value).expanduser().is_dir():
            raise UsageError(f"`{option}` must be a folder. Received: {option}={value}.")
    return Options(
        gloo=args.gloo,
        mpi=args.mpi,
        nccl=args.nccl,
        cuda_home=find_cuda_home(args.cuda_home, os.environ) if args.nccl else None,
        nccl_home=Path(args.nccl_home).expanduser().resolve() if args.nccl_home is not None else None,
        frameworks=chosen_frameworks(args.frameworks, installed_frameworks()),
    )


def read_jobs(value: str | None) -> int:
    """Number of compilations at once, from the value of `--jobs`."""
    if value is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        jobs = int(value)
    except ValueError:
        raise UsageError(f"`--jobs` must be a whole number. Received: --jobs={value}.") from None
    if jobs < 1:
        raise UsageError(f"`--jobs` must be at least 1. Received: --jobs={value}.")
    return jobs


def read_log(value: str | None, default: Path) -> Path:
    """Where the log goes, from the value of `--log`."""
    log = Path(value).expanduser().resolve() if value else default
    make_folder(log.parent, "--log")
    if log.is_dir():
        raise UsageError(f"`--log` must be a file. Received: --log={value}, which is a folder.")
    return log


def make_folder(folder: Path, option: str) -> Path:
    """Creates the folder of an option, before the build rather than after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(0, "no permission to write")
    except OSError as error:
        message = f"`{option}` must be in a place that can be written. Received: {folder} ({error.strerror})."
        raise UsageError(message) from None
    return folder


def build(
    options: Options, cache: WheelCache, key: Key, sdist: Path | None, compiler: list[str], jobs: int, log: Path
) -> Path:
    """Compiles the wheel and puts it into the cache. Call with the cache's lock held."""
    named = ", ".join(" ".join(found) for found in options.frameworks.values())
    print(f"building Horovod for {named}: some minutes, log in {log}", file=sys.stderr, flush=True)
    archive = sdist or source.fetch(cache.folder / "sdist")
    with cache.workshop(key) as folder:
        sources = source.unpack(archive, folder)
        source.edit(sources)
        wrapper = compilation.write_wrapper(folder, compiler)
        environment = build_environment(options, os.environ, wrapper, jobs)
        code = compilation.compile_wheel(sources, folder / "wheel", environment, log)
        if code != 0:
            error = compilation.first_error(log.read_text(encoding="utf-8", errors="replace"))
            raise CommandError(f"the build failed:\n{error}\nFull log: {log}")
        try:
            return cache.add(key, check_wheel(folder / "wheel", options.frameworks))
        except CommandError as error:
            raise CommandError(f"{error}\nFull log: {log}") from None


def install(wheel: Path) -> None:
    """Installs the wheel into this environment, unless this very file is what is installed."""
    if _installed_digest() == source.sha256(wheel):
        return
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    # The first call replaces Horovod also when the version is the same; the second adds what Horovod needs and leaves
    # everything else alone.
    for more in (["--no-deps", "--force-reinstall"], []):
        code, lines = capture([*pip, *more, str(wheel)])
        if code != 0:
            raise CommandError(f"pip could not install {wheel}:\n" + "\n".join(lines[-5:]))


def _installed_digest() -> str:
    """SHA-256 of the wheel that Horovod was installed from, as pip recorded it, or ""."""
    try:
        record = metadata.distribution("horovod").read_text("direct_url.json")
        found: str = json.loads(record or "{}")["archive_info"]["hashes"]["sha256"]
    except (metadata.PackageNotFoundError, KeyError, ValueError):
        return ""
    return found
