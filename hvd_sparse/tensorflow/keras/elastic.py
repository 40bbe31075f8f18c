"""Elastic training of Keras 3 models."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.elastic as _elastic
import horovod.tensorflow.keras.elastic as _keras_elastic
import keras
from horovod.common.elastic import ObjectState

from hvd_sparse.tensorflow.variables import broadcast_variables

run = _elastic.run
CommitStateCallback = _keras_elastic.CommitStateCallback
UpdateBatchStateCallback = _keras_elastic.UpdateBatchStateCallback
UpdateEpochStateCallback = _keras_elastic.UpdateEpochStateCallback


class KerasState(ObjectState):
    """A Keras 3 model and its optimizer, kept in step over ranks that come and go.

    All ranks get rank 0's weights, optimizer state, counters and thresholds when training starts, and whenever ranks
    have come or gone; survivors keep their residuals, newcomers start from zero. `fit` makes its graph anew then. Make
    other functions that train inside the one that `run` runs; wrap the optimizer outside of it, and do without
    `BroadcastGlobalVariablesCallback`.

    Args:
        model: built.
        optimizer: default: the one the model was compiled with.
        kwargs: further values to keep (`batch=0, epoch=0`).

    Raises:
        ValueError: the model has no variables yet.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.model = model
        self.optimizer = model.optimizer if optimizer is None else optimizer
        if not model.built:
            raise ValueError("`model` has no variables yet: call model.build(input_shape) first.")
        if not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        self.averager: Any = getattr(self.optimizer, "averager", None)
        if self.averager:
            self.averager.has_state = True
        self._keep()
        super().__init__(hvd.broadcast_object, hvd.rank, **kwargs)

    def save(self) -> None:
        self._keep()
        super().save()

    def restore(self) -> None:
        for variable, value in zip(self._variables(), self._values):
            variable.assign(value)
        if self.averager:
            self._load(self._exchanges)
        super().restore()

    def reset(self) -> None:
        self.model.train_function = None  # `fit` makes another one
        if self.averager:
            self.averager.restart()

    def sync(self) -> None:
        broadcast_variables(self._variables(), root_rank=0)
        if self.averager:
            own = self.averager.save()
            shared = hvd.broadcast_object({**own, "memory": {}}, root_rank=0)
            self._load({**shared, "memory": own["memory"]})
        self._keep()
        super().sync()

    def _variables(self) -> list[Any]:
        return [*self.model.weights, *self.optimizer.variables]

    def _keep(self) -> None:
        self._values = [keras.ops.convert_to_numpy(variable) for variable in self._variables()]
        self._exchanges = self.averager.save() if self.averager else {}

    def _load(self, state: dict[str, Any]) -> None:
        """Take over `state` as this rank's own, whatever its number was when it was saved."""
        own = self.averager.save()
        self.averager.load({**state, "rank": own["rank"], "size": own["size"]})
