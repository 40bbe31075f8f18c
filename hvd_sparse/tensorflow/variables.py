"""Broadcasts that accept Keras variables, which Horovod's own do not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

# Types that Horovod's TensorFlow operations lack, and what carries their values without loss.
_CARRIERS = {tf.bfloat16: tf.float32, tf.bool: tf.uint8, tf.uint32: tf.int64, tf.uint16: tf.int32, tf.int16: tf.int32}


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: Any = hvd.global_process_set, inplace: bool = False
) -> None:
    """Give every rank the values of `root_rank`.

    Args:
        variables: Keras or TensorFlow variables, in the same order on all ranks.
        root_rank: the rank whose values count.
        process_set: the ranks that take part.
        inplace: accepted as by Horovod; without effect here.

    Raises:
        TypeError: a variable's dtype cannot be sent.
    """
    plain = [variable.value if isinstance(variable, keras.Variable) else variable for variable in variables]
    sendable = [v for v in plain if v.dtype != tf.string]
    if process_set.size() == 1 or not sendable:
        return

    # In a graph, since Horovod's eager operations ignore names; the order of variables names them.
    @tf.function(autograph=False)
    def exchange(values: list[Any]) -> list[Any]:
        return [
            hvd.broadcast(
                tf.cast(value, _CARRIERS.get(value.dtype, value.dtype)), root_rank, name=f"hvd_sparse.broadcast.{i}",
                ignore_name_scope=True, process_set=process_set,
            )
            for i, value in enumerate(values)
        ]  # fmt: skip

    values = [tf.convert_to_tensor(variable) for variable in sendable]
    for variable, value in zip(sendable, exchange.get_concrete_function(values)(values)):
        variable.assign(tf.cast(value, variable.dtype))


def broadcast_model(
    model: Any, optimizer: Any = None, root_rank: int = 0, process_set: Any = hvd.global_process_set
) -> None:
    """Give every rank the weights of `root_rank`'s model, and its optimizer's state, which is made if need be.

    Weights only: the states of seed generators stay different, or every rank would draw the same dropout masks.

    Args:
        model: a built Keras model.
        optimizer: default: the one the model was compiled with, if any.
        root_rank: the rank whose values count.
        process_set: the ranks that take part.
    """
    broadcast_variables(model.weights, root_rank, process_set)
    optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
    if optimizer is None:
        return
    if hasattr(optimizer, "built") and not optimizer.built:  # Keras 3 builds it in the first step
        optimizer.build(model.trainable_variables)
    variables = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    broadcast_variables(variables, root_rank, process_set)
