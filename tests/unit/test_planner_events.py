"""The event model of a step: the synthetic vector of what_if.md, and what must hold for every model."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_sparse.planner.cost import Traffic
from hvd_sparse.planner.events import GRID, compression_needed, finish_times, fuse, step

MB, GBIT = 1e6, 1.25e8  # GBIT: bytes per second of 1 Gbit/s
EVENTS = [(0.002, 10 * MB), (0.002, 10 * MB), (0.002, 30 * MB), (0.004, 50 * MB), (0.001, 4 * MB)]

any_events = st.lists(st.tuples(st.floats(0, 0.05), st.integers(0, 10**9).map(float)), max_size=30)
any_bandwidth = st.floats(1e6, 1e12)
any_ranks = st.integers(1, 1024)


def test_buckets_of_the_vector():
    buckets = fuse(EVENTS)
    assert [size for _, size in buckets] == [50_000_000, 54_000_000]
    assert [ready for ready, _ in buckets] == pytest.approx([0.006, 0.011])


@pytest.mark.parametrize(
    ("num_ranks", "gbit", "compression", "alpha_ms", "finishes", "overhead", "scaling"),
    [
        (4, 10, 1, 0, [66.0, 130.8], 119.8, 0.2003),
        (4, 10, 10, 0, [12.0, 18.48], 7.48, 0.8004),
        (4, 100, 1, 0, [12.0, 18.48], 7.48, 0.8004),
        (4, 10, 1, 1.5, [67.5, 133.8], 122.8, 0.1963),
        (4, 10, 10, 1.5, [13.5, 21.48], 10.48, 0.7411),
        (1, 10, 1, 0, [6.0, 11.0], 0, 1),
    ],
)
def test_the_vector(num_ranks, gbit, compression, alpha_ms, finishes, overhead, scaling):
    found = step(EVENTS, 0.030, num_ranks, gbit * GBIT, compression, alpha_ms / 1e3)
    assert [1e3 * finish for finish in found.finishes] == pytest.approx(finishes, abs=1e-6)
    assert 1e3 * found.overhead == pytest.approx(overhead, abs=1e-6)
    assert found.scaling == pytest.approx(scaling, abs=5e-5)
    if num_ranks == 1:
        assert (found.overhead, found.scaling, found.busy) == (0, 1, 0)


def test_adding_and_compressing_take_time():
    plain = step(EVENTS, 0.03, 4, 10 * GBIT)
    adding = step(EVENTS, 0.03, 4, 10 * GBIT, add=lambda size: 1e-10 * size)
    coding = step(EVENTS, 0.03, 4, 10 * GBIT, codec=lambda size: 0.001)
    assert adding.overhead - plain.overhead == pytest.approx(3 * 1e-10 * 104 * MB / 4)
    assert coding.overhead - plain.overhead == pytest.approx(0.002)
    assert coding.busy - plain.busy == pytest.approx(0.002)


def test_sparse_traffic_takes_the_place_of_an_allreduce():
    def halves(size: float) -> Traffic:
        return Traffic(2, size / 10)

    found = step(EVENTS, 0.03, 4, 1e9, alpha=0.001, traffic=halves)
    assert found.finishes == pytest.approx((0.006 + 0.007, 0.013 + 0.0074))
    assert found.busy == pytest.approx(0.004 + 0.0104)
    assert step(EVENTS, 0.03, 1, 1e9, alpha=0.001, traffic=halves).scaling == 1


@pytest.mark.parametrize("events", [[], [(0.01, 0.0)], [(0.0, 0.0), (0.5, 0.0)]])
def test_nothing_to_send(events):
    found = step(events, 0.03, 8, GBIT, alpha=0.01)
    assert (found.scaling, found.overhead, found.finishes) == (1, 0, ())


def test_a_gradient_is_never_split_and_may_come_at_once():
    assert fuse([(0.0, 1e9), (0.0, 1.0)]) == [(0.0, 1e9), (0.0, 1.0)]
    assert fuse([(0.0, 1.0)] * 3) == [(0.0, 3.0)]
    assert fuse([(0.004, 0.0), (0.004, 5.0)], cycle=0.005) == [(0.008, 5.0)]
    assert fuse([(0.005, 5.0), (0.0, 1.0)], cycle=0.005) == [(0.005, 5.0), (0.005, 1.0)]
    assert fuse([(0.0, 5.0), (0.0, 1.0)], fusion_bytes=5) == [(0.0, 5.0), (0.0, 1.0)]
    assert finish_times([(1.0, 2.0), (1.5, 2.0), (9.0, 1.0)], lambda size: size) == [3.0, 5.0, 10.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bandwidth": 0}, "`bandwidth` must be a positive number. Received: bandwidth=0"),
        ({"bandwidth": -1.0}, "`bandwidth`.*Received: bandwidth=-1.0"),
        ({"bandwidth": math.nan}, "`bandwidth`.*nan"),
        ({"compression": 0.5}, "`compression` must be 1 or more. Received: compression=0.5"),
        ({"compression": math.nan}, "`compression` must be 1 or more"),
        ({"compression": 2, "traffic": lambda size: Traffic(1, size)}, "`compression` has no effect beside `traffic`"),
        ({"num_ranks": 0}, "`num_ranks`.*num_ranks=0"),
        ({"single_step": 0.0}, "`single_step`.*single_step=0.0"),
        ({"alpha": -1e-3}, "`alpha`.*alpha=-0.001"),
        ({"events": [(-0.1, 5.0)]}, r"`events`.*\(-0.1, 5.0\)"),
        ({"events": [(0.1, math.inf)]}, r"`events`.*\(0.1, inf\)"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        step(**{"events": EVENTS, "single_step": 0.03, "num_ranks": 4, "bandwidth": GBIT, **arguments})


# What must hold for every model


@given(any_events)
def test_buckets_keep_all_bytes(events):
    buckets = fuse(events)
    assert sum(size for _, size in buckets) == sum(size for _, size in events)
    assert all(size > 0 for _, size in buckets)
    assert [ready for ready, _ in buckets] == sorted(ready for ready, _ in buckets)


@given(any_events, any_ranks, any_bandwidth, st.floats(1, 1000), st.floats(0, 0.01))
def test_scaling_is_a_share_and_nothing_ends_early(events, num_ranks, bandwidth, compression, alpha):
    found = step(events, 0.5, num_ranks, bandwidth, compression, alpha)
    assert 0 < found.scaling <= 1
    assert found.scaling == pytest.approx(0.5 / (0.5 + found.overhead))
    assert all(finish >= ready for finish, (ready, _) in zip(found.finishes, fuse(events)))
    assert found.busy >= 0


@given(any_events, any_ranks, any_bandwidth, st.floats(1, 100), st.floats(1, 10))
def test_more_bandwidth_and_more_compression_never_hurt(events, num_ranks, bandwidth, compression, factor):
    base = step(events, 0.5, num_ranks, bandwidth, compression, 1e-3).scaling
    assert step(events, 0.5, num_ranks, bandwidth * factor, compression, 1e-3).scaling >= base * (1 - 1e-12)
    assert step(events, 0.5, num_ranks, bandwidth, compression * factor, 1e-3).scaling >= base * (1 - 1e-12)


@given(any_events, any_ranks, any_bandwidth)
def test_ten_times_the_bandwidth_is_ten_times_the_compression(events, num_ranks, bandwidth):
    one, other = step(events, 0.5, num_ranks, 10 * bandwidth), step(events, 0.5, num_ranks, bandwidth, 10)
    assert one.finishes == pytest.approx(other.finishes, rel=1e-9)


@given(any_events, any_ranks, any_bandwidth, st.floats(0.1, 1))
def test_the_smallest_compression_that_is_enough(events, num_ranks, bandwidth, target):
    needed = compression_needed(events, 0.5, num_ranks, bandwidth, target)
    enough = [c for c in GRID if step(events, 0.5, num_ranks, bandwidth, c).scaling >= target]
    assert needed == (enough[0] if enough else None)


def test_compression_needed_for_the_vector():
    assert compression_needed(EVENTS, 0.03, 4, 10 * GBIT, target=0.8) == 10
    assert compression_needed(EVENTS, 0.03, 4, 10 * GBIT, target=0.8, alpha=1.5e-3) == 20
    assert compression_needed(EVENTS, 0.03, 4, 10 * GBIT, target=0.8, grid=(1, 5)) is None
    assert compression_needed(EVENTS, 0.03, 1, GBIT) == 1


def test_planning_is_quick():
    events = [(1e-5, 4096.0)] * 10_000
    durations = []
    for _ in range(5):
        start = time.perf_counter()
        step(events, 0.2, 8, GBIT, alpha=1e-3, cycle=0.0)
        durations.append(time.perf_counter() - start)
    assert min(durations) < 0.05
