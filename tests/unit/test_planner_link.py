"""The link: fitted from two allreduces, followed from every exchange."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_sparse.planner.link import Link, fit_link, update

KIB, MIB = 2**10, 2**20
BAD = [math.nan, math.inf, -math.inf, 0.0, -1.0]


def allreduce_seconds(num_bytes: float, num_ranks: int, latency: float, beta: float, num_latencies: int) -> float:
    return num_latencies * latency + 2 * (num_ranks - 1) / num_ranks * beta * num_bytes


def test_the_numbers_of_the_specification():
    times = [allreduce_seconds(size, 8, 1e-3, 8e-10, 14) for size in (4 * KIB, 8 * MIB)]
    assert times == pytest.approx([14.0057344e-3, 25.7440512e-3], abs=1e-12)
    link = fit_link((4 * KIB, 14.0057344e-3), (8 * MIB, 25.7440512e-3), num_ranks=8)
    assert link.latency == pytest.approx(1e-3, rel=1e-9)
    assert link.seconds_per_byte == pytest.approx(8e-10, rel=1e-9)
    assert link.bandwidth == pytest.approx(1.25e9, rel=1e-9)


@given(
    num_ranks=st.integers(2, 1024),
    latency=st.floats(1e-6, 1e-2),
    beta=st.floats(1e-11, 1e-6),
    per_collective=st.booleans(),
)
def test_fitting_returns_what_made_the_times(num_ranks, latency, beta, per_collective):
    num_latencies = 1 if per_collective else 2 * (num_ranks - 1)
    points = [
        (size, allreduce_seconds(size, num_ranks, latency, beta, num_latencies)) for size in (4 * KIB, 1024 * MIB)
    ]
    link = fit_link(*points, num_ranks, per_collective)
    assert link.latency == pytest.approx(latency, rel=1e-3)
    assert link.seconds_per_byte == pytest.approx(beta, rel=1e-6)


@pytest.mark.parametrize(("small", "large"), [(0.02, 0.01), (0.01, 0.01), (1e-9, 0.05)])
def test_noise_never_makes_a_link_negative(small, large):
    link = fit_link((4 * KIB, small), (8 * MIB, large), num_ranks=4)
    assert 0 < link.latency < math.inf
    assert 0 < link.seconds_per_byte < math.inf


@pytest.mark.parametrize(
    ("small", "large", "num_ranks", "message"),
    [
        ((4096, 0.1), (8192, 0.2), 1, "`num_ranks` must be 2 or more.*num_ranks=1"),
        ((4096, 0.1), (4096, 0.2), 2, "`large` must have more bytes"),
        ((4096, math.nan), (8192, 0.2), 2, r"`small\[1\]` must be a positive number"),
        ((4096, 0.1), (8192, 0.0), 2, r"`large\[1\]` must be a positive number"),
        ((0, 0.1), (8192, 0.2), 2, r"`small\[0\]` must be a positive number"),
    ],
)
def test_what_cannot_be_fitted(small, large, num_ranks, message):
    with pytest.raises(ValueError, match=message):
        fit_link(small, large, num_ranks)


def test_an_update_is_a_moving_average():
    link = Link(1e-3, 1e-9)
    after = update(link, num_bytes=1e6, seconds=2e-3 + 1e6 * 6e-9, num_collectives=2, weight=0.2)
    assert after.latency == link.latency
    assert after.seconds_per_byte == pytest.approx(0.8 * 1e-9 + 0.2 * 6e-9)
    assert update(link, 1e6, 2e-3 + 1e6 * 6e-9, 2, weight=1).seconds_per_byte == pytest.approx(6e-9)


@pytest.mark.parametrize("bad", BAD)
def test_what_is_no_measurement_changes_nothing(bad):
    link = Link(1e-3, 1e-9)
    assert update(link, bad, 0.01, 1, 0.2) == link
    assert update(link, 1e6, bad, 1, 0.2) == link
    assert update(link, 1e6, 0.01, 1, 0.2) != link


@given(st.lists(st.tuples(st.floats(1, 1e10), st.floats(1e-9, 1e3), st.integers(1, 200)), max_size=20))
def test_a_followed_link_stays_a_link(samples):
    """Also where an exchange took less than its latencies."""
    link = Link(1e-3, 1e-9)
    for num_bytes, seconds, num_collectives in samples:
        link = update(link, num_bytes, seconds, num_collectives, 0.2)
        assert 0 < link.seconds_per_byte < math.inf
        assert 0 < link.bandwidth < math.inf


def test_a_drop_is_seen_faster_than_a_rise():
    slow, fast = 8e-9, 8e-10

    def steps_until(start: float, end: float) -> int:
        link, count = Link(1e-3, start), 0
        while abs(link.seconds_per_byte / end - 1) > 0.5:
            link, count = update(link, 1e6, 1e-3 + 1e6 * end, 1, 0.2), count + 1
        return count

    assert steps_until(fast, slow) < steps_until(slow, fast)


@pytest.mark.parametrize("weight", [0, -0.1, 1.1, math.nan])
def test_weights(weight):
    with pytest.raises(ValueError, match=r"`weight` must be in \(0, 1\]"):
        update(Link(1e-3, 1e-9), 1e6, 0.01, 1, weight)
