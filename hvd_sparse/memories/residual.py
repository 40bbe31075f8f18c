"""Plain error feedback."""

from __future__ import annotations

from hvd_sparse.memories import Memory, remainder
from hvd_sparse.memories.none import NoMemory
from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, Reduced, State


class Residual:
    """Add what was not sent to the next gradient: sum_r x_r == total + sum_r residual_r, elementwise.

    Memory: one float32 per element. Choose it by default. With momentum below a density of 0.01, see `momentum`.

    Reference: F. Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; S. U. Stich et al., Sparsified
    SGD with Memory, NeurIPS 2018, arXiv:1809.07599. Here in gradient units: the learning rate comes after.

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> from hvd_sparse.types import Reduced, Sparse
        >>> ops, memory = NumpyOps(), Residual()
        >>> x, state = memory.compensate(ops, 1, np.float32([1, 2]), {"residual": np.float32([3, 0])})
        >>> sent = Reduced(np.float32([4, 0]), used=Sparse(np.array([0]), x[:1], 2), finite=True)
        >>> x, memory.update(ops, sent, state)["residual"]
        (array([4., 2.], dtype=float32), array([0., 2.], dtype=float32))
    """

    keys = ("residual",)
    accumulator = "residual"

    def compensate(
        self, ops: Ops, num_ranks: int, grad: Array, state: State, alpha: float = 1.0, out: State | None = None
    ) -> tuple[Array, State]:
        x = ops.add(state["residual"], grad, alpha, out=out and out["residual"])
        return x, {"residual": x}

    def update(self, ops: Ops, reduced: Reduced, state: State) -> State:
        return {"residual": remainder(ops, state["residual"], reduced)}

    def for_dense(self) -> Memory:
        return NoMemory()
