"""The whole exchange of one bucket. `sparse` composes a sparsifier and a collective; others stand alone."""

from __future__ import annotations

from typing import Protocol

from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, Program, Reduced, Spec, State, World


class Scheme(Protocol):
    """Turns every rank's accumulator into a sum that is bit-equal on all ranks."""

    def init(self, ops: Ops, spec: Spec) -> State:
        """State before the first step."""

    def reduce(
        self, ops: Ops, world: World, spec: Spec, x: Array, k: int, state: State
    ) -> Program[tuple[Reduced, State]]:
        """Exchange about k of the n entries of x; the result and the next state."""
