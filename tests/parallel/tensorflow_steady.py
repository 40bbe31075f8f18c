"""The TensorFlow front over many steps: nothing is negotiated twice, whatever the order of sets on the ranks."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import own_hash_seed  # noqa: F401  (the first import)
import tensorflow as tf
from cache_cases import DENSITY, NUM_STEPS, SHAPES, UnevenGather, complaints, configurations, gradients
from timeline import ask_for_timeline, read_timeline

import hvd_sparse.tensorflow as hvd
from hvd_sparse.config import Config, sparse_config

TIMELINE = ask_for_timeline(sys.argv[2])
hvd.init()
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)
RANK, SIZE = hvd.rank(), hvd.size()
NAMES = ("large", "bias")  # one bucket that is sparse, one that is not: tracing takes a second for each exchange


def _train_on(configs: dict[str, Config]) -> dict[str, str]:
    """Train through every kind of gradient, in one graph; what the names of each one's operations start with."""
    variables = {key: {name: tf.Variable(tf.zeros(SHAPES[name])) for name in NAMES} for key in configs}
    tapes: dict[str, Any] = {}

    @tf.function(autograph=False)
    def train_step(given: dict[str, Any]) -> None:
        for key, config in configs.items():
            own = variables[key]
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(own[name] * given[name]) for name in NAMES])
            tapes[key] = hvd.DistributedGradientTape(tape, compression=config, key=key)
            for variable, average in zip(own.values(), tapes[key].gradient(loss, list(own.values()))):
                variable.assign_sub(tf.where(tf.math.is_finite(average), average, 0.0))

    for step in range(NUM_STEPS):
        given = gradients(step, RANK)
        train_step({name: tf.constant(given[name]) for name in NAMES})
    for key, tape in tapes.items():
        assert tape.metrics()["num_exchanges"] == NUM_STEPS
        assert tape.metrics()["skipped_steps"] > 0
        saved = tape.averager.save()
        tape.averager.load(saved)
        np.testing.assert_equal(tape.averager.save()["scheme"], saved["scheme"])
        flat = np.concatenate([variable.numpy().ravel() for variable in variables[key].values()])
        assert np.abs(flat).max() > 0
        digests = hvd.allgather_object(flat.tobytes(), name=f"weights.{key}")
        assert len(set(digests)) == 1, key
    return {key: tape.averager.driver.prefix for key, tape in tapes.items()}


def case_nothing_is_negotiated_twice() -> None:
    assert len(set(hvd.allgather_object(hash("bias"), name="hashes"))) == SIZE  # own_hash_seed has worked
    control = sparse_config(DENSITY, collective=UnevenGather(), sparsifier="topk", min_size=1)
    prefixes = _train_on({**configurations(every_pair=False), "control": control})
    hvd.stop_timeline()
    if RANK > 0:
        return
    uses = read_timeline(TIMELINE)
    found = {name: complaints(uses, prefix, len(NAMES)) for name, prefix in prefixes.items()}
    seen = found.pop("control")  # must be seen, or nothing of the others says anything
    assert len(found) >= 7
    assert not any(found.values()), "\n".join(f"{name}: {what}" for name, what in found.items() if what)
    assert len(seen) == 1, seen
    assert f"uneven: Use(ran={NUM_STEPS}, negotiated={NUM_STEPS})" in seen[0], seen


def case_buckets_without_gradients_on_one_rank() -> None:
    """There they are equal constants, which TensorFlow would exchange once, or as one, and keep."""
    shape = (4, 5)
    for settings in ({"min_size": 100}, {"memory": "none"}):  # dense, sparse
        variables = {name: tf.Variable(tf.zeros(shape)) for name in ("both", "first", "second", "constant")}
        compression = hvd.Compression.sparse(
            0.5, **{"min_size": 1, "bucket_bytes": 80, "sparsifier": "topk", **settings}
        )

        @tf.function(autograph=False)
        def train_step(
            given: dict[str, Any], variables: dict[str, Any] = variables, compression: Any = compression
        ) -> list[Any]:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variables["both"] * given["both"])
                if RANK == 0:
                    loss += tf.reduce_sum(variables["first"] * given["first"] + variables["constant"])
                    loss += tf.reduce_sum(variables["second"] * given["second"])
            tape = hvd.DistributedGradientTape(tape, compression=compression, op=hvd.Sum, key=str(compression))
            return tape.gradient(loss, list(variables.values()))

        for step in range(3):
            given = []  # of every rank: the entries that are selected are the whole gradient
            for rank in range(SIZE):
                random = np.random.default_rng(10 * step + rank)
                place = random.integers(0, 20, 3)
                given.append({name: _one_hot(place[i], shape) for i, name in enumerate(("both", "first", "second"))})
            found = train_step({name: tf.constant(array) for name, array in given[RANK].items()})
            np.testing.assert_array_equal(found[0], sum(one["both"] for one in given))
            np.testing.assert_array_equal(found[1], given[0]["first"])
            np.testing.assert_array_equal(found[2], given[0]["second"])


def _one_hot(place: int, shape: tuple[int, int]) -> np.ndarray:
    array = np.zeros(shape, np.float32)
    array.reshape(-1)[place] = 1 + place
    return array
