"""The adaptive default of the torch front: one plan on all ranks, whatever their clocks say, and nothing is lost."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scenario import assert_equal, assert_same_on_ranks, flat, summed

import hvd_sparse.torch as hvd
from hvd_sparse.controllers import Plan
from hvd_sparse.torch import averager as averager_module

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
FOLDER = Path(f"/tmp/hvd_sparse_adaptive_{os.environ['HOROVOD_GLOO_RENDEZVOUS_PORT']}")
FOLDER.mkdir(exist_ok=True)


def wrapped(compression: Any = None, lr: float = 0.01, **arguments: Any) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression, **arguments)


def train(model: torch.nn.Module, optimizer: Any, num_steps: int, pause: dict[int, float] | None = None) -> list[float]:
    """The density of every step."""
    found = []
    for step in range(num_steps):
        optimizer.zero_grad()
        x = torch.randn(16, 300, generator=torch.Generator().manual_seed(10 * step + RANK))
        model(x).square().mean().backward()
        time.sleep((pause or {}).get(step, 0.0))
        optimizer.step()
        found.append(optimizer.metrics()["density"])
    return found


def assert_same_plans(densities: list[float]) -> None:
    everybody = hvd.allgather_object(densities)
    assert all(one == everybody[0] for one in everybody), everybody


def case_the_default_adapts() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("hvd_sparse")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    model, optimizer = wrapped()
    before = optimizer.metrics()
    assert before["bandwidth_bytes_per_second"] is None
    densities = train(model, optimizer, 40)
    logger.removeHandler(handler)
    metrics = optimizer.metrics()
    assert metrics["bandwidth_bytes_per_second"] > 1e6
    assert 0 < metrics["latency_seconds"] < 1
    assert 0 < metrics["compute_seconds"] <= (metrics["step_seconds"] or math.inf)  # none where the link has changed
    assert metrics["predicted_dense_seconds"] is not None
    assert metrics["reason"]
    said = [record.getMessage() for record in records]
    assert any("Measured the network" in text for text in said) == (RANK == 0)
    assert sum("from now on" in text for text in said) == (RANK == 0) * sum(
        one != other for one, other in zip(densities, densities[1:])
    )
    assert_same_plans(densities)
    assert_same_on_ranks(flat(model))


def _with_clock(clock: Any) -> list[float]:
    """The densities while the front reads this clock."""
    real = averager_module.time
    averager_module.time = SimpleNamespace(perf_counter=clock, monotonic=real.monotonic, sleep=real.sleep)
    try:
        model, optimizer = wrapped(hvd.Compression.adaptive(period=5))
        return train(model, optimizer, 40)
    finally:
        averager_module.time = real


def case_ranks_with_other_clocks() -> None:
    rates = [1.0, 3.0, 0.2]
    assert_same_plans(_with_clock(lambda: 1000 * RANK + rates[RANK % 3] * time.perf_counter()))


def case_a_clock_that_is_none() -> None:
    assert_same_plans(_with_clock(lambda: math.nan if RANK == 1 else time.perf_counter()))


def case_a_rank_that_pauses() -> None:
    model, optimizer = wrapped(hvd.Compression.adaptive(period=8))
    assert_same_plans(train(model, optimizer, 32, {18: 2.0} if RANK == 1 else None))
    assert_same_on_ranks(flat(model))


class Switching:
    """Another rung at every exchange."""

    rungs = (1.0, 0.1, 0.02)

    def init(self) -> dict[str, Any]:
        return {}

    def ladder(self) -> tuple[float, ...]:
        return self.rungs

    def decide(self, seen: Any, state: Any) -> tuple[Plan, Any]:
        return Plan(self.rungs[-seen.step % 3], "as the test wants it"), state


def case_a_switch_loses_nothing() -> None:
    model, optimizer = wrapped(hvd.Compression.sparse(controller=Switching()), lr=0.0)
    weight = model[0].weight
    sent, local = torch.zeros(200, 300), torch.zeros(200, 300)
    for step in range(10):
        x = torch.randn(16, 300, generator=torch.Generator().manual_seed(10 * step + RANK))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        sent += weight.grad * SIZE
        optimizer.step()
        local += torch.autograd.grad(model(x).square().mean(), weight)[0]
        left = optimizer.compression_state_dict()["memory"]["0.weight"]["residual"]
        assert (step % 3 == 0) == (not left.any()), "a dense exchange leaves nothing behind"
        assert_equal(summed(local), sent + summed(left), 1e-5)


def case_a_gain_floor() -> None:
    model, optimizer = wrapped(
        hvd.Compression.adaptive(gain_floor=0.999999, period=4, ladder=[0.01], budget_seconds=1e-9)
    )
    densities = train(model, optimizer, 24)
    assert_same_plans(densities)
    assert densities[-1] == 1.0
    state = optimizer.compression_state_dict()["controller"]
    assert 0 < state["gain"]["0.01"] < 0.999999
    assert "the gain of" in optimizer.metrics()["reason"]
    model, optimizer = wrapped(hvd.Compression.adaptive(gain_floor=1e-6, period=4, ladder=[0.01], budget_seconds=1e-9))
    train(model, optimizer, 24)
    assert "the gain of" not in optimizer.metrics()["reason"]


def case_a_state_is_taken_up() -> None:
    model, optimizer = wrapped(hvd.Compression.adaptive(period=5))
    densities = train(model, optimizer, 30)
    saved = optimizer.compression_state_dict()
    assert saved["controller"]["density"] == densities[-1]
    again, other = wrapped(hvd.Compression.adaptive(period=5))
    other.load_compression_state_dict(saved)
    assert train(again, other, 1) == densities[-1:]
    assert_same_plans(train(again, other, 20))


def case_uneven_numbers_of_batches() -> None:
    model, optimizer = wrapped(hvd.Compression.adaptive(period=4))
    train(model, optimizer, 8 + 5 * RANK)
    assert hvd.join() == SIZE - 1
    assert_same_on_ranks(flat(model))


def case_files() -> None:
    files = {name: str(FOLDER / f"{name}.{{rank}}") for name in ("trace", "profile", "metrics_log")}
    model, optimizer = wrapped(**files)
    train(model, optimizer, 30)
    lines = [json.loads(line) for line in (FOLDER / f"metrics_log.{RANK}").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(30))
    assert {line["collective"] for line in lines} == {"by_size"}
    assert [line["density"] != after["density"] for line, after in zip(lines, lines[1:])] == [
        line["changed"] for line in lines[:-1]
    ]
    profile = json.loads((FOLDER / f"profile.{RANK}").read_text())
    sizes = [num_bytes for _, num_bytes in profile["events"]]
    assert sorted(sizes) == sorted(4 * p.numel() for p in model.parameters())
    assert all(seconds >= 0 for seconds, _ in profile["events"])
    assert sum(seconds for seconds, _ in profile["events"]) < profile["step_seconds"]
    optimizer.averager.driver.trace.close()
    events = json.loads((FOLDER / f"trace.{RANK}").read_text())
    rounds = [event for event in events if event["ph"] == "X"]
    assert {event["args"]["bytes"] for event in rounds if event["name"] == "AllReduce dense"} >= {4 * 210}
    assert len([event for event in rounds if event["name"].startswith("AllReduce counts")]) == 30
    assert all(event["dur"] >= 0 for event in rounds)


def case_a_file_that_cannot_be_written() -> None:
    with pytest.raises((ValueError, hvd.HvdSparseError), match="trace"):
        wrapped(trace="/nowhere/at/all/trace.json")
    assert_same_plans(train(*wrapped(), 3))


def case_bad_arguments() -> None:
    for settings in ({"period": 0}, {"ladder": []}, {"density": 0.1}, {"exposed_fraction": 1.0}, {"gain_floor": 2}):
        with pytest.raises((ValueError, TypeError), match=next(iter(settings))):
            hvd.Compression.adaptive(**settings)
