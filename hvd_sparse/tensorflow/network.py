"""Small messages between ranks, timed and compared."""

from __future__ import annotations

import time
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_sparse.drivers.horovod_tensorflow import HorovodTensorFlow


def as_tensor(array: Any) -> Any:
    """A NumPy array as a tensor."""
    return tf.constant(array)


class TensorFlowNetwork:
    """See `hvd_sparse.meter.Network`. Messages are eager operations, one at a time and in one order on all ranks.

    They are called from inside a training graph (`tf.numpy_function`). A graph of their own would need a further thread
    of TensorFlow's pool, which may have one only; a single operation runs in the thread that calls it.

    Args:
        driver: that of the wrapper, whose ranks take part.
    """

    def __init__(self, driver: HorovodTensorFlow) -> None:
        self._driver = driver

    def allreduce_seconds(self, num_bytes: int, group: str = "global") -> float:
        message = tf.zeros([num_bytes // 4])
        started = time.perf_counter()
        self._reduced(message, hvd.Sum, group)
        return time.perf_counter() - started

    def largest(self, values: list[float]) -> list[float]:
        return self._reduced(as_tensor(np.array(values)), hvd.Max).tolist()

    def total(self, values: list[float]) -> list[float]:
        return self._reduced(as_tensor(np.array(values)), hvd.Sum).tolist()

    def _reduced(self, message: Any, op: Any, group: str = "global") -> Any:
        return hvd.allreduce(message, op=op, process_set=self._driver.process_sets[group]).numpy()
