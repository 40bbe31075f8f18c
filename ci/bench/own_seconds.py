"""What a rank computes for an exchange, by itself: the codec, without the network."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from contenders import config_of
from workloads import find

from hvd_sparse.drivers.simulate import Simulator, hosts
from hvd_sparse.ops.torch import TorchOps
from hvd_sparse.torch.bucket import Bucket, make_buckets
from hvd_sparse.types import Program, T, num_kept

BUCKET_BYTES = 4 * 2**20  # as the PyTorch front chooses
WARMUP_STEPS = 2


class Clock:
    """Adds up the time of what rank 0 does."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def call(self, action: Callable[..., T], *args: Any) -> T:
        """What `action` returns."""
        started = time.perf_counter()
        try:
            return action(*args)
        finally:
            self.seconds += time.perf_counter() - started

    def program(self, program: Program[T]) -> Program[T]:
        """The same program; what passes between its request and the answer does not count."""
        answer = None
        while True:
            try:
                request = self.call(program.send, answer)
            except StopIteration as stop:
                return stop.value
            answer = yield request


def own_seconds(name: str, model: str, num_ranks: int, repeats: int = 5) -> float:
    """The median over some steps, with the PyTorch front's own buckets of this model and normal gradients.

    Rank 0's programs run on one thread, in turn with those of the other ranks, in this process: a rank that shares its
    core with others takes longer.
    """
    torch.set_num_threads(1)
    workload = find(model)
    config = config_of(name, workload.momentum).with_buckets(BUCKET_BYTES)
    parameters = dict(workload.make_model().named_parameters())
    ranks = [make_buckets(parameters, config, None, 0) for _ in range(num_ranks)]
    density, found = float(name.partition("@")[2]), []
    for step in range(WARMUP_STEPS + repeats):
        clock = Clock()
        for buckets in zip(*ranks, strict=True):
            _exchange(buckets, density, step, clock)
        found.append(clock.seconds)
    return statistics.median(found[WARMUP_STEPS:])


def _exchange(buckets: tuple[Bucket, ...], density: float, step: int, clock: Clock) -> None:
    """One bucket of every rank."""
    size, others = len(buckets), Clock()
    simulator = Simulator(size, ops=TorchOps(), groups=hosts(size, 1))
    clocks = [clock, *[others] * (size - 1)]
    programs = []
    for rank, bucket in enumerate(buckets):
        for parameter in bucket.parameters:
            clocks[rank].call(bucket.add, parameter, torch.randn_like(parameter), size, 1.0)
        world = replace(simulator.world(rank, step), gain=1 / size)
        spec = bucket.layout.spec
        programs.append(clocks[rank].program(bucket.program(world, num_kept(density, spec.size))))
    for rank, reduced in enumerate(simulator.run(programs)):
        clocks[rank].call(buckets[rank].averages, reduced)
        clocks[rank].call(buckets[rank].commit)
