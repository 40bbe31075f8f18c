"""Check values of exclusive slices: MiCRO and ExDyna."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import BACK_ENDS, E4, Ranks, assert_conserved, assert_same_on_ranks, frozen, short_repr, total_words
from hypothesis import given
from hypothesis import strategies as st
from methods import SIZES, constant, integers, normal

from hvd_sparse.collectives.allgather import AllGatherSum
from hvd_sparse.collectives.shared_allreduce import SharedAllReduce
from hvd_sparse.config import adaptive_config
from hvd_sparse.drivers.simulate import Simulator
from hvd_sparse.exchange import Exchange
from hvd_sparse.memories.residual import Residual
from hvd_sparse.ops.numpy import NumpyOps
from hvd_sparse.schemes.dense import Dense
from hvd_sparse.schemes.sparse import SparseSum
from hvd_sparse.sparsifiers import exclusive
from hvd_sparse.sparsifiers.exclusive import Exclusive, steered
from hvd_sparse.sparsifiers.slices import bounds, dealt_slice, equal_blocks, rebalance, unit_of
from hvd_sparse.types import Spec, World

KINDS = {
    "interleaved": Exclusive(),
    "contiguous": Exclusive(layout="contiguous"),
    "exdyna": Exclusive("exdyna", "contiguous", num_blocks=16),
}
every_kind = pytest.mark.parametrize("part", KINDS.values(), ids=KINDS.keys())


def ranks_of(part: Exclusive, size: int, n: int, backend=None, collective=None) -> Ranks:
    return Ranks(Exchange(Spec("b", n), SparseSum(part, collective or SharedAllReduce()), Residual()), size, backend)


def nonzero(total: np.ndarray) -> dict[int, float]:
    return {int(index): float(total[index]) for index in np.flatnonzero(total)}


def with_threshold(ranks: Ranks, threshold: float, k: int) -> Ranks:
    for state in ranks.states:
        state["scheme"].update(threshold=threshold, k=k)
    return ranks


# The numbers on E4: contiguous slices of 4, a threshold of 14.


@pytest.mark.parametrize(
    ("number", "expected", "norms", "counts", "unpadded"),
    [
        (0, {0: 17, 6: -44, 7: 3, 8: -3, 12: 34}, [74, 89, 74, 78], [1, 2, 1, 1], (4, 7.5)),
        (1, {0: 17, 5: 2, 9: -5, 12: 34}, [102, 101, 83, 98], [1, 1, 1, 1], (3, 6)),
    ],
)
@pytest.mark.parametrize("part", [KINDS["contiguous"], KINDS["exdyna"]], ids=["micro", "exdyna"])
def test_e4(part, number, expected, norms, counts, unpadded, backend):
    ranks = with_threshold(ranks_of(part, 4, 16, backend), 14.0, 4)
    ranks.number = number
    step = ranks.step(E4, 4)
    indices = [backend.numpy(one.used.indices) for one in step.reduced]
    assert [one.tolist() for one in indices] == [list(expected)] * 4
    assert nonzero(step.totals[0]) == expected
    assert [float(np.abs(kept).sum()) for kept in step.kept] == norms
    assert_same_on_ranks(step.totals)
    assert_conserved(step.accumulated, step.totals[0], step.kept, 0)
    # A word per rank for the threshold, two indices per rank, and eight values.
    assert [one.shape for one in step.rounds] == [(3,), (8,)]
    assert total_words(step.rounds, 4) == 3 + 6 + 12
    found = np.histogram(indices[0], [0, 4, 8, 12, 16])[0]
    assert found.tolist() == counts
    assert (found.sum() - found.min(), 2 * found.sum() * 3 / 4) == unpadded


def test_e4_interleaved(backend):
    """n = 16 on 4 ranks: runs of 4 elements, the contiguous slices again."""
    step = with_threshold(ranks_of(KINDS["interleaved"], 4, 16, backend), 14.0, 4).step(E4, 4)
    assert nonzero(step.totals[0]) == {0: 17, 6: -44, 7: 3, 8: -3, 12: 34}


# The threshold


def test_the_threshold_follows_the_count():
    ops, threshold, seen = NumpyOps(), 1.0, []
    for ratio in (2.0, 1.05, 1.0, 0.95, 0.5):
        threshold = steered(ops, threshold, ratio)
        seen.append(threshold)
    assert seen == pytest.approx([1.005, 1.00625625, 1.00499843, 1.00374218, 0.99872347], abs=5e-9)


@pytest.mark.parametrize(
    ("ratio", "rate"), [(1.1001, 1.005), (1.1, 1.00125), (1.0001, 1.00125), (1, 0.99875), (0.91, 0.99875), (0.9, 0.995)]
)
def test_the_edges_of_the_band(ratio, rate, backend):
    assert float(steered(backend.ops, 2.0, ratio)) == 2 * rate


@every_kind
def test_the_first_threshold_is_of_the_rank_in_the_middle(part, backend):
    ranks = ranks_of(part, 3, 1009, backend)
    grads = [frozen(grad * scale) for grad, scale in zip(normal(0, 3), np.float32([1, 100, 10]))]
    step = ranks.step(grads, 100)
    middle = float(np.sort(np.abs(grads[2]))[-100])
    count = step.num_used(0)
    for state in ranks.states:
        found = float(ranks.numpy_state(state)["scheme"]["threshold"])
        assert found == pytest.approx(steered(NumpyOps(), middle, count / 100), rel=1e-7)
        assert int(ranks.numpy_state(state)["scheme"]["k"]) == 100


@every_kind
def test_it_begins_again_where_k_changes(part, quick_backend):
    ranks = ranks_of(part, 3, 1009, quick_backend)
    thresholds = []
    for number, k in enumerate((100, 100, 10, 10)):
        grads = normal(number, 3)
        step = ranks.step(grads, k)
        exact = sorted(float(np.sort(np.abs(x))[-k]) for x in step.accumulated)[1]
        thresholds.append((float(ranks.states[0]["scheme"]["threshold"]), exact))
    for number, is_exact in enumerate((True, False, True, False)):
        found, exact = thresholds[number]
        assert (abs(found / exact - 1) < 0.0051) is is_exact


@every_kind
def test_a_threshold_of_zero_is_dense_and_set_again(part, quick_backend):
    """While everything is zero a slice sends something all the same."""
    ranks = ranks_of(part, 3, 101, quick_backend)
    step = ranks.step(constant(0, 3, 101), 10)
    assert 1 <= step.num_used(0) <= 3
    assert not np.any(step.totals)
    assert float(ranks.states[0]["scheme"]["threshold"]) == 0
    ranks.step(normal(0, 3, 101), 10)
    assert float(ranks.states[0]["scheme"]["threshold"]) > 0


@every_kind
@pytest.mark.parametrize("size", SIZES)
def test_without_a_limit_a_tiny_threshold_is_dense(part, size, quick_backend, monkeypatch):
    monkeypatch.setattr(exclusive, "_SLACK", 100.0)
    ranks = with_threshold(ranks_of(part, size, 101, quick_backend), 1e-30, 50)
    dense = Ranks(Exchange(Spec("b", 101), Dense(), Residual()), size, quick_backend)
    grads = normal(3, size, 101)
    step = ranks.step(grads, 50)
    assert step.totals[0].tolist() == dense.step(grads, 101).totals[0].tolist()
    assert not np.any(step.kept)


@every_kind
def test_fewer_entries_than_ranks(part, quick_backend):
    """Each rank sends its slice's largest. The threshold does not run away because these are more than k."""
    ranks, (x,) = ranks_of(part, 4, 1024, quick_backend), normal(0, 1, 1024)
    for _ in range(12):
        step = ranks.step([x] * 4, 2)
        assert step.num_used(0) == 4
        assert float(ranks.states[0]["scheme"]["threshold"]) < np.abs(step.accumulated[0]).max()
    largest = [one[np.argmax(np.abs(one))] for one in np.split(step.accumulated[0], 4)]
    if part.layout == "contiguous":
        assert step.totals[0][step.totals[0] != 0].tolist() == [4 * value for value in largest]


# Slices


def slices_of(n: int, num_slices: int) -> list[list[int]]:
    """The indices of each, as the interleaved layout deals them."""
    ops, x, found = NumpyOps(), np.arange(n, dtype=np.float32), []
    for number in range(num_slices):
        values, length, indices_of = dealt_slice(ops, x, n, num_slices, number)
        indices = indices_of(np.arange(int(length)))
        assert values[:length].tolist() == indices.tolist()
        assert not values[length:].any()
        found.append(indices.tolist())
    return found


@given(n=st.integers(1, 3000), num_slices=st.integers(1, 17))
def test_dealt_slices_partition_the_bucket(n, num_slices):
    found = slices_of(n, num_slices)
    assert sorted(index for one in found for index in one) == list(range(n))
    lengths = [len(one) for one in found]
    assert max(lengths) - min(lengths) <= min(64, max(1, n // num_slices))


def test_runs_of_64_elements_are_dealt():
    assert slices_of(1000, 4)[1] == [*range(64, 128), *range(320, 384), *range(576, 640), *range(832, 896)]


@given(n=st.integers(1, 2**31 - 1), num_slices=st.integers(1, 300), num_blocks=st.integers(1, 2000))
def test_blocks_partition_the_bucket(n, num_slices, num_blocks):
    unit = unit_of(n, num_slices, num_blocks)
    if not unit:
        assert n < 32 * num_blocks or num_slices > num_blocks
        return
    blocks = equal_blocks(num_slices, num_blocks)
    assert sum(blocks) == num_blocks
    assert unit % 32 == 0
    edges = bounds(blocks, unit, n)
    assert (edges[0], edges[-1]) == (0, n)
    assert sorted(set(edges)) == edges


def test_the_remainder_belongs_to_the_last_slice_and_odd_blocks_to_the_first():
    assert equal_blocks(3, 16) == [6, 5, 5]
    assert unit_of(1024 * 100 + 7, 3, 1024) == 96
    assert bounds([6, 5, 5], 32, 600) == [0, 192, 352, 600]


@every_kind
@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_slice_is_searched_by_every_rank_once_in_p_steps(part, size):
    """Rank r has a spike nowhere else than where the others are zero: it is found when its turn comes."""
    n = 1009
    for index in (0, 500, 1008):
        for rank in range(size):
            grads = [np.zeros(n, np.float32) for _ in range(size)]
            grads[rank][index] = 7
            ranks, hits = ranks_of(part, size, n), 0
            for number in range(size):
                ranks.number = 2 * size + number  # what an empty slice sends lies elsewhere
                for state in ranks.states:
                    state["scheme"].update(threshold=7.0, k=20)
                    state["memory"]["residual"] = np.zeros(n, np.float32)
                hits += ranks.step([frozen(grad) for grad in grads], 20).totals[0][index] == 7
            assert hits == 1


@pytest.mark.parametrize(
    ("counts", "blocks", "after"),
    [
        ([100, 20, 20, 60], [15, 17, 17, 15], [96.875, 23.125, 23.125, 56.875]),
        ([10, 50, 90, 50], [16, 16, 16, 16], [10, 50, 90, 50]),
        ([1, 0, 1, 1], [16, 16, 16, 16], [1, 0, 1, 1]),  # a mean of 0 entries
    ],
)
def test_rebalance(counts, blocks, after):
    """64 blocks of 32 elements."""
    moved, found = [16] * 4, list(counts)
    rebalance(moved, found, 32, 2048, 4)
    assert moved == blocks
    assert found == after


def test_a_slice_keeps_its_least_blocks():
    moved = [4, 4]
    rebalance(moved, [90.0, 10.0], 32, 256, 4)
    assert moved == [4, 4]
    rebalance(moved, [90.0, 10.0], 32, 256, 3)
    assert moved == [3, 5]


def test_exdyna_moves_blocks_to_where_less_is_found(backend):
    """All mass in the first slice. The table is the same on all ranks, and follows from what was sent."""
    size, n = 4, 64 * 32 + 9
    ranks, expected = ranks_of(Exclusive("exdyna", "contiguous", num_blocks=64), size, n, backend), [16] * size
    for number in range(4):
        step = ranks.step([frozen(grad * (np.arange(n) < n // 4)) for grad in normal(number, size, n)], 100)
        assert_same_on_ranks(step.totals)
        edges = [0, *(32 * np.cumsum(expected[:-1])), n]
        counts = np.histogram(backend.numpy(step.reduced[0].used.indices), edges)[0]
        rebalance(expected, counts.tolist(), 32, n, 4)
        assert [ranks.numpy_state(state)["scheme"]["blocks"].tolist() for state in ranks.states] == [expected] * size
        assert number > 0 or expected == [15, 17, 16, 16]


def test_a_table_for_another_number_of_ranks_is_made_anew():
    ranks = ranks_of(KINDS["exdyna"], 3, 1009)
    for state in ranks.states:
        state["scheme"]["blocks"] = np.int32([4, 4, 4, 4])
    ranks.step(normal(0, 3), 100)
    assert len(ranks.states[0]["scheme"]["blocks"]) == 3


def test_small_buckets_have_equal_slices():
    """Blocks of no 32 elements: as MiCRO."""
    micro, exdyna = (
        ranks_of(part, 4, 1009) for part in (Exclusive(layout="contiguous"), Exclusive("exdyna", "contiguous"))
    )
    for number in range(3):
        grads = normal(number, 4)
        assert micro.step(grads, 50).totals[0].tolist() == exdyna.step(grads, 50).totals[0].tolist()
    assert exdyna.states[0]["scheme"]["blocks"] == 0


# Invariants


@every_kind
@given(data=st.data())
def test_conservation_and_equal_bits(part, quick_backend, data):
    size, n = data.draw(st.sampled_from([*SIZES, 7]), "ranks"), data.draw(st.integers(1, 700), "n")
    k, seed = data.draw(st.integers(1, n), "k"), data.draw(st.integers(0, 999), "seed")
    collective = data.draw(st.sampled_from([SharedAllReduce(), AllGatherSum()]), "collective")
    ranks = ranks_of(part, size, n, quick_backend, collective)
    for number in range(3):
        step = ranks.step(integers(seed + number, size, n, limit=3), k)
        assert_same_on_ranks(step.totals)
        assert_conserved(step.accumulated, step.totals[0], step.kept, 0)
        if k < n:
            indices = [quick_backend.numpy(one.used.indices) for one in step.reduced]
            assert_same_on_ranks(indices, "indices")
            assert (np.diff(indices[0]) > 0).all()
            assert 1 <= len(indices[0]) <= part.capacity(Spec("b", n), k, size)
            scheme = [ranks.numpy_state(state)["scheme"] for state in ranks.states]
            for key in scheme[0]:
                assert_same_on_ranks([one[key] for one in scheme], key)


@pytest.mark.parametrize(
    ("n", "k", "size", "most"), [(1000, 100, 4, 128), (1000, 1, 4, 4), (3, 1, 5, 3), (90, 80, 3, 90)]
)
def test_capacity(n, k, size, most):
    assert Exclusive().capacity(Spec("b", n), k, size) == most


@every_kind
def test_fewer_elements_than_ranks_are_dense(part, quick_backend):
    ranks = ranks_of(part, 5, 3, quick_backend)
    step = ranks.step(integers(0, 5, 3), 1)
    assert step.totals[0].tolist() == np.sum(step.accumulated, axis=0).tolist()


def test_a_full_slice_sends_its_largest():
    """The capacity is 5 of each rank's elements; the rest stays."""
    ranks = with_threshold(ranks_of(KINDS["contiguous"], 2, 40), 1.0, 8)
    x = frozen(np.arange(40) + 1, np.float32)
    step = ranks.step([x, x], 8)
    assert np.flatnonzero(step.totals[0]).tolist() == [*range(15, 20), *range(35, 40)]


# Performance


class Stream:
    """A run on log-normal scales with error feedback. Gradients are pieces of one long noise."""

    def __init__(self, part: Exclusive, size: int, n: int, k: int, skew: float = 1.0) -> None:
        self.size, self.n, self.k = size, n, k
        self.rng = np.random.default_rng(0)
        self.noise = self.rng.standard_normal(3 * n, np.float32)
        self.scales = (self.rng.lognormal(size=n) * np.linspace(skew, 1, n)).astype(np.float32)
        self.exchange = Exchange(Spec("b", n), SparseSum(part, SharedAllReduce()), Residual())
        self.states = [self.exchange.init(NumpyOps()) for _ in range(size)]
        self.ratios: list[float] = []
        self.words = 0.0

    def gradients(self, size: float) -> list[np.ndarray]:
        scales, starts = self.scales * np.float32(size), self.rng.integers(0, 2 * self.n, self.size)
        return [self.noise[start : start + self.n] * scales for start in starts]

    def step(self, grads: list[np.ndarray]) -> None:
        simulator, number = Simulator(self.size), len(self.ratios)
        programs = [
            self.exchange.step(NumpyOps(), World(rank, self.size, number), grads[rank], self.k, self.states[rank])
            for rank in range(self.size)
        ]
        results = simulator.run(programs)
        self.states = [state for _, state in results]
        self.words = simulator.words
        self.ratios.append(len(results[0][0].used.indices) / self.k)

    def waste(self, grads: list[np.ndarray]) -> float:
        """P times the largest count, over their sum, less 1: of the coming step, before messages cut counts off."""
        block, counts = np.arange(self.n) // 64 % self.size, []
        for rank, (state, grad) in enumerate(zip(self.states, grads)):
            mine = block == (len(self.ratios) + rank) % self.size
            x = (state["memory"]["residual"] + grad)[mine]
            counts.append(np.count_nonzero(np.abs(x) >= state["scheme"]["threshold"]))
        return self.size * max(counts) / sum(counts) - 1


@pytest.mark.parametrize("size", [4, 16])
def test_interleaved_slices_are_balanced(size):
    """On a linear 10:1 skew, steps 200 to 300: a waste of 0.5 at most. The exchange is full, but not more."""
    stream, waste = Stream(Exclusive(), size, 65_536, 262, skew=10.0), []
    for number in range(300):
        grads = stream.gradients(1.0)
        if number >= 200 and number % 4 == 0:
            waste.append(stream.waste(grads))
        stream.step(grads)
    assert np.mean(waste) <= 0.5
    assert 1.0 <= np.mean(stream.ratios[200:]) <= 1.25


def test_the_threshold_finds_k_entries_of_a_decaying_gradient(monkeypatch):
    """With room for all that is found, over the last third."""
    monkeypatch.setattr(exclusive, "_SLACK", 50.0)
    stream = Stream(Exclusive(), 4, 8192, 82)
    for number in range(900):
        stream.step(stream.gradients(0.9985**number))
    assert 0.95 <= np.mean(stream.ratios[600:]) <= 1.05


def test_volume_hardly_grows_with_the_ranks():
    """A quarter more at 16 ranks than at 4, where an allgather sends five times as much."""
    words = {}
    for size in (4, 16):
        stream = Stream(Exclusive(), size, 20_000, 1024)
        stream.step(stream.gradients(1.0))
        room = -(-1280 // size)
        assert stream.words == (size - 1) * (1 + 3 * room)
        words[size] = stream.words
    assert words[16] / words[4] <= 1.3


@pytest.mark.parametrize("size", [2, 4, 16, 32])
def test_the_planner_expects_what_is_sent(size):
    """Up to the words that tell thresholds, and rounding."""
    from hvd_sparse.planner.cost import shared

    config = adaptive_config(sparsifier="exclusive")
    stream = Stream(Exclusive(), size, 6000, 3200)
    stream.step(stream.gradients(1.0))
    expected = shared(6000, 3200, size, config.controller.entry_bytes)
    assert expected.num_collectives == 2
    assert 4 * stream.words <= expected.num_bytes + 4 * size
    assert 4 * stream.words >= (size - 1) / size * expected.num_bytes


# Arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "deft"}, r"`mode` must be one of 'micro', 'exdyna'. Received: mode='deft'"),
        ({"layout": "random"}, r"`layout` must be one of 'interleaved', 'contiguous'. Received: layout='random'"),
        ({"mode": "exdyna"}, r"`layout` must be 'contiguous' with mode='exdyna'"),
        ({"num_blocks": 0}, r"`num_blocks` must be a whole number"),
    ],
    ids=short_repr,
)
def test_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        Exclusive(**arguments)


def test_exdyna_in_a_graph_is_refused():
    import tensorflow as tf

    backend = BACK_ENDS["tensorflow"]()

    def step(number):
        program = Exclusive("exdyna", "contiguous").select(
            backend.ops, World(0, 1, number), Spec("b", 8), tf.zeros([8]), 2, {"threshold": 0.0, "k": 0, "blocks": 0}
        )
        return Simulator(1, ops=backend.ops).run([program])[0]

    with pytest.raises(ValueError, match="`mode` must be 'micro' in a TensorFlow graph"):
        tf.function(step, autograph=False)(tf.constant(0, tf.int64))
