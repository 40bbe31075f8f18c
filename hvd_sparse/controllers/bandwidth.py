"""The density follows the network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hvd_sparse.controllers import Measured, Plan, Seen
from hvd_sparse.planner.choice import LADDER, Choice, Option, budget, choose
from hvd_sparse.planner.cost import TRAFFIC, seconds_by_group
from hvd_sparse.types import State, check_count, check_density, check_positive, num_kept

_NEAR_BEST = 0.05  # without a budget: what a denser plan may cost more than the best one, as a part of the step
_FIRST_DECISION = 4  # exchanges; the first ones make plans and connections
_TRIAL = 5  # exchanges after which a plan that was never measured is looked at again


class Bandwidth:
    """The densest exchange that costs next to nothing: dense if that fits, the sparsest rung if nothing does.

    Predicted time of a plan: that of its traffic over the measured link, and beside it what a step has taken beyond
    that whenever this plan was in use: computation, selection, less what the exchange hides behind backward. A plan
    that was never in use is taken to have the cost of the nearest one that was, dense to have none and to hide as well
    as it can; where that makes it the choice it is tried for a few exchanges.

    Args:
        budget_seconds: what an exchange may cost a step. None: `exposed_fraction` of the step, or a twentieth of it
            more than the best plan costs.
        exposed_fraction: part of a step's time that may be spent on communication, in [0, 1).
        ladder: densities to choose from, beside dense.
        period: exchanges between decisions.
        hysteresis: relative difference in time that a change must make.
        margin: dense stays if compression would not make it faster by this fraction.
        gain_floor: least share of the gradient's energy that is sent, ||used||^2 / ||x||^2. None: any.
        collective: registered name of the one in use, whose volume the prediction needs.
        entry_bytes: bytes of an entry on the wire.

    Raises:
        ValueError, TypeError: an argument is out of range.

    Reference: ours; influences are S. Tyagi, M. Swany, Flexible Communication (IEEE BigData 2023, arXiv:2312.02493)
    and GraVAC (IEEE CLOUD 2023).

    Example:
        >>> from hvd_sparse.planner.link import Link
        >>> measured = Measured(8, 25_557_032, Link(1.5e-3, 8e-10), compute_seconds=0.27)
        >>> controller = Bandwidth(budget_seconds=0.03)
        >>> controller.decide(Seen(50, measured), controller.init())[0].density
        0.033
    """

    def __init__(
        self,
        budget_seconds: float | None = None,
        exposed_fraction: float = 0.1,
        ladder: Sequence[float] = LADDER,
        period: int = 50,
        hysteresis: float = 0.1,
        margin: float = 0.1,
        gain_floor: float | None = None,
        collective: str = "owner_reduce",
        entry_bytes: float = 8,
    ) -> None:
        budget(exposed_fraction, 1.0)
        if isinstance(ladder, (str, float, int)) or not len(ladder):
            raise ValueError(f"`ladder` must be densities, (0.1, 0.01) say. Received: ladder={ladder!r}.")
        self.budget_seconds = None if budget_seconds is None else check_positive(budget_seconds, "budget_seconds")
        self.exposed_fraction = exposed_fraction
        rungs = {check_density(density, "ladder") for density in ladder} - {1.0}
        self.densities = tuple(sorted(rungs, reverse=True))
        self.period = check_count(period, "period")
        self.hysteresis = float(hysteresis and check_positive(hysteresis, "hysteresis"))
        self.margin = float(margin and check_positive(margin, "margin"))
        self.gain_floor = None if gain_floor is None else check_density(gain_floor, "gain_floor")
        self.collective = collective
        self.entry_bytes = entry_bytes
        self._traffic = TRAFFIC.get(collective, TRAFFIC["owner_reduce"])

    def init(self) -> State:
        # In the middle of the ladder, so that the first steps are slow nowhere.
        start = self.densities[len(self.densities) // 2] if self.densities else 1.0
        return {"density": start, "due": _FIRST_DECISION}

    def ladder(self) -> tuple[float, ...]:
        return (1.0, *self.densities)

    def due(self, step: int, state: State) -> bool:
        """Whether ranks shall measure together after exchange number `step`."""
        return bool(step + 1 >= state["due"])

    def decide(self, seen: Seen, state: State) -> tuple[Plan, State]:
        density = state["density"]
        if seen.measured is None:
            words = "dense" if density == 1 else f"density {density:g}"
            return Plan(density, f"{words}, until the network is measured"), state
        measured, link_seconds = seen.measured, self._link_seconds(seen.measured)
        state = {**state, **self._observations(measured, link_seconds[density], density)}
        steps = {d: link_seconds[d] + self._overhead(d, state, measured) for d in self.ladder()}
        exposed = {d: max(0.0, steps[d] - measured.compute_seconds) for d in steps}
        choice = choose(
            [Option(self.collective, d, exposed[d], state.get(f"gain {d:g}")) for d in self.densities],
            exposed[1.0],
            self._budget(measured, exposed, steps),
            Choice("dense" if density == 1 else self.collective, density, exposed[density], ""),
            hysteresis=self.hysteresis,
            margin=self.margin,
            gain_floor=self.gain_floor,
        )
        wait = self.period if f"overhead {choice.density:g}" in state else _TRIAL
        state = {**state, "density": choice.density, "due": seen.step + wait}
        return Plan(choice.density, choice.reason, choice.seconds, exposed[1.0]), state

    def _link_seconds(self, measured: Measured) -> dict[float, float]:
        """Of every rung, what its traffic takes."""
        n, num_ranks = measured.num_elements, measured.num_ranks
        found = {}
        for density in self.ladder():
            traffic = TRAFFIC["dense"] if density == 1 else self._traffic
            volumes = traffic(n, num_kept(density, n), num_ranks, self.entry_bytes)
            found[density] = seconds_by_group(dict.fromkeys(volumes, measured.link), volumes)
        return found

    @staticmethod
    def _observations(measured: Measured, link_seconds: float, density: float) -> dict[str, Any]:
        """What this period says about the plan that was in use."""
        found = {}
        if math.isfinite(measured.step_seconds):
            found[f"overhead {density:g}"] = measured.step_seconds - link_seconds
        if measured.gain is not None:
            found[f"gain {density:g}"] = 1.0 if density == 1 else measured.gain
        return found

    def _overhead(self, density: float, state: State, measured: Measured) -> float:
        """Seconds of a step beside the plan's traffic, as far as they are known."""
        if density == 1:
            return float(state.get("overhead 1", measured.compute_seconds - measured.overlap_seconds))
        known = [d for d in self.densities if f"overhead {d:g}" in state]
        if not known:
            return measured.compute_seconds
        nearest = min(known, key=lambda d: (abs(math.log(d / density)), d))
        return float(state[f"overhead {nearest:g}"])

    def _budget(self, measured: Measured, exposed: dict[float, float], steps: dict[float, float]) -> float:
        if self.budget_seconds is not None:
            return self.budget_seconds
        best = min(steps, key=lambda density: steps[density])
        least = budget(self.exposed_fraction, measured.compute_seconds)
        return max(least, exposed[best] + _NEAR_BEST * steps[best])
