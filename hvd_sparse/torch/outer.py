"""A `torch.optim` optimizer that takes the averaged model further."""

from __future__ import annotations

from typing import Any

import torch

from hvd_sparse.averaging.outer import Outer, is_outer
from hvd_sparse.ops.base import Ops
from hvd_sparse.torch.replica import parameters_of
from hvd_sparse.types import State


class TorchOuter:
    """See `hvd_sparse.averaging.outer.Outer`. The optimizer works on parameters of its own, views of one flat tensor.

    Args:
        outer: a function from parameters to an optimizer, or a new optimizer of `parameters`, which is taken over.
        parameters: of the model.

    Raises:
        TypeError, ValueError: neither of the two, or the optimizer has state or parameters of another model.
    """

    def __init__(self, outer: Any, parameters: list[Any]) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(sizes), dtype=torch.float32, device=parameters[0].device)
        views = [part.view(p.shape) for part, p in zip(self.flat.split(sizes), parameters)]
        self.views = [torch.nn.Parameter(view) for view in views]
        self.optimizer = (
            self._adopt(outer, parameters) if isinstance(outer, torch.optim.Optimizer) else self._make(outer)
        )
        self._state: State = {}

    def step(
        self, ops: Ops, anchor: torch.Tensor, mean: torch.Tensor, state: State
    ) -> tuple[torch.Tensor, State]:  # fmt: skip
        if state is not self._state and state:  # loaded from a file
            self.optimizer.load_state_dict(state["optimizer"])
        if self._is_plain_mean():
            return mean, state
        self.flat.copy_(anchor)
        delta = (anchor - mean).split([view.numel() for view in self.views])
        for view, part in zip(self.views, delta):
            view.grad = part.view(view.shape)
        self.optimizer.step()
        for view in self.views:
            view.grad = None
        self._state = {"optimizer": self.optimizer.state_dict()}
        return self.flat.clone(), self._state

    def describe(self) -> str:
        settings = {k: v for k, v in self.optimizer.defaults.items() if isinstance(v, (bool, int, float, tuple))}
        return f"{type(self.optimizer).__name__}({', '.join(f'{k}={v}' for k, v in settings.items())})"

    def _is_plain_mean(self) -> bool:
        """Whether the step would end at the mean, but for rounding."""
        plain = {"lr": 1, "momentum": 0, "weight_decay": 0, "maximize": False}
        groups = self.optimizer.param_groups
        return type(self.optimizer) is torch.optim.SGD and all(
            group[key] == value for group in groups for key, value in plain.items()
        )

    def _make(self, function: Any) -> torch.optim.Optimizer:
        made = function(self.views) if callable(function) else None
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(
                f"`outer` must be OuterSGD(...), a torch.optim.Optimizer, a function from parameters to one, or None. "
                f"Received: outer={function!r}."
            )
        return made

    def _adopt(self, optimizer: torch.optim.Optimizer, parameters: list[Any]) -> torch.optim.Optimizer:
        view_of = dict(zip(parameters, self.views))
        if optimizer.state or set(parameters_of(optimizer)) != set(parameters):
            raise ValueError("`outer` must be a new optimizer of all the model's parameters: it is taken over.")
        for group in optimizer.param_groups:
            group["params"] = [view_of[parameter] for parameter in group["params"]]
        return optimizer


def outer_for(outer: Any, parameters: list[Any]) -> Outer | None:
    """What the user gave, as an `Outer`."""
    return outer if outer is None or is_outer(outer) else TorchOuter(outer, parameters)
