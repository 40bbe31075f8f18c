"""The whole exchange of one bucket. `sparse` composes a sparsifier and a collective; others stand alone."""

from __future__ import annotations

from typing import Protocol

from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, Program, Reduced, Spec, State, World


class Scheme(Protocol):
    """Turns every rank's accumulator into a sum that is bit-equal on all ranks.

    Attributes:
        exact: what is sent and what is kept add up exactly where sums do, as those of small integers. False: its own
            arithmetic rounds.
        selects: at most k entries of x are used, if not all. False: k does not say how much goes.

    Further ones, where a scheme differs from the others:
        conserves: False if what ranks keep and the total do not add up to their accumulators, though all ranks speak.
        keeps_cancelled: True if entries whose sum is 0 stay with their ranks.
        periodic_tags: rounds that only some steps have.
        varying_words: True if traffic follows the data.
        varying_shapes: True if even the shapes of messages do, which Horovod then negotiates anew.
    """

    exact: bool
    selects: bool

    def init(self, ops: Ops, spec: Spec, like: Array | None = None) -> State:
        """State before the first step, on the device of `like`: numbers, and arrays whatever the number of ranks."""

    def reduce(
        self, ops: Ops, world: World, spec: Spec, x: Array, k: int, state: State
    ) -> Program[tuple[Reduced, State]]:
        """Exchange about k of the n entries of x; the result and the next state."""
