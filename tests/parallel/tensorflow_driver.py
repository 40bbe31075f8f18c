"""The TensorFlow driver in compiled functions: the numbers of the NumPy oracle, whatever the order of starts."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

from hvd_sparse.collectives.requests import AllGather, AllReduce, AllToAll, Broadcast
from hvd_sparse.config import sparse_config
from hvd_sparse.drivers.horovod_tensorflow import HorovodTensorFlow
from hvd_sparse.drivers.simulate import Simulator
from hvd_sparse.exchange import Exchange
from hvd_sparse.memories.none import NoMemory
from hvd_sparse.memories.residual import Residual
from hvd_sparse.ops.numpy import NumpyOps
from hvd_sparse.ops.tensorflow import TensorFlowOps
from hvd_sparse.schemes.dense import Dense
from hvd_sparse.schemes.ok_topk import OkTopk
from hvd_sparse.sparsifiers.leader import Leader
from hvd_sparse.types import Program, Spec, World

hvd.init()
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)
RANK, SIZE = hvd.rank(), hvd.size()
OPS = TensorFlowOps()
NUM_STEPS, NAN_STEP = 5, 3

Gradients = dict[str, Any]


def _exchanges() -> dict[str, tuple[Exchange, int]]:
    """Exchange and k of each bucket."""
    threshold = sparse_config(sparsifier="threshold").scheme()
    block = sparse_config(sparsifier="random_block").scheme()
    spread, sliced = (sparse_config(sparsifier=name).scheme() for name in ("random_k", "exclusive"))
    led, loudest = (sparse_config(sparsifier=Leader(mode)).scheme() for mode in ("star", "var"))
    return {
        "large": (Exchange(Spec("large", 40_001), threshold, Residual()), 4000),
        "block": (Exchange(Spec("block", 1003), block, Residual()), 100),
        "spread": (Exchange(Spec("spread", 1003), spread, Residual()), 100),
        "sliced": (Exchange(Spec("sliced", 1003), sliced, Residual()), 100),
        "led": (Exchange(Spec("led", 501), led, Residual()), 50),
        "loudest": (Exchange(Spec("loudest", 501), loudest, Residual()), 50),
        "small": (Exchange(Spec("small", 77), Dense(), NoMemory()), 77),
    }


def _exchanges_that_follow_the_data() -> dict[str, tuple[Exchange, int]]:
    """How much a rank sends depends on the data, or on its place."""
    tree = sparse_config(sparsifier="topk", collective="gtopk").scheme()
    return {
        "varying": (Exchange(Spec("varying", 40_001), OkTopk(threshold_period=3), Residual()), 4000),
        "tree": (Exchange(Spec("tree", 501), tree, Residual()), 50),
    }


def _gradients(exchanges: dict[str, tuple[Exchange, int]], step: int, rank: int) -> Gradients:
    """Every rank knows everybody's. One of them is not finite."""
    rng = np.random.default_rng(1000 * step + rank)
    gradients = {name: rng.normal(size=e.spec.size).astype(np.float32) for name, (e, _) in exchanges.items()}
    if (step, rank) == (NAN_STEP, SIZE - 1):
        for gradient in gradients.values():
            gradient[5] = np.nan
    return gradients


def _variables(state: Any) -> Any:
    kinds = {float: tf.float64, int: tf.int32}
    return tf.nest.map_structure(lambda value: tf.Variable(tf.convert_to_tensor(value, kinds.get(type(value)))), state)


def _summed(arrays: Gradients) -> Gradients:
    """The sum over ranks: a function of Horovod alone."""

    @tf.function(autograph=False)
    def total() -> Gradients:
        settings = {"op": hvd.Sum, "ignore_name_scope": True}
        return {name: hvd.allreduce(tf.constant(a), name=f"check.{name}", **settings) for name, a in arrays.items()}

    return {name: array.numpy() for name, array in total().items()}


def case_compiled_steps_equal_the_oracle() -> None:
    states, num_bytes, num_words = _compiled_steps(_exchanges(), "driver")
    assert num_bytes == 4 * num_words  # known before the graph runs
    assert np.count_nonzero(_residual(states["large"])) > 30_000  # or conservation would be trivial


def case_messages_that_follow_the_data() -> None:
    states, num_bytes, _ = _compiled_steps(_exchanges_that_follow_the_data(), "varying")
    assert tf.is_tensor(num_bytes)
    assert np.count_nonzero(_residual(states["varying"])) > 30_000


def _compiled_steps(exchanges: dict[str, tuple[Exchange, int]], prefix: str) -> tuple[dict[str, Any], Any, float]:
    """Steps in one graph, compared with the oracle's: the states after them, bytes and words of the last."""
    driver = HorovodTensorFlow(prefix, {"global": hvd.global_process_set})
    states = {name: _variables(exchange.init(OPS)) for name, (exchange, _) in exchanges.items()}
    exchange_count = tf.Variable(0, dtype=tf.int64)
    num_traces, num_bytes = 0, 0.0

    @tf.function(autograph=False)
    def step(gradients: Gradients) -> tuple[Gradients, Gradients]:
        nonlocal num_traces, num_bytes
        num_traces += 1
        world = driver.world(exchange_count)
        for name in sorted(exchanges, reverse=RANK % 2 == 1):  # ranks start in different orders
            exchange, k = exchanges[name]
            driver.start(name, exchange.step(OPS, world, gradients[name], k, states[name]))
        results = driver.finish()
        num_bytes = driver.num_bytes
        for name, (_, state) in results.items():
            tf.nest.map_structure(lambda variable, value: variable.assign(value), states[name], state)
        exchange_count.assign_add(1)
        reduced = {name: result[0] for name, result in results.items()}
        return {name: r.total for name, r in reduced.items()}, {name: r.finite for name, r in reduced.items()}

    ops = NumpyOps()
    oracle = [{name: exchange.init(ops) for name, (exchange, _) in exchanges.items()} for _ in range(SIZE)]
    for number in range(NUM_STEPS):
        before = {name: _residual(state) for name, state in states.items()}
        gradients = _gradients(exchanges, number, RANK)
        totals, finite = step({name: tf.constant(gradient) for name, gradient in gradients.items()})
        simulator = Simulator(SIZE)
        for name, (exchange, k) in exchanges.items():
            programs = [
                exchange.step(ops, World(r, SIZE, number), _gradients(exchanges, number, r)[name], k, oracle[r][name])
                for r in range(SIZE)
            ]
            for r, (reduced, state) in enumerate(simulator.run(programs)):
                oracle[r][name] = state
                if r == RANK:
                    assert bool(finite[name]) == bool(reduced.finite) == (number != NAN_STEP), (number, name)
                    # Horovod adds the values of an allreduce in an order of its own; otherwise bits are equal.
                    tolerance = 0.0 if name == "large" or SIZE == 2 else 1e-6
                    np.testing.assert_allclose(totals[name], reduced.total, rtol=tolerance, atol=tolerance)
                    if state["memory"]:
                        np.testing.assert_array_equal(_residual(states[name]), state["memory"]["residual"])
        if number != NAN_STEP:
            parts = {n: gradients[n] + before[n] - _residual(states[n]) for n in states}
            for name, everybody in _summed(parts).items():
                np.testing.assert_allclose(everybody, totals[name], atol=1e-5)
            same = {n: t.numpy().view(np.int32).astype(np.int64) for n, t in totals.items()}
            for name, everybody in _summed(same).items():
                np.testing.assert_array_equal(everybody, SIZE * same[name])
    assert num_traces == 1
    return states, num_bytes, simulator.words


def _residual(state: Any) -> np.ndarray | float:
    return state["memory"]["residual"].numpy() if state["memory"] else np.float32(0)


def _every_request(x: Any) -> Program[dict[str, Any]]:
    answers: dict[str, Any] = {}
    for op in ("sum", "max", "min"):
        answers[op] = yield AllReduce(x, tag=op, op=op)
    answers["gathered"] = yield AllGather(tf.fill([RANK], float(RANK)), tag="uneven")
    splits = OPS.integers([rank + 1 for rank in range(SIZE)], x)
    answers["rows"], answers["received"] = yield AllToAll(
        tf.fill([SIZE * SIZE, 2], RANK), tf.cast(splits, tf.int64), tag="exchange"
    )
    answers["root"] = yield Broadcast(x, SIZE - 1, tag="from last/odd:name")
    return answers


def case_every_request() -> None:
    driver = HorovodTensorFlow("requests", {"global": hvd.global_process_set})

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.bfloat16)])
    def answers(x: Any) -> dict[str, Any]:
        return {**driver.run("all", _every_request(x)), "bytes": driver.num_bytes}

    found = {name: tensor.numpy() for name, tensor in answers(tf.constant([RANK, 3, -RANK], tf.bfloat16)).items()}
    everybody = sum(range(SIZE))
    assert found["sum"].dtype == tf.bfloat16.as_numpy_dtype
    np.testing.assert_array_equal(found["sum"].astype(float), [everybody, 3 * SIZE, -everybody])
    np.testing.assert_array_equal(found["max"].astype(float), [SIZE - 1, 3, 0])
    np.testing.assert_array_equal(found["min"].astype(float), [0, 3, 1 - SIZE])
    np.testing.assert_array_equal(found["root"].astype(float), [SIZE - 1, 3, 1 - SIZE])
    np.testing.assert_array_equal(found["gathered"], [r for r in range(SIZE) for _ in range(r)])
    np.testing.assert_array_equal(found["rows"][:, 0], [r for r in range(SIZE) for _ in range(RANK + 1)])
    np.testing.assert_array_equal(found["received"], [RANK + 1] * SIZE)
    sent = 3 * 24 * (SIZE - 1) / SIZE + 4 * (everybody - RANK) + 8 * (SIZE * (SIZE + 1) / 2 - RANK - 1) + 12
    np.testing.assert_allclose(found["bytes"], sent)


def case_names_do_not_depend_on_scopes_branches_or_repetition() -> None:
    driver = HorovodTensorFlow("scopes", {"global": hvd.global_process_set})

    def total(x: Any) -> Any:
        return driver.run("b0", Dense().reduce(OPS, driver.world(0), Spec("b0", 2), x, 2, {}))[0].total

    @tf.function(autograph=False)
    def twice(x: Any) -> tuple[Any, Any]:
        with tf.name_scope(f"only_on_rank_{RANK}"):
            for _ in range(3 * RANK):  # ranks number their branches differently
                x = tf.cond(tf.reduce_sum(x) > 1e9, lambda x=x: x + 1, lambda x=x: x)
            first = tf.cond(tf.size(x) == 2, lambda: total(x), lambda: x)
            return first, total(10.0 * x)

    first, second = twice(tf.constant([1.0, RANK]))
    np.testing.assert_array_equal(first, [SIZE, sum(range(SIZE))])
    np.testing.assert_array_equal(second, [10 * SIZE, 10 * sum(range(SIZE))])


def case_an_eager_call_raises() -> None:
    driver = HorovodTensorFlow("eager", {"global": hvd.global_process_set})
    with pytest.raises(RuntimeError, match=r"inside a tf\.function"):
        driver.start("b0", Dense().reduce(OPS, driver.world(0), Spec("b0", 2), tf.zeros([2]), 2, {}))


def case_a_trace_that_failed_leaves_nothing_behind() -> None:
    driver = HorovodTensorFlow("failure", {"global": hvd.global_process_set})

    @tf.function(autograph=False)
    def total(x: Any, fail: bool) -> Any:
        driver.start("b0", Dense().reduce(OPS, driver.world(0), Spec("b0", 2), x, 2, {}))
        if fail:
            raise KeyError("user")
        return driver.finish()["b0"][0].total

    with pytest.raises(KeyError, match="user"):
        total(tf.ones([2]), True)
    np.testing.assert_array_equal(total(tf.ones([2]), False), [SIZE, SIZE])
