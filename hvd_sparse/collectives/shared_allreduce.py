"""Values at shared indices through a plain allreduce."""

from __future__ import annotations

from hvd_sparse.collectives.requests import AllReduce
from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, Program, Reduced, Sparse, Spec, World


class SharedAllReduce:
    """One allreduce of k values; the indices are known to everybody.

    Traffic: 2k(P-1)/P words per rank and step, one collective of constant shape: where less than k is selected, the
    values are padded.
    Choose it with every sparsifier whose indices are shared. It is refused with the others.

    Reference: the reducer of Foroutan Eghlidi and Jaggi, arXiv:2009.09271, and AR-Topk, Tyagi and Swany,
    arXiv:2312.02493.

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.drivers.simulate import Simulator
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> from hvd_sparse.types import Sparse, Spec, World
        >>> x, ops, spec = np.float32([3, 0, 1]), NumpyOps(), Spec("b", 3)
        >>> local = Sparse(np.array([0]), x[:1], 3)
        >>> programs = [SharedAllReduce().reduce(ops, World(r, 2), spec, x, 1, local) for r in range(2)]
        >>> Simulator(2).run(programs)[0].total
        array([6., 0., 0.], dtype=float32)
    """

    needs_shared_indices = True
    has_quotas = False

    def reduce(self, ops: Ops, world: World, spec: Spec, x: Array, k: int, local: Sparse) -> Program[Reduced]:
        sums = yield AllReduce(ops.pad(local.values, k, 0), tag=f"values.k{k}")
        sums = sums[: ops.length(local.indices)]
        total = ops.scatter_sum(spec.size, [(local.indices, sums * world.gain)])
        return Reduced(total, used=local, finite=ops.all_finite(sums))
