"""Exact top-k."""

from __future__ import annotations

from typing import Any

from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, Program, Spec, State, World, block_quota


class TopK:
    """The k largest magnitudes of this rank's bucket, or of its blocks where the collective has quotas.

    Traffic: none of its own; with allgather 2k(P-1) words per rank and step.
    Choose it when buckets are small or exactness matters (tests, studies). Avoid it on large buckets on a CPU: an
    exact selection over ten million elements costs as much as twenty to forty additions; `threshold` costs two.

    Reference: A. F. Aji, K. Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017,
    arXiv:1704.05021. Here per bucket, not over the whole model.

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.drivers.simulate import run
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> from hvd_sparse.types import Spec, World
        >>> x = np.float32([1, -5, 2, 4])
        >>> run(TopK().select(NumpyOps(), World(0, 1), Spec("b", 4), x, 2, {}))[0]
        array([1, 3])
    """

    shared_indices = False
    blind = False

    def init(self, ops: Ops, spec: Spec) -> State:
        return {}

    def select(self, ops: Ops, world: World, spec: Spec, x: Array, k: int, state: State) -> Program[tuple[Any, State]]:
        if spec.num_blocks == 1:
            return ops.top_abs(x, k), state
        size, quota = block_quota(spec.size, spec.num_blocks, k)
        blocks = ops.reshape(ops.pad(x, size * spec.num_blocks, 0), (spec.num_blocks, size))
        places = ops.top_abs(blocks, quota)
        starts = ops.integers([block * size for block in range(spec.num_blocks)], places)[:, None]
        indices = ops.reshape(places + starts, (-1,))
        return ops.gather(indices, ops.positions(indices < spec.size)), state
        yield  # a program that asks for nothing
