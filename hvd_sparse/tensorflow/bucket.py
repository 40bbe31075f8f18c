"""The variables of one bucket, and its exchange as part of a graph."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from hvd_sparse.buckets import Layout
from hvd_sparse.exchange import Exchange
from hvd_sparse.ops.tensorflow import TensorFlowOps
from hvd_sparse.types import Array, Program, World


class Bucket:
    """State lives in variables of its own, outside model and optimizer: it is in none of their files.

    Args:
        layout: the bucket's parameters.
        exchange: how it is exchanged.
        half: sums travel in float16 (dense buckets only).

    Must be made outside of any graph (`tf.init_scope`).
    """

    def __init__(self, layout: Layout, exchange: Exchange, half: bool) -> None:
        self.layout = layout
        self.exchange = exchange
        self.half = half
        self.ops = TensorFlowOps()
        state = exchange.init(self.ops)
        self.memory = {key: _variable(array) for key, array in state["memory"].items()}
        self.scheme = {key: _variable(value) for key, value in state["scheme"].items()}

    def program(self, world: World, grad: Array, k: int) -> Program[Any]:
        """Exchange the flat gradient (n,) and update the variables."""
        if self.half:
            grad = tf.cast(grad, tf.float16)
        before = {
            name: {key: variable.value() for key, variable in variables.items()} for name, variables in self.variables
        }
        reduced, after = yield from self.exchange.step(self.ops, world, grad, k, before)
        for name, variables in self.variables:
            for key, variable in variables.items():
                variable.assign(tf.cast(after[name][key], variable.dtype))
        return reduced

    @property
    def variables(self) -> list[tuple[str, dict[str, tf.Variable]]]:
        """The state by part."""
        return [("memory", self.memory), ("scheme", self.scheme)]

    def norm_squared(self) -> float:
        """Sum of squares of what has not been sent yet."""
        key = self.exchange.memory.accumulator
        return float(self.ops.norm_squared(self.memory[key].value())) if key else 0.0

    def save(self) -> dict[str, dict[str, Any]]:
        """{"memory": {parameter: {key: array}}, "scheme": {bucket: numbers and arrays}}."""
        flat = {key: variable.numpy() for key, variable in self.memory.items()}
        memory = {
            m.name: {key: array[m.start : m.start + m.size] for key, array in flat.items()} for m in self.layout.members
        }
        scheme = {key: variable.numpy() for key, variable in self.scheme.items()}
        scheme = {key: value if value.ndim else value.item() for key, value in scheme.items()}
        return {"memory": memory, "scheme": {self._signature(): scheme}}

    def load(self, memory: dict[str, dict[str, Any]], scheme: dict[str, Any]) -> None:
        """Take over what was saved for these parameters."""
        for key, variable in self.memory.items():
            flat = variable.numpy().copy()
            for member in self.layout.members:
                if key in memory.get(member.name, {}):
                    flat[member.start : member.start + member.size] = memory[member.name][key].reshape(-1)
            variable.assign(flat)
        for key, value in scheme.get(self._signature(), {}).items():
            if key in self.scheme:  # it may be another scheme's
                self.scheme[key].assign(value)

    def _signature(self) -> str:
        return f"{self.layout.spec.name}:{self.layout.spec.size}"


def _variable(value: Any) -> tf.Variable:
    """Not through tf.Variable: a function that is traced for the first time would notice, and be traced twice."""
    dtype = tf.float64 if isinstance(value, float) else tf.int64 if isinstance(value, int) else None
    return ResourceVariable(tf.convert_to_tensor(value, dtype), trainable=False)
