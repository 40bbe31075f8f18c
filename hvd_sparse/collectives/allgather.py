"""Everybody receives everybody's entries."""

from __future__ import annotations

from hvd_sparse import wire
from hvd_sparse.collectives.requests import AllGather
from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, Program, Reduced, Sparse, Spec, World


class AllGatherSum:
    """One allgather of k packed entries per rank, summed in rank order.

    Traffic: 2k(P-1) words per rank and step, one collective of constant shape.
    Choose it for few ranks: one round, nothing is rejected. Avoid it when density > 1 / P: dense is then smaller.

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

    def reduce(self, ops: Ops, world: World, spec: Spec, x: Array, k: int, local: Sparse) -> Program[Reduced]:
        packed = yield AllGather(wire.pack(ops, local, k), tag=f"pairs.k{k}", same_length=True)
        blocks = wire.unpack(ops, packed, k, world.size)
        finite = ops.all_finite(ops.concat([values for _, values in blocks]))
        return Reduced(ops.scatter_sum(spec.size, blocks), used=local, finite=finite)
