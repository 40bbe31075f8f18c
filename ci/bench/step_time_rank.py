"""One rank of a launch of step_time.py: step_time_rank.py SETTINGS.json. Trains all contenders in turn, in rounds."""

from __future__ import annotations

import math
import random
import time

from contenders import Trainer, make
from ranks import Rank, started_rank
from workloads import Batch, Workload, find

WARMUP_STEPS = 4  # the first ones plan buckets; PowerSGD starts at the third
SETTLE_STEPS = {"adaptive": 170}  # it tries plans at first
BLOCK_SECONDS = 0.4
MOST_STEPS = 8  # of a block


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

    def enter(self, name: str) -> None:
        """Make a trainer and take its first steps, the last of which tells how long a block is."""

        def warm_up() -> float:
            trainer = make(name, self.workload)
            self.trainers[name] = trainer
            seconds = [self.timed(trainer, [batch]) for batch in batches][-1]
            trainer.finish()
            return seconds

        batches = self.take(SETTLE_STEPS.get(name, WARMUP_STEPS))
        seconds = self.rank.attempt(name, warm_up)
        if seconds is None:
            self.trainers.pop(name, None)
        else:
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

    def block(self, name: str, number: int) -> bool:
        """Time some steps; False if the contender failed."""

        def measured() -> bool:
            trainer = self.trainers[name]
            if trainer.late:  # so that an exchange is in flight when the clock starts, as when it stops
                trainer.step(batches[0])
            sent, measuring = self.rank.sent_bytes(), trainer.measuring_seconds()
            seconds = self.timed(trainer, batches)
            sent, measuring = self.rank.sent_bytes() - sent, trainer.measuring_seconds() - measuring
            trainer.finish()
            self.rank.note(
                "block", name, round=number, steps=len(batches), seconds=seconds, sent=sent, measuring=measuring
            )
            return True

        batches = self.take(self.num_steps[name])
        return bool(self.rank.attempt(name, measured))

    def play(self, number: int) -> None:
        """A block of every contender, in an order that is another one each time and equal on all ranks."""
        for name in random.Random(number).sample(list(self.trainers), len(self.trainers)):
            if not self.block(name, number):
                del self.trainers[name]


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
    for name, trainer in contest.trainers.items():
        counted = trainer.counted_bytes()
        if counted is not None:
            rank.note("counted", name, bytes=counted)
    rank.close()


if __name__ == "__main__":
    main()
