"""What every method promises, over the whole registry: a new method is tested by being registered."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from helpers import BACK_ENDS, Ranks, assert_bits_equal, assert_close, assert_states_equal, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from methods import (
    KEPT,
    METHODS,
    SIZE,
    SIZES,
    assert_sound,
    conserves,
    constant,
    every_method,
    integers,
    normal,
    ranks_of,
    tolerance_of,
)

from hvd_sparse.exchange import Exchange
from hvd_sparse.schemes.dense import Dense
from hvd_sparse.types import Spec


@every_method
@pytest.mark.parametrize("size", SIZES)
def test_integers_are_conserved_exactly(method, size, quick_backend):
    ranks = ranks_of(method, size, quick_backend)
    for number in range(4):
        assert_sound(ranks.step(integers(number, size), KEPT), method, KEPT, tolerance=0)


@every_method
@settings(max_examples=10)
@given(data=st.data())
def test_floats_are_conserved(method, quick_backend, data):
    size = data.draw(st.sampled_from(SIZES), "ranks")
    num_elements = data.draw(st.integers(1, 24), "n")
    k = data.draw(st.integers(1, num_elements + 2), "k")
    values = st.floats(-1e6, 1e6, width=32)
    grads = data.draw(arrays(np.float32, (3, size, num_elements), elements=values), "gradients")
    ranks = ranks_of(method, size, quick_backend, num_elements)
    for grad in grads:
        assert_sound(ranks.step(list(frozen(grad)), k), method, k)


@every_method
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32), size=st.sampled_from(SIZES), density=st.floats(0.005, 1), scale=st.floats(-30, 30))
def test_any_scale_and_density(method, quick_backend, seed, size, density, scale):
    ranks = ranks_of(method, size, quick_backend)
    k = max(1, int(density * SIZE))
    for number in range(3):
        grads = [frozen(grad * np.float32(2.0**scale)) for grad in normal(seed + number, size)]
        assert_sound(ranks.step(grads, k), method, k)


@every_method
@pytest.mark.parametrize("size", SIZES)
def test_density_one_is_dense(method, size, quick_backend):
    _, memory = METHODS[method]
    ranks = ranks_of(method, size, quick_backend, 37)
    dense = Ranks(Exchange(Spec("b", 37), Dense(), memory), size, quick_backend)
    for number in range(3):
        grads = normal(number, size, 37)
        step, other = ranks.step(grads, 37), dense.step(grads, 37)
        assert_sound(step, method, 37, tolerance=1e-6)
        assert_close(step.totals[0], other.totals[0], 1e-6)
        assert_close(step.totals[0], np.sum(step.accumulated, axis=0), 1e-6)
        if step.kept is not None:
            assert not np.any(step.kept)


@every_method
def test_more_than_all_is_all(method, quick_backend):
    exact, more = (ranks_of(method, 3, quick_backend, 5) for _ in range(2))
    grads = normal(0, 3, 5)
    assert_bits_equal(exact.step(grads, 5).totals[0], more.step(grads, 9).totals[0])


@every_method
@pytest.mark.parametrize("size", [1, 3])
def test_all_zero(method, size, quick_backend):
    ranks = ranks_of(method, size, quick_backend)
    for _ in range(3):
        step = ranks.step(constant(0, size), KEPT)
        assert_sound(step, method, KEPT, tolerance=0)
        assert not np.any(step.totals)
        assert step.kept is None or not np.any(step.kept)
    assert_sound(ranks.step(integers(0, size), KEPT), method, KEPT, tolerance=0)


@every_method
def test_ties(method, quick_backend):
    ranks = ranks_of(method, 3, quick_backend)
    for number in range(6):
        signs = [frozen(np.sign(grad)) for grad in normal(number, 3)]
        assert_sound(ranks.step(signs, KEPT), method, KEPT, tolerance=0)


@every_method
@pytest.mark.parametrize("num_elements", [1, 2, 7, SIZE])
@pytest.mark.parametrize("size", [3, 5])
def test_one_entry_and_fewer_elements_than_ranks(method, size, num_elements, quick_backend):
    ranks = ranks_of(method, size, quick_backend, num_elements)
    for number in range(3):
        assert_sound(ranks.step(integers(number, size, num_elements), 1), method, 1, tolerance=0)


REMEMBERING = [
    name for name, (scheme, memory) in METHODS.items() if memory.accumulator == "residual" and conserves(scheme)
]


@pytest.mark.parametrize("method", REMEMBERING)
def test_everything_is_sent_in_the_end(method, quick_backend):
    """Zero gradients after one: what was kept arrives, and nothing else. Or what ranks keep adds up to 0."""
    tolerance = tolerance_of(method)
    keeps_cancelled = getattr(METHODS[method][0], "keeps_cancelled", False)
    ranks = ranks_of(method, 3, quick_backend, 37)
    first = integers(0, 3, 37)
    left, total = np.ones(1), ranks.step(first, 9).totals[0].astype(np.float64)
    while np.any(left) and ranks.number < 300:
        step = ranks.step(constant(0, 3, 37), 9)
        total += step.totals[0]
        left = np.sum(step.kept, axis=0) if keeps_cancelled or tolerance else np.asarray(step.kept)
        if tolerance and ranks.number > 40:
            break
    assert_close(left, np.zeros_like(left), tolerance)
    assert_close(total, np.sum(first, axis=0), tolerance)


def poisoned(kind: str, size: int) -> list[np.ndarray]:
    """Gradients of which some are not finite, on the last rank only (opposite infinities: on two)."""
    grads = [np.array(grad) for grad in normal(5, size)]
    if kind == "all infinite":
        grads[-1][:] = np.inf
    elif kind == "half infinite":
        grads[-1][::2] = -np.inf
    elif kind == "opposite infinities":
        grads[0][17], grads[-1][17] = -np.inf, np.inf
    elif kind == "all nan":
        grads[-1][:] = np.nan
    else:
        grads[-1][SIZE - 1] = float(kind)
    return [frozen(grad) for grad in grads]


@every_method
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("size", [1, 3])
def test_what_is_not_finite_never_enters_the_state(method, size, quick_backend):
    ranks = ranks_of(method, size, quick_backend)
    ranks.step(integers(0, size), KEPT)
    before = [ranks.numpy_state(state) for state in ranks.states]
    for kind in ("nan", "inf", "-inf", "all infinite", "half infinite", "all nan", "opposite infinities"):
        step = ranks.step(poisoned(kind, size), KEPT)
        assert step.finite == [False] * size, kind
        for seen in (*step.totals, *step.applied):
            assert not np.isfinite(seen).all(), f"{kind}: every rank must see it"
        for rank, state in enumerate(ranks.states):
            assert_states_equal(ranks.numpy_state(state), before[rank], f"{kind}, state of rank {rank}")
    assert_sound(ranks.step(integers(1, size), KEPT), method, KEPT, tolerance=0)


@every_method
@pytest.mark.parametrize("size", [2, 5])
def test_requests_keep_their_shape(method, size, quick_backend):
    """A constant name and shape keeps Horovod's response cache valid, also of a round that only some steps have."""
    periodic = getattr(METHODS[method][0], "periodic_tags", ())
    ranks = ranks_of(method, size, quick_backend)
    spikes = [frozen(grad * (np.arange(SIZE) % 97 == 0)) for grad in normal(1, size)]
    steps = [normal(0, size), constant(0, size), constant(1, size), spikes, normal(2, size)]
    rounds = [[(one.kind, one.tag, one.shape) for one in ranks.step(grads, KEPT).rounds] for grads in steps]
    usual = [[one for one in step if one[1] not in periodic] for step in rounds]
    if getattr(METHODS[method][0], "varying_shapes", False):
        usual = [[(kind, tag, ()) for kind, tag, _ in step] for step in usual]
    assert usual[0]
    assert usual == [usual[0]] * len(steps)
    others = [one for step in rounds for one in step if one[1] in periodic]
    assert {tag for _, tag, _ in others} == set(periodic), "declared, and never seen"
    assert len(set(others)) == len(periodic)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("other", [name for name in BACK_ENDS if name != "numpy"])
@every_method
def test_back_ends_agree_with_the_oracle(method, other):
    """On everything that a step returns and leaves behind. Ties are left out: which of them goes is free."""
    oracle, ranks = (ranks_of(method, 3, BACK_ENDS[name]()) for name in ("numpy", other))
    tolerance = max(1e-6, tolerance_of(method))
    steps = [normal(0, 3), normal(1, 3), poisoned("inf", 3), constant(0, 3), normal(2, 3), poisoned("all nan", 3)]
    for grads in steps:
        expected, step = oracle.step(grads, KEPT), ranks.step(grads, KEPT)
        assert step.finite == expected.finite
        assert [(one.kind, one.tag, one.shape) for one in step.rounds] == [
            (one.kind, one.tag, one.shape) for one in expected.rounds
        ]
        if all(step.finite):
            assert_sound(step, method, KEPT)
            assert_close(step.totals[0], expected.totals[0], tolerance)
            assert_close(step.applied[0], expected.applied[0], tolerance)
            for rank in range(3):
                assert_close(step.used[rank], expected.used[rank], tolerance)
                assert step.num_used(rank) == expected.num_used(rank)
        else:
            assert not any(np.isfinite(total).all() for total in step.totals)
        for rank in range(3):
            memory, others = (one.numpy_state(one.states[rank])["memory"] for one in (ranks, oracle))
            assert memory.keys() == others.keys()
            for key in memory:
                assert_close(memory[key], others[key], tolerance, f"{key} of rank {rank}")


@every_method
def test_a_copied_state_continues_bit_for_bit(method, quick_backend):
    ranks = ranks_of(method, 2, quick_backend)
    ranks.step(normal(0, 2), KEPT)
    saved, number = copy.deepcopy(ranks.states), ranks.number
    expected = [ranks.step(normal(seed, 2), KEPT).totals[0] for seed in (1, 2)]
    resumed = ranks_of(method, 2, quick_backend)
    resumed.states, resumed.number = saved, number
    for seed, total in zip((1, 2), expected):
        assert_bits_equal(resumed.step(normal(seed, 2), KEPT).totals[0], total)
