"""A sparsifier and a collective: what to send, and how its sum travels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hvd_sparse.collectives import Collective
from hvd_sparse.ops.base import Ops
from hvd_sparse.schemes.dense import Dense
from hvd_sparse.sparsifiers import Sparsifier
from hvd_sparse.types import Array, Program, Reduced, Sparse, Spec, State, World


class SparseSum:
    """Select k coordinates, sum their values over ranks. With k >= n it is the dense scheme.

    So it is on a single host if the collective is `hierarchical`.

    Args:
        sparsifier: which coordinates.
        collective: how their sum travels.
        rescale: multiply the sum by n / k, which makes a blind selection without error feedback unbiased.

    Raises:
        ValueError: the collective needs shared indices and the sparsifier has none, or has quotas and the indices are
            shared, or `rescale` without `blind`.

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.collectives.allgather import AllGatherSum
        >>> from hvd_sparse.drivers.simulate import Simulator
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> from hvd_sparse.sparsifiers.topk import TopK
        >>> from hvd_sparse.types import Spec, World
        >>> scheme, ops, spec = SparseSum(TopK(), AllGatherSum()), NumpyOps(), Spec("b", 3)
        >>> inputs = [np.float32([5, 1, 0]), np.float32([1, 0, 7])]
        >>> programs = [scheme.reduce(ops, World(r, 2), spec, inputs[r], 1, {}) for r in range(2)]
        >>> Simulator(2).run(programs)[0][0].total
        array([5., 0., 7.], dtype=float32)
    """

    exact = True
    selects = True

    def __init__(self, sparsifier: Sparsifier, collective: Collective, rescale: bool = False) -> None:
        names = f"sparsifier={type(sparsifier).__name__}, collective={type(collective).__name__}"
        if collective.needs_shared_indices and not sparsifier.shared_indices:
            raise ValueError(
                f"This collective needs a sparsifier whose indices are equal on all ranks (random_block, for example), "
                f"or choose collective='allgather'. Received: {names}."
            )
        if collective.has_quotas and sparsifier.shared_indices:
            raise ValueError(
                f"This collective limits the entries of every part of the bucket and would drop most of a selection "
                f"that all ranks share: choose collective='shared_allreduce'. Received: {names}."
            )
        if rescale and not sparsifier.blind:
            raise ValueError(f"`rescale` is for selections that ignore the values. Received: {names}.")
        self.sparsifier = sparsifier
        self.collective = collective
        self.rescale = rescale
        self.groups = tuple(getattr(collective, "groups", ()))

    @property
    def conserves(self) -> bool:
        return bool(getattr(self.collective, "conserves", True))

    def init(self, ops: Ops, spec: Spec, like: Array | None = None) -> State:
        return self.sparsifier.init(ops, spec)

    def reduce(
        self, ops: Ops, world: World, spec: Spec, x: Array, k: int, state: State
    ) -> Program[tuple[Reduced, State]]:
        enter: Any = getattr(self.collective, "enter", None)
        one_host = enter and world.size > 1 and world.place("local")[1] == world.size
        if k >= spec.size or one_host:
            reduced, _ = yield from Dense().reduce(ops, world, spec, x, k, {})
            return reduced, state
        part = spec
        if enter:
            part, x, k = yield from enter(ops, world, spec, x, k)
        capacity: Any = getattr(self.sparsifier, "capacity", None)
        most = capacity(spec, k, world.size) if capacity else k
        serving: Any = getattr(self.collective, "serving", None)
        collective = serving(most, world.size) if serving else self.collective
        if collective.has_quotas and not enter:
            part = replace(spec, num_blocks=world.size)
        indices, state = yield from self.sparsifier.select(ops, world, part, x, k, state)
        values = ops.gather(x, indices)
        if self.sparsifier.blind or self.sparsifier.shared_indices:
            # Such a selection may miss this rank's NaN: send it in place of the values, so that all ranks see it.
            values = ops.where(ops.all_finite(x), values, values * float("nan"))
        if self.rescale:
            world = replace(world, gain=world.gain * spec.size / k)
        reduced = yield from collective.reduce(ops, world, spec, x, most, Sparse(indices, values, part.size))
        return reduced, state
