"""How entries travel: k indices, then the bits of k values, in one int32 tensor (2k,)."""

from __future__ import annotations

from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, Sparse


def pack(ops: Ops, entries: Sparse, k: int) -> Array:
    """(2k,) int32. Missing entries are padded with index n, which `Ops.scatter_sum` drops, and value 0."""
    indices = ops.pad(ops.as_int32(entries.indices), k, entries.size)
    return ops.concat([indices, ops.bits(ops.pad(entries.values, k, 0))])


def unpack(ops: Ops, packed: Array, k: int, num_blocks: int) -> list[tuple[Array, Array]]:
    """The (indices, values) blocks of `num_blocks` packed tensors that arrived one after the other."""
    starts = range(0, 2 * k * num_blocks, 2 * k)
    return [(packed[s : s + k], ops.floats(packed[s + k : s + 2 * k])) for s in starts]
