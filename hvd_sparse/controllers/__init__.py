"""How much to send: one decision per exchange, equal on all ranks. One file per method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hvd_sparse.types import State


@dataclass(frozen=True)
class Seen:
    """What a decision may rest on: floats that are already equal on all ranks. `step` counts exchanges."""

    step: int


@dataclass(frozen=True)
class Plan:
    """The density of the next exchange, and why, in words for people."""

    density: float
    reason: str


class Controller(Protocol):
    """Decides the density. Few distinct values: each one is a message shape of its own."""

    def init(self) -> State:
        """State before the first step: plain numbers."""

    def ladder(self) -> tuple[float, ...]:
        """Every density that `decide` may choose: a graph has a branch for each."""

    def decide(self, seen: Seen, state: State) -> tuple[Plan, State]:
        """The plan for exchange number `seen.step`, and the next state."""
