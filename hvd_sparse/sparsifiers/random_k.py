"""Coordinates at pseudo-random places, spread evenly, that all ranks agree on."""

from __future__ import annotations

from typing import Any

from hvd_sparse.ops.base import Ops
from hvd_sparse.sparsifiers.random_block import check_seed, draw
from hvd_sparse.types import Array, Program, Spec, State, World

_MASK = 2**31 - 1


class RandomK:
    """One coordinate of each of k runs of n / k elements, at places that are hashed from seed, bucket and step.

    Traffic: none of its own; with shared_allreduce 2k(P-1)/P words per rank and step, no indices, one collective.
    Choose it where every step should touch all layers of a bucket; `random_block`, which need not, costs less to
    compute. Avoid it below a density of 0.01: a coordinate waits 1 / density steps on average, whatever its size.

    Args:
        seed: any int, equal on all ranks.

    Raises:
        TypeError: `seed` is no int.

    Reference: N. Foroutan Eghlidi, M. Jaggi, Sparse Communication for Training Deep Networks, ICML 2020 workshop,
    arXiv:2009.09271. Ours: counter-based, and stratified instead of the beginning of a permutation. Indices are
    distinct and ascending without a sort or a search for collisions; the runs begin at another place every step, so
    that every coordinate is as likely as the others, k / n. Only that two of them come together is not quite as
    likely for neighbours as for others.

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.drivers.simulate import run
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> from hvd_sparse.types import Spec, World
        >>> indices, _ = run(RandomK().select(NumpyOps(), World(0, 1), Spec("b", 16), np.ones(16), 4, {}))
        >>> sorted(set(indices.tolist())) == indices.tolist(), len(indices)
        (True, 4)
    """

    shared_indices = True
    blind = True

    def __init__(self, seed: int = 0) -> None:
        self.seed = check_seed(seed)

    def init(self, ops: Ops, spec: Spec) -> State:
        return {}

    def select(self, ops: Ops, world: World, spec: Spec, x: Array, k: int, state: State) -> Program[tuple[Any, State]]:
        n, (length, num_longer) = spec.size, divmod(spec.size, k)
        # The first `num_longer` runs have an element more.
        runs = ops.as_int32(ops.wrapped_range(0, k, k, x))
        key = ops.integers([draw(self.seed, f"{spec.name}:places", world.step)], x)
        place = _hash(runs + key) % (length + ops.as_int32(runs < num_longer))
        places = runs * length + ops.minimum(runs, ops.integers([num_longer], x)) + place
        # All move on by the same distance; those that leave at the end come first.
        end = ops.integers([n - draw(self.seed, spec.name, world.step) % n], x)
        num_inside = ops.searchsorted(places, end)
        return (ops.gather(places, (runs + num_inside) % k) - end) % n, state
        yield  # a program that asks for nothing


def _hash(numbers: Array) -> Array:
    """31 pseudo-random bits of each int32. Products keep their lower 32 bits; all steps are permutations of 31."""
    numbers = numbers & _MASK
    for factor in (1_640_531_527, 1_103_515_245):
        numbers = (numbers ^ (numbers // 0x10000)) * factor & _MASK
    return numbers ^ (numbers // 0x8000)
