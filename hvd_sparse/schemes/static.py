"""Entries whose sum barely varies are applied from memory, and not sent (static filtering)."""

from __future__ import annotations

import math

from hvd_sparse.collectives.owner_reduce import OwnerReduce
from hvd_sparse.memories import remainder
from hvd_sparse.ops.base import Ops
from hvd_sparse.schemes.sparse import SparseSum
from hvd_sparse.sparsifiers.threshold import Threshold
from hvd_sparse.types import Array, Program, Reduced, Spec, State, World, check_count, check_density

_STATISTICS = ("mean", "variance", "waited", "observed")


class Static:
    """A sparse sum that leaves out entries of constant gradient; their known mean is applied in every step instead.

    An entry's gradient per step is what arrives of it divided by the steps that it waited. Its running mean and
    variance are equal on all ranks, so that they need no message. After 1 / `weight` arrivals it is static if the
    variance is small. Then every rank takes the mean off its gradient, and holds back the rest, which is what the mean
    got wrong, until the next refresh. There the rest may be selected like any other entry; if that makes the variance
    too large, the entry is static no longer. Nothing is lost.

    Traffic: that of the sparse sum, whose k entries are all others then.
    Memory: four float32 per element, and about as many passes over them in every step. Choose it to study the method,
    or where many entries have gradients of one sign and size. Avoid it elsewhere: sending what is large costs less.

    Args:
        scheme: the sparse sum. None: `threshold` and `owner_reduce`.
        variance: per step and rank, below which an entry is static, in squared units of the gradient. 0: none is.
        weight: of the latest arrival in mean and variance, in (0, 1].
        refresh_every: steps between those in which static entries may be selected.

    Raises:
        ValueError, TypeError: an argument is out of range.

    Reference: reconstructed from the abstract of K. Li et al., Distributed Deep Neural Network Training with Important
    Gradient Filtering, Delayed Update and Static Filtering, 2019, doi 10.1145/3377170.3377245, which drops gradients of
    very small variance. Ours: gradients per step instead of arrivals, since an entry that waited arrives as a sum; the
    mean is taken off what ranks keep, so that error feedback makes up for it; at a refresh k stays what it is.

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.drivers.simulate import run
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> from hvd_sparse.types import Spec, World
        >>> scheme, ops, spec = Static(variance=0.5, weight=1.0), NumpyOps(), Spec("b", 3)
        >>> state, x = scheme.init(ops, spec), np.float32([8, 2, 1])
        >>> for step in range(2):
        ...     reduced, state = run(scheme.reduce(ops, World(0, 1, step=step + 1), spec, x, 1, state))
        ...     print(reduced.total, reduced.kept)
        [8. 0. 0.] [0. 2. 1.]
        [8. 2. 0.] [0. 0. 1.]
    """

    exact = False
    selects = False

    def __init__(
        self,
        scheme: SparseSum | None = None,
        variance: float = 1e-8,
        weight: float = 0.25,
        refresh_every: int = 100,
    ) -> None:
        if scheme is not None and not isinstance(scheme, SparseSum):
            raise TypeError(f"`scheme` must be a SparseSum, or None. Received: scheme={scheme!r}.")
        if isinstance(variance, bool) or not isinstance(variance, (int, float)) or not 0 <= variance < math.inf:
            raise ValueError(f"`variance` must be a number, 0 or more. Received: variance={variance!r}.")
        self.scheme = scheme or SparseSum(Threshold(), OwnerReduce())
        self.variance = float(variance)
        self.weight = check_density(weight, "weight")
        self.refresh_every = check_count(refresh_every, "refresh_every")
        self.groups = self.scheme.groups

    @property
    def conserves(self) -> bool:
        return self.scheme.conserves

    def init(self, ops: Ops, spec: Spec, like: Array | None = None) -> State:
        statistics = {key: ops.zeros(spec.size, like) for key in _STATISTICS}
        return {**self.scheme.init(ops, spec, like), **statistics}

    def reduce(
        self, ops: Ops, world: World, spec: Spec, x: Array, k: int, state: State
    ) -> Program[tuple[Reduced, State]]:
        is_static = (state["variance"] < self.variance) & (state["observed"] >= math.ceil(1 / self.weight))
        static = ops.positions(is_static)
        mean = ops.gather(state["mean"], static)
        rest = ops.gather(x, static) - mean
        count = 0
        if k < spec.size:
            count = ops.cond(world.step % self.refresh_every == 0, lambda: 0, lambda: ops.length(static))
        held, left = static[:count], rest[:count]

        # The others go, and at a refresh the rest of these.
        sendable = ops.clear(ops.put(ops.scale(x, 1.0), static, rest), held)
        sendable = ops.where(ops.all_finite(x), sendable, sendable * float("nan"))  # what is held may not be finite
        inner = {key: value for key, value in state.items() if key not in _STATISTICS}
        reduced, inner = yield from self.scheme.reduce(ops, world, spec, sendable, k, inner)
        kept = ops.put(remainder(ops, sendable, reduced), held, left)

        # What was applied of an entry since it last arrived, per step and rank.
        scale = world.gain * world.size
        arrived = ops.positions(reduced.total != 0)
        expected = ops.put(ops.zeros(spec.size, x), static, mean)
        waited = state["waited"] + 1.0
        latest = ops.scale(ops.gather(reduced.total, arrived), 1.0 / scale) / ops.gather(waited, arrived)
        statistics = self._observed(ops, state, arrived, latest + ops.gather(expected, arrived))
        total = ops.put(reduced.total, static, ops.gather(reduced.total, static) + ops.scale(mean, scale))
        outcome = Reduced(total, None, reduced.finite, kept=kept)
        return outcome, {**inner, **statistics, "waited": ops.clear(waited, arrived)}

    def _observed(self, ops: Ops, state: State, arrived: Array, latest: Array) -> State:
        """Mean, variance and number of arrivals after these entries had these gradients."""
        before, spread = (ops.gather(state[key], arrived) for key in ("mean", "variance"))
        change = latest - before
        after = {
            "mean": before + self.weight * change,
            "variance": (1 - self.weight) * (spread + self.weight * change * change),
            "observed": ops.gather(state["observed"], arrived) + 1.0,
        }
        return {key: ops.put(state[key] + 0.0, arrived, value) for key, value in after.items()}
