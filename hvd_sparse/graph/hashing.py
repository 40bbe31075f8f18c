"""A hash that every machine and every version of NumPy agrees on; NumPy's own generators promise no such thing."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

UInts = npt.NDArray[np.uint64]


def splitmix64(values: UInts) -> UInts:
    """One output of the splitmix64 generator for each of the states `values` (n,).

    Reference: G. Steele, D. Lea, C. Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.

    Example:
        >>> [hex(value) for value in splitmix64(np.array([0, 1], np.uint64)).tolist()]
        ['0xe220a8397b1dcdaf', '0x910a2dec89025cc1']
    """
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def hash64(values: npt.NDArray[Any], seed: int) -> UInts:
    """64 pseudo-random bits for each whole number of `values` (n,), which depend on nothing but it and `seed`."""
    return splitmix64(values.astype(np.uint64) ^ splitmix64(np.array([seed % 2**64], np.uint64)))
