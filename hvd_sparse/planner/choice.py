"""The decision: the densest exchange that fits a budget of time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

LADDER = (0.1, 0.033, 0.011, 0.004, 0.001)  # few distinct densities: each is a message shape of its own


@dataclass(frozen=True)
class Option:
    """A sparse exchange that could be chosen.

    Attributes:
        collective: its registered name.
        density: k / n.
        seconds: its predicted time, selection included.
        gain: measured ||used||^2 / ||x||^2, the part of the gradient's energy that it sends; None: never measured.
    """

    collective: str
    density: float
    seconds: float
    gain: float | None = None


@dataclass(frozen=True)
class Choice:
    """What is exchanged from now on, how long it is expected to take, and why, in words for people."""

    collective: str
    density: float
    seconds: float
    reason: str


def budget(exposed_fraction: float, compute_seconds: float, backward_seconds: float | None = None) -> float:
    """Seconds that an exchange may take.

    Args:
        exposed_fraction: part of a step's time that communication may take, in [0, 1).
        compute_seconds: a step without communication.
        backward_seconds: give it if the exchange runs during backward: it may then take as long.

    Raises:
        ValueError: `exposed_fraction` is out of range.

    Example:
        >>> budget(0.1, 0.09)
        0.01
    """
    if not 0 <= exposed_fraction < 1:
        raise ValueError(f"`exposed_fraction` must be in [0, 1). Received: exposed_fraction={exposed_fraction!r}.")
    if backward_seconds is not None:
        return backward_seconds
    return exposed_fraction / (1 - exposed_fraction) * compute_seconds


def choose(
    options: Sequence[Option],
    dense_seconds: float,
    budget_seconds: float,
    current: Choice | None = None,
    *,
    hysteresis: float = 0.10,
    margin: float = 0.10,
    gain_floor: float | None = None,
) -> Choice:
    """Dense if it fits; else the densest option that fits; else the fastest of the sparsest ones.

    Args:
        options: at any number of densities; several of one density are alternatives.
        dense_seconds: predicted time without compression.
        budget_seconds: see `budget`.
        current: what is exchanged now; None at the start.
        hysteresis: relative difference in time that a change to a sparser plan must make. A plan that misses the budget
            by less is not left for a sparser one either: times are not known that well. A denser plan that fits needs
            no difference.
        margin: dense stays if compression would not make it faster by this fraction.
        gain_floor: least gain of an option; None: any. Of an option without a gain, the nearest sparser one that has
            one tells the least that it can be; if there is none, the option is allowed.

    Returns:
        The current plan with its new time, whenever an input is NaN or infinite.

    Reference: influences are S. Tyagi, M. Swany, Flexible Communication (IEEE BigData 2023, arXiv:2312.02493) and
    GraVAC (IEEE CLOUD 2023), whose gain guard this is; the rest is ours.

    Example:
        >>> choose([Option("allgather", 0.1, 0.09), Option("allgather", 0.01, 0.01)], 0.2, 0.03).reason
        'dense takes 200.0 ms of a 30.0 ms budget; allgather at density 0.01 takes 10.0 ms and is the densest that fits'
    """
    numbers = [dense_seconds, budget_seconds, *(option.seconds for option in options)]
    numbers += [option.gain for option in options if option.gain is not None]
    if not all(map(math.isfinite, numbers)):
        return _kept_blindly(current, dense_seconds)
    ladder = _ladder(options)
    allowed = [option for option in ladder if _passes(option, options, gain_floor)]
    best = _best(ladder, allowed, dense_seconds, budget_seconds, margin, gain_floor)
    if current is None:
        return best
    now = _predicted(current, options, dense_seconds, gain_floor)
    if now is None or (best.collective, best.density) == (current.collective, current.density):
        return best
    if best.density > current.density and best.seconds <= budget_seconds:
        return best
    late, near = now > (1 + hysteresis) * budget_seconds, abs(best.seconds - now) <= hysteresis * now
    if late or not (near or (now > budget_seconds and best.density < current.density)):
        return best
    why = f"{_name(best)} would take {_ms(best.seconds)}, too little of a difference for a change"
    if not near:
        why = f"it misses the {_ms(budget_seconds)} budget by less than {hysteresis:.0%}, too little for a change"
    return replace(current, seconds=now, reason=f"kept {_name(current)}, which takes {_ms(now)}: {why}")


def _ladder(options: Sequence[Option]) -> list[Option]:
    """The fastest option of every density, densest first. Of equals the first in the alphabet, on every rank."""
    densities = sorted({option.density for option in options}, reverse=True)
    rungs = ([option for option in options if option.density == density] for density in densities)
    return [min(rung, key=lambda option: (option.seconds, option.collective)) for rung in rungs]


def _best(
    ladder: list[Option],
    allowed: list[Option],
    dense_seconds: float,
    budget_seconds: float,
    margin: float,
    gain_floor: float | None,
) -> Choice:
    """What to take if nothing were in use."""
    dense = f"dense takes {_ms(dense_seconds)} of a {_ms(budget_seconds)} budget"
    if dense_seconds <= budget_seconds:
        return Choice("dense", 1.0, dense_seconds, f"{dense}: no compression is needed")
    if not ladder:
        return Choice("dense", 1.0, dense_seconds, f"{dense}, and there is nothing else")
    fitting = [option for option in ladder if option.seconds <= budget_seconds]
    wanted = (fitting or ladder[-1:])[0]
    denser = [option for option in allowed if option.density >= wanted.density]
    if not denser:
        why = f"no density from {wanted.density:g} up keeps the gain of {gain_floor:g} that is asked for"
        return Choice("dense", 1.0, dense_seconds, f"{dense}, but {why}")
    taken = denser[-1]
    if dense_seconds <= (1 + margin) * taken.seconds:
        why = f"{_name(taken)} would take {_ms(taken.seconds)}: too little is gained by compression"
        return Choice("dense", 1.0, dense_seconds, f"{dense}; {why}")
    why = "is the densest that fits" if fitting else "is the fastest of the sparsest; nothing fits"
    if taken is not wanted:
        why = f"is the sparsest that keeps a gain of {gain_floor:g}"
    reason = f"{dense}; {_name(taken)} takes {_ms(taken.seconds)} and {why}"
    return Choice(taken.collective, taken.density, taken.seconds, reason)


def _passes(option: Option, options: Sequence[Option], gain_floor: float | None) -> bool:
    """Whether the gain, as far as it is known, reaches the floor."""
    if gain_floor is None:
        return True
    same = [one for one in options if one.collective == option.collective and one.density <= option.density]
    known = [one.gain for one in sorted(same, key=lambda one: one.density) if one.gain is not None]
    return not known or known[-1] >= gain_floor


def _predicted(
    current: Choice, options: Sequence[Option], dense_seconds: float, gain_floor: float | None
) -> float | None:
    """Time of the current plan; None if it is no longer to be had."""
    if current.collective == "dense":
        return dense_seconds
    for option in options:
        if (option.collective, option.density) == (current.collective, current.density):
            return option.seconds if _passes(option, options, gain_floor) else None
    return None


def _kept_blindly(current: Choice | None, dense_seconds: float) -> Choice:
    if current is None:
        return Choice("dense", 1.0, dense_seconds, "dense until all measurements are finite")
    return replace(current, reason=f"kept {_name(current)}: a measurement is not finite")


def _name(plan: Option | Choice) -> str:
    return "dense" if plan.collective == "dense" else f"{plan.collective} at density {plan.density:g}"


def _ms(value: float) -> str:
    return f"{1e3 * value:.1f} ms"
