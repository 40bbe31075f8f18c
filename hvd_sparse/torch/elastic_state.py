"""Elastic training: what `horovod.torch.elastic.TorchState` keeps of wrapped optimizers, beside their own state."""

from __future__ import annotations

import copy
import io
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry

from hvd_sparse.torch import membership
from hvd_sparse.torch.optimizer_state import broadcast_optimizer_state
from hvd_sparse.torch.periodic_wrapped import PeriodicallyAveraged
from hvd_sparse.torch.wrapped import Wrapped


class PeriodicStateHandler(StateHandler):
    """The optimizer's state, and the averaging's: counters, anchor, outer momentum, what sparse deltas still owe."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._saved = self._state()

    def save(self) -> None:
        if self.value.rounds and self.value.rounds.schedule.steps:
            raise ValueError(
                "`state.commit()` must be called right after a round, where all models are equal: "
                "if optimizer.just_averaged: state.commit()."
            )
        self._saved = self._state()

    def restore(self) -> None:
        optimizer_state, averaging_state = self._saved
        self.value.load_state_dict(copy.deepcopy(optimizer_state))
        self.value.restart_averaging()
        self.value.load_averaging_state_dict(averaging_state)

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        rounds = self.value.rounds
        if not rounds:
            return
        residual = rounds.averager.residual  # each survivor keeps its own
        # The model, which TorchState sends as well, is the next anchor.
        shared = _of_rank_0({**self.value.averaging_state_dict(), "anchor": None, "residual": {}}, "averaging_state")
        rounds.restart()
        rounds.load(shared)
        rounds.averager.residual = residual
        rounds.schedule.take()
        rounds.schedule.restart()

    def _state(self) -> Any:
        return copy.deepcopy(self.value.state_dict()), self.value.averaging_state_dict()


class CompressionStateHandler(StateHandler):
    """The optimizer's state, and the exchange's: counters, thresholds, this rank's residual."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict()), self.value.compression_state_dict()

    def restore(self) -> None:
        optimizer_state, compression_state = self._saved
        self.value.load_state_dict(copy.deepcopy(optimizer_state))
        if averager := self.value.averager:  # its number may be another one since the last commit
            world = averager.driver.world(0)
            compression_state = {**compression_state, "rank": world.rank, "size": world.size}
        self.value.load_compression_state_dict(compression_state)

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        averager = self.value.averager
        if not averager:
            return
        own = self.value.compression_state_dict()
        shared = _of_rank_0({**own, "memory": {}}, "compression_state")
        kept = {name: own[name] for name in ("rank", "size", "memory")}  # each survivor keeps its own residual
        averager.abandon()
        averager.load({**shared, **kept})
        membership.agree_later(averager.driver, self.value.wrap_request.describe())


def register_handlers() -> None:
    """Let TorchState know how to keep wrapped optimizers."""
    known = get_handler_registry()
    ours: list[Any] = [(PeriodicallyAveraged, PeriodicStateHandler), (Wrapped, CompressionStateHandler)]
    if ours[0] not in known:
        set_handler_registry([*ours, *known])


def _of_rank_0(state: dict[str, Any], name: str) -> Any:
    """Rank 0's `state`, on every rank."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    shared = hvd.broadcast_object(buffer.getvalue(), 0, name=f"hvd_sparse.{name}")
    return torch.load(io.BytesIO(shared), map_location="cpu", weights_only=True)
