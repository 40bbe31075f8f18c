"""Periodic averaging in `model.fit` and in custom loops. For 2 ranks."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_scenario import (
    BATCH,
    assert_close,
    assert_same_on_ranks,
    data,
    fit,
    flat,
    gathered,
    joined_data,
    loss,
    make_model,
)

import hvd_sparse.tensorflow as hvd_tf
import hvd_sparse.tensorflow.keras as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def sgd() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def train(model: Any, samples: Any, callbacks: Any = (), optimizer: Any = None, **settings: Any) -> Any:
    """`fit` with a callback, which is returned."""
    averaging = hvd.PeriodicAveragingCallback(**settings)
    if not model.compiled:
        model.compile(optimizer or sgd(), loss())
    model.fit(*samples, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[*callbacks, averaging])
    return averaging


def reference(num_batches: int, every: int, outer: Any) -> Any:
    """DiLoCo of all ranks in this process."""
    models = [make_model() for _ in range(SIZE)]
    for model in models:
        model.compile(sgd(), loss())
    anchor, velocity = flat(models[0]), 0.0
    for start in range(0, num_batches, every):
        for rank, model in enumerate(models):
            x, y = (part[start * BATCH : (start + every) * BATCH] for part in data(num_batches, rank))
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        delta = anchor - sum(flat(model) for model in models) / SIZE
        velocity = outer.momentum * velocity + delta
        anchor = anchor - outer.lr * (delta + outer.momentum * velocity)
        for model in models:
            parts = np.split(anchor, np.cumsum([np.size(v) for v in model.trainable_variables])[:-1])
            for variable, part in zip(model.trainable_variables, parts):
                variable.assign(part.reshape(variable.shape))
    return anchor


class Record(keras.callbacks.Callback):
    """The weights after every batch; put it behind the averaging."""

    def __init__(self, pause_seconds: float = 0.0) -> None:
        super().__init__()
        self.after: list[Any] = []
        self.pause_seconds = pause_seconds

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(self.pause_seconds)
        self.after.append(flat(self.model))


def case_fit_is_local_sgd() -> None:
    model, outer = make_model(seed=RANK), hvd.OuterSGD()  # rank 0's weights count
    averaging = train(model, data(6), every_steps=3, outer=outer)
    assert_same_on_ranks(flat(model))
    assert_close(flat(model), reference(6, 3, outer))
    metrics = averaging.metrics()
    assert (metrics["num_rounds"], metrics["num_steps"]) == (3, 6), "and that of finish"
    assert metrics["bytes_sent"] == 3 * 4 * (len(flat(model)) + 6)
    assert metrics["reason"] == "every 3 steps"


def case_uneven_batches() -> None:
    model, record = make_model(), Record()
    averaging = train(model, data((5, 9)[RANK]), every_steps=2, callbacks=[record])
    assert_same_on_ranks(flat(model))
    assert averaging.metrics()["num_steps"] == (5, 9)[RANK]
    everybody = gathered(record.after[2])
    assert np.abs(everybody[0] - everybody[1]).max() > 1e-3, "alone between rounds"


def case_every_seconds_with_a_slow_rank() -> None:
    model = make_model()
    num_batches = (60, 12)[RANK]
    record = Record(pause_seconds=(0.01, 0.05)[RANK])
    averaging = train(model, data(num_batches), every_seconds=0.2, callbacks=[record])
    assert_same_on_ranks(flat(model))
    rounds = gathered(np.float64([averaging.metrics()["num_rounds"]]))[:, 0]
    assert rounds[0] == rounds[1] >= 3


def case_warmup_of_sgd_is_gradient_averaging() -> None:
    model, joined = make_model(), make_model()
    train(model, data(4), every_steps=100, warmup_steps=4)
    fit(joined, sgd(), joined_data(4), SIZE)
    assert_close(flat(model), flat(joined))


def case_buffers() -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.layers.Input((8,)), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(3)]
    )
    start = model.get_weights()
    for policy in ("local", "average", "rank0"):
        model.set_weights(start)
        train(model, data(2), every_steps=2, buffers=policy)
        everybody = gathered(np.concatenate([variable.numpy() for variable in model.non_trainable_weights]))
        assert np.array_equal(everybody[0], everybody[1]) == (policy != "local"), policy
        assert_same_on_ranks(flat(model))


def case_custom_loop() -> None:
    model, optimizer, loss_of = make_model(), sgd(), loss()
    optimizer.build(model.trainable_variables)
    averaging = hvd_tf.PeriodicAveraging(model.trainable_variables, every_steps=2, weights="samples")

    @tf.function
    def train_step(x: Any, y: Any, scale: Any) -> None:
        with tf.GradientTape() as tape:
            value = loss_of(y, model(x, training=True)) * scale
        optimizer.apply_gradients(zip(tape.gradient(value, model.trainable_variables), model.trainable_variables))

    x, y = data((8, 4)[RANK])
    took_place = []
    for start in range(0, len(x), BATCH):
        is_lost = RANK == 1 and start == 2 * BATCH
        train_step(x[start : start + BATCH], y[start : start + BATCH], tf.constant(np.nan if is_lost else 1.0))
        took_place.append(averaging.step(num_samples=BATCH))
        if took_place[-1]:
            assert np.isfinite(flat(model)).all()
    averaging.finish()
    assert took_place == [False, True] * (4, 2)[RANK]
    assert np.isfinite(flat(model)).all()
    assert_same_on_ranks(flat(model))
    with pytest.raises(ValueError, match="needs to know them"):
        averaging.step()
    with pytest.raises(RuntimeError, match=r"outside of tf\.function"):
        tf.function(averaging.step, autograph=False)()


def case_weights_and_dtypes() -> None:
    for dtype in (tf.float32, tf.float16, tf.float64):
        variable = tf.Variable(tf.fill([3, 2], tf.constant(5.0, dtype)))
        averaging = hvd.PeriodicAveraging([variable], every_steps=1, weights="samples")
        variable.assign(tf.fill([3, 2], tf.constant(RANK, dtype)))
        assert averaging.step(num_samples=10 * (1 + 2 * RANK))
        assert variable.dtype == dtype
        assert_close(variable.numpy(), np.full((3, 2), 0.75))


def case_errors() -> None:
    variables = make_model().trainable_variables
    for settings, error, text in (
        ({}, ValueError, "`every_steps` must be given, or `every_seconds`, and not both"),
        ({"every_steps": 1, "weights": "rows"}, ValueError, "`weights` must be one of"),
        ({"every_steps": 1, "outer": 0.7}, TypeError, "`outer` must be OuterSGD"),
    ):
        with pytest.raises(error, match=text):
            hvd.PeriodicAveraging(variables, **settings)
        if RANK == 1:
            with pytest.raises(error, match=text):
                hvd.PeriodicAveraging(variables, **settings)
        else:
            with pytest.raises(hvd.HvdSparseError, match=f"rank 1: {text}"):
                hvd.PeriodicAveraging(variables, every_steps=1)
    with pytest.raises(hvd.HvdSparseError, match="interval: rank 0"):
        hvd.PeriodicAveraging(variables, every_steps=1 + RANK)
    with pytest.raises(hvd.HvdSparseError, match="parameter 0: rank 0"):
        hvd.PeriodicAveraging(variables[RANK:], every_steps=1)
    with pytest.raises(ValueError, match="`variables` must be of floating-point dtypes"):
        hvd.PeriodicAveraging([tf.Variable(1)], every_steps=1)
    with pytest.raises(ValueError, match="`weights` must be 'uniform' or 'steps'"):
        train(make_model(), data(1), every_steps=1, weights="samples")
    with pytest.raises(ValueError, match="`model` must be compiled with a plain optimizer"):
        train(make_model(), data(1), every_steps=1, optimizer=hvd.DistributedOptimizer(sgd()))
    synchronised = keras.Sequential([keras.layers.Input((8,)), keras.layers.BatchNormalization(synchronized=True)])
    with pytest.raises(ValueError, match="`model` must have no BatchNormalization that is synchronised"):
        train(synchronised, data(1), every_steps=1)
    with pytest.raises(ValueError, match="`model` must have its variables"):
        train(keras.Sequential([keras.layers.Dense(3)]), data(1), every_steps=1)
