"""Trainings over simulated links and with simulated clocks, for the meter. Nothing sleeps."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvd_sparse.controllers import Controller
from hvd_sparse.controllers.bandwidth import Bandwidth
from hvd_sparse.meter import Meter
from hvd_sparse.planner.cost import TRAFFIC, seconds
from hvd_sparse.planner.link import Link
from hvd_sparse.types import World, num_kept

N, P = 25_557_032, 8
COMPUTE = 0.27
SMALL = 4096  # bytes of the shorter message that measures a link
LADDER = Bandwidth().ladder()


def link_at(gbit: float, latency: float = 1.5e-3) -> Link:
    return Link(latency, 8e-9 / gbit)


def exchange_seconds(link: Link, density: float, num_ranks: int = P) -> float:
    name = "dense" if density == 1 else "owner_reduce"
    return seconds(link, TRAFFIC[name](N, num_kept(density, N), num_ranks)["global"])


@dataclass
class Alone:
    """A network whose other ranks always measure the same as this one.

    Attributes:
        groups: (ranks, link) of further groups.
        noise: what every time is multiplied by.
        now: seconds; messages take some.
        calls: (name, bytes or number of values).
    """

    link: Link
    num_ranks: int = P
    groups: dict[str, tuple[int, Link]] = field(default_factory=dict)
    noise: Callable[[], float] = lambda: 1.0
    now: float = 0.0
    calls: list[tuple[str, int]] = field(default_factory=list)

    def allreduce_seconds(self, num_bytes: int, group: str = "global") -> float:
        self.calls.append(("allreduce" if group == "global" else group, num_bytes))
        num_ranks, link = self.groups.get(group, (self.num_ranks, self.link))
        exact = link.latency + 2 * (num_ranks - 1) / num_ranks * num_bytes * link.seconds_per_byte
        taken = exact * self.noise()
        self.now += taken
        return taken

    def largest(self, values: list[float]) -> list[float]:
        self.calls.append(("largest", len(values)))
        self.now += self.link.latency
        if any(map(math.isnan, values)):
            raise RuntimeError("the largest of NaN and a number is either of the two")
        return list(values)

    def total(self, values: list[float]) -> list[float]:
        self.calls.append(("total", len(values)))
        self.now += self.link.latency
        return [self.num_ranks * value for value in values]

    @property
    def num_measurements(self) -> int:
        return self.calls.count(("allreduce", SMALL)) // 4


class Training:
    """One rank's view of a training of which all times are known.

    Args:
        hide: seconds before the end of backward at which the exchange begins.
        codec: seconds of selecting and packing, per density. codec_exposed: they are no part of backward.

    Attributes:
        densities: of every exchange. decided: exchanges after which there was a decision.
        times: seconds of every exchange's step, without the meter's own messages.
    """

    def __init__(
        self,
        controller: Controller,
        network: Any,
        compute: float = COMPUTE,
        hide: float = 0.0,
        rank: int = 0,
        *,
        codec: Mapping[float, float] | None = None,
        codec_exposed: bool = False,
    ) -> None:
        self.network, self.compute, self.hide = network, compute, hide
        self.codec, self.codec_exposed = codec or {}, codec_exposed
        groups = {name: (0, num_ranks) for name, (num_ranks, _) in network.groups.items()}
        self.meter = Meter(controller, network, World(rank, network.num_ranks, groups=groups))
        self.noise: Callable[[], float] = lambda: 1.0
        self.pauses: dict[int, float] = {}  # exchange -> seconds
        self.clock: Callable[[float], float] = lambda now: now
        self.energies: Any = None
        self.num_elements = N
        self.num_exchanges = 0
        self.densities: list[float] = []
        self.decided: list[int] = []
        self.alarms: list[int] = []
        self.times: list[float] = []

    def costs(self, density: float) -> tuple[float, float]:
        """Seconds of computation in a step, and those that it then waits."""
        wait = max(0.0, exchange_seconds(self.network.link, density, self.network.num_ranks) - self.hide)
        codec = self.codec.get(density, 0.0)
        return (self.compute, codec + wait) if self.codec_exposed else (self.compute + codec, wait)

    def run(self, num_steps: int) -> list[float]:
        for step in range(self.num_exchanges, self.num_exchanges + num_steps):
            density = self.meter.next_plan(step).density
            compute, wait = self.costs(density)
            compute, wait = compute * self.noise(), wait * self.noise() + self.pauses.get(step, 0.0)
            self.network.now += compute
            before = self.clock(self.network.now)
            self.network.now += wait
            now = self.clock(self.network.now)
            alarmed = self.meter.is_alarmed()
            if alarmed:
                self.alarms.append(step)
            measured = self.meter.measured
            self.meter.after_exchange(
                step, now, now - before, self.hide,
                num_elements=self.num_elements, alarmed=alarmed, energies=self.energies,
            )  # fmt: skip
            if self.meter.measured is not measured:
                self.decided.append(step)
            self.densities.append(density)
            self.times.append(compute + wait)
        self.num_exchanges += num_steps
        return self.densities[-num_steps:]


def noisy(seed: int, least: float, most: float) -> Callable[[], float]:
    draw = random.Random(seed)
    return lambda: draw.uniform(least, most)


# Several ranks


class Together:
    """The network of ranks that are threads: every call waits for all of them, and is compared."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.barrier = threading.Barrier(num_ranks)
        self.values: list[Any] = [None] * num_ranks
        self.num_calls = 0

    def exchange(self, rank: int, call: Any, value: Any) -> list[Any]:
        self.values[rank] = (call, value)
        self.barrier.wait(20)
        answers = list(self.values)
        self.num_calls += rank == 0
        self.barrier.wait(20)
        calls = {answer[0] for answer in answers}
        if len(calls) > 1:
            raise RuntimeError(f"ranks make different calls: {calls}")
        return [answer[1] for answer in answers]


def run_threads(work: Callable[[int], None], num_ranks: int) -> None:
    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


class Rank(Alone):
    """One rank of `Together`."""

    def __init__(self, together: Together, rank: int, link: Link) -> None:
        super().__init__(link, together.num_ranks)
        self.together, self.rank = together, rank

    def allreduce_seconds(self, num_bytes: int, group: str = "global") -> float:
        taken = super().allreduce_seconds(num_bytes, group)
        self.together.exchange(self.rank, ("allreduce", num_bytes), None)
        return taken

    def largest(self, values: list[float]) -> list[float]:
        columns = zip(*self.together.exchange(self.rank, ("largest", len(values)), super().largest(values)))
        return [max(column) for column in columns]

    def total(self, values: list[float]) -> list[float]:
        columns = zip(*self.together.exchange(self.rank, ("total", len(values)), values))
        return [sum(column) for column in columns]

    def any(self, flag: bool) -> bool:
        return any(self.together.exchange(self.rank, "flag", flag))


@dataclass
class Report:
    densities: list[float]
    reasons: list[str]
    decided: list[int]
    num_measurements: int
    state: Any


def train(num_ranks: int, num_steps: int, link_of: Any, clock_of: Any, settings: Any = None) -> list[Report]:
    """Ranks that train together.

    Args:
        link_of: (rank, step) -> what this rank's messages take.
        clock_of: (rank, step, now, exposed, overlap) -> what this rank measures.
    """
    together = Together(num_ranks)
    reports: list[Any] = [None] * num_ranks

    def work(rank: int) -> None:
        network = Rank(together, rank, link_of(rank, 0))
        controller = Bandwidth(**({"budget_seconds": 0.03} if settings is None else settings))
        meter = Meter(controller, network, World(rank, num_ranks))
        report = Report([], [], [], 0, None)
        true_now = 0.0
        for step in range(num_steps):
            plan = meter.next_plan(step)
            report.densities.append(plan.density)
            report.reasons.append(plan.reason)
            wait = max(exchange_seconds(link_of(other, step), plan.density, num_ranks) for other in range(num_ranks))
            true_now += COMPUTE + wait
            network.link = link_of(rank, step)
            now, exposed, overlap = clock_of(rank, step, true_now, wait, 0.0)
            alarmed, measured = network.any(meter.is_alarmed()), meter.measured
            meter.after_exchange(step, now, exposed, overlap, num_elements=N, alarmed=alarmed)
            if meter.measured is not measured:
                report.decided.append(step)
        report.num_measurements, report.state = network.num_measurements, meter.state
        reports[rank] = report

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            reports[rank] = error
            together.barrier.abort()

    run_threads(guarded, num_ranks)
    errors = [report for report in reports if isinstance(report, BaseException)]
    for error in sorted(errors, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
        raise error
    return reports


def same_link(gbit: float) -> Callable[[int, int], Link]:
    return lambda rank, step: link_at(gbit)


def good_clock(rank: int, step: int, now: float, exposed: float, overlap: float) -> tuple[float, float, float]:
    return now, exposed, overlap


def assert_equal_plans(reports: list[Report]) -> None:
    for report in reports:
        assert report == reports[0]
