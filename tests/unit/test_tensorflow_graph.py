"""Every method inside one compiled TensorFlow function: traced once, and what the oracle says on any data.

Eagerly, TensorFlow takes part in the tests of all back ends. What those hold true of the oracle holds in a graph, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from helpers import BACK_ENDS, Ranks, assert_bits_equal, assert_close, floats, frozen
from methods import KEPT, METHODS, SIZE, every_method, integers, normal, ranks_of, tolerance_of

from hvd_sparse.drivers.simulate import Round, Simulator
from hvd_sparse.ops.tensorflow import TensorFlowOps
from hvd_sparse.sparsifiers.random_block import RandomBlock
from hvd_sparse.types import Spec

OPS = TensorFlowOps()
NUM_RANKS = 3
NAN, INF = float("nan"), float("inf")


class TracedRanks:
    """As `helpers.Ranks`, but a step is one call of a compiled function, in which data and lengths are unknown."""

    def __init__(self, ranks: Ranks) -> None:
        self.exchange, self.size, self.groups = ranks.exchange, ranks.size, ranks.groups
        self.states = [_tensors(self.exchange.init(OPS)) for _ in range(self.size)]
        variable = tf.Variable(ranks.weights)
        self._weights = variable.value
        self.number = self.num_traces = 0
        self.rounds: list[Round] = []
        self._compiled = tf.function(self._step, autograph=False)

    def _step(self, grads: list[Any], states: list[Any], number: Any) -> list[tuple[Any, ...]]:
        self.num_traces += 1
        simulator = Simulator(self.size, ops=OPS, groups=self.groups)
        worlds = [replace(simulator.world(rank, number), weights=self._weights) for rank in range(self.size)]
        results = simulator.run(
            [self.exchange.step(OPS, world, grad, KEPT, state) for world, grad, state in zip(worlds, grads, states)]
        )
        self.rounds = simulator.rounds
        return [(reduced.applied, reduced.finite, state) for reduced, state in results]

    def step(self, grads: list[np.ndarray]) -> list[tuple[np.ndarray, bool]]:
        """What is applied, and finiteness, by rank."""
        results = self._compiled([tf.constant(grad) for grad in grads], self.states, tf.constant(self.number, tf.int64))
        self.states = [state for *_, state in results]
        self.number += 1
        return [(total.numpy(), bool(finite)) for total, finite, _ in results]


def _tensors(state: Any) -> Any:
    types = {float: tf.float64, int: tf.int32}
    return tf.nest.map_structure(lambda value: tf.convert_to_tensor(value, types.get(type(value))), state)


def _at(value: float, *places: int) -> list[np.ndarray]:
    """Gradients with `value` at some places of the last rank."""
    grads = [np.array(grad) for grad in normal(7, NUM_RANKS)]
    grads[-1][list(places)] = value
    return [frozen(grad) for grad in grads]


def _data() -> list[list[np.ndarray]]:
    zeros = [frozen(np.zeros(SIZE), np.float32)] * NUM_RANKS
    signs = [frozen(np.sign(grad)) for grad in normal(3, NUM_RANKS)]
    spikes = [frozen(grad * (np.arange(SIZE) % 97 == 0)) for grad in normal(4, NUM_RANKS)]
    poisoned = [_at(NAN, 0), _at(NAN, *range(SIZE)), _at(INF, SIZE - 1), _at(-INF, *range(0, SIZE, 2))]
    return [integers(0, NUM_RANKS), *poisoned, zeros, integers(1, NUM_RANKS), signs, spikes, normal(5, NUM_RANKS)]


@every_method
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_traced_step_does_what_the_oracle_does(method: str) -> None:
    oracle = ranks_of(method, NUM_RANKS, BACK_ENDS["numpy"]())
    traced = TracedRanks(oracle)
    tolerance = max(1e-6, tolerance_of(method))
    for number, grads in enumerate(_data()):
        expected = oracle.step(grads, KEPT)
        for rank, (total, finite) in enumerate(traced.step(grads)):
            assert finite == expected.finite[rank] == (number not in (1, 2, 3, 4))
            if finite:
                assert_close(total, expected.applied[rank], tolerance)
            else:
                assert not np.isfinite(total).all()
            state = tf.nest.map_structure(lambda tensor: tensor.numpy(), traced.states[rank])
            for key, array in oracle.numpy_state(oracle.states[rank])["memory"].items():
                assert_close(state["memory"][key], array, tolerance, f"{key} after step {number}")
        # In a graph, rounds of some steps are part of every step; of some rounds only the graph knows the words.
        periodic = getattr(oracle.exchange.scheme, "periodic_tags", ())
        rounds, others = ([r for r in one.rounds if r.tag not in periodic] for one in (traced, expected))
        assert [(r.kind, r.tag) for r in rounds] == [(r.kind, r.tag) for r in others]
        varying = getattr(oracle.exchange.scheme, "varying_words", False)
        assert all(r.words == o.words or (varying and np.isnan(r.words).all()) for r, o in zip(rounds, others))
        assert {r.tag for r in traced.rounds} >= set(periodic)
    assert traced.num_traces == 1


def _traced(function: Any, *arguments: Any) -> Any:
    """The function's value in a graph that knows neither the data nor the lengths."""
    tensors = [tf.constant(argument) for argument in arguments]
    signature = [tf.TensorSpec([None] * tensor.shape.rank, tensor.dtype) for tensor in tensors]
    return tf.function(function, input_signature=signature, autograph=False)(*tensors)


def test_the_graph_optimiser_does_not_lose_nan() -> None:
    """TensorFlow makes `|x| > t` of `not |x| <= t`."""
    x = floats(1, -1, 1.5, NAN, 0, -INF, INF, -NAN)
    assert _traced(lambda x: OPS.above(x, 1.0), x).numpy().tolist() == [2, 3, 5, 6, 7]
    assert _traced(OPS.above, x, np.float64(INF)).numpy().tolist() == [3, 7]
    rewritten = _traced(lambda x: tf.where(tf.logical_not(tf.abs(x) <= 1.0)), x).numpy().reshape(-1).tolist()
    assert rewritten == [2, 5, 6], "the optimiser has changed: `above` could be simpler"


def test_selections_of_unknown_length() -> None:
    x = floats(1, NAN, -3, 2, 2, -INF, 0)

    def selected(x: Any, threshold: Any) -> Any:
        found = OPS.above(x, threshold)
        some, all_, first = OPS.largest(x, found, 3), OPS.largest(x, found, 6), OPS.top_abs(x, 3)
        assert (some.shape[0], first.shape.as_list()) == (None, [3])
        return OPS.length(found), some, all_, first, OPS.kth_largest(x, 3), OPS.kth_largest(x, 2)

    count, some, all_, first, third, second = _traced(selected, x, np.float64(1.5))
    assert int(count) == 5
    assert some.numpy().tolist() == first.numpy().tolist() == [1, 2, 5]
    assert all_.numpy().tolist() == [1, 2, 3, 4, 5]
    assert (float(third), float(second)) == (3.0, INF)


@pytest.mark.parametrize(("num_blocks", "size", "quota"), [(1, 9, 2), (3, 4, 4), (4, 3, 1), (2, 5, 8)])
def test_blocks_of_unknown_length(num_blocks: int, size: int, quota: int) -> None:
    """One trace for none, some, many entries; all of them in one block; ties; NaN."""

    def blocks(indices: Any, values: Any) -> Any:
        places, taken = OPS.blocks(indices, values, num_blocks, size, quota)
        assert places.shape.as_list() == taken.shape.as_list() == [num_blocks, quota]
        return places, taken

    signature = [tf.TensorSpec([None], tf.int32), tf.TensorSpec([None], tf.float32)]
    traced = tf.function(blocks, input_signature=signature, autograph=False)
    oracle, rng = BACK_ENDS["numpy"]().ops, np.random.default_rng(0)
    draws = [np.flatnonzero(rng.random(num_blocks * size) < part) for part in (0, 0.2, 0.5, 0.9, 1.1)]
    for indices in [*draws, np.arange(size), np.arange((num_blocks - 1) * size, num_blocks * size)]:
        distinct = (rng.permutation(len(indices)) + 1) * rng.choice([-1, 1], len(indices))
        for values in (distinct, np.zeros(len(indices)), np.where(distinct == 1, NAN, distinct)):
            arguments = indices.astype(np.int32), values.astype(np.float32)
            for found, expected in zip(traced(*arguments), oracle.blocks(*arguments, num_blocks, size, quota)):
                assert_bits_equal(found.numpy(), expected)
    assert traced.experimental_get_tracing_count() == 1


def test_the_largest_of_rows_in_a_graph() -> None:
    rows = np.random.default_rng(0).integers(-3, 4, (5, 12)).astype(np.float32)
    found = _traced(lambda x: OPS.top_abs(tf.ensure_shape(x, [5, None]), 3), rows)
    assert found.numpy().tolist() == BACK_ENDS["numpy"]().ops.top_abs(rows, 3).tolist()


def test_padding_gives_a_known_shape() -> None:
    def padded(x: Any) -> Any:
        result = OPS.pad(x, 4, 7)
        assert result.shape.as_list() == [4]
        return result

    assert_bits_equal(_traced(padded, np.int32([5, 6])).numpy(), np.int32([5, 6, 7, 7]))
    with pytest.raises(tf.errors.InvalidArgumentError):
        _traced(padded, np.int32([1, 2, 3, 4, 5]))


def test_random_blocks_start_where_python_says() -> None:
    """Products of residues fill 62 bits."""
    part, spec = RandomBlock(seed=3), Spec("b17", 2**31 - 2)
    start = tf.function(
        lambda step: part.start(spec, step), input_signature=[tf.TensorSpec([], tf.int64)], autograph=False
    )
    for step in (0, 1, 2, 12_345, 2**31 - 1, 2**31, 2**32 + 7, 10**9, 5 * 10**9):
        assert int(start(tf.constant(step, tf.int64))) == part.start(spec, step)


def test_a_choice_between_states_copies_nothing_and_keeps_types() -> None:
    def chosen(x: Any, flag: Any) -> Any:
        old = {"memory": {"residual": x}, "scheme": {"scale": 1.0, "count": tf.constant(5, tf.int64)}}
        new = {"memory": {"residual": 2 * x}, "scheme": {"scale": tf.constant(0.1, tf.float64), "count": 7}}
        return OPS.where(flag, new, old)

    for flag in (True, False):
        state = _traced(chosen, floats(1, 2), np.bool_(flag))
        assert state["memory"]["residual"].numpy().tolist() == ([2, 4] if flag else [1, 2])
        assert float(state["scheme"]["scale"]) == (0.1 if flag else 1.0)  # more than float32
        assert (state["scheme"]["count"].dtype, int(state["scheme"]["count"])) == (tf.int64, 7 if flag else 5)
    assert OPS.where(tf.constant(True), {}, {}) == {}


def test_methods_are_there() -> None:
    assert len(METHODS) > 20
