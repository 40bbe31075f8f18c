"""Horovod's helpers that need another form for wrapped optimizers."""

from __future__ import annotations

import io
from typing import Any

import horovod.torch as hvd
import torch


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give every rank the optimizer state and options of `root_rank`.

    Horovod's own function makes missing state by a step on zero gradients, which moves parameters under weight decay
    and would start an exchange; this one sends `state_dict()` as it is, so that it works for any optimizer. Residuals
    are not part of it: they stay each rank's own.

    Args:
        optimizer: wrapped or not.
        root_rank: the rank whose state counts.
        model: not needed; accepted because Horovod's function takes it.
    """
    payload: Any = None
    if hvd.rank() == root_rank:
        buffer = io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
        payload = buffer.getvalue()
    payload = hvd.broadcast_object(payload, root_rank, name="hvd_sparse.optimizer_state")
    if hvd.rank() != root_rank:
        optimizer.load_state_dict(torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True))
