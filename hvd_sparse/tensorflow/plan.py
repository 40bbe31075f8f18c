"""What the ranks' gradients look like, agreed at the first step and kept: a graph cannot ask again."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvd_sparse.agreement import compare, statement
from hvd_sparse.buckets import Parameter
from hvd_sparse.drivers.horovod_tensorflow import HorovodTensorFlow
from hvd_sparse.tensorflow.texts import exchange_text


@dataclass(frozen=True)
class Plan:
    """Variables that have a gradient on some rank.

    Attributes:
        parameters: their descriptions, in order.
        positions: name -> place in the list of gradients.
        rows: name -> (rows, elements in a row) of those that travel as rows.
    """

    parameters: list[Parameter]
    positions: dict[str, int]
    rows: dict[str, tuple[int, int]]

    def gradients(self, grads: Sequence[Any], variables: Sequence[Any]) -> dict[str, Any]:
        """By name; zeros, or no rows, where this rank has none."""
        found = {}
        for name, position in self.positions.items():
            grad, variable = grads[position], variables[position]
            if name in self.rows:
                found[name] = _as_rows(grad, variable)
            else:
                found[name] = tf.zeros(variable.shape, variable.dtype) if grad is None else tf.convert_to_tensor(grad)
        late = [i for i, grad in enumerate(grads) if grad is not None and i not in self.positions.values()]
        if late:
            raise ValueError(
                f"Gradient number {late[0]} appeared only after the first step, in which no rank had it and ranks "
                f"agreed on what to exchange. Let every variable take part in the first step, or wrap again."
            )
        return found

    def spread(self, averages: dict[str, Any], length: int) -> list[Any]:
        """A list like the one of gradients; None where no rank has one."""
        spread: list[Any] = [None] * length
        for name, position in self.positions.items():
            spread[position] = averages[name]
        return spread


def agree_on_plan(
    driver: HorovodTensorFlow, grads: Sequence[Any], variables: Sequence[Any], sparse_as_dense: bool
) -> Plan:
    """Exchange what this rank's gradients look like.

    Raises:
        HvdSparseError: the ranks' variables differ.
    """
    names = _unique_names(variables)
    shapes = {name: f"{list(v.shape)} {_dtype(v)}" for name, v in zip(names, variables)}
    compare(exchange_text(driver, "variables", statement({"parameters": shapes})))
    mine = [_look(grad) for grad in grads]
    everybody = [json.loads(text) for text in exchange_text(driver, "gradients", json.dumps(mine))]
    parameters, positions, rows = [], {}, {}
    for position, (name, variable) in enumerate(zip(names, variables)):
        looks = [one[position] for one in everybody if one[position] is not None]
        if not looks:
            continue
        size, width = math.prod(variable.shape), math.prod(variable.shape[1:])
        row_sparse = any(look != "dense" for look in looks)
        if row_sparse and not sparse_as_dense and _rows_are_smaller(looks, len(everybody), size, width):
            rows[name] = (int(variable.shape[0]), width)
        positions[name] = position
        parameters.append(Parameter(name, size, len(variable.shape), "", lossless=row_sparse))
    return Plan(parameters, positions, rows)


def _look(grad: Any) -> Any:
    if isinstance(grad, tf.IndexedSlices):
        return grad.values.shape[0] or "unknown number of rows"
    return None if grad is None else "dense"


def _rows_are_smaller(looks: list[Any], num_ranks: int, size: int, width: int) -> bool:
    known = all(isinstance(look, int) for look in looks)
    return known and max(looks) * (1 + width) < 2 * size / num_ranks


def _as_rows(grad: Any, variable: Any) -> Any:
    if grad is None:
        none = tf.zeros([0], tf.int32)
        return tf.IndexedSlices(tf.zeros([0, *variable.shape[1:]], variable.dtype), none, tf.constant(variable.shape))
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(grad.values, tf.cast(grad.indices, tf.int32), tf.constant(variable.shape))
    everywhere = tf.range(variable.shape[0], dtype=tf.int32)
    return tf.IndexedSlices(grad, everywhere, tf.constant(variable.shape))


def _unique_names(variables: Sequence[Any]) -> list[str]:
    """Keras paths, with the position where two are alike."""
    names = [getattr(v, "path", None) or v.name for v in variables]
    return [name if names.count(name) == 1 else f"{name}:{i}" for i, name in enumerate(names)]


def _dtype(variable: Any) -> str:
    return tf.as_dtype(variable.dtype).name
