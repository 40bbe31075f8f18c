"""Error feedback: what is kept of the gradient entries that were not sent. One file per method."""

from __future__ import annotations

from typing import Protocol

from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, Reduced, State


class Memory(Protocol):
    """Works elementwise on state arrays of the gradient's shape, so a bucket can be fed parameter by parameter.

    One that gives the optimizer something else than the total also has `shared_keys`, names of further arrays (n,) that
    are equal on all ranks, and a method `follow(ops, gain, reduced, shared)`: what the optimizer gets, not finite where
    `reduced` is not, and the next of these arrays. Totals carry `gain`. See `sgc`.
    """

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the state arrays."""

    @property
    def accumulator(self) -> str | None:
        """The key whose array is what `compensate` returns as x; None if x is no state."""

    def compensate(
        self, ops: Ops, num_ranks: int, grad: Array, state: State, alpha: float = 1.0, out: State | None = None
    ) -> tuple[Array, State]:
        """The accumulator x (n,) for `alpha * grad` (n,), and the next state. `state` itself is left alone.

        `out` holds arrays like the state's that may be overwritten with the next state.
        """

    def update(self, ops: Ops, reduced: Reduced, state: State) -> State:
        """The state after `reduced.used` went out. May reuse the arrays of `state`."""

    def for_dense(self) -> Memory:
        """The memory for a bucket that is always sent whole."""


def remainder(ops: Ops, x: Array, reduced: Reduced) -> Array:
    """What stays of the accumulator x (n,). May reuse its memory."""
    if reduced.kept is not None:
        return reduced.kept
    if reduced.used is None:
        return ops.zeros(ops.length(x), x)
    if reduced.left is None:
        return ops.clear(x, reduced.used.indices)
    return ops.put(x, reduced.used.indices, reduced.left)
