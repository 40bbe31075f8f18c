"""The meter: what it measures and when, over simulated links and with simulated clocks. Nothing sleeps."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import random
import statistics
from dataclasses import replace

import pytest
from simulated import (
    COMPUTE,
    LADDER,
    Alone,
    N,
    P,
    Rank,
    Report,
    Together,
    Training,
    assert_equal_plans,
    exchange_seconds,
    good_clock,
    link_at,
    noisy,
    run_threads,
    same_link,
    train,
)

from hvd_sparse.controllers import Plan, Seen
from hvd_sparse.controllers.bandwidth import Bandwidth
from hvd_sparse.controllers.fixed import Fixed
from hvd_sparse.controllers.warmup import Warmup
from hvd_sparse.meter import Meter, measure_link
from hvd_sparse.planner.cost import TRAFFIC, seconds
from hvd_sparse.types import World, num_kept

# The link


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 64])
@pytest.mark.parametrize("latency", [2e-5, 1.5e-3])
@pytest.mark.parametrize("gbit", [0.01, 0.1, 1, 10, 100])
def test_the_link_is_found_in_bounded_time(gbit, latency, num_ranks):
    network = Alone(link_at(gbit, latency), num_ranks)
    link, num_bytes = measure_link(network, num_ranks)
    assert link.seconds_per_byte == pytest.approx(network.link.seconds_per_byte, rel=1e-6)
    assert link.latency == pytest.approx(latency, rel=1e-3)
    assert network.now < 2
    assert 2**16 <= num_bytes <= 2**23
    assert network.calls.count(("allreduce", num_bytes)) >= 2, "the quicker one counts"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("gbit", [0.01, 0.1, 1, 10])
def test_the_link_is_found_within_a_tenth(gbit, seed):
    """The quickest of several counts: now and then a message takes half as long again."""
    network = Alone(link_at(gbit), noise=noisy(seed, 1.0, 1.05))
    link, _ = measure_link(network, P)
    assert link.bandwidth == pytest.approx(network.link.bandwidth, rel=0.1)
    small = [exchange_seconds(one, 0.001) for one in (link, network.link)]
    assert small[0] == pytest.approx(small[1], rel=0.1)


def test_a_message_that_takes_much_longer_is_not_believed():
    slow_once = itertools.chain([1, 30, 1, 1], itertools.cycle([30, 1]))
    network = Alone(link_at(1), noise=lambda: next(slow_once))
    assert measure_link(network, P)[0].bandwidth == pytest.approx(network.link.bandwidth, rel=1e-6)


def test_a_slow_link_is_told_by_a_short_message():
    sizes = [measure_link(Alone(link_at(gbit)), P)[1] for gbit in (0.01, 0.1, 1, 100)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 2**16
    assert sizes[-1] == 2**23


def test_the_slowest_rank_counts():
    class Slow(Alone):
        def largest(self, values: list[float]) -> list[float]:
            return [2 * value for value in super().largest(values)]

    network = Slow(link_at(1))
    link, _ = measure_link(network, P)
    assert link.seconds_per_byte == pytest.approx(2 * network.link.seconds_per_byte)
    assert link.latency == pytest.approx(2 * network.link.latency)


# What is asked of the network


def test_at_the_start():
    training = Training(Bandwidth(), Alone(link_at(1)))
    training.run(3)
    assert training.network.calls == []
    assert training.meter.link is None
    training.run(1)
    assert training.decided == [3]
    assert training.network.num_measurements == 1
    assert training.network.now < 4 * max(training.times) + 2
    assert training.meter.link.bandwidth == pytest.approx(link_at(1).bandwidth, rel=1e-6)


@pytest.mark.parametrize("gain_floor", [None, 0.1])
def test_two_small_collectives_per_period(gain_floor):
    training = Training(Bandwidth(gain_floor=gain_floor), Alone(link_at(1)))
    training.energies = lambda: [0.9, 1.0]
    training.run(200)
    training.network.calls.clear()
    training.decided.clear()
    training.run(200)
    assert len(training.decided) == 4
    names = [name for name, _ in training.network.calls]
    assert names == ["allreduce", "largest", *(["total"] if gain_floor else [])] * len(training.decided)
    assert all(size <= 4 for name, size in training.network.calls if name != "allreduce")


@pytest.mark.parametrize("gbit", [0.01, 0.1, 1, 10, 100])
@pytest.mark.parametrize("compute", [0.03, 0.3])
def test_looking_costs_less_than_a_hundredth_of_a_step(compute, gbit):
    training = Training(Bandwidth(), Alone(link_at(gbit)), compute)
    training.run(300)
    started, num_calls = training.network.now, len(training.network.calls)
    training.run(500)
    spent = training.network.now - started - sum(training.times[300:])
    assert 0 < spent < 0.01 * sum(training.times[300:])
    assert training.network.num_measurements == 1
    assert len(training.network.calls) - num_calls == 20


@pytest.mark.parametrize("controller", [Fixed(0.01), Warmup(0.01, 20)], ids=lambda one: type(one).__name__)
def test_a_controller_that_needs_no_measurement_causes_none(controller):
    training = Training(controller, Alone(link_at(0.01)))
    densities = training.run(100)
    assert densities == [controller.decide(Seen(step), {})[0].density for step in range(100)]
    assert training.network.calls == []
    assert training.alarms == training.decided == []
    assert not training.meter.is_alarmed()
    assert set(training.meter.as_dict().values()) == {None}


def test_where_nothing_may_be_compressed_nothing_is_measured():
    training = Training(Bandwidth(), Alone(link_at(1)))
    training.num_elements = 0
    training.run(100)
    assert training.network.calls == []
    training.num_elements = N
    training.run(10)
    assert training.network.num_measurements == 1


def test_one_rank_measures_nothing():
    training = Training(Bandwidth(), Alone(link_at(1), num_ranks=1))
    assert set(training.run(100)) == {0.011}
    assert training.network.calls == []


# When it decides


@pytest.mark.parametrize("period", [20, 50])
def test_a_period_is_as_long_as_it_says(period):
    training = Training(Bandwidth(0.03, period=period), Alone(link_at(1)))
    training.run(3 * period + 10)
    assert training.decided == [3, 8, 8 + period, 8 + 2 * period, 8 + 3 * period]


@pytest.mark.parametrize("period", [1, 2, 3])
def test_a_short_period_is_four_exchanges(period):
    """The first of which is not timed."""
    training = Training(Bandwidth(period=period), Alone(link_at(100)))
    training.run(100)
    assert training.decided[2:] == list(range(12, 100, 4))
    assert training.meter.as_dict()["step_seconds"] == pytest.approx(training.times[-1])
    assert training.densities[-1] == 1.0


# When the link is measured again


@pytest.mark.parametrize("gbits", [(1, 0.1), (0.1, 1), (10, 1), (1, 10), (1, 0.3)])
def test_again_when_the_link_has_changed(gbits, caplog):
    """And the plan fits the new link within two periods."""
    training = Training(Bandwidth(0.03), Alone(link_at(gbits[0])))
    training.run(210)
    assert training.network.num_measurements == 1
    training.network.link = link_at(gbits[1])
    with caplog.at_level(logging.INFO, logger="hvd_sparse"):
        densities = training.run(110)
    assert training.network.num_measurements in (2, 3)
    assert "Measured the network (a " in caplog.text
    fresh = Training(Bandwidth(0.03), Alone(link_at(gbits[1])))
    assert densities[100] == fresh.run(110)[-1] != training.densities[200]
    assert training.meter.link.bandwidth == pytest.approx(link_at(gbits[1]).bandwidth, rel=1e-3)


def test_again_when_a_message_misses(caplog):
    """Steps do not tell: everything hides."""
    training = Training(Bandwidth(), Alone(link_at(10)), hide=100.0)
    training.run(200)
    training.network.link = link_at(3)
    with caplog.at_level(logging.INFO, logger="hvd_sparse"):
        training.run(60)
    assert training.network.num_measurements == 2
    assert "Measured the network (a message took" in caplog.text
    assert "3 Gbit/s" in caplog.text


@pytest.mark.parametrize("factor", [1.5, 0.5])
def test_again_when_a_step_misses(factor, caplog):
    training = Training(Bandwidth(), Alone(link_at(1)))
    training.run(200)
    training.compute *= factor
    with caplog.at_level(logging.INFO, logger="hvd_sparse"):
        training.run(60)
    assert training.network.num_measurements == 2
    assert "Measured the network (a step took" in caplog.text


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("gbit", [0.1, 0.5, 1, 10, 100])
def test_not_again_for_noise(gbit, seed):
    """Of 10 % on all clocks. The plan stays, too."""
    training = Training(Bandwidth(0.03), Alone(link_at(gbit)))
    training.run(20)
    training.noise = training.network.noise = noisy(seed, 0.9, 1.1)
    densities = training.run(600)
    assert training.network.num_measurements == 1
    assert training.alarms == []
    assert len(set(densities[100:])) == 1


@pytest.mark.parametrize("change", [0.1, 10])
def test_steps_over_the_old_link_say_nothing_about_the_plan(change):
    """The link changes five steps before a decision, by less than what causes an alarm."""
    training = Training(Bandwidth(), Alone(link_at(10)))
    training.run(200)
    before = training.meter.state["known"]["0.033"]["rest"]
    training.run(training.meter.state["due"] - 204)
    training.network.link = link_at(10 * change)
    training.run(5)
    assert training.network.num_measurements == 2
    assert training.meter.as_dict()["step_seconds"] is None
    assert training.meter.state["known"]["0.033"]["rest"] == before


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("settings", [{"budget_seconds": 0.03}, {}])
def test_messages_without_a_time(bad, settings):
    """No link, no plan but the first; a link that was measured once is kept."""
    training = Training(Bandwidth(**settings), Alone(link_at(1), noise=lambda: bad))
    assert set(training.run(60)) == {0.011}
    training.network.noise, training.network.now = lambda: 1.0, 0.0
    good = training.run(60)[-1]
    assert good == 0.004
    link, training.network.noise = training.meter.link, lambda: bad
    assert set(training.run(60)) == {good}
    assert training.meter.link == link


@pytest.mark.parametrize("gbit", [0.1, 1, 10])
def test_not_again_for_one_message_that_is_a_little_late(gbit):
    training = Training(Bandwidth(), Alone(link_at(gbit)))
    training.run(200)
    training.network.noise = lambda: 1.9
    training.run(100)
    assert training.network.num_measurements == 1
    training.network.noise = lambda: 2.1
    training.run(100)
    assert training.network.num_measurements > 1 or training.network.calls[-2][1] == 2**16


# Alarms


def test_an_alarm_does_not_wait_for_the_period():
    """After three steps that take more than 2.5 times as long as usual; the first one after a decision is not timed."""
    training = Training(Bandwidth(0.03), Alone(link_at(10)))
    while len(training.decided) < 5:
        training.run(1)
    changed_at = training.num_exchanges
    training.network.link = link_at(0.05)
    training.run(12)
    assert training.alarms == [changed_at + 4]
    assert training.alarms[0] in training.decided
    assert training.densities[changed_at + 5 :] == [0.001] * 7
    assert training.network.num_measurements == 2


def test_an_alarm_late_in_a_period():
    """The steps before it are those of another network."""
    training = Training(Bandwidth(0.03), Alone(link_at(10)))
    training.run(220)
    training.network.link = link_at(0.05)
    training.run(4)
    assert training.alarms == [223]
    assert training.meter.measured.step_seconds == pytest.approx(training.times[-1]), "not the median of 15 steps"
    assert training.run(10) == [0.001] * 10


def test_steps_that_are_a_little_long_raise_no_alarm():
    training = Training(Bandwidth(0.03), Alone(link_at(10)))
    training.run(120)
    training.compute *= 2.3
    training.run(20)
    assert training.alarms == []
    training.compute *= 1.2
    training.run(5)
    assert len(training.alarms) == 1


def test_no_alarm_for_two_steps():
    training = Training(Bandwidth(0.03), Alone(link_at(10)))
    training.run(120)
    num_decisions = len(training.decided)
    training.pauses = {130: 2.0, 131: 2.0, 133: 2.0}
    training.run(20)
    assert training.alarms == []
    assert len(training.decided) == num_decisions


def test_an_alarm_of_another_rank_decides_here():
    training = Training(Bandwidth(0.03), Alone(link_at(10)))
    training.run(120)
    meter, before = training.meter, len(training.network.calls)
    meter.after_exchange(120, training.network.now + 1, 0.01, num_elements=N, alarmed=True)
    assert len(training.network.calls) > before


# Several ranks


def test_ranks_that_make_different_calls_are_noticed():
    together, errors = Together(2), []

    def work(rank: int) -> None:
        try:
            Rank(together, rank, link_at(1)).largest([0.0] * (1 + rank))
        except RuntimeError as error:
            errors.append(str(error))

    run_threads(work, 2)
    assert len(errors) == 2
    assert "different calls" in errors[0]


def test_different_plans_are_noticed():
    report = Report([0.1], ["because"], [3], 1, {})
    with pytest.raises(AssertionError):
        assert_equal_plans([report, replace(report, densities=[1.0])])


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("gbit", [0.1, 1, 10, 100])
def test_different_clocks_same_plans(gbit, num_ranks):
    """They start anywhere, run up to 8 % too fast or too slow, and are read with noise."""
    noises = [noisy(rank, 0.9, 1.1) for rank in range(num_ranks)]

    def clock(rank, step, now, exposed, overlap):
        rate = 1 + 0.04 * (rank - num_ranks // 2)
        return 1e6 * rank + rate * now, rate * exposed * noises[rank](), overlap

    reports = train(num_ranks, 170, same_link(gbit), clock)
    assert_equal_plans(reports)
    assert reports[0].num_measurements == 1
    right = train(num_ranks, 170, same_link(gbit), good_clock)
    assert abs(LADDER.index(reports[0].densities[-1]) - LADDER.index(right[0].densities[-1])) <= 1


def test_the_slow_link_decides_for_all():
    reports = train(4, 120, lambda rank, step: link_at(0.5 if rank == 2 else 10), good_clock)
    assert_equal_plans(reports)
    alone = train(4, 120, same_link(0.5), good_clock)
    fast = train(4, 120, same_link(10), good_clock)
    assert reports[0].densities == alone[0].densities
    assert fast[0].densities[-1] > alone[0].densities[-1]


@pytest.mark.parametrize("settings", [{}, {"budget_seconds": 0.03}], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("what", ["now", "exposed", "overlap"])
def test_a_rank_without_times(what, bad, settings):
    """From the second decision on: the plan stays as it was, everywhere."""

    def clock(rank, step, now, exposed, overlap):
        times = {"now": now, "exposed": exposed, "overlap": overlap}
        return tuple((times | {what: bad} if rank == 1 and step > 20 else times).values())

    reports = train(3, 170, same_link(1), clock, settings)
    assert_equal_plans(reports)
    good = train(3, 170, same_link(1), good_clock, settings)
    assert reports[0].densities == good[0].densities
    assert len(reports[0].decided) >= 4


def test_a_rank_without_times_from_the_start():
    def clock(rank, step, now, exposed, overlap):
        return (math.nan,) * 3 if rank == 0 else (now, exposed, overlap)

    reports = train(3, 170, same_link(1), clock, {})
    assert_equal_plans(reports)
    assert len(reports[0].decided) >= 3


def test_a_rank_that_comes_to_its_senses():
    def clock(rank, step, now, exposed, overlap):
        return (math.nan, math.nan, 0.0) if rank == 0 and step < 60 else (now, exposed, overlap)

    reports = train(3, 270, same_link(1), clock, {})
    assert_equal_plans(reports)
    assert reports[0].densities[-1] == train(3, 270, same_link(1), good_clock, {})[0].densities[-1]


@pytest.mark.parametrize("paused_rank", [0, 2])
@pytest.mark.parametrize("when", [80, 119])
def test_a_rank_that_pauses(paused_rank, when):
    """For two seconds in the middle of a period: the others wait for it, and nothing changes."""

    def clock(rank, step, now, exposed, overlap):
        late = 2.0 if step >= when else 0.0
        return now + late, exposed + (2.0 if step == when and rank != paused_rank else 0.0), overlap

    reports = train(3, 220, same_link(1), clock)
    assert_equal_plans(reports)
    good = train(3, 220, same_link(1), good_clock)
    assert reports[0].densities == good[0].densities
    assert reports[0].decided == good[0].decided
    assert reports[0].num_measurements == 1


@pytest.mark.parametrize("budget_seconds", [None, 0.03])
def test_a_pause_before_the_first_decision(budget_seconds):
    training, good = (Training(Bandwidth(budget_seconds), Alone(link_at(9))) for _ in range(2))
    training.pauses = {3: 2.0}
    assert training.run(200)[-1] == good.run(200)[-1]


def test_a_pause_in_a_trial():
    """Of dense, which fits by far."""
    training = Training(Bandwidth(), Alone(link_at(100)))
    training.pauses = {6: 2.0}
    assert training.run(100)[-1] == 1.0


def test_an_alarm_on_one_rank_is_one_of_all():
    """Only rank 1 finds its steps long."""

    def clock(rank, step, now, exposed, overlap):
        return (5 * now if rank == 1 and step > 80 else now), exposed, overlap

    reports = train(3, 120, same_link(1), clock)
    assert_equal_plans(reports)
    assert any(81 <= step <= 84 for step in reports[0].decided)


# Gain


def test_gain_is_that_of_all_ranks():
    together, seen = Together(2), {}

    def work(rank: int) -> None:
        network = Rank(together, rank, link_at(1))
        meter = Meter(Bandwidth(gain_floor=0.5), network, World(rank, 2))
        for step in range(4):
            meter.next_plan(step)
            energies = functools.partial(list, [[1.0, 4.0], [2.0, 2.0]][rank])
            meter.after_exchange(step, 0.3 * step, 0.01, num_elements=N, energies=energies)
        seen[rank] = meter.measured

    run_threads(work, 2)
    assert seen[0] == seen[1]
    assert seen[0].gain == 0.5


@pytest.mark.parametrize(("energies", "gain"), [([0.0, 0.0], 1.0), ([1.0, 4.0], 0.25)])
def test_gain(energies, gain):
    for gain_floor, expected in ((0.1, gain), (None, None)):
        training = Training(Bandwidth(gain_floor=gain_floor), Alone(link_at(1)))
        training.energies = lambda: energies
        training.run(5)
        assert training.meter.measured.gain == expected


def test_energies_are_computed_only_when_they_are_needed():
    calls = []

    def energies() -> list[float]:
        calls.append(1)
        return [1.0, 1.0]

    for gain_floor in (None, 0.1):
        training = Training(Bandwidth(gain_floor=gain_floor), Alone(link_at(1)))
        training.energies = energies
        training.run(200)
        assert len(calls) == (len(training.decided) if gain_floor else 0)


# What it measures


def test_what_was_measured():
    training = Training(Bandwidth(0.03), Alone(link_at(1)), hide=0.005)
    training.run(200)
    measured, meter = training.meter.measured, training.meter
    assert (measured.num_ranks, measured.num_elements) == (P, N)
    assert measured.compute_seconds == pytest.approx(COMPUTE)
    assert measured.step_seconds == pytest.approx(training.times[-1])
    assert measured.overlap_seconds == 0.005
    assert measured.link == meter.link
    assert meter.plan.seconds == pytest.approx(training.times[-1] - COMPUTE)


def test_the_first_step_with_a_plan_does_not_count():
    """Nor does the one that holds the measurement."""
    training = Training(Bandwidth(0.03), Alone(link_at(1)))
    training.run(4)
    after = training.decided[0] + 1
    training.pauses = {after: 50.0, after + 1: 50.0, after + 2: 1.0}
    while len(training.decided) < 2:
        training.run(1)
    timed = training.times[after + 2 :]
    assert training.meter.measured.step_seconds == pytest.approx(statistics.median(timed))
    assert len(timed) < 5


def test_the_median_counts():
    training = Training(Bandwidth(0.03), Alone(link_at(1)))
    training.run(100)
    training.pauses = {step: 1.0 for step in range(110, 200) if step % 3 == 0}
    training.run(100)
    assert training.meter.measured.step_seconds == pytest.approx(COMPUTE + exchange_seconds(link_at(1), 0.004))
    assert training.meter.measured.compute_seconds == pytest.approx(COMPUTE)


# What it says


KEYS = {
    "measuring_seconds",
    "latency_seconds",
    "bandwidth_bytes_per_second",
    "compute_seconds",
    "step_seconds",
    "predicted_seconds",
    "predicted_dense_seconds",
}


def test_a_small_model_is_not_measured_with_messages_larger_than_itself():
    training = Training(Bandwidth(), Alone(link_at(10)))
    training.meter.next_plan(0)
    for step in range(6):
        training.meter.after_exchange(step, 0.1 * step, 0.01, num_elements=50_000)
    sizes = [size for kind, size in training.network.calls if kind == "allreduce"]
    assert max(sizes) == 131_072 <= 4 * 50_000


def test_metrics():
    training = Training(Bandwidth(0.03), Alone(link_at(1)))
    assert training.meter.as_dict() == dict.fromkeys(KEYS)
    training.run(3)
    assert training.meter.as_dict() == dict.fromkeys(KEYS)
    training.run(200)
    found = training.meter.as_dict()
    assert 0 < found.pop("measuring_seconds") < 1  # by the real clock: what deciding costs beside the messages
    assert found == {
        "latency_seconds": pytest.approx(1.5e-3, rel=1e-3),
        "bandwidth_bytes_per_second": pytest.approx(1.25e8, rel=1e-3),
        "compute_seconds": pytest.approx(COMPUTE),
        "step_seconds": pytest.approx(training.times[-1]),
        "predicted_seconds": pytest.approx(exchange_seconds(link_at(1), 0.004), rel=1e-3),
        "predicted_dense_seconds": pytest.approx(exchange_seconds(link_at(1), 1.0), rel=1e-3),
    }
    assert json.loads(json.dumps(found)) == found


def test_metrics_hold_no_infinity():
    training = Training(Bandwidth(), Alone(link_at(1)))
    training.meter.next_plan(0)
    training.meter.after_exchange(0, 1.0, math.inf, num_elements=N, alarmed=True)
    found = training.meter.as_dict()
    assert set(found) == KEYS
    assert found["step_seconds"] is None
    json.dumps(found, allow_nan=False)


def test_one_line_per_change(caplog):
    with caplog.at_level(logging.INFO, logger="hvd_sparse"):
        training = Training(Bandwidth(0.03), Alone(link_at(1)))
        training.run(200)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "Measured the network (at the start): 1.50 ms per collective, 1 Gbit/s.",
        f"Exchange 3: density 0.004 from now on. {lines[1].partition('from now on. ')[2]}",
    ]
    assert "is the densest that fits" in lines[1]
    changes = sum(before != after for before, after in zip(training.densities, training.densities[1:]))
    assert changes == 1


def test_only_rank_0_speaks(caplog):
    with caplog.at_level(logging.INFO, logger="hvd_sparse"):
        Training(Bandwidth(0.03), Alone(link_at(1)), rank=1).run(60)
    assert caplog.text == ""


def test_the_plan_is_asked_for_once_a_step():
    meter = Meter(Bandwidth(), Alone(link_at(1)), World(0, P))
    assert math.isnan(meter.plan.density)
    plan = meter.next_plan(0)
    assert isinstance(plan, Plan)
    assert plan.density == 0.011
    assert meter.next_plan(1) is plan


# Saved states


@pytest.mark.parametrize("gbit", [0.1, 1, 10])
def test_a_saved_state_goes_on(gbit):
    """The link is measured again, after the first steps that are timed; what was learned about plans holds."""
    first = Training(Bandwidth(), Alone(link_at(gbit)))
    first.run(230)
    saved = json.loads(json.dumps(first.meter.state))
    other = Training(Bandwidth(), Alone(link_at(gbit)))
    other.meter.load(saved)
    other.num_exchanges = 230
    assert other.run(4) == first.run(4), "the plan, before anything is measured"
    assert other.decided == [233]
    assert other.network.num_measurements == 1
    learned = {name: one["rest"] for name, one in saved["known"].items()}
    assert learned
    assert {name: one["rest"] for name, one in other.meter.state["known"].items()} == pytest.approx(learned)
    assert other.run(200) == first.run(200)


@pytest.mark.parametrize("gbit", [0.1, 1, 10])
@pytest.mark.parametrize("settings", [{"budget_seconds": 0.03}, {}, {"exposed_fraction": 0.3}], ids=str)
def test_loading_changes_no_plan(settings, gbit):
    training = Training(Bandwidth(**settings), Alone(link_at(gbit)))
    before = training.run(230)[-1]
    training.meter.load(dict(training.meter.state))
    assert set(training.run(120)) == {before}


def test_loading_does_not_keep_what_was_loaded():
    meter = Meter(Bandwidth(), Alone(link_at(1)), World(0, P))
    saved = {"density": 0.1, "due": 500}
    meter.load(saved)
    assert saved == {"density": 0.1, "due": 500}
    assert meter.next_plan(400).density == 0.1


def test_loading_in_the_middle_forgets_times():
    training = Training(Bandwidth(0.03), Alone(link_at(1)))
    training.run(100)
    training.meter.load(training.meter.state)
    assert training.meter.link is None
    assert not training.meter.is_alarmed()
    training.network.now += 1000.0
    training.run(60)
    assert training.meter.measured.step_seconds < 1


def test_other_ranks():
    """Elastic training: the plan follows the number of ranks, and a rank that was alone begins to adapt."""
    training = Training(Bandwidth(0.03), Alone(link_at(1)))
    training.run(100)
    training.meter.meet(World(0, 2 * P))
    training.meter.load(training.meter.state)
    training.run(60)
    assert training.meter.measured.num_ranks == 2 * P
    meter = Meter(Bandwidth(), Alone(link_at(1)), World(0, 1))
    meter.next_plan(0)
    assert meter.next_plan(1) is not meter.next_plan(2)
    meter.meet(World(1, 2))
    meter.load(meter.state)
    assert meter.next_plan(3) is meter.next_plan(4)
    assert meter.rank == 1
    meter.link = link_at(1)
    assert meter.next_plan(5, World(1, 2)) is meter.next_plan(6)
    assert meter.link is not None
    meter.next_plan(7, World(0, 3))  # a host was removed, and nobody has told
    assert (meter.rank, meter.num_ranks, meter.link) == (0, 3, None)


def test_loading_the_state_of_a_fixed_controller():
    meter = Meter(Fixed(0.2), Alone(link_at(1)), World(0, P))
    meter.load({})
    assert meter.next_plan(7).density == 0.2
    assert meter.state == {}


# All of it


def scenario(draw: random.Random) -> tuple[Training, list[float]]:
    """A training, and by what its link becomes faster after some time."""
    compute = 10 ** draw.uniform(-1.5, 0)
    selecting = compute * 10 ** draw.uniform(-2, 0.3)
    costs = [{}, dict.fromkeys(LADDER[1:], selecting), {d: selecting * (0.9 + d) for d in LADDER[1:]}]
    gbit, changes = 10 ** draw.uniform(-1, 2), [10 ** draw.choice([-1, 1]) for _ in range(draw.choice([0, 1, 2]))]
    training = Training(
        Bandwidth(),
        Alone(link_at(gbit, 10 ** draw.uniform(-4, -2.5))),
        compute,
        hide=compute * draw.choice([0, 0.3, 0.6]),
        codec=draw.choice([*costs, {1.0: selecting}]),
        codec_exposed=draw.choice([False, True]),
    )
    return training, changes


@pytest.mark.parametrize("seed", range(200))
def test_any_training_ends_near_its_best_plan(seed):
    """At most eight periods after the last change; a twentieth by choice, a tenth by hysteresis, and clocks 3 % off."""
    draw = random.Random(seed)
    training, changes = scenario(draw)
    training.noise = training.network.noise = noisy(seed, 0.97, 1.03)
    training.run(draw.randrange(10, 300))
    for change in (1, *changes):
        link = training.network.link
        training.network.link = replace(link, seconds_per_byte=link.seconds_per_byte / change)
        training.run(8 * 50)
        taken = {density: sum(training.costs(density)) for density in LADDER}
        assert taken[training.meter.plan.density] <= 1.05 * 1.1 * 1.03 * min(taken.values())


# Groups of ranks


@pytest.mark.parametrize("cross", [10, 1, 0.1])
def test_links_inside_and_across_hosts_are_measured_apart(cross):
    """Two ranks on each of four hosts: a prediction takes what goes inside at one rate, what goes across at another."""
    links = {"local": link_at(100, 1e-4), "cross": link_at(cross)}
    network = Alone(link_at(cross), groups={"local": (2, links["local"]), "cross": (4, links["cross"])})
    training = Training(Bandwidth(collective="hierarchical"), network)
    training.run(4)
    measured = training.meter.measured
    assert measured.num_local == 2
    for group, link in links.items():
        assert measured.links[group].bandwidth == pytest.approx(link.bandwidth, rel=1e-3)
        assert measured.links[group].latency == pytest.approx(link.latency, rel=1e-3)
    predicted = Bandwidth(collective="hierarchical")._link_seconds(measured)
    for density in LADDER[1:]:
        traffic = TRAFFIC["hierarchical"](N, num_kept(density, N), P, num_local=2)
        assert predicted[density] == pytest.approx(sum(seconds(links[g], one) for g, one in traffic.items()), rel=1e-3)


def test_a_group_of_one_rank_has_no_link():
    network = Alone(link_at(1), groups={"local": (1, link_at(1)), "cross": (P, link_at(1))})
    training = Training(Bandwidth(collective="hierarchical"), network)
    training.run(4)
    assert set(training.meter.measured.links) == {"cross"}
    assert not [call for call in network.calls if call[0] == "local"]
