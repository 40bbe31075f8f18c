"""PyTorch, on whatever device the tensors are.

On the CPU, selection runs on NumPy views of the same memory: on one thread NumPy's partition is six times as fast as
torch.topk, and its comparison and flatnonzero three times as fast as torch's (10 million elements, torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch

from hvd_sparse.ops.base import PRIME
from hvd_sparse.ops.selection import likely
from hvd_sparse.types import Array

# Elements per piece when scanning on the CPU: the piece and its masks stay in the second-level cache.
_PIECE = 1 << 17


class TorchOps:
    """See `Ops`. Lengths are ints, and `cond` is an `if`: on a GPU `above`, `positions`, `distinct` and `cond` wait.

    Args:
        reuse: `scatter_sum` and `marks` write over their previous results of that size. Fresh memory costs as much as
            five additions.
    """

    name = "torch"

    def __init__(self, reuse: bool = False) -> None:
        self.reuse = reuse
        self._totals: dict[int, Array] = {}  # by n
        self._masks: dict[int, tuple[Any, Any]] = {}  # by n, with the places that are true

    def zeros(self, n: Any, like: Array | None = None) -> Array:
        return torch.zeros(n, dtype=torch.float32, device=None if like is None else like.device)

    def integers(self, values: Sequence[int], like: Array) -> Array:
        return torch.tensor(values, dtype=torch.int32, device=like.device)

    def add(self, x: Array, y: Array, alpha: float = 1, out: Array | None = None) -> Array:
        # The default is an int, because torch refuses to scale integers by a float.
        return torch.add(x, y, alpha=alpha, out=out)

    def blend(self, x: Array, factor: float, y: Array, alpha: float = 1.0, out: Array | None = None) -> Array:
        if alpha == 1 and x.dtype == y.dtype:  # one pass
            return torch.add(y, x, alpha=factor, out=out)
        return self.add(self.scale(x, factor, out), y, alpha, out)

    def scale(self, x: Array, factor: float, out: Array | None = None) -> Array:
        return torch.mul(x, factor, out=out)

    def length(self, x: Array) -> Any:
        return x.shape[0]

    def concat(self, parts: Sequence[Array]) -> Array:
        return torch.cat(list(parts))

    def join(self, parts: Sequence[Array]) -> Array:
        return torch.cat(list(parts), dim=1)

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        return x.reshape(shape)

    def row_max(self, x: Array, least: int) -> Array:
        return x.amax(dim=1, keepdim=True).clamp(min=least)

    def pad(self, x: Array, length: int, fill: float) -> Array:
        missing = length - x.shape[0]
        return x if missing == 0 else torch.cat([x, x.new_full((missing,), fill)])

    def top_abs(self, x: Array, k: int) -> Array:
        if x.device.type != "cpu":
            return torch.topk(x.abs(), k, sorted=False).indices.sort().values
        rows = _magnitude(x).reshape(-1, x.shape[-1])
        shape = (*x.shape[:-1], k)
        found = likely(rows, k)
        if found is not None:
            values = torch.from_numpy(rows.reshape(-1)[found])
            num_rows, width = rows.shape
            return self.blocks(torch.from_numpy(found), values, num_rows, width, k)[0].long().view(shape)
        surplus = rows.shape[1] - k
        limit = np.partition(rows, surplus)[:, surplus, None]
        larger, ties = rows > limit, np.flatnonzero(rows == limit)
        row = ties // rows.shape[1]
        place = np.arange(len(ties)) - np.searchsorted(row, np.arange(len(rows)))[row]
        ties = ties[place < k - np.count_nonzero(larger, axis=1)[row]]
        chosen = np.sort(np.concatenate([np.flatnonzero(larger), ties]))
        return torch.from_numpy(chosen % rows.shape[1]).view(shape)

    def above(self, x: Array, threshold: Any) -> Array:
        if x.device.type != "cpu":
            return torch.nonzero(~(x.abs() <= threshold)).view(-1)
        flat = x.detach().numpy()
        limit = np.float32(float(threshold))
        masks = np.empty((2, min(_PIECE, len(flat))), bool)
        found = []
        for start in range(0, max(1, len(flat)), _PIECE):
            piece = flat[start : start + _PIECE]
            below, above = masks[:, : len(piece)]
            np.less_equal(piece, limit, out=below)
            np.logical_and(below, np.greater_equal(piece, -limit, out=above), out=below)
            found.append(np.flatnonzero(np.logical_not(below, out=below)) + start)
        return torch.from_numpy(np.concatenate(found))

    def largest(self, x: Array, indices: Array, k: int) -> Array:
        surplus = indices.shape[0] - k
        if surplus <= 0:
            return indices
        if x.device.type != "cpu":
            return indices[self.top_abs(x[indices], k)]
        keep = np.ones(indices.shape[0], bool)
        keep[np.argpartition(_magnitude(x[indices]), surplus)[:surplus]] = False
        return indices[torch.from_numpy(keep)]

    def blocks(self, indices: Array, values: Array, num_blocks: int, size: int, quota: int) -> tuple[Array, Array]:
        if values.device.type != "cpu":
            return _blocks_by_sorting(indices, values, num_blocks, size, quota)
        found, flat = indices.numpy(), values.detach().numpy()
        edges = np.searchsorted(found, np.arange(num_blocks + 1) * size)
        keep = np.ones(len(found), bool)
        for full in np.flatnonzero(np.diff(edges) > quota):
            inside = slice(edges[full], edges[full + 1])
            surplus = edges[full + 1] - edges[full] - quota
            keep[inside][np.argpartition(_magnitude(flat[inside]), surplus)[:surplus]] = False
        counts = np.minimum(np.diff(edges), quota)
        block = np.repeat(np.arange(num_blocks), counts)
        slots = np.arange(counts.sum()) + block * quota - np.repeat(np.cumsum(counts) - counts, counts)
        places, taken = np.full(num_blocks * quota, size, np.int32), np.zeros(num_blocks * quota, np.float32)
        places[slots], taken[slots] = found[keep] - block * size, flat[keep]
        shape = (num_blocks, quota)
        return torch.from_numpy(places).view(shape), torch.from_numpy(taken).view(shape)

    def positions(self, mask: Array) -> Array:
        if mask.device.type != "cpu":
            return torch.nonzero(mask).view(-1)
        return torch.from_numpy(np.flatnonzero(mask.numpy()))

    def distinct(self, indices: Array, n: int) -> Array:
        if indices.device.type != "cpu":
            found = torch.unique(indices)
            return found[found < n]
        ascending = np.sort(indices.numpy())  # vectorised: cheaper than a mask of n
        ascending = ascending[: np.searchsorted(ascending, n)]
        first = np.ones(len(ascending), bool)
        np.not_equal(ascending[1:], ascending[:-1], out=first[1:])
        return torch.from_numpy(ascending[first])

    def marks(self, n: int, indices: Array) -> Array:
        if indices.device.type != "cpu":
            return torch.zeros(n, dtype=torch.bool, device=indices.device).index_fill_(0, indices.long(), True)
        mask, before = self._masks.pop(n, (None, None))
        if mask is None:
            mask = np.zeros(n, bool)
        else:
            mask[before] = False
        places = indices.numpy().copy()
        mask[places] = True
        if self.reuse:
            self._masks[n] = mask, places
        return torch.from_numpy(mask)

    def kth_largest(self, x: Array, k: int) -> Any:
        if x.device.type != "cpu":
            return torch.topk(x.abs(), k, sorted=False).values.min()
        return float(np.partition(_magnitude(x), x.shape[0] - k)[x.shape[0] - k])

    def gather(self, x: Array, indices: Array) -> Array:
        return torch.index_select(x, 0, indices)

    def scatter_sum(self, n: int, blocks: Sequence[tuple[Array, Array]], onto: Array | None = None) -> Array:
        total, like = self._totals.pop(n, None), blocks[0][1]
        if total is None or (total.shape[0], total.device, total.dtype) != (n + 1, like.device, like.dtype):
            total = like.new_empty(n + 1)
        start = 0
        if onto is not None:
            start = onto.shape[0]
            total[:start].copy_(onto)
        total[start:].zero_()
        for indices, values in blocks:
            total.index_add_(0, indices, values)
        if self.reuse:
            self._totals[n] = total
        return total[:n]

    def forget(self) -> None:
        """Let the next `scatter_sum` use fresh memory: somebody still holds the previous result."""
        self._totals.clear()

    def clear(self, x: Array, indices: Array) -> Array:
        return x.index_fill_(0, indices.long(), 0)

    def put(self, x: Array, indices: Array, values: Array) -> Array:
        return x.index_copy_(0, indices.long(), values)

    def searchsorted(self, ascending: Array, edges: Array) -> Array:
        return torch.searchsorted(ascending.contiguous(), edges.contiguous()).int()  # it warns where they are not

    def wrapped_range(self, start: Any, count: int, n: int, like: Array) -> Array:
        return torch.arange(start, start + count, device=like.device) % n

    def runs(self, x: Array, shift: Any, starts: Sequence[int], count: int, stride: int) -> Array:
        length = (count - 1) * stride + 1
        return torch.cat([x[start + shift : start + shift + length : stride] for start in starts])

    def residues(self, n: int, coefficients: Sequence[int], like: Array) -> Array:
        places = torch.arange(n, device=like.device)
        return reduce(lambda value, c: (value * places + c) % PRIME, coefficients, 0 * places).int()

    def transpose(self, matrix: Array) -> Array:
        return matrix.T

    def orthonormal(self, matrix: Array) -> Array:
        return torch.linalg.qr(matrix).Q

    def bits(self, values: Array) -> Array:
        return values.float().contiguous().view(torch.int32)

    def floats(self, bits: Array) -> Array:
        return bits.view(torch.float32)

    def halves(self, values: Array) -> Array:
        return values.half().contiguous().view(torch.int32)

    def from_halves(self, words: Array) -> Array:
        return words.contiguous().view(torch.float16).float()

    def shorts(self, integers: Array) -> Array:
        return integers.short().contiguous().view(torch.int32)

    def from_shorts(self, words: Array) -> Array:
        return words.contiguous().view(torch.int16).int() & 0xFFFF

    def as_int32(self, indices: Array) -> Array:
        return indices.int()

    def as_int64(self, indices: Array) -> Array:
        return indices.long()

    def all_finite(self, x: Array) -> Any:
        return torch.isfinite(x.sum())

    def maximum(self, x: Array, y: Array) -> Array:
        return torch.maximum(x, y)

    def minimum(self, x: Array, y: Array) -> Array:
        return torch.minimum(x, y)

    def cond(self, predicate: Any, yes: Callable[[], Array], no: Callable[[], Array]) -> Array:
        return yes() if predicate else no()

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        if isinstance(x, dict):
            return x if condition else y
        return torch.where(condition, x, y)

    def clip(self, value: Any, low: float, high: float) -> Any:
        return min(max(value, low), high)

    def norm_squared(self, x: Array) -> Any:
        x = x.float()
        return torch.dot(x, x)


def _blocks_by_sorting(indices: Array, values: Array, num_blocks: int, size: int, quota: int) -> tuple[Array, Array]:
    """`TorchOps.blocks` without a look at the data from the CPU."""
    order = torch.nan_to_num(values.abs(), nan=torch.inf, posinf=torch.inf).argsort(descending=True)
    block = torch.div(indices, size, rounding_mode="floor")
    order = order[block[order].argsort(stable=True)]
    block = block[order]
    place = torch.arange(len(order), device=values.device) - torch.searchsorted(block, block)
    slots = torch.where(place < quota, block * quota + place, num_blocks * quota)
    places = torch.full((num_blocks * quota + 1,), size, dtype=torch.int32, device=values.device)
    taken = values.new_zeros(num_blocks * quota + 1)
    places[slots], taken[slots] = (indices[order] - block * size).int(), values[order]
    places, by_index = places[:-1].view(num_blocks, quota).sort(dim=1)
    return places, taken[:-1].view(num_blocks, quota).gather(1, by_index)


def _magnitude(x: Array) -> Any:
    """|x| as a new NumPy array, with infinity for NaN: nothing is larger."""
    magnitude = np.abs(x if isinstance(x, np.ndarray) else x.detach().numpy())
    np.copyto(magnitude, np.inf, where=np.isnan(magnitude))
    return magnitude
