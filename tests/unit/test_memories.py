"""Error feedback on its own, without an exchange. Momentum: test_spec_dgc.py."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import assert_bits_equal, assert_close, floats, frozen
from methods import parts

from hvd_sparse.memories.none import NoMemory
from hvd_sparse.memories.residual import Residual
from hvd_sparse.types import Reduced, Sparse

every_memory = pytest.mark.parametrize(
    "memory", [part for _, part in parts("memory")], ids=[n for n, _ in parts("memory")]
)


def state_of(memory, backend, *values: float) -> dict:
    return {key: backend.array(floats(*values)) for key in memory.keys}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 0.5, -2.0])
def test_residual_adds_the_scaled_gradient(alpha, in_place, backend):
    memory, grad = Residual(), backend.array(floats(1, -2, 4))
    state = state_of(memory, backend, 3, 0, -1)
    out = state_of(memory, backend, 7, 7, 7) if in_place else None
    x, reached = memory.compensate(backend.ops, 1, grad, state, alpha, out)
    expected = np.float32([3 + alpha, -2 * alpha, -1 + 4 * alpha])
    assert_bits_equal(backend.numpy(x), expected)
    assert_bits_equal(backend.numpy(reached["residual"]), expected)
    assert_bits_equal(backend.numpy(state["residual"]), floats(3, 0, -1))
    assert_bits_equal(backend.numpy(grad), floats(1, -2, 4))


@pytest.mark.parametrize("alpha", [1.0, 0.5, -2.0])
def test_no_memory_scales_the_gradient(alpha, backend):
    x, state = NoMemory().compensate(backend.ops, 1, backend.array(floats(1, -2)), {}, alpha)
    assert_bits_equal(backend.numpy(x), np.float32([alpha, -2 * alpha]))
    assert state == {}


@every_memory
def test_scaling_is_the_same_as_a_scaled_gradient(memory, backend):
    """`alpha` undoes a loss scale: two steps, since the state of the first enters the second."""
    grad, rng = floats(0.3, -1.7, 5), np.random.default_rng(0)
    start = frozen(rng.normal(size=3), np.float32)
    results = []
    for given, alpha in ((grad * np.float32(1024), 1 / 1024), (grad, 1.0)):
        state = {key: backend.array(start) for key in memory.keys}
        for _ in range(2):
            x, state = memory.compensate(backend.ops, 4, backend.array(frozen(given)), state, alpha)
        results.append(backend.numpy(x))
    assert_close(results[0], results[1], 1e-6)


@every_memory
def test_only_what_was_used_is_cleared(memory, backend):
    values = floats(1, 2, 3, 4)
    used = Sparse(backend.array(frozen([1, 3], np.int64)), backend.array(floats(2, 4)), 4)
    after = memory.update(backend.ops, Reduced(None, used, True), state_of(memory, backend, *values))
    if memory.accumulator:
        assert backend.numpy(after[memory.accumulator]).tolist() == [1, 0, 3, 0]
        everything = memory.update(backend.ops, Reduced(None, None, True), state_of(memory, backend, *values))
        assert backend.numpy(everything[memory.accumulator]).tolist() == [0, 0, 0, 0]
    assert after.keys() == set(memory.keys)


@every_memory
def test_values_are_cleared_and_not_subtracted(memory, backend):
    """What travelled may have been rounded on the way: the entry is zero afterwards, unless something is left."""
    used = Sparse(backend.array(frozen([0], np.int64)), backend.array(floats(0.999)), 2)
    after = memory.update(backend.ops, Reduced(None, used, True), state_of(memory, backend, 1, 1))
    assert not memory.accumulator or backend.numpy(after[memory.accumulator]).tolist() == [0, 1]
    left = Reduced(None, used, True, left=backend.array(floats(0.25)))
    after = memory.update(backend.ops, left, state_of(memory, backend, 1, 1))
    assert not memory.accumulator or backend.numpy(after[memory.accumulator]).tolist() == [0.25, 1]
    kept = Reduced(None, used, True, kept=backend.array(floats(5, 6)))
    after = memory.update(backend.ops, kept, state_of(memory, backend, 1, 1))
    assert not memory.accumulator or backend.numpy(after[memory.accumulator]).tolist() == [5, 6]


@every_memory
def test_a_bucket_that_is_always_sent_whole(memory, backend):
    """Its memory gives what the other gives when everything is sent, without keeping zeros for it."""
    dense, grads = memory.for_dense(), [floats(1, -2), floats(3, 5), floats(-4, 1)]
    results = []
    for part in (memory, dense):
        state, seen = state_of(part, backend, 0, 0), []
        for grad in grads:
            x, state = part.compensate(backend.ops, 1, backend.array(grad), state)
            seen.append(np.array(backend.numpy(x)))
            state = part.update(backend.ops, Reduced(None, None, True), state)
        results.append(seen)
    for one, other in zip(*results):
        assert_bits_equal(one, other)
    assert Residual().for_dense().keys == ()


@every_memory
def test_the_accumulator_is_what_is_returned(memory, backend):
    grad = backend.array(floats(1, 2))
    x, state = memory.compensate(backend.ops, 1, grad, state_of(memory, backend, 1, 1))
    assert state.keys() == set(memory.keys)
    if memory.accumulator:
        assert_bits_equal(backend.numpy(x), backend.numpy(state[memory.accumulator]))
