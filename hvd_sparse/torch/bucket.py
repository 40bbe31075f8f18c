"""The flat buffers of one bucket, and the gradients that go through them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hvd_sparse.buckets import Layout, Member, Parameter, plan_buckets
from hvd_sparse.config import Config
from hvd_sparse.exchange import Exchange, bucket_exchange
from hvd_sparse.ops.torch import TorchOps
from hvd_sparse.types import Program, Reduced, State, World


class Bucket:
    """Collects gradients, starts the exchange, hands out the averages, keeps or drops what was reached.

    The memory's arrays exist twice. A gradient is compensated from `state` into `reached` (residual + gradient, one
    pass); taking the step swaps the two, so a result that is thrown away costs nothing and changes nothing.

    Args:
        layout: the bucket's parameters.
        exchange: how it is exchanged.
        parameters: the tensors, in the layout's order.
    """

    def __init__(self, layout: Layout, exchange: Exchange, parameters: list[torch.nn.Parameter]) -> None:
        self.layout = layout
        self.exchange = exchange
        self.parameters = parameters
        self.ops = TorchOps(reuse=True)
        like = parameters[0]
        self.state = exchange.init(self.ops, like)
        self.reached: State = exchange.init(self.ops, like)["memory"]
        self._own_x = None if exchange.memory.accumulator else self.ops.zeros(layout.spec.size, like)
        self._index = {parameter: number for number, parameter in enumerate(parameters)}
        self.started = False
        self._arrived: set[int] = set()
        self._outcome: tuple[Reduced, State] | None = None
        self._absent: list[Member] = []

    @property
    def num_missing(self) -> int:
        """Gradients still to come."""
        return len(self.parameters) - len(self._arrived)

    def wants(self, parameter: torch.nn.Parameter) -> bool:
        """Whether this parameter's gradient may still be added to the coming exchange."""
        return not self.started and self._index[parameter] not in self._arrived

    def add(self, parameter: torch.nn.Parameter, grad: torch.Tensor, num_ranks: int, alpha: float) -> None:
        """Compensate `alpha * grad` straight into the accumulator."""
        number = self._index[parameter]
        member = self.layout.members[number]
        state = {key: _part(flat, member) for key, flat in self.state["memory"].items()}
        out = {key: _part(flat, member) for key, flat in self.reached.items()}
        flat_grad = grad.detach().reshape(-1)
        x, _ = self.exchange.memory.compensate(self.ops, num_ranks, flat_grad, state, alpha, out)
        if self._own_x is not None:
            _part(self._own_x, member).copy_(x)
        self._arrived.add(number)

    def program(self, world: World, k: int) -> Program[Reduced]:
        """The exchange. Parameters without a gradient send zeros and keep their residual."""
        self.started = True
        self._absent = [m for number, m in enumerate(self.layout.members) if number not in self._arrived]
        x = self._accumulator()
        for member in self._absent:
            for flat in (x, *self.reached.values()):
                _part(flat, member).zero_()
        world = replace(world, weights=self._weights)
        reduced, scheme = yield from self.exchange.reduce(self.ops, world, x, k, self.state["scheme"])
        self._outcome = (reduced, {"memory": self.reached, "scheme": scheme})
        return reduced

    def averages(self, reduced: Reduced) -> dict[torch.nn.Parameter, torch.Tensor]:
        """What to apply as one tensor per parameter: views of one flat buffer in the parameters' dtype."""
        self.reset()
        flat = reduced.applied.to(self.parameters[0].dtype)
        return {p: _part(flat, m).view(p.shape) for p, m in zip(self.parameters, self.layout.members)}

    def reset(self) -> None:
        """Expect the next gradients."""
        self.started = False
        self._arrived.clear()

    def commit(self) -> None:
        """The last exchange's result is used: what was sent leaves the memory."""
        if self._outcome is None:
            return
        reduced, reached = self._outcome
        if reduced.silent is not None and bool(reduced.silent):
            self.state, self._outcome = {**self.state, "scheme": reached["scheme"]}, None
            return
        spare = self.state["memory"]
        self.state = self.exchange.commit(self.ops, reduced, reached)
        for key, flat in self.state["memory"].items():
            for member in self._absent:  # it sent zeros: what is left there belongs to other ranks' entries
                part, before = _part(flat, member), _part(spare[key], member)
                part.add_(before) if key == self.exchange.memory.accumulator else part.copy_(before)
        self.reached = spare
        self._outcome = None

    def discard(self) -> None:
        """The last exchange's result is thrown away: the memory stays as it was before."""
        self._outcome = None

    def residuals(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """What each parameter's memory has not sent yet, as views; of compressed buckets."""
        key = self.exchange.memory.accumulator
        if key is None or self.layout.dense:
            return {}
        flat = self.state["memory"][key]
        return {p: _part(flat, m).view(p.shape) for p, m in zip(self.parameters, self.layout.members)}

    def norm_squared(self) -> float:
        """Sum of squares of what has not been sent yet."""
        accumulator = self.exchange.memory.accumulator
        return float(self.ops.norm_squared(self.state["memory"][accumulator])) if accumulator else 0.0

    def energies(self) -> tuple[float, float]:
        """||used||^2 and ||x||^2 of the last exchange, before it is committed."""
        x = float(self.ops.norm_squared(self._accumulator()))
        used = self._outcome[0].used if self._outcome else None
        return (x if used is None else float(self.ops.norm_squared(used.values)), x)

    def save(self) -> dict[str, dict[str, Any]]:
        """{"memory": {parameter: {key: tensor}}, "scheme": {bucket: state}}, copies on the CPU."""
        memory = {}
        for member, parameter in zip(self.layout.members, self.parameters):
            parts = {key: _part(flat, member).view(parameter.shape) for key, flat in self.state["memory"].items()}
            memory[member.name] = {key: part.detach().cpu().clone() for key, part in parts.items()}
        scheme = {k: v.detach().cpu().clone() if torch.is_tensor(v) else v for k, v in self.state["scheme"].items()}
        return {"memory": memory, "scheme": {self._signature(): scheme}}

    def load(self, memory: dict[str, dict[str, torch.Tensor]], scheme: dict[str, Any]) -> list[str]:
        """Take over what was saved for these parameters; the names of those without a usable entry."""
        missing = []
        for member in self.layout.members if self.state["memory"] else ():
            saved = memory.get(member.name, {})
            if any(key not in saved or saved[key].numel() != member.size for key in self.state["memory"]):
                missing.append(member.name)
                continue
            for key, flat in self.state["memory"].items():
                _part(flat, member).copy_(saved[key].reshape(-1))
        for key, value in scheme.get(self._signature(), {}).items():
            if key in self.state["scheme"]:  # it may be another scheme's
                on_device = value.to(self.parameters[0].device) if torch.is_tensor(value) else value
                self.state["scheme"][key] = on_device
        return missing

    def _signature(self) -> str:
        return f"{self.layout.spec.name}:{self.layout.spec.size}"

    def _weights(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1).float() for parameter in self.parameters])

    def _accumulator(self) -> torch.Tensor:
        if self._own_x is not None:
            return self._own_x
        flat: torch.Tensor = self.reached[str(self.exchange.memory.accumulator)]
        return flat


def make_buckets(
    parameters: dict[str, torch.nn.Parameter], config: Config, groups: Sequence[Sequence[str]] | None, first: int
) -> list[Bucket]:
    """The buckets of these parameters (by name, in order of registration), numbered from `first`."""
    described = [
        Parameter(name, tuple(p.shape), f"{p.dtype} {p.device.type}", p.element_size())
        for name, p in parameters.items()
    ]
    buckets = []
    for layout in plan_buckets(described, config.bucket_bytes, config.min_size, groups, first):
        exchange = bucket_exchange(layout, config)
        buckets.append(Bucket(layout, exchange, [parameters[member.name] for member in layout.members]))
    return buckets


def energies(buckets: Sequence[Bucket]) -> list[float]:
    """The sums of their `energies`."""
    return [sum(parts) for parts in zip(*(bucket.energies() for bucket in buckets))]


def _part(flat: torch.Tensor, member: Member) -> torch.Tensor:
    return flat[member.start : member.start + member.size]
