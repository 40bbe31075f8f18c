"""How entries travel: messages of int32 words whose length follows from k and n alone.

A message holds k entries of a vector of n elements, ascending, padded with index n and value 0. Several messages are
the rows of one matrix; their vectors have less than 2^31 elements together. What 16 bits cannot hold of a value is not
lost: `pack` also says what will arrive, and the rest stays in the sender's residual.
"""

from __future__ import annotations

from typing import Any, Protocol

from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, Sparse, listed

_MAGNITUDE, _EXPONENT = 0x7FFFFFFF, 0x7F800000  # of a float32's bits: all but the sign; those of infinity
_LEAST = (127 - 80) << 23  # the bits of 2^-80: nothing on the way becomes a denormal, which some processors flush
_TO_HALF = 2.0**-14


class WireFormat(Protocol):
    """Turns entries into words and back.

    Attributes:
        exact: values arrive as they are.
        entry_bytes: bytes of an entry, for predictions; optional.
    """

    exact: bool

    def pack(self, ops: Ops, n: int, indices: Array, values: Array) -> tuple[Array, Array]:
        """(B, words) int32 for B messages of k entries (B, k), and the values (B, k) that will arrive."""

    def unpack(self, ops: Ops, n: int, k: int, words: Array) -> tuple[Array, Array]:
        """The indices and values (B, k) of B messages."""


class FP32:
    """int32 indices and float32 values: 8 bytes an entry."""

    exact = True
    entry_bytes = 8

    def pack(self, ops: Ops, n: int, indices: Array, values: Array) -> tuple[Array, Array]:
        return ops.join([ops.as_int32(indices), ops.bits(values)]), values

    def unpack(self, ops: Ops, n: int, k: int, words: Array) -> tuple[Array, Array]:
        return words[:, :k], ops.floats(words[:, k:])


class FP16:
    """int32 indices and float16 values with one scale per message: 6 bytes an entry."""

    exact = False
    entry_bytes = 6

    def pack(self, ops: Ops, n: int, indices: Array, values: Array) -> tuple[Array, Array]:
        power, halves, arriving = _scaled_halves(ops, values)
        return ops.join([power, ops.as_int32(indices), halves]), arriving

    def unpack(self, ops: Ops, n: int, k: int, words: Array) -> tuple[Array, Array]:
        return words[:, 1 : 1 + k], _unscaled(ops, words[:, :1], words[:, 1 + k :], k)


class Compact:
    """16-bit indices inside runs of 65536 elements, and float16 values: 4 bytes an entry and 4 bytes a run."""

    exact = False
    entry_bytes = 4

    def pack(self, ops: Ops, n: int, indices: Array, values: Array) -> tuple[Array, Array]:
        power, halves, arriving = _scaled_halves(ops, values)
        indices = ops.as_int32(indices)
        rows, k = indices.shape
        low = ops.shorts(_even(ops, indices & 0xFFFF))
        return ops.join([power, *self._ends(ops, n, indices, int(rows), int(k)), low, halves]), arriving

    def unpack(self, ops: Ops, n: int, k: int, words: Array) -> tuple[Array, Array]:
        runs, half = n >> 16, (k + 1) // 2
        power, ends, words = words[:, :1], words[:, 1 : 1 + runs], words[:, 1 + runs :]
        indices = ops.from_shorts(words[:, :half])[:, :k]
        if runs:
            indices = indices + self._runs(ops, ends, k) * 0x10000
        return indices, _unscaled(ops, power, words[:, half:], k)

    # The rows are searched as one ascending vector, each shifted beyond the one before.

    @staticmethod
    def _ends(ops: Ops, n: int, indices: Array, rows: int, k: int) -> list[Array]:
        """(rows, n >> 16): how many entries lie in the runs up to each but the last."""
        if n < 0x10000:
            return []
        shift = ops.integers([row * (n + 1) for row in range(rows)], indices)[:, None]
        edges = ops.integers([run << 16 for run in range(1, (n >> 16) + 1)], indices)[None, :] + shift
        found = ops.searchsorted(ops.reshape(indices + shift, (-1,)), ops.reshape(edges, (-1,)))
        before = ops.integers([row * k for row in range(rows)], indices)[:, None]
        return [ops.reshape(found, (rows, n >> 16)) - before]

    @staticmethod
    def _runs(ops: Ops, ends: Array, k: int) -> Array:
        """(rows, k): the run that each entry lies in."""
        rows, runs = (int(length) for length in ends.shape)
        shift = ops.integers([row * (k + 1) for row in range(rows)], ends)[:, None]
        numbers = ops.as_int32(ops.wrapped_range(0, rows * (k + 1), rows * (k + 1), ends))
        places = ops.reshape(ops.reshape(numbers, (rows, k + 1))[:, 1:], (-1,))
        found = ops.searchsorted(ops.reshape(ends + shift, (-1,)), places)
        before = ops.integers([row * runs for row in range(rows)], ends)[:, None]
        return ops.reshape(found, (rows, k)) - before


FORMATS: dict[str, type[Any]] = {"fp32": FP32, "fp16": FP16, "compact": Compact}


def wire_format(choice: Any) -> WireFormat:
    """The format of that name, or `choice` itself if it is one.

    Raises:
        ValueError: no such name.
    """
    if isinstance(choice, str) and choice in FORMATS:
        return FORMATS[choice]()
    if isinstance(choice, (str, type)) or not all(hasattr(choice, name) for name in ("exact", "pack", "unpack")):
        hint = f"`wire` must be one of {listed(FORMATS)}, or an object with exact, pack, unpack."
        raise ValueError(f"{hint} Received: wire={choice!r}.")
    return choice


def message(ops: Ops, entries: Sparse, k: int) -> tuple[Array, Array]:
    """Indices and values (1, k) of at most k entries, padded: what `pack` takes."""
    indices = ops.pad(ops.as_int32(entries.indices), k, entries.size)
    return indices[None, :], ops.pad(entries.values, k, 0)[None, :]


def _scaled_halves(ops: Ops, values: Array) -> tuple[Array, Array, Array]:
    """Of each row a power of two, the values divided by it as float16 words, and what will arrive of them.

    The largest value of a row becomes one of [2^14, 2^15): values down to 2^-28 of it keep all 11 bits, and nothing
    overflows. An infinity or NaN arrives as one.
    """
    power = ops.row_max(ops.bits(values) & _MAGNITUDE, _LEAST) & _EXPONENT
    halves = ops.halves(_even(ops, values / (ops.floats(power) * _TO_HALF)))
    return power, halves, _unscaled(ops, power, halves, values.shape[1])


def _unscaled(ops: Ops, power: Array, halves: Array, k: int) -> Array:
    return ops.from_halves(halves)[:, :k] * (ops.floats(power) * _TO_HALF)


def _even(ops: Ops, matrix: Array) -> Array:
    """With an even number of columns: two 16-bit elements make a word."""
    return ops.join([matrix, matrix[:, :1]]) if matrix.shape[1] % 2 else matrix
