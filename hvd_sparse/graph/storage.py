"""Folders of .npy files: written whole or not at all, read by mapping them into memory."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


@contextmanager
def new_folder(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its place when all has gone well, and vanishes otherwise.

    Raises:
        ValueError: `folder` has files in it, which somebody may have mapped.
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"`folder` must be new or empty: remove it or take another one. Received: folder={folder!r}.")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        temporary.replace(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_array(folder: Path, name: str, values: npt.NDArray[Any]) -> None:
    np.save(folder / f"{name}.npy", values, allow_pickle=False)


def open_array(folder: str | os.PathLike[str], name: str) -> npt.NDArray[Any]:
    """The array in the folder's file `name`.npy, mapped: pages are read when they are looked at.

    Raises:
        FileNotFoundError: no such file. ValueError: the file is damaged.
    """
    path = Path(folder) / f"{name}.npy"
    if not path.is_file():
        raise FileNotFoundError(f"`folder` must be one that save or write_parts has made. Received: no file {path}.")
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is damaged: {error}. Write the folder again.") from error
