"""tf-keras 2 (TF_USE_LEGACY_KERAS=1): optimizers in `fit` and in loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

import hvd_sparse.tensorflow as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def make_model() -> Any:
    tf_keras.utils.set_random_seed(0)
    return tf_keras.Sequential(
        [tf_keras.layers.Dense(16, activation="relu", input_shape=(8,)), tf_keras.layers.Dense(3)]
    )


def flat(model: Any) -> Any:
    return np.concatenate([v.numpy().ravel() for v in model.trainable_variables])


def case_fit_and_loops() -> None:
    generator = np.random.default_rng(RANK)
    x, y = generator.normal(size=(32, 8)).astype(np.float32), generator.integers(0, 3, 32)
    loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    makers = (
        lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: tf_keras.optimizers.Adam(0.01),
        lambda: tf_keras.optimizers.legacy.Adam(0.01),
    )
    for make in makers:
        for density in (1.0, 0.25):
            model = make_model()
            optimizer = hvd.DistributedOptimizer(
                make(), compression=hvd.Compression.sparse(density=density, min_size=1, sparsifier="topk")
            )
            assert isinstance(optimizer, type(make()))
            model.compile(optimizer, loss)
            model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
            assert optimizer.metrics()["num_exchanges"] == 4
            for start in (0, 8):
                with tf.GradientTape() as tape:
                    value = loss(y[start : start + 8], model(x[start : start + 8]))
                grads = tape.gradient(value, model.trainable_variables)
                optimizer.apply_gradients(zip(grads, model.trainable_variables))
            assert optimizer.metrics()["num_exchanges"] == 6
            everybody = hvd.allgather(tf.constant(flat(model)[np.newaxis])).numpy()
            assert all(np.array_equal(everybody[0], other) for other in everybody[1:])
            if density == 1.0:
                reference = make_model()
                reference.compile(make(), loss)
                parts = [np.random.default_rng(r) for r in range(SIZE)]
                xs, ys = zip(*[(g.normal(size=(32, 8)).astype(np.float32), g.integers(0, 3, 32)) for g in parts])
                order = [(slice(8 * i, 8 * i + 8)) for i in range(4)]
                for part in [*order, *order[:2]]:
                    reference.train_on_batch(
                        np.concatenate([x[part] for x in xs]), np.concatenate([y[part] for y in ys])
                    )
                assert np.abs(flat(model) - flat(reference)).max() < 1e-6
