"""Check values of the one-step delayed update (igf.md)."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import Ranks, assert_bits_equal, assert_same_on_ranks, floats, short_repr
from methods import SIZES, integers, normal

from hvd_sparse.collectives.allgather import AllGatherSum
from hvd_sparse.collectives.owner_reduce import OwnerReduce
from hvd_sparse.config import adaptive_config, check_wrapping, sparse_config
from hvd_sparse.exchange import Exchange
from hvd_sparse.memories.delayed import Delayed
from hvd_sparse.memories.momentum import Momentum
from hvd_sparse.memories.sgc import SGC
from hvd_sparse.schemes.dense import Dense
from hvd_sparse.schemes.sparse import SparseSum
from hvd_sparse.sparsifiers.topk import TopK
from hvd_sparse.types import Reduced, Spec


def ranks_of(memory, size: int, n: int, backend=None, scheme=None) -> Ranks:
    return Ranks(Exchange(Spec("b", n), scheme or SparseSum(TopK(), AllGatherSum()), memory), size, backend)


def in_flight(ranks: Ranks) -> np.ndarray:
    """What the next step will apply, on every rank the same."""
    late = [ranks.numpy_state(state)["scheme"]["late"] for state in ranks.states]
    assert_same_on_ranks(late)
    return late[0]


def test_a_quadratic(backend):
    """f = w ** 2 / 2 from w = 1 with lr = 0.5; the flush applies a gradient of 0."""
    ranks, w, seen = ranks_of(Delayed(), 1, 1, backend), 1.0, []
    for _ in range(4):
        w -= 0.5 * float(ranks.step([floats(w)], 1).applied[0][0])
        seen.append(w)
    assert seen == [1, 0.5, 0, -0.25]
    assert w - 0.5 * float(in_flight(ranks)[0]) == -0.25


def test_two_ranks(backend):
    ranks, grads = ranks_of(Delayed(), 2, 2, backend), [floats(3, 1), floats(-1, 2)]
    applied, entered = np.zeros(2), np.zeros(2)
    expected = [
        ([3, 2], [0, 0], [0, 1], [-1, 0]),
        ([1, 0], [3, 2], [0, 2], [0, 2]),
        ([3, 4], [4, 2], [0, 3], [-1, 0]),
    ]
    for total, so_far, *kept in expected:
        step = ranks.step(grads, 1)
        applied += step.applied[0]
        entered += np.sum(grads, axis=0)
        assert step.totals[0].tolist() == total
        assert applied.tolist() == so_far
        assert [one.tolist() for one in step.kept] == kept
        assert (entered == applied + in_flight(ranks) + np.sum(step.kept, axis=0)).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("collective", [AllGatherSum(), OwnerReduce(), OwnerReduce("compact")], ids=short_repr)
def test_what_enters_is_applied_in_flight_or_kept(collective, size, quick_backend):
    """Also with a collective that rejects entries, or rounds them."""
    ranks = ranks_of(Delayed(), size, 37, quick_backend, SparseSum(TopK(), collective))
    applied, entered = np.zeros(37), np.zeros(37)
    for number in range(12):
        grads = integers(number, size, 37)
        step = ranks.step(grads, 6)
        applied += step.applied[0]
        entered += np.sum(grads, axis=0)
        assert_same_on_ranks(step.applied)
        assert (entered == applied + in_flight(ranks) + np.sum(step.kept, axis=0)).all()
    assert applied.any()


def test_it_is_the_other_memory_one_step_later(quick_backend):
    plain, late = (ranks_of(memory, 3, 37, quick_backend) for memory in (Momentum(0.5), Delayed(Momentum(0.5))))
    before = np.zeros(37, np.float32)
    for number in range(5):
        grads = normal(number, 3, 37)
        expected, step = plain.step(grads, 5), late.step(grads, 5)
        assert_bits_equal(step.applied[0], before)
        assert_bits_equal(step.totals[0], expected.totals[0])
        before = expected.totals[0]
    assert_bits_equal(in_flight(late), before)


def test_dense_buckets_are_late_too(quick_backend):
    ranks = ranks_of(Delayed().for_dense(), 2, 2, quick_backend, Dense())
    assert [ranks.step([floats(1, 2)] * 2, 2).applied[0].tolist() for _ in range(2)] == [[0, 0], [2, 4]]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_step_that_is_not_finite_is_seen_at_once_and_delays_the_one_before(backend):
    """The optimizer skips it, and applies in the next what it would have applied in this."""
    ranks = ranks_of(Delayed(), 2, 2, backend)
    ranks.step([floats(1, 0)] * 2, 1)
    bad = ranks.step([floats(float("nan"), 0), floats(1, 0)], 1)
    assert not np.isfinite(bad.applied[0]).all()
    assert_same_on_ranks([np.isnan(one) for one in bad.applied])
    assert ranks.step([floats(5, 0)] * 2, 1).applied[0].tolist() == [2, 0]
    assert in_flight(ranks).tolist() == [10, 0]


@pytest.mark.parametrize("gains", [(0.5, 0.5), (1024.0, 512.0)])
def test_a_loss_scale_may_change_meanwhile(gains, backend):
    memory, shared = Delayed(), {"late": backend.array(floats(0))}
    for gain, plain in zip(gains, (0, 3)):
        reduced = Reduced(backend.array(floats(3 * gain)), used=None, finite=backend.ops.all_finite(shared["late"]))
        given, shared = memory.follow(backend.ops, gain, reduced, shared)
        assert backend.numpy(given).tolist() == [plain * gain]


def test_blind_selections_without_a_memory_are_rescaled_all_the_same():
    assert sparse_config(sparsifier="random_block", memory=Delayed("none")).scheme().rescale
    assert not sparse_config(sparsifier="random_block", memory="delayed").scheme().rescale


@pytest.mark.parametrize("memory", ["sgc", SGC(0.5), Delayed(), "delayed"], ids=short_repr)
def test_memories_that_change_what_is_applied_cannot_be_delayed(memory):
    with pytest.raises(ValueError, match="`memory` must leave to the optimizer what the ranks sum"):
        Delayed(memory)


def test_what_adapts_cannot_be_delayed():
    with pytest.raises(ValueError, match="`memory` must not be 'delayed' here"):
        adaptive_config(memory="delayed")


def test_the_momentum_of_the_other_memory_is_known():
    arguments = {"compression": None, "op": 0, "known_ops": (0, 1), "predivide": 1.0, "passes": 1}
    with pytest.raises(ValueError, match=r"`memory` applies the momentum itself \(0.8\)"):
        check_wrapping(sparse_config(memory=Delayed(Momentum(0.8))), momentum=0.9, **arguments)
    assert check_wrapping(sparse_config(memory="delayed"), momentum=0.9, **arguments)


def test_settings_of_the_other_memory_are_compared_between_ranks():
    words = [sparse_config(memory=Delayed(Momentum(m))).describe()["memory"] for m in (0.8, 0.9)]
    assert words[0] != words[1]
    assert words[0] == "Delayed(memory=Momentum(clip_norm=None, masking=True, momentum=0.8, nesterov=False))"
