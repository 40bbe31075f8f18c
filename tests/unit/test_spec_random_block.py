"""Check values of the random block."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
from helpers import E4, Ranks, assert_close, floats, frozen, total_words
from hypothesis import given
from hypothesis import strategies as st

from hvd_sparse.collectives.allgather import AllGatherSum
from hvd_sparse.collectives.shared_allreduce import SharedAllReduce
from hvd_sparse.drivers.simulate import run
from hvd_sparse.exchange import Exchange
from hvd_sparse.memories.none import NoMemory
from hvd_sparse.memories.residual import Residual
from hvd_sparse.ops.numpy import NumpyOps
from hvd_sparse.schemes.sparse import SparseSum
from hvd_sparse.sparsifiers.random_block import RandomBlock
from hvd_sparse.sparsifiers.topk import TopK
from hvd_sparse.types import Spec, World

SPEC = Spec("b", 16)
STARTS = {RandomBlock(seed).start(SPEC, 0): RandomBlock(seed) for seed in range(500)}


def selected(part: RandomBlock, backend, step: int = 0, spec: Spec = SPEC, k: int = 4) -> list[int]:
    x = backend.array(frozen(np.zeros(spec.size), np.float32))
    indices, state = run(part.select(backend.ops, World(0, 1, step), spec, x, k, {}))
    assert state == {}
    return backend.numpy(indices).tolist()


def test_block_wraps_around(backend):
    assert selected(STARTS[14], backend) == [14, 15, 0, 1]


@pytest.mark.parametrize("collective", [SharedAllReduce(), AllGatherSum()])
def test_e4(collective, backend):
    step = Ranks(Exchange(SPEC, SparseSum(STARTS[14], collective), Residual()), 4, backend).step(E4, 4)
    expected = np.zeros(16)
    expected[[0, 1, 14, 15]] = [17, -42, 20, 18]
    assert step.totals[0].tolist() == expected.tolist()
    assert [float(np.abs(kept).sum()) for kept in step.kept] == [103, 106, 95, 105]
    assert len(step.rounds) == 1
    assert total_words(step.rounds, 4) == (6 if isinstance(collective, SharedAllReduce) else 24)


@pytest.mark.parametrize("start", range(16))
@pytest.mark.parametrize("k", [1, 4, 15])
def test_every_start_gives_k_consecutive_indices(start, k, backend):
    indices = selected(STARTS[start], backend, k=k)
    assert indices == [(start + offset) % 16 for offset in range(k)]


def test_without_memory_it_is_unbiased(backend):
    """The mean over all starts of n / k times the block is x itself."""
    spec, starts = Spec("b", 4), {}
    for seed in range(100):
        starts.setdefault(RandomBlock(seed).start(spec, 0), RandomBlock(seed))
    schemes = [SparseSum(part, SharedAllReduce(), rescale=True) for part in starts.values()]
    assert len(schemes) == 4
    ranks = [Ranks(Exchange(spec, scheme, NoMemory()), 1, backend) for scheme in schemes]
    totals = [one.step([floats(1, 2, 3, 4)], 2).totals[0] for one in ranks]
    assert np.mean(totals, axis=0).tolist() == [1, 2, 3, 4]
    assert sorted(np.count_nonzero(total) for total in totals) == [2, 2, 2, 2]


class Subset:
    """A random-k that has drawn this subset."""

    shared_indices = True
    blind = True

    def __init__(self, subset: tuple[int, ...], backend) -> None:
        self.indices = backend.array(frozen(subset, np.int64))

    def init(self, ops, spec):
        return {}

    def select(self, ops, world, spec, x, k, state):
        return self.indices, state
        yield


def test_all_subsets_are_unbiased(backend):
    totals = []
    for subset in itertools.combinations(range(4), 2):
        scheme = SparseSum(Subset(subset, backend), SharedAllReduce(), rescale=True)
        step = Ranks(Exchange(Spec("b", 4), scheme, NoMemory()), 1, backend).step([floats(1, 2, 3, 4)], 2)
        totals.append(step.totals[0])
    assert np.mean(totals, axis=0).tolist() == [1, 2, 3, 4]


def test_with_memory_nothing_is_rescaled(backend):
    part = STARTS[3]
    step = Ranks(Exchange(SPEC, SparseSum(part, SharedAllReduce()), Residual()), 1, backend).step(E4[:1], 4)
    assert step.totals[0][3:7].tolist() == E4[0][3:7].tolist()


def test_rescaling_needs_a_blind_sparsifier():
    with pytest.raises(ValueError, match="TopK"):
        SparseSum(TopK(), AllGatherSum(), rescale=True)


@pytest.mark.parametrize("size", [16, 1000, 2**20])
def test_starts_need_no_history(size):
    """Ten thousand steps: equal for every instance, whatever was asked before, and after a copy."""
    spec, first, second = Spec("b7", size), RandomBlock(3), RandomBlock(3)
    starts = [first.start(spec, step) for step in range(10_000)]
    assert all(0 <= start < size for start in starts)
    assert [second.start(spec, step) for step in reversed(range(10_000))] == starts[::-1]
    assert copy.deepcopy(first).start(spec, 9_999) == starts[-1]


@pytest.mark.parametrize("seed", [0, 1])
def test_every_coordinate_is_hit_equally_often(seed):
    size, k, steps = 16, 4, 10_000
    starts = np.array([RandomBlock(seed).start(SPEC, step) for step in range(steps)])
    hits = np.bincount(((starts[:, None] + np.arange(k)) % size).ravel(), minlength=size)
    sigma = (steps * k / size * (1 - k / size)) ** 0.5
    assert np.abs(hits - steps * k / size).max() <= 3 * sigma


def test_successive_starts_are_unrelated():
    starts = np.array([RandomBlock(0).start(Spec("b", 2**20), step) for step in range(10_000)]) / 2**20
    assert abs(np.corrcoef(starts[:-1], starts[1:])[0, 1]) < 0.03
    assert len(set(starts)) > 9_900


@given(seed=st.integers(-(2**70), 2**70), step=st.integers(0, 2**40), size=st.integers(1, 2**31 - 1))
def test_any_seed_and_step(seed, step, size):
    assert 0 <= RandomBlock(seed).start(Spec("b", size), step) < size


def test_starts_depend_on_seed_bucket_and_step():
    def starts(seed: int, name: str, first: int) -> tuple[int, ...]:
        return tuple(RandomBlock(seed).start(Spec(name, 10**6), step) for step in range(first, first + 5))

    assert len({starts(0, "b0", 0), starts(1, "b0", 0), starts(0, "b1", 0), starts(0, "b0", 5)}) == 4


@pytest.mark.parametrize("seed", [True, 0.5, "1", None])
def test_seed_must_be_an_int(seed):
    with pytest.raises(TypeError, match="`seed` must be an int"):
        RandomBlock(seed)


def test_nothing_is_sent_to_choose(backend):
    ranks = Ranks(Exchange(SPEC, SparseSum(RandomBlock(), SharedAllReduce()), Residual()), 2, backend)
    assert [one.kind for one in ranks.step(E4[:2], 4).rounds] == ["AllReduce"]


# Top-k over the bucket, and layer by layer.


def test_global_and_layer_wise_top_k(backend):
    def top(x: np.ndarray, k: int) -> list[int]:
        program = TopK().select(backend.ops, World(0, 1), Spec("b", len(x)), backend.array(frozen(x)), k, {})
        return backend.numpy(run(program)[0]).tolist()

    assert top(E4[0], 4) == [7, 8, 12, 13]
    assert top(E4[0][:4], 1) == [0]
    assert [4 + index for index in top(E4[0][4:], 3)] == [8, 12, 13]


def test_starts_do_not_depend_on_the_library(backend):
    spec = Spec("bucket", 1000)
    oracle = NumpyOps().wrapped_range(RandomBlock().start(spec, 5), 300, 1000, np.zeros(1))
    assert_close(np.array(selected(RandomBlock(), backend, 5, spec, 300)), oracle, tolerance=0)
