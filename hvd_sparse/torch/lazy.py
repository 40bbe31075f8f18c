"""Steps in which a rank with nothing new to say stays silent: the rule of the scheme `lazy`, which needs closures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hvd_sparse.config import Config
from hvd_sparse.drivers.horovod_torch import HorovodTorch
from hvd_sparse.torch.averager import Averager

_Gradients = tuple[Any, ...]  # a tensor or None for each parameter


class LazyAverager(Averager):
    """Takes gradients itself, since the rule compares them with those at the weights of this rank's last message.

    Args:
        config: its scheme is a `Lazy`.
        arguments: those of `Averager`.
    """

    def __init__(self, names: dict[Any, str], config: Config, driver: HorovodTorch, **arguments: Any) -> None:
        super().__init__(names, config, driver, **arguments)
        self.scheme: Any = config.chosen
        self._restart()

    def _restart(self) -> None:
        self._moves: list[float] = []  # see `Lazy.has_news`
        self._silence = 1  # steps since this rank spoke
        self._num_silent = 0
        self._spoke_at: dict[str, torch.Tensor] = {}  # the weights of that step

    def step(self, optimizer: Any, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A whole step of the wrapped optimizer, as `lazy_step` says; the loss at the weights before it."""
        optimizer.zero_grad()
        parameters = [parameter for parameter in self.names if parameter.requires_grad]
        before = {self.names[p]: p.detach().clone() for p in parameters}
        value, speaks = self._look(parameters, before, loss)
        self.speaks = speaks
        self.exchange()
        optimizer.step()
        if all(bool(flag) for flag in self._finite):  # or what was said is forgotten everywhere
            self._silence = 1 if speaks else self._silence + 1
            self._num_silent += not speaks
            if speaks:
                self._spoke_at = before
            self._moves = [*self._moves, self._squared_move(optimizer, before)][-self.scheme.history :]
        return value

    def _look(
        self, parameters: list[Any], before: dict[str, torch.Tensor], loss: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, bool]:
        """Set `p.grad`, and tell the loss and whether these gradients are worth sending."""
        size, old = self.driver.world(0).size, None
        if not self.scheme.must_speak(len(self._moves), self._silence, size):
            devices = {p.device for p in parameters if p.device.type == "cuda"}
            with self._at_last_message(parameters, before), torch.random.fork_rng(devices):  # dropout: twice the same
                old = _gradients(loss(), parameters)
        value = loss()
        new = _gradients(value, parameters)
        for parameter, grad in zip(parameters, new):
            if grad is not None and grad.is_sparse:
                raise ValueError(f"`lazy_step` is for dense gradients. That of {self.names[parameter]!r} is sparse.")
            parameter.grad = grad
        speaks = old is None or self.scheme.has_news(_squared_change(old, new), self._moves, size)
        return value.detach(), speaks

    @contextlib.contextmanager
    def _at_last_message(self, parameters: list[Any], before: dict[str, torch.Tensor]) -> Iterator[None]:
        """Inside, parameters are what they were when this rank spoke last, as far as it had them then."""
        self._set(parameters, {**before, **self._spoke_at})
        try:
            yield
        finally:
            self._set(parameters, before)

    @torch.no_grad()
    def _set(self, parameters: list[Any], weights: dict[str, torch.Tensor]) -> None:
        for parameter in parameters:
            parameter.copy_(weights[self.names[parameter]])

    def _squared_move(self, optimizer: Any, before: dict[str, torch.Tensor]) -> float:
        """||w - w before||^2 / the learning rate that gradients have in a sum over ranks."""
        moved = 0.0
        for group in optimizer.param_groups:
            rate = float(group["lr"]) / (self.driver.world(0).size if self.average else 1)
            known = [(p.detach(), before[self.names[p]]) for p in group["params"] if self.names[p] in before]
            if rate:
                moved += sum(_squared(weights - old) for weights, old in known) / rate
        return moved

    def metrics(self) -> dict[str, Any]:
        """Those of every averager, and `silent_steps`: how often this rank had nothing to say."""
        return {**super().metrics(), "silent_steps": self._num_silent}

    def save(self) -> dict[str, Any]:
        world = self.driver.world(0)
        weights = {name: tensor.cpu() for name, tensor in self._spoke_at.items()}
        own = {"moves": self._moves, "silence": self._silence, "spoke_at": weights, "num_silent": self._num_silent}
        return {**super().save(), "lazy": {**own, "rank": world.rank, "size": world.size}}

    def load(self, saved: dict[str, Any]) -> None:
        """Another rank's weights are of no use: as at the beginning, everybody then speaks for a while."""
        super().load(saved)
        self._restart()
        own, world = saved.get("lazy"), self.driver.world(0)
        if own and (own["rank"], own["size"]) == (world.rank, world.size):
            devices = {name: parameter.device for parameter, name in self.names.items()}
            self._moves, self._silence, self._num_silent = list(own["moves"]), own["silence"], own["num_silent"]
            self._spoke_at = {name: weights.to(devices[name]) for name, weights in own["spoke_at"].items()}


def lazy_step(optimizer: Any, averager: Averager | None, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A whole step of a wrapped optimizer, on all ranks; the loss.

    `loss` computes this rank's loss, without `backward()`. It is called once, or twice with the same random numbers,
    the first time at earlier weights: layers that keep running statistics see the batch twice.

    Raises:
        ValueError: the wrapper has another scheme, or one that hides its exchange, or a `grad_scaler`; or a gradient is
            row-sparse.
    """
    if averager is None:  # one rank always speaks
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        return value.detach()
    if not isinstance(averager, LazyAverager):
        config = averager.config
        chosen = f"scheme={type(config.chosen).__name__}, memory={type(config.memory).__name__}"
        raise ValueError(f"`lazy_step` needs scheme='lazy' and a memory other than 'delayed'. Received: {chosen}.")
    if averager.grad_scaler is not None:
        raise ValueError("`lazy_step` takes gradients of the loss as it is: wrap without `grad_scaler`.")
    return averager.step(optimizer, loss)


def _gradients(value: torch.Tensor, parameters: Sequence[Any]) -> _Gradients:
    """Not by backward(), whose hooks would start the exchange."""
    return torch.autograd.grad(value, parameters, allow_unused=True)


def _squared_change(old: _Gradients, new: _Gradients) -> float:
    pairs = [[grad for grad in pair if grad is not None] for pair in zip(old, new)]
    return sum(_squared(pair[0] - pair[1] if len(pair) == 2 else pair[0]) for pair in pairs if pair)


def _squared(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().sum())
