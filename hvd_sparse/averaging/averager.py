"""A whole round of one rank: read the model, hear what the others have, write what becomes of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from hvd_sparse.averaging.outer import Outer
from hvd_sparse.averaging.round import Outcome, Report, are_finite, average, keep_progress
from hvd_sparse.averaging.settings import Settings
from hvd_sparse.averaging.trigger import Schedule
from hvd_sparse.collectives.requests import AllReduce
from hvd_sparse.controllers import Seen
from hvd_sparse.exchange import Exchange
from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, HvdSparseError, Program, Spec, State, World, num_kept

_log = logging.getLogger("hvd_sparse")


@dataclass(frozen=True)
class Snapshot:
    """A copy of one rank's model, as float32 vectors of lengths that are equal on all ranks.

    Attributes:
        parameters: (n,) what the outer optimizer and sparse deltas work on.
        averaged: what is averaged beside them: buffers, optimizer state.
        given: what rank 0 gives to all, None if nothing is.
    """

    parameters: Array
    averaged: Array
    given: Array | None = None


class Replica(Protocol):
    """The model of one rank, in whatever framework."""

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Those of its parameters, in the order of their vector."""

    def read(self) -> Snapshot:
        """Copies that later steps leave alone."""

    def write(self, parameters: Array, averaged: Array | None = None, given: Array | None = None) -> None:
        """Put these values into the model."""

    def reset_optimizer(self) -> None:
        """Forget the inner optimizer's state."""

    def digest(self, values: Array) -> int:
        """32 bits that differ where values differ."""

    def export(self, values: Array) -> Any:
        """A copy for a saved state."""

    def restore(self, values: Any) -> Array:
        """The vector that was exported."""


class PeriodicAverager:
    """What one rank remembers between rounds, and the programs of a round.

    Args:
        ops: the arrays' library.
        replica: the model.
        settings: equal on all ranks.
        outer: what takes the mean further; default: that of the settings.

    Attributes:
        anchor: (n,) the last averaged model, or that of the start; None before `begin`.
        num_rounds: rounds so far.
        residual: what sparse deltas still have to send, {} without `sparse`.
        last: the outcome of the last exchange.
        schedule: counts local steps.
        wants_stop: told to the others in the next round.
    """

    def __init__(self, ops: Ops, replica: Replica, settings: Settings, outer: Outer | None = None) -> None:
        self.ops = ops
        self.replica = replica
        self.settings = settings
        self.schedule = Schedule(settings.interval, settings.warmup_steps)
        self.outer: Outer | None = settings.outer if outer is None else outer
        self.anchor: Array | None = None
        self.num_rounds = 0
        self.residual: State = {}
        self.last = Outcome(0.0, 0, 0, False, 0)
        self.wants_stop = False
        self._outer_state: State = {}
        self._control: State = settings.sparse.controller.init() if settings.sparse else {}
        self._exchange: Exchange | None = None

    def begin(self) -> None:
        """Take the model as it is for the anchor, unless there is one: it is the same on all ranks now."""
        if self.anchor is None:
            self.anchor = self.replica.read().parameters
            self.schedule.restart()
        if self.settings.sparse and self._exchange is None:
            config = self.settings.sparse
            spec = Spec("model", int(self.anchor.shape[0]), shapes=self.replica.shapes)
            self._exchange = Exchange(spec, config.scheme(), config.memory)
        if self._exchange and not self.residual:
            self.residual = self._exchange.init(self.ops, self.anchor)

    def compare(self) -> Program[None]:
        """Whether all ranks have the same anchor.

        Raises:
            HvdSparseError: they have not; on every rank.
        """
        digest = self.replica.digest(self.anchor)
        halves = (digest >> 16, digest & 0xFFFF)  # float32 holds them exactly
        numbers = [self.ops.zeros(1, self.anchor) + float(x) for half in halves for x in (half, -half)]
        largest = yield AllReduce(self.ops.concat(numbers), tag="anchor", op="max")
        high, minus_high, low, minus_low = (float(x) for x in largest)
        if (high, low) != (-minus_high, -minus_low):
            raise HvdSparseError(
                "Ranks start from different models: call hvd.broadcast_parameters(model.state_dict(), root_rank=0) "
                "before the first step, or load the averaging state of the same round on all ranks."
            )

    def gradients(self, values: Array, done: bool = False) -> Program[Outcome]:
        """An exchange of the warm-up: the mean gradient of the ranks that have data."""
        report = Report(0.0 if done else 1.0, 0, done, self.wants_stop)
        self.last = yield from average(self.ops, [values], report, "gradients")
        self.schedule.count_warmup()
        return self.last

    def round(self, world: World, done: bool = False, dense: bool = False) -> Program[Outcome]:
        """Average the models. Local steps may be taken while the program waits; they are kept.

        Args:
            world: the ranks; its `step` is the number of the round.
            done: this rank has no more data.
            dense: send all of a sparse delta, and of what is left of earlier ones.
        """
        steps, samples = self.schedule.take()
        copy = self.replica.read()
        if world.size == 1:
            self.anchor = copy.parameters
            return self._close(Outcome(1.0, steps, int(done), self.wants_stop, 1))
        finite = are_finite(self.ops, [copy.parameters, copy.averaged])
        weights = {"uniform": steps > 0, "steps": steps, "samples": samples}
        weight = float(weights[self.settings.weights]) if finite else 0.0
        report = Report(weight, steps, done, self.wants_stop, finite, gives=world.rank == 0)
        parts = [copy.averaged] if self._exchange else [copy.parameters, copy.averaged]
        outcome = yield from average(self.ops, parts, report, "model", copy.given)
        averaged = outcome.means[-1] if outcome.means else None
        if self._exchange:
            mean = yield from self._sum_deltas(self._exchange, world, copy.parameters, weight, outcome.weight, dense)
        else:
            mean = outcome.means[0] if outcome.means else None
        if mean is not None and self.outer:
            mean, self._outer_state = self.outer.step(self.ops, self.anchor, mean, self._outer_state)
        theta = self.anchor = self.anchor if mean is None else mean
        if finite and self.schedule.steps:  # taken while the others were waited for
            now = self.replica.read()
            theta = keep_progress(theta, now.parameters, copy.parameters)
            if averaged is not None:
                averaged = keep_progress(averaged, now.averaged, copy.averaged)
        if not finite:
            _log.warning("Rank %d's model is not finite: it takes the mean, and its optimizer starts anew.", world.rank)
        if self.settings.optimizer_state == "reset" or (not finite and self.settings.optimizer_state == "local"):
            self.replica.reset_optimizer()
        self.replica.write(theta, averaged, outcome.given)
        return self._close(outcome)

    def _close(self, outcome: Outcome) -> Outcome:
        self.num_rounds += 1
        self.schedule.restart()
        self.last = outcome
        return outcome

    def _sum_deltas(
        self, exchange: Exchange, world: World, theta: Array, weight: float, total_weight: float, dense: bool
    ) -> Program[Array | None]:
        """The anchor, less the weighted mean of what all ranks moved away from it, as far as that is sent."""
        controller = self.settings.sparse.controller  # type: ignore[union-attr]
        plan, self._control = controller.decide(Seen(world.step), self._control)
        size = exchange.spec.size
        delta = self.ops.zeros(size, theta)
        if weight:
            delta = self.ops.scale(self.ops.add(self.anchor, theta, -1.0), weight / total_weight)
        k = size if dense else num_kept(plan.density, size)
        reduced, self.residual = yield from exchange.step(self.ops, world, delta, k, self.residual)
        return self.ops.add(self.anchor, reduced.total, -1.0) if bool(reduced.finite) else None

    def metrics(self, waiting_seconds: float, last_waiting_seconds: float, bytes_sent: float) -> dict[str, Any]:
        """What averaging did on this rank.

        Keys:
            num_rounds, num_steps: so far; steps that GradScaler skipped do not count.
            waiting_seconds, last_waiting_seconds, waiting_seconds_per_round: in exchanges: for slower ranks, and for
                the network.
            bytes_sent: 2m(P-1)/P for an allreduce of m bytes.
            residual_norm: 2-norm of what sparse deltas have still to send.
            reason: when rounds take place, in words.
        """
        schedule, residual = self.schedule, self.residual.get("memory", {}).get("residual")
        warmup = f"warm-up, {schedule.num_warmup} of {schedule.warmup_steps} steps"
        return {
            "num_rounds": self.num_rounds,
            "num_steps": schedule.num_steps,
            "waiting_seconds": waiting_seconds,
            "last_waiting_seconds": last_waiting_seconds,
            "waiting_seconds_per_round": waiting_seconds / max(1, self.num_rounds),
            "bytes_sent": int(bytes_sent),
            "residual_norm": 0.0 if residual is None else float(self.ops.norm_squared(residual)) ** 0.5,
            "reason": warmup if schedule.warming_up else schedule.interval.describe(),
        }

    def save(self, world: World) -> dict[str, Any]:
        """What `load` takes: this rank's counters, anchor, outer momentum and residual."""
        arrays = {"anchor": self.anchor, "outer": self._outer_state, "residual": self.residual}
        return {
            "version": 1,
            "rank": world.rank,
            "size": world.size,
            "num_rounds": self.num_rounds,
            "schedule": self.schedule.save(),
            **{name: _mapped(value, self.replica.export) for name, value in arrays.items()},
        }

    def load(self, saved: dict[str, Any], world: World) -> None:
        """Go on where `save` was called. What is left of sparse deltas is taken over by the rank that saved it.

        Raises:
            ValueError: no such state, or one of another model.
        """
        if not isinstance(saved, dict) or saved.get("version") != 1 or "anchor" not in saved:
            raise ValueError(f"The state must come from averaging_state_dict(). Received: {type(saved).__name__}.")
        own = self.replica.read().parameters
        if saved["anchor"] is not None and len(saved["anchor"]) != len(own):
            raise ValueError(
                f"The state must be of a model with as many parameters as this one, {len(own)}. "
                f"Received: an anchor with {len(saved['anchor'])}."
            )
        self.anchor = _mapped(saved["anchor"], self.replica.restore)
        self._outer_state = _mapped(saved["outer"], self.replica.restore)
        self.num_rounds = saved["num_rounds"]
        self.schedule.load(saved["schedule"])
        self.residual = {}
        if (saved["rank"], saved["size"]) == (world.rank, world.size):
            self.residual = _mapped(saved["residual"], self.replica.restore)
        elif saved["residual"]:
            _log.warning(
                "Rank %d of %d loads the averaging state of rank %d of %d: sparse deltas that were not sent are lost.",
                world.rank, world.size, saved["rank"], saved["size"],
            )  # fmt: skip


def nothing_to_average() -> dict[str, Any]:
    """The metrics of a rank that is alone."""
    zeros = ("waiting_seconds", "last_waiting_seconds", "waiting_seconds_per_round", "residual_norm")
    counts = dict.fromkeys(("num_rounds", "num_steps", "bytes_sent"), 0)
    return {**counts, **dict.fromkeys(zeros, 0.0), "reason": "one rank: nothing to average"}


def _mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """The same dictionaries and lists, with `function` of every array."""
    if isinstance(tree, dict):
        return {key: _mapped(value, function) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_mapped(value, function) for value in tree]
    return function(tree) if hasattr(tree, "shape") else tree
