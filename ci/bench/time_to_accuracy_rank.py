"""One rank of a launch of time_to_accuracy.py: time_to_accuracy_rank.py SETTINGS.json. Trains one contender."""

from __future__ import annotations

import math
import time

from contenders import Trainer, make
from ranks import Rank, started_rank
from workloads import Workload, find


class Training:
    """Steps of one contender, with evaluations between them that do not count."""

    def __init__(self, rank: Rank, workload: Workload, name: str) -> None:
        self.rank = rank
        self.workload = workload
        self.name = name
        self.batches = workload.batches(rank.rank)
        self.trainer: Trainer | None = None
        self.num_steps = 0
        self.seconds = 0.0

    def steps(self, number: int) -> bool:
        """Train; the slowest rank's time counts."""

        def train() -> float:
            started = time.perf_counter()
            if self.trainer is None:
                self.trainer = make(self.name, self.workload)
                started = time.perf_counter()
            for batch in batches:
                self.trainer.step(batch)
            return time.perf_counter() - started

        batches = [next(self.batches) for _ in range(number)]
        seconds = self.rank.attempt(self.name, train)
        if seconds is None:
            return False
        self.num_steps += number
        self.seconds += max(row[0] for row in self.rank.gather(seconds))
        return True

    def value(self) -> float:
        """The metric over the test examples of all ranks."""
        model = self.trainer.model
        model.eval()
        rows = self.rank.gather(*self.workload.evaluate(model, self.rank.rank, self.rank.size))
        model.train()
        return sum(row[0] for row in rows) / sum(row[1] for row in rows)


def main() -> None:
    rank = started_rank()
    settings = rank.settings
    workload = find(settings["model"])
    (name,) = settings["contenders"]
    training = Training(rank, workload, name)
    value = math.nan
    while training.num_steps < settings["most_steps"] and training.seconds < settings["most_seconds"]:
        if not training.steps(settings["every"]):
            break
        value = training.value()
        rank.note("value", name, step=training.num_steps, seconds=training.seconds, value=value)
        if workload.reached(value) or not math.isfinite(value):
            break
    rank.close()


if __name__ == "__main__":
    main()
