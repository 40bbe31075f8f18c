"""Runs sums from outside of any graph: between two training steps, one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from hvd_sparse.collectives.requests import AllReduce
from hvd_sparse.drivers.horovod_tensorflow import HorovodTensorFlow
from hvd_sparse.types import Program, World


class EagerTensorFlow:
    """A driver for programs whose only requests are allreduces, and which look at the values of the answers.

    Each request is a small graph of its own, made once, since Horovod's eager operations have no names.

    Args:
        prefix: leads the names of all operations; equal on all ranks.
        process_sets: Horovod's process sets by group name.

    Attributes:
        num_bytes: sent by this rank so far.
    """

    def __init__(self, prefix: str, process_sets: Mapping[str, Any]) -> None:
        self.prefix = prefix
        self.num_bytes = 0.0
        self._graphs: dict[Any, Any] = {}
        self.driver = HorovodTensorFlow(prefix, process_sets)

    def world(self, step: int) -> World:
        """The ranks that take part, at round number `step`."""
        return self.driver.world(step)

    def run(self, name: str, program: Program[Any]) -> Any:
        """The result of the program. Not inside a `tf.function`."""
        answer = None
        while True:
            try:
                request = program.send(answer)
            except StopIteration as stop:
                return stop.value
            size = self.world(0).size
            self.num_bytes += 2.0 * int(tf.size(request.tensor)) * request.tensor.dtype.size * (size - 1) / size
            answer = self._graph(name, request)(request.tensor)

    def _graph(self, name: str, request: AllReduce) -> Any:
        shape, dtype = request.tensor.shape, request.tensor.dtype
        key = (name, request.tag, request.op, tuple(shape), dtype)
        if key not in self._graphs:

            @tf.function(autograph=False)
            def run(message: Any) -> Any:
                def program() -> Program[Any]:
                    return (yield AllReduce(message, request.tag, request.op))

                return self.driver.run(name, program())

            self._graphs[key] = run.get_concrete_function(tf.TensorSpec(shape, dtype))
        return self._graphs[key]
