"""Memories that change what the optimizer gets, and selections that look at the weights, on TensorFlow and Keras 3."""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_scenario import assert_close, assert_same_on_ranks, data, fit, flat, make_model

import hvd_sparse.tensorflow as hvd
from hvd_sparse.memories.sgc import SGC
from hvd_sparse.sparsifiers.importance import Importance

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def sparse(density: float = 0.25, **settings: Any) -> Any:
    return hvd.Compression.sparse(
        density, **{"sparsifier": "topk", "min_size": 1, "collective": "allgather", **settings}
    )


def wrap(optimizer: Any, density: float = 0.25, **settings: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer, compression=sparse(density, **settings))


def updates(config: Any, start: Any, gradient_of: Any, steps: int, key: str) -> list[Any]:
    """Weights after each step of lr = 0.5, in one graph: f = gradient_of is minimised through a tape."""
    w = tf.Variable(start)

    @tf.function(autograph=False)
    def step() -> None:
        with tf.GradientTape() as tape:
            value = gradient_of(w)
        (grad,) = hvd.DistributedGradientTape(tape, compression=config, key=key).gradient(value, [w])
        w.assign_sub(0.5 * grad)

    seen = []
    for _ in range(steps):
        step()
        seen.append(w.numpy().copy())
    return seen


def case_importance_looks_at_the_weights_as_they_are() -> None:
    """A gradient of ones everywhere: in the first step the smallest weights go, and weights move between steps."""
    start = np.random.default_rng(3).normal(size=(8, 8)).astype(np.float32)
    part = Importance(eps=1e-6)
    config = sparse(4 / 64, sparsifier=part, collective="shared_allreduce")
    seen = updates(config, start, tf.reduce_sum, 3, "importance")
    residual, before = np.zeros(64), start.ravel()
    for after in seen:
        residual += 1
        expected = np.argsort(residual / (np.abs(before) + 1e-6))[-4:]
        assert sorted(np.flatnonzero(after.ravel() != before)) == sorted(expected)
        residual[expected], before = 0, after.ravel()
    assert_same_on_ranks(seen[-1].ravel())


def case_importance_in_fit() -> None:
    model = make_model()
    fit(model, wrap(keras.optimizers.Adam(0.01), sparsifier="importance", collective="shared_allreduce"), data(6))
    assert_same_on_ranks(flat(model))


def case_delayed_quadratic() -> None:
    """w = 1: after steps 1, 0.5, 0, -0.25."""
    seen = updates(sparse(1.0, memory="delayed"), np.ones((1, 1), np.float32), lambda w: w * w / 2, 4, "delayed")
    assert [float(w) for w in np.ravel(seen)] == [1, 0.5, 0, -0.25]


def case_sgc_at_density_one_is_momentum_sgd() -> None:
    model, reference = make_model(), make_model()
    fit(model, wrap(keras.optimizers.SGD(0.1), 1.0, memory="sgc"), data(10))
    fit(reference, wrap(keras.optimizers.SGD(0.1, momentum=0.9), 1.0), data(10))
    assert_close(flat(model), flat(reference), 1e-5)
    assert_same_on_ranks(flat(model))


def case_state_survives() -> None:
    for memory in (SGC(0.5), "delayed"):
        models, (x, y) = (make_model(), make_model()), data(8)
        optimizer = wrap(keras.optimizers.SGD(0.1), memory=memory)
        fit(models[0], optimizer, (x[:32], y[:32]))
        saved, weights = optimizer.compression_state_dict(), models[0].get_weights()
        fit(models[0], optimizer, (x[32:], y[32:]))
        models[1].set_weights(weights)
        resumed = wrap(keras.optimizers.SGD(0.1), memory=memory)
        resumed.load_compression_state_dict(saved)
        fit(models[1], resumed, (x[32:], y[32:]))
        assert np.array_equal(flat(models[0]), flat(models[1]))


def case_refusals() -> None:
    for optimizer in (keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Adam()):
        with pytest.raises(ValueError, match="give the optimizer momentum=0"):
            wrap(optimizer, memory="sgc")
    os.environ["HOROVOD_ELASTIC"] = "1"
    try:
        with pytest.raises(ValueError, match="in an elastic job: a new rank would lack"):
            wrap(keras.optimizers.SGD(0.1), memory="delayed")
    finally:
        del os.environ["HOROVOD_ELASTIC"]
