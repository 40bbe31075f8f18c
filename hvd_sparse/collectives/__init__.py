"""How sparse sums travel. One file per method; `requests.py` holds what they may ask of the network."""

from __future__ import annotations

from typing import Protocol

from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, Program, Reduced, Sparse, Spec, World


class Collective(Protocol):
    """Sums over ranks what every rank selected.

    One that first changes what is selected from, over the groups of ranks named in `groups`, also has a program
    `enter(ops, world, spec, x, k)` that returns spec, x and k for the selection. See `hierarchical`. One that stands
    for several has `serving(k, num_ranks)`, which returns the one that sums k entries. See `by_size`. One that loses
    something says `conserves = False`, and one with requests that Horovod never caches `keeps_cache = False`.

    Attributes:
        needs_shared_indices: works only if all ranks select the same coordinates.
        has_quotas: takes only so many entries of every part of the bucket, so that a selection must be spread over it.
    """

    needs_shared_indices: bool
    has_quotas: bool

    def reduce(self, ops: Ops, world: World, spec: Spec, x: Array, k: int, local: Sparse) -> Program[Reduced]:
        """`local`: at most k preselected entries of the accumulator `x` (n,)."""
