"""The largest relative changes, as some ranks see them, for all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hvd_sparse.collectives.requests import AllReduce, Broadcast
from hvd_sparse.ops.base import Ops
from hvd_sparse.sparsifiers.leader import as_known, check_index_carrier
from hvd_sparse.sparsifiers.random_block import RandomBlock
from hvd_sparse.types import Array, Program, Spec, State, World, check_count, check_fraction, check_positive

_TINY = 1e-12  # where all weights are zero


class Importance:
    """The k largest changes relative to the weights, as a few ranks drawn by a hash see them, for all ranks.

    Each of R ranks, the roots of the step, contributes its k / R entries of the largest |x| / |w|. With `random_share`
    some of the k are a block at a place that is drawn anew every step, so that no entry starves.

    Traffic per rank and step, with shared_allreduce: 4k(P-1)/P words in two collectives of constant shape. Where a
    broadcast carries the indices k + 2k(P-1)/P.
    Choose it in place of `leader` where layers differ in scale: small weights get their turn before large ones. Avoid
    it where many weights are zero or tend to zero: the smaller, the more important.

    Args:
        num_roots: R, at least 1; no more than P ranks and k entries count.
        eps: added to |w|, lest a zero weight beats every other. None: a thousandth of the root mean square of the
            bucket's weights.
        random_share: part of the k entries that are drawn whatever their importance, in [0, 1). All but one at most.
        index_carrier: as for `leader`: "allreduce", or "broadcast" (one root; not in a TensorFlow graph).
        seed: any int, equal on all ranks.

    Raises:
        ValueError, TypeError: an argument is out of range, or the caller does not tell the weights.

    Reference: reconstructed from the abstract of Z. Cheng, Z. Xu, Bandwidth Reduction using Importance Weighted Pruning
    on Ring AllReduce, 2019, arXiv:1901.01544. Ours: k entries in all, where the paper has a threshold per layer, which
    may select everything.

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.drivers.simulate import run
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> from hvd_sparse.types import Spec, World
        >>> x, w = np.float32([0.05, 0.02, 0.1, 0.001, -0.3]), np.float32([0.5, -0.01, 2, 0, 0.1])
        >>> world = World(0, 1, weights=lambda: w)
        >>> run(Importance(eps=1e-3).select(NumpyOps(), world, Spec("b", 5), x, 2, {}))[0]
        array([1, 4], dtype=int32)
    """

    shared_indices = True
    blind = False

    def __init__(
        self,
        num_roots: int = 1,
        eps: float | None = None,
        random_share: float = 0.0,
        index_carrier: str = "allreduce",
        seed: int = 0,
    ) -> None:
        self.num_roots = check_count(num_roots, "num_roots")
        self.eps = None if eps is None else check_positive(eps, "eps")
        self.random_share = check_fraction(random_share, "random_share")
        self.index_carrier = check_index_carrier(index_carrier)
        if index_carrier == "broadcast" and num_roots > 1:
            raise ValueError(
                f"`index_carrier` must be 'allreduce' for several roots: a broadcast has one. "
                f"Received: index_carrier='broadcast', num_roots={num_roots!r}."
            )
        self.seed = seed
        self._random = RandomBlock(seed)

    def init(self, ops: Ops, spec: Spec) -> State:
        return {}

    def select(self, ops: Ops, world: World, spec: Spec, x: Array, k: int, state: State) -> Program[tuple[Any, State]]:
        num_random = min(k - 1, round(self.random_share * k))
        num_roots = min(self.num_roots, world.size, k - num_random)
        num_each = (k - num_random) // num_roots
        root = self._random.start(replace(spec, name=f"{spec.name}.roots", size=world.size), world.step)
        place = (world.rank - root) % world.size  # the roots are `root` and the ranks behind it

        def most_important() -> Array:
            return ops.as_int32(ops.top_abs(self.scores(ops, world, x), num_each))

        nothing = ops.as_int32(ops.zeros(num_each, x))
        # A difference: where tensors are compared by identity, == would be False.
        rows = [ops.cond(abs(place - row) < 1, most_important, lambda: nothing) for row in range(num_roots)]
        if self.index_carrier == "broadcast":
            found = yield Broadcast(rows[0], as_known(root), tag=f"indices.k{k}")
        else:
            found = yield AllReduce(ops.concat(rows), tag=f"indices.k{k}")
        if num_roots > 1 or num_random:
            block = ops.wrapped_range(self._random.start(spec, world.step), num_random, spec.size, x)
            found = ops.distinct(ops.concat([found, ops.as_int32(block)]), spec.size)
        return found, state

    def scores(self, ops: Ops, world: World, x: Array) -> Array:
        """(n,) how much every entry would change its weight, relatively."""
        if world.weights is None:
            raise ValueError("`sparsifier` 'importance' needs the weights: give World(..., weights=lambda: array).")
        weights = world.weights()
        eps = self.eps
        if eps is None:
            eps = 1e-3 * (ops.norm_squared(weights) / ops.length(weights)) ** 0.5 + _TINY
        return abs(x) / (abs(weights) + eps)
