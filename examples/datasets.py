"""Data of the examples, read from files that are on this machine. Nothing is downloaded."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")

# The third byte of an IDX file names the type of its numbers, which are big-endian.
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


class DataError(Exception):
    """The data is not there or not as expected; the message says which file and what to do."""


def fashion_mnist(split: str, directory: str | Path = FASHION_MNIST) -> tuple[Any, Any]:
    """Images (N, 28, 28) uint8 and their classes (N,) uint8, from the four standard IDX files, gzipped or not.

    Args:
        split: "train" (60,000 images) or "test" (10,000).
        directory: holds train-images-idx3-ubyte(.gz) and so on, as published for MNIST and Fashion-MNIST.

    Raises:
        DataError: a file is missing, or is no such file.
    """
    prefix = {"train": "train", "test": "t10k"}[split]
    images = read_idx(_find(Path(directory), f"{prefix}-images-idx3-ubyte"))
    labels = read_idx(_find(Path(directory), f"{prefix}-labels-idx1-ubyte"))
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise DataError(
            f"The {split} files in {directory} do not belong together: images {images.shape}, labels {labels.shape}."
        )
    return images, labels


def read_idx(path: str | Path) -> Any:
    """The array in an IDX file, in the machine's byte order. A name that ends in .gz says that it is gzipped.

    Raises:
        DataError: not an IDX file, or cut short.
    """
    path = Path(path)
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is not a complete gzip file: {error}.") from error
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _IDX_TYPES or len(data) < 4 + 4 * data[3]:
        raise DataError(f"{path} is not an IDX file: it begins with {data[:4].hex() or 'nothing'}.")
    dtype, num_dimensions = np.dtype(_IDX_TYPES[data[2]]), data[3]
    shape = struct.unpack_from(f">{num_dimensions}I", data, 4)
    start, size = 4 + 4 * num_dimensions, int(np.prod(shape, dtype=np.int64))
    if len(data) - start != size * dtype.itemsize:
        raise DataError(f"{path} announces the shape {shape}, but has {len(data) - start} bytes of numbers.")
    return np.frombuffer(data, dtype, size, start).reshape(shape).astype(dtype.newbyteorder("="))


def _find(directory: Path, name: str) -> Path:
    for path in (directory / name, directory / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(
        f"There is no file {directory / name} (nor {name}.gz). Give the folder of the IDX files with --data DIR, or "
        f"install the Debian package, whose files are in {FASHION_MNIST}: sudo apt-get install -y dataset-fashion-mnist"
    )
