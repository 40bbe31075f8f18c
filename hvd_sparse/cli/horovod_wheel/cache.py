"""The cache of wheels: one folder per key, filled by renaming a complete wheel into it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from hvd_sparse.cli.errors import CommandError
from hvd_sparse.cli.horovod_wheel.key import Key, key_hash

# Compiled part of each framework's module. Horovod's build leaves one out silently when it does not find the framework.
EXTENSIONS = {"torch": "horovod/torch/mpi_lib_v2", "tensorflow": "horovod/tensorflow/mpi_lib"}


def default_folder(environ: Mapping[str, str]) -> Path:
    """`$XDG_CACHE_HOME/hvd_sparse`, by default `~/.cache/hvd_sparse`."""
    given = environ.get("XDG_CACHE_HOME", "")
    # The XDG rules say that a relative path is to be ignored.
    base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    return base / "hvd_sparse"


class WheelCache:
    """Wheels in a folder, found by their keys.

    A wheel gets its name in the cache by a rename, so whatever is found is whole, also after an interrupted build. The
    lock makes a second build of the same wheel wait for the first and then use its result.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def entry(self, key: Key) -> Path:
        """The folder of a key, which may not exist yet."""
        return self.folder / "wheels" / key_hash(key)

    def find(self, key: Key) -> Path | None:
        """The wheel of a key, if there is a sound one."""
        for wheel in sorted(self.entry(key).glob("horovod-*.whl")):
            if zipfile.is_zipfile(wheel):
                return wheel
        return None

    def add(self, key: Key, wheel: Path) -> Path:
        """Moves a finished wheel, which must lie on the cache's file system, into the cache."""
        entry = self.entry(key)
        entry.mkdir(parents=True, exist_ok=True)
        _write_atomically(entry / "key.json", json.dumps(key, indent=2, sort_keys=True) + "\n")
        with wheel.open("rb") as file:
            os.fsync(file.fileno())  # or a power cut may leave the new name on an empty file
        target = entry / wheel.name
        os.replace(wheel, target)
        return target

    @contextlib.contextmanager
    def lock(self, key: Key) -> Iterator[None]:
        """Holds the build of one wheel against other processes."""
        folder = self.folder / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / key_hash(key)).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("another process is building this wheel: waiting for it", file=sys.stderr, flush=True)
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def workshop(self, key: Key) -> Iterator[Path]:
        """An empty folder to build in, removed afterwards. Call with the lock held.

        Its name is the key's, so that what an interrupted build left behind goes away with the next one.
        """
        folder = self.folder / "building" / key_hash(key)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def check_wheel(folder: Path, frameworks: Mapping[str, object]) -> Path:
    """The one wheel in `folder`, once it is shown to be whole and to hold every framework's compiled part."""
    wheels = list(folder.glob("horovod-*.whl"))
    if len(wheels) != 1:
        raise CommandError(f"expected one wheel from the build and found {len(wheels)}")
    with zipfile.ZipFile(wheels[0]) as archive:
        names = archive.namelist()
        broken = archive.testzip()
    if broken is not None:
        raise CommandError(f"the build left a broken wheel: {broken} in {wheels[0].name} does not match its checksum")
    for framework in frameworks:
        if not any(name.startswith(EXTENSIONS[framework]) for name in names):
            raise CommandError(f"the build left out the compiled part for {framework}, and did not say why")
    return wheels[0]


def _write_atomically(path: Path, text: str) -> None:
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)
