"""Exact top-k."""

from __future__ import annotations

from typing import Any

from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, Program, Spec, State, World, block_quota, listed

SCOPES = ("bucket", "parameter")


class TopK:
    """The k largest magnitudes of this rank's bucket, or of its blocks where the collective has quotas.

    Traffic: none of its own; with allgather 2k(P-1) words per rank and step.
    Choose it when buckets are small or exactness matters (tests, studies). Avoid it on large buckets on a CPU: an
    exact selection over ten million elements costs as much as twenty to forty additions; `threshold` costs two.

    Args:
        scope: among what magnitudes compete. "bucket": the parameters that travel together. "parameter": of each
            parameter of n_l elements k n_l / n, rounded down, but one at least; where that comes to more than k
            because there are many small parameters, the k largest of these go. For all of the model in one
            competition make it one bucket, `bucket_bytes=2**40` say: nothing is then sent before the whole gradient is
            there.

    Raises:
        ValueError: no such scope.

    Reference: A. F. Aji, K. Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017,
    arXiv:1704.05021. Scopes: N. Foroutan Eghlidi, M. Jaggi, Sparse Communication for Training Deep Networks, ICML 2020
    workshop, arXiv:2009.09271.

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.drivers.simulate import run
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> from hvd_sparse.types import Spec, World
        >>> x, spec = np.float32([1, -5, 4, 2]), Spec("b", 4, shapes=((1,), (3,)))
        >>> for scope in ("bucket", "parameter"):
        ...     run(TopK(scope).select(NumpyOps(), World(0, 1), spec, x, 2, {}))[0]
        array([1, 2])
        array([0, 1], dtype=int32)
    """

    shared_indices = False
    blind = False

    def __init__(self, scope: str = "bucket") -> None:
        if scope not in SCOPES:
            raise ValueError(f"`scope` must be one of {listed(SCOPES)}. Received: scope={scope!r}.")
        self.scope = scope

    def init(self, ops: Ops, spec: Spec) -> State:
        return {}

    def select(self, ops: Ops, world: World, spec: Spec, x: Array, k: int, state: State) -> Program[tuple[Any, State]]:
        if self.scope == "parameter":
            found = _top_of_parts(ops, spec, x, k)
            return (ops.largest(x, found, k) if spec.num_blocks == 1 else found), state  # or the quotas trim
        if spec.num_blocks == 1:
            return ops.top_abs(x, k), state
        return top_of_blocks(ops, x, spec.size, spec.num_blocks, k), state
        yield  # a program that asks for nothing


def top_of_blocks(ops: Ops, x: Array, n: int, num_blocks: int, k: int) -> Array:
    """The largest magnitudes of blocks of equal size, as many of each as its quota of k: see `block_quota`."""
    size, quota = block_quota(n, num_blocks, k)
    blocks = ops.reshape(ops.pad(x, size * num_blocks, 0), (num_blocks, size))
    places = ops.top_abs(blocks, quota)
    starts = ops.integers([block * size for block in range(num_blocks)], places)[:, None]
    indices = ops.reshape(places + starts, (-1,))
    return ops.gather(indices, ops.positions(indices < n))


def _top_of_parts(ops: Ops, spec: Spec, x: Array, k: int) -> Array:
    found, start = [], 0
    for size in spec.parts or (spec.size,):
        if size:
            places = ops.top_abs(x[start : start + size], max(1, k * size // spec.size))
            found.append(ops.as_int32(places) + start)
        start += size
    return ops.concat(found)
