"""No compression."""

from __future__ import annotations

from hvd_sparse.collectives.requests import AllReduce
from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, Program, Reduced, Spec, State, World


class Dense:
    """One allreduce of the bucket.

    Traffic: 2n(P-1)/P words per rank and step, one collective.
    Choose it for small parameters, and where the network is not the bottleneck.

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.drivers.simulate import Simulator
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> from hvd_sparse.types import Spec, World
        >>> programs = [
        ...     Dense().reduce(NumpyOps(), World(r, 2), Spec("b", 2), np.float32([1, r]), 2, {}) for r in range(2)
        ... ]
        >>> Simulator(2).run(programs)[0][0].total
        array([2., 1.], dtype=float32)
    """

    exact = True
    selects = False

    def init(self, ops: Ops, spec: Spec, like: Array | None = None) -> State:
        return {}

    def reduce(
        self, ops: Ops, world: World, spec: Spec, x: Array, k: int, state: State
    ) -> Program[tuple[Reduced, State]]:
        total = yield AllReduce(x, tag="dense")
        finite = ops.all_finite(total)
        if world.gain != 1:
            total = ops.scale(total, world.gain, out=total)
        return Reduced(total, used=None, finite=finite), state
