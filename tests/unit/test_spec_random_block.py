"""Check values of the random block, of random-k and of the scopes of top-k."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
from helpers import E4, Ranks, assert_close, assert_conserved, assert_same_on_ranks, floats, frozen, total_words
from hypothesis import given
from hypothesis import strategies as st
from methods import SIZES, integers, normal

from hvd_sparse.buckets import Parameter, plan_buckets
from hvd_sparse.collectives.allgather import AllGatherSum
from hvd_sparse.collectives.hierarchical import Hierarchical
from hvd_sparse.collectives.owner_reduce import OwnerReduce
from hvd_sparse.collectives.shared_allreduce import SharedAllReduce
from hvd_sparse.config import sparse_config
from hvd_sparse.drivers.simulate import hosts, run
from hvd_sparse.exchange import Exchange
from hvd_sparse.memories.none import NoMemory
from hvd_sparse.memories.residual import Residual
from hvd_sparse.ops.numpy import NumpyOps
from hvd_sparse.schemes.sparse import SparseSum
from hvd_sparse.sparsifiers.random_block import RandomBlock
from hvd_sparse.sparsifiers.random_k import RandomK
from hvd_sparse.sparsifiers.topk import TopK
from hvd_sparse.types import Spec, World, cut_parts

SPEC = Spec("b", 16)
STARTS = {RandomBlock(seed).start(SPEC, 0): RandomBlock(seed) for seed in range(500)}


def selected(part: RandomBlock | RandomK, backend, step: int = 0, spec: Spec = SPEC, k: int = 4) -> list[int]:
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
@pytest.mark.parametrize("method", [RandomBlock, RandomK])
def test_seed_must_be_an_int(method, seed):
    with pytest.raises(TypeError, match="`seed` must be an int"):
        method(seed)


@pytest.mark.parametrize("method", [RandomBlock, RandomK])
def test_nothing_is_sent_to_choose(method, backend):
    ranks = Ranks(Exchange(SPEC, SparseSum(method(), SharedAllReduce()), Residual()), 2, backend)
    assert [one.kind for one in ranks.step(E4[:2], 4).rounds] == ["AllReduce"]


# Random-k


def drawn(n: int, k: int, step: int, seed: int = 0) -> np.ndarray:
    x = np.broadcast_to(np.float32(0), n)
    return run(RandomK(seed).select(NumpyOps(), World(0, 1, step), Spec("b", n), x, k, {}))[0]


@given(n=st.integers(2, 5000), step=st.integers(0, 2**40), seed=st.integers(-(2**70), 2**70), data=st.data())
def test_k_distinct_ascending_indices(n, step, seed, data):
    k = data.draw(st.integers(1, n - 1), "k")
    indices = drawn(n, k, step, seed)
    assert len(indices) == k
    assert (np.diff(indices) > 0).all()
    assert 0 <= indices[0] <= indices[-1] < n


@pytest.mark.parametrize("n", [2**24 + 3, 2**31 - 1])
def test_large_buckets(n):
    """Nothing overflows, and indices reach everywhere."""
    indices = np.concatenate([drawn(n, 1000, step) for step in range(20)]).astype(np.int64)
    assert indices.min() >= 0
    assert indices.max() < n
    assert np.histogram(indices, 10, (0, n))[0].min() > 1900


@pytest.mark.parametrize(("size", "k"), [(16, 4), (16, 11), (17, 5), (13, 1)])
@pytest.mark.parametrize("seed", [0, 1])
def test_random_k_hits_every_coordinate_equally_often(size, k, seed):
    steps = 4000
    hits = np.bincount(np.concatenate([drawn(size, k, step, seed) for step in range(steps)]), minlength=size)
    sigma = (steps * k / size * (1 - k / size)) ** 0.5
    assert np.abs(hits - steps * k / size).max() <= 3.5 * sigma


def test_random_k_is_unbiased_and_every_pair_comes():
    """x = [1, 2, 3, 4], k = 2: the mean of n / k times what is sent."""
    x, sums, pairs = floats(1, 2, 3, 4), np.zeros(4), set()
    scheme = SparseSum(RandomK(), SharedAllReduce(), rescale=True)
    ranks = Ranks(Exchange(Spec("b", 4), scheme, NoMemory()), 1)
    for _ in range(2000):
        total = ranks.step([x], 2).totals[0]
        pairs.add(tuple(np.flatnonzero(total)))
        assert np.all((total == 0) | (total == 2 * x))
        sums += total
    assert pairs == set(itertools.combinations(range(4), 2))
    assert_close(sums / 2000, x, 0.05)


def test_places_of_one_step_are_unrelated():
    """Inside their runs of 100 elements, which begin where the hash says."""
    indices = drawn(10**6, 10**4, 7)
    gaps = np.diff(indices) - 100
    assert abs(gaps.std() - 100 * 6**-0.5) < 1  # the difference of two uniform numbers
    assert len(np.unique(gaps)) > 190
    place = (indices - indices[0]) % 100
    assert abs(np.corrcoef(place[:-1], place[1:])[0, 1]) < 0.03


def test_random_k_depends_on_seed_bucket_and_step_and_needs_no_history(backend):
    spec = Spec("bucket", 1000)
    expected = [selected(RandomK(), backend, step, spec, 300) for step in range(3)]
    assert len(set(map(tuple, expected))) == 3
    assert [selected(RandomK(), backend, step, spec, 300) for step in (2, 1, 0)] == expected[::-1]
    assert selected(RandomK(1), backend, 0, spec, 300) != expected[0]
    assert selected(RandomK(), backend, 0, Spec("other", 1000), 300) != expected[0]
    x = np.zeros(1000, np.float32)
    oracle = run(RandomK().select(NumpyOps(), World(0, 1, 2), spec, x, 300, {}))[0]
    assert expected[2] == oracle.tolist()


def test_random_k_in_a_graph():
    """The step is a tensor; one trace, and the same indices as everywhere."""
    import tensorflow as tf

    from hvd_sparse.ops.tensorflow import TensorFlowOps

    spec, ops, traces = Spec("b", 2**31 - 2), TensorFlowOps(), []

    def select(step):
        traces.append(step)
        indices = run(RandomK(3).select(ops, World(0, 1, step), spec, tf.zeros([1]), 100, {}))[0]
        assert indices.shape.as_list() == [100]
        return indices

    traced = tf.function(select, autograph=False)
    for step in (0, 1, 12_345, 2**31 - 1, 2**31, 5 * 10**9):
        assert traced(tf.constant(step, tf.int64)).numpy().tolist() == drawn(spec.size, 100, step, 3).tolist()
    assert len(traces) == 1


@pytest.mark.parametrize("size", SIZES)
def test_random_k_conserves(size, backend):
    ranks = Ranks(Exchange(SPEC, SparseSum(RandomK(), SharedAllReduce()), Residual()), size, backend)
    for number in range(3):
        step = ranks.step(integers(number, size, 16), 4)
        assert_same_on_ranks(step.totals)
        assert_conserved(step.accumulated, step.totals[0], step.kept, 0)
        assert total_words(step.rounds, size) == 2 * 4 * (size - 1) / size


# Top-k over the bucket, and layer by layer.


def test_global_and_layer_wise_top_k(backend):
    def top(x: np.ndarray, k: int) -> list[int]:
        program = TopK().select(backend.ops, World(0, 1), Spec("b", len(x)), backend.array(frozen(x)), k, {})
        return backend.numpy(run(program)[0]).tolist()

    assert top(E4[0], 4) == [7, 8, 12, 13]
    assert top(E4[0][:4], 1) == [0]
    assert [4 + index for index in top(E4[0][4:], 3)] == [8, 12, 13]


def vectors_of(sizes):
    """The shapes of vectors."""
    return tuple((size,) for size in sizes)


def top(part: TopK, x: np.ndarray, k: int, parts: tuple[int, ...], backend) -> list[int]:
    program = part.select(
        backend.ops, World(0, 1), Spec("b", len(x), shapes=vectors_of(parts)), backend.array(frozen(x)), k, {}
    )
    return backend.numpy(run(program)[0]).tolist()


def test_top_k_of_every_parameter(backend):
    assert top(TopK(), E4[0], 4, (4, 12), backend) == [7, 8, 12, 13]
    assert top(TopK("parameter"), E4[0], 4, (4, 12), backend) == [0, 8, 12, 13]
    assert top(TopK("parameter"), E4[0], 4, (), backend) == [7, 8, 12, 13]
    assert top(TopK("parameter"), E4[0], 4, (0, 4, 0, 12, 0), backend) == [0, 8, 12, 13]


def test_every_parameter_sends_something_while_k_allows_it(backend):
    """Quotas 1, 1, 2 of at most 5: less than k. Quotas 1 each of 8 parts: the 3 largest of these."""
    assert top(TopK("parameter"), E4[0], 5, (3, 4, 9), backend) == [0, 3, 8, 12]
    best = [max(range(j, j + 2), key=lambda i: abs(E4[0][i])) for j in range(0, 16, 2)]
    expected = sorted(sorted(best, key=lambda i: -abs(E4[0][i]))[:3])
    assert top(TopK("parameter"), E4[0], 3, (2,) * 8, backend) == expected


@given(parts=st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(lambda parts: sum(parts) > 1), data=st.data())
def test_quotas_of_parameters(parts, data):
    n = sum(parts)
    k, x = data.draw(st.integers(1, n - 1), "k"), normal(n, 1, n)[0]
    program = TopK("parameter").select(NumpyOps(), World(0, 1), Spec("b", n, shapes=vectors_of(parts)), x, k, {})
    indices = run(program)[0]
    assert len(indices) <= k
    assert (np.diff(indices) > 0).all()
    edges = np.cumsum([0, *parts])
    quotas = [min(size, max(1, k * size // n)) for size in parts]
    for start, stop, quota in zip(edges, edges[1:], quotas):
        mine = indices[(indices >= start) & (indices < stop)]
        assert len(mine) == quota if sum(quotas) <= k else len(mine) <= quota
        rest = np.abs(np.delete(x[start:stop], mine - start))
        assert not len(mine) or len(mine) < quota or not len(rest) or np.abs(x[mine]).min() >= rest.max()


@pytest.mark.parametrize(
    "collective", [OwnerReduce(), Hierarchical(), AllGatherSum()], ids=lambda part: type(part).__name__
)
def test_scopes_with_every_collective(collective, backend):
    """The small layer, where magnitudes are a hundredth, sends as well."""
    spec = Spec("b", 1009, shapes=vectors_of((101, 0, 908)))
    scale = np.where(np.arange(1009) < 101, 0.01, 1)
    sent = {}
    for scope in ("bucket", "parameter"):
        ranks = Ranks(Exchange(spec, SparseSum(TopK(scope), collective), Residual()), 4, backend)
        ranks.groups = hosts(2, 2)
        step = ranks.step([frozen(grad * scale, np.float32) for grad in normal(0, 4)], 100)
        assert_same_on_ranks(step.totals)
        assert_conserved(step.accumulated, step.totals[0], step.kept)
        sent[scope] = np.count_nonzero(step.totals[0][:101])
    if isinstance(collective, AllGatherSum):
        assert sent["bucket"] == 0
        assert sent["parameter"] > 10


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 60), st.integers(0, 60))
def test_parts_of_a_part(parts, start, stop):
    names = np.repeat(np.arange(len(parts)), parts)[start : max(start, stop)]
    assert cut_parts(tuple(parts), start, max(start, stop)) == tuple(np.unique(names, return_counts=True)[1])


def test_buckets_know_their_parameters():
    shapes = [Parameter("a", (5, 2), "cpu"), Parameter("b", (4, 5), "cpu"), Parameter("c", (3, 10), "cpu")]
    assert [layout.spec.parts for layout in plan_buckets(shapes, 200, 0)] == [(30, 20), (10,)]


def test_the_whole_model_is_one_bucket():
    """`bucket_bytes=2**40`, as the docstring of TopK says."""
    config = sparse_config(sparsifier="topk", bucket_bytes=2**40)
    model = [Parameter(f"p{number}", (5_000, 1_000), "cpu") for number in range(20)]
    (layout,) = plan_buckets(model, config.bucket_bytes, config.min_size)
    assert layout.spec.size == 10**8
    assert "2**40" in TopK.__doc__


@pytest.mark.parametrize("scope", ["layer", None, 1])
def test_scope_must_be_known(scope):
    with pytest.raises(ValueError, match=r"`scope` must be one of 'bucket', 'parameter'. Received: scope="):
        TopK(scope)


def test_starts_do_not_depend_on_the_library(backend):
    spec = Spec("bucket", 1000)
    oracle = NumpyOps().wrapped_range(RandomBlock().start(spec, 5), 300, 1000, np.zeros(1))
    assert_close(np.array(selected(RandomBlock(), backend, 5, spec, 300)), oracle, tolerance=0)
