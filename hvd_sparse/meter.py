"""Times the steps of a training, measures the link between ranks now and then, and lets the controller decide.

All ranks call `after_exchange` after the same exchanges. What they decide on came out of a collective, so that every
rank reaches the same plan.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

from hvd_sparse.controllers import Controller, Measured, Plan, Seen
from hvd_sparse.planner.cost import dense, seconds
from hvd_sparse.planner.link import Link, fit_link
from hvd_sparse.records import MetricsLog
from hvd_sparse.types import State, World

_log = logging.getLogger("hvd_sparse")
_SMALL_BYTES = 4096
_PROBE_BYTES = tuple(2**power for power in range(16, 24))  # 64 KiB to 8 MiB: a slow link shows itself early
_LONG_ENOUGH = 0.02  # seconds; a longer probe says no more
_SHORT = 0.2  # seconds; may be repeated more often
_PROBE_SHARE = 0.005  # of the time between two decisions that may go into looking at the link
_MISSED = 0.3  # relative error of a prediction after which the link is measured again
_TWICE = 2.0  # a single small message says no more than a factor
_NOISE = 0.002  # seconds
_LEAST_STEPS = 3  # that must have been timed before a decision
_ALARM = 2.5  # a step so many times as long as usual: decide now


class Network(Protocol):
    """What the meter needs of the ranks. All of them make the same calls."""

    def allreduce_seconds(self, num_bytes: int, group: str = "global") -> float:
        """How long this rank takes for an allreduce of so many bytes among a group of ranks."""

    def largest(self, values: list[float]) -> list[float]:
        """The largest of all ranks, place by place."""

    def total(self, values: list[float]) -> list[float]:
        """The sum over ranks, place by place."""


def measure_link(
    network: Network, num_ranks: int, most_bytes: int = _PROBE_BYTES[-1], group: str = "global"
) -> tuple[Link | None, int]:
    """The link as the slowest rank sees it, and the bytes of the longer allreduce that was timed. Under two seconds.

    No message is longer than `most_bytes`, or 64 KiB. None if a clock is broken. `group` has `num_ranks` on every host,
    all of which call this.
    """

    def allreduce(num_bytes: int) -> float:
        return network.allreduce_seconds(num_bytes, group)

    small = _largest(network, [min(allreduce(_SMALL_BYTES) for _ in range(4))])[0]
    for num_bytes in [size for size in _PROBE_BYTES if size <= max(most_bytes, _PROBE_BYTES[0])]:
        [large] = _largest(network, [min(allreduce(num_bytes) for _ in range(2))])
        if large > small + _LONG_ENOUGH:  # unless by accident
            again = min(allreduce(num_bytes) for _ in range(1 + (large < _SHORT)))
            [large] = _largest(network, [min(large, again)])
        if large > small + _LONG_ENOUGH:
            break
    if not math.isfinite(small + large):
        return None, 0
    return fit_link((_SMALL_BYTES, small), (num_bytes, large), num_ranks, per_collective=True), num_bytes


def _largest(network: Network, values: list[float]) -> list[float]:
    """NaN has no place in an order: infinity stands for it."""
    return network.largest([value if math.isfinite(value) else math.inf for value in values])


class Meter:
    """One per wrapped optimizer.

    Args:
        controller: decides; one without `due` is asked before every exchange and measures nothing.
        network: how to reach the other ranks.
        world: who takes part.
    """

    def __init__(self, controller: Controller, network: Network, world: World) -> None:
        self.controller = controller
        self.network = network
        self.state: State = controller.init()
        self.link: Any = None  # a Link between all ranks, once it is measured
        self.links: dict[str, Link] = {}  # those inside hosts and across, if the collective names them
        self.measured: Measured | None = None
        self.plan = Plan(math.nan, "")
        self.log: MetricsLog | None = None
        self.seconds = 0.0  # that measuring and deciding has taken
        self._probe_bytes = 0  # of the longest message worth sending
        self._look_bytes = 0  # of the message that looks at the link before the next decision
        self._usual = math.inf  # seconds of a step, at the last decision
        self._last_end = math.nan
        self.meet(world)
        self._restart()

    def meet(self, world: World) -> None:
        """These are the ranks from now on. If they are others than before, `load` has to follow."""
        self.rank, self.num_ranks, self.groups = world.rank, world.size, dict(world.groups)
        self._adapts = hasattr(self.controller, "due") and world.size > 1

    def _restart(self) -> None:
        self._num_exchanges = 0  # since the last decision; equal on all ranks, whatever their clocks say
        self._steps: list[float] = []
        self._exposed: list[float] = []
        self._overlaps: list[float] = []

    def next_plan(self, step: int, world: World | None = None) -> Plan:
        """The plan for exchange number `step`. `world`: who takes part, if that may have changed."""
        if world and (world.rank, world.size) != (self.rank, self.num_ranks):
            self.meet(world)
            self.load(self.state)
        if not self._adapts or math.isnan(self.plan.density):
            self.plan, self.state = self.controller.decide(Seen(step), self.state)
        return self.plan

    def load(self, state: State) -> None:
        """Go on from a saved state: what was learned about plans holds, the link is measured again."""
        self.state, self.link, self.plan = dict(state), None, Plan(math.nan, "")
        if self._adapts:
            self.state["due"] = 0
        self._last_end, self._usual = math.nan, math.inf
        self._restart()

    def as_dict(self) -> dict[str, Any]:
        """What `metrics()` says about the network and the plan; None where nothing is measured.

        Keys:
            latency_seconds, bandwidth_bytes_per_second: of the link, per collective.
            compute_seconds, step_seconds: of a typical step in the last period, without and with what it waited.
            measuring_seconds: that measuring and deciding has taken so far.
            predicted_seconds, predicted_dense_seconds: what a step waits with the present plan, and would with dense.
        """
        measured, link = self.measured, self.link
        return {
            "latency_seconds": link and link.latency,
            "bandwidth_bytes_per_second": link and link.bandwidth,
            "compute_seconds": measured and _number(measured.compute_seconds),
            "step_seconds": measured and _number(measured.step_seconds),
            "measuring_seconds": self.seconds or None,
            "predicted_seconds": _number(self.plan.seconds),
            "predicted_dense_seconds": _number(self.plan.dense_seconds),
        }

    def is_alarmed(self) -> bool:
        """Whether the last steps took so long that a decision should not wait."""
        recent = self._steps[-_LEAST_STEPS:]
        return self._adapts and len(recent) == _LEAST_STEPS and min(recent) > _ALARM * self._usual

    def after_exchange(
        self,
        step: int,
        now: float,
        exposed: float,
        overlap: float = 0.0,
        *,
        num_elements: int,
        alarmed: bool = False,
        energies: Callable[[], list[float]] | None = None,
    ) -> None:
        """Note the times of exchange number `step`; decide with the others if it is time to.

        Args:
            now: when it ended. exposed: how long backward waited for it. overlap: how long before that it began.
            num_elements: of all buckets that may be compressed.
            alarmed: some rank is; equal on all ranks.
            energies: this rank's ||used||^2 and ||x||^2 in this exchange.
        """
        used, seconds_of_step, self._last_end = self.plan, now - self._last_end, now
        self._num_exchanges += 1
        if self._adapts and num_elements > 0:
            if not math.isnan(seconds_of_step):
                self._steps.append(seconds_of_step)
                self._exposed.append(exposed)
                self._overlaps.append(overlap)
            due = self.controller.due(step, self.state)  # type: ignore[attr-defined]
            if alarmed or (due and self._num_exchanges > _LEAST_STEPS):  # the first one is not timed
                started = time.perf_counter()
                self._decide(step, num_elements, alarmed, energies)
                self.seconds += time.perf_counter() - started
                self._last_end = math.nan  # the next step would hold the measurement
        if self.log:
            self.log.write(
                step=step, density=used.density, collective=getattr(self.controller, "collective", None),
                bandwidth_bytes_per_second=self.link and self.link.bandwidth, exchange_seconds=exposed,
                step_seconds=seconds_of_step, predicted_seconds=used.seconds, reason=self.plan.reason,
                changed=self.plan.density != used.density,
            )  # fmt: skip

    def _decide(self, step: int, num_elements: int, alarmed: bool, energies: Callable[[], list[float]] | None) -> None:
        recent = slice(-_LEAST_STEPS, None) if alarmed else slice(None)  # the steps before belong to another network
        # A rank without times has no say.
        steps, exposed = self._steps[recent] or [0.0], self._exposed[recent] or [0.0]
        without = [whole - waited for whole, waited in zip(steps, exposed)]
        numbers = [statistics.median_low(values) for values in (steps, without, self._overlaps or [0.0])]
        looked = self.network.allreduce_seconds(self._look_bytes) if self.link else 0.0
        step_seconds, compute, overlap, looked = _largest(self.network, [*numbers, -looked])
        looked = -looked  # of the last rank to come, which waited for nobody
        step_seconds = step_seconds or math.inf
        why = self._reason_to_measure(step_seconds, looked)
        if why and self._measure(why, 4 * num_elements) and not alarmed:
            step_seconds = math.inf  # the steps were taken with the old link, or partly so: they say nothing
        share = None
        if energies and getattr(self.controller, "gain_floor", None) is not None:
            used, whole = self.network.total(energies())
            share = used / whole if whole > 0 else 1.0
        if not self.link:
            self._restart()
            return
        num_local = self.groups.get("local", (0, 1))[1]
        self.measured = Measured(
            self.num_ranks, num_elements, self.link, compute, step_seconds, overlap, share, self.links, num_local
        )
        before = self.plan
        self.plan, self.state = self.controller.decide(Seen(step, self.measured), self.state)
        changed = self.plan.density != before.density
        # Until the new plan was measured, nothing is unusual.
        self._usual = math.inf if changed else step_seconds
        if changed and self.rank == 0:
            _log.info("Exchange %d: density %g from now on. %s.", step, self.plan.density, self.plan.reason)
        allowed = _PROBE_SHARE * step_seconds * (self.state["due"] - step)
        sizes = [size for size in _PROBE_BYTES if size <= self._probe_bytes and self._predicted(size) <= allowed]
        self._look_bytes = max(sizes, default=_PROBE_BYTES[0])
        self._restart()

    def _measure(self, why: str, most_bytes: int) -> bool:
        """Measure the links; whether one between all ranks was known and it is much different."""
        before = self.link
        link, self._probe_bytes = measure_link(self.network, self.num_ranks, most_bytes)
        self.link = link or before
        for group, (_, num_ranks) in self.groups.items():
            found = measure_link(self.network, num_ranks, most_bytes, group)[0] if num_ranks > 1 else None
            if found:
                self.links[group] = found
        if link and self.rank == 0:
            _log.info(
                "Measured the network (%s): %.2f ms per collective, %.4g Gbit/s.",
                why, 1e3 * link.latency, 8e-9 * link.bandwidth,
            )  # fmt: skip
        changes = abs(math.log(link.seconds_per_byte / before.seconds_per_byte)) if link and before else 0.0
        return changes > math.log(1 + _MISSED)

    def _predicted(self, num_bytes: int) -> float:
        return seconds(self.link, dense(num_bytes // 4, 0, self.num_ranks))

    def _reason_to_measure(self, step_seconds: float, looked: float) -> str:
        """Why the link must be measured now, in words; empty if it need not. Equal on all ranks."""
        if not self.link:
            return "at the start"
        expected = self._predicted(self._look_bytes)
        if abs(looked - expected) > _NOISE and not 1 / _TWICE < looked / expected < _TWICE:
            return f"a message took {1e3 * looked:.1f} ms, {1e3 * expected:.1f} ms were expected"
        if math.isfinite(self._usual) and math.isfinite(step_seconds) and abs(step_seconds / self._usual - 1) > _MISSED:
            return f"a step took {1e3 * step_seconds:.1f} ms, {1e3 * self._usual:.1f} ms were expected"
        return ""


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
