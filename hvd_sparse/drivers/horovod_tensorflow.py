"""Runs programs as Horovod operations of a TensorFlow graph."""

from __future__ import annotations

import math
import re
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_sparse.collectives.requests import AllGather, AllReduce, AllToAll, Request
from hvd_sparse.drivers.groups import world_of
from hvd_sparse.types import Program, World

_OPERATORS = {"sum": hvd.Sum, "max": hvd.Max, "min": hvd.Min}
# Horovod's elastic training recognises a failed exchange by one of these words in TensorFlow's message, which names
# the node. There is none for alltoall.
_KINDS = {"AllReduce": "HorovodAllreduce", "Broadcast": "HorovodBroadcast"}
_OTHER_KIND = "HorovodAllgather"
_names: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()  # used so far, by outermost graph


@dataclass
class _Running:
    program: Program[Any]
    answer: Any = None


class HorovodTensorFlow:
    """Several programs at a time, laid out round by round as operations of the graph that is being traced.

    The graph itself does not wait between rounds: each operation starts when its input is there, and ranks may start
    them in any order, because every one has a name of its own. For the same reason nothing works eagerly, where
    Horovod's TensorFlow operations ignore their names.

    **Use the value of every result.** TensorFlow takes Horovod's operations for pure functions and removes those whose
    value nobody uses, also if they are control dependencies; a rank that then lacks an operation makes the others wait
    for ever. For the same reason put programs into a `tf.cond` only if its predicate is equal on all ranks, and into a
    `tf.while_loop` only with `parallel_iterations=1` or if each turn depends on the one before (as a training step
    does, through its variables): two turns at a time would use the same names.

    Args:
        prefix: leads the names of all operations; equal on all ranks, and used by one driver at a time.
        process_sets: Horovod's process sets by group name; "global" is required.

    Attributes:
        num_bytes: sent by this rank in one execution of the programs that were started since the last `finish`, or, if
            there are none, of those that it finished. Counted as the simulator counts words; a float, or a 0-d float64
            tensor where lengths are known only to the graph.

    Raises:
        RuntimeError: not inside a `tf.function`.

    Example:
        >>> @tf.function                                                                            # doctest: +SKIP
        ... def total(x):
        ...     driver.start("b0", Dense().reduce(ops, driver.world(0), Spec("b0", 4), x, 4, {}))
        ...     return driver.finish()["b0"][0].total
    """

    def __init__(self, prefix: str, process_sets: Mapping[str, Any]) -> None:
        self.prefix = prefix
        self.process_sets = process_sets
        self.num_bytes: Any = 0.0
        self._graph: Any = None
        self._running: dict[str, _Running] = {}
        self._results: dict[str, Any] = {}
        with tf.init_scope(), tf.device("CPU:0"):
            self._zero = tf.Variable(0, dtype=tf.int32, trainable=False)

    def world(self, step: Any) -> World:
        """The ranks that take part, at exchange number `step` (an int, or a tensor of an integer type)."""
        return world_of(self.process_sets, step if isinstance(step, int) else tf.cast(step, tf.int64))

    def start(self, name: str, program: Program[Any]) -> None:
        """Lay out `program` up to its first request. `name` is unique among the programs that run."""
        if tf.executing_eagerly():
            raise RuntimeError(
                "Exchanges must be called inside a tf.function: eagerly Horovod's TensorFlow operations have no names, "
                "and ranks that start them in different orders would mix up their values."
            )
        graph = tf.compat.v1.get_default_graph()
        if graph is not self._graph or not (self._running or self._results):
            self.abandon()  # what is left over is from a trace that failed
            self._graph, self.num_bytes = graph, 0.0
        self._running[name] = _Running(program)
        self._advance(name)

    def has(self, name: str) -> bool:
        """Whether this program was started since the last `finish`."""
        return name in self._running or name in self._results

    def abandon(self) -> None:
        """Forget all programs: one of them failed."""
        self._running, self._results = {}, {}

    def finish(self) -> dict[str, Any]:
        """Lay out all programs to their ends; their results by name."""
        while self._running:
            for name in list(self._running):
                self._advance(name)
        results, self._results = self._results, {}
        return results

    def run(self, name: str, program: Program[Any]) -> Any:
        """The result of one program."""
        self.start(name, program)
        return self.finish()[name]

    def _advance(self, name: str) -> None:
        running = self._running.pop(name)
        try:
            request = running.program.send(running.answer)
        except StopIteration as stop:
            self._results[name] = stop.value
            return
        running.answer = self._submit(request, f"{self.prefix}.{name}.{request.tag}")
        self._running[name] = running

    def _submit(self, request: Request, label: str) -> Any:
        group = self.process_sets[request.group]
        size = group.size()
        tensor = tf.convert_to_tensor(request.tensor)
        dtype, kind = tensor.dtype, _KINDS.get(type(request).__name__, _OTHER_KIND)
        if dtype == tf.bfloat16:  # which Horovod's TensorFlow operations lack
            tensor = tf.cast(tensor, tf.float32)
        settings = {"name": _unique(f"{kind}.{label}", self._graph), "ignore_name_scope": True, "process_set": group}
        num_bytes, tensor = _num_bytes(tensor), self._opaque(tensor)
        if isinstance(request, AllReduce):
            self.num_bytes += 2 * num_bytes * (size - 1) / size
            answer = hvd.allreduce(tensor, op=_OPERATORS[request.op], **settings)
            answer = tf.ensure_shape(answer, tensor.shape)
        elif isinstance(request, AllGather):
            answer = hvd.allgather(tensor, **settings)
            if request.same_length and tensor.shape[0] is not None:
                answer = tf.ensure_shape(answer, [size * tensor.shape[0], *tensor.shape[1:]])
            self.num_bytes += _num_bytes(answer) - num_bytes
        elif isinstance(request, AllToAll):
            splits = tf.cast(request.splits, tf.int32)
            answer, received = hvd.alltoall(tensor, splits=splits, **settings)
            if isinstance(request.splits, tuple):
                num_rows = sum(request.splits) - request.splits[group.rank()]
                answer = tf.ensure_shape(answer, [None, *tensor.shape[1:]])
            else:
                num_rows = tf.cast(tf.reduce_sum(splits) - splits[group.rank()], tf.float64)
            self.num_bytes += math.prod(tensor.shape[1:]) * tensor.dtype.size * num_rows
            return tf.cast(answer, dtype), received
        else:
            self.num_bytes += num_bytes * (size > 1)
            answer = hvd.broadcast(tensor, request.root, **settings)
        return tf.cast(answer, dtype)

    def _opaque(self, tensor: Any) -> Any:
        """`tensor`, of which TensorFlow cannot know in advance that it is constant, or equal to another.

        Where this rank has no gradient it sends zeros. TensorFlow would run an operation on constants once, while it
        optimises the graph, and keep the result for good; two of them with equal inputs it would run as one. Neither
        happens on the ranks that do have a gradient: they would wait for ever. A slice whose start comes from a
        variable, of the whole, is not copied, and prevents both.
        """
        whole = tensor[self._zero.read_value() :]
        whole.set_shape(tensor.shape)
        return whole


def _unique(label: str, graph: Any) -> str:
    """A name that no other operation of the same function has, also if the same exchange is laid out twice.

    Counted over the outermost graph: the names of a branch or of a loop's body count in the whole.
    """
    while getattr(graph, "outer_graph", None) is not None and hasattr(graph.outer_graph, "outer_graph"):
        graph = graph.outer_graph
    used = _names.setdefault(graph, Counter())
    label = re.sub(r"[^A-Za-z0-9_.\-]", "_", label)
    used[label] += 1
    return label if used[label] == 1 else f"{label}.again{used[label] - 1}"


def _num_bytes(tensor: Any) -> Any:
    """A float, or a 0-d float64 tensor if the shape is not known while tracing."""
    if tensor.shape.is_fully_defined():
        return float(tensor.shape.num_elements() * tensor.dtype.size)
    return tf.cast(tf.size(tensor), tf.float64) * tensor.dtype.size
