"""One density for ever."""

from __future__ import annotations

from hvd_sparse.controllers import Plan, Seen
from hvd_sparse.types import State, check_density


class Fixed:
    """The same density at every step.

    Args:
        density: k / n, in (0, 1].

    Example:
        >>> Fixed(0.01).decide(Seen(step=7), {})[0].density
        0.01
    """

    def __init__(self, density: float) -> None:
        self.density = check_density(density)

    def init(self) -> State:
        return {}

    def ladder(self) -> tuple[float, ...]:
        return (self.density,)

    def decide(self, seen: Seen, state: State) -> tuple[Plan, State]:
        return Plan(self.density, f"fixed density {self.density:g}"), state
