"""`PeriodicAveraging` for custom training loops in TensorFlow."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvd_sparse.agreement import compare, next_prefix, statement
from hvd_sparse.averaging.averager import PeriodicAverager, Snapshot, nothing_to_average
from hvd_sparse.averaging.outer import is_outer
from hvd_sparse.averaging.round import Outcome
from hvd_sparse.averaging.settings import Settings, check_settings
from hvd_sparse.drivers.groups import is_elastic
from hvd_sparse.ops.tensorflow import TensorFlowOps
from hvd_sparse.tensorflow.eager import EagerTensorFlow
from hvd_sparse.tensorflow.texts import exchange_text
from hvd_sparse.tensorflow.variables import broadcast_variables

_log = logging.getLogger("hvd_sparse")


class PeriodicAveraging:
    """Train alone, and average the variables of all ranks every now and then: local SGD, DiLoCo, model aggregation.

    Gives every rank rank 0's values when it is made. Call `step()` after each local step, outside of `tf.function`, and
    `finish()` when this rank's data is used up: ranks need not have equal numbers of batches. A rank whose variables
    are not finite receives the mean and spoils nothing. The inner optimizer's state stays each rank's own; if that is
    not finite either, give the rank a new optimizer.

    Traffic: 2n(P-1)/P words per round, one collective. Memory: one float32 copy of the variables, and up to four during
    a round. Averages are in float32, whatever the dtype.
    Choose it for ranks with uneven data or speed, and for links that are too slow for one exchange per step. Avoid it
    where every step must see all ranks' data: then `DistributedOptimizer`. One at a time; between rounds call nothing
    that all ranks must call. Not with elastic training.

    Args:
        variables: TensorFlow or Keras variables, in the same order on all ranks.
        every_steps: local steps between rounds.
        every_seconds: seconds between rounds, instead: ranks of different speed take different numbers of steps, and
            none waits longer than about one step of the slowest.
        warmup_steps: so many first steps end with a round each.
        weights: of a rank in the mean: "uniform", local "steps", or "samples", which `step` is told. A rank without a
            step since the last round has weight 0.
        outer: `OuterSGD()` takes the mean further (DiLoCo); None: nothing does.
        buffers: what becomes of `buffer_variables`: "local"; "average" the floating-point ones; all of "rank0".
        buffer_variables: moving averages, say, which are no part of `variables`.
        process_set: ranks that average with each other.

    Raises:
        ValueError, TypeError: an argument is out of range or cannot be honoured.
        HvdSparseError: ranks have different variables or settings, or another one refused; on every rank.

    Reference: as `hvd_sparse.torch.PeriodicAveraging`.

    Example:
        >>> averaging = hvd.PeriodicAveraging(model.trainable_variables, every_seconds=120)     # doctest: +SKIP
        >>> for batch in batches_of_this_rank:                                                  # doctest: +SKIP
        ...     train_step(batch)
        ...     averaging.step()
        >>> averaging.finish()                                                                  # doctest: +SKIP
    """

    def __init__(
        self,
        variables: Sequence[Any],
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        warmup_steps: int = 0,
        weights: str = "uniform",
        outer: Any = None,
        buffers: str = "local",
        buffer_variables: Sequence[Any] = (),
        process_set: Any = hvd.global_process_set,
    ) -> None:
        if not hvd.is_initialized():
            raise ValueError("Horovod is not initialised: call hvd.init() first.")
        settings, refusal, request = Settings(), None, {}
        try:
            settings = check_settings(every_steps, every_seconds, warmup_steps, weights, outer, buffers=buffers)
            replica = _Replica(variables, buffers, buffer_variables)
            request = {**settings.describe(), "parameters": replica.describe()}
            if outer is not None and not is_outer(outer):
                raise TypeError(f"`outer` must be OuterSGD(...) or None. Received: outer={outer!r}.")
            if is_elastic():
                raise ValueError("Periodic averaging in TensorFlow cannot be used with elastic training.")
        except (ValueError, TypeError) as error:
            refusal = error
        is_alone = not process_set.included() or process_set.size() == 1
        if not is_alone:
            self.driver = EagerTensorFlow(next_prefix(process_set), {"global": process_set})
            compare(exchange_text(self.driver.driver, "wrap", statement(request, refusal)), refusal)
        if refusal is not None:
            raise refusal
        self.averager = None if is_alone else PeriodicAverager(TensorFlowOps(), replica, settings)
        self.waiting_seconds = self.last_waiting_seconds = 0.0
        if self.averager:
            broadcast_variables([*variables, *buffer_variables], 0, process_set)
            self.averager.begin()
        if process_set.rank() == 0:
            shown = ", ".join(f"{name}={value}" for name, value in request.items() if name != "parameters")
            _log.info("%d ranks average %d variables; %s", process_set.size(), len(list(variables)), shown)

    def step(self, num_samples: int = 0, num_steps: int = 1) -> bool:
        """A local step was taken (or several), on so many samples; average if that is due.

        Returns:
            Whether a round took place, so that variables are equal on all ranks.
        """
        if not self.averager:
            return False
        if not tf.executing_eagerly():
            raise RuntimeError("PeriodicAveraging.step() must be called outside of tf.function, after the train step.")
        schedule = self.averager.schedule
        schedule.samples += num_samples
        for _ in range(num_steps):
            schedule.count_step(schedule.warming_up)
        if self.averager.settings.weights == "samples" and not schedule.samples:
            raise ValueError("`weights` 'samples' needs to know them: call step(num_samples=len(batch)).")
        if schedule.warming_up or schedule.is_due():
            self._round(done=False)
            return True
        return False

    def finish(self) -> None:
        """This rank has no more data. Take part in rounds until that is so everywhere; then all variables are equal."""
        while self.averager and self._round(done=True).num_done < self.driver.world(0).size:
            pass

    def metrics(self) -> dict[str, Any]:
        """What averaging did on this rank; keys as in `PeriodicAverager.metrics`."""
        if not self.averager:
            return nothing_to_average()
        return self.averager.metrics(self.waiting_seconds, self.last_waiting_seconds, self.driver.num_bytes)

    def _round(self, done: bool) -> Outcome:
        averager: Any = self.averager
        is_warmup, started = averager.schedule.warming_up, time.perf_counter()
        world = self.driver.world(averager.num_rounds)
        outcome: Outcome = self.driver.run("round", averager.round(world, done))
        if is_warmup:
            averager.schedule.count_warmup()
        self.last_waiting_seconds = time.perf_counter() - started
        self.waiting_seconds += self.last_waiting_seconds
        return outcome


class _Replica:
    """See `hvd_sparse.averaging.averager.Replica`."""

    def __init__(self, variables: Sequence[Any], buffers: str, buffer_variables: Sequence[Any]) -> None:
        self.variables = [_plain(variable) for variable in variables]
        others = [_plain(variable) for variable in buffer_variables]
        self.averaged = [v for v in others if v.dtype.is_floating] if buffers == "average" else []
        self.given = others if buffers == "rank0" else []
        wrong = [v.name for v in self.variables if not v.dtype.is_floating]
        if wrong or not self.variables:
            raise ValueError(f"`variables` must be of floating-point dtypes, at least one. Received: {wrong}.")

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(variable.shape) for variable in self.variables)

    def read(self) -> Snapshot:
        given = _flat(self.given) if self.given else None
        return Snapshot(_flat(self.variables), _flat(self.averaged), given)

    def write(self, parameters: Any, averaged: Any = None, given: Any = None) -> None:
        for variables, flat in ((self.variables, parameters), (self.averaged, averaged), (self.given, given)):
            if flat is not None and variables:
                for variable, part in zip(variables, tf.split(flat, [tf.size(v) for v in variables])):
                    variable.assign(tf.cast(tf.reshape(part, variable.shape), variable.dtype))

    def reset_optimizer(self) -> None:
        """The optimizer is not known here."""

    def digest(self, values: Any) -> int:
        return zlib.crc32(values.numpy().tobytes())

    def export(self, values: Any) -> Any:
        return values.numpy().copy()

    def restore(self, values: Any) -> Any:
        return tf.constant(values)

    def describe(self) -> dict[str, str]:
        """What must be the same on all ranks."""
        everything = [*self.variables, *self.averaged, *self.given]
        return {f"{number}": f"{v.shape.as_list()} {v.dtype.name}" for number, v in enumerate(everything)}


def _plain(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _flat(variables: list[Any]) -> Any:
    return tf.concat([tf.zeros([0]), *(tf.reshape(tf.cast(v, tf.float32), [-1]) for v in variables)], 0)
