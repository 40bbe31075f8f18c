"""One rank of a launch of compare.py: compare_rank.py SETTINGS.json. Trains all contenders, one after the other."""

from __future__ import annotations

import time
from typing import Any

from contenders import make
from ranks import Rank, started_rank
from workloads import Workload, find

CHUNK = 5  # steps between signs of life


def train(rank: Rank, workload: Workload, name: str) -> None:
    """All steps of one contender, and a note of the metric over the test examples of all ranks."""
    started = time.monotonic()
    trainer: Any = rank.attempt(name, lambda: make(name, workload))
    batches, num_steps = workload.batches(rank.rank), rank.settings["steps"]

    def steps(number: int) -> bool:
        for batch in [next(batches) for _ in range(number)]:
            trainer.step(batch)
        return True

    def evaluation() -> tuple[float, float]:
        trainer.finish()
        share = workload.evaluate(trainer.model, rank.rank, rank.size)
        trainer.close()
        return share

    for start in range(0, num_steps, CHUNK):
        number = min(CHUNK, num_steps - start)
        if trainer is None or not rank.attempt(name, lambda number=number: steps(number)):
            return
    share = rank.attempt(name, evaluation)
    if share is not None:
        rows = rank.gather(*share)
        value = sum(row[0] for row in rows) / sum(row[1] for row in rows)
        rank.note("finished", name, seed=workload.seed, value=value, seconds=time.monotonic() - started)


def main() -> None:
    rank = started_rank()
    settings = rank.settings
    workload: Any = find(settings["model"])
    workload.num_tests, workload.num_steps, workload.seed = 10_000, settings["steps"], settings["seed"]
    for name in settings["contenders"]:
        train(rank, workload, name)
    rank.close()


if __name__ == "__main__":
    main()
