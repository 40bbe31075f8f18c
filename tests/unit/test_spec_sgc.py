"""Check values of sparse gradient compression with global momentum (sgc.md)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers import (
    E4,
    BackEnd,
    Ranks,
    assert_bits_equal,
    assert_close,
    assert_same_on_ranks,
    floats,
    frozen,
    total_words,
)
from methods import integers, normal

from hvd_sparse.collectives.allgather import AllGatherSum
from hvd_sparse.config import check_wrapping, sparse_config
from hvd_sparse.drivers.simulate import Simulator
from hvd_sparse.exchange import Exchange
from hvd_sparse.memories.residual import Residual
from hvd_sparse.memories.sgc import SGC
from hvd_sparse.ops.numpy import NumpyOps
from hvd_sparse.schemes.dense import Dense
from hvd_sparse.schemes.sparse import SparseSum
from hvd_sparse.sparsifiers.topk import TopK
from hvd_sparse.types import Reduced, Spec, World


def ranks_of(memory, size: int, n: int, backend: BackEnd | None = None, scheme=None) -> Ranks:
    return Ranks(Exchange(Spec("b", n), scheme or SparseSum(TopK(), AllGatherSum()), memory), size, backend)


def test_two_coordinates(backend):
    ranks, w = ranks_of(SGC(0.5), 1, 2, backend), np.zeros(2)
    expected = [
        ([1, 0], [0, 0.4], [1, 0], [-0.1, 0]),
        ([1, 0], [0, 0.8], [1.5, 0], [-0.25, 0]),
        ([0, 1.2], [1, 0], [0.75, 1.2], [-0.325, -0.12]),
    ]
    for sent, v, u, weights in expected:
        step = ranks.step([floats(1, 0.4)], 1)
        w -= 0.1 * step.applied[0]
        assert_close(step.totals[0], sent, 1e-6)
        assert_close(step.kept[0], v, 1e-6)
        assert_close(step.applied[0], u, 1e-6)
        assert_close(ranks.numpy_state(ranks.states[0])["scheme"]["momentum"], u, 1e-6)
        assert_close(w, weights, 1e-6)


@pytest.mark.parametrize("scheme", [Dense(), SparseSum(TopK(), AllGatherSum())])
def test_density_one_is_momentum_sgd(scheme, backend):
    """f = w ** 2 / 2 from w = 1 with lr = 0.1."""
    ranks, w, seen = ranks_of(SGC(0.9), 1, 1, backend, scheme), 1.0, []
    for _ in range(3):
        step = ranks.step([floats(w)], 1)
        w -= 0.1 * float(step.applied[0][0])
        seen.append(w)
        assert step.kept[0].tolist() == [0]
    assert seen == pytest.approx([0.9, 0.72, 0.486], rel=1e-5)


def test_a_bucket_that_is_always_dense_has_the_momentum_too():
    memory = SGC(0.9).for_dense()
    ranks = ranks_of(memory, 2, 1, scheme=Dense())
    ranks.step([floats(1), floats(1)], 1)
    assert ranks.step([floats(1), floats(1)], 1).applied[0] == pytest.approx([3.8])


def test_without_momentum_it_is_plain_error_feedback(backend):
    """Bit for bit, what is sent and what is applied."""
    plain, ours = (ranks_of(memory, 4, 16, backend) for memory in (Residual(), SGC(0.0)))
    for number in range(5):
        grads = E4 if number == 0 else normal(number, 4, 16)
        expected, step = plain.step(grads, 4), ours.step(grads, 4)
        assert_bits_equal(step.applied[0], expected.totals[0])
        for rank in range(4):
            assert_bits_equal(step.kept[rank], expected.kept[rank])


def test_e4_is_top_k_allgather(backend):
    step = ranks_of(SGC(0.9), 4, 16, backend).step(E4, 4)
    expected = np.zeros(16)
    expected[[0, 2, 6, 7, 9, 11, 12, 13]] = [32, -13, -29, 2, -1, 15, 44, -14]
    assert step.totals[0].tolist() == step.applied[0].tolist() == expected.tolist()
    assert [float(np.abs(kept).sum()) for kept in step.kept] == [78] * 4
    assert total_words(step.rounds, 4) == 24
    assert len(step.rounds) == 1


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_totals_are_conserved_over_a_hundred_steps(momentum, quick_backend):
    """Momentum is a filter on top of them."""
    ranks, entered, sent, u = ranks_of(SGC(momentum), 3, 37, quick_backend), np.zeros(37), np.zeros(37), np.zeros(37)
    for number in range(100):
        grads = integers(number, 3, 37)
        step = ranks.step(grads, 4)
        entered += np.sum(grads, axis=0)
        sent += step.totals[0]
        u = momentum * u + step.totals[0]
        assert_close(step.applied[0], u, 1e-5)
        assert_same_on_ranks(step.applied)
    assert (entered == sent + np.sum(step.kept, axis=0)).all()


def test_local_update_shifts_every_rank_elsewhere():
    """Gradients at w - lr v: weights stay equal on ranks, the places where gradients are taken do not."""
    ranks, lr, w = ranks_of(SGC(0.5), 2, 4), 0.1, np.zeros(4, np.float32)
    targets = [floats(1, 2, 3, 4), floats(-4, 3, -2, 1)]
    for number in range(60):
        v = [ranks.numpy_state(state)["memory"]["residual"] for state in ranks.states]
        local = [w - lr * one for one in v]
        assert number == 0 or not np.array_equal(*local)
        step = ranks.step([frozen(one - target, np.float32) for one, target in zip(local, targets)], 1)
        assert_same_on_ranks(step.applied)
        w = w - lr / 2 * step.applied[0]
    assert np.abs(w - np.mean(targets, axis=0)).max() < 0.6


@pytest.mark.parametrize("gains", [(0.5, 0.5, 0.5), (1 / 3, 1 / 3, 1 / 3), (512.0, 256.0, 512.0)])
def test_totals_carry_a_gain(gains, backend):
    """Averages instead of sums, or a loss scale that changes: momentum is of what is behind it."""
    memory, shared = SGC(0.5), {"momentum": backend.array(floats(0))}
    for gain, plain in zip(gains, (4, 6, 7)):
        reduced = Reduced(backend.array(floats(4 * gain)), used=None, finite=True)
        given, shared = memory.follow(backend.ops, gain, reduced, shared)
        assert_close(backend.numpy(given), [plain * gain], 1e-6)
        assert_close(backend.numpy(shared["momentum"]), [plain], 1e-6)


def test_every_method_can_average():
    grads, exchange = [floats(3, 1), floats(1, 1)], Exchange(Spec("b", 2), Dense(), SGC(0.5))
    programs = [
        exchange.step(NumpyOps(), replace(World(rank, 2), gain=0.5), grads[rank], 2, exchange.init(NumpyOps()))
        for rank in range(2)
    ]
    (reduced, state), _ = Simulator(2).run(programs)
    assert reduced.applied.tolist() == [2, 1]
    assert state["scheme"]["momentum"].tolist() == [4, 2]


def test_one_of_ten_thousand():
    """The bar: 2k(P-1) words in one round, 40 times fewer bytes than dense."""
    n, size = 40_000, 8
    step = ranks_of(SGC(), size, n).step(normal(0, size, n), n // 10_000)
    words = total_words(step.rounds, size)
    assert words == 2 * 4 * (size - 1)
    assert len(step.rounds) == 1
    assert 2 * n * (size - 1) / size / words == 1250


@pytest.mark.parametrize("momentum", [1.0, -0.1, True, "0.9", None])
def test_momentum_out_of_range(momentum):
    with pytest.raises(ValueError, match=r"`momentum` must be in \[0, 1\)"):
        SGC(momentum)


def test_an_optimizer_with_its_own_momentum_is_refused():
    arguments = {"compression": None, "op": 0, "known_ops": (0, 1), "predivide": 1.0, "passes": 1}
    config = sparse_config(memory="sgc")
    with pytest.raises(ValueError, match=r"give the optimizer momentum=0 \(SGD, not Adam\). Received: momentum=0.9"):
        check_wrapping(config, momentum=0.9, **arguments)
    assert check_wrapping(config, momentum=0.0, **arguments)
    assert check_wrapping(sparse_config(memory=SGC(0.0)), momentum=0.9, **arguments)
