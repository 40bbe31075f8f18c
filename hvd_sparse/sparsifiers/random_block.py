"""One contiguous block at a pseudo-random place that all ranks agree on."""

from __future__ import annotations

import zlib
from typing import Any

from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, Program, Spec, State, World

_PRIME = 2**31 - 1  # products of two residues fit into 63 bits, in Python and in every tensor library


def draw(seed: int, name: str, step: Any) -> Any:
    """A pseudo-random number below 2^31 - 1 that follows from its arguments: an int, or a tensor if `step` is one."""
    mixed = (zlib.crc32(f"{seed}:{name}".encode()) + step * 1_640_531_527) % _PRIME
    mixed = (mixed * mixed + 69_621) % _PRIME
    mixed = (mixed * 48_271 + step) % _PRIME
    return mixed * mixed % _PRIME


def check_seed(seed: Any) -> int:
    """Return `seed` if it is an int, else raise a TypeError that names it."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"`seed` must be an int. Received: seed={seed!r}.")
    return seed


class RandomBlock:
    """k consecutive coordinates (wrapping around) from a start that is hashed from seed, bucket and step.

    Traffic: none of its own; with shared_allreduce 2k(P-1)/P words per rank and step, no indices, one collective.
    Choose it for the cheapest possible step at densities of 0.01 and more. Avoid it below: a coordinate waits
    1 / density steps on average, whatever its size.

    Args:
        seed: any int, equal on all ranks.

    Reference: N. Foroutan Eghlidi, M. Jaggi, Sparse Communication for Training Deep Networks, ICML 2020 workshop,
    arXiv:2009.09271. Ours: a counter-based start, so that a restart or a skipped step cannot part the ranks.

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.drivers.simulate import run
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> from hvd_sparse.types import Spec, World
        >>> indices, _ = run(RandomBlock().select(NumpyOps(), World(0, 1), Spec("b", 16), np.ones(16), 4, {}))
        >>> len(set(indices.tolist()))
        4
    """

    shared_indices = True
    blind = True

    def __init__(self, seed: int = 0) -> None:
        self.seed = check_seed(seed)

    def init(self, ops: Ops, spec: Spec) -> State:
        return {}

    def start(self, spec: Spec, step: Any) -> Any:
        """First coordinate of the block in exchange number `step`."""
        return draw(self.seed, spec.name, step) % spec.size

    def select(self, ops: Ops, world: World, spec: Spec, x: Array, k: int, state: State) -> Program[tuple[Any, State]]:
        return ops.wrapped_range(self.start(spec, world.step), k, spec.size, x), state
        yield  # a program that asks for nothing
