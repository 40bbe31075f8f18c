"""Which ranks train together: agreement when an optimizer is wrapped, ranks that finish early, ranks that fail."""

from __future__ import annotations

import atexit
import gc
import logging
import sys
import threading
import weakref
from typing import Any

import horovod.torch as hvd
import torch

from hvd_sparse.agreement import compare, statement
from hvd_sparse.collectives.requests import AllGather
from hvd_sparse.drivers.horovod_torch import HorovodTorch, text_program
from hvd_sparse.torch.averager import Averager
from hvd_sparse.torch.optimizer_state import broadcast_optimizer_state
from hvd_sparse.types import HvdSparseError, Program

_log = logging.getLogger("hvd_sparse")
_live: list[tuple[weakref.ref[Averager], weakref.ref[torch.optim.Optimizer]]] = []
_FAREWELL_SECONDS = 15.0


def agree(driver: HorovodTorch, settings: dict[str, Any], refusal: Exception | None) -> None:
    """Return on all ranks or raise HvdSparseError on all ranks (but not on one whose own `refusal` says it better)."""
    statements = driver.run("wrap", text_program(statement(settings, refusal)))
    driver.num_bytes = 0.0  # of training
    compare(statements, refusal)


def agree_later(driver: HorovodTorch, settings: dict[str, Any]) -> None:
    """`agree` before the next exchange: a rank that joins an elastic training wraps while the others do not."""
    driver.agree = lambda: agree(driver, settings, None)


def register(averager: Averager, optimizer: torch.optim.Optimizer) -> None:
    """Note a new wrapper. One over the same parameters that was there before stops averaging.

    Raises:
        ValueError: another wrapper has some of the parameters, but not the same ones.
    """
    for other, _ in live():
        shared = other.names.keys() & averager.names.keys()
        if shared and other.names.keys() != averager.names.keys():
            averager.close()
            name = other.names[next(iter(shared))]
            raise ValueError(
                f"Parameter {name!r} belongs to another wrapped optimizer as well. Call its close() first."
            )
        if shared:
            other.close()
    if not _live:
        atexit.register(_say_farewell)
    _live.append((weakref.ref(averager), weakref.ref(optimizer)))


def live() -> list[tuple[Averager, torch.optim.Optimizer]]:
    """The wrappers in use, in order of wrapping: the same on all ranks, whatever their garbage collectors have done."""
    gc.collect()
    alive = [(averager_ref(), optimizer_ref()) for averager_ref, optimizer_ref in _live]
    return [(a, o) for a, o in alive if a is not None and o is not None and not a.closed]


def join(device: int = -1) -> int:
    """This rank has no more batches: take part in the others' exchanges, with zeros, until all ranks have joined.

    Then parameters and optimizer state are those of the rank that joined last, on every rank. Averages are over all
    ranks, as with Horovod's own `join`, which serves when no optimizer is wrapped for sparse exchange. Buffers
    outside the optimizer (running means of batch norm) stay each rank's own.

    Args:
        device: as in Horovod.

    Returns:
        The rank that joined last.
    """
    wrapped = live()
    if not wrapped:
        return int(hvd.join(device))
    averagers = [averager for averager, _ in wrapped]
    own_steps = sum(averager.num_exchanges for averager in averagers)
    _accompany(averagers, failure="")
    driver = averagers[0].driver
    last = int(driver.run("join", _latest(own_steps)))
    for averager, optimizer in wrapped:
        hvd.broadcast_parameters([(name, p) for p, name in averager.names.items()], last)
        broadcast_optimizer_state(optimizer, last)
    return last


def _latest(own_steps: int) -> Program[int]:
    steps = yield AllGather(torch.tensor([own_steps]), tag="steps")
    return int(len(steps) - 1 - steps.flip(0).argmax())


def _accompany(averagers: list[Averager], failure: str) -> None:
    """Take part in every exchange of the others until nobody trains any more. Optimizers need not take turns."""
    errors: list[BaseException] = []

    def follow(averager: Averager) -> None:
        try:
            while averager.exchange(active=False, failure=failure).num_active:
                pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=follow, args=(averager,), daemon=True) for averager in averagers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_FAREWELL_SECONDS if failure else None)
    if errors:
        raise errors[0]


def _say_farewell() -> None:
    """At exit after an uncaught exception: tell the others what it was, so that they do not wait or guess."""
    error = getattr(sys, "last_value", None)
    averagers = [averager for averager, _ in live()]
    if error is None or isinstance(error, (HvdSparseError, hvd.HorovodInternalError)) or not averagers:
        return
    if not hvd.is_initialized():
        return
    try:
        _accompany(averagers, failure=f"{type(error).__name__}: {error}")
    except HvdSparseError:
        _log.info("The other ranks know why this one stops.")
