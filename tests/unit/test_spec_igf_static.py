"""Check values of the static filter (igf.md): statistics per step, entries that are held back, refreshes."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import Ranks, assert_bits_equal, assert_close, assert_conserved, assert_same_on_ranks, floats
from methods import normal

from hvd_sparse.collectives.allgather import AllGatherSum
from hvd_sparse.exchange import Exchange
from hvd_sparse.memories.residual import Residual
from hvd_sparse.schemes.low_rank import LowRank
from hvd_sparse.schemes.sparse import SparseSum
from hvd_sparse.schemes.static import Static
from hvd_sparse.sparsifiers.topk import TopK
from hvd_sparse.types import Spec

SUM = SparseSum(TopK(), AllGatherSum())


def ranks_of(size: int, n: int, backend=None, scheme=None, **settings: float) -> Ranks:
    return Ranks(Exchange(Spec("b", n), scheme or Static(SUM, **settings), Residual()), size, backend)


def statistic(ranks: Ranks, key: str) -> np.ndarray:
    every = [ranks.numpy_state(state)["scheme"][key] for state in ranks.states]
    assert_same_on_ranks(every)
    return every[0]


def test_statistics(backend):
    ranks = ranks_of(1, 1, backend, variance=0, weight=0.25)
    means, variances = [0.25, 0.4375, 0.578125, 1.18359375], [0.1875, 0.24609375, 0.243896484, 1.28269958]
    for value, mean, variance in zip([1, 1, 1, 3], means, variances):
        ranks.step([floats(value)], 1)
        assert statistic(ranks, "mean") == pytest.approx([mean])
        assert statistic(ranks, "variance") == pytest.approx([variance])


def test_what_waited_counts_per_step(backend):
    """The second entry arrives once in three steps, as the sum of three gradients; the first one meanwhile waits."""
    ranks, arrivals = ranks_of(2, 2, backend, variance=0, weight=0.5), []
    for _ in range(4):
        arrivals.append(ranks.step([floats(5, 2), floats(5, 2)], 1).totals[0].tolist())
    assert arrivals == [[10, 0], [10, 0], [0, 12], [20, 0]]
    assert statistic(ranks, "mean").tolist() == [5 * (1 - 0.5**3), 2 * 0.5]
    assert statistic(ranks, "observed").tolist() == [3, 1]
    assert statistic(ranks, "waited").tolist() == [0, 1]


def test_a_static_entry_until_it_varies(backend):
    """Ranks have 6 and 2. Known as 3 at first, their mean becomes 3.5 at the refresh in step 4; 20 in step 8 is far."""
    ranks = ranks_of(2, 2, backend, variance=3.5, weight=0.5, refresh_every=4)
    totals, kept = [], []
    for number in range(10):
        more = 16 if number > 4 else 0
        step = ranks.step([floats(6 + more, 0), floats(2 + more, 0)], 1)
        assert_conserved(step.accumulated, step.totals[0], step.kept, 0)
        totals.append(step.totals[0][0])
        kept.append([one[0] for one in step.kept])
    assert totals[:4] == [8, 8, 6, 6], "sent twice, then known"
    assert kept[:4] == [[0, 0], [0, 0], [3, -1], [6, -2]]
    assert totals[4:8] == [12, 7, 7, 7], "what is left goes in step 4"
    assert kept[4:8] == [[0, 0], [18.5, 14.5], [37, 29], [55.5, 43.5]]
    assert totals[8:] == [7 + 4 * 33, 40]
    assert kept[8:] == [[0, 0], [0, 0]]
    assert statistic(ranks, "variance")[0] > 3.5


def test_static_entries_leave_room_to_others(quick_backend):
    """Two large entries that stay the same are known after a step each; then a third one goes in every step."""
    grads = [floats(8, 4, 1, 0), floats(8, 4, 1, 0)]
    ranks = ranks_of(2, 4, quick_backend, variance=0.1, weight=1.0, refresh_every=50)
    seen = [ranks.step(grads, 1) for _ in range(6)]
    assert [step.totals[0].tolist() for step in seen] == [
        [16, 0, 0, 0], [16, 16, 0, 0], [16, 8, 6, 0], [16, 8, 2, 0], [16, 8, 2, 0], [16, 8, 2, 0],
    ]  # fmt: skip
    assert not np.any(seen[-1].kept)


def test_nothing_is_static_without_variance(quick_backend):
    one, other = ranks_of(3, 50, quick_backend, variance=0), ranks_of(3, 50, quick_backend, SUM)
    for number in range(6):
        grads = normal(number % 2, 3, 50)
        first, second = one.step(grads, 7), other.step(grads, 7)
        assert_bits_equal(first.totals[0], second.totals[0])
        assert_bits_equal(np.array(first.kept), np.array(second.kept))


def test_gradients_that_hardly_vary(quick_backend):
    """What many entries need is known in the end, and applied with what is sent."""
    mean, size, n = normal(0, 1, 200)[0], 3, 200
    ranks = ranks_of(size, n, quick_backend, variance=0.1, refresh_every=5)
    total = np.zeros(n)
    for number in range(120):
        grads = [np.float32(mean + 0.05 * noise) for noise in normal(number, size, n)]
        step = ranks.step(grads, 20)
        assert_conserved(step.accumulated, step.totals[0], step.kept, 1e-5)
        assert_same_on_ranks(step.totals)
        if number >= 100:
            total += step.totals[0] / 20
    for key in ("mean", "variance", "waited", "observed"):
        statistic(ranks, key)
    error = np.linalg.norm(total - size * mean) / np.linalg.norm(size * mean)
    assert error < 0.5
    assert np.count_nonzero(step.totals[0]) > 3 * 20, "more than all ranks together can send"


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_held_entry_that_is_not_finite(bad, backend):
    ranks = ranks_of(2, 3, backend, variance=0.1, weight=1.0)
    grads = [floats(8, 1, 0), floats(8, 1, 0)]
    ranks.step(grads, 1)
    before = statistic(ranks, "mean").tolist()
    assert before == [8, 0, 0]
    assert ranks.step([floats(bad, 1, 0), grads[1]], 1).finite == [False, False]
    assert statistic(ranks, "mean").tolist() == before
    step = ranks.step(grads, 1)
    assert step.finite == [True, True]
    assert_close(step.totals[0], floats(16, 4, 0), 0)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"variance": -1}, ValueError),
        ({"variance": float("nan")}, ValueError),
        ({"variance": "0"}, ValueError),
        ({"weight": 0}, ValueError),
        ({"weight": 1.5}, ValueError),
        ({"refresh_every": 0}, ValueError),
        ({"scheme": LowRank()}, TypeError),
        ({"scheme": "sparse"}, TypeError),
    ],
)
def test_arguments(settings, error):
    name, value = next(iter(settings.items()))
    with pytest.raises(error, match=f"`{name}` must be") as info:
        Static(**settings)
    assert f"Received: {name}={value!r}" in str(info.value)
