"""Check values of the algorithms' conventions: the shared data E4, packing, sizes."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import E4, Ranks, assert_bits_equal, floats, frozen, total_words
from hypothesis import given
from hypothesis import strategies as st

from hvd_sparse.collectives.allgather import AllGatherSum
from hvd_sparse.exchange import Exchange
from hvd_sparse.memories.residual import Residual
from hvd_sparse.schemes.dense import Dense
from hvd_sparse.schemes.sparse import SparseSum
from hvd_sparse.sparsifiers.topk import TopK
from hvd_sparse.types import Sparse, Spec, check_density, num_kept
from hvd_sparse.wire import FP16, FP32, Compact, message

SPEC = Spec("b", 16)


def sparse(entries: dict[int, float], size: int = 16) -> np.ndarray:
    dense = np.zeros(size, np.float32)
    dense[list(entries)] = list(entries.values())
    return dense


def test_data_is_as_described():
    assert all(sorted(np.abs(row)) == list(range(1, 17)) for row in E4)
    expected = [17, -42, -7, -31, -2, 2, -44, 3, -3, -5, 13, 11, 34, -16, 20, 18]
    assert np.sum(E4, axis=0).tolist() == expected


def test_top_k_allgather(backend):
    step = Ranks(Exchange(SPEC, SparseSum(TopK(), AllGatherSum()), Residual()), 4, backend).step(E4, 4)
    selected = [sorted(backend.numpy(one.used.indices).tolist()) for one in step.reduced]
    assert selected == [[7, 8, 12, 13], [2, 6, 7, 9], [0, 8, 9, 12], [0, 6, 11, 12]]
    expected = sparse({0: 32, 2: -13, 6: -29, 7: 2, 9: -1, 11: 15, 12: 44, 13: -14})
    assert step.totals[0].tolist() == expected.tolist()
    assert [float(np.abs(kept).sum()) for kept in step.kept] == [78] * 4
    # Coordinate 8 cancels to exactly 0 and yet was sent by ranks 0 and 2.
    assert [kept[8] for kept in step.kept] == [0, E4[1][8], 0, E4[3][8]]
    assert total_words(step.rounds, 4) == 24
    assert len(step.rounds) == 1


def test_dense(backend):
    step = Ranks(Exchange(SPEC, Dense(), Residual()), 4, backend).step(E4, 16)
    assert step.totals[0].tolist() == np.sum(E4, axis=0).tolist()
    assert total_words(step.rounds, 4) == 2 * 16 * 3 / 4


def test_ideal_top_4_of_the_sum(backend):
    total = frozen(np.sum(E4, axis=0))
    assert backend.numpy(backend.ops.top_abs(backend.array(total), 4)).tolist() == [1, 3, 6, 12]


def test_bits_on_the_wire(backend):
    values = floats(1.5, -2.25, float("nan"), 0.1)
    bits = backend.ops.bits(backend.array(values))
    assert_bits_equal(backend.numpy(bits), np.array([1069547520, -1072693248, 2143289344, 1036831949], np.int32))
    assert_bits_equal(backend.numpy(backend.ops.floats(bits)), values)


def test_payloads_of_nan_survive_the_wire(backend):
    values = frozen(
        np.array([0x7FC0BEEF, -0x400001, 0x7F800001, 0x00000001], np.int64).astype(np.int32).view(np.float32)
    )
    entries = Sparse(backend.array(frozen([1, 5, 6, 9], np.int64)), backend.array(values), 16)
    words, _ = FP32().pack(backend.ops, 16, *message(backend.ops, entries, 4))
    indices, received = FP32().unpack(backend.ops, 16, 4, words)
    assert_bits_equal(backend.numpy(received)[0], values)
    assert_bits_equal(backend.numpy(indices)[0], np.array([1, 5, 6, 9], np.int32))


@given(count=st.integers(0, 5), k=st.integers(5, 9), blocks=st.integers(1, 3))
def test_packing(backend, count, k, blocks):
    indices, values = frozen(np.arange(count) * 3, np.int64), frozen(np.arange(count) - 1.5, np.float32)
    entries = Sparse(backend.array(indices), backend.array(values), 16)
    words, _ = FP32().pack(backend.ops, 16, *message(backend.ops, entries, k))
    assert backend.numpy(words).dtype == np.int32
    assert backend.numpy(words).shape == (1, 2 * k)
    received = FP32().unpack(backend.ops, 16, k, backend.ops.concat([words] * blocks))
    for got_indices, got_values in zip(*map(backend.numpy, received)):
        assert got_indices.tolist() == [*indices.tolist(), *[16] * (k - count)]
        assert got_values.tolist() == [*values.tolist(), *[0.0] * (k - count)]


def test_indices_beyond_the_integers_of_float32_survive(backend):
    indices = backend.array(frozen([2**24, 2**24 + 1, 2**31 - 2], np.int64))
    entries = Sparse(indices, backend.array(floats(1, 2, 3)), 2**31 - 1)
    for wire in (FP32(), FP16(), Compact()):
        words, _ = wire.pack(backend.ops, entries.size, *message(backend.ops, entries, 3))
        received, _ = wire.unpack(backend.ops, entries.size, 3, words)
        assert backend.numpy(received).tolist() == [[2**24, 2**24 + 1, 2**31 - 2]]


@pytest.mark.parametrize(
    ("density", "size", "k"),
    [
        (0.25, 16, 4),
        (0.01, 100, 1),
        (0.01, 99, 1),  # at least one
        (0.01, 199, 1),  # rounded down
        (0.01, 200, 2),
        (0.07, 100, 7),  # 7.000000000000001
        (0.29, 100, 29),  # 28.999999999999996
        (1.0, 7, 7),
        (0.9999, 7, 6),
        (0.001, 25_557_032, 25_557),
        (1e-12, 5, 1),
    ],
)
def test_num_kept(density, size, k):
    assert num_kept(density, size) == k


@given(density=st.floats(1e-9, 1), size=st.integers(1, 10**7))
def test_num_kept_is_in_range(density, size):
    k = num_kept(density, size)
    assert 1 <= k <= size
    assert k == 1 or k <= density * size + 1e-6
    assert k > density * size - 1 - 1e-6


def test_check_density_returns_a_float():
    assert isinstance(check_density(1), float)
    assert check_density(0.5) == 0.5
