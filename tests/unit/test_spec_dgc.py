"""Check values of deep gradient compression: momentum correction, masking, clipping, warm-up."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from helpers import E4, Ranks, assert_bits_equal, assert_close, floats, frozen, total_words

from hvd_sparse.collectives.allgather import AllGatherSum
from hvd_sparse.controllers import Seen
from hvd_sparse.controllers.warmup import Warmup
from hvd_sparse.drivers.simulate import run
from hvd_sparse.exchange import Exchange
from hvd_sparse.memories.momentum import Momentum
from hvd_sparse.schemes.dense import Dense
from hvd_sparse.schemes.sparse import SparseSum
from hvd_sparse.sparsifiers.threshold import Threshold
from hvd_sparse.sparsifiers.topk import TopK
from hvd_sparse.types import Reduced, Sparse, Spec, World


def momentum_state(backend, size: int = 1) -> dict:
    return {key: backend.array(frozen(np.zeros(size), np.float32)) for key in Momentum.keys}


def ranks_of(memory: Momentum, size: int, n: int, backend) -> Ranks:
    return Ranks(Exchange(Spec("b", n), SparseSum(TopK(), AllGatherSum()), memory), size, backend)


@pytest.mark.parametrize(
    ("nesterov", "expected"),
    [
        (False, [(1, 1), (1.9, 2.9), (2.71, 5.61), (3.439, 9.049)]),
        (True, [(0.9, 1.9), (1.71, 4.61), (2.439, 8.049), (3.0951, 12.1441)]),
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_velocity_of_a_constant_gradient(nesterov, expected, in_place, backend):
    memory, state, one = Momentum(0.9, nesterov), momentum_state(backend), backend.array(floats(1))
    spare = momentum_state(backend) if in_place else None
    for u, v in expected:
        before = {key: np.array(backend.numpy(value)) for key, value in state.items()}
        x, following = memory.compensate(backend.ops, 1, one, state, out=spare)
        for key, value in before.items():
            assert_bits_equal(backend.numpy(state[key]), value, key)
        state, spare = following, state if in_place else None
        assert_close(backend.numpy(state["velocity"]), [u], 1e-6)
        assert_close(backend.numpy(state["accumulated"]), [v], 1e-6)
        assert_bits_equal(backend.numpy(x), backend.numpy(state["accumulated"]))


def test_gradients_carry_a_factor(backend):
    """`alpha` undoes a loss scale, for both kinds of momentum."""
    for nesterov in (False, True):
        memory, state = Momentum(0.9, nesterov), momentum_state(backend)
        for _ in range(3):
            _, state = memory.compensate(backend.ops, 1, backend.array(floats(1024)), state, alpha=1 / 1024)
        assert_close(backend.numpy(state["velocity"]), [2.439 if nesterov else 2.71], 1e-6)


@pytest.mark.parametrize(
    ("masking", "sent", "weights"),
    [
        (True, [(0, 1.0), (1, 1.16), (0, 2.9), (1, 1.16)], [-0.39, -0.232]),
        (False, [(0, 1.0), (0, 1.9), (0, 2.71), (1, 3.6196)], [-0.561, -0.36196]),
        ("stale", [(0, 1.0), (0, 1.9), (0, 2.71), (1, 3.6196), (0, 7.5341)], [-1.31441, -0.36196]),
    ],
)
def test_two_coordinates(masking, sent, weights, backend):
    ranks, w = ranks_of(Momentum(0.9, masking=masking), 1, 2, backend), np.zeros(2)
    for index, value in sent:
        total = ranks.step([floats(1, 0.4)], 1).totals[0]
        assert np.flatnonzero(total).tolist() == [index]
        assert total[index] == pytest.approx(value, rel=1e-6)
        w -= 0.1 * total
    assert w == pytest.approx(weights, rel=1e-6)
    velocity, accumulated = {
        True: ([1, 0], [1, 0]),
        False: ([3.439, 1.3756], [3.439, 0]),
        # Of 1.3756 the share 1.3756 / 3.6196 was left; all of coordinate 0 until it had to wait for a step.
        "stale": ([4.0951**2 / 7.5341, 0.9 * 1.3756**2 / 3.6196 + 0.4], [0, 0.9 * 1.3756**2 / 3.6196 + 0.4]),
    }[masking]
    memory = ranks.numpy_state(ranks.states[0])["memory"]
    assert_close(memory["velocity"], velocity, 1e-6)
    assert_close(memory["accumulated"], accumulated, 1e-6)


@pytest.mark.parametrize("scheme", [Dense(), SparseSum(TopK(), AllGatherSum())])
@pytest.mark.parametrize(("nesterov", "expected"), [(False, [0.9, 0.72, 0.486]), (True, [0.81, 0.5751, 0.327321])])
def test_density_one_is_momentum_sgd(scheme, nesterov, expected, backend):
    """f = w ** 2 / 2 from w = 1 with lr = 0.1: never masked, or the velocity would be lost."""
    ranks, w, seen = Ranks(Exchange(Spec("b", 1), scheme, Momentum(0.9, nesterov)), 1, backend), 1.0, []
    for _ in range(3):
        w -= 0.1 * float(ranks.step([floats(w)], 1).totals[0][0])
        seen.append(w)
    assert seen == pytest.approx(expected, rel=1e-5)


def test_without_masking_the_sum_is_that_of_dense_momentum(backend):
    """... delayed: once everything has arrived, the applied sums are equal."""
    ranks, dense = ranks_of(Momentum(0.5, masking=False), 2, 6, backend), np.zeros(6)
    applied, velocity, rng = np.zeros(6), np.zeros(6), np.random.default_rng(0)
    for number in range(30):
        grads = [frozen(rng.integers(-4, 5, 6) * (number < 10), np.float32) for _ in range(2)]
        velocity = 0.5 * velocity + np.sum(grads, axis=0)
        dense += velocity
        applied += ranks.step(grads, 2).totals[0]
    rest = sum(state["accumulated"] for state in (ranks.numpy_state(s)["memory"] for s in ranks.states))
    assert_close(applied + rest, dense, 1e-5)


@pytest.mark.parametrize(("size", "limit"), [(1, 1.0), (4, 0.5), (16, 0.25)])
def test_local_clipping(size, limit, backend):
    memory = Momentum(0.0, clip_norm=1.0)
    x, _ = memory.compensate(backend.ops, size, backend.array(floats(30, -40)), momentum_state(backend, 2))
    assert_close(backend.numpy(x), np.array([0.6, -0.8]) * limit, 1e-6)


def test_clipping_leaves_small_gradients_alone(backend):
    memory, small = Momentum(0.0, clip_norm=1.0), floats(0.3, -0.4)
    x, _ = memory.compensate(backend.ops, 4, backend.array(small), momentum_state(backend, 2))
    assert_close(backend.numpy(x), small, 1e-6)
    x, _ = memory.compensate(backend.ops, 4, backend.array(floats(0, 0)), momentum_state(backend, 2))
    assert backend.numpy(x).tolist() == [0, 0]


def test_clipping_sees_unscaled_gradients(backend):
    memory = Momentum(0.0, clip_norm=1.0)
    x, _ = memory.compensate(backend.ops, 1, backend.array(floats(300, -400)), momentum_state(backend, 2), alpha=1e-3)
    assert_close(backend.numpy(x), [0.3, -0.4], 1e-6)


@pytest.mark.parametrize("size", [1, 3])
def test_velocity_is_masked_exactly_where_it_was_used(size, backend):
    ranks = ranks_of(Momentum(0.9), size, 16, backend)
    for number in range(3):
        step = ranks.step([frozen(np.roll(row, number)) for row in E4[:size]], 4)
        for rank in range(size):
            memory = ranks.numpy_state(ranks.states[rank])["memory"]
            used = backend.numpy(step.reduced[rank].used.indices)
            assert np.flatnonzero(memory["velocity"] == 0).tolist() == sorted(used.tolist())
            assert not memory["accumulated"][used].any()


def test_momentum_zero_is_top_k_allgather(backend):
    step = ranks_of(Momentum(0.0), 4, 16, backend).step(E4, 4)
    expected = np.zeros(16)
    expected[[0, 2, 6, 7, 9, 11, 12, 13]] = [32, -13, -29, 2, -1, 15, 44, -14]
    assert step.totals[0].tolist() == expected.tolist()
    assert [float(np.abs(kept).sum()) for kept in step.kept] == [78] * 4
    assert total_words(step.rounds, 4) == 24
    assert len(step.rounds) == 1


def test_first_count_on_a_million_normal_samples(backend):
    x = backend.array(frozen(np.random.default_rng(0).normal(size=10**6), np.float32))
    part, spec = Threshold(), Spec("b", 10**6)
    for k in (1000, 10_000):
        _, state = run(part.select(backend.ops, World(0, 1), spec, x, k, part.init(backend.ops, spec)))
        assert 0.8 * k <= state["count"] <= 1.3 * k


def test_state_round_trip(backend):
    ranks = ranks_of(Momentum(0.9), 4, 16, backend)
    ranks.step(E4, 4)
    saved = copy.deepcopy(ranks.states)
    expected = ranks.step(E4, 4).totals[0]
    resumed = ranks_of(Momentum(0.9), 4, 16, backend)
    resumed.states = saved
    assert_bits_equal(resumed.step(E4, 4).totals[0], expected)


def test_warm_up_table():
    controller, steps_per_epoch = Warmup(0.001, 5 * 7), 7
    densities = [controller.decide(Seen(epoch * steps_per_epoch), {})[0].density for epoch in range(7)]
    assert densities == pytest.approx([0.316228, 0.1, 0.0316228, 0.01, 0.00316228, 0.001, 0.001], rel=1e-5)
    all_steps = [controller.decide(Seen(step), {})[0].density for step in range(49)]
    assert all_steps == [density for density in densities for _ in range(steps_per_epoch)]
    assert densities[-1] == 0.001


def test_warm_up_says_where_it_is():
    controller = Warmup(0.001, 35)
    reasons = [controller.decide(Seen(step), controller.init())[0].reason for step in (0, 34, 35)]
    assert reasons == ["warm-up stage 1 of 5", "warm-up stage 5 of 5", "density 0.001, warm-up is over"]


def test_what_is_stale_of_a_velocity(backend):
    """The share of the smaller in the larger where both point one way; nothing of any size overflows."""
    velocity = floats(2, 2, 2, 2, -3, 0, 1e30, 1e-30, 3e38)
    accumulated = floats(2, 8, -8, 1, -3, 0, 0, 1, 3e38)
    memory, used = Momentum(0.9, masking="stale"), np.arange(9, dtype=np.int32)
    reduced = Reduced(None, Sparse(backend.array(frozen(used, np.int32)), None, 9), True)
    state = {"velocity": backend.array(velocity), "accumulated": backend.array(accumulated)}
    found = backend.numpy(memory.update(backend.ops, reduced, state)["velocity"])
    assert_close(found, floats(2, 0.5, 0, 1, -3, 0, 0, 0, 3e38), 1e-6)


def test_an_unknown_way_of_masking():
    with pytest.raises(ValueError, match=r"`masking` must be True, False or 'stale'. Received: masking='fresh'"):
        Momentum(masking="fresh")


@pytest.mark.parametrize("momentum", [1.0, 1, -0.1, True, "0.9", float("nan"), None])
def test_momentum_out_of_range(momentum):
    with pytest.raises(ValueError, match=r"`momentum` must be in \[0, 1\)"):
        Momentum(momentum)


@pytest.mark.parametrize("clip_norm", [0, -1, float("inf"), float("nan"), True, "1"])
def test_clip_norm_out_of_range(clip_norm):
    with pytest.raises(ValueError, match="`clip_norm` must be a positive number"):
        Momentum(clip_norm=clip_norm)


@pytest.mark.parametrize("argument", ["warmup_steps", "num_stages"])
@pytest.mark.parametrize("value", [0, -1, 0.5, 2.5, True, float("inf"), "5"])
def test_warm_up_out_of_range(argument, value):
    with pytest.raises(ValueError, match=f"`{argument}` must be a whole number"):
        Warmup(0.01, **{"warmup_steps": 10, argument: value})
