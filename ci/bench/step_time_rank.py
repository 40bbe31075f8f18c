"""One rank of a launch of step_time.py: step_time_rank.py SETTINGS.json. Trains all contenders in turn, in rounds."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Any

from contenders import PERIOD, Trainer, make
from ranks import Rank, started_rank
from workloads import Batch, Workload, find

WARMUP_STEPS = 4  # the first ones plan buckets; PowerSGD starts at the third
BLOCK_SECONDS = 0.4
MOST_STEPS = 8  # of a block
SETTLING = ("adaptive",)  # they try plans at first
SETTLE_BLOCKS = 22  # of MOST_STEPS, before anything of theirs is timed


class Contest:
    """The contenders that still take part, with the number of steps that make a block long enough to time."""

    def __init__(self, rank: Rank, workload: Workload) -> None:
        self.rank = rank
        self.workload = workload
        self.batches = workload.batches(rank.rank)
        self.trainers: dict[str, Trainer] = {}
        self.num_steps: dict[str, int] = {}
        for name in rank.settings["contenders"]:
            self.enter(name)
        for name in SETTLING:
            if name in self.trainers:
                self.settle(name)

    def enter(self, name: str) -> None:
        """Make a trainer and take its first steps, the last of which tells how long a block is."""
        trainer = self.attempt(name, lambda: make(name, self.workload))
        if trainer is not None:
            self.trainers[name] = trainer
            if self.run(name, WARMUP_STEPS - 1) is not None:
                self.set_length(name)

    def settle(self, name: str) -> None:
        """Let a contender try its plans, among the others as when it is timed: caches are cold then."""
        for number in range(SETTLE_BLOCKS):
            others = [other for other in self.trainers if other not in SETTLING]
            if others:
                self.run(others[number % len(others)], 1)
            if self.run(name, MOST_STEPS) is None:
                return
        self.set_length(name)

    def attempt(self, name: str, action: Callable[[], Any]) -> Any:
        """The result of `action`; None if the contender failed, which is out then."""
        result = self.rank.attempt(name, action)
        if result is None:
            self.trainers.pop(name, None)
        return result

    def run(self, name: str, number: int) -> float | None:
        """Seconds of so many steps; None if the contender failed."""
        batches = self.take(number)

        def steps() -> float:
            seconds = self.timed(self.trainers[name], batches)
            self.trainers[name].finish()
            return seconds

        return self.attempt(name, steps)

    def set_length(self, name: str) -> None:
        """Take a step; how long the slowest rank needs tells how many make a block."""
        seconds = self.run(name, 1)
        if seconds is not None:
            longest = max(row[0] for row in self.rank.gather(seconds))
            self.num_steps[name] = min(MOST_STEPS, math.ceil(BLOCK_SECONDS / longest))

    def take(self, number: int) -> list[Batch]:
        """The next batches. Fetched before ranks start together, so that none of them starts late."""
        return [next(self.batches) for _ in range(number)]

    def timed(self, trainer: Trainer, batches: list[Batch]) -> float:
        """Seconds of a step on each batch."""
        started = time.perf_counter()
        for batch in batches:
            trainer.step(batch)
        return time.perf_counter() - started

    def block(self, name: str, number: int) -> None:
        """Time some steps."""

        def measured() -> bool:
            trainer = self.trainers[name]
            if trainer.late:  # so that an exchange is in flight when the clock starts, as when it stops
                trainer.step(batches[0])
            sent = self.rank.sent_bytes()
            seconds = self.timed(trainer, batches)
            sent = self.rank.sent_bytes() - sent
            trainer.finish()
            self.rank.note("block", name, round=number, steps=len(batches), seconds=seconds, sent=sent)
            return True

        batches = self.take(self.num_steps[name])
        self.attempt(name, measured)

    def weigh(self, name: str) -> None:
        """What measuring and deciding takes of a whole period, in which one decision falls."""
        before = self.trainers[name].measuring_seconds()
        seconds = self.run(name, PERIOD)
        if seconds is not None:
            share = (self.trainers[name].measuring_seconds() - before) / seconds
            self.rank.note("measuring", name, value=share)

    def play(self, number: int) -> None:
        """A block of every contender, in an order that is another one each time and equal on all ranks."""
        for name in random.Random(number).sample(list(self.trainers), len(self.trainers)):
            self.block(name, number)


def main() -> None:
    rank = started_rank()
    settings = rank.settings
    contest = Contest(rank, find(settings["model"]))
    started = time.monotonic()
    for number in range(settings["rounds"]):
        elapsed = rank.gather(time.monotonic() - started)[0][0]  # rank 0's clock rules
        if number >= settings["least_rounds"] and elapsed > settings["seconds"]:
            break
        contest.play(number)
    for name in SETTLING:
        if name in contest.trainers:
            contest.weigh(name)
    for name, trainer in contest.trainers.items():
        counted = trainer.counted_bytes()
        if counted is not None:
            rank.note("counted", name, value=counted)
    rank.close()


if __name__ == "__main__":
    main()
