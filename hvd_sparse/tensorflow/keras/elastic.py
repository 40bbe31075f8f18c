"""Elastic training of Keras 3 models."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow.elastic as _elastic
import horovod.tensorflow.keras.elastic as _keras_elastic
import keras

run = _elastic.run
CommitStateCallback = _keras_elastic.CommitStateCallback
UpdateBatchStateCallback = _keras_elastic.UpdateBatchStateCallback
UpdateEpochStateCallback = _keras_elastic.UpdateEpochStateCallback


class KerasState(_elastic.TensorFlowState):
    """A Keras 3 model and its optimizer, kept in step over ranks that come and go.

    Residuals are not part of it: survivors keep theirs, newcomers start from zero.

    Args:
        model: built.
        optimizer: default: the one the model was compiled with.
        kwargs: further values to keep (`batch=0, epoch=0`).

    Raises:
        ValueError: the model or the optimizer has no variables yet.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        optimizer = model.optimizer if optimizer is None else optimizer
        if not model.built:
            raise ValueError("`model` has no variables yet: call model.build(input_shape) first.")
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        variables = [*model.weights, *optimizer.variables]
        values = [v.value if isinstance(v, keras.Variable) else v for v in variables]
        super().__init__(variables=values, **kwargs)
