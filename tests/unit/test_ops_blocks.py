"""Operations on entries by block, and on masks and places, against NumPy's semantics, on every back end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers import BACK_ENDS, BackEnd, assert_bits_equal, floats, frozen
from hypothesis import given
from hypothesis import strategies as st
from vectors import ANY, FINITE, INF, NAN, vectors

Blocks = Callable[..., tuple[np.ndarray, np.ndarray]]


@pytest.fixture(scope="module", params=[*BACK_ENDS, "torch, as on a GPU"])
def blocks(request: pytest.FixtureRequest) -> Blocks:
    """`Ops.blocks` of every back end, from NumPy arrays to NumPy arrays. It leaves its inputs alone."""
    backend = BACK_ENDS[request.param.partition(",")[0]]()
    if "GPU" in request.param:
        from hvd_sparse.ops.torch import _blocks_by_sorting

        return lambda *arguments: call(backend, _blocks_by_sorting, *arguments)
    return lambda *arguments: call(backend, backend.ops.blocks, *arguments)


def call(backend: BackEnd, function: Callable, indices, values, *sizes: int) -> tuple[np.ndarray, np.ndarray]:
    arrays = backend.array(frozen(indices)), backend.array(frozen(values))
    places, taken = function(*arrays, *sizes)
    assert_bits_equal(backend.numpy(arrays[0]), indices)
    assert_bits_equal(backend.numpy(arrays[1]), values)
    return np.array(backend.numpy(places)), np.array(backend.numpy(taken))


def naive_blocks(indices, values, num_blocks: int, size: int, quota: int) -> tuple[np.ndarray, np.ndarray]:
    """One entry after the other. Of a tie the lowest index."""
    places = np.full((num_blocks, quota), size, np.int32)
    taken = np.zeros((num_blocks, quota), np.float32)
    for block in range(num_blocks):
        inside = [(int(i) - block * size, v) for i, v in zip(indices, values) if i // size == block]
        by_size = sorted(inside, key=lambda entry: (-INF if np.isnan(entry[1]) else -abs(entry[1]), entry[0]))
        for slot, (place, value) in enumerate(sorted(by_size[:quota], key=lambda entry: entry[0])):
            places[block, slot], taken[block, slot] = place, value
    return places, taken


def assert_blocks(found, indices, values, num_blocks: int, size: int, quota: int) -> None:
    """As `naive_blocks`, but ties go any way."""
    places, taken = found
    expected, expected_values = naive_blocks(indices, values, num_blocks, size, quota)
    assert places.dtype == np.int32
    assert taken.dtype == np.float32
    assert places.shape == taken.shape == (num_blocks, quota)
    by_index = dict(zip(indices.tolist(), values))
    for block in range(num_blocks):
        count = int((expected[block] != size).sum())
        assert (places[block, count:] == size).all()
        assert_bits_equal(taken[block, count:], np.zeros(quota - count, np.float32))
        chosen = places[block, :count]
        assert (np.diff(chosen) > 0).all()
        assert_bits_equal(
            taken[block, :count], np.float32([by_index.get(block * size + place, NAN) for place in chosen])
        )
        sizes, wanted = (
            np.sort(np.nan_to_num(np.abs(v[block]), nan=INF, posinf=INF)) for v in (taken, expected_values)
        )
        assert sizes.tolist() == wanted.tolist()


@st.composite
def entries(draw: st.DrawFn, elements: st.SearchStrategy) -> tuple:
    """Any entries of any number of blocks, with any quota: none, all, more than there are."""
    num_blocks, size, quota = draw(st.integers(1, 5)), draw(st.integers(1, 7)), draw(st.integers(1, 9))
    indices = frozen(sorted(draw(st.sets(st.integers(0, num_blocks * size - 1)))), np.int32)
    values = frozen(draw(st.lists(elements, min_size=len(indices), max_size=len(indices))), np.float32)
    return indices, values, num_blocks, size, quota


@given(case=entries(ANY))
def test_blocks(blocks, case):
    assert_blocks(blocks(*case), *case)


@given(case=entries(FINITE), seed=st.integers(0, 99))
def test_blocks_of_different_values(blocks, case, seed):
    indices, _, *sizes = case
    rng = np.random.default_rng(seed)
    values = frozen((rng.permutation(len(indices)) + 1) * rng.choice([-1.5, 1.5], len(indices)), np.float32)
    for found, expected in zip(blocks(indices, values, *sizes), naive_blocks(indices, values, *sizes)):
        assert_bits_equal(found, expected)


@pytest.mark.parametrize(
    ("indices", "values", "num_blocks", "size", "quota"),
    [
        pytest.param([], [], 3, 4, 2, id="no entry"),
        pytest.param([], [], 1, 1, 1, id="no entry of one"),
        pytest.param(range(8, 12), [1, -4, 3, 2], 5, 4, 2, id="all in one block"),
        pytest.param(range(8, 12), [1, -4, 3, 2], 3, 4, 4, id="one full block, the last"),
        pytest.param([0, 5], [1, 2], 2, 3, 7, id="quota larger than a block"),
        pytest.param(range(6), [7] * 6, 2, 3, 2, id="ties"),
        pytest.param(range(6), [0, -0.0] * 3, 2, 3, 2, id="zeros"),
        pytest.param(range(6), [NAN] * 6, 2, 3, 2, id="all nan"),
        pytest.param(range(6), [3e38, NAN, 1, INF, 5, -INF], 2, 3, 2, id="not finite"),
        pytest.param(range(4), [1, NAN, INF, -INF], 1, 4, 3, id="nan beside infinities"),
        pytest.param([0, 1, 2], [1e-45, 0, 1e-38], 1, 3, 2, id="subnormal"),
        pytest.param([2**30, 2**31 - 3], [5, 6], 2, 2**30 - 1, 1, id="large indices"),
    ],
)
def test_blocks_at_the_edges(blocks, indices, values, num_blocks, size, quota):
    case = frozen(list(indices), np.int32), floats(*values), num_blocks, size, quota
    assert_blocks(blocks(*case), *case)


def test_nan_is_the_largest_of_its_block(blocks):
    places, taken = blocks(np.arange(6, dtype=np.int32), floats(1e38, NAN, 2, 3, 4, 5), 2, 3, 1)
    assert places.tolist() == [[1], [2]]
    assert np.isnan(taken[0, 0])
    assert taken[1, 0] == 5


def test_blocks_of_many_entries(blocks):
    """More blocks and entries than fit a few lines, most blocks over their quota, some empty."""
    rng = np.random.default_rng(0)
    indices = np.flatnonzero(rng.random(20_000) < 0.1 * (np.arange(20_000) % 7000 > 999)).astype(np.int32)
    values = (rng.permutation(len(indices)) + 1).astype(np.float32)
    sizes = 300, 67, 5
    for found, expected in zip(blocks(indices, values, *sizes), naive_blocks(indices, values, *sizes)):
        assert_bits_equal(found, expected)


def test_blocks_take_long_indices(quick_backend):
    indices = quick_backend.array(frozen([0, 4, 5], np.int64))
    found = quick_backend.ops.blocks(indices, quick_backend.array(floats(1, 2, 3)), 2, 3, 1)
    assert [quick_backend.numpy(array).tolist() for array in found] == [[[0], [2]], [[1], [3]]]


def test_the_naive_loop():
    indices, values = np.array([0, 1, 2, 7]), floats(3, NAN, -4, 1)
    places, taken = naive_blocks(indices, values, 3, 3, 2)
    assert places.tolist() == [[1, 2], [3, 3], [1, 3]]
    np.testing.assert_array_equal(taken, [[NAN, -4], [0, 0], [1, 0]])
    with pytest.raises(AssertionError):
        assert_blocks((places, taken), indices, floats(3, NAN, -4, 2), 3, 3, 2)
    with pytest.raises(AssertionError):
        assert_blocks((places[::-1], taken[::-1]), indices, values, 3, 3, 2)


# Masks and places


@given(mask=st.lists(st.booleans(), max_size=30))
def test_positions(backend, mask):
    found = backend.numpy(backend.ops.positions(backend.array(frozen(mask, bool))))
    assert found.dtype in (np.int32, np.int64)
    assert found.tolist() == np.flatnonzero(mask).tolist()


@given(n=st.integers(1, 20), data=st.data())
def test_marks(backend, n, data):
    """In whatever order, however often; none."""
    indices = data.draw(st.lists(st.integers(0, n - 1), max_size=30))
    for dtype in (np.int32, np.int64):
        marked = backend.ops.marks(n, backend.array(frozen(indices, dtype)))
        assert_bits_equal(backend.numpy(marked), np.isin(np.arange(n), indices))


@given(n=st.integers(1, 20), data=st.data())
def test_distinct(backend, n, data):
    indices = data.draw(st.lists(st.integers(0, n), max_size=30))  # n itself is padding
    for dtype in (np.int32, np.int64):
        array = backend.array(frozen(indices, dtype))
        found = backend.numpy(backend.ops.distinct(array, n))
        assert found.tolist() == sorted(set(indices) - {n})
        assert backend.numpy(array).tolist() == indices


def test_marks_are_what_positions_takes(backend):
    marked = backend.ops.marks(9, backend.array(frozen([7, 2, 7, 0], np.int32)))
    assert backend.numpy(backend.ops.positions(marked[:8])).tolist() == [0, 2, 7]


@given(x=vectors(ANY), data=st.data())
def test_put(backend, x, data):
    indices = data.draw(st.lists(st.integers(0, len(x) - 1), unique=True, max_size=9))
    values = frozen(data.draw(st.lists(ANY, min_size=len(indices), max_size=len(indices))), np.float32)
    expected = np.array(x)
    expected[indices] = values
    for dtype in (np.int32, np.int64):
        array = backend.array(values)
        result = backend.ops.put(backend.array(x), backend.array(frozen(indices, dtype)), array)
        assert_bits_equal(backend.numpy(result), expected)
        assert_bits_equal(backend.numpy(array), values)
