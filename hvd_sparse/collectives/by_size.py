"""One round for few entries, two for many."""

from __future__ import annotations

from hvd_sparse.collectives import Collective
from hvd_sparse.collectives.allgather import AllGatherSum
from hvd_sparse.collectives.owner_reduce import OwnerReduce
from hvd_sparse.ops.base import Ops
from hvd_sparse.planner.cost import is_short
from hvd_sparse.types import Array, Program, Reduced, Sparse, Spec, World
from hvd_sparse.wire import WireFormat, wire_format


class BySize:
    """`allgather` where it sends hardly more than `owner_reduce`, which takes a round more; else that.

    Traffic: 4k(P-1)/P words per rank and step in two collectives; or 2k(P-1) in one, if that is at most 128 KiB more:
    on two ranks always. What `Compression.adaptive` uses, whose sparsest rungs are such short messages.
    Choose it for every number of ranks. Avoid it below 1 Gbit/s if densities are around 0.01 and fixed: there a
    round costs less than its 128 KiB.

    Args:
        wire: how entries are written, see `hvd_sparse.wire`: "fp32", "fp16", "compact".

    Reference: ours; of what it chooses from, see there.

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.drivers.simulate import Simulator
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> from hvd_sparse.types import Sparse, Spec, World
        >>> ops, spec, x, simulator = NumpyOps(), Spec("b", 4), np.float32([3, 0, 1, 2]), Simulator(2)
        >>> local = Sparse(np.array([0, 3]), x[[0, 3]], 4)
        >>> programs = [BySize().reduce(ops, World(rank, 2), spec, x, 2, local) for rank in range(2)]
        >>> simulator.run(programs)[0].total, len(simulator.rounds)
        (array([6., 0., 0., 4.], dtype=float32), 1)
    """

    needs_shared_indices = False
    has_quotas = True

    def __init__(self, wire: str | WireFormat = "fp32") -> None:
        self.wire = wire_format(wire)

    def serving(self, k: int, num_ranks: int) -> Collective:
        """The one of the two that sums k entries."""
        short = is_short(k, num_ranks, getattr(self.wire, "entry_bytes", 8))
        return AllGatherSum(self.wire) if short else OwnerReduce(self.wire)

    def reduce(self, ops: Ops, world: World, spec: Spec, x: Array, k: int, local: Sparse) -> Program[Reduced]:
        return (yield from self.serving(k, world.size).reduce(ops, world, spec, x, k, local))
