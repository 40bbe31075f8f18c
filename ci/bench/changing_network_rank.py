"""One rank of a launch of changing_network.py: changing_network_rank.py SETTINGS.json. Trains one contender."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from contenders import make
from ranks import Rank, started_rank
from workloads import Workload, find


def ask_for_rate(rank: Rank, phase: int) -> None:
    """Let the launcher set the rate of this phase, and go on together when it is set."""
    folder = Path(rank.settings["control"])
    if rank.rank == 0:
        (folder / f"{phase}.wanted").touch()
        while not (folder / f"{phase}.set").exists():
            time.sleep(0.01)
    rank.gather(0.0)


def train(rank: Rank, workload: Workload, name: str) -> None:
    """All phases; a note for each, with the density and the seconds of every step."""
    settings = rank.settings
    num_steps, num_phases = settings["steps"], len(settings["rates"])
    trainer: Any = make(name, workload)
    batches = workload.batches(rank.rank)
    for phase in range(num_phases):
        ask_for_rate(rank, phase)
        taken = [next(batches) for _ in range(num_steps)]

        def steps(taken: list[Any] = taken) -> tuple[list[float], list[float]]:
            seconds, densities = [], []
            for batch in taken:
                started = time.perf_counter()
                trainer.step(batch)
                seconds.append(time.perf_counter() - started)
                metrics = trainer.optimizer.metrics() if name == "adaptive" else {}
                densities.append(metrics.get("density", 1.0))
            return seconds, densities

        outcome = rank.attempt(name, steps)
        if outcome is None:
            return
        seconds, densities = outcome
        slowest = [max(row) for row in zip(*rank.gather(*seconds))]
        everybody = rank.gather(*densities)
        assert all(one == everybody[0] for one in everybody), "ranks use different plans"
        rank.note("phase", name, phase=phase, seconds=slowest, densities=densities)
    rows = rank.gather(*workload.evaluate(trainer.model, rank.rank, rank.size))
    rank.note("value", name, value=sum(row[0] for row in rows) / sum(row[1] for row in rows))


def main() -> None:
    rank = started_rank()
    settings = rank.settings
    workload: Any = find(settings["model"])
    workload.num_tests = 10_000
    workload.num_steps = settings["steps"] * len(settings["rates"])
    train(rank, workload, settings["contenders"][0])
    rank.close()


if __name__ == "__main__":
    main()
