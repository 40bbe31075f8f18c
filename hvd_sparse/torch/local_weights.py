"""Gradients at the weights that a rank would have if nothing of its own were waiting (SGC's "local update")."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from hvd_sparse.torch.averager import Averager
from hvd_sparse.torch.delayed import DelayedAverager


@contextlib.contextmanager
def local_weights(optimizer: Any, averager: Averager | None) -> Iterator[None]:
    """Inside, parameters are w - lr v, where v is this rank's residual; afterwards they are w again, bit for bit.

    Raises:
        ValueError: v times the learning rate is not what the optimizer would subtract, or there is no residual.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        raise ValueError(
            f"`local_weights` is for torch.optim.SGD: other optimizers do not subtract lr times the gradient. "
            f"Received: {type(optimizer).__name__}."
        )
    if averager is None:  # one rank: nothing is kept back
        yield
        return
    memory = averager.config.memory
    if memory.accumulator != "residual" or isinstance(averager, DelayedAverager):
        raise ValueError(
            f"`local_weights` needs the residual of memory='sgc' or 'residual'. Received: {type(memory).__name__}."
        )
    rate = {parameter: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    kept = {p: v for bucket in averager.buckets for p, v in bucket.residuals().items()}
    own = {parameter: parameter.detach().clone() for parameter in kept}
    with torch.no_grad():
        for parameter, residual in kept.items():
            parameter.sub_((rate[parameter] * residual).to(parameter.dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, weights in own.items():
                parameter.copy_(weights)
