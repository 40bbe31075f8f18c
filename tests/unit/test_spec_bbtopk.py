"""bbTopk: blocked selections, and plan P1: dense inside a host, sparse between hosts."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import (
    E4,
    Ranks,
    assert_close,
    assert_conserved,
    assert_same_on_ranks,
    floats,
    frozen,
    short_repr,
    total_words,
)
from hypothesis import given
from hypothesis import strategies as st
from methods import SIZES, integers, normal

from hvd_sparse.collectives.allgather import AllGatherSum
from hvd_sparse.collectives.hierarchical import Hierarchical
from hvd_sparse.collectives.owner_reduce import OwnerReduce
from hvd_sparse.collectives.shared_allreduce import SharedAllReduce
from hvd_sparse.config import sparse_config
from hvd_sparse.drivers.simulate import Link, Simulator, hosts, run
from hvd_sparse.exchange import Exchange
from hvd_sparse.memories.momentum import Momentum
from hvd_sparse.memories.residual import Residual
from hvd_sparse.ops.numpy import NumpyOps
from hvd_sparse.schemes.sparse import SparseSum
from hvd_sparse.sparsifiers.block_topk import BlockTopK
from hvd_sparse.sparsifiers.topk import TopK
from hvd_sparse.types import Spec, World


def exchange(size: int, collective: object = None, memory: object = None) -> Exchange:
    return Exchange(Spec("b", size), SparseSum(TopK(), collective or Hierarchical()), memory or Residual())


def cross_words(step) -> float:
    return total_words([one for one in step.rounds if one.group == "cross"], len(step.totals))


def test_e4(backend):
    """Two hosts of two ranks, k = 4: each shard sends its two largest."""
    step = Ranks(exchange(16), 4, backend).step(E4, 4)
    total = step.totals[0]
    assert {int(i): float(total[i]) for i in np.flatnonzero(total)} == {1: -22, 6: -44, 9: -16, 12: 28}
    assert_same_on_ranks(step.totals)
    assert_conserved(step.accumulated, total, step.kept, 0)
    assert cross_words(step) == 4
    assert [(one.kind, one.group) for one in step.rounds] == [
        ("AllReduce", "local"),
        ("AllToAll", "cross"),
        ("AllGather", "cross"),
        ("AllGather", "local"),
    ]


@pytest.mark.parametrize(("num_hosts", "slots"), [(2, 2), (3, 2), (2, 3), (2, 4), (4, 1), (1, 3), (5, 2)])
@pytest.mark.parametrize("num_elements", [1, 3, 17, 1009])
def test_conservation_on_any_hosts(num_hosts, slots, num_elements, quick_backend):
    size = num_hosts * slots
    for memory in (Residual(), Momentum(0.5)):
        ranks = Ranks(exchange(num_elements, memory=memory), size, quick_backend)
        ranks.groups = hosts(num_hosts, slots)
        for number in range(4):
            step = ranks.step(integers(number, size, num_elements), max(1, num_elements // 10))
            assert_same_on_ranks(step.totals)
            assert_conserved(step.accumulated, step.totals[0], step.kept, 0)


def test_a_rank_keeps_only_its_part_of_the_host(quick_backend):
    ranks = Ranks(exchange(1009), 4, quick_backend)
    for number in range(3):
        step = ranks.step(normal(number, 4), 100)
        for rank, kept in enumerate(step.kept):
            elsewhere = np.ones(1009, bool)
            elsewhere[505 * (rank % 2) : 505 * (rank % 2 + 1)] = False
            assert not kept[elsewhere].any()
            assert kept[~elsewhere].any()


def test_one_host_is_dense(quick_backend):
    ranks = Ranks(exchange(1009), 3, quick_backend)
    ranks.groups = hosts(1, 3)
    grads = normal(0, 3)
    step = ranks.step(grads, 10)
    assert_close(step.totals[0], np.sum(grads, axis=0), 1e-6)
    assert not np.any(step.kept)


def test_momentum_is_masked_where_a_sum_was_applied(quick_backend):
    ranks = Ranks(exchange(16, memory=Momentum(0.5)), 4, quick_backend)
    step = ranks.step(E4, 4)
    for state in ranks.states:
        velocity = ranks.numpy_state(state)["memory"]["velocity"]
        assert np.array_equal(velocity == 0, step.totals[0] != 0)


def test_what_is_not_finite_is_seen_by_every_rank(quick_backend):
    ranks = Ranks(exchange(16), 4, quick_backend)
    bad = np.array(E4[2])
    bad[15] = np.nan
    step = ranks.step([*E4[:2], frozen(bad), E4[3]], 4)
    assert step.finite == [False] * 4
    assert not any(np.any(kept) for kept in step.kept)


def test_volume_and_time_against_the_flat_form():
    """8 ranks on 2 hosts, density 1 %; 1 Gbit/s for a host, shared by its ranks, and 100 Gbit/s inside.

    The specification's model of 25.6 M elements: 68.5 ms and 512,000 words per rank to the other host for the flat
    form, 40.8 ms and 128,000 words for this one. The simulator runs 1 / 256 of that, without the time per collective.
    """
    num_elements, k, slots, scale = 100_000, 1000, 4, 256
    cross, inside = Link(0, 1.25e8 / slots), Link(0, 1.25e10)
    simulator = Simulator(8, cross, groups=hosts(2, slots), links={"local": inside})
    part, grads = exchange(num_elements), normal(0, 8, num_elements)
    simulator.run(
        [part.step(NumpyOps(), simulator.world(rank), grads[rank], k, part.init(NumpyOps())) for rank in range(8)]
    )
    words = total_words([one for one in simulator.rounds if one.group == "cross"], 8)
    assert words * scale == 128_000
    flat_words = 4 * (k // 8) * 4  # to the four ranks of the other host, of what owner_reduce sends to seven
    assert flat_words * scale == 512_000
    assert words <= flat_words / slots
    flat_seconds = 2 * 1.5e-3 + scale * 4 * flat_words / cross.bytes_per_second
    seconds = 4 * 1.5e-3 + scale * simulator.seconds
    assert flat_seconds == pytest.approx(68.5e-3, abs=1e-4)
    assert seconds == pytest.approx(40.8e-3, abs=1e-4)
    assert flat_seconds >= 1.3 * seconds


# Blocked selections


def selected(part, x: np.ndarray, k: int, backend=None) -> list[int]:
    ops, x = (NumpyOps(), x) if backend is None else (backend.ops, backend.array(frozen(x)))
    indices, state = run(part.select(ops, World(0, 1), Spec("b", len(x)), x, k, {}))
    assert state == {}
    return (indices if backend is None else backend.numpy(indices)).tolist()


def energy(x: np.ndarray, indices: list[int]) -> float:
    return float(np.sum(np.square(x[indices], dtype=np.float64)) / np.sum(np.square(x, dtype=np.float64)))


def test_quota_on_e4(backend):
    indices = selected(BlockTopK(4), E4[0], 4, backend)
    assert indices == [0, 7, 8, 12]
    assert energy(E4[0], indices) == pytest.approx(0.515374, abs=5e-7)
    assert energy(E4[0], selected(TopK(), E4[0], 4, backend)) == pytest.approx(0.565508, abs=5e-7)


def test_whole_blocks_on_e4(backend):
    """The L1 norms over ranks are 153, 147, 108, 136: the first block goes."""
    part = BlockTopK(4, "blocks")
    norms = np.abs(E4).reshape(4, 4, 4).sum(axis=(0, 2))
    assert norms.tolist() == [153, 147, 108, 136]
    step = Ranks(Exchange(Spec("b", 16), SparseSum(part, SharedAllReduce()), Residual()), 4, backend).step(E4, 4)
    assert step.totals[0].tolist() == [17, -42, -7, -31] + [0] * 12
    assert_same_on_ranks(step.totals)
    assert_conserved(step.accumulated, step.totals[0], step.kept, 0)
    assert [(one.kind, one.shape) for one in step.rounds] == [("AllReduce", (4,)), ("AllReduce", (4,))]
    assert total_words(step.rounds, 4) == 6 + 6


@pytest.mark.parametrize("data", ["normal", "student"])
def test_captured_energy(data):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=2**18) if data == "normal" else rng.standard_t(3, 2**18)).astype(np.float32)
    k = len(x) // 100
    shares = [energy(x, selected(part, x, k)) for part in (BlockTopK(), TopK())]
    assert 0.997 < shares[0] / shares[1] <= 1


@given(n=st.integers(2, 200), block_size=st.integers(1, 250), data=st.data())
def test_of_every_block_its_largest(n, block_size, data):
    """Of its quota, rounded up, the k largest overall: never more than k, nor less unless the last block is short."""
    k, x = data.draw(st.integers(1, n - 1), "k"), normal(n, 1, n)[0]
    indices = selected(BlockTopK(block_size), x, k)
    assert sorted(set(indices)) == indices
    num_blocks = -(-n // block_size)
    size, quota = -(-n // num_blocks), -(-k // num_blocks)
    best = [
        j
        for start in range(0, n, size)
        for j in sorted(range(start, min(start + size, n)), key=lambda j: -abs(x[j]))[:quota]
    ]
    assert indices == sorted(sorted(best, key=lambda j: -abs(x[j]))[:k])


def test_a_bucket_of_one_block_is_plain_top_k(backend):
    x = normal(0, 1)[0]
    assert selected(BlockTopK(), x, 100, backend) == selected(TopK(), x, 100, backend)


def test_the_quota_with_a_collective_that_has_its_own(quick_backend):
    """Every part of the bucket sends what its quota allows, not what is left after a cut to k."""
    spec = Spec("b", 1000)
    sent = {}
    for name, part in (("blocks", BlockTopK(50)), ("top", TopK())):
        ranks = Ranks(Exchange(spec, SparseSum(part, OwnerReduce()), Residual()), 4, quick_backend)
        step = ranks.step([frozen(grad * np.linspace(1, 30, 1000), np.float32) for grad in normal(0, 4, 1000)], 100)
        assert_conserved(step.accumulated, step.totals[0], step.kept)
        sent[name] = np.count_nonzero(step.totals[0])
    assert sent["blocks"] == sent["top"] == 100


@pytest.mark.parametrize(
    ("k", "size", "most"), [(100, 64, 100), (100, 1000, 100), (10, 64, 10), (129, 64, 129), (130, 64, 129)]
)
def test_whole_blocks_come_to_nearly_k(k, size, most):
    indices = selected(BlockTopK(size, "blocks"), normal(0, 1)[0][:960], k)
    assert sorted(set(indices)) == sorted(indices)
    assert len(indices) == most
    runs = np.flatnonzero(np.diff(np.sort(indices)) != 1)
    assert len(runs) < -(-k // size)


@given(data=st.data())
def test_whole_blocks_conserve(quick_backend, data):
    size, n = data.draw(st.sampled_from(SIZES), "ranks"), data.draw(st.integers(2, 60), "n")
    k, block_size = data.draw(st.integers(1, n - 1), "k"), data.draw(st.integers(1, 70), "block_size")
    collective = data.draw(st.sampled_from([SharedAllReduce(), AllGatherSum()]), "collective")
    scheme = SparseSum(BlockTopK(block_size, "blocks"), collective)
    ranks, shapes = Ranks(Exchange(Spec("b", n), scheme, Residual()), size, quick_backend), []
    for number in range(3):
        step = ranks.step(integers(number, size, n), k)
        assert_same_on_ranks(step.totals)
        assert_conserved(step.accumulated, step.totals[0], step.kept, 0)
        assert_same_on_ranks([quick_backend.numpy(one.used.indices) for one in step.reduced], "indices")
        shapes.append([(one.tag, one.shape) for one in step.rounds])
    assert shapes == [shapes[0]] * 3


def test_the_first_of_equal_blocks_goes():
    assert selected(BlockTopK(2, "blocks"), floats(1, 1, 2, 0, -1, -1, 0, 2), 4) == [0, 1, 2, 3]


def test_the_mode_decides_the_collective():
    assert sparse_config(sparsifier="block_topk").describe()["collective"].startswith("OwnerReduce")
    assert sparse_config(sparsifier=BlockTopK(mode="blocks")).describe()["collective"] == "SharedAllReduce"
    with pytest.raises(ValueError, match="BlockTopK"):
        sparse_config(sparsifier=BlockTopK(mode="blocks"), collective="owner_reduce")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "both"}, r"`mode` must be one of 'quota', 'blocks'. Received: mode='both'"),
        ({"block_size": 0}, r"`block_size` must be a whole number, 1 or more. Received: block_size=0"),
        ({"block_size": 2.5}, r"`block_size` must be a whole number"),
    ],
    ids=short_repr,
)
def test_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        BlockTopK(**arguments)
