"""Every matrix of a bucket as a product of two thin ones."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from hvd_sparse.collectives.requests import AllReduce
from hvd_sparse.ops.base import PRIME, Ops
from hvd_sparse.schemes.dense import Dense
from hvd_sparse.types import Array, Program, Reduced, Spec, State, World, check_count, check_fraction

_FRESH = 1e-6  # share of the first directions in those of every step: it matters only where nothing else is


class LowRank:
    """The sum of every matrix, projected onto `rank` directions that follow it from step to step.

    The rank is the setting: `density` changes nothing, except that 1.0 is dense. With a `tolerance` every matrix has as
    many directions as it needs, `rank` at most.

    Traffic: 2(P-1)/P rank (rows + columns) words per matrix, rank and step, in two collectives of constant shape for
    all matrices of a bucket. Parameters that would not become smaller go along whole. With a `tolerance` less, and a
    new shape, which Horovod negotiates, where a number of directions has changed: twice per `period` at most.
    Choose it for large matrices (transformers, fully connected and convolutional layers) where a hundredth of the
    gradient is still too much: nothing sends less. Avoid it for embeddings of which few rows are used, and where
    products of `rank` columns with every matrix cost more time than they save. Ranks compute the same directions from
    the same sums: they need the same library and kind of processor.

    Args:
        rank: columns of the two factors. 2 to 4 come close to dense accuracy; more for transformers.
        seed: of the first directions; any int, equal on all ranks.
        tolerance: share of what `rank` directions take, as a sum of squares, that the last of them may have and be left
            out, in [0, 1). What they do not take stays in the memory. 0: none is left out.
        period: steps from one with all directions, which tells how many are needed, to the next.

    Raises:
        ValueError, TypeError: an argument is out of range; or the bucket's `Spec` does not know its parameters' shapes.

    Reference: T. Vogels, S. P. Karimireddy, M. Jaggi, PowerSGD, NeurIPS 2019, arXiv:1905.13727. Ours: the second
    factor is made orthonormal, too, before the next step starts from it, and never stays zero; a convolution's
    kernel is cut into rows and columns where that sends least. A rank per layer that follows the gradient is an idea of
    B. Baker et al., Peering Beyond the Gradient Veil with Distributed Auto Differentiation (rank-dAD),
    arXiv:2102.09631; measured on the sum and between periods, so that ranks agree without a message, it is ours.

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.drivers.simulate import run
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> from hvd_sparse.types import Spec, World
        >>> ops, spec, scheme = NumpyOps(), Spec("b", 20, shapes=((4, 5),)), LowRank(rank=1)
        >>> x = np.outer([1, 2, 3, 4], [1, 0, 2, 0, 1]).astype(np.float32).reshape(-1)
        >>> reduced, _ = run(scheme.reduce(ops, World(0, 1), spec, x, 1, scheme.init(ops, spec)))
        >>> bool(np.abs(reduced.total - x).max() < 1e-5)
        True
    """

    exact = False
    selects = False

    def __init__(self, rank: int = 4, seed: int = 0, tolerance: float = 0.0, period: int = 50) -> None:
        self.rank = check_count(rank, "rank")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"`seed` must be an int. Received: seed={seed!r}.")
        self.seed = seed
        self.tolerance = check_fraction(tolerance, "tolerance")
        self.period = check_count(period, "period")

    @property
    def varying_words(self) -> bool:
        return self.tolerance > 0

    @property
    def varying_shapes(self) -> bool:
        return self.varying_words

    def init(self, ops: Ops, spec: Spec, like: Array | None = None) -> State:
        size = sum(math.prod(shape) for shape in spec.shapes)
        if size != spec.size:
            raise ValueError(
                f"`scheme` 'low_rank' needs the shapes of a bucket's parameters, as only gradients have them: choose "
                f"another one here. Received: {spec.name!r} with {spec.size} elements, of which {size} have a shape."
            )
        matrices, _ = _parts(spec, self.rank)
        if not matrices:
            return {}
        like = ops.zeros(0, like)
        counts = {self._counts: ops.integers([self.rank] * len(matrices), like)} if self.tolerance else {}
        return {self._key: self._first(ops, spec, like), **counts}

    def reduce(
        self, ops: Ops, world: World, spec: Spec, x: Array, k: int, state: State
    ) -> Program[tuple[Reduced, State]]:
        matrices, others = _parts(spec, self.rank)
        if k >= spec.size or not matrices:
            return (yield from Dense().reduce(ops, world, spec, x, k, state))
        own = [ops.reshape(x[one.start : one.stop], (one.rows, one.columns)) for one in matrices]

        every = [self.rank] * len(matrices)
        full, counts = world.step % self.period == 0, every
        if self.tolerance:
            known = state[self._counts]
            vector = ops.cond(full, lambda: ops.integers(every, known), lambda: known + 0)
            counts = [vector[number] for number in range(len(matrices))]

        # Where the sum's columns point. The parameters that are too small for factors go along.
        before = _cut(ops, state[self._key], [(self.rank, one.columns) for one in matrices])
        left = [matrix @ ops.transpose(rows[:count]) for matrix, rows, count in zip(own, before, counts)]
        sent = _joined(ops, [*left, *(x[one.start : one.stop] for one in others)])
        # A product may lose this rank's NaN: send it in place of everything, so that all ranks see it.
        sums = yield AllReduce(ops.where(ops.all_finite(x), sent, sent * float("nan")), tag="left")
        finite = ops.all_finite(sums)
        factors = [(one.rows, count) for one, count in zip(matrices, counts)]
        cut = _cut(ops, sums, factors + [(one.size,) for one in others])
        left, whole = [ops.orthonormal(columns) for columns in cut[: len(matrices)]], cut[len(matrices) :]

        # What the sum is in these directions.
        sent = _joined(ops, [ops.transpose(columns) @ matrix for columns, matrix in zip(left, own)])
        sums = yield AllReduce(sent, tag="right")
        finite = finite & ops.all_finite(sums)
        right = _cut(ops, sums, [(count, one.columns) for one, count in zip(matrices, counts)])

        # Every rank keeps what it has beyond its share of the approximation, which is the mean.
        products = {one.start: columns @ rows for one, columns, rows in zip(matrices, left, right)}
        shares = {start: ops.scale(product, 1.0 / world.size) for start, product in products.items()}
        total = _in_order(ops, products | {one.start: summed for one, summed in zip(others, whole)})
        share = _in_order(ops, shares | {one.start: x[one.start : one.stop] for one in others})
        reduced = Reduced(ops.scale(total, world.gain), None, finite, kept=ops.add(x, share, -1.0))

        # The next step starts from these rows. A little of the first ones brings back those that have become zero.
        rows = [ops.transpose(ops.orthonormal(ops.transpose(one))) for one in right]
        later = {}
        if self.tolerance:
            rows = [ops.concat([new, old[count:]]) for new, old, count in zip(rows, before, counts)]
            later[self._counts] = ops.cond(full, lambda: self._needed(ops, right), lambda: known + 0)
        return reduced, {self._key: ops.add(_joined(ops, rows), self._first(ops, spec, x), _FRESH), **later}

    def _needed(self, ops: Ops, right: Sequence[Array]) -> Array:
        """Of every matrix, how many of its directions take all but the `tolerance`. Strong ones come first in time."""
        counts = []
        for rows in right:
            flat, width = ops.reshape(rows, (-1,)), rows.shape[1]
            tails = [ops.norm_squared(flat[row * width :]) for row in range(self.rank)]
            needed = [ops.cond(tail > self.tolerance * tails[0], lambda: 1, lambda: 0) for tail in tails]
            counts.append(ops.clip(sum(needed), 1, self.rank))
        return ops.integers(counts, right[0])

    @property
    def _key(self) -> str:
        """With the rank in it: a saved state of another rank does not fit."""
        return f"rows{self.rank}"

    @property
    def _counts(self) -> str:
        return f"counts{self.rank}"

    def _first(self, ops: Ops, spec: Spec, like: Array) -> Array:
        """The rows of all matrices before the first step, one after the other: pseudo-random in [-1, 1)."""
        matrices, _ = _parts(spec, self.rank)
        count = self.rank * sum(one.columns for one in matrices)
        draw = random.Random(f"{self.seed}:{spec.name}")  # equal in every process and version
        numbers = ops.residues(count, [draw.randrange(1, PRIME) for _ in range(4)], like)
        return ops.add(ops.zeros(count, like), numbers, 2.0 / PRIME) - 1.0


@dataclass(frozen=True)
class _Part:
    """A parameter inside a bucket, as a matrix."""

    start: int
    rows: int
    columns: int

    @property
    def size(self) -> int:
        return self.rows * self.columns

    @property
    def stop(self) -> int:
        return self.start + self.size


def _parts(spec: Spec, rank: int) -> tuple[list[_Part], list[_Part]]:
    """The parameters of which two factors of that rank are smaller, and the others."""
    matrices: list[_Part] = []
    others: list[_Part] = []
    start = 0
    for shape in spec.shapes:
        cuts = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
        part = _Part(start, *min(cuts, key=sum, default=(1, math.prod(shape))))
        is_smaller = rank * (part.rows + part.columns) < part.size
        (matrices if is_smaller else others).append(part)
        start = part.stop
    return matrices, others


def _cut(ops: Ops, flat: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Arrays of these shapes, one after the other, from a vector."""
    edges = list(accumulate((math.prod(shape) for shape in shapes), initial=0))
    return [ops.reshape(flat[start:stop], shape) for shape, (start, stop) in zip(shapes, zip(edges, edges[1:]))]


def _joined(ops: Ops, arrays: Sequence[Array]) -> Array:
    return ops.concat([ops.reshape(array, (-1,)) for array in arrays])


def _in_order(ops: Ops, arrays: dict[int, Array]) -> Array:
    return _joined(ops, [arrays[start] for start in sorted(arrays)])
