"""`by_size` does what one of two collectives does, bit for bit, and says which one by its rounds."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import BACK_ENDS, Ranks, assert_bits_equal
from methods import normal

from hvd_sparse.collectives import Collective
from hvd_sparse.collectives.allgather import AllGatherSum
from hvd_sparse.collectives.by_size import BySize
from hvd_sparse.collectives.owner_reduce import OwnerReduce
from hvd_sparse.exchange import Exchange
from hvd_sparse.memories.residual import Residual
from hvd_sparse.planner.cost import TRAFFIC, by_size, flat, gather, is_short
from hvd_sparse.schemes.sparse import SparseSum
from hvd_sparse.sparsifiers.threshold import Threshold
from hvd_sparse.sparsifiers.topk import TopK
from hvd_sparse.types import Spec

SIZE = 100_003
MANY = 40_000  # entries: 480 KB more by allgather on four ranks


def ranks_of(collective: Collective, num_ranks: int, sparsifier: type = Threshold) -> Ranks:
    scheme = SparseSum(sparsifier(), collective)
    return Ranks(Exchange(Spec("b", SIZE), scheme, Residual()), num_ranks, BACK_ENDS["numpy"]())


@pytest.mark.parametrize("sparsifier", [Threshold, TopK])
@pytest.mark.parametrize("wire", ["fp32", "compact"])
@pytest.mark.parametrize(
    ("num_ranks", "k", "other"),
    [(2, 1000, AllGatherSum), (2, MANY, AllGatherSum), (4, 1000, AllGatherSum), (4, MANY, OwnerReduce)],
)
def test_it_is_one_of_the_two(num_ranks: int, k: int, other: type, wire: str, sparsifier: type) -> None:
    ours, theirs = (ranks_of(collective, num_ranks, sparsifier) for collective in (BySize(wire), other(wire)))
    for number in range(3):
        grads = normal(number, num_ranks, SIZE)
        left, right = ours.step(grads, k), theirs.step(grads, k)
        assert [one.tag for one in left.rounds] == [one.tag for one in right.rounds]
        for mine, its in zip(left.totals + left.used, right.totals + right.used, strict=True):
            assert_bits_equal(mine, its)


def test_a_round_less_is_worth_a_millisecond_of_a_gigabit() -> None:
    most = 1 << 17
    assert is_short(most // 12, 4, 8)
    assert not is_short(most // 12 + 1, 4, 8)
    assert is_short(most // 6, 4, 4)  # shorter entries
    assert is_short(10**9, 2, 8)  # nothing is sent twice on two ranks


def test_the_cost_model_knows() -> None:
    for num_ranks, k in ((2, 10**6), (4, 10_000), (4, 10_900), (8, 3000)):
        assert by_size(1 << 20, k, num_ranks) == gather(1 << 20, k, num_ranks)
    for num_ranks, k in ((4, 11_000), (8, 10_000)):
        assert by_size(1 << 20, k, num_ranks) == flat(1 << 20, k, num_ranks)
    # Ten buckets are ten times as many entries, each as short as before.
    assert by_size(10 << 20, 100_000, 4) == gather(10 << 20, 100_000, 4)
    assert TRAFFIC["by_size"](1000, 10, 1)["global"].num_collectives == 0


def test_a_selection_for_quotas_is_trimmed() -> None:
    """Threshold leaves a surplus to the quotas of `owner_reduce`; here nobody else would trim it."""
    step = ranks_of(BySize(), 3).step(normal(0, 3, SIZE), 1000)
    assert np.count_nonzero(step.totals[0]) <= 3000
    assert step.rounds[0].words[0] == pytest.approx(2 * 2 * 1000)
