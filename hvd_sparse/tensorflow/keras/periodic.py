"""Periodic averaging in `model.fit`."""

from __future__ import annotations

from typing import Any

import keras

from hvd_sparse.tensorflow.periodic import PeriodicAveraging


class PeriodicAveragingCallback(keras.callbacks.Callback):
    """Train alone, and average the models of all ranks every now and then, at the ends of batches.

    Compile the model with a plain optimizer. At the start of training every rank gets rank 0's weights, so that
    `BroadcastGlobalVariablesCallback` is not needed (it refuses uneven numbers of batches). `fit` returns when no rank
    has data any more, with equal weights on all ranks. Let no other callback exchange anything between rounds:
    `MetricAverageCallback`, for one, needs ranks with equal numbers of epochs that end together.

    Traffic, when to choose it, when to avoid it: see `hvd_sparse.tensorflow.PeriodicAveraging`.

    Args:
        every_steps, every_seconds, weights, outer, process_set: see there; `weights` are "uniform" or "steps".
        warmup_steps: so many first batches end with a round each. For SGD, also with momentum, that is the same as
            averaging gradients; the state of other optimizers is not averaged.
        buffers: what becomes of non-trainable weights, moving averages of BatchNormalization, say: "local"; "average"
            the floating-point ones; all of "rank0".

    Raises (when training begins):
        ValueError, TypeError: an argument is out of range; the model is not built, its optimizer averages gradients, or
            it has a BatchNormalization that is synchronised.
        HvdSparseError: ranks have different models or settings, or another one refused; on every rank.

    Example:
        >>> model.fit(data, callbacks=[hvd.PeriodicAveragingCallback(every_seconds=120)])       # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        warmup_steps: int = 0,
        weights: str = "uniform",
        outer: Any = None,
        buffers: str = "local",
        **settings: Any,
    ) -> None:
        super().__init__()
        self.settings = {
            "every_steps": every_steps,
            "every_seconds": every_seconds,
            "warmup_steps": warmup_steps,
            "weights": weights,
            "outer": outer,
            "buffers": buffers,
            **settings,
        }
        self.averaging: PeriodicAveraging | None = None
        self._num_batches = 0  # of this epoch, so far

    def on_train_begin(self, logs: Any = None) -> None:
        _check_model(self.model)
        if self.settings["weights"] == "samples":
            raise ValueError("`weights` must be 'uniform' or 'steps': a callback is not told the size of a batch.")
        buffers = self.model.non_trainable_weights
        self.averaging = PeriodicAveraging(self.model.trainable_weights, buffer_variables=buffers, **self.settings)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._num_batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        num_steps, self._num_batches = batch + 1 - self._num_batches, batch + 1  # several, with steps_per_execution
        if self.averaging:
            self.averaging.step(num_steps=num_steps)

    def on_train_end(self, logs: Any = None) -> None:
        if self.averaging:
            self.averaging.finish()

    def metrics(self) -> dict[str, Any]:
        """What averaging did on this rank in the last `fit`; keys as in `PeriodicAverager.metrics`."""
        return self.averaging.metrics() if self.averaging else {}


def _check_model(model: Any) -> None:
    if not model.built:
        raise ValueError("`model` must have its variables: call model.build(input_shape) before fit.")
    if getattr(model.optimizer, "averager", None) is not None:
        raise ValueError("`model` must be compiled with a plain optimizer: this one averages gradients already.")
    for layer in model._flatten_layers():
        if getattr(layer, "synchronized", False) or type(layer).__name__ == "SyncBatchNormalization":
            raise ValueError(
                f"`model` must have no BatchNormalization that is synchronised: ranks take different numbers of steps, "
                f"and would wait for each other for ever. Received: {layer.name!r}."
            )
