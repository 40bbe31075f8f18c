"""Scenarios T16 and T17, and the Keras halves of others; the promises on Keras 3."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_scenario import (
    BATCH,
    assert_close,
    assert_same_on_ranks,
    custom_loop,
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
from hvd_sparse.schemes.low_rank import LowRank
from hvd_sparse.schemes.sketch import Sketch

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
FOLDER = Path(f"/tmp/hvd_sparse_keras_{os.environ['HOROVOD_GLOO_RENDEZVOUS_PORT']}_{RANK}")
FOLDER.mkdir(exist_ok=True)


def wrap(optimizer: Any, density: float = 0.25, **arguments: Any) -> Any:
    # The collective that is traced in half the time of the default, which has cases of its own.
    settings = {"sparsifier": "topk", "min_size": 1, "collective": "allgather"}
    names = ("sparsifier", "collective", "scheme", "memory", "warmup_steps")
    settings.update({key: arguments.pop(key) for key in names if key in arguments})
    return hvd.DistributedOptimizer(
        optimizer, compression=hvd.Compression.sparse(density=density, **settings), **arguments
    )


def schedule() -> Any:
    return keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.9)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "sgd nesterov clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.5),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(schedule(), weight_decay=0.05, global_clipnorm=0.3),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2, global_clipnorm=0.3),
    "loss scaling": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024.0),
    "loss scale factor": lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0),
}


def case_everything_of_horovod_is_here() -> None:
    import horovod.tensorflow as tf_horovod
    import horovod.tensorflow.keras as keras_horovod

    ours = {"DistributedOptimizer", "DistributedGradientTape", "Compression", "broadcast_variables"}
    for name in dir(tf_horovod):
        if not name.startswith("_") and name not in ours and not isinstance(getattr(tf_horovod, name), ModuleType):
            assert getattr(hvd_tf, name) is getattr(tf_horovod, name), name
    theirs_differs = {"DistributedOptimizer", "Compression", "callbacks", "elastic", "load_model"}
    for name in dir(keras_horovod):
        if not name.startswith("_") and name not in theirs_differs:
            assert getattr(hvd, name) is getattr(keras_horovod, name), name
    for name in dir(keras_horovod.callbacks):
        if name.endswith("Callback") or name == "BestModelCheckpoint":
            assert getattr(hvd.callbacks, name) is not getattr(keras_horovod.callbacks, name), name


def case_horovods_own_optimizer_does_nothing() -> None:
    """The reason for this front, and proof that these tests see a missing reduction."""
    import horovod.tensorflow.keras as keras_horovod

    model = make_model()
    fit(model, keras_horovod.DistributedOptimizer(keras.optimizers.SGD(0.1)), data(3))
    everybody = gathered(flat(model))
    assert np.abs(everybody[0] - everybody[1]).max() > 1e-3


def case_density_one_equals_one_process_on_the_joined_batch() -> None:
    for name, make in OPTIMIZERS.items():
        model, reference = make_model(), make_model()
        optimizer = wrap(make(), density=1.0)
        fit(model, optimizer, data(6))
        fit(reference, make(), joined_data(6), SIZE, run_eagerly=True)  # what is compared needs no trace
        assert_same_on_ranks(flat(model))
        difference = np.abs(flat(model) - flat(reference)).max()
        assert difference < 1e-6, f"{name}: {difference:.3g}"
        assert optimizer.metrics()["num_exchanges"] == (3 if name == "accumulation" else 6), name
        assert optimizer.metrics()["bytes_sent"] > 0


def case_sparse_is_equal_on_ranks_however_it_runs() -> None:
    results = []
    for settings in ({}, {"run_eagerly": True}, {"steps_per_execution": 2}):
        model = make_model()
        optimizer = wrap(keras.optimizers.SGD(0.1, momentum=0.9), collective=None)
        fit(model, optimizer, data(6), **settings)
        assert_same_on_ranks(flat(model))
        assert optimizer.metrics()["num_exchanges"] == 6
        assert optimizer.metrics()["residual_norm"] > 0
        results.append(flat(model))
    for graph in (False, True):
        model = make_model()
        optimizer = wrap(keras.optimizers.SGD(0.1, momentum=0.9), collective=None)
        custom_loop(model, optimizer, data(6), lambda tape, value, sources: tape.gradient(value, sources), graph)
        results.append(flat(model))
    for other in results[1:]:
        assert_close(results[0], other)


def case_sparsifiers_and_memories() -> None:
    for sparsifier, memory in (("threshold", "residual"), ("random_block", "momentum"), ("random_block", "none")):
        model = make_model()
        fit(model, wrap(keras.optimizers.SGD(0.05), sparsifier=sparsifier, memory=memory, collective=None), data(4))
        assert_same_on_ranks(flat(model))


def case_a_fixed_density_has_a_metrics_log() -> None:
    log = FOLDER / "fixed.{rank}.jsonl"
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.05), compression=hvd.Compression.sparse(0.25, min_size=1), metrics_log=log
    )
    fit(make_model(), optimizer, data(3))
    lines = [json.loads(line) for line in (FOLDER / f"fixed.{RANK}.jsonl").read_text().splitlines()]
    assert [line["density"] for line in lines] == [0.25] * 3


def case_schemes_without_a_sparsifier() -> None:
    """In a graph and eagerly; and a state that was saved goes on with the same bits."""
    x, y = data(6)
    half = 3 * BATCH
    in_graphs = (LowRank(1), LowRank(2, tolerance=0.9, period=2), Sketch(1, 1, 2), "static")
    for scheme, runs_eagerly in (*((scheme, False) for scheme in in_graphs), ("low_rank", True)):
        models, saved = [make_model() for _ in range(2)], None
        for model in models:
            own = {"sparsifier": None, "collective": None, "scheme": scheme}
            optimizer = wrap(keras.optimizers.SGD(0.05), density=0.1, **own)
            model.compile(optimizer, loss(), run_eagerly=runs_eagerly)
            if saved is None:
                model.fit(x[:half], y[:half], batch_size=BATCH, shuffle=False, verbose=0)
                saved, weights = optimizer.compression_state_dict(), model.get_weights()
            else:
                optimizer.load_compression_state_dict(saved)
                model.set_weights(weights)
            model.fit(x[half:], y[half:], batch_size=BATCH, shuffle=False, verbose=0)
            assert_same_on_ranks(flat(model))
        assert np.array_equal(flat(models[0]), flat(models[1]))
        assert optimizer.metrics()["residual_norm"] > 0
        assert optimizer.metrics()["bytes_sent"] < optimizer.metrics()["bytes_dense"]
    optimizer = wrap(keras.optimizers.SGD(0.05), sparsifier=None, collective=None, scheme=LowRank(2))
    optimizer.load_compression_state_dict(saved)  # of rank 4: only the residual fits
    fit(models[0], optimizer, data(2))
    assert_same_on_ranks(flat(models[0]))


def case_the_tape() -> None:
    model, reference = make_model(), make_model()
    optimizer = keras.optimizers.SGD(0.1)
    dense = hvd.Compression.sparse(density=1.0)

    def gradient_of(tape: Any, value: Any, sources: Any) -> Any:
        return hvd_tf.DistributedGradientTape(tape, compression=dense).gradient(value, sources)

    for graph in (True, False):
        custom_loop(model, optimizer, data(3), gradient_of, graph)
        fit(reference, keras.optimizers.SGD(0.1), joined_data(3), SIZE)
        assert_same_on_ranks(flat(model))
        assert_close(flat(model), flat(reference))


def case_one_trace_whatever_the_density() -> None:
    traces, densities = [], []

    def counted(y: Any, logits: Any) -> Any:
        traces.append(1)
        return keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            densities.append(self.model.optimizer.metrics()["density"])

    x, y = data(12)
    dataset = tf.data.Dataset.from_tensor_slices((x[:-3], y[:-3])).batch(BATCH, drop_remainder=True)
    model = make_model()
    model.compile(keras.optimizers.SGD(0.1), counted)
    model.fit(dataset, epochs=2, verbose=0)
    plain = len(traces)  # the train step, and Keras' look at the shapes
    model = make_model()
    model.compile(wrap(keras.optimizers.SGD(0.1), density=0.05, warmup_steps=8), counted)
    model.fit(dataset, epochs=2, verbose=0, callbacks=[Watch()])
    assert len(traces) == 2 * plain, (len(traces), plain)
    assert len(set(densities)) >= 4
    assert densities[-1] == 0.05
    assert_same_on_ranks(flat(model))


def case_the_default_adapts() -> None:
    """In one graph with one thread for its operations: messages between ranks must not wait for another."""
    model = make_model()
    ladder = hvd.Compression.adaptive(ladder=(0.1, 0.01), period=6, min_size=1)
    log = FOLDER / "metrics.jsonl"
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), compression=ladder, metrics_log=log)
    assert optimizer.metrics()["bandwidth_bytes_per_second"] is None
    fit(model, optimizer, data(24))
    metrics = optimizer.metrics()
    assert metrics["bandwidth_bytes_per_second"] > 1e6
    assert 0 < metrics["latency_seconds"] < 1
    assert metrics["compute_seconds"] > 0
    assert metrics["reason"]
    assert log.exists() == (RANK == 0)
    if RANK == 0:
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(24))
        assert lines[-1]["reason"] == metrics["reason"]
        assert lines[-1]["step_seconds"] > 0
    assert len(set(gathered(np.float64([metrics["density"]])).ravel())) == 1
    assert_same_on_ranks(flat(model))
    with pytest.raises((ValueError, hvd.HvdSparseError), match="gain_floor"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=hvd.Compression.adaptive(gain_floor=0.5))


def case_t3_embeddings() -> None:
    for indices, choice in ((np.arange(16), "rows"), (np.arange(1000), "dense")):
        tables, chosen = [], []
        for as_dense in (False, True):
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.layers.Embedding(1000, 4), keras.layers.Flatten(), keras.layers.Dense(1)])
            optimizer = wrap(keras.optimizers.Adam(0.1), sparse_as_dense=as_dense)
            model.compile(optimizer, "mse")
            looked_up = (indices + 3 * RANK) % 1000
            model.fit(looked_up[np.newaxis], np.ones((1, 1)), batch_size=1, epochs=2, verbose=0)
            tables.append(model.layers[0].embeddings.numpy())
            chosen += optimizer.metrics()["sparse_gradients"].values()
            assert_same_on_ranks(tables[-1].ravel())
        assert chosen == [choice, "dense"]
        assert_close(tables[0], tables[1])


def case_t5_tiny_gradients_come_back() -> None:
    variable = keras.Variable(np.zeros((2, 2), np.float32))
    optimizer = wrap(keras.optimizers.SGD(1.0))
    optimizer.build([variable])
    for step in range(3):
        gradient = [[1e6, 1e-9], [0, 0]] if step == 0 else np.zeros((2, 2))
        optimizer.apply([tf.constant(gradient, tf.float32)])
        assert np.isfinite(variable.numpy()).all()
    assert_close(variable.numpy() / [[1e6, 1e-9], [1, 1]], np.array([[-1.0, -1], [0, 0]]))


def case_t6_dtypes() -> None:
    for dtype in ("bfloat16", "float16", "mixed_bfloat16", "mixed_float16"):
        model = make_model(dtype=keras.DTypePolicy(dtype))
        optimizer = wrap(keras.optimizers.SGD(0.01))
        history = fit(model, optimizer, data(4))
        assert np.isfinite(history.history["loss"][0])
        assert_same_on_ranks(flat(model))
        assert model.trainable_variables[0].dtype == (dtype if "mixed" not in dtype else "float32")
        assert optimizer.metrics()["num_exchanges"] == 4, dtype


def case_t11_broadcast_then_train() -> None:
    model = make_model(seed=RANK)
    model.layers[0].trainable = False
    optimizer = wrap(keras.optimizers.AdamW(0.01, weight_decay=0.1))
    model.compile(optimizer, loss())
    x, y = data(4)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(x, y, batch_size=BATCH, shuffle=False, epochs=2, verbose=0, callbacks=[callback])
    assert_same_on_ranks(flat(model))
    before = flat(model)
    kept = optimizer.compression_state_dict()["memory"]
    hvd.broadcast_model(model, root_rank=0)
    assert np.array_equal(before, flat(model))
    after = optimizer.compression_state_dict()["memory"]
    residual = np.concatenate([arrays["residual"] for arrays in after.values() if arrays])
    assert all(np.array_equal(kept[n][k], after[n][k]) for n in kept for k in kept[n])
    everybody = gathered(residual)
    assert not np.array_equal(everybody[0], everybody[1])


def case_broadcast_of_odd_dtypes() -> None:
    variables = [
        keras.Variable(np.full((2,), RANK + 1), dtype=dtype, trainable=False)
        for dtype in ("bfloat16", "float16", "float32", "float64", "int32", "int64", "uint8", "uint32", "bool")
    ]
    hvd.broadcast_variables(variables, SIZE - 1)
    for variable in variables:
        expected = 1 if variable.dtype == "bool" else SIZE
        assert np.all(np.asarray(variable.numpy(), np.float64) == expected), variable.dtype


def case_t12_state_resumes_bit_for_bit() -> None:
    x, y = data(8)
    half = 4 * BATCH

    def go_on(model: Any, start: int, stop: int) -> None:
        model.fit(x[start:stop], y[start:stop], batch_size=BATCH, shuffle=False, verbose=0)

    model = make_model()
    optimizer = wrap(keras.optimizers.Adam(0.01))
    model.compile(optimizer, loss())
    go_on(model, 0, half)
    model.save(FOLDER / "m.keras")
    saved = optimizer.compression_state_dict()
    go_on(model, half, 2 * half)
    again = keras.models.load_model(FOLDER / "m.keras")
    assert type(again.optimizer) is keras.optimizers.Adam
    wrapped = wrap(again.optimizer)
    wrapped.load_compression_state_dict(saved)
    go_on(again, half, 2 * half)
    assert np.array_equal(flat(model), flat(again))
    assert wrapped.metrics()["num_exchanges"] == 8
    saved["rank"] = RANK + 1
    wrapped.load_compression_state_dict(saved)
    assert wrapped.metrics()["residual_norm"] == 0


def case_t14_global_norm_is_equal() -> None:
    model = make_model()
    fit(model, wrap(keras.optimizers.SGD(0.1, global_clipnorm=0.01)), data(4))
    assert_same_on_ranks(flat(model))


def case_t15_accumulation() -> None:
    for averaged in (False, True):
        model, reference = make_model(), make_model()
        optimizer = wrap(
            keras.optimizers.SGD(0.1), density=1.0, backward_passes_per_step=2, average_aggregated_gradients=averaged
        )
        fit(model, optimizer, data(6))
        rate = 0.1 if averaged else 0.2
        fit(reference, keras.optimizers.SGD(rate, gradient_accumulation_steps=2), joined_data(6), SIZE)
        assert_close(flat(model), flat(reference))
        assert optimizer.metrics()["num_exchanges"] == 3


def case_t16_schedule_save_and_variables() -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    optimizer = wrap(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)), density=1.0)
    model.compile(optimizer, "mse")
    x, _ = data(4)
    model.fit(x, x.sum(1), batch_size=BATCH, verbose=0)
    assert optimizer.metrics()["num_exchanges"] == 4
    assert len(optimizer.variables) == 1  # the iteration; a call, optimizer.variables(), fails as in plain Keras
    assert isinstance(optimizer, keras.optimizers.SGD)
    model.save(FOLDER / "t16.keras")
    if RANK == 0:
        import subprocess
        import sys

        code = (
            f"import keras, sys; m = keras.models.load_model({str(FOLDER / 't16.keras')!r}); "
            f"assert not {{'hvd_sparse', 'horovod'}} & set(sys.modules); print(type(m.optimizer).__name__)"
        )
        clean = {key: value for key, value in os.environ.items() if not key.startswith("HOROVOD")}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean)
        assert done.stdout.strip() == "SGD", done.stderr
    assert_same_on_ranks(flat(model))


def case_t17_loss_scaling_with_infinity_on_one_rank() -> None:
    def poisoned(y: Any, logits: Any) -> Any:
        labels = tf.where(y == 7, tf.zeros_like(y), y)
        value = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        return value * tf.where(tf.reduce_any(y == 7), np.inf, 1.0)

    def scaling(inner: Any) -> Any:
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0)

    orders: dict[str, Callable[[], Any]] = {
        "ours outside": lambda: wrap(scaling(keras.optimizers.SGD(0.1))),
        "ours inside": lambda: scaling(wrap(keras.optimizers.SGD(0.1))),
        "ours inside, accumulating": lambda: scaling(wrap(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))),
    }
    x, y = data(2)
    bad = y.copy()
    bad[0] = 7 if RANK == 1 else y[0]
    for name, make in orders.items():
        for eager in (False, True):
            model, optimizer = make_model(), make()
            model.compile(optimizer, poisoned, run_eagerly=eager)
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
            inner = optimizer.inner_optimizer
            before, kept = flat(model), inner.metrics()["residual_norm"]
            assert kept > 0, name
            model.fit(x[:BATCH], bad[:BATCH], batch_size=BATCH, verbose=0)
            assert np.array_equal(before, flat(model)), name
            assert float(optimizer.dynamic_scale.numpy()) == 512.0, name
            assert inner.metrics()["residual_norm"] == kept, name
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
            assert not np.array_equal(before, flat(model)), name
            assert_same_on_ranks(flat(model))
            assert optimizer.metrics()["num_exchanges"] == (2 if "accumulating" in name else 4), name


def case_t18_a_layer_that_only_one_rank_uses() -> None:
    keras.utils.set_random_seed(0)
    main, extra, idle = (keras.layers.Dense(3) for _ in range(3))
    for layer in (main, extra, idle):
        layer.build((None, 8))
    variables = [v for layer in (main, extra, idle) for v in layer.trainable_variables]
    optimizer = wrap(keras.optimizers.AdamW(0.05, weight_decay=0.1))
    loss_of, (x, y) = loss(), data(5)
    before = idle.kernel.numpy(), extra.kernel.numpy()

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            logits = main(x) + extra(x) if RANK == 0 else main(x)
            value = loss_of(y, logits)
        optimizer.apply(tape.gradient(value, [v.value for v in variables]), variables)

    optimizer.build(variables)
    for start in range(0, len(x), BATCH):
        step(tf.constant(x[start : start + BATCH]), tf.constant(y[start : start + BATCH]))
    assert np.array_equal(before[0], idle.kernel.numpy())
    assert not np.array_equal(before[1], extra.kernel.numpy())
    assert_same_on_ranks(np.concatenate([v.numpy().ravel() for v in variables]))


def case_wrapping_after_compile_and_after_fit() -> None:
    model = make_model()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss())
    x, y = data(2)
    hvd.broadcast_model(model)
    wrap(model.optimizer)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    assert_same_on_ranks(flat(model))
    model = make_model()
    fit(model, keras.optimizers.SGD(0.1, momentum=0.9), data(2, rank=0))
    optimizer = wrap(model.optimizer)
    assert optimizer is model.optimizer
    model.make_train_function(force=True)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    assert optimizer.metrics()["num_exchanges"] == 2
    assert_same_on_ranks(flat(model))
    optimizer.close()
    assert type(optimizer) is keras.optimizers.SGD


def case_callbacks() -> None:
    model = make_model(seed=RANK)
    optimizer = wrap(keras.optimizers.SGD(0.4, momentum=0.9))
    model.compile(optimizer, loss(), metrics=["accuracy"])
    x, y = data(4)
    rates: list[float] = []

    class Rates(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            rates.append(float(self.model.optimizer.learning_rate.numpy()))

    best = hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath=FOLDER / "best.keras")
    history = model.fit(
        x, y, batch_size=BATCH, epochs=3, verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=1),
            Rates(), best, hvd.callbacks.MetricsCallback(),
        ],
    ).history  # fmt: skip
    assert_same_on_ranks(np.array(history["loss"] + history["accuracy"]))
    expected = [0.4 * (1 + (SIZE - 1) * min(1.0, (i + 1) / 8)) / SIZE for i in range(8)]
    assert np.allclose(rates[:8], expected)
    assert np.allclose(rates[8:], 0.4)
    assert np.allclose(history["lr"], [rates[3], rates[7], 0.4])
    assert history["hvd_sparse/num_exchanges"] == [4, 8, 12]
    assert (FOLDER / "best.keras").exists()
    with pytest.raises(ValueError, match="filepath"):
        model.fit(x, y, verbose=0, callbacks=[hvd.callbacks.BestModelCheckpoint()])
    schedule_callback = hvd.callbacks.LearningRateScheduleCallback(0.4, lambda epoch: 0.5**epoch, start_epoch=1)
    model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0, callbacks=[schedule_callback])
    assert abs(float(optimizer.learning_rate.numpy()) - 0.1) < 1e-6
    model.compile(wrap(keras.optimizers.SGD(schedule())), loss())
    with pytest.raises(ValueError, match="LearningRateSchedule"):
        model.fit(x, y, verbose=0, callbacks=[hvd.callbacks.LearningRateWarmupCallback(0.1, 1)])


def case_uneven_numbers_of_batches_are_refused() -> None:
    model = make_model()
    model.compile(wrap(keras.optimizers.SGD(0.1)), loss())
    x, y = data(3 + RANK)
    with pytest.raises(ValueError, match="different numbers of batches"):
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])


def case_xla_is_switched_off_or_refused() -> None:
    x, y = data(2)
    model = make_model()
    model.compile(wrap(keras.optimizers.SGD(0.1)), loss(), jit_compile=True)
    with pytest.raises(ValueError, match="XLA"):
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    with pytest.raises(RuntimeError, match="jit_compile=False"):
        model.fit(x, y, batch_size=BATCH, verbose=0)
    model = make_model()
    model.compile(wrap(keras.optimizers.SGD(0.1)), loss())
    model.jit_compile = True  # what Keras' "auto" does where a GPU is visible
    records: list[Any] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("hvd_sparse").addHandler(handler)
    logging.getLogger("hvd_sparse").setLevel(logging.INFO)
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    logging.getLogger("hvd_sparse").removeHandler(handler)
    assert len([record for record in records if "XLA" in record.getMessage()]) == 1
    assert_same_on_ranks(flat(model))


def case_elastic_state() -> None:
    some = SimpleNamespace(process_set_id=1, included=lambda: True, rank=hvd.rank, size=hvd.size)
    os.environ["HOROVOD_ELASTIC"] = "1"
    try:
        with pytest.raises(ValueError, match="`process_set` cannot be used with elastic training"):
            wrap(keras.optimizers.SGD(0.1), process_set=some)
        optimizer, without_state = wrap(keras.optimizers.Adam(0.01)), wrap(keras.optimizers.SGD(0.1))
        tape = hvd_tf.DistributedGradientTape(tf.GradientTape(), key="elastic")
    finally:
        del os.environ["HOROVOD_ELASTIC"]
    variable = tf.Variable(1.0)
    for exchange in (lambda: without_state.apply([variable], [variable]), lambda: tape.gradient(variable, [variable])):
        with tape, pytest.raises(ValueError, match="Elastic training needs a Keras 3 optimizer"):
            exchange()
    model = make_model(seed=RANK)  # a new rank has another one
    model.compile(optimizer, loss())
    state = hvd.elastic.KerasState(model, batch=RANK, epoch=0)
    new = optimizer.compression_state_dict()
    assert RANK == 0 or state.batch == RANK
    state.sync()
    assert state.batch == 0
    assert_same_on_ranks(flat(model))
    x, y = data(3)

    def train(batches: int) -> None:
        model.fit(x, y, BATCH, epochs=1, steps_per_epoch=batches, shuffle=False, verbose=0)

    train(3)
    state.commit()
    committed, owed = flat(model), optimizer.metrics()["residual_norm"]
    old = model.train_function
    train(2)
    state.restore()  # as after the death of a rank
    assert optimizer.metrics()["residual_norm"] == owed > 0
    state.reset()
    with pytest.raises(tf.errors.InvalidArgumentError, match="Ranks have come or gone since"):
        old(iter(tf.data.Dataset.from_tensors((x[:BATCH], y[:BATCH]))))
    if RANK == SIZE - 1:  # as if it had joined
        optimizer.load_compression_state_dict(new)
    state.sync()
    assert np.array_equal(flat(model), committed)
    assert optimizer.metrics()["residual_norm"] == (owed if RANK < SIZE - 1 else 0)
    assert optimizer.compression_state_dict()["num_exchanges"] == 3
    train(2)
    assert model.train_function is not old
    assert_same_on_ranks(flat(model))
    assert optimizer.metrics()["num_exchanges"] == 5
    for graph in (True, False):
        state.reset()  # nobody has joined: without sync
        custom_loop(model, optimizer, (x, y), lambda tape, *what: tape.gradient(*what), graph)
    assert_same_on_ranks(flat(model))
    assert optimizer.metrics()["num_exchanges"] == 11


def case_refused_on_every_rank() -> None:
    with pytest.raises(hvd.HvdSparseError, match=r"controller.*rank 1"):
        wrap(keras.optimizers.SGD(0.1), density=0.1 + 0.1 * RANK)
    with pytest.raises(ValueError if RANK == 1 else hvd.HvdSparseError, match="backward_passes_per_step"):
        wrap(keras.optimizers.SGD(0.1), backward_passes_per_step=1 - RANK)
    wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: wrap(keras.optimizers.SGD(0.1), op=hvd_tf.Adasum), ValueError, "Adasum"),
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=0.1), TypeError, "compression"),
        (lambda: wrap(make_model()), TypeError, "optimizer"),
        (lambda: wrap(keras.optimizers.SGD(0.1, momentum=0.9), memory="momentum"), ValueError, "momentum=0"),
    ]
    for call, kind, word in wrong:
        with pytest.raises(kind, match=word):
            call()
    optimizer = wrap(keras.optimizers.SGD(0.1))
    assert wrap(optimizer) is optimizer
    with pytest.raises(ValueError, match="wrapped already"):
        wrap(optimizer, density=0.5)


def case_compression_none_and_fp16_are_dense() -> None:
    reference = make_model()
    fit(reference, keras.optimizers.SGD(0.1), joined_data(4), SIZE)
    for compression, tolerance in ((hvd.Compression.none, 1e-6), (hvd.Compression.fp16, 2e-3)):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression)
        fit(model, optimizer, data(4))
        assert_same_on_ranks(flat(model))
        assert_close(flat(model), flat(reference), tolerance)
    assert optimizer.metrics()["bytes_sent"] * 2 == optimizer.metrics()["bytes_dense"]
