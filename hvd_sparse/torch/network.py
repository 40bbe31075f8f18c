"""Small messages between ranks, timed and compared."""

from __future__ import annotations

import time
from typing import Any

import torch

from hvd_sparse.collectives.requests import AllReduce
from hvd_sparse.drivers.horovod_torch import HorovodTorch
from hvd_sparse.types import Program

_PAUSE_SECONDS = 5e-5  # between two looks, for so long:
_WATCHED_SECONDS = 0.1


def as_tensor(array: Any) -> torch.Tensor:
    """A NumPy array as a tensor."""
    return torch.from_numpy(array)


class TorchNetwork:
    """See `hvd_sparse.meter.Network`. Nothing else of `driver` may run meanwhile.

    Args:
        device: where messages live; that of the parameters.
    """

    def __init__(self, driver: HorovodTorch, device: torch.device) -> None:
        self.driver = driver
        self.device = device

    def allreduce_seconds(self, num_bytes: int, group: str = "global") -> float:
        message = torch.zeros(num_bytes // 4, device=self.device)
        started = time.perf_counter()
        self.driver.start("link", _reduce(message, "sum", f"{group}.{num_bytes}", group))
        while not self.driver.poll() and time.perf_counter() - started < _WATCHED_SECONDS:
            time.sleep(_PAUSE_SECONDS)
        self.driver.finish()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - started

    def largest(self, values: list[float]) -> list[float]:
        return self._reduced(values, "max")

    def total(self, values: list[float]) -> list[float]:
        return self._reduced(values, "sum")

    def _reduced(self, values: list[float], op: str) -> list[float]:
        message = torch.tensor(values, dtype=torch.float64, device=self.device)
        found: list[float] = self.driver.run("link", _reduce(message, op, f"{op}.{len(values)}")).tolist()
        return found


def _reduce(message: torch.Tensor, op: str, tag: str, group: str = "global") -> Program[Any]:
    return (yield AllReduce(message, tag=tag, op=op, group=group))
