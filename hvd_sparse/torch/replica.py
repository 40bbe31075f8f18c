"""A torch model as vectors that are averaged."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hvd_sparse.averaging.averager import Snapshot

_Slot = tuple[torch.Tensor, str, list[int]]  # parameter, key in its optimizer state, shape


class TorchReplica:
    """See `hvd_sparse.averaging.averager.Replica`.

    Args:
        model: whose parameters are averaged.
        optimizer: whose state may be.
        buffers: "local", "average" (floating-point ones) or "rank0" (all).

    Attributes:
        names: parameter -> name, in order of registration.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, buffers: str) -> None:
        self.model = model
        self.optimizer = optimizer
        self.buffers = buffers
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self._slots: list[_Slot] = []

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(parameter.shape) for parameter in self.names)

    def read(self) -> Snapshot:
        averaged = [*self._averaged_buffers(), *(self._slot_value(slot) for slot in self._slots)]
        given = self._flat(self._given_buffers()) if self.buffers == "rank0" else None
        return Snapshot(self._flat(self.names), self._flat(averaged), given)

    @torch.no_grad()
    def write(
        self, parameters: torch.Tensor, averaged: torch.Tensor | None = None, given: torch.Tensor | None = None
    ) -> None:
        scatter(parameters, self.names)
        if averaged is not None:
            rest = scatter(averaged, self._averaged_buffers())
            for parameter, key, shape in self._slots:
                part, rest = rest.split([math.prod(shape), len(rest) - math.prod(shape)])
                self._put_slot(parameter, key, part.view(shape))
        if given is not None:
            scatter(given, self._given_buffers())

    def reset_optimizer(self) -> None:
        self.optimizer.state.clear()

    def digest(self, values: torch.Tensor) -> int:
        return zlib.crc32(values.detach().cpu().contiguous().numpy().data)

    def export(self, values: torch.Tensor) -> torch.Tensor:
        return values.detach().cpu().clone()

    def restore(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(next(iter(self.names)).device, copy=True) if values.dim() else values

    def describe(self) -> dict[str, str]:
        """Name -> shape and dtype, of what must be the same on all ranks."""
        buffers = [] if self.buffers == "local" else list(self.model.named_buffers())
        tensors = [*((name, parameter) for parameter, name in self.names.items()), *buffers]
        return {name: f"{list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors}

    def describe_optimizer_state(self) -> list[dict[str, list[int]]]:
        """Of every parameter of the optimizer: key -> shape of each floating-point tensor in its state."""
        return [
            {
                key: list(value.shape)
                for key, value in self.optimizer.state.get(parameter, {}).items()
                if torch.is_tensor(value) and value.is_floating_point()
            }
            for parameter in parameters_of(self.optimizer)
        ]

    def average_optimizer_state(self, described: Sequence[Sequence[dict[str, list[int]]]]) -> None:
        """From now on average what some rank has, by the ranks' descriptions. Who lacks a tensor counts as zeros."""
        self._slots = []
        for parameter, everybody in zip(parameters_of(self.optimizer), zip(*described)):
            shapes = {key: shape for one in everybody for key, shape in one.items()}
            self._slots += [(parameter, key, shapes[key]) for key in sorted(shapes)]

    def _slot_value(self, slot: _Slot) -> torch.Tensor:
        parameter, key, shape = slot
        value = self.optimizer.state.get(parameter, {}).get(key)
        return value if torch.is_tensor(value) and list(value.shape) == shape else torch.zeros(shape)

    def _put_slot(self, parameter: torch.Tensor, key: str, value: torch.Tensor) -> None:
        state = self.optimizer.state[parameter]
        if torch.is_tensor(state.get(key)) and state[key].shape == value.shape:
            state[key].copy_(value)
        else:
            state[key] = value.to(parameter.dtype).clone() if value.dim() else value.cpu().clone()

    def _averaged_buffers(self) -> list[torch.Tensor]:
        # Looked up each time: modules may replace their buffers.
        if self.buffers != "average":
            return []
        return [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]

    def _given_buffers(self) -> list[torch.Tensor]:
        return list(self.model.buffers())

    def _flat(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        device = next(iter(self.names)).device
        parts = [tensor.detach().reshape(-1).to(device, torch.float32) for tensor in tensors]
        return torch.cat([*parts, torch.empty(0, dtype=torch.float32, device=device)])  # a copy, also of a single one


@torch.no_grad()
def scatter(flat: torch.Tensor, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Copy consecutive parts of `flat` into the tensors; what is left of it."""
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
    return flat[start:]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """All parameters of an optimizer, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
