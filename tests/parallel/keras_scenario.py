"""Models and data for the cases of TensorFlow and Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as horovod
import keras
import numpy as np
import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)

BATCH = 8


def make_model(seed: int = 0, dtype: Any = None) -> Any:
    """Equal on all ranks."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(16, activation="relu", dtype=dtype),
            keras.layers.Dense(3, dtype=dtype),
        ]
    )


def data(batches: int, rank: int | None = None) -> tuple[Any, Any]:
    """This rank's samples."""
    generator = np.random.default_rng(100 + (horovod.rank() if rank is None else rank))
    count = BATCH * batches
    return generator.normal(size=(count, 8)).astype(np.float32), generator.integers(0, 3, count)


def joined_data(batches: int) -> tuple[Any, Any]:
    """What one process would see: every batch is all ranks' batches together."""
    parts = [data(batches, rank) for rank in range(horovod.size())]
    x = np.concatenate([x.reshape(batches, BATCH, 8) for x, _ in parts], 1).reshape(-1, 8)
    return x, np.concatenate([y.reshape(batches, BATCH) for _, y in parts], 1).reshape(-1)


def loss() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def fit(model: Any, optimizer: Any, samples: tuple[Any, Any], ranks: int = 1, **settings: Any) -> Any:
    """One epoch in order; `ranks`: how many ranks' batches one batch holds."""
    model.compile(optimizer, loss(), **settings)
    return model.fit(*samples, batch_size=BATCH * ranks, epochs=1, shuffle=False, verbose=0)


def flat(model: Any) -> Any:
    return np.concatenate([np.asarray(v.numpy(), np.float32).ravel() for v in model.trainable_variables])


@tf.function(autograph=False, reduce_retracing=True)
def _gather(values: Any) -> Any:
    return horovod.allgather(values, name="test.gather", ignore_name_scope=True)


def gathered(values: Any) -> Any:
    """(P, n): every rank's vector."""
    return _gather(tf.constant(np.asarray(values)[np.newaxis])).numpy()


def assert_same_on_ranks(values: Any) -> None:
    everybody = gathered(values)
    for rank in range(1, len(everybody)):
        difference = np.abs(everybody[0] - everybody[rank]).max()
        assert np.array_equal(everybody[0], everybody[rank]), f"rank 0 and {rank} differ by {difference:.3g}"


def assert_close(left: Any, right: Any, tolerance: float = 1e-6) -> None:
    difference = np.abs(left - right).max()
    assert difference < tolerance, f"differ by {difference:.3g}"


def custom_loop(
    model: Any, optimizer: Any, samples: tuple[Any, Any], gradient_of: Callable[..., Any], graph: bool
) -> None:
    """The usual loop with a tape; `gradient_of(tape, loss, variables)`."""
    loss_of = loss()

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            value = loss_of(y, model(x, training=True))
        grads = gradient_of(tape, value, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables))

    run = tf.function(step) if graph else step
    x, y = samples
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    for start in range(0, len(x), BATCH):
        run(tf.constant(x[start : start + BATCH]), tf.constant(y[start : start + BATCH]))
