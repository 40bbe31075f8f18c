"""No error feedback."""

from __future__ import annotations

from hvd_sparse.memories import Memory
from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, Reduced, State


class NoMemory:
    """Forget what was not sent.

    Choose it for dense exchanges, and for blind sparsifiers, which are then rescaled to be unbiased. Avoid it with
    top-k: small gradients never arrive.

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> NoMemory().compensate(NumpyOps(), 1, np.float32([1, 2]), {})
        (array([1., 2.], dtype=float32), {})
    """

    keys: tuple[str, ...] = ()
    accumulator = None

    def compensate(
        self, ops: Ops, num_ranks: int, grad: Array, state: State, alpha: float = 1.0, out: State | None = None
    ) -> tuple[Array, State]:
        if alpha == 1:
            return grad, state
        return ops.add(ops.zeros(ops.length(grad), grad), grad, alpha), state  # in float32: 16 bits would underflow

    def update(self, ops: Ops, reduced: Reduced, state: State) -> State:
        return state

    def for_dense(self) -> Memory:
        return self
