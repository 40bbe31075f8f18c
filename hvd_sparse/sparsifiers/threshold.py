"""Top-k by a threshold that is estimated from a sample."""

from __future__ import annotations

from typing import Any

from hvd_sparse.ops.base import Ops
from hvd_sparse.sparsifiers.topk import TopK
from hvd_sparse.types import Array, Program, Spec, State, World, check_count, check_positive

_NUM_RUNS = 64  # parts of the bucket that are sampled with different phases
_LONG_STRIDE = 15
_BELOW = 1 - 1e-6  # so that elements equal to the limit are selected: often there are many, or only such
_LARGEST = 3.4028234e38  # of float32: an infinity is above it, whatever the estimate


class Threshold:
    """Every magnitude above an estimate of the k-th largest; the smallest of any surplus stay behind.

    The estimate is an order statistic of a strided sample; the count stays within [0.67 k, 1.33 k]. Below about 1.4
    times `min_hits` entries a sample would be as large as the bucket, and the selection is exact. The default
    sparsifier.

    Traffic: none of its own; with allgather 2k(P-1) words per rank and step.
    Choose it for every bucket that is not small: one pass over the data. Avoid it when the exact k largest are wanted.

    Args:
        min_hits: sampled elements expected above the threshold; 512 gives a standard error of 4 % of the count. Half
            of them has to do where the sample would be more than a fifteenth of the bucket.
        aim: the count aimed at, in units of k. A surplus is trimmed, which costs little; a deficit travels as padding.

    Raises:
        ValueError: an argument is not positive.

    Reference: Y. Lin et al., Deep Gradient Compression, ICLR 2018, arXiv:1712.01887, section 3 (sampled threshold).
    Ours: a sample whose phase changes, so that no column is favoured, needs no search for a better threshold. (Nor
    feedback from earlier counts: it oscillates where the tail is light, as that of normal data at a density of 0.001.)

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.drivers.simulate import run
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> from hvd_sparse.types import Spec, World
        >>> ops, part, spec = NumpyOps(), Threshold(), Spec("b", 100_000)
        >>> x = np.random.default_rng(0).normal(size=spec.size).astype(np.float32)
        >>> indices, state = run(part.select(ops, World(0, 1), spec, x, 1000, part.init(ops, spec)))
        >>> len(indices), 670 <= state["count"] <= 1330
        (1000, True)
    """

    shared_indices = False
    blind = False

    def __init__(self, min_hits: int = 512, aim: float = 1.1) -> None:
        self.min_hits = check_count(min_hits, "min_hits")
        self.aim = check_positive(aim, "aim")

    def init(self, ops: Ops, spec: Spec) -> State:
        return {"count": 0}

    def select(self, ops: Ops, world: World, spec: Spec, x: Array, k: int, state: State) -> Program[tuple[Any, State]]:
        wanted = self.aim * k
        stride = int(wanted / self.min_hits)
        if stride > 1:  # a sample of every second element costs as much as the rest; half the hits do as well
            stride = max(stride, min(_LONG_STRIDE, int(2 * wanted / self.min_hits)))
        stride |= 1  # an even one would meet the same columns of every row
        length = (spec.size // stride - 1) // _NUM_RUNS  # of a run; the shifts may cost one
        if stride == 1 or length < 1:
            selected, _ = yield from TopK().select(ops, world, spec, x, k, {})
            return selected, {"count": k}
        num_sampled = length * _NUM_RUNS
        expected = max(1, min(num_sampled, round(wanted * num_sampled / spec.size)))
        estimate = ops.kth_largest(_sample(ops, x, stride, length, world.step), expected)
        found = at_least(ops, x, estimate)
        kept = ops.largest(x, found, k) if spec.num_blocks == 1 else found  # which the quotas trim
        return kept, {"count": ops.length(found)}


def at_least(ops: Ops, x: Array, magnitude: Any) -> Array:
    """Ascending indices where |x| reaches `magnitude`, or is not finite."""
    return ops.above(x, ops.clip(magnitude * _BELOW, 0.0, _LARGEST))


def _sample(ops: Ops, x: Array, stride: int, length: int, step: Any) -> Array:
    """One of every `stride` elements, each run of `length` of them at another phase.

    With one phase, rows whose length shares a factor with the stride (768 and 3) would show the same columns only.
    """
    starts = [run * length * stride + run * 7919 % stride for run in range(_NUM_RUNS)]  # a prime: all phases, equally
    return ops.runs(x, step % stride, starts, length, stride)
