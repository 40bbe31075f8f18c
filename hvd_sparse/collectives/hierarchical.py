"""Dense inside a host, sparse between hosts."""

from __future__ import annotations

from hvd_sparse.collectives.owner_reduce import OwnerReduce
from hvd_sparse.collectives.requests import AllGather, AllReduce
from hvd_sparse.memories import remainder
from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, Program, Reduced, Sparse, Spec, World, block_span, cut_parts
from hvd_sparse.wire import WireFormat


class Hierarchical:
    """A dense sum inside every host, of which each of its G ranks exchanges one part with the other N hosts, sparsely.

    Traffic per rank and step: 4(k/G)(N-1)/N words between hosts; inside them an allreduce of 2n(G-1)/G words and an
    allgather of n(G-1)/G. Four collectives of constant shape.
    Choose it for hosts of several ranks whose links inside are at least ten times as fast as those between them. Avoid
    it with one rank per host, where it is `owner_reduce`, and where hosts have different numbers of ranks (refused). On
    a single host it is a dense allreduce.

    The memory of a rank holds what its part of the host's sum has not sent yet. Horovod must have been initialised with
    `hvd.init(process_sets="dynamic")`.

    Args:
        wire: how entries are written, see `hvd_sparse.wire`: "fp32", "fp16", "compact".

    Reference: reconstructed from the abstract of C. Chen, M. Li, C. Yang, bbTopk, ICDCS 2023,
    doi 10.1109/ICDCS57875.2023.00015.

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.drivers.simulate import Simulator, hosts
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> from hvd_sparse.schemes.sparse import SparseSum
        >>> from hvd_sparse.sparsifiers.topk import TopK
        >>> from hvd_sparse.types import Spec
        >>> scheme, ops, spec = SparseSum(TopK(), Hierarchical()), NumpyOps(), Spec("b", 8)
        >>> simulator, x = Simulator(4, groups=hosts(2, 2)), np.float32([3, 0, 1, 0, 0, 2, 0, 1])
        >>> programs = [scheme.reduce(ops, simulator.world(rank), spec, x, 4, {}) for rank in range(4)]
        >>> simulator.run(programs)[0][0].total
        array([12.,  0.,  4.,  0.,  0.,  8.,  0.,  4.], dtype=float32)
    """

    needs_shared_indices = False
    has_quotas = True
    groups = ("local", "cross")

    def __init__(self, wire: str | WireFormat = "fp32") -> None:
        self.across = OwnerReduce(wire, group="cross")

    def enter(self, ops: Ops, world: World, spec: Spec, x: Array, k: int) -> Program[tuple[Spec, Array, int]]:
        """This rank's part of the host's sum, padded to the length of all parts, and how many of it to select."""
        rank, num_local = world.place("local")
        size = -(-spec.size // num_local)
        if num_local > 1:
            x = yield AllReduce(x, tag="host", group="local")
        start, stop = block_span(spec.size, size, rank)
        part = ops.pad(x[start:stop], size, 0)
        padded = (*spec.parts, size * num_local - spec.size) if spec.parts else ()
        shapes = tuple((length,) for length in cut_parts(padded, rank * size, (rank + 1) * size))
        return Spec(spec.name, size, spec.dtype, world.place("cross")[1], shapes), part, max(1, k // num_local)

    def reduce(self, ops: Ops, world: World, spec: Spec, x: Array, k: int, local: Sparse) -> Program[Reduced]:
        """`x`, `k` and `local` are those of the part; `spec` is the bucket's."""
        rank, num_local = world.place("local")
        part = Spec(spec.name, local.size, spec.dtype)
        reduced = yield from self.across.reduce(ops, world, part, x, k, local)
        if num_local == 1:
            return reduced
        total = yield AllGather(reduced.total, tag="parts", group="local", same_length=True)
        total = total[: spec.size]
        start, stop = block_span(spec.size, local.size, rank)
        stays = remainder(ops, x, reduced)[: stop - start]
        kept = ops.concat([ops.zeros(start, total), stays, ops.zeros(spec.size - stop, total)])
        applied = ops.above(total, 0.0)  # what of this rank is in it, only its host knows
        used = Sparse(applied, ops.gather(total, applied), spec.size)
        return Reduced(total, used, ops.all_finite(total), kept=kept)
