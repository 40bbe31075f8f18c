"""Short texts between ranks, outside of training graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvd_sparse.collectives.requests import AllGather
from hvd_sparse.drivers.horovod_tensorflow import HorovodTensorFlow


def exchange_text(driver: HorovodTensorFlow, name: str, text: str) -> list[str]:
    """Every rank's text, on every rank, in rank order."""

    @tf.function(autograph=False)
    def exchange(data: Any) -> Any:
        def program() -> Any:
            lengths = yield AllGather(tf.shape(data), tag="length", same_length=True)
            everything = yield AllGather(data, tag="text")
            return lengths, everything

        return driver.run(name, program())

    with tf.init_scope():
        run = exchange.get_concrete_function(tf.TensorSpec([None], tf.uint8))
        lengths, everything = run(tf.constant(np.frombuffer(text.encode() or b" ", np.uint8)))
        parts = np.split(everything.numpy(), np.cumsum(lengths.numpy())[:-1])
    return [part.tobytes().decode().strip() for part in parts]
