"""Operations on matrices whose rows are messages, against NumPy's semantics, on every back end."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import assert_bits_equal, frozen
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from vectors import FINITE

ALL_SHORTS = frozen(np.arange(65536), np.int32)


def matrices(dtype: type, elements: st.SearchStrategy, widths: st.SearchStrategy) -> st.SearchStrategy:
    shapes = st.tuples(st.integers(1, 4), widths)
    return shapes.flatmap(lambda shape: arrays(dtype, shape, elements=elements)).map(frozen)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
@pytest.mark.parametrize("widths", [(1,), (2, 3), (0, 2), (1, 0, 4, 1), (0, 0)])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_join(num_rows, widths, dtype, backend):
    parts = [frozen(np.arange(num_rows * width).reshape(num_rows, width) + 10 * width, dtype) for width in widths]
    joined = backend.ops.join([backend.array(part) for part in parts])
    assert_bits_equal(backend.numpy(joined), np.concatenate(parts, axis=1))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((6,), (2, 3)),
        ((2, 3), (-1,)),
        ((2, 3), (3, 2)),
        ((2, 3), (3, -1)),
        ((4,), (4, 1)),
        ((0,), (0, 3)),
        ((0, 5), (-1,)),
    ],
)
def test_reshape(before, after, backend):
    x = frozen(np.arange(np.prod(before)).reshape(before), np.int32)
    array = backend.array(x)
    assert_bits_equal(backend.numpy(backend.ops.reshape(array, after)), x.reshape(after))
    assert_bits_equal(backend.numpy(array), x)


@pytest.mark.parametrize("after", [(-1,), (5, 2), (1, 10)])
def test_reshape_of_what_is_not_contiguous(after, backend):
    """Columns of a message."""
    x = frozen(np.arange(20).reshape(5, 4), np.int32)
    assert_bits_equal(backend.numpy(backend.ops.reshape(backend.array(x)[:, 1:3], after)), x[:, 1:3].reshape(after))


INT32 = st.integers(-(2**31), 2**31 - 1)


@given(x=matrices(np.int32, INT32, st.integers(1, 6)), least=INT32)
def test_row_max(backend, x, least):
    """Exact, also beyond the integers of float32."""
    expected = np.maximum(x.max(axis=1, keepdims=True), np.int32(least))
    assert_bits_equal(backend.numpy(backend.ops.row_max(backend.array(x), least)), expected)


EVEN = st.sampled_from([2, 4, 6])


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@given(x=matrices(np.float32, FINITE, EVEN))
def test_halves(backend, x):
    """The same words on every back end: rounded to the nearest, ties to even, and infinite from 65520."""
    expected = x.astype(np.float16)
    words = backend.ops.halves(backend.array(x))
    assert_bits_equal(backend.numpy(words), expected.view(np.int32))
    assert_bits_equal(backend.numpy(backend.ops.from_halves(words)), expected.astype(np.float32))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_halves_at_the_edges(backend):
    tie, subnormal = 1 + 2.0**-11, 2.0**-24
    values = [
        [tie, 1 + 3 * 2.0**-11, 65519, 65520, -65520, subnormal],
        [subnormal / 2, 0.6 * subnormal, 0, -0.0, 1e-38, -1],
    ]
    expected = [[1, 1 + 2.0**-9, 65504, np.inf, -np.inf, subnormal], [0, subnormal, 0, -0.0, 0, -1]]
    words = backend.ops.halves(backend.array(frozen(values, np.float32)))
    assert_bits_equal(backend.numpy(backend.ops.from_halves(words)), np.float32(expected))


def test_what_is_not_finite_stays_so_in_16_bits(backend):
    words = backend.ops.halves(backend.array(frozen([[np.nan, np.inf], [-np.inf, -np.nan]], np.float32)))
    received = backend.numpy(backend.ops.from_halves(words))
    np.testing.assert_array_equal(received, [[np.nan, np.inf], [-np.inf, np.nan]])


def test_every_half_comes_back(backend):
    bits = frozen(ALL_SHORTS.astype(np.uint16).reshape(4, -1))
    words = frozen(bits.view(np.int32))
    received = backend.numpy(backend.ops.from_halves(backend.array(words)))
    with np.errstate(invalid="ignore"):
        expected = bits.view(np.float16).astype(np.float32)
    is_nan = np.isnan(expected)
    assert_bits_equal(received[~is_nan], expected[~is_nan])
    assert np.isnan(received[is_nan]).all()
    again = backend.numpy(backend.ops.halves(backend.array(frozen(received)))).view(np.uint16)
    assert_bits_equal(again[~is_nan], bits[~is_nan])


@given(x=matrices(np.int32, st.integers(0, 65535), EVEN))
def test_shorts(backend, x):
    array = backend.array(x)
    words = backend.ops.shorts(array)
    assert_bits_equal(backend.numpy(words), np.ascontiguousarray(x, np.uint16).view(np.int32))
    assert_bits_equal(backend.numpy(backend.ops.from_shorts(words)), x)
    assert_bits_equal(backend.numpy(array), x)


def test_every_short_comes_back(backend):
    words = backend.ops.shorts(backend.array(frozen(ALL_SHORTS.reshape(2, -1))))
    assert_bits_equal(backend.numpy(backend.ops.from_shorts(words)), ALL_SHORTS.reshape(2, -1))


def test_parts_of_a_message_are_read(backend):
    """Columns of a wider matrix: not contiguous."""
    shorts, values = frozen([[1, 65535], [300, 7]], np.int32), frozen([[1.5, -2], [0.25, 3]], np.float32)
    ops = backend.ops
    message = ops.join(
        [ops.shorts(backend.array(shorts)), ops.halves(backend.array(values)), ops.bits(backend.array(values))]
    )
    assert_bits_equal(backend.numpy(ops.from_shorts(message[:, :1])), shorts)
    assert_bits_equal(backend.numpy(ops.from_halves(message[:, 1:2])), values)
    assert_bits_equal(backend.numpy(ops.floats(message[:, 2:])), values)
    assert_bits_equal(
        backend.numpy(ops.halves(backend.array(frozen(np.repeat(values, 2, 1)))[:, 1:3])),
        values.astype(np.float16).view(np.int32),
    )
