"""When rounds are due, and what ranks of different speed make of that on a virtual clock."""

from __future__ import annotations

import pytest

from hvd_sparse.averaging.trigger import EverySeconds, EverySteps, Schedule


def simulate(interval, step_seconds, until):
    """Complete rounds, and of each rank the steps inside them and the waits, on a virtual clock.

    Collectives take no time. A rank that reaches `until` before its round is due gives up, as all do.
    """
    clocks = [0.0] * len(step_seconds)
    schedules = [Schedule(interval, now=lambda rank=rank: clocks[rank]) for rank in range(len(clocks))]
    rounds, steps, waits = 0, [0] * len(clocks), []
    while True:
        for rank, schedule in enumerate(schedules):
            while not schedule.is_due():
                clocks[rank] += step_seconds[rank]
                if clocks[rank] > until:
                    return rounds, steps, waits
                schedule.count_step()
        end = max(clocks)
        waits.append([end - clock for clock in clocks])
        for rank, schedule in enumerate(schedules):
            steps[rank] += schedule.take()[0]
            clocks[rank] = end
            schedule.restart()
        rounds += 1


def test_time_trigger_one_slow_rank():
    rounds, steps, waits = simulate(EverySeconds(10), (1, 1, 1, 3), 100)
    assert (rounds, steps) == (8, [80, 80, 80, 32])
    assert waits == [[2, 2, 2, 0]] * 8


def test_time_trigger_half_steps():
    rounds, steps, waits = simulate(EverySeconds(10), (0.5, 0.5, 0.5, 1.5), 100)
    assert (rounds, steps) == (9, [180, 180, 180, 63])
    assert waits == [[0.5, 0.5, 0.5, 0]] * 9


@pytest.mark.parametrize("slowest", [1, 2.5, 7, 25])
def test_nobody_waits_longer_than_a_step_of_the_slowest(slowest):
    _, _, waits = simulate(EverySeconds(10), (0.3, 1, slowest), 500)
    assert len(waits) > 10
    assert max(max(wait) for wait in waits) <= slowest


def test_step_trigger_makes_fast_ranks_wait():
    rounds, steps, waits = simulate(EverySteps(10), (1, 3), 100)
    assert (rounds, steps) == (3, [30, 30])
    assert waits[0] == [20, 0]


def test_warmup_steps_make_no_round_due():
    schedule = Schedule(EverySteps(4), warmup_steps=2, now=lambda: 0.0)
    due = []
    for step in range(1, 15):
        warming_up = schedule.warming_up
        if warming_up:
            schedule.count_warmup()
        schedule.count_step(warming_up)
        if schedule.is_due():
            due.append(step)
            assert schedule.take()[0] == (6 if step == 6 else 4), "those of the warm-up weigh, too"
    assert due == [6, 10, 14]


def test_the_clock_starts_after_the_warmup():
    clock = [0.0]
    schedule = Schedule(EverySeconds(10), warmup_steps=1, now=lambda: clock[0])
    clock[0] = 50.0
    assert not schedule.is_due()
    schedule.count_warmup()
    assert not schedule.is_due()
    clock[0] = 60.0
    assert schedule.is_due()


def test_saved_and_loaded():
    clock = [5.0]
    schedule = Schedule(EverySeconds(10), now=lambda: clock[0])
    clock[0] = 12.0
    schedule.count_step()
    schedule.samples = 32
    other = Schedule(EverySeconds(10), now=lambda: clock[0])
    other.load(schedule.save())
    assert other.save() == schedule.save()
    clock[0] = 14.9
    assert not other.is_due()
    clock[0] = 15.0
    assert other.is_due()
    assert other.take() == (1, 32)
    assert other.take() == (0, 0)
