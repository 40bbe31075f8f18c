"""PowerSGD, the low-rank scheme: two fused rounds, error feedback, directions that are kept from step to step."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers import Ranks, assert_bits_equal, assert_close, assert_conserved, frozen, total_words
from methods import normal

from hvd_sparse.drivers.simulate import Simulator
from hvd_sparse.exchange import Exchange
from hvd_sparse.memories.momentum import Momentum
from hvd_sparse.memories.none import NoMemory
from hvd_sparse.memories.residual import Residual
from hvd_sparse.ops.numpy import NumpyOps
from hvd_sparse.schemes.low_rank import LowRank
from hvd_sparse.types import Spec

OPS = NumpyOps()
MLP = ((2048, 784), (1024, 2048), (10, 1024))  # 3.7 million elements


def spec_of(*shapes: tuple[int, ...], name: str = "b") -> Spec:
    return Spec(name, sum(math.prod(shape) for shape in shapes), shapes=shapes)


def exchange(*shapes: tuple[int, ...], memory: object = None, **settings: float) -> Exchange:
    return Exchange(spec_of(*shapes), LowRank(**settings), memory or Residual())


def flat(matrix: np.ndarray) -> np.ndarray:
    return frozen(np.asarray(matrix).reshape(-1), np.float32)


def drawn(seed: int, spec: Spec, size: int) -> list[np.ndarray]:
    return normal(seed, size, spec.size)


# The check values. A row and a column of zeros make the toy large enough to be worth factors.
M_0, M_1 = (np.zeros((3, 3), np.float32) for _ in range(2))
M_0[:2, :2], M_1[:2, :2] = [[4, 0], [0, 1]], [[2, 2], [0, 1]]


def test_toy(backend):
    ranks = Ranks(exchange((3, 3), rank=1), 2, backend)
    for state in ranks.states:
        assert set(state["scheme"]) == {"rows1"}
        state["scheme"] = {"rows1": backend.array(flat([1, 0, 0]))}
    step = ranks.step([flat(M_0), flat(M_1)], 1)
    assert_close(step.totals[0].reshape(3, 3), 2 * np.array([[3, 1, 0], [0, 0, 0], [0, 0, 0]]), 1e-6)
    for kept, expected in zip(step.kept, ([[1, -1], [0, 1]], [[-1, 1], [0, 1]])):
        assert_close(kept.reshape(3, 3)[:2, :2], expected, 1e-6)
    assert_conserved([flat(M_0), flat(M_1)], step.totals[0], step.kept, 1e-6)
    rows = ranks.numpy_state(ranks.states[0])["scheme"]["rows1"]
    assert_close(abs(rows), np.array([3, 1, 0]) / 10**0.5, 1e-5)  # Q, as a direction


# Two linear layers' inputs and output gradients: the gradient is their product, summed over ranks.
A = [np.array([[1, 2], [0, 1]]), np.array([[3, -1]])]
D = [np.array([[1, 0, -1], [2, 1, 0]]), np.array([[0, 1, 1]])]


def test_the_example_layer():
    grads = [d.T @ a for a, d in zip(A, D)]
    assert sum(grads).tolist() == [[1, 4], [3, 0], [2, -3]]
    assert np.linalg.svd(sum(grads))[1] == pytest.approx([5.035111712, 3.694272600])


def test_directions_converge_to_the_best_approximation(backend):
    """Of a sum that stays the same, without error feedback: that of the rank-dAD example, step by step."""
    grads = [flat(d.T @ a) for a, d in zip(A, D)]
    ranks = Ranks(exchange((3, 2), memory=NoMemory(), rank=1), 2, backend)
    for _ in range(30):
        total = ranks.step(grads, 1).totals[0].reshape(3, 2)
    best = [[-0.653383, 3.708715], [0.090310, -0.512615], [0.572821, -3.251433]]
    assert_close(total, best, 1e-4)
    exact = np.sum(grads, axis=0).reshape(3, 2)
    assert np.linalg.norm(total - exact) == pytest.approx(3.694272600, abs=1e-5)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_matrix_of_that_rank_is_exact(rank, backend):
    rng = np.random.default_rng(rank)
    grads = [flat(rng.normal(size=(20, rank)) @ np.eye(rank, 30) * 3) for _ in range(2)]
    step = Ranks(exchange((20, 30), rank=rank), 2, backend).step(grads, 1)
    assert_close(step.totals[0], np.sum(grads, axis=0), 1e-5)
    assert_close(np.sum(step.kept, axis=0), np.zeros(600), 1e-4)


# Invariants


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("rank", [1, 2, 4, 7])
def test_conservation(rank, size, quick_backend):
    part = exchange((30, 20), (7, 3), (5,), (4, 3, 2, 2), rank=rank)
    ranks = Ranks(part, size, quick_backend)
    for number in range(5):
        step = ranks.step(drawn(number, part.spec, size), 1)
        assert_conserved(step.accumulated, step.totals[0], step.kept, 1e-5)
        for rank_ in range(1, size):
            assert_bits_equal(step.totals[rank_], step.totals[0])
            states = [ranks.numpy_state(state)["scheme"] for state in ranks.states]
            assert_bits_equal(states[rank_][f"rows{rank}"], states[0][f"rows{rank}"])


def test_the_approximation_has_that_rank(quick_backend):
    part = exchange((30, 20), (12, 25), rank=3)
    step = Ranks(part, 2, quick_backend).step(drawn(0, part.spec, 2), 1)
    for matrix in (step.totals[0][:600].reshape(30, 20), step.totals[0][600:].reshape(12, 25)):
        assert np.linalg.matrix_rank(matrix, tol=1e-3) == 3


def test_error_feedback_sends_everything(quick_backend):
    part = exchange((30, 20), rank=4)
    ranks = Ranks(part, 3, quick_backend)
    grads = drawn(0, part.spec, 3)
    total = ranks.step(grads, 1).totals[0].astype(np.float64)
    nothing = [frozen(np.zeros(600), np.float32)] * 3
    for _ in range(8):
        total += ranks.step(nothing, 1).totals[0]
    assert_close(total, np.sum(grads, axis=0), 1e-5)


def test_momentum_keeps_its_velocity(quick_backend):
    """What was applied is everywhere: there is nothing to mask."""
    part = exchange((30, 20), memory=Momentum(0.5), rank=1)
    ranks = Ranks(part, 2, quick_backend)
    grads = drawn(0, part.spec, 2)
    ranks.step(grads, 1)
    for state, grad in zip(ranks.states, grads):
        assert_bits_equal(ranks.numpy_state(state)["memory"]["velocity"], grad)


def test_warm_start_beats_a_cold_one(quick_backend):
    """On sums that change slowly, the second step's approximation is better than the first one's."""
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(40, 40)), rng.normal(size=(40, 30))
    matrix = left @ np.diag(0.8 ** np.arange(40)) @ right
    ranks = Ranks(exchange((40, 30), memory=NoMemory()), 2, quick_backend)
    errors = []
    for _ in range(6):
        noise = 0.01 * rng.normal(size=(40, 30))
        grads = [flat(matrix + noise), flat(matrix - noise)]
        errors.append(np.linalg.norm(ranks.step(grads, 1).totals[0].reshape(40, 30) - 2 * matrix))
    best = 2 * np.linalg.norm(np.linalg.svd(matrix)[1][4:])
    assert best < errors[5] < 1.05 * best
    assert errors[5] < errors[0]


def test_directions_that_saw_only_zeros_come_back(backend):
    """First zeros, then a gradient whose leading rows and columns are zero, as those of unused inputs are."""
    ranks = Ranks(exchange((20, 30), rank=2), 2, backend)
    ranks.step([flat(np.zeros(600))] * 2, 1)
    late = np.zeros((20, 30))
    late[10:, 15:] = np.random.default_rng(0).normal(size=(10, 1)) @ np.random.default_rng(1).normal(size=(1, 15))
    for _ in range(2):
        step = ranks.step([flat(late)] * 2, 1)
    assert_close(np.sum(step.kept, axis=0), np.zeros(600), 1e-4)


def test_seeds_buckets_and_runs(backend):
    """The first directions are the same on every back end and in every run, others for other seeds and buckets."""
    like = backend.array(flat([0]))

    def first(seed: int, name: str) -> np.ndarray:
        spec = spec_of((40, 25), name=name)
        return backend.numpy(LowRank(2, seed).init(backend.ops, spec, like)["rows2"])

    expected = LowRank(2, 0).init(OPS, spec_of((40, 25)))["rows2"]
    assert_close(first(0, "b"), expected, 1e-6)
    assert expected.shape == (50,)
    assert -1 <= expected.min() < -0.8
    assert 0.8 < expected.max() < 1
    for other in (first(1, "b"), first(0, "c")):
        assert np.abs(other - expected).max() > 0.5


# As many directions as a matrix needs


def of_rank(rank: int, *, seed: int, scale: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return scale * rng.normal(size=(20, rank)) @ rng.normal(size=(rank, 30))


def counts(ranks: Ranks) -> list[list[int]]:
    return [ranks.numpy_state(state)["scheme"]["counts4"].tolist() for state in ranks.states]


def test_only_as_many_directions_as_are_needed(backend):
    """Two matrices, of ranks 1 and 3 by turns; noticed where all four directions are tried, in every fifth step."""
    part = exchange((20, 30), (20, 30), memory=NoMemory(), tolerance=0.001, period=5)
    ranks = Ranks(part, 2, backend)
    for number in range(12):
        first, second = (1, 3) if number < 7 else (3, 1)
        grad = flat(np.stack([of_rank(first, seed=0), of_rank(second, seed=1)]))
        step = ranks.step([grad, grad], 1)
        expected = [1, 3] if number < 10 else [3, 1]
        assert counts(ranks) == [expected] * 2
        sent = 8 if number % 5 == 0 else 4
        assert total_words(step.rounds, 2) == sent * (20 + 30)
        if number not in (7, 8, 9):  # where one direction is not enough
            assert_close(step.totals[0], 2 * grad, 1e-4)


def test_what_is_left_out_stays_in_the_memory(quick_backend):
    """A second direction that is too weak to be sent, until its sum over steps is not."""
    part = exchange((20, 30), rank=4, tolerance=0.01, period=4)
    ranks, weak = Ranks(part, 2, quick_backend), of_rank(1, seed=1, scale=0.08)
    grad, total, seen = flat(of_rank(1, seed=0) + weak), np.zeros(600), []
    for number in range(9):
        step = ranks.step([grad, grad], 1)
        total += step.totals[0]
        assert_close(total + np.sum(step.kept, axis=0), 2.0 * (number + 1) * grad, 1e-4)
        assert_bits_equal(step.totals[0], step.totals[1])
        seen.append(counts(ranks)[0][0])
    assert seen[:4] == [1] * 4, "a hundredth is less than what the weak one has"
    assert seen[4] > 1, "after three steps it has nine hundredths"


def test_a_tolerance_of_nothing_is_the_same_as_none(quick_backend):
    """Whatever the period: a direction that has a part in the sum is needed."""
    plain, some = (Ranks(exchange((30, 20), **kind), 2, quick_backend) for kind in ({}, {"tolerance": 1e-9}))
    for number in range(4):
        grads = drawn(number, some.exchange.spec, 2)
        assert_bits_equal(some.step(grads, 1).totals[0], plain.step(grads, 1).totals[0])


def test_no_direction_is_needed_by_zeros(backend):
    """One is kept all the same, so that a gradient is seen when there is one."""
    ranks = Ranks(exchange((20, 30), tolerance=0.1, period=3), 2, backend)
    ranks.step([flat(np.zeros(600))] * 2, 1)
    assert counts(ranks) == [[1]] * 2
    for number in range(5):
        step = ranks.step([flat(of_rank(2, seed=3) * (number == 0))] * 2, 1)
    assert_close(np.sum(step.kept, axis=0), np.zeros(600), 1e-3)


# What is sent


@pytest.mark.parametrize("size", [2, 4, 8])
def test_words(size):
    """2(P-1)/P r (d_in + d_out) for every matrix, and whole what would not be smaller so."""
    part = exchange((30, 20), (7, 3), (5,), (64, 3, 3, 3), rank=2)
    step = Ranks(part, size).step(drawn(0, part.spec, size), 1)
    expected = 2 * (30 + 20) + 2 * (7 + 3) + 5 + 2 * (64 + 27)
    assert total_words(step.rounds, size) == pytest.approx(2 * (size - 1) / size * expected)
    assert [one.kind for one in step.rounds] == ["AllReduce", "AllReduce"]


def test_words_of_the_specification():
    """d = 1024, P = 8, rank 4: 14,336 words, for 1,835,008 of an allreduce."""
    part = exchange((1024, 1024))
    simulator = Simulator(8)
    x = np.zeros(1024 * 1024, np.float32)
    simulator.run([part.step(OPS, simulator.world(rank), x, 1, part.init(OPS)) for rank in range(8)])
    assert simulator.words == 14_336
    assert 2 * 7 / 8 * 1024 * 1024 == 1_835_008


def test_an_mlp_sends_less_than_a_hundredth():
    part, size = exchange(*MLP), 4
    step = Ranks(part, size).step([frozen(np.zeros(part.spec.size), np.float32)] * size, 1)
    words = total_words(step.rounds, size)
    assert part.spec.size == 3_713_024
    # Rank 4 is no more than the last layer is worth: 4 (10 + 1024) words for 10,240.
    assert words == 2 * (size - 1) / size * 4 * (2048 + 784 + 1024 + 2048 + 10 + 1024)
    assert words < 0.01 * 2 * part.spec.size * (size - 1) / size


@pytest.mark.parametrize(
    "shape", [(1, 50), (50, 1), (8, 8), (5, 20), (9,), (), (2, 2, 2, 2), (3, 3, 8, 8), (64, 32, 3)]
)
@pytest.mark.parametrize("rank", [1, 4])
def test_never_more_words_than_dense(shape, rank):
    part = exchange((12, 13), shape, rank=rank)
    step = Ranks(part, 2).step(drawn(0, part.spec, 2), 1)
    assert total_words(step.rounds, 2) <= part.spec.size


@pytest.mark.parametrize(
    ("shape", "sides"), [((64, 32, 3, 3), 64 + 288), ((3, 3, 32, 64), 288 + 64), ((64, 8, 16), 64 + 128)]
)
def test_kernels_are_cut_where_that_sends_least(shape, sides):
    """As PyTorch and as TensorFlow order the dimensions of a convolution; the projections of an attention layer."""
    part = exchange(shape)
    step = Ranks(part, 2).step(drawn(0, part.spec, 2), 1)
    assert total_words(step.rounds, 2) == 4 * sides


@pytest.mark.parametrize("shapes", [((3, 3),), ((9,),), ((2, 2), (5,))])
def test_a_bucket_without_large_matrices_is_dense(shapes, quick_backend):
    part = exchange(*shapes)
    assert part.init(OPS)["scheme"] == {}
    grads = drawn(0, part.spec, 2)
    step = Ranks(part, 2, quick_backend).step(grads, 1)
    assert [one.tag for one in step.rounds] == ["dense"]
    assert_close(step.totals[0], np.sum(grads, axis=0), 1e-6)


def test_the_density_changes_nothing_but_one(quick_backend):
    part = exchange((30, 20))
    grads = drawn(0, part.spec, 2)
    few, many, all_ = (Ranks(part, 2, quick_backend).step(grads, k) for k in (1, 599, 600))
    assert_bits_equal(few.totals[0], many.totals[0])
    assert_close(all_.totals[0], np.sum(grads, axis=0), 1e-6)
    assert np.any(few.kept)
    assert not np.any(all_.kept)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen_wherever_it_is(bad, backend):
    """In a matrix whose other elements, and directions, are zero; beside matrices, in what is sent whole."""
    for place in (0, 599, 600, 604):
        ranks = Ranks(exchange((30, 20), (5,)), 2, backend)
        grad = np.zeros(605)
        grad[place] = bad
        step = ranks.step([flat(grad), flat(np.zeros(605))], 1)
        assert step.finite == [False, False]
        assert all(not np.isfinite(total).all() for total in step.totals)
        assert not np.any(step.kept)


@pytest.mark.parametrize("spec", [Spec("model", 100), Spec("b", 100, shapes=((9, 10),))])
def test_shapes_are_needed(spec):
    with pytest.raises(ValueError, match="needs the shapes of a bucket's parameters") as info:
        LowRank().init(OPS, spec)
    assert f"Received: {spec.name!r} with 100 elements, of which" in str(info.value)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"rank": 0}, ValueError, "`rank` must be a whole number"),
        ({"rank": 1.5}, ValueError, "`rank` must be a whole number"),
        ({"seed": "0"}, TypeError, "`seed` must be an int"),
        ({"seed": True}, TypeError, "`seed` must be an int"),
        ({"tolerance": 1}, ValueError, r"`tolerance` must be in \[0, 1\)"),
        ({"tolerance": -0.1}, ValueError, r"`tolerance` must be in \[0, 1\)"),
        ({"tolerance": float("nan")}, ValueError, r"`tolerance` must be in \[0, 1\)"),
        ({"tolerance": True}, ValueError, r"`tolerance` must be in \[0, 1\)"),
        ({"period": 0}, ValueError, "`period` must be a whole number"),
    ],
)
def test_arguments(settings, error, message):
    with pytest.raises(error, match=message) as info:
        LowRank(**settings)
    assert "Received" in str(info.value)
