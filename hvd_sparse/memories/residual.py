"""Plain error feedback."""

from __future__ import annotations

from hvd_sparse.memories import Memory, remainder
from hvd_sparse.memories.none import NoMemory
from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, Reduced, State


class Residual:
    """Add what was not sent to the next gradient: sum_r x_r == total + sum_r residual_r, elementwise.

    Memory: one float32 per element, two with `beta` < 1. Choose it by default. With momentum below a density of 0.01,
    see `momentum`.

    Args:
        beta: ScaleCom's low-pass filter, in (0, 1]: the residual becomes (1 - beta) residual + beta (x - sent). Below
            1 the sum above does not hold, by design: an entry that was sent leaves 1 - beta of its old residual
            behind, of one that was not only beta of the gradient is kept. Meant for large batches with scaled learning
            rates, with the sparsifier `leader`; about 0.1 there.

    Raises:
        ValueError: `beta` is out of range.

    Reference: F. Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; S. U. Stich et al., Sparsified
    SGD with Memory, NeurIPS 2018, arXiv:1809.07599. Here in gradient units: the learning rate comes after. The filter:
    C.-Y. Chen et al., ScaleCom, NeurIPS 2020, arXiv:2104.11125.

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

    accumulator = "residual"

    def __init__(self, beta: float = 1.0) -> None:
        if isinstance(beta, bool) or not isinstance(beta, (int, float)) or not 0 < beta <= 1:
            raise ValueError(f"`beta` must be in (0, 1]. Received: beta={beta!r}.")
        self.beta = float(beta)

    @property
    def keys(self) -> tuple[str, ...]:
        """With a filter the old residual, too: `update` needs it."""
        return ("residual",) if self.beta == 1 else ("residual", "before")

    def compensate(
        self, ops: Ops, num_ranks: int, grad: Array, state: State, alpha: float = 1.0, out: State | None = None
    ) -> tuple[Array, State]:
        x = ops.add(state["residual"], grad, alpha, out=out and out["residual"])
        if self.beta == 1:
            return x, {"residual": x}
        return x, {"residual": x, "before": ops.scale(state["residual"], 1.0, out=out and out["before"])}

    def update(self, ops: Ops, reduced: Reduced, state: State) -> State:
        rest = remainder(ops, state["residual"], reduced)
        if self.beta == 1:
            return {"residual": rest}
        filtered = ops.scale(rest, self.beta, out=state["residual"])
        return {
            "residual": ops.add(filtered, state["before"], 1 - self.beta, out=filtered),
            "before": state["before"],
        }

    def for_dense(self) -> Memory:
        return NoMemory()
