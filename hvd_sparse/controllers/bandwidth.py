"""The density follows the network."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvd_sparse.controllers import Measured, Plan, Seen
from hvd_sparse.planner.choice import LADDER, Choice, Option, budget, choose
from hvd_sparse.planner.cost import TRAFFIC, seconds_by_group
from hvd_sparse.types import State, check_count, check_density, check_positive, num_kept

_NEAR_BEST = 0.05  # without a budget: what a denser plan may cost more than the best one, as a part of the step
_FIRST_DECISION = 3  # exchange after which there is one; the first ones make plans and connections
_TRIAL = 5  # exchanges after which a plan that was not measured on this network is looked at again
_FORGET = 40  # periods after which a plan that was not in use counts as not measured
_FAR = 2.0  # a plan that needs so many times as long is not looked at a second time
_MISSED = 0.3  # relative error of a prediction after which nothing that was seen counts
_NOISE_SECONDS = 0.002


class Bandwidth:
    """The densest exchange that costs next to nothing: dense if that fits, the sparsest rung if nothing does.

    Predicted step with a plan: what its traffic takes over the measured link, as far as it does not hide behind
    backward, and beside it what a step has taken beyond that when this plan was last in use: computation, selection.
    What it costs is the difference to the least computation that any plan was seen with. A rung that was never in use
    is taken to need what the two nearest that were make likely. Dense is tried wherever its traffic alone would not
    rule it out (with a budget, where it would fit as far as is known), and the sparsest rung once. A plan that a single
    trial spoke against gets a second one a period later, since noise may have decided. Where computation with the plan
    in use takes longer, it does with all of them. What was seen long ago, or what a step contradicts by far, is
    forgotten.

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
        exposed_fraction: float = 0.05,
        ladder: Sequence[float] = LADDER,
        period: int = 50,
        hysteresis: float = 0.1,
        margin: float = 0.1,
        gain_floor: float | None = None,
        collective: str = "owner_reduce",
        entry_bytes: float = 8,
    ) -> None:
        budget(exposed_fraction if exposed_fraction == 0 else check_positive(exposed_fraction, "exposed_fraction"), 1.0)
        if not isinstance(ladder, (tuple, list)) or not ladder:
            raise ValueError(f"`ladder` must be densities, (0.1, 0.01) say. Received: ladder={ladder!r}.")
        self.budget_seconds = None if budget_seconds is None else check_positive(budget_seconds, "budget_seconds")
        self.exposed_fraction = exposed_fraction
        rungs = {check_density(density, "ladder") for density in ladder} - {1.0}
        self.densities = tuple(sorted(rungs, reverse=True))
        self.period = check_count(period, "period")
        self.hysteresis = 0.0 if hysteresis == 0 else float(check_positive(hysteresis, "hysteresis"))
        self.margin = 0.0 if margin == 0 else float(check_positive(margin, "margin"))
        self.gain_floor = None if gain_floor is None else check_density(gain_floor, "gain_floor")
        self.collective = collective
        self.entry_bytes = entry_bytes
        self._traffic = TRAFFIC.get(collective, TRAFFIC["owner_reduce"])

    def init(self) -> State:
        # In the middle of the ladder, so that the first steps are slow nowhere.
        start = self.densities[len(self.densities) // 2] if self.densities else 1.0
        return {"density": start, "due": _FIRST_DECISION, "known": {}, "times": {}, "gain": {}}

    def ladder(self) -> tuple[float, ...]:
        return (1.0, *self.densities)

    def due(self, step: int, state: State) -> bool:
        """Whether ranks shall measure together after exchange number `step`."""
        return bool(step >= state["due"])

    def decide(self, seen: Seen, state: State) -> tuple[Plan, State]:
        density = state["density"]
        words = "dense" if density == 1 else f"density {density:g}"
        if seen.measured is None:
            return Plan(density, f"{words}, until the network is measured"), state
        measured = seen.measured
        numbers = (measured.compute_seconds, measured.overlap_seconds, measured.link.latency)
        if not all(map(math.isfinite, (*numbers, measured.link.seconds_per_byte))):
            later = {**state, "due": seen.step + self.period}
            return Plan(density, f"{words} is kept: a measurement is not finite"), later
        link_seconds = self._link_seconds(measured)
        state = self._observed(seen.step, measured, link_seconds[density], state)
        known, gain = state["known"], state["gain"]
        base = min([measured.compute_seconds, *(one["compute"] for one in known.values())])
        steps = {d: self._predicted(d, link_seconds[d], state, base, seen.step, measured) for d in self.ladder()}
        exposed = {d: max(0.0, steps[d] - base) for d in steps}
        choice = choose(
            [Option(self.collective, d, exposed[d], gain.get(_key(d))) for d in self.densities],
            exposed[1.0],
            self._budget(base, exposed, steps),
            Choice("dense" if density == 1 else self.collective, density, exposed[density], ""),
            hysteresis=self.hysteresis,
            margin=self.margin,
            gain_floor=self.gain_floor,
        )
        wait = self.period if self._is_sure(choice.density, link_seconds, state) else _TRIAL
        state = {**state, "density": choice.density, "due": seen.step + wait}
        return Plan(choice.density, choice.reason, choice.seconds, exposed[1.0]), state

    def _link_seconds(self, measured: Measured) -> dict[float, float]:
        """Of every rung, what its traffic takes."""
        n, num_ranks = measured.num_elements, measured.num_ranks
        found = {}
        for density in self.ladder():
            traffic = TRAFFIC["dense"] if density == 1 else self._traffic
            volumes = traffic(n, num_kept(density, n), num_ranks, self.entry_bytes, measured.num_local)
            links = {**dict.fromkeys(volumes, measured.link), **measured.links}
            found[density] = seconds_by_group(links, volumes)
        return found

    def _observed(self, step: int, measured: Measured, link_seconds: float, state: State) -> State:
        """The state with what this period says about the plan that was in use."""
        density, known, times, gain = _key(state["density"]), state["known"], state["times"], state["gain"]
        before = known.get(density)
        known = {key: one for key, one in known.items() if step - one["at"] <= _FORGET * self.period}
        if math.isfinite(measured.step_seconds):
            expected = _expected(before, link_seconds, measured) if before else []
            most = _MISSED * measured.step_seconds + _NOISE_SECONDS
            if expected and all(abs(one - measured.step_seconds) > most for one in expected):
                known, times = {}, {}  # half of the period may have been the old times: the next one counts
            else:
                if before and all(before["at"] > one["at"] + _TRIAL for key, one in known.items() if key != density):
                    known = _moved(known, measured.compute_seconds - before["compute"])
                now = {
                    "rest": measured.step_seconds - link_seconds,
                    "link": link_seconds,
                    "hidden": min(link_seconds, measured.overlap_seconds),
                    "compute": measured.compute_seconds,
                    "at": step,
                }
                count = times.get(density, 0) + (step > _FIRST_DECISION)  # the very first steps are slow
                known, times = {**known, density: now}, {**times, density: count}
        if measured.gain is not None:
            gain = {**gain, density: 1.0 if state["density"] == 1 else measured.gain}
        return {**state, "known": known, "times": times, "gain": gain}

    def _predicted(
        self, density: float, link_seconds: float, state: State, base: float, step: int, measured: Measured
    ) -> float:
        """Seconds of a step with a plan whose traffic takes `link_seconds`."""
        own = state["known"].get(_key(density))
        if own is None:
            return self._guessed(density, link_seconds, state["known"], base, measured)
        found = min(_expected(own, link_seconds, measured))
        # Noise may have decided a trial, but hardly two of them.
        age, count = step - own["at"], state["times"][_key(density)]
        again = age > 0 if count == 0 else count == 1 and age >= self.period
        if again and found < _FAR * measured.step_seconds:
            others = {key: one for key, one in state["known"].items() if one is not own}
            found = min(found, self._guessed(density, link_seconds, others, base, measured))
        return found

    def _guessed(self, density: float, link_seconds: float, known: State, base: float, measured: Measured) -> float:
        """The same of a plan that was never in use: selection grows with density as between the nearest known ones."""
        if density == 1:
            return link_seconds + (0.0 if self.budget_seconds is None else max(0.0, base - measured.overlap_seconds))
        near = sorted((d for d in self.densities if _key(d) in known), key=lambda d: (abs(math.log(d / density)), d))
        if not near or density == self.densities[-1]:  # the sparsest is tried once, to see what selection comes to
            return link_seconds + base
        like = known[_key(near[0])]
        found = min(_expected(like, link_seconds, measured))
        if len(near) > 1:
            slope = (known[_key(near[1])]["rest"] - like["rest"]) / (near[1] - near[0])
            found = max(base, found + max(0.0, slope) * (density - near[0]))
        return found

    def _is_sure(self, density: float, link_seconds: dict[float, float], state: State) -> bool:
        """Whether a plan needs no trial: it was seen on such a network, twice or just now."""
        name = _key(density)
        seen_enough = state["times"].get(name, 0) > (density != state["density"])
        return seen_enough and name in state["known"] and _is_near(state["known"][name]["link"], link_seconds[density])

    def _budget(self, base: float, exposed: dict[float, float], steps: dict[float, float]) -> float:
        if self.budget_seconds is not None:
            return self.budget_seconds
        best = min(steps, key=lambda density: steps[density])
        least = budget(self.exposed_fraction, base)
        return max(least, exposed[best] + _NEAR_BEST * steps[best])


def _key(density: float) -> str:
    """Under which a saved state has it."""
    return f"{density:g}"


def _expected(one: State, link_seconds: float, measured: Measured) -> list[float]:
    """Seconds of a step with a plan, by what it has needed.

    The first: no more and no less hides than did; the second: traffic of any length does, as far as backward reaches.
    """
    rest, hidden = one["rest"], one["hidden"]
    return [rest + link_seconds, rest + hidden + max(0.0, link_seconds - measured.overlap_seconds)]


def _moved(known: State, seconds: float) -> State:
    """What is known after computation with the plan in use has become longer: so it has with all others."""
    return {
        key: {**one, "rest": one["rest"] + seconds, "compute": one["compute"] + seconds} for key, one in known.items()
    }


def _is_near(seconds: float, others: float) -> bool:
    """Whether what was seen on one network says something about another one."""
    return abs(seconds - others) <= _MISSED * min(seconds, others) + _NOISE_SECONDS
