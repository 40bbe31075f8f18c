"""Check values of gTopk, a baseline: what its merges drop, and who may keep it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers import E4, Ranks, assert_bits_equal, assert_conserved, assert_same_on_ranks, frozen, watched
from methods import integers, normal

from hvd_sparse.collectives.gtopk import GTopk
from hvd_sparse.config import sparse_config
from hvd_sparse.drivers.simulate import Link, Simulator
from hvd_sparse.exchange import Exchange
from hvd_sparse.memories.residual import Residual
from hvd_sparse.ops.numpy import NumpyOps
from hvd_sparse.planner.cost import flat, seconds, tree
from hvd_sparse.planner.link import Link as PlannedLink
from hvd_sparse.schemes.sparse import SparseSum
from hvd_sparse.sparsifiers.topk import TopK
from hvd_sparse.types import Spec
from hvd_sparse.wire import FP32

OPS = NumpyOps()
SIZES = [1, 2, 3, 4, 5, 6, 7, 8]


def ranks_of(n: int, size: int, backend=None, account_leak: bool = False) -> Ranks:
    return Ranks(Exchange(Spec("b", n), SparseSum(TopK(), GTopk(account_leak)), Residual()), size, backend)


def nonzeros(vector: np.ndarray) -> dict[int, float]:
    return {int(index): float(vector[index]) for index in np.flatnonzero(vector)}


def lost(step) -> np.ndarray:
    """sum acc - total - sum e."""
    return np.sum(step.accumulated, axis=0, dtype=np.float64) - step.totals[0] - np.sum(step.kept, axis=0)


# The shared data


def test_e4(backend):
    step = ranks_of(16, 4, backend).step(E4, 4)
    assert_same_on_ranks(step.totals)
    assert nonzeros(step.totals[0]) == {0: 32, 6: -16, 11: 15, 12: 44}
    assert nonzeros(lost(step)) == {6: -13}, "of rank 3, dropped at rank 2, though 6 survived through rank 1"
    assert [(one.kind, one.tag, max(one.words)) for one in step.rounds] == [
        ("AllToAll", "merge1.k4", 8), ("AllToAll", "merge2.k4", 8), ("Broadcast", "sums.k4", 8),
    ]  # fmt: skip
    assert [one.words for one in step.rounds[:2]] == [(8, 8, 8, 8), (8, 0, 8, 0)]


def test_e4_with_the_leak_accounted_for(backend):
    step = ranks_of(16, 4, backend, account_leak=True).step(E4, 4)
    assert nonzeros(step.totals[0]) == {0: 32, 6: -16, 11: 15, 12: 44}
    assert nonzeros(lost(step)) == {}
    own = np.array(E4)
    for rank, chosen in enumerate([[7, 8, 12, 13], [2, 6, 7, 9], [0, 8, 9, 12], [0, 6, 11, 12]]):
        own[rank][chosen] = 0  # every origin zeroes all of its own
    moved = [nonzeros(kept - zeroed) for kept, zeroed in zip(step.kept, own)]
    assert moved == [{2: -13, 7: 2, 9: -14, 13: -14}, {}, {6: -13, 9: 13}, {}], "8 has cancelled"


def test_e4_between_the_rounds():
    scheme, spec, simulator = SparseSum(TopK(), GTopk()), Spec("b", 16), Simulator(4)
    seen = [[] for _ in range(4)]
    programs = [scheme.reduce(OPS, simulator.world(rank), spec, E4[rank], 4, {}) for rank in range(4)]
    simulator.run([watched(program, requests) for program, requests in zip(programs, seen)])

    def holds(rank: int, number: int) -> dict[int, float]:
        places, values = FP32().unpack(OPS, 16, 4, seen[rank][number].tensor)
        return {int(i): float(v) for i, v in zip(places[0], values[0]) if i < 16}

    assert holds(0, 1) == {6: -16, 8: 15, 9: -14, 12: 16}
    assert holds(2, 1) == {0: 32, 8: -15, 11: 15, 12: 28}
    assert [request.splits for request in (seen[r][0] for r in range(4))] == [
        (0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 0, 0), (0, 0, 1, 0),
    ]  # fmt: skip
    assert [seen[r][1].splits for r in range(4)] == [(0,) * 4, (0,) * 4, (1, 0, 0, 0), (0,) * 4]


def test_all_of_it_is_the_dense_sum(backend):
    step = ranks_of(16, 4, backend).step(E4, 16)
    assert step.totals[0].tolist() == np.sum(E4, axis=0).tolist()
    assert not np.any(step.kept)


# The text


def tree_of(x: list[np.ndarray], k: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """The specification's text: total and residuals."""
    size, kept = len(x), [np.array(one) for one in x]
    chosen = [OPS.top_abs(one, k) for one in x]
    current = [dict(zip(own.tolist(), one[own])) for own, one in zip(chosen, x)]
    stride = 1
    while stride < size:
        for rank in range(0, size - stride, 2 * stride):
            sums = dict(current[rank])
            for index, value in current[rank + stride].items():
                sums[index] = sums[index] + value if index in sums else value
            current[rank] = dict(sorted(sums.items(), key=lambda entry: -abs(entry[1]))[:k])
        stride *= 2
    total = np.zeros_like(x[0])
    total[list(current[0])] = list(current[0].values())
    for own, one in zip(chosen, kept):
        one[np.intersect1d(own, list(current[0]))] = 0
    return total, kept


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("n", "k"), [(1009, 100), (64, 3), (13, 5)])
def test_the_specification_word_for_word(n, k, size, quick_backend):
    ranks = ranks_of(n, size, quick_backend)
    for number in range(3):
        step = ranks.step(normal(number, size, n), k)
        total, kept = tree_of(step.accumulated, k)
        assert np.count_nonzero(step.totals[0]) <= k
        for rank in range(size):
            assert_bits_equal(step.totals[rank], total)
            assert_bits_equal(step.kept[rank], kept[rank])


@pytest.mark.parametrize("size", SIZES)
def test_what_is_lost_is_accounted_for(size, quick_backend):
    """Nothing on two ranks; with the option nothing at all, and the sums that go on are the same."""
    plain, accounting = (ranks_of(1009, size, quick_backend, account) for account in (False, True))
    common = integers(9, 1, limit=50)[0]
    grads = [frozen(common + own) for own in integers(0, size, limit=50)]
    step, other = plain.step(grads, 100), accounting.step(grads, 100)
    assert_bits_equal(step.totals[0], other.totals[0])
    assert np.any(lost(step)) == (size > 2)
    for number in range(1, 4):
        assert_conserved(other.accumulated, other.totals[0], other.kept, 0)
        other = accounting.step(integers(number, size, limit=50), 100)


def test_more_ranks_lose_more():
    """Of normal gradients that are half alike, what the documentation says, at a density of 0.01."""
    rng, shares = np.random.default_rng(0), []
    for size in (2, 4, 8, 16):
        common = rng.normal(size=20_000)
        x = [frozen(common + rng.normal(size=20_000), np.float32) for _ in range(size)]
        step = ranks_of(20_000, size).step(x, 200)
        shares.append(float(np.abs(lost(step)).sum() / np.abs(step.totals[0]).sum()))
    assert shares[0] < 1e-6 < shares[1] < shares[2] < shares[3]
    assert shares == pytest.approx([0, 0.06, 0.2, 0.35], abs=0.05)


# Cost


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7, 8, 16])
def test_rounds_and_words(size):
    step = ranks_of(1009, size).step(normal(0, size), 100)
    depth = math.ceil(math.log2(size))
    assert len(step.rounds) == depth + 1
    assert [max(one.words) for one in step.rounds] == [200 * (size > 1)] * (depth + 1)


@pytest.mark.parametrize("gbit", [0.1, 1, 10, 25])
@pytest.mark.parametrize("density", [0.0001, 0.001, 0.01])
@pytest.mark.parametrize("size", [4, 8, 32, 128])
def test_the_default_is_faster(size, density, gbit):
    n, link = 25_600_000, PlannedLink(1.5e-3, 8e-9 / gbit)
    k = int(density * n)
    assert seconds(link, flat(n, k, size)) < seconds(link, tree(n, k, size))


def test_the_default_is_faster_in_the_simulator():
    times = []
    for collective in ("owner_reduce", "gtopk"):
        scheme, spec = sparse_config(sparsifier="topk", collective=collective).scheme(), Spec("b", 100_000)
        simulator, x = Simulator(4, Link(1.5e-3, 25e9 / 8)), normal(0, 4, spec.size)
        simulator.run([scheme.reduce(OPS, simulator.world(r), spec, x[r], 1000, {}) for r in range(4)])
        times.append(simulator.seconds)
    assert times[0] < times[1]


def test_it_has_no_wire_format():
    assert isinstance(sparse_config(collective="gtopk", wire="fp32").collective, GTopk)
    with pytest.raises(ValueError, match="`wire` is for collectives that send indices and add nothing on the way"):
        sparse_config(collective="gtopk", wire="fp16")
