"""Error feedback with one momentum for all ranks (SGC)."""

from __future__ import annotations

from hvd_sparse.memories import Memory, remainder
from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, Reduced, State, check_fraction


class SGC:
    """Keep gradients that were not sent, and give the optimizer a momentum of the sums, which all ranks share.

    v = v + g on every rank, entries of v are sent, u = m u + total on all ranks alike, and u is what the optimizer
    applies. It must have no momentum of its own. (Row-sparse gradients, which travel as they are, have none then.)

    Memory: two float32 per element, one of which (u) is the same on all ranks. Choose it for very low densities (1e-4),
    where the private velocity of `momentum` would be stale when it is sent. Avoid it with Adam and its kin, which keep
    their own moments.

    On PyTorch, `with optimizer.local_weights():` around forward and backward takes gradients at w - lr v, as the paper
    does ("local update"); w itself is never touched.

    Args:
        momentum: m, that of the training, in [0, 1). 0 is plain error feedback.

    Raises:
        ValueError: `momentum` is out of range.

    Reference: reconstructed from the abstract of H. Sun et al., Sparse Gradient Compression for Distributed SGD, DASFAA
    2019, doi 10.1007/978-3-030-18579-4_9. The momentum that an entry misses while it waits is not made up for.

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> total, shared = np.float32([1, 0]), {"momentum": np.float32([2, 4])}
        >>> given, shared = SGC(0.5).follow(NumpyOps(), 1.0, Reduced(total, used=None, finite=True), shared)
        >>> given
        array([2., 2.], dtype=float32)
    """

    keys = ("residual",)
    accumulator = "residual"
    shared_keys = ("momentum",)

    def __init__(self, momentum: float = 0.9) -> None:
        self.momentum = check_fraction(momentum, "momentum")

    def compensate(
        self, ops: Ops, num_ranks: int, grad: Array, state: State, alpha: float = 1.0, out: State | None = None
    ) -> tuple[Array, State]:
        x = ops.add(state["residual"], grad, alpha, out=out and out["residual"])
        return x, {"residual": x}

    def update(self, ops: Ops, reduced: Reduced, state: State) -> State:
        return {"residual": remainder(ops, state["residual"], reduced)}

    def follow(self, ops: Ops, gain: float, reduced: Reduced, shared: State) -> tuple[Array, State]:
        # In units of plain sums, so that a loss scale may change.
        momentum = ops.blend(shared["momentum"], self.momentum, reduced.total, 1 / gain)
        return ops.scale(momentum, gain), {"momentum": momentum}

    def for_dense(self) -> Memory:
        return self
