"""What is exchanged, agreed before and at the first step and kept: a graph cannot ask again."""

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
class Slot:
    """A variable: its name, shape and dtype, equal on all ranks."""

    name: str
    shape: tuple[int, ...]
    dtype: Any

    @property
    def width(self) -> int:
        """Elements in a row."""
        return math.prod(self.shape[1:])


@dataclass(frozen=True)
class Plan:
    """How the gradients of some variables travel.

    Attributes:
        slots: all variables, in order.
        present: names of those with a gradient on some rank.
        row_sparse: names of those whose gradient is `tf.IndexedSlices` on some rank. They travel without loss.
        rows: the ones among them that travel as rows.
    """

    slots: tuple[Slot, ...]
    present: frozenset[str]
    row_sparse: frozenset[str]
    rows: frozenset[str]

    def parameters(self) -> list[Parameter]:
        """What goes into buckets."""
        return [
            Parameter(slot.name, slot.shape, "", lossless=slot.name in self.row_sparse)
            for slot in self.slots
            if slot.name not in self.rows
        ]

    def gradients(self, given: dict[str, Any]) -> dict[str, Any]:
        """A gradient for every variable; zeros, or no rows, where this rank has none.

        Raises:
            ValueError: a gradient that no rank had in the first step.
        """
        late = [name for name, grad in given.items() if grad is not None and name not in self.present]
        if late:
            raise ValueError(
                f"The gradient of {late[0]!r} appeared only after the first step, in which no rank had it and ranks "
                f"agreed on what to exchange. Let every variable take part in the first step, or wrap again."
            )
        return {slot.name: self._gradient(slot, given.get(slot.name)) for slot in self.slots}

    def _gradient(self, slot: Slot, grad: Any) -> Any:
        if slot.name not in self.rows:
            return tf.zeros(slot.shape, slot.dtype) if grad is None else tf.convert_to_tensor(grad)
        if grad is None:
            values, indices = tf.zeros([0, *slot.shape[1:]], slot.dtype), tf.zeros([0], tf.int32)
        elif isinstance(grad, tf.IndexedSlices):
            values, indices = grad.values, tf.cast(grad.indices, tf.int32)
        else:
            values, indices = grad, tf.range(slot.shape[0], dtype=tf.int32)
        return tf.IndexedSlices(values, indices, tf.constant(slot.shape))


def plan_for_variables(driver: HorovodTensorFlow, variables: Sequence[Any]) -> Plan:
    """The plan if every variable has a dense gradient.

    Raises:
        HvdSparseError: the ranks' variables differ.
    """
    # By position: Keras paths count up in a process and are others after loading a model.
    names = [f"{position}:{v.name}" for position, v in enumerate(variables)]
    slots = tuple(Slot(name, tuple(v.shape), tf.as_dtype(v.dtype)) for name, v in zip(names, variables))
    described = {slot.name: f"{list(slot.shape)} {slot.dtype.name}" for slot in slots}
    compare(exchange_text(driver, "variables", statement({"parameters": described})))
    return Plan(slots, frozenset(names), frozenset(), frozenset())


def plan_for_gradients(driver: HorovodTensorFlow, plan: Plan, given: dict[str, Any], sparse_as_dense: bool) -> Plan:
    """`plan`, corrected for what the ranks' first gradients look like."""
    mine = {name: _look(grad) for name, grad in given.items()}
    everybody = [json.loads(text) for text in exchange_text(driver, "gradients", json.dumps(mine))]
    present, row_sparse, rows = set(), set(), set()
    for slot in plan.slots:
        looks = [one[slot.name] for one in everybody if one.get(slot.name) is not None]
        if looks:
            present.add(slot.name)
        if any(look != "dense" for look in looks):
            row_sparse.add(slot.name)
            if not sparse_as_dense and _rows_are_smaller(slot, looks, len(everybody)):
                rows.add(slot.name)
    return Plan(plan.slots, frozenset(present), frozenset(row_sparse), frozenset(rows))


def _look(grad: Any) -> Any:
    if isinstance(grad, tf.IndexedSlices):
        return grad.values.shape[0] or "unknown number of rows"
    return None if grad is None else "dense"


def _rows_are_smaller(slot: Slot, looks: list[Any], num_ranks: int) -> bool:
    known = all(isinstance(look, int) for look in looks)
    return known and max(looks) * (1 + slot.width) < 2 * math.prod(slot.shape) / num_ranks
