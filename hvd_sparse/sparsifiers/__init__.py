"""Which coordinates of a bucket are exchanged. One file per method; the file's name is its name in the registry."""

from __future__ import annotations

from typing import Any, Protocol

from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, Program, Spec, State, World


class Sparsifier(Protocol):
    """Selects coordinates.

    One that may select more than k has a method `capacity(spec, k, num_ranks)` that says how many at most; those that
    share indices may have `entry_bytes`, what an entry takes with its share of the index (8 unless said), for
    predictions. See `exclusive`.

    Attributes:
        shared_indices: all ranks select the same coordinates, so their values can go through a plain allreduce.
        blind: the selection ignores the values. Without error feedback it is then rescaled by n / k (unbiased).
    """

    shared_indices: bool
    blind: bool

    def init(self, ops: Ops, spec: Spec) -> State:
        """State before the first step: floats or 0-d arrays."""

    def select(self, ops: Ops, world: World, spec: Spec, x: Array, k: int, state: State) -> Program[tuple[Any, State]]:
        """At most k unique indices into x (n,), or `capacity` of them, and the next state. May communicate.

        `spec.num_blocks` tells of quotas. A selection that does not care for them is trimmed to them.
        """
