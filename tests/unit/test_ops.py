"""Every operation against NumPy's semantics, on every back end. Selection: test_ops_selection.py."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest
from helpers import BackEnd, assert_bits_equal, assert_close, floats, frozen
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from vectors import ANY, FINITE, NAN, vectors

from hvd_sparse.ops.base import Ops


def test_every_operation_of_the_protocol_is_there(backend):
    names = [name for name, _ in inspect.getmembers(Ops, inspect.isfunction) if name[0] != "_"]
    assert len(names) > 20
    assert [name for name in names if not callable(getattr(backend.ops, name, None))] == []
    assert backend.name.startswith(backend.ops.name)


def test_every_operation_of_the_protocol_is_tested():
    text = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_ops*.py"))
    names = [name for name, _ in inspect.getmembers(Ops, inspect.isfunction) if name[0] != "_"]
    assert [name for name in names if f"ops.{name}(" not in text] == []


# Making and joining arrays


def test_zeros(backend):
    for like in (None, backend.array(floats(1, 2))):
        assert_bits_equal(backend.numpy(backend.ops.zeros(3, like)), np.zeros(3, np.float32))
    assert_bits_equal(backend.numpy(backend.ops.zeros(0)), np.zeros(0, np.float32))


def test_zeros_are_fresh(backend):
    first, second = backend.ops.zeros(2), backend.ops.zeros(2)
    first = backend.ops.add(first, backend.array(floats(1, 1)), out=first if backend.name == "torch" else None)
    assert backend.numpy(second).tolist() == [0, 0]


def test_integers(backend):
    assert_bits_equal(backend.numpy(backend.ops.integers([3, 0, -1], backend.array(floats(1)))), np.int32([3, 0, -1]))


def test_length(backend):
    assert [int(backend.ops.length(backend.array(floats(*range(n))))) for n in (0, 1, 5)] == [0, 1, 5]


@given(parts=st.lists(vectors(ANY, 0, 5), min_size=1, max_size=4))
def test_concat(backend, parts):
    joined = backend.ops.concat([backend.array(part) for part in parts])
    assert_bits_equal(backend.numpy(joined), np.concatenate(parts))


@pytest.mark.parametrize("fill", [0, 7.0, -1])
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_pad(dtype, fill, backend):
    x = frozen([5, 6], dtype)
    assert_bits_equal(backend.numpy(backend.ops.pad(backend.array(x), 4, fill)), np.array([5, 6, fill, fill], dtype))
    assert_bits_equal(backend.numpy(backend.ops.pad(backend.array(x), 2, fill)), x)
    empty = backend.array(frozen([], dtype))
    assert_bits_equal(backend.numpy(backend.ops.pad(empty, 1, fill)), np.array([fill], dtype))


# Arithmetic


@given(x=vectors(ANY), factor=st.sampled_from([1.0, 0.5, 0.9, -2.0, 0.0]))
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_scale(x, factor, backend):
    scaled = backend.ops.scale(backend.array(x), factor)
    np.testing.assert_allclose(backend.numpy(scaled), x * np.float32(factor), rtol=1e-6)
    assert backend.numpy(scaled).dtype == np.float32


@given(x=vectors(), factor=st.sampled_from([0.9, 0.5]), alpha=st.sampled_from([1.0, 0.25]), seed=st.integers(0, 99))
def test_blend(backend, x, factor, alpha, seed):
    y = frozen(np.random.default_rng(seed).normal(size=len(x)), np.float32)
    left, right, out = backend.array(x), backend.array(y), backend.ops.zeros(len(x))
    for array in (backend.ops.blend(left, factor, right, alpha), backend.ops.blend(left, factor, right, alpha, out)):
        assert backend.numpy(array).dtype == np.float32
        assert_close(backend.numpy(array), np.float32(factor) * x + np.float32(alpha) * y, 1e-6)
    assert_bits_equal(backend.numpy(left), x)
    assert_bits_equal(backend.numpy(right), y)


def test_scale_leaves_its_input(backend):
    x = backend.array(floats(1, 2))
    out = backend.ops.zeros(2)
    assert backend.numpy(backend.ops.scale(x, 3.0, out=out)).tolist() == [3, 6]
    assert backend.numpy(x).tolist() == [1, 2]


@given(x=vectors(ANY), alpha=st.sampled_from([1.0, 0.5, -2.0, 0.1]), seed=st.integers(0, 99))
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_add(backend, x, alpha, seed):
    y = frozen(np.random.default_rng(seed).normal(size=len(x)), np.float32)
    left, right, out = backend.array(x), backend.array(y), backend.ops.zeros(len(x))
    expected = x + np.float32(alpha) * y
    for array in (backend.ops.add(left, right, alpha), backend.ops.add(left, right, alpha, out=out)):
        result = backend.numpy(array)
        assert result.dtype == np.float32
        finite = np.isfinite(expected)
        assert_close(result[finite], expected[finite], 1e-6)
        np.testing.assert_array_equal(result[~finite], expected[~finite])
    assert_bits_equal(backend.numpy(left), x)
    assert_bits_equal(backend.numpy(right), y)


def test_add_integers(backend):
    """As a sum of indices, of which one is not zero; int32 stays int32, beyond what float32 could hold."""
    x, y = backend.array(frozen([2**24 + 1, 0], np.int32)), backend.array(frozen([0, 2**31 - 1], np.int32))
    assert_bits_equal(backend.numpy(backend.ops.add(x, y)), np.int32([2**24 + 1, 2**31 - 1]))


@given(data=st.data(), n=st.integers(1, 20))
def test_maximum_and_minimum(backend, data, n):
    x, y = (data.draw(vectors(ANY, n, n)) for _ in range(2))
    left, right = backend.array(x), backend.array(y)
    np.testing.assert_array_equal(backend.numpy(backend.ops.maximum(left, right)), np.maximum(x, y))
    np.testing.assert_array_equal(backend.numpy(backend.ops.minimum(left, right)), np.minimum(x, y))


@given(x=vectors())
def test_norm_squared(backend, x):
    expected = float(np.sum(x.astype(np.float64) ** 2))
    assert float(backend.ops.norm_squared(backend.array(x))) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("value", "expected"), [(0.3, 0.5), (0.7, 0.7), (5, 2.0)])
def test_clip(value, expected, backend):
    assert float(backend.ops.clip(value, 0.5, 2.0)) == expected
    scalar = backend.ops.norm_squared(backend.array(floats(value**0.5)))
    assert float(backend.ops.clip(scalar, 0.5, 2.0)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@given(x=vectors(ANY))
def test_all_finite(backend, x):
    assert bool(backend.ops.all_finite(backend.array(x))) == bool(np.isfinite(x).all())


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_an_overflowing_sum_counts_as_not_finite(backend):
    assert not backend.ops.all_finite(backend.array(floats(3e38, 3e38)))


def test_where(backend):
    ops, x, y = backend.ops, backend.array(floats(1, 2)), backend.array(floats(3, 4))
    for value, expected in ((1.0, [1, 2]), (NAN, [3, 4])):
        condition = ops.all_finite(backend.array(floats(value)))
        assert backend.numpy(ops.where(condition, x, y)).tolist() == expected
        chosen = ops.where(condition, {"a": x, "b": {"c": 1.0}}, {"a": y, "b": {"c": 2.0}})
        assert backend.numpy(chosen["a"]).tolist() == expected
        assert float(chosen["b"]["c"]) == (1.0 if value == 1 else 2.0)


def test_cond_calls_one_branch(backend):
    x = backend.array(floats(1, 2))

    def never():
        raise AssertionError("both branches were called")

    yes = backend.ops.all_finite(x)
    for condition in (yes, backend.ops.kth_largest(x, 1) >= 2.0):
        assert backend.numpy(backend.ops.cond(condition, lambda: x, never)).tolist() == [1, 2]
    no = backend.ops.all_finite(backend.array(floats(NAN)))
    assert backend.numpy(backend.ops.cond(no, never, lambda: x[:1])).tolist() == [1]


# Moving


@given(x=vectors(ANY), data=st.data())
def test_gather(backend, x, data):
    indices = data.draw(st.lists(st.integers(0, len(x) - 1), max_size=9))
    for dtype in (np.int32, np.int64):
        taken = backend.ops.gather(backend.array(x), backend.array(frozen(indices, dtype)))
        assert_bits_equal(backend.numpy(taken), x[np.array(indices, int)])


def blocks_of(backend: BackEnd, blocks: list[tuple[list[int], list[float]]]) -> list:
    return [
        (backend.array(frozen(indices, np.int32)), backend.array(frozen(values, np.float32)))
        for indices, values in blocks
    ]


@given(n=st.integers(1, 12), data=st.data())
def test_scatter_sum(backend, n, data):
    blocks, expected = [], np.zeros(n + 1, np.float32)
    for _ in range(data.draw(st.integers(1, 4))):
        indices = sorted(data.draw(st.sets(st.integers(0, n - 1))))
        padding = data.draw(st.integers(0, 2))
        values = data.draw(st.lists(FINITE, min_size=len(indices) + padding, max_size=len(indices) + padding))
        blocks.append((indices + [n] * padding, values))
        for index, value in zip(*blocks[-1]):
            expected[index] += np.float32(value)
    total = backend.ops.scatter_sum(n, blocks_of(backend, blocks))
    np.testing.assert_array_equal(backend.numpy(total), expected[:n])


def test_scatter_sum_drops_padding_and_spreads_nan_nowhere(backend):
    total = backend.ops.scatter_sum(3, blocks_of(backend, [([1, 3, 3], [5, 7, 8]), ([2, 3], [NAN, NAN])]))
    np.testing.assert_array_equal(backend.numpy(total), floats(0, 5, NAN))


def test_scatter_sum_adds_repeated_indices(backend):
    """As many coordinates share a cell of a sketch."""
    places, values = backend.array(frozen([2, 0, 2, 2, 3], np.int32)), backend.array(floats(1, 2, 4, 8, 16))
    assert backend.numpy(backend.ops.scatter_sum(3, [(places, values)])).tolist() == [2, 0, 13]


def test_scatter_sum_adds_in_the_order_given(backend):
    """Float32 addition depends on the order, and all ranks must get the same bits."""
    big = [([0], [1e8]), ([0], [1.0]), ([0], [-1e8]), ([0], [1.0])]
    assert backend.numpy(backend.ops.scatter_sum(1, blocks_of(backend, big))).tolist() == [1.0]
    assert backend.numpy(backend.ops.scatter_sum(1, blocks_of(backend, big[::2] + big[1::2]))).tolist() == [2.0]


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_scatter_sum_onto_values(count, backend):
    """They come first, however few; padding is still dropped."""
    onto = floats(1e8, 2, NAN)[:count]
    start, blocks = backend.array(onto), blocks_of(backend, [([0, 2, 3], [1.0, 5, 7]), ([0, 1], [-1e8, 1])])
    expected = np.float32([0, 1, 5, 0])
    expected[:count] = floats(0, 3, NAN)[:count]
    expected[0] = 0 if count else np.float32(1) - np.float32(1e8)
    np.testing.assert_array_equal(backend.numpy(backend.ops.scatter_sum(3, blocks, onto=start)), expected[:3])
    assert_bits_equal(backend.numpy(start), onto)


@given(x=vectors(ANY), data=st.data())
def test_clear(backend, x, data):
    indices = sorted(data.draw(st.sets(st.integers(0, len(x) - 1))))
    for dtype in (np.int32, np.int64):
        cleared = backend.ops.clear(backend.array(x), backend.array(frozen(indices, dtype)))
        expected = np.array(x)
        expected[indices] = 0
        assert_bits_equal(backend.numpy(cleared), expected)


@given(values=st.lists(st.integers(0, 20), max_size=12), edges=st.lists(st.integers(-1, 21), max_size=5))
def test_searchsorted(backend, values, edges):
    ascending, edges = frozen(sorted(values), np.int32), frozen(edges, np.int32)
    expected = [sum(value < edge for value in values) for edge in edges]
    found = backend.numpy(backend.ops.searchsorted(backend.array(ascending), backend.array(edges)))
    assert found.tolist() == expected
    assert found.dtype == np.int32


@given(n=st.integers(1, 30), data=st.data())
def test_wrapped_range(backend, n, data):
    start, count = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, n))
    indices = backend.numpy(backend.ops.wrapped_range(start, count, n, backend.array(floats(1))))
    assert indices.tolist() == [(start + offset) % n for offset in range(count)]


@given(shift=st.integers(0, 3), count=st.integers(1, 4), stride=st.integers(1, 5))
def test_runs(backend, shift, count, stride):
    starts = [0, 7, 3]
    found = backend.numpy(backend.ops.runs(backend.array(floats(*range(30))), shift, starts, count, stride))
    assert found.tolist() == [start + shift + place * stride for start in starts for place in range(count)]


@given(pattern=arrays(np.int32, st.integers(0, 10), elements=st.integers(-(2**31), 2**31 - 1)))
def test_bits_and_floats(backend, pattern):
    """Any 32 bits: signalling NaN, subnormal numbers, negative zero."""
    values = frozen(pattern.view(np.float32))
    assert_bits_equal(backend.numpy(backend.ops.bits(backend.array(values))), pattern)
    assert_bits_equal(backend.numpy(backend.ops.floats(backend.array(frozen(pattern)))), values)


def test_as_int64(backend):
    indices = backend.ops.as_int64(backend.array(frozen([0, 7, 2**31 - 1], np.int32)))
    assert_bits_equal(backend.numpy(indices * 3), np.array([0, 21, 3 * (2**31 - 1)], np.int64))


def test_as_int32(backend):
    indices = backend.ops.as_int32(backend.array(frozen([0, 7, 2**31 - 1], np.int64)))
    assert_bits_equal(backend.numpy(indices), np.array([0, 7, 2**31 - 1], np.int32))
