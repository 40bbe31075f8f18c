"""A training step as events: gradients become ready, wait for each other, and leave through one queue.

Reference: Z. Zhang et al., Is Network the Bottleneck of Distributed Training?, NetAI 2020, arXiv:2006.10103. Ours: a
latency per collective, time to compress, traffic of sparse exchanges; and nothing sleeps, so results are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add as add_numbers
from typing import Optional

from hvd_sparse.planner.cost import Traffic
from hvd_sparse.types import check_count, check_positive

Event = tuple[float, float]  # seconds since the previous event, bytes of the gradient that is ready now
Bucket = tuple[float, float]  # ready at that many seconds after the start of backward, bytes
BySize = Optional[Callable[[float], float]]  # bytes -> seconds
BySizeTraffic = Optional[Callable[[float], Traffic]]  # bytes of a dense bucket -> what is sent for it

CYCLE_SECONDS = 5e-3
FUSION_BYTES = 64 * 2**20
GRID = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0)


@dataclass(frozen=True)
class Prediction:
    """A step on many ranks.

    Attributes:
        overhead: seconds that the exchange lasts beyond backward.
        scaling: time of a step on one rank / time of this one, in (0, 1].
        finishes: when the exchange of each bucket ends, in seconds after the start of backward.
        busy: seconds that the network works.
    """

    overhead: float
    scaling: float
    finishes: tuple[float, ...]
    busy: float


def fuse(events: Iterable[Event], cycle: float = CYCLE_SECONDS, fusion_bytes: float = FUSION_BYTES) -> list[Bucket]:
    """What is exchanged together: gradients wait `cycle` seconds or until they are `fusion_bytes`.

    Raises:
        ValueError: an event with a negative or non-finite time or size.

    Example:
        >>> fuse([(0.002, 10e6), (0.002, 10e6), (0.002, 30e6), (0.004, 50e6)])
        [(0.006, 50000000.0), (0.01, 50000000.0)]
    """
    ready = waited = waiting = 0.0
    buckets = []
    for delay, num_bytes in events:
        if not (0 <= delay < math.inf and 0 <= num_bytes < math.inf):
            raise ValueError(
                f"`events` must be (seconds since the last, bytes), 0 or more. Received: {(delay, num_bytes)!r}."
            )
        ready, waited, waiting = ready + delay, waited + delay, waiting + num_bytes
        if waited >= cycle or waiting >= fusion_bytes:
            buckets += [(ready, waiting)] if waiting else []
            waited = waiting = 0.0
    return buckets + ([(ready, waiting)] if waiting else [])


def finish_times(buckets: Sequence[Bucket], service: Callable[[float], float]) -> list[float]:
    """When each bucket's exchange ends: one at a time, in order, each `service(bytes)` seconds long."""
    finish, finishes = 0.0, []
    for ready, num_bytes in buckets:
        finish = max(ready, finish) + service(num_bytes)
        finishes.append(finish)
    return finishes


def step(
    events: Sequence[Event],
    single_step: float,
    num_ranks: int,
    bandwidth: float,
    compression: float = 1.0,
    alpha: float = 0.0,
    add: BySize = None,
    codec: BySize = None,
    traffic: BySizeTraffic = None,
    cycle: float = CYCLE_SECONDS,
    fusion_bytes: float = FUSION_BYTES,
) -> Prediction:
    """The step's time on `num_ranks`, where one rank needs `single_step` seconds.

    Args:
        events: (seconds since the previous one, bytes) of gradients, in the order in which backward makes them.
        bandwidth: bytes per second that a rank really reaches, not the line's rate.
        compression: dense bytes / sent bytes, 1 or more, of an allreduce.
        alpha: seconds per collective.
        add: bytes -> seconds to add two vectors of that size; None: no time.
        codec: bytes -> seconds to compress and decompress a bucket; None: no time.
        traffic: bytes of a bucket -> what is sent for it, in place of a compressed allreduce.
        cycle, fusion_bytes: see `fuse`.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> round(step([(0.1, 1e8)], single_step=0.2, num_ranks=2, bandwidth=1e9).scaling, 3)
        0.667
    """
    check_positive(single_step, "single_step")
    check_positive(bandwidth, "bandwidth")
    check_count(num_ranks, "num_ranks")
    if not 1 <= compression < math.inf:
        raise ValueError(f"`compression` must be 1 or more. Received: compression={compression!r}.")
    if traffic is not None and compression != 1:
        raise ValueError(f"`compression` has no effect beside `traffic`: leave it 1. Received: {compression!r}.")
    if not 0 <= alpha < math.inf:
        raise ValueError(f"`alpha` must be 0 or more seconds. Received: alpha={alpha!r}.")
    share = 2 * (num_ranks - 1) / num_ranks

    def service(size: float) -> float:
        if num_ranks == 1:
            return 0.0
        sent = Traffic(1, share * size / compression) if traffic is None else traffic(size)
        adding = (num_ranks - 1) * add(size / num_ranks) if add else 0.0
        coding = codec(size) if codec else 0.0
        return alpha * sent.num_collectives + coding + sent.num_bytes / bandwidth + adding

    buckets = fuse(events, cycle, fusion_bytes)
    finishes = finish_times(buckets, service)
    backward = reduce(add_numbers, (delay for delay, _ in events), 0.0)  # rounded as in `fuse`; `sum` may round better
    overhead = max(0.0, finishes[-1] - backward) if finishes else 0.0
    busy = sum(service(size) for _, size in buckets)
    return Prediction(overhead, single_step / (single_step + overhead), tuple(finishes), busy)


def compression_needed(
    events: Sequence[Event],
    single_step: float,
    num_ranks: int,
    bandwidth: float,
    target: float = 0.95,
    grid: Sequence[float] = GRID,
    alpha: float = 0.0,
    add: BySize = None,
    codec: BySize = None,
    cycle: float = CYCLE_SECONDS,
    fusion_bytes: float = FUSION_BYTES,
) -> float | None:
    """The smallest factor of `grid` whose scaling is at least `target`; None if none is enough. See `step`."""
    for compression in sorted(grid):
        predicted = step(
            events, single_step, num_ranks, bandwidth, compression, alpha, add, codec, None, cycle, fusion_bytes
        )
        if predicted.scaling >= target:
            return compression
    return None
