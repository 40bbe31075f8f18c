"""Horovod's callbacks for Keras 3, with the same names and arguments, and one that logs this package's metrics."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvd_sparse.tensorflow.variables import broadcast_model

_log = logging.getLogger("hvd_sparse")


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Before training, give every rank the weights and optimizer state of `root_rank`.

    It also compares the ranks' numbers of batches, and switches off XLA, which has no Horovod operations and which
    Keras chooses by itself where a GPU is visible.

    Args:
        root_rank: the rank whose values count.
        device: accepted as by Horovod; without effect here.
        local_variables: variables to leave alone.

    Raises:
        ValueError: ranks have different numbers of batches (on every rank), or XLA was demanded.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.local_variables = local_variables
        self.done = False

    def on_train_begin(self, logs: Any = None) -> None:
        _switch_off_xla(self.model)
        _compare_steps(self.params.get("steps"))
        if self.model.built:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._broadcast()

    def _broadcast(self) -> None:
        if self.done:
            return
        kept = [(variable, variable.numpy()) for variable in self.local_variables or ()]
        broadcast_model(self.model, root_rank=self.root_rank)
        for variable, value in kept:
            variable.assign(value)
        self.done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """At the end of an epoch, replace every metric in `logs` by its mean over ranks. Put it in front of callbacks that
    read them.

    Args:
        device: accepted as by Horovod; without effect here.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        names = sorted(name for name, value in (logs or {}).items() if np.ndim(value) == 0)
        if names:
            means = _mean(np.asarray([logs[name] for name in names], np.float64), "hvd_sparse.metrics")
            logs.update(zip(names, means.tolist()))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Between two epochs, set the learning rate to `initial_lr * multiplier`.

    Args:
        initial_lr: at the start of training.
        multiplier: a number, or a function of the epoch.
        start_epoch, end_epoch: first epoch of the schedule, and the first after it.
        staircase: change at the start of epochs; otherwise with every batch (the epoch is then a fraction).
        momentum_correction: scale the momentum of SGD with a change of the rate, for one batch (Goyal et al., 2017).
        steps_per_epoch: where the data set does not say, and not `staircase`.

    Raises:
        ValueError: the optimizer has a LearningRateSchedule of its own, or the steps are unknown.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr = float(initial_lr)
        self.multiplier = multiplier if callable(multiplier) else lambda _: multiplier
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = (staircase and callable(multiplier)) or not callable(multiplier)
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.epoch = 0
        self._restored_momentum: float | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = _inner(self.model.optimizer)
        if not isinstance(optimizer._learning_rate, keras.Variable):
            raise ValueError("The optimizer has a LearningRateSchedule: put this change of the rate into it.")
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError("`steps_per_epoch` is needed: the data set does not say how many batches it has.")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.epoch < self.start_epoch or (self.end_epoch is not None and self.epoch >= self.end_epoch):
            return
        if self.staircase and batch == 0:
            self._set_rate(self.epoch)
        elif not self.staircase:
            self._set_rate(self.epoch + batch / self.steps_per_epoch)  # type: ignore[operator]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._restored_momentum is not None:
            _inner(self.model.optimizer).momentum = self._restored_momentum
            self._restored_momentum = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _set_rate(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
        after = self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = after
        momentum = getattr(_inner(optimizer), "momentum", None)
        # In a compiled step the momentum is a constant: changing it would have no effect there.
        if self.momentum_correction and momentum and before > 0 and self.model.run_eagerly:
            _inner(optimizer).momentum, self._restored_momentum = momentum * after / before, momentum


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """From `initial_lr / size` to `initial_lr` over the first epochs (Goyal et al., 2017, arXiv:1706.02677).

    Args:
        initial_lr: the rate after the warm-up, already scaled with the number of ranks.
        warmup_epochs: how long.
        momentum_correction, steps_per_epoch: see `LearningRateScheduleCallback`.
        verbose: 1: rank 0 logs the end of the warm-up.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            reached = min(epoch + 1.0 / self.steps_per_epoch, warmup_epochs)  # type: ignore[operator]
            return (reached * (hvd.size() - 1) / warmup_epochs + 1) / hvd.size()

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and self.end_epoch is not None and epoch == self.end_epoch - 1 and hvd.rank() == 0:
            _log.info("Epoch %d: learning rate warm-up is over.", epoch + 1)


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keep the best model only. `filepath` is set later, as with Horovod, or given here.

    Args: those of `keras.callbacks.ModelCheckpoint`.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: Any = None,
    ) -> None:
        unset = "unset.weights.h5" if save_weights_only else "unset.keras"
        super().__init__(
            filepath=unset if filepath is None else filepath, monitor=monitor, verbose=verbose, save_best_only=True,
            save_weights_only=save_weights_only, mode=mode, save_freq=save_freq,
        )  # fmt: skip
        self.filepath = filepath

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        if self.filepath is None:
            raise ValueError("`filepath` of BestModelCheckpoint must be set before training.")
        self.filepath = os.fspath(self.filepath)


class MetricsCallback(keras.callbacks.Callback):
    """Add this package's metrics to `logs` at the end of every epoch, as `hvd_sparse/density` and so on."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None and hasattr(self.model.optimizer, "metrics"):
            metrics = self.model.optimizer.metrics()
            logs.update({f"hvd_sparse/{k}": v for k, v in metrics.items() if isinstance(v, (int, float))})


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _switch_off_xla(model: Any) -> None:
    if not getattr(model, "jit_compile", False):
        return
    if (model.get_compile_config() or {}).get("jit_compile") is True:
        raise ValueError("Horovod's operations cannot be compiled by XLA. Received: model.compile(jit_compile=True).")
    _log.info("Switching off XLA, which Keras chose by itself: it has no Horovod operations.")
    model.jit_compile = False
    model.make_train_function(force=True)


def _compare_steps(steps: int | None) -> None:
    counts = _gather(np.asarray([-1 if steps is None else steps], np.int64), "hvd_sparse.steps")
    if len(set(counts.tolist())) > 1:
        raise ValueError(
            f"Ranks have different numbers of batches per epoch: {counts.tolist()} (-1: unknown). Cut or repeat the "
            f"data so that they are equal, or give fit() the same steps_per_epoch everywhere."
        )


@tf.function(autograph=False, reduce_retracing=True)
def _gather_graph(values: Any, name: str) -> Any:
    return hvd.allgather(values, name=name, ignore_name_scope=True)


def _gather(values: Any, name: str) -> Any:
    # In a graph, since Horovod's eager operations ignore names.
    return values if hvd.size() == 1 else _gather_graph(tf.constant(values), name).numpy()


def _mean(values: Any, name: str) -> Any:
    return _gather(values[np.newaxis], name).mean(0)
