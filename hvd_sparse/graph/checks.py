"""What users hand in, looked at once."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_sparse.types import check_count

Ints = npt.NDArray[np.int64]


def check_number(value: Any, name: str) -> int:
    """`check_count` that also takes NumPy's whole numbers, as `src.max() + 1` is one."""
    return check_count(value.item() if isinstance(value, np.integer) else value, name)


def check_seed(seed: Any) -> int:
    """Return `seed` as an int, or raise a TypeError that names it."""
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise TypeError(f"`seed` must be an int. Received: seed={seed!r}.")
    return int(seed)


def whole_numbers(values: npt.ArrayLike, name: str) -> Ints:
    """Return a 1-D array of whole numbers as int64, or raise a TypeError that names it."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(f"`{name}` must be a 1-D array of whole numbers. Received: {name}={array.dtype}{array.shape}.")
    return array.astype(np.int64, copy=False)


def numbers_below(values: npt.ArrayLike, stop: int, name: str) -> Ints:
    """Return `values` as int64 if all are in [0, stop), or raise an error that names them."""
    array = whole_numbers(values, name)
    if len(array) and (array.min() < 0 or array.max() >= stop):
        raise ValueError(
            f"`{name}` must be whole numbers from 0 to {stop - 1}. "
            f"Received: {name} from {array.min()} to {array.max()}."
        )
    return array
