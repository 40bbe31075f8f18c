"""NumPy: the oracle that the other back ends are tested against. Plain rather than fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from hvd_sparse.ops.base import PRIME
from hvd_sparse.types import Array


class NumpyOps:
    """See `Ops`. Equal magnitudes: the lowest index wins. Integer arrays keep their type, so tests can be exact."""

    name = "numpy"

    def zeros(self, n: Any, like: Array | None = None) -> Array:
        return np.zeros(n, np.float32 if like is None or like.dtype == np.float16 else like.dtype)

    def integers(self, values: Sequence[int], like: Array) -> Array:
        return np.asarray(values, np.int32)

    def add(self, x: Array, y: Array, alpha: float = 1.0, out: Array | None = None) -> Array:
        y = y.astype(x.dtype)
        return (x + (y if alpha == 1 else y * alpha)).astype(x.dtype)

    def blend(self, x: Array, factor: float, y: Array, alpha: float = 1.0, out: Array | None = None) -> Array:
        return self.add(self.scale(x, factor), y, alpha)

    def scale(self, x: Array, factor: float, out: Array | None = None) -> Array:
        return (x * factor).astype(x.dtype)

    def length(self, x: Array) -> Any:
        return x.shape[0]

    def concat(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(parts)

    def join(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(parts, axis=1)

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        return x.reshape(shape)

    def row_max(self, x: Array, least: int) -> Array:
        return np.maximum(x.max(axis=1, keepdims=True), least)

    def pad(self, x: Array, length: int, fill: float) -> Array:
        return np.concatenate([x, np.full(length - len(x), fill, x.dtype)])

    def top_abs(self, x: Array, k: int) -> Array:
        order = np.argsort(-_magnitude(x), kind="stable")
        return np.sort(order[..., :k])

    def above(self, x: Array, threshold: Any) -> Array:
        return np.flatnonzero(~(np.abs(x) <= threshold))

    def largest(self, x: Array, indices: Array, k: int) -> Array:
        return indices if len(indices) <= k else indices[self.top_abs(x[indices], k)]

    def blocks(self, indices: Array, values: Array, num_blocks: int, size: int, quota: int) -> tuple[Array, Array]:
        block = indices // size
        order = np.lexsort((-_magnitude(values), block))
        place = np.arange(len(order)) - np.searchsorted(block, block)  # in its block, as `block` is in ascending order
        kept = np.sort(order[place < quota])
        block = block[kept]
        slots = block * quota + np.arange(len(kept)) - np.searchsorted(block, block)
        places, taken = np.full(num_blocks * quota, size, np.int32), np.zeros(num_blocks * quota, values.dtype)
        places[slots], taken[slots] = indices[kept] - block * size, values[kept]
        return places.reshape(num_blocks, quota), taken.reshape(num_blocks, quota)

    def positions(self, mask: Array) -> Array:
        return np.flatnonzero(mask)

    def distinct(self, indices: Array, n: int) -> Array:
        found = np.unique(indices)
        return found[found < n]

    def marks(self, n: int, indices: Array) -> Array:
        mask = np.zeros(n, bool)
        mask[indices] = True
        return mask

    def kth_largest(self, x: Array, k: int) -> Any:
        return float(np.sort(_magnitude(x))[-k])

    def gather(self, x: Array, indices: Array) -> Array:
        return x[indices]

    def scatter_sum(self, n: int, blocks: Sequence[tuple[Array, Array]], onto: Array | None = None) -> Array:
        total = np.zeros(n + 1, blocks[0][1].dtype)
        if onto is not None:
            total[: len(onto)] = onto
        np.add.at(total, np.concatenate([i for i, _ in blocks]), np.concatenate([values for _, values in blocks]))
        return total[:n]

    def clear(self, x: Array, indices: Array) -> Array:
        x = x.copy()
        x[indices] = 0
        return x

    def put(self, x: Array, indices: Array, values: Array) -> Array:
        x = x.copy()
        x[indices] = values
        return x

    def searchsorted(self, ascending: Array, edges: Array) -> Array:
        return np.searchsorted(ascending, edges).astype(np.int32)

    def wrapped_range(self, start: Any, count: int, n: int, like: Array) -> Array:
        return (start + np.arange(count)) % n

    def runs(self, x: Array, shift: Any, starts: Sequence[int], count: int, stride: int) -> Array:
        return x[(np.asarray(starts)[:, None] + np.arange(count) * stride + shift).reshape(-1)]

    def residues(self, n: int, coefficients: Sequence[int], like: Array) -> Array:
        places = np.arange(n)
        return reduce(lambda value, c: (value * places + c) % PRIME, coefficients, 0 * places).astype(np.int32)

    def transpose(self, matrix: Array) -> Array:
        return matrix.T

    def orthonormal(self, matrix: Array) -> Array:
        return np.linalg.qr(matrix)[0]

    def bits(self, values: Array) -> Array:
        return np.ascontiguousarray(values, np.float32).view(np.int32)

    def floats(self, bits: Array) -> Array:
        return bits.view(np.float32)

    def halves(self, values: Array) -> Array:
        return np.ascontiguousarray(values, np.float16).view(np.int32)

    def from_halves(self, words: Array) -> Array:
        return np.ascontiguousarray(words).view(np.float16).astype(np.float32)

    def shorts(self, integers: Array) -> Array:
        return np.ascontiguousarray(integers, np.uint16).view(np.int32)

    def from_shorts(self, words: Array) -> Array:
        return np.ascontiguousarray(words).view(np.uint16).astype(np.int32)

    def as_int32(self, indices: Array) -> Array:
        return indices.astype(np.int32)

    def as_int64(self, indices: Array) -> Array:
        return indices.astype(np.int64)

    def all_finite(self, x: Array) -> Any:
        return np.isfinite(x.sum())

    def maximum(self, x: Array, y: Array) -> Array:
        return np.maximum(x, y)

    def minimum(self, x: Array, y: Array) -> Array:
        return np.minimum(x, y)

    def cond(self, predicate: Any, yes: Callable[[], Array], no: Callable[[], Array]) -> Array:
        return yes() if predicate else no()

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        return x if condition else y

    def clip(self, value: Any, low: float, high: float) -> Any:
        return min(max(value, low), high)

    def norm_squared(self, x: Array) -> Any:
        return float(np.sum(np.square(x, dtype=np.float64)))


def _magnitude(x: Array) -> Array:
    magnitude = np.abs(x)
    return np.where(np.isnan(magnitude), np.inf, magnitude)
