"""What is applied is one step late."""

from __future__ import annotations

from hvd_sparse import registry
from hvd_sparse.memories import Memory
from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, Reduced, State


class Delayed:
    """Another memory, whose sums the optimizer gets one step late, so that a whole step's computation may hide them.

    Step t starts its exchange and applies that of step t - 1; the first step applies zeros. On PyTorch a bucket's
    exchange is in flight from when its gradients are complete until they are again, and `optimizer.flush()` applies the
    last one: call it on all ranks at the end of training and before an evaluation. There `compression_state_dict()`
    waits for what is in flight, so that it is for all ranks at once, too. TensorFlow and the simulator do the same
    arithmetic and wait for every exchange: nothing is hidden there. Row-sparse gradients are refused on PyTorch, and
    not late on TensorFlow.

    Memory: that of the other, and one float32 per element. Choose it where an exchange takes less than a step, but
    more than what is left of backward. Avoid it with a large learning rate or momentum, which one step of staleness may
    upset, and where an exchange takes longer than a step.

    Nothing is lost: over all steps, what entered is what was applied, what is in flight, and the memory's rest.

    Args:
        memory: what becomes of entries that are not sent: a name or an object, as without delay.

    Raises:
        ValueError, TypeError: no such memory, or one that itself changes what the optimizer gets.

    Reference: reconstructed from the abstract of K. Li et al., Distributed Deep Neural Network Training with Important
    Gradient Filtering, Delayed Update and Static Filtering, 2019, doi 10.1145/3377170.3377245. Ours: an exchange is
    over before the next one of its bucket selects, so that entries which a collective rejects are not late.

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> memory, shared = Delayed(), {"late": np.float32([0, 0])}
        >>> for total in ([1, 2], [3, 4]):
        ...     reduced = Reduced(np.float32(total), used=None, finite=True)
        ...     given, shared = memory.follow(NumpyOps(), 1.0, reduced, shared)
        ...     print(given)
        [0. 0.]
        [1. 2.]
    """

    shared_keys = ("late",)

    def __init__(self, memory: str | Memory = "residual") -> None:
        self.memory: Memory = registry.create("memory", memory)
        if hasattr(self.memory, "shared_keys"):
            raise ValueError(
                f"`memory` must leave to the optimizer what the ranks sum: 'residual', 'momentum' or 'none'. "
                f"Received: memory={memory!r}."
            )

    @property
    def keys(self) -> tuple[str, ...]:
        """Those of the other memory, like the next."""
        return self.memory.keys

    @property
    def accumulator(self) -> str | None:
        """What `compensate` returns."""
        return self.memory.accumulator

    @property
    def momentum(self) -> float:
        """What the optimizer must not apply again."""
        return float(getattr(self.memory, "momentum", 0.0))

    def compensate(
        self, ops: Ops, num_ranks: int, grad: Array, state: State, alpha: float = 1.0, out: State | None = None
    ) -> tuple[Array, State]:
        return self.memory.compensate(ops, num_ranks, grad, state, alpha, out)

    def update(self, ops: Ops, reduced: Reduced, state: State) -> State:
        return self.memory.update(ops, reduced, state)

    def follow(self, ops: Ops, gain: float, reduced: Reduced, shared: State) -> tuple[Array, State]:
        # In units of plain sums, so that a loss scale may change. What is not finite must be seen at once.
        given = ops.where(reduced.finite, ops.scale(shared["late"], gain), reduced.total)
        return given, {"late": ops.scale(reduced.total, 1 / gain)}

    def for_dense(self) -> Memory:
        return Delayed(self.memory.for_dense())
