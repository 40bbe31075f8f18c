"""Everybody receives everybody's entries."""

from __future__ import annotations

from hvd_sparse.collectives.requests import AllGather
from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, Program, Reduced, Sparse, Spec, World
from hvd_sparse.wire import WireFormat, message, wire_format


class AllGatherSum:
    """One allgather of k packed entries per rank, summed in rank order.

    Traffic: 2k(P-1) words per rank and step, one collective of constant shape.
    Choose it for few ranks: one round, nothing is rejected. Avoid it when density > 1 / P: dense is then smaller.

    Args:
        wire: how entries are written, see `hvd_sparse.wire`: "fp32", "fp16", "compact".

    Reference: C. Renggli et al., SparCML, SC 2019, arXiv:1802.08021 (SSAR split-allgather is its larger sibling).

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.drivers.simulate import Simulator
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> from hvd_sparse.types import Sparse, Spec, World
        >>> x, ops, spec = np.float32([3, 0, 1]), NumpyOps(), Spec("b", 3)
        >>> programs = [
        ...     AllGatherSum().reduce(ops, World(r, 2), spec, x, 1, Sparse(np.array([r]), x[[r]], 3)) for r in range(2)
        ... ]
        >>> Simulator(2).run(programs)[0].total
        array([3., 0., 0.], dtype=float32)
    """

    needs_shared_indices = False
    has_quotas = False

    def __init__(self, wire: str | WireFormat = "fp32") -> None:
        self.wire = wire_format(wire)

    def reduce(self, ops: Ops, world: World, spec: Spec, x: Array, k: int, local: Sparse) -> Program[Reduced]:
        indices, values = message(ops, local, k)
        words, arriving = self.wire.pack(ops, spec.size, indices, values)
        everything = yield AllGather(words, tag=f"pairs.k{k}", same_length=True)
        places, sent = self.wire.unpack(ops, spec.size, k, everything)
        shares = sent * world.gain
        total = ops.scatter_sum(spec.size, [(places[rank], shares[rank]) for rank in range(world.size)])
        used, left = local, None
        if not self.wire.exact:
            went = arriving[0, : ops.length(local.values)]
            used, left = Sparse(local.indices, went, spec.size), local.values - went
        return Reduced(total, used, ops.all_finite(sent), left)
