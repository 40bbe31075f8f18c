"""Wire formats: what is sent arrives, what cannot is known to the sender, and a message is as long as documented."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from helpers import BACK_ENDS, BackEnd, Ranks, assert_bits_equal, assert_same_on_ranks, floats, frozen, short_repr
from hypothesis import given
from hypothesis import strategies as st
from vectors import INF, NAN

from hvd_sparse.collectives.allgather import AllGatherSum
from hvd_sparse.collectives.owner_reduce import OwnerReduce
from hvd_sparse.exchange import Exchange
from hvd_sparse.memories.residual import Residual
from hvd_sparse.schemes.sparse import SparseSum
from hvd_sparse.sparsifiers.topk import TopK
from hvd_sparse.types import Sparse, Spec
from hvd_sparse.wire import FORMATS, Compact, message, wire_format

LARGEST = 2**31 - 1
every_format = pytest.mark.parametrize("wire", FORMATS)
rounding = pytest.mark.parametrize("wire", [name for name, made in FORMATS.items() if not made.exact])
WORDS = {
    "fp32": lambda n, k: 2 * k,
    "fp16": lambda n, k: 1 + k + (k + 1) // 2,
    "compact": lambda n, k: 1 + (n >> 16) + 2 * ((k + 1) // 2),
}


def travel(backend: BackEnd, wire: str, n: int, indices: Any, values: Any) -> tuple[np.ndarray, ...]:
    """Words, what the sender says will arrive, and what arrives: indices and values."""
    indices, values = frozen(indices, np.int32), frozen(values, np.float32)
    arrays = backend.array(indices), backend.array(values)
    words, arriving = wire_format(wire).pack(backend.ops, n, *arrays)
    places, received = wire_format(wire).unpack(backend.ops, n, values.shape[1], words)
    assert_bits_equal(backend.numpy(arrays[0]), indices, "indices that were packed")
    assert_bits_equal(backend.numpy(arrays[1]), values, "values that were packed")
    return tuple(np.array(backend.numpy(array)) for array in (words, arriving, places, received))


def counting(*shape: int) -> np.ndarray:
    return 1.5 + np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


# Indices

RUN = 65536
LENGTHS = st.one_of(
    st.integers(1, LARGEST),
    st.integers(1, 300),
    st.tuples(st.integers(1, 32767), st.integers(-2, 2)).map(lambda pair: pair[0] * RUN + pair[1]),
)


def some_indices(draw: st.DrawFn, n: int, k: int) -> list[int]:
    """k ascending ones, the last of which may be padding; the ends of runs are frequent."""
    runs = st.tuples(st.integers(0, n // RUN), st.sampled_from([0, 1, RUN - 1])).map(
        lambda pair: pair[0] * RUN + pair[1]
    )
    chosen = draw(st.sets(st.one_of(st.integers(0, n - 1), runs.filter(lambda index: index < n)), max_size=k))
    return sorted(chosen) + [n] * (k - len(chosen))


@every_format
@given(data=st.data())
def test_every_index_arrives(wire, quick_backend, data):
    n, num_rows, k = data.draw(LENGTHS), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    n = min(n, 2**31 // num_rows - 1)
    rows = np.array([some_indices(data.draw, n, k) for _ in range(num_rows)])
    words, _, places, _ = travel(quick_backend, wire, n, rows, counting(num_rows, k))
    assert places.dtype == words.dtype == np.int32
    assert places.tolist() == rows.tolist()
    assert words.shape == (num_rows, WORDS[wire](n, k))


EDGES = [
    1,
    2,
    255,
    RUN - 1,
    RUN,
    RUN + 1,
    3 * RUN - 1,
    3 * RUN,
    3 * RUN + 1,
    2**24 + 1,
    2**30 - 3,
    LARGEST - 1,
    LARGEST,
]


@every_format
@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_indices_around_the_runs(num_rows, wire, backend):
    for n in sorted({min(n, 2**31 // num_rows - 1) for n in EDGES}):
        near = {run * RUN + shift for run in (0, 1, 2, n >> 17, n >> 16) for shift in (-1, 0, 1)} | {n - 1, n - 2}
        every = sorted(index for index in near if 0 <= index < n)
        k = len(every) + 1  # odd for some n, even for others
        rows = [every[row:] + [n] * (k - len(every[row:])) for row in range(num_rows)]
        _, _, places, values = travel(backend, wire, n, rows, counting(num_rows, k))
        assert places.tolist() == rows, n
        np.testing.assert_allclose(values, counting(num_rows, k), rtol=2.0**-11)


@every_format
@pytest.mark.filterwarnings("error")
def test_one_entry(wire, backend):
    for n, part in itertools.product([1, RUN, LARGEST], [0, 0.5, 1]):
        index = int(part * n)
        _, arriving, places, values = travel(backend, wire, n, [[index]], [[-2.5]])
        assert (places.tolist(), values.tolist(), arriving.tolist()) == ([[index]], [[-2.5]], [[-2.5]])


@every_format
def test_rows_of_padding(wire, backend):
    """A rank with nothing for a block, between ranks with something."""
    n, rows, values = 3 * RUN + 5, [[0, RUN, 3 * RUN + 5], [3 * RUN + 5] * 3, [1, 2, 3 * RUN + 4]], np.ones((3, 3))
    values[1] = values[0, 2] = 0
    _, _, places, received = travel(backend, wire, n, rows, values)
    assert places.tolist() == rows
    assert received.tolist() == values.tolist()


def test_message_pads_with_the_length(backend):
    entries = Sparse(backend.array(frozen([2, 7], np.int64)), backend.array(floats(5, -6)), 9)
    indices, values = message(backend.ops, entries, 4)
    assert_bits_equal(backend.numpy(indices), np.int32([[2, 7, 9, 9]]))
    assert_bits_equal(backend.numpy(values), np.float32([[5, -6, 0, 0]]))


# Values

TRICKY = {
    "ordinary": [[1.5, -2.25, 3.1, 0.1], [1e-3, 2e-3, -7e-3, 0]],
    "one of a kind": [[0.1], [-3e7]],
    "far apart": [[1e30, 1e-30, -1e15, 1], [1e-9, 1e6, 0, -1e-9]],
    "too large for 16 bits": [[65504 * 2, 65504, -1e38, 1e5], [3.0e38, 1, -1, 65520]],
    "powers of two": [[2.0**e for e in range(-126, 128, 2)], [-(2.0**e) for e in range(127, -127, -2)]],
    "subnormal": [[1e-45, -1e-40, 1e-38, 0], [1e-45, 1e-45, 1.0, 1e-39]],
    "zeros": [[0, 0, -0.0], [0, 1, 0]],
    "not finite": [[NAN, 1, 2, 3], [1, 2, 3, 4], [INF, -1, 0, 5], [-5, 0.3, 7, 1e-9], [1, -INF, INF, NAN]],
}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@every_format
@pytest.mark.parametrize("kind", TRICKY)
def test_the_sender_knows_what_arrives(kind, wire, backend):
    """To the bit, and on every back end the same words."""
    values = np.float32(TRICKY[kind])
    indices = np.tile(np.arange(values.shape[1]), (len(values), 1))
    words, arriving, _, received = travel(backend, wire, 1000, indices, values)
    assert_bits_equal(arriving, received)
    if wire == "fp32":
        assert_bits_equal(received, values)
    if kind != "not finite":
        assert np.isfinite(received).all()
        oracle = travel(BACK_ENDS["numpy"](), wire, 1000, indices, values)
        assert_bits_equal(words, oracle[0], "words")
        assert_bits_equal(received, oracle[3], "values")


@rounding
@given(data=st.data())
def test_eleven_bits_over_28_powers_of_two(wire, quick_backend, data):
    exponent, k = data.draw(st.integers(-78, 127)), data.draw(st.integers(1, 9))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    relative = rng.uniform(1, 2, k) * 2.0 ** -rng.integers(0, 40, k)
    relative[rng.integers(k)] = rng.uniform(1, 1.999)
    values = np.float32([rng.choice([-1, 1], k) * relative * 2.0**exponent])
    _, arriving, _, received = travel(quick_backend, wire, 100, [np.arange(k)], values)
    assert_bits_equal(arriving, received)
    exact, received, largest = np.float64(values), np.float64(received), np.abs(np.float64(values)).max()
    large = np.abs(exact) >= largest * 2.0**-28
    assert large.any()
    assert (np.abs(received - exact) <= np.where(large, 2.0**-11 * np.abs(exact), 2.0**-38 * largest)).all()


@rounding
def test_small_values_are_rounded_away_only_beside_large_ones(wire, backend):
    _, _, _, received = travel(backend, wire, 9, [[0, 1], [2, 3]], [[1e30, 1e-30], [1e-30, 3e-31]])
    assert received[0, 1] == 0
    np.testing.assert_allclose(received[:, 0], [1e30, 1e-30], rtol=2.0**-11)
    np.testing.assert_allclose(received[1, 1], 3e-31, rtol=2.0**-11)


@rounding
def test_below_a_power_of_two_values_wait(wire, backend):
    """2^-80 and less, of which the smallest could come out as denormal numbers: the sender keeps them."""
    _, arriving, _, received = travel(backend, wire, 9, [[0, 1, 2]], [[2.0**-81, 2.0**-108, 2.0**-126]])
    assert received.tolist() == arriving.tolist() == [[2.0**-81, 2.0**-108, 0]]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@every_format
def test_what_is_not_finite_arrives_as_such_and_alone(wire, backend):
    values, indices = np.tile(np.float32([1.5, -2, 1e-3]), (3, 1)), np.tile([1, 4, 8], (3, 1))
    clean = travel(backend, wire, 9, indices, values)[3]
    for bad, place in itertools.product([NAN, -NAN, INF, -INF], [0, 2]):
        values[1, place] = bad
        _, arriving, places, received = travel(backend, wire, 9, indices, values)
        assert not np.isfinite(received[1, place])
        assert not np.isfinite(arriving[1, place])
        assert np.isfinite(received[[0, 2]]).all()
        assert_bits_equal(received[[0, 2]], clean[[0, 2]])
        assert_bits_equal(places, np.int32(indices))


# Length


@every_format
@pytest.mark.parametrize("n", [1000, RUN - 1, RUN, 200_003])
def test_length_follows_from_n_and_k_alone(n, wire, quick_backend):
    rng, array = np.random.default_rng(0), quick_backend.array
    for k, part in itertools.product([1, 2, 7, 1000], [0, 0.5, 1]):
        count = round(part * k)
        for top in (1000, n):  # crowded and spread
            indices, values = np.sort(rng.permutation(top)[:count]), rng.normal(size=count)
            entries = Sparse(array(frozen(indices)), array(frozen(values, np.float32)), n)
            words, _ = wire_format(wire).pack(quick_backend.ops, n, *message(quick_backend.ops, entries, k))
            assert quick_backend.numpy(words).shape == (1, WORDS[wire](n, k))


@pytest.mark.parametrize("n", [100_000, 4_000_000, 25_000_000])
def test_compact_halves_the_bytes(n):
    rng, k = np.random.default_rng(0), n // 100
    indices = np.unique(rng.integers(0, n, k))
    indices = np.concatenate([indices, np.full(k - len(indices), n)])
    words, _, places, _ = travel(BACK_ENDS["numpy"](), "compact", n, [indices], rng.normal(size=(1, k)))
    assert words.size <= 0.55 * WORDS["fp32"](n, k)
    assert_bits_equal(places[0], np.int32(indices))


# Rounding errors stay with the sender


def ranks_with(wire: str, collective: Any, n: int, size: int, backend: BackEnd | None = None) -> Ranks:
    return Ranks(Exchange(Spec("b", n), SparseSum(TopK(), collective(wire)), Residual()), size, backend)


collectives = pytest.mark.parametrize("collective", [AllGatherSum, OwnerReduce])


@every_format
@collectives
@pytest.mark.parametrize("size", [1, 4])
def test_twenty_steps_lose_nothing(size, collective, wire, quick_backend):
    """Gradients that shrink, coordinates of very different size: what was applied and what is kept is all of them."""
    n, k = 1500, 60
    ranks, rng = ranks_with(wire, collective, n, size, quick_backend), np.random.default_rng(0)
    scale = np.exp(3 * rng.normal(size=n))
    applied, received = np.zeros(n), np.zeros(n)
    for number in range(20):
        common = rng.normal(size=n)
        grads = [frozen(scale * 0.9**number * (common + rng.normal(size=n)), np.float32) for _ in range(size)]
        step = ranks.step(grads, k)
        assert_same_on_ranks(step.totals)
        assert all(step.finite)
        applied += step.totals[0]
        received += np.sum(grads, axis=0, dtype=np.float64)
        error = np.abs(applied + np.sum(step.kept, axis=0, dtype=np.float64) - received)
        assert (error <= 4e-6 * (scale * 20 * size)).all()
    assert np.abs(applied).sum() > 0.3 * np.abs(received).sum()


@rounding
@collectives
def test_rounding_errors_are_kept_and_sent_later(collective, wire, quick_backend):
    """Of 1/3 on each of two ranks 11 bits arrive at once, and all of them in a few steps."""
    ranks = ranks_with(wire, collective, 4, 2, quick_backend)
    third = floats(1 / 3, 0, 0, 0)
    step = ranks.step([third, third], 2)
    applied = step.totals[0].astype(np.float64)
    assert abs(applied[0] - 2 / 3) > 1e-5
    assert any(kept[0] != 0 for kept in step.kept)
    for _ in range(4):
        applied += ranks.step([floats(0, 0, 0, 0)] * 2, 2).totals[0]
    assert applied[0] == pytest.approx(2 / 3, rel=1e-7)
    assert not applied[1:].any()


@rounding
@collectives
def test_large_and_small_gradients_in_16_bits(collective, wire, quick_backend):
    """Scenario T5: 1e6 and 1e-9 in one message."""
    ranks, steps = ranks_with(wire, collective, 6, 2, quick_backend), 3
    for _ in range(steps):
        step = ranks.step([floats(1e6, 1e-9, 0, 0, 0, 0)] * 2, 5)
        assert all(step.finite)
        assert np.isfinite(step.totals).all()
        assert np.isfinite(step.kept).all()
        assert step.totals[0][0] == pytest.approx(2e6, rel=2.0**-10)
        assert step.totals[0][1] == 0
    np.testing.assert_allclose([kept[1] for kept in step.kept], steps * 1e-9, rtol=1e-6)
    arrived = sum(float(ranks.step([floats(0, 0, 0, 0, 0, 0)] * 2, 5).totals[0][1]) for _ in range(5))
    assert arrived == pytest.approx(2 * steps * 1e-9, rel=1e-6)


@rounding
def test_a_small_gradient_grows_beside_a_large_one_until_it_arrives(wire):
    ranks, applied = ranks_with(wire, AllGatherSum, 4, 1), 0.0
    for _ in range(1200):
        step = ranks.step([floats(1e6, 0, 1e-9, 0)], 2)
        applied += float(step.totals[0][2])
    assert applied > 0
    assert applied + float(step.kept[0][2]) == pytest.approx(1200 * 1e-9, rel=1e-4)


def test_a_format_by_name_or_object():
    assert isinstance(wire_format("compact"), Compact)
    own = Compact()
    assert wire_format(own) is own


@pytest.mark.parametrize("choice", ["fp64", "FP16", "", None, 16, object(), Compact], ids=short_repr)
def test_what_is_no_format(choice):
    with pytest.raises(ValueError, match="`wire` must be one of 'fp32', 'fp16', 'compact', or an object") as info:
        AllGatherSum(wire=choice)
    assert f"Received: wire={choice!r}." in str(info.value)
