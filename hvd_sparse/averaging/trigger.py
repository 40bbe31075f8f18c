"""When the next round is due. Ranks decide alone: their clocks restart when the same collective completes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Interval(Protocol):
    """How long ranks train alone."""

    def is_due(self, steps: int, seconds: float) -> bool:
        """Whether a round is due after so many local steps and so long a time."""

    def describe(self) -> str:
        """In words."""


@dataclass(frozen=True)
class EverySteps:
    """A round after every `steps` local steps: for ranks of equal speed, and where runs must be reproducible.

    >>> EverySteps(500).is_due(steps=499, seconds=1e9)
    False
    """

    steps: int

    def is_due(self, steps: int, seconds: float) -> bool:
        return steps >= self.steps

    def describe(self) -> str:
        return f"every {self.steps} steps"


@dataclass(frozen=True)
class EverySeconds:
    """A round at the first local step boundary after `seconds`: ranks of different speed take different numbers of
    steps, and none waits longer than about one step of the slowest.

    >>> EverySeconds(120).is_due(steps=0, seconds=120.5)
    True
    """

    seconds: float

    def is_due(self, steps: int, seconds: float) -> bool:
        return seconds >= self.seconds

    def describe(self) -> str:
        return f"every {self.seconds:g} s"


class Schedule:
    """The local steps of one rank, and whether they are enough for a round.

    Args:
        interval: between rounds.
        warmup_steps: exchanges in which ranks do not train alone yet; they make no round due.
        now: the clock, in seconds.

    Attributes:
        num_steps: local steps so far.
        steps, samples: since `take`, which a round calls when it reads the model.
        num_warmup: exchanges of the warm-up so far.
    """

    def __init__(self, interval: Interval, warmup_steps: int = 0, now: Callable[[], float] = time.monotonic) -> None:
        self.interval = interval
        self.warmup_steps = warmup_steps
        self.now = now
        self.num_steps = self.steps = self.samples = self.num_warmup = 0
        self._ignored = 0  # of `steps`: those of the warm-up
        self._since = now()

    @property
    def warming_up(self) -> bool:
        """Whether the next exchange belongs to the warm-up."""
        return self.num_warmup < self.warmup_steps

    def count_step(self, in_warmup: bool = False) -> None:
        """One local step was taken."""
        self.num_steps += 1
        self.steps += 1
        self._ignored += in_warmup

    def count_warmup(self) -> None:
        """One exchange of the warm-up was made, by all ranks."""
        self.num_warmup += 1
        self.restart()

    def is_due(self) -> bool:
        """Whether it is time for a round."""
        steps, seconds = self.steps - self._ignored, self.now() - self._since
        return not self.warming_up and self.interval.is_due(steps, seconds)

    def take(self) -> tuple[int, int]:
        """Steps and samples since the last call."""
        taken = (self.steps, self.samples)
        self.steps = self.samples = self._ignored = 0
        return taken

    def restart(self) -> None:
        """A collective is over, on every rank: from now on time counts."""
        self._since = self.now()

    def save(self) -> dict[str, float]:
        """What `load` takes."""
        counts = ("num_steps", "steps", "samples", "num_warmup")
        seconds = self.now() - self._since
        return {**{name: getattr(self, name) for name in counts}, "ignored": self._ignored, "seconds": seconds}

    def load(self, saved: dict[str, float]) -> None:
        """Go on where another schedule was."""
        for name in ("num_steps", "steps", "samples", "num_warmup"):
            setattr(self, name, int(saved[name]))
        self._ignored = int(saved["ignored"])
        self._since = self.now() - saved["seconds"]
