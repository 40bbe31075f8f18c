"""Elastic training of models that are averaged: `horovod.torch.elastic.TorchState` keeps the anchor, too."""

from __future__ import annotations

import copy
import io
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry

from hvd_sparse.torch.optimizer_state import broadcast_optimizer_state
from hvd_sparse.torch.periodic_wrapped import PeriodicallyAveraged


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
        buffer = io.BytesIO()
        # The model, which TorchState sends as well, is the next anchor.
        torch.save({**self.value.averaging_state_dict(), "anchor": None, "residual": {}}, buffer)
        shared = hvd.broadcast_object(buffer.getvalue(), 0, name="hvd_sparse.averaging_state")
        rounds.restart()
        rounds.load(torch.load(io.BytesIO(shared), map_location="cpu", weights_only=True))
        rounds.averager.residual = residual
        rounds.schedule.take()
        rounds.schedule.restart()

    def _state(self) -> Any:
        return copy.deepcopy(self.value.state_dict()), self.value.averaging_state_dict()


def register_handler() -> None:
    """Let TorchState know how to keep a wrapped optimizer."""
    known = get_handler_registry()
    if not any(handler is PeriodicStateHandler for _, handler in known):
        set_handler_registry([(PeriodicallyAveraged, PeriodicStateHandler), *known])
