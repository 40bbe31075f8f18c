"""Ends a job whose ranks wait for each other. Horovod's own stall inspector is silent in TensorFlow graphs."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

_log = logging.getLogger("hvd_sparse")
_LOOK_SECONDS = 1.0


class Watchdog:
    """Watches one averager's exchanges from a thread of its own.

    The graph counts exchanges that began and that ended; if one does not end in time, Horovod is shut down, which
    makes every waiting operation fail on every rank.

    Args:
        timeout_seconds: longest wait.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._begun = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._thread: threading.Thread | None = None

    def begin(self, step: tf.Variable) -> Any:
        """Part of the graph: an exchange begins. The number of those that ended."""
        if self._thread is None:
            self._thread = threading.Thread(target=_watch, args=(weakref.ref(self), weakref.ref(step)), daemon=True)
            self._thread.start()
        ended = step.value()
        self._begun.assign(ended + 1)
        return ended

    def end(self, step: tf.Variable, after: Any) -> None:
        """Part of the graph: the exchange ended, `after` was computed from its results."""
        with tf.control_dependencies([after]):
            step.assign_add(1)

    def is_waiting(self, ended: int) -> bool:
        """Whether an exchange has begun since `ended` of them were over."""
        return int(self._begun.numpy()) > ended


def _watch(watchdog_ref: Any, step_ref: Any) -> None:
    since, last = time.monotonic(), -1
    while True:
        time.sleep(_LOOK_SECONDS)
        watchdog, step = watchdog_ref(), step_ref()
        if watchdog is None or step is None or not hvd.is_initialized():
            return
        ended = int(step.numpy())
        if ended != last or not watchdog.is_waiting(ended):
            since, last = time.monotonic(), ended
        elif time.monotonic() - since > watchdog.timeout_seconds:
            _log.error(
                "Rank %d has waited %.0f s for the other ranks in exchange %d: giving up, `timeout_seconds` is over. "
                "Do all ranks run the same number of batches, and wrap the same optimizers in the same order?",
                hvd.rank(), time.monotonic() - since, ended,
            )  # fmt: skip
            hvd.shutdown()
            return
