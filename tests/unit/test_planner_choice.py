"""The decision: the check table of bandwidth_adaptive.md, its traces, and what must hold for all inputs."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_sparse.planner.choice import LADDER, Choice, Option, budget, choose
from hvd_sparse.planner.cost import TRAFFIC, dense, seconds
from hvd_sparse.planner.link import Link, update
from hvd_sparse.types import num_kept

N, P, T = 25_557_032, 8, 0.030
PLANS = ("owner_reduce", "allgather")
SHORT = {"flat": "owner_reduce", "shared": "shared_allreduce"}


def link_at(gbit: float) -> Link:
    return Link(1.5e-3, 8e-9 / gbit)


def options_over(link: Link, plans=PLANS) -> list[Option]:
    return [
        Option(plan, density, seconds(link, TRAFFIC[plan](N, num_kept(density, N), P)["global"]))
        for plan in plans
        for density in LADDER
    ]


def decide(link: Link, plans=PLANS, current: Choice | None = None, budget_seconds: float = T, **settings) -> Choice:
    return choose(options_over(link, plans), seconds(link, dense(N, N, P)), budget_seconds, current, **settings)


def plan_of(choice: Choice) -> tuple[str, float]:
    return choice.collective, choice.density


# The table


@pytest.mark.parametrize(
    ("gbit", "without", "added"),
    [
        (100, "dense", "dense"),
        (25, "flat 0.1 14.45", "shared 0.1 12.00"),
        (10, "flat 0.033 12.45", "shared 0.1 25.49"),
        (5, "flat 0.033 21.89", "shared 0.033 17.84"),
        (2, "flat 0.011 18.74", "shared 0.011 15.37"),
        (1, "flat 0.004 14.45", "shared 0.011 27.74"),
        (0.5, "flat 0.004 25.90", "shared 0.004 20.99"),
        (0.1, "flat 0.001 31.62", "shared 0.001 25.49"),
    ],
)
def test_the_table(gbit, without, added):
    for expected, plans in ((without, PLANS), (added, (*PLANS, "shared_allreduce"))):
        choice = decide(link_at(gbit), plans)
        if expected == "dense":
            assert plan_of(choice) == ("dense", 1.0)
            assert 1e3 * choice.seconds == pytest.approx(15.8, abs=0.05)
        else:
            name, density, milliseconds = expected.split()
            assert plan_of(choice) == (SHORT[name], float(density))
            assert 1e3 * choice.seconds == pytest.approx(float(milliseconds), abs=0.0075)


# Traces: what the controller does with it


def followed(rates: list[float], plans: tuple[str, ...], period: int) -> tuple[list[Choice], list[Link]]:
    """The plan and the link after every step. Rates: Gbit/s per step."""
    link = link_at(rates[0])
    current = decide(link, plans)
    choices, links = [], []
    for number, rate in enumerate(rates, 1):
        if current.collective == "dense":
            traffic = dense(N, N, P)
        else:
            traffic = TRAFFIC[current.collective](N, num_kept(current.density, N), P)["global"]
        taken = seconds(link_at(rate), traffic)
        link = update(link, traffic.num_bytes, taken, traffic.num_collectives, 0.2)
        if number % period == 0:
            current = decide(link, plans, current)
        choices.append(current)
        links.append(link)
    return choices, links


def test_a_trace_with_a_decision_every_50_steps():
    choices, links = followed([10] * 100 + [1] * 100 + [10] * 100, PLANS, 50)
    assert [plan_of(choices[step - 1]) for step in range(50, 301, 50)] == [
        ("owner_reduce", density) for density in (0.033, 0.033, 0.004, 0.004, 0.033, 0.033)
    ]
    assert links[249].bandwidth / 1.25e8 == pytest.approx(9.999, abs=5e-4)


def test_a_trace_with_a_decision_on_every_step():
    choices, _ = followed([10] * 5 + [1] * 25 + [10] * 30, (*PLANS, "shared_allreduce"), 1)
    expected = [0.1] * 5 + [0.033] + [0.011] * 24 + [0.011] * 5 + [0.033] * 12 + [0.1] * 13
    assert [plan_of(choice) for choice in choices] == [("shared_allreduce", density) for density in expected]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("gbit", [25, 10, 5, 2, 1, 0.5, 0.1])
def test_noise_on_the_clock_changes_nothing(gbit, seed):
    """Of 10 % and less, with a decision every 50 steps."""
    draw, link = random.Random(seed), link_at(gbit)
    first = current = decide(link)
    traffic = TRAFFIC[first.collective](N, num_kept(first.density, N), P)["global"]
    for number in range(1, 301):
        taken = seconds(link_at(gbit), traffic) * draw.uniform(0.9, 1.1)
        link = update(link, traffic.num_bytes, taken, traffic.num_collectives, 0.2)
        if number % 50 == 0:
            current = decide(link, current=current)
        assert plan_of(current) == plan_of(first)


# Dense


def test_dense_outright_if_it_fits():
    choice = choose([Option("allgather", 0.001, 0.001)], 0.03, 0.03)
    assert plan_of(choice) == ("dense", 1.0)
    assert choice.reason == "dense takes 30.0 ms of a 30.0 ms budget: no compression is needed"


def test_dense_if_little_is_gained():
    options = [Option("allgather", 0.1, 0.029), Option("allgather", 0.001, 0.0001)]
    assert plan_of(choose(options, 0.0319, 0.03)) == ("dense", 1.0)
    assert "too little is gained" in choose(options, 0.0319, 0.03).reason
    assert plan_of(choose(options, 0.0320, 0.03)) == ("allgather", 0.1)
    assert plan_of(choose(options, 0.0319, 0.03, margin=0)) == ("allgather", 0.1)


def test_never_slower_than_dense_where_nothing_fits():
    options = [Option("allgather", 0.1, 0.9), Option("allgather", 0.001, 0.5)]
    assert plan_of(choose(options, 0.4, 0.03)) == ("dense", 1.0)
    assert plan_of(choose([], 0.4, 0.03)) == ("dense", 1.0)


def test_the_sparsest_if_nothing_fits():
    options = [Option("allgather", 0.001, 0.2), Option("owner_reduce", 0.001, 0.1), Option("owner_reduce", 0.1, 0.3)]
    choice = choose(options, 0.4, 0.03)
    assert plan_of(choice) == ("owner_reduce", 0.001)
    assert "nothing fits" in choice.reason


def test_of_equals_all_ranks_take_the_same():
    options = [Option("b", 0.1, 0.01), Option("a", 0.1, 0.01)]
    assert plan_of(choose(options, 1.0, 0.03)) == plan_of(choose(options[::-1], 1.0, 0.03)) == ("a", 0.1)


def test_reasons_are_sentences():
    assert decide(link_at(10)).reason == (
        "dense takes 144.6 ms of a 30.0 ms budget; "
        "owner_reduce at density 0.033 takes 12.4 ms and is the densest that fits"
    )


# Hysteresis


def held(collective: str, density: float) -> Choice:
    return Choice(collective, density, 1.0, "before")


def test_small_differences_change_nothing():
    options = [Option("a", 0.1, 0.0101), Option("b", 0.1, 0.0100)]
    choice = choose(options, 1.0, 0.03, held("a", 0.1))
    assert plan_of(choice) == ("a", 0.1)
    assert choice.seconds == 0.0101
    assert "kept a at density 0.1" in choice.reason
    assert "b at density 0.1 would take 10.0 ms" in choice.reason
    assert plan_of(choose(options, 1.0, 0.03, held("a", 0.1), hysteresis=0.005)) == ("b", 0.1)
    assert plan_of(choose(options, 1.0, 0.03, None)) == ("b", 0.1)


def test_a_plan_that_is_late_is_always_left():
    """Also for one that is hardly faster."""
    options = [Option("a", 0.001, 0.0331), Option("b", 0.001, 0.0329)]
    assert plan_of(choose(options, 1.0, 0.03, held("a", 0.001))) == ("b", 0.001)
    assert plan_of(choose(options, 1.0, 0.0301, held("a", 0.001))) == ("a", 0.001)


def test_a_plan_that_is_a_little_late_is_not_left_for_a_sparser_one():
    options = [Option("a", 0.1, 0.031), Option("a", 0.01, 0.004)]
    choice = choose(options, 1.0, 0.03, held("a", 0.1))
    assert plan_of(choice) == ("a", 0.1)
    assert "misses the 30.0 ms budget by less than 10%" in choice.reason
    assert plan_of(choose([Option("a", 0.1, 0.034), *options[1:]], 1.0, 0.03, held("a", 0.1))) == ("a", 0.01)
    assert plan_of(choose(options, 1.0, 0.03, None)) == ("a", 0.01)


def test_dense_that_fits_needs_no_difference():
    assert plan_of(choose([Option("a", 0.1, 0.02)], 0.0205, 0.03, held("a", 0.1))) == ("dense", 1.0)


def test_dense_is_left_when_it_is_late():
    options = [Option("a", 0.1, 0.01)]
    assert plan_of(choose(options, 0.04, 0.03, held("dense", 1.0))) == ("a", 0.1)
    assert plan_of(choose(options, 0.032, 0.03, held("dense", 1.0))) == ("dense", 1.0)


def test_a_plan_that_is_gone_is_left():
    assert plan_of(choose([Option("a", 0.1, 0.01)], 1.0, 0.03, held("b", 0.1))) == ("a", 0.1)


def test_a_plan_that_takes_no_time():
    assert plan_of(choose([Option("a", 0.1, 0.0)], 0.0, 0.0, held("a", 0.1))) == ("dense", 1.0)


# What is not finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["option", "gain", "dense", "budget"])
def test_the_plan_stays_when_something_is_not_finite(bad, where):
    values = {"option": 0.01, "gain": 0.5, "dense": 1.0, "budget": 0.03, where: bad}
    options = [Option("a", 0.1, values["option"], values["gain"])]
    kept = choose(options, values["dense"], values["budget"], held("b", 0.5))
    assert plan_of(kept) == ("b", 0.5)
    assert kept.seconds == 1.0
    assert "not finite" in kept.reason
    assert plan_of(choose(options, values["dense"], values["budget"])) == ("dense", 1.0)


# Gains

X = [4, -1, 0.5, 2, -3, 0.25, 1.5, 0.125]


def gain_of(k: int) -> float:
    largest = sorted((abs(x) for x in X), reverse=True)[:k]
    return sum(x * x for x in largest) / sum(x * x for x in X)


def test_gains_of_the_specification():
    assert [gain_of(k) for k in range(1, 5)] == pytest.approx([0.491127, 0.767386, 0.890168, 0.959233], abs=5e-7)
    options = [Option("a", k / 8, k * 0.01, gain_of(k)) for k in range(1, 5)]
    assert plan_of(choose(options, 1.0, 0.01)) == ("a", 1 / 8)
    choice = choose(options, 1.0, 0.01, gain_floor=0.7)
    assert plan_of(choice) == ("a", 2 / 8)
    assert "the sparsest that keeps a gain of 0.7" in choice.reason
    assert plan_of(choose(options, 1.0, 0.01, gain_floor=0.9)) == ("a", 4 / 8)
    assert plan_of(choose(options, 1.0, 0.01, gain_floor=0.99)) == ("dense", 1.0)
    assert "gain of 0.99" in choose(options, 1.0, 0.01, gain_floor=0.99).reason


def test_gains_that_are_not_known():
    """The nearest sparser one that is known tells the least that they can be."""
    options = [Option("a", 0.4, 0.04), Option("a", 0.2, 0.02, 0.5), Option("a", 0.1, 0.01)]
    assert plan_of(choose(options, 1.0, 0.01, gain_floor=0.6)) == ("a", 0.1)
    assert plan_of(choose(options, 1.0, 0.02, gain_floor=0.6)) == ("dense", 1.0)
    assert plan_of(choose(options, 1.0, 0.02, gain_floor=0.5)) == ("a", 0.2)
    other = [*options, Option("b", 0.2, 0.03, 0.9)]
    assert plan_of(choose(other, 1.0, 0.02, gain_floor=0.6)) == ("dense", 1.0), "b's gain says nothing about a"


def test_a_plan_below_the_floor_is_left():
    options = [Option("a", 0.2, 0.0101, 0.9), Option("a", 0.1, 0.01, 0.5)]
    assert plan_of(choose(options, 1.0, 0.01005, held("a", 0.1), gain_floor=0.7)) == ("a", 0.2)
    assert plan_of(choose(options, 1.0, 0.01005, held("a", 0.1))) == ("a", 0.1)


def test_a_denser_plan_that_fits_needs_no_difference():
    options = [Option("a", 0.2, 0.0101), Option("a", 0.1, 0.01)]
    assert plan_of(choose(options, 1.0, 0.0105, held("a", 0.1))) == ("a", 0.2)
    assert plan_of(choose(options, 1.0, 0.01005, held("a", 0.2))) == ("a", 0.2)


def test_a_denser_rung_must_still_pay():
    options = [Option("a", 0.2, 0.5, 0.9), Option("a", 0.1, 0.01, 0.5)]
    assert plan_of(choose(options, 0.4, 0.03, gain_floor=0.7)) == ("dense", 1.0)


# What must hold for all inputs

any_seconds = st.floats(1e-4, 10)
any_options = st.lists(
    st.builds(
        Option,
        st.sampled_from(["a", "b"]),
        st.sampled_from(LADDER),
        any_seconds,
        st.one_of(st.none(), st.floats(0, 1)),
    ),
    max_size=10,
    unique_by=lambda option: (option.collective, option.density),
)


@given(any_options, any_seconds, any_seconds, st.sampled_from([None, 0.5]), st.data())
def test_a_choice_is_one_of_the_options(options, dense_seconds, budget_seconds, floor, data):
    first = choose(options, dense_seconds, budget_seconds, gain_floor=floor)
    times = {(option.collective, option.density): option.seconds for option in options} | {
        ("dense", 1.0): dense_seconds
    }
    assert times[plan_of(first)] == first.seconds
    assert first.seconds <= dense_seconds
    shuffled = data.draw(st.permutations(options))
    assert choose(shuffled, dense_seconds, budget_seconds, gain_floor=floor) == first
    again = choose(options, dense_seconds, budget_seconds, first, gain_floor=floor)
    assert plan_of(again) == plan_of(first)


@given(any_options, any_seconds, any_seconds)
def test_no_denser_option_fits(options, dense_seconds, budget_seconds):
    choice = choose(options, dense_seconds, budget_seconds)
    fitting = [option.density for option in options if option.seconds <= budget_seconds]
    if choice.collective != "dense":
        assert dense_seconds > budget_seconds
        assert choice.density == (max(fitting) if fitting else min(option.density for option in options))
    elif dense_seconds > budget_seconds and options:
        assert dense_seconds <= 1.1 * max(budget_seconds, *(option.seconds for option in options))


@given(st.floats(0.01, 400), st.floats(0.001, 1), st.sampled_from([PLANS, (*PLANS, "shared_allreduce")]))
def test_density_falls_with_bandwidth(gbit, budget_seconds, plans):
    densities = [decide(link_at(gbit / 2**i), plans, budget_seconds=budget_seconds).density for i in range(8)]
    assert densities == sorted(densities, reverse=True)


# The budget


def test_budgets():
    assert budget(0.1, 0.27) == pytest.approx(0.03)
    assert budget(0.0, 0.27) == 0
    assert budget(0.1, 0.27, backward_seconds=0.18) == 0.18
    assert math.isnan(budget(0.1, math.nan))
    for wrong in (-0.1, 1, math.nan):
        with pytest.raises(ValueError, match=r"`exposed_fraction` must be in \[0, 1\)"):
            budget(wrong, 0.27)
