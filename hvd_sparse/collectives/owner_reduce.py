"""Every rank owns a block of the bucket, and sums what the others have there."""

from __future__ import annotations

import functools
import logging
from typing import Any

from hvd_sparse.collectives.requests import AllGather, AllToAll
from hvd_sparse.ops.base import Ops
from hvd_sparse.sparsifiers.threshold import at_least
from hvd_sparse.types import Array, Program, Reduced, Sparse, Spec, World, block_quota, block_span
from hvd_sparse.wire import WireFormat, message, wire_format

_log = logging.getLogger("hvd_sparse")


class OwnerReduce:
    """Entries go to the rank that owns their block, and the k / P largest sums of every block to everybody.

    Of each block a rank sends its largest entries, as many as the quota k / P. The owner adds its own values wherever
    anything arrived, and returns the quota's largest sums. What did not come through stays with the rank that has it.

    Traffic: 4k(P-1)/P words per rank and step, two collectives of constant shape. The default.
    Choose it for three ranks and more: its volume does not grow with them. Avoid it on two ranks (`allgather` sends as
    much in one round), and where the gradient's mass is in few of the blocks, whose quotas then bind.

    Args:
        wire: how entries are written, see `hvd_sparse.wire`: "fp32", "fp16", "compact".
        group: the ranks that take part.

    Reference: M. Zhao et al., SparDL, ICDE 2024, arXiv:2304.00737 (quotas per block). Ours: two rounds instead of
    log2 P, one threshold for all blocks, and the owner's own values beside its own selection.

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.drivers.simulate import Simulator
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> from hvd_sparse.types import Sparse, Spec, World
        >>> ops, spec, x = NumpyOps(), Spec("b", 4), np.float32([3, 0, 1, 2])
        >>> local = Sparse(np.array([0, 3]), x[[0, 3]], 4)
        >>> programs = [OwnerReduce().reduce(ops, World(rank, 2), spec, x, 2, local) for rank in range(2)]
        >>> Simulator(2).run(programs)[0].total
        array([6., 0., 0., 4.], dtype=float32)
    """

    needs_shared_indices = False
    has_quotas = True

    def __init__(self, wire: str | WireFormat = "fp32", group: str = "global") -> None:
        self.wire = wire_format(wire)
        self.group = group

    def reduce(self, ops: Ops, world: World, spec: Spec, x: Array, k: int, local: Sparse) -> Program[Reduced]:
        n, (rank, num_ranks) = spec.size, world.place(self.group)
        size, quota = block_quota(n, num_ranks, k)
        if k < num_ranks:
            _say(f"Bucket {spec.name}: one entry per rank ({num_ranks}) is sent, though the density asks for {k}.")
        start, stop = block_span(n, size, rank)
        flat, others = (num_ranks * quota,), [r for r in range(num_ranks) if r != rank]

        # Everybody's entries go to the owners.
        indices, sent = ops.blocks(local.indices, local.values, num_ranks, size, quota)
        words, arriving = self.wire.pack(ops, size, indices, sent)
        received, _ = yield AllToAll(words, (1,) * num_ranks, tag=f"entries.k{k}", group=self.group)
        theirs, values = self.wire.unpack(ops, size, quota, received)

        # The owner adds its own values, and keeps the largest sums.
        sums = x[start:stop]
        if others:
            sums = ops.scatter_sum(size, [(theirs[r], values[r]) for r in others], onto=sums)[: stop - start]
        arrived = ops.distinct(ops.concat([indices[rank], *(theirs[r] for r in others)]), size)
        largest = _largest(ops, sums, arrived, sent[rank], quota)
        final, kept = message(ops, Sparse(largest, ops.gather(sums, largest), size), quota)
        words, told = self.wire.pack(ops, size, final, kept)

        # Everybody gets the sums.
        everything = yield AllGather(words, tag=f"sums.k{k}", group=self.group, same_length=True)
        places, values = self.wire.unpack(ops, size, quota, everything)
        starts = ops.integers([r * size for r in range(num_ranks)], places)[:, None]
        in_bucket = ops.minimum(places + starts, ops.integers([n], places))  # padding, of value 0, may fall anywhere
        total = ops.scatter_sum(n, [(ops.reshape(in_bucket, flat), ops.reshape(values * world.gain, flat))])

        # Used is what has become part of a sum: of what was sent to others, and of the own block.
        def with_own(to_all: Array, own: Array) -> Array:
            to_all = ops.reshape(to_all, flat)
            return ops.concat([to_all[: rank * quota], ops.reshape(own, (quota,)), to_all[(rank + 1) * quota :]])

        mine = ops.reshape(with_own(indices, final), (num_ranks, quota))
        rows = ops.integers([r * (size + 1) for r in range(num_ranks)], places)[:, None]  # a place for padding in each
        is_final = ops.marks(num_ranks * (size + 1), ops.reshape(places + rows, flat))
        is_used = ops.gather(is_final, ops.reshape(mine + rows, flat)) & (ops.reshape(mine, flat) != size)
        taking = ops.positions(is_used)
        used = ops.gather(ops.reshape(mine + starts, flat), taking)
        went, left = ops.gather(x, used), None
        if not self.wire.exact:
            left = ops.gather(with_own(sent - arriving, kept - told), taking)
            went = went - left
        return Reduced(total, Sparse(used, went, n), ops.all_finite(values), left)


def _largest(ops: Ops, sums: Array, arrived: Array, own: Array, quota: int) -> Array:
    """The indices of the `quota` largest sums of a block.

    They are among those that arrived, unless these are so small that values which the owner did not select (none is
    larger than those that it did, `own`) compete with them. Where it selected nothing, nothing is known of the others.
    """
    limit = _kth_largest(ops, ops.gather(sums, arrived), quota)
    selected = ops.gather(own, ops.positions(own != 0))
    unknown = ops.zeros(1, own) + float("inf")
    least = ops.kth_largest(ops.concat([unknown, selected]), ops.clip(ops.length(selected), 0, quota) + 1)

    def with_all_others() -> Array:
        return ops.distinct(ops.concat([arrived, ops.as_int32(at_least(ops, sums, limit))]), sums.shape[0])

    return ops.largest(sums, ops.cond(limit >= least, lambda: arrived, with_all_others), quota)


def _kth_largest(ops: Ops, values: Array, k: int) -> Any:
    """The k-th largest magnitude, the smallest if there are fewer, 0 if there are none."""
    return ops.kth_largest(ops.concat([values, ops.zeros(1, values)]), ops.clip(ops.length(values), 1, k))


@functools.cache
def _say(text: str) -> None:
    _log.info("%s", text)
