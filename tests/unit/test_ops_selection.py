"""Operations that choose among elements, against NumPy's semantics, on every back end."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import BACK_ENDS, assert_bits_equal, floats, frozen
from hypothesis import given
from hypothesis import strategies as st
from vectors import ANY, INF, NAN, vectors


def assert_largest(x: np.ndarray, chosen: np.ndarray, among: np.ndarray) -> None:
    """`chosen`, ascending, are the largest of the indices `among`; ties any way. NaN and infinity rank alike."""
    assert (np.diff(chosen) > 0).all()
    assert set(chosen) <= set(among)
    size = np.where(np.isnan(x), np.inf, np.abs(x))
    rest = np.setdiff1d(among, chosen)
    if len(rest) and len(chosen):
        assert size[chosen].min() >= size[rest].max()


@given(x=vectors(ANY), data=st.data())
def test_top_abs(backend, x, data):
    k = data.draw(st.integers(1, len(x)))
    array = backend.array(x)
    chosen = backend.numpy(backend.ops.top_abs(array, k))
    assert chosen.shape == (k,)
    assert chosen.dtype in (np.int32, np.int64)
    assert_largest(x, chosen, np.arange(len(x)))
    assert_bits_equal(backend.numpy(backend.ops.top_abs(backend.array(x), k)), chosen)
    assert_bits_equal(backend.numpy(array), x)


def test_top_abs_prefers_what_is_not_finite(backend):
    x = backend.array(floats(1e38, NAN, -2, -INF, 3))
    assert backend.numpy(backend.ops.top_abs(x, 2)).tolist() == [1, 3]
    assert backend.numpy(backend.ops.top_abs(x, 3)).tolist() == [0, 1, 3]


@pytest.mark.parametrize("value", [1.0, 0.0, NAN, INF])
def test_top_abs_of_equal_magnitudes(value, backend):
    x = backend.array(frozen(np.full(999, value) * np.resize([1, -1], 999), np.float32))
    chosen = backend.numpy(backend.ops.top_abs(x, 4))
    assert len(set(chosen.tolist())) == 4
    if backend.name in ("numpy", "torch"):
        assert chosen.tolist() == [0, 1, 2, 3]  # the lowest: what the oracle promises


@given(num_rows=st.integers(1, 4), data=st.data())
def test_top_abs_of_rows(backend, num_rows, data):
    """What it would be of each row alone."""
    x = data.draw(vectors(ANY, num_rows, 6 * num_rows).map(lambda x: frozen(x[: len(x) // num_rows * num_rows])))
    rows = frozen(x.reshape(num_rows, -1))
    k = data.draw(st.integers(1, rows.shape[1]))
    chosen = backend.numpy(backend.ops.top_abs(backend.array(rows), k))
    assert chosen.shape == (num_rows, k)
    for row, found in zip(rows, chosen):
        assert_largest(row, found, np.arange(len(row)))
        assert found.tolist() == backend.numpy(backend.ops.top_abs(backend.array(frozen(row)), k)).tolist()


def test_top_abs_of_rows_of_equal_magnitudes(backend):
    x = backend.array(frozen([[1, -1, 1, -1], [0, 0, 0, 0], [2, 1, -2, 1], [NAN, 1, INF, NAN]], np.float32))
    chosen = backend.numpy(backend.ops.top_abs(x, 2)).tolist()
    assert chosen[:3] == [[0, 1], [0, 1], [0, 2]]
    assert chosen[3] in ([0, 2], [0, 3])  # NaN and infinity rank alike, or not


def test_the_oracle_takes_the_lowest_index_of_a_tie():
    ops, x = BACK_ENDS["numpy"]().ops, frozen(np.random.default_rng(0).integers(-3, 4, 999), np.float32)
    threes, twos = np.flatnonzero(np.abs(x) == 3), np.flatnonzero(np.abs(x) == 2)
    assert ops.top_abs(x, len(threes) + 9).tolist() == sorted([*threes, *twos[:9]])


@given(x=vectors(ANY), threshold=st.one_of(st.floats(0, 100, width=32), st.sampled_from([0.0, 1.0])))
def test_above(backend, x, threshold):
    with np.errstate(invalid="ignore"):
        expected = np.flatnonzero((np.abs(x) > threshold) | np.isnan(x))
    array = backend.array(x)
    assert backend.numpy(backend.ops.above(array, threshold)).tolist() == expected.tolist()
    assert_bits_equal(backend.numpy(array), x)


def test_above_is_strict_and_includes_nan(backend):
    x = backend.array(floats(1, -1, 1.5, NAN, 0, -INF, INF, -NAN))
    assert backend.numpy(backend.ops.above(x, 1.0)).tolist() == [2, 3, 5, 6, 7]
    assert backend.numpy(backend.ops.above(x, 3.4e38)).tolist() == [3, 5, 6, 7]
    assert backend.numpy(backend.ops.above(x, INF)).tolist() == [3, 7]
    assert backend.numpy(backend.ops.above(backend.array(floats(0, -0.0)), 0.0)).tolist() == []


def test_above_takes_what_kth_largest_returns(backend):
    x = backend.array(floats(3, -1, 2, -5))
    assert backend.numpy(backend.ops.above(x, backend.ops.kth_largest(x, 3) * 1.0)).tolist() == [0, 3]


def test_above_in_a_long_vector(backend):
    """Longer than the pieces that a back end may scan one by one, and not a multiple of them."""
    x = frozen(np.random.default_rng(0).normal(size=300_001), np.float32)
    found = backend.numpy(backend.ops.above(backend.array(x), 2.5))
    assert found.tolist() == np.flatnonzero(np.abs(x) > np.float32(2.5)).tolist()


@given(x=vectors(ANY, 2), data=st.data())
def test_largest(backend, x, data):
    indices = np.array(sorted(data.draw(st.sets(st.integers(0, len(x) - 1), min_size=1))))
    k = data.draw(st.integers(1, len(x)))
    chosen = backend.numpy(backend.ops.largest(backend.array(x), backend.array(frozen(indices)), k))
    assert len(chosen) == min(k, len(indices))
    assert_largest(x, chosen, indices)


def test_largest_with_ties_and_nan(backend):
    x, indices = backend.array(floats(9, 1, -1, NAN, 1, INF)), backend.array(frozen([1, 2, 3, 4, 5]))
    assert backend.numpy(backend.ops.largest(x, indices, 2)).tolist() == [3, 5]
    assert len(set(backend.numpy(backend.ops.largest(x, indices, 3)).tolist())) == 3
    assert backend.numpy(backend.ops.largest(x, indices, 5)).tolist() == [1, 2, 3, 4, 5]
    none = backend.ops.above(x, INF * 1.0)[:0]
    assert backend.numpy(backend.ops.largest(x, none, 2)).tolist() == []


@given(x=vectors(ANY), data=st.data())
def test_kth_largest(backend, x, data):
    k = data.draw(st.integers(1, len(x)))
    expected = np.sort(np.where(np.isnan(x), np.inf, np.abs(x)))[::-1][k - 1]
    value = float(backend.ops.kth_largest(backend.array(x), k))
    assert value == expected or (np.isnan(value) and expected == np.inf)
