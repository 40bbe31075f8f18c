"""How much to send: one decision per exchange, equal on all ranks. One file per method."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from hvd_sparse.planner.link import Link
from hvd_sparse.types import State


@dataclass(frozen=True)
class Measured:
    """What ranks have measured together since the last decision; the slowest rank counts.

    Attributes:
        num_ranks: those that exchange.
        num_elements: of all buckets that may be compressed.
        link: between them, latency per collective.
        compute_seconds: of a step without what it waits for the exchange.
        step_seconds: of a step with the current plan; infinite if nothing was measured.
        overlap_seconds: how long before the end of backward the exchange begins.
        gain: ||used||^2 / ||x||^2 of the last exchange, mean over ranks; None if it was not measured.
        links: between the ranks of a host ("local") and of all hosts ("cross"), where the collective tells them apart.
        num_local: ranks on every host, where it does.
    """

    num_ranks: int
    num_elements: int
    link: Link
    compute_seconds: float
    step_seconds: float = math.inf
    overlap_seconds: float = 0.0
    gain: float | None = None
    links: Mapping[str, Link] = field(default_factory=dict)
    num_local: int = 1


@dataclass(frozen=True)
class Seen:
    """What a decision may rest on: numbers that are already equal on all ranks. `step` counts exchanges.

    `measured` is there when the controller's `due` says so.
    """

    step: int
    measured: Measured | None = None


@dataclass(frozen=True)
class Plan:
    """The density of the next exchange, and why, in words for people.

    Attributes:
        seconds: predicted time of the exchange that a step waits for; NaN: no prediction. `dense_seconds`: without
            compression.
    """

    density: float
    reason: str
    seconds: float = math.nan
    dense_seconds: float = math.nan


class Controller(Protocol):
    """Decides the density. Few distinct values: each one is a message shape of its own.

    One that wants measurements also has `due(step, state) -> bool`: whether they shall be taken after exchange number
    `step`.
    """

    def init(self) -> State:
        """State before the first step: plain numbers."""

    def ladder(self) -> tuple[float, ...]:
        """Every density that `decide` may choose: a graph has a branch for each."""

    def decide(self, seen: Seen, state: State) -> tuple[Plan, State]:
        """The plan for exchange number `seen.step`, and the next state."""
