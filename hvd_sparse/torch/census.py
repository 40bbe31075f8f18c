"""What ranks tell each other about an exchange, in one small allreduce beside the data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from hvd_sparse.collectives.requests import AllReduce
from hvd_sparse.drivers.horovod_torch import HorovodTorch, text_program
from hvd_sparse.types import HvdSparseError, Program


@dataclass(frozen=True)
class Census:
    """Parameters with a gradient on some rank, those with a row-sparse one, and how many ranks train, are alarmed
    by long steps, or failed."""

    present: frozenset[torch.nn.Parameter]
    row_sparse: frozenset[torch.nn.Parameter]
    num_active: int
    num_alarmed: int
    num_failed: int


def census_program(
    parameters: Sequence[torch.nn.Parameter],
    touched: Collection[torch.nn.Parameter],
    active: bool,
    alarmed: bool,
    failure: str,
) -> Program[Census]:
    """Count over ranks who has a gradient for which parameter, who has left, is alarmed, or failed."""
    row_sparse = {p for p in touched if p.grad is not None and p.grad.is_sparse}
    flags = [float(p in touched) for p in parameters] + [float(p in row_sparse) for p in parameters]
    device = parameters[0].device
    flags += [float(active), float(alarmed), float(bool(failure))]
    counts = yield AllReduce(torch.tensor(flags, device=device), tag="counts")
    numbers, n = counts.tolist(), len(parameters)
    return Census(
        present=frozenset(p for p, number in zip(parameters, numbers[:n]) if number > 0.5),
        row_sparse=frozenset(p for p, number in zip(parameters, numbers[n : 2 * n]) if number > 0.5),
        num_active=round(numbers[-3]),
        num_alarmed=round(numbers[-2]),
        num_failed=round(numbers[-1]),
    )


def check_failures(census: Census, driver: HorovodTorch, failure: str) -> None:
    """Raise HvdSparseError with everybody's `failure` if a rank has failed."""
    if census.num_failed:
        reports = driver.run("failure", text_program(failure))
        raise HvdSparseError("; ".join(f"rank {r} failed: {text}" for r, text in enumerate(reports) if text))
