"""Horovod's source archive: fetched with pip, unpacked, and changed in the one place that today's TensorFlow needs."""

from __future__ import annotations

import hashlib
import os
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from hvd_sparse.cli.errors import CommandError, UsageError
from hvd_sparse.cli.horovod_wheel import HOROVOD_VERSION
from hvd_sparse.cli.horovod_wheel.process import capture

SDIST_NAME = f"horovod-{HOROVOD_VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

# TensorFlow moved the XLA headers that this file includes. It only serves HOROVOD_ENABLE_XLA_OPS=1, off by default.
DROPPED_FROM = PurePosixPath("horovod/tensorflow/CMakeLists.txt")
DROPPED_LINE = 'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n'


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def fetch(folder: Path) -> Path:
    """The source archive in `folder`, downloaded with pip unless it is there."""
    target = folder / SDIST_NAME
    if target.exists() and sha256(target) == SDIST_SHA256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        # Without isolation, because pip runs Horovod's setup.py even for a download.
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--dest",
            scratch,
        ]
        command += ["--no-binary", "horovod", f"horovod=={HOROVOD_VERSION}"]
        code, lines = capture(command, Path(scratch))
        found = Path(scratch) / SDIST_NAME
        if code != 0 or not found.exists():
            tail = "\n".join(lines[-5:])
            raise CommandError(
                f"pip could not download Horovod {HOROVOD_VERSION}:\n{tail}\n"
                f"Without a network, bring {SDIST_NAME} and name it with --sdist."
            )
        if sha256(found) != SDIST_SHA256:
            raise CommandError(
                f"the {SDIST_NAME} that pip downloaded is not the one this recipe is for: its SHA-256 differs"
            )
        os.replace(found, target)
    return target


def check_sdist(given: str) -> Path:
    """The archive named with `--sdist`, if it is one of Horovod's right version."""
    path = Path(given).expanduser().resolve()
    advice = f"must be the source archive {SDIST_NAME}. Received: --sdist={given}"
    if not path.is_file():
        raise UsageError(f"`--sdist` {advice}, which is not a file.")
    try:
        with tarfile.open(path) as archive:
            first = archive.next()
    except tarfile.TarError:
        raise UsageError(f"`--sdist` {advice}, which is not a tar archive.") from None
    top = PurePosixPath(first.name).parts[0] if first is not None else ""
    if top != f"horovod-{HOROVOD_VERSION}":
        raise UsageError(f"`--sdist` {advice}, which unpacks to {top or 'nothing'}.")
    return path


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpacks the archive into `folder` and returns the folder of the sources."""
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
        for member in members:
            parts = PurePosixPath(member.name).parts
            if PurePosixPath(member.name).is_absolute() or ".." in parts or not (member.isfile() or member.isdir()):
                raise CommandError(
                    f"{sdist} holds {member.name}, which a source archive of Horovod does not: not unpacked"
                )
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, members=members, filter="data")
        else:
            archive.extractall(folder, members=members)
    return folder / f"horovod-{HOROVOD_VERSION}"


def edit(source: Path) -> None:
    """Drops the XLA operations from the sources of the TensorFlow extension."""
    path = source / DROPPED_FROM
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if text.count(DROPPED_LINE) != 1:
        raise CommandError(
            f"expected this line once in {DROPPED_FROM} and found it {text.count(DROPPED_LINE)} times, "
            f"so these are not the sources of Horovod {HOROVOD_VERSION}:\n  {DROPPED_LINE.strip()}"
        )
    path.write_text(text.replace(DROPPED_LINE, ""), encoding="utf-8")
