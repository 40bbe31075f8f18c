"""When and how the model of one optimizer is averaged: step boundaries, the warm-up, the end of the data."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch

from hvd_sparse.averaging.averager import PeriodicAverager
from hvd_sparse.averaging.round import Outcome
from hvd_sparse.averaging.trigger import Schedule
from hvd_sparse.drivers.horovod_torch import HorovodTorch, text_program
from hvd_sparse.torch.replica import parameters_of, scatter
from hvd_sparse.types import Program


class Rounds:
    """The rounds of one wrapped optimizer.

    Args:
        optimizer: whose steps count.
        averager: the model's.
        driver: runs the programs.
        agree: compares the ranks' settings; called before the first exchange, and after each `restart`.

    Attributes:
        just_averaged: the last step ended with a round.
        stopped: a round has decided that everybody stops.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, averager: PeriodicAverager, driver: HorovodTorch,
        agree: Callable[[], None],
    ) -> None:  # fmt: skip
        self.optimizer = optimizer
        self.averager = averager
        self.driver = driver
        self.just_averaged = self.stopped = False
        self.waiting_seconds = self.last_waiting_seconds = 0.0
        self._agree = agree
        self._is_agreed = self._has_slots = False
        self._in_warmup = False  # the step that is being taken used averaged gradients
        self._in_flight = False  # a round has started, and steps go on

    @property
    def schedule(self) -> Schedule:
        """Counts this rank's steps."""
        return self.averager.schedule

    # -- around a step -------------------------------------------------------------------------------------------------

    def before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for the optimizer's step, whose gradients are averages during the warm-up."""
        self.averager.begin()
        self.just_averaged = self._in_warmup = False
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if self.stopped or not self.schedule.warming_up or _is_skipped(self.optimizer):
            return args, kwargs
        if closure is None:
            self._average_gradients()
            return args, kwargs

        def averaged() -> Any:
            loss = closure()
            if self.schedule.warming_up and not self.stopped:
                self._average_gradients()
            return loss

        return ((args[0], averaged, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": averaged})

    def after_step(self) -> None:
        """Count the step, and average if that is due."""
        if _is_skipped(self.optimizer):
            return
        self.schedule.count_step(self._in_warmup)
        if self.averager.settings.weights == "samples" and not self.schedule.samples:
            raise ValueError(
                "`weights` 'samples' needs to know them: call optimizer.count_samples(len(batch)) before each step."
            )
        if self._in_flight:
            self._guarded(self.driver.poll)
            self._note_arrival()
        if not self.schedule.is_due():
            return
        self._settle()
        if self.stopped:
            return
        if not self.averager.settings.overlap:
            self._round()
            return
        self._prepare()
        self._in_flight = True
        self._guarded(lambda: self.driver.start("round", self._background()))

    def _background(self) -> Program[None]:
        yield from self.averager.round(self.driver.world(self.averager.num_rounds))
        self._in_flight = False

    def _note_arrival(self) -> None:
        if not self._in_flight:
            self.driver.finish()
            self.just_averaged, self.stopped = True, self.averager.last.stop

    # -- exchanges -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Take part in the others' rounds until no rank has data."""
        self._settle()
        is_over = False
        while not is_over and not self.stopped:
            outcome = self._average_gradients(done=True) if self.schedule.warming_up else self._round(done=True)
            is_over = outcome.num_done == self.driver.world(0).size
        if self.stopped and not self.schedule.warming_up:  # nobody will hear of a step after that
            self.schedule.take()
            self.averager.replica.write(self.averager.anchor)
        if self.averager.settings.sparse or self.schedule.warming_up:
            self._round(done=True, dense=True)
        self.stopped = self.averager.wants_stop = False

    def flush(self) -> None:
        """A round that sends everything, also what is left of sparse deltas. On all ranks."""
        self._settle()
        self._round(dense=True)

    def _round(self, done: bool = False, dense: bool = False) -> Outcome:
        self._prepare()
        world = self.driver.world(self.averager.num_rounds)
        outcome: Outcome = self._run("round", self.averager.round(world, done, dense))
        self.just_averaged, self.stopped = True, outcome.stop
        return outcome

    def _settle(self) -> None:
        """Wait for the round in flight, if there is one."""
        if self._in_flight:
            self._guarded(self.driver.finish)
            self._note_arrival()

    def _begin(self) -> None:
        """Before the first exchange: do ranks agree, and do they start from the same model?"""
        self.averager.begin()
        if not self._is_agreed and self.driver.world(0).size > 1:
            self._guarded(self._agree)
            self._run("round", self.averager.compare())
        self._is_agreed = True

    def _prepare(self) -> None:
        """Before the first round: which optimizer state is there?"""
        self._begin()
        if self._has_slots or self.averager.settings.optimizer_state != "average" or self.driver.world(0).size == 1:
            return
        replica: Any = self.averager.replica
        described = self._run("state", text_program(json.dumps(replica.describe_optimizer_state())))
        replica.average_optimizer_state([json.loads(text) for text in described])
        self._has_slots = True

    def _average_gradients(self, done: bool = False) -> Outcome:
        self._begin()
        parameters = parameters_of(self.optimizer)
        # Fused optimizers unscale inside their step, and scales differ between ranks.
        scale = float(getattr(self.optimizer, "grad_scale", None) or 1.0)
        with torch.no_grad():
            parts = [_dense(p, done).reshape(-1).to(parameters[0].device, torch.float32) for p in parameters]
            flat = torch.cat(parts) / scale
        outcome: Outcome = self._run("round", self.averager.gradients(flat, done))
        if not done and outcome.means:
            _install(parameters, outcome.means[0] * scale)
        self._in_warmup, self.stopped = True, outcome.stop
        return outcome

    def _run(self, name: str, program: Program[Any]) -> Any:
        return self._guarded(lambda: self.driver.run(name, program))

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """Its result; the time counts as waiting, and after an error everything starts anew."""
        started = time.perf_counter()
        try:
            return call()
        except BaseException:
            self.restart()
            raise
        finally:
            self.last_waiting_seconds = time.perf_counter() - started
            self.waiting_seconds += self.last_waiting_seconds

    # -- state ---------------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Forget what was going on: ranks have come or gone. The model, the same on all ranks, is the new anchor."""
        self.driver.abandon()
        self._in_flight = self._is_agreed = self._has_slots = False
        self.just_averaged = self.stopped = False
        self.averager.anchor = None
        self.schedule.take()

    def save(self) -> dict[str, Any]:
        """See `PeriodicAverager.save`."""
        self._settle()
        return self.averager.save(self.driver.world(self.averager.num_rounds))

    def load(self, saved: dict[str, Any]) -> None:
        """See `PeriodicAverager.load`."""
        self._settle()
        self.averager.load(saved, self.driver.world(0))
        self._is_agreed = False

    def metrics(self) -> dict[str, Any]:
        """See `PeriodicAverager.metrics`."""
        return self.averager.metrics(self.waiting_seconds, self.last_waiting_seconds, self.driver.num_bytes)


def _is_skipped(optimizer: Any) -> bool:
    """Whether GradScaler has found infinities and a fused optimizer shall skip the step inside itself."""
    return bool(getattr(optimizer, "found_inf", None) or False)


def _dense(parameter: Any, done: bool) -> torch.Tensor:
    if done or parameter.grad is None:
        return torch.zeros_like(parameter)
    grad: torch.Tensor = parameter.grad
    return grad.to_dense() if grad.is_sparse else grad


@torch.no_grad()
def _install(parameters: list[Any], flat: torch.Tensor) -> None:
    parts = [torch.empty_like(parameter) for parameter in parameters]
    scatter(flat, parts)
    for parameter, part in zip(parameters, parts):
        if parameter.grad is not None or bool(part.any()):
            rows = parameter.grad is not None and parameter.grad.is_sparse
            parameter.grad = part.to_sparse(1) if rows else part
