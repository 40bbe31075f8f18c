"""What the tests share: back ends, comparators that say what differs, and ranks that are simulated in this process."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvd_sparse.drivers.simulate import Round, Simulator, hosts
from hvd_sparse.exchange import Exchange
from hvd_sparse.ops.numpy import NumpyOps
from hvd_sparse.types import Reduced


@dataclass(frozen=True)
class BackEnd:
    """A library under test: its Ops, and the ways from NumPy to its arrays and back."""

    name: str
    ops: Any
    array: Callable[[np.ndarray], Any]
    numpy: Callable[[Any], np.ndarray]


def _numpy_back_end() -> BackEnd:
    return BackEnd("numpy", NumpyOps(), frozen, np.asarray)


def _torch_back_end(device: str = "cpu") -> BackEnd:
    import torch

    from hvd_sparse.ops.torch import TorchOps

    def array(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(x)).to(device)

    return BackEnd("torch", TorchOps(), array, lambda x: x.detach().cpu().numpy())


def _tensorflow_back_end() -> BackEnd:
    import tensorflow as tf

    from hvd_sparse.ops.tensorflow import TensorFlowOps

    return BackEnd("tensorflow", TensorFlowOps(), lambda x: tf.constant(np.array(x)), lambda x: x.numpy())


# One line per back end. `backend` in conftest.py runs a test over all of them.
BACK_ENDS: dict[str, Callable[[], BackEnd]] = {
    "numpy": _numpy_back_end,
    "torch": _torch_back_end,
    "tensorflow": _tensorflow_back_end,
}
QUICK_BACK_ENDS = ["numpy", "torch"]  # eager TensorFlow is ten times as slow


def frozen(x: Any, dtype: Any = None) -> np.ndarray:
    """A read-only copy: whoever writes to an input fails at once."""
    x = np.array(x, dtype)
    x.setflags(write=False)
    return x


def floats(*values: float) -> np.ndarray:
    """Read-only float32."""
    return frozen(values, np.float32)


# The data that the algorithms' check values refer to: 4 ranks, 16 elements, every row a signed permutation of 1..16.
E4 = [
    floats(-11, -10, 6, -8, 4, 5, -7, -13, 15, -2, 12, 1, 16, -14, 3, 9),
    floats(-4, -12, -13, -8, 9, -7, -16, 15, 2, -14, -1, -6, -10, 5, 3, 11),
    floats(16, -12, 7, -4, -6, 10, -8, -9, -15, 13, 3, 1, 14, 5, 11, 2),
    floats(16, -8, -7, -11, -9, -6, -13, 10, -5, -2, -1, 15, 14, -12, 3, -4),
]


# Comparators. test_helpers.py shows that each of them can fail.


def assert_bits_equal(actual: np.ndarray, expected: np.ndarray, what: str = "arrays") -> None:
    """Same dtype, shape and bits: NaN equals the same NaN, 0.0 differs from -0.0."""
    actual, expected = np.ascontiguousarray(actual), np.ascontiguousarray(expected)
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} and {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape} and {expected.shape}"
    if actual.tobytes() != expected.tobytes():
        size = actual.dtype.itemsize
        rows = [np.frombuffer(x.tobytes(), np.uint8).reshape(-1, size) for x in (actual, expected)]
        differ = np.flatnonzero((rows[0] != rows[1]).any(axis=1))
        first = differ[0]
        raise AssertionError(
            f"{what}: {len(differ)} of {actual.size} elements differ, the first at {first}: "
            f"{actual.reshape(-1)[first]!r} and {expected.reshape(-1)[first]!r}"
        )


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float = 1e-5, what: str = "arrays") -> None:
    """Finite, of one shape, and equal up to `tolerance` times the largest magnitude (at least 1); 0 is exact."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{what}: {actual.shape} and {expected.shape}"
    assert np.isfinite(actual).all(), f"{what}: not finite: {actual}"
    assert np.isfinite(expected).all(), f"{what}: not finite: {expected}"
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    worst = float(np.abs(actual - expected).max(initial=0))
    assert worst <= tolerance * scale, f"{what}: differ by {worst:g}, allowed are {tolerance * scale:g}"


def assert_same_on_ranks(arrays: Sequence[np.ndarray], what: str = "total") -> None:
    """Bit-equal on every rank."""
    assert arrays, f"{what}: no rank"
    for rank, array in enumerate(arrays):
        assert_bits_equal(array, arrays[0], f"{what} of rank {rank} and of rank 0")


def assert_conserved(
    accumulated: Sequence[np.ndarray], total: np.ndarray, kept: Sequence[np.ndarray], tolerance: float = 1e-5
) -> None:
    """sum_r accumulated_r == total + sum_r kept_r: nothing is lost, nothing is applied twice."""
    assert len(accumulated) == len(kept), f"{len(accumulated)} ranks before, {len(kept)} after"
    before = np.sum(np.asarray(accumulated, np.float64), axis=0)
    after = np.asarray(total, np.float64) + np.sum(np.asarray(kept, np.float64), axis=0)
    assert before.shape == after.shape, f"{before.shape} and {after.shape}"
    allowed = tolerance * max(1.0, float(np.abs(np.asarray(accumulated)).max(initial=0)))
    wrong = np.flatnonzero(~(np.abs(before - after) <= allowed))
    assert not len(wrong), (
        f"{len(wrong)} of {before.size} elements are not conserved, the first at {wrong[0]}: "
        f"{before[wrong[0]]:g} before, {after[wrong[0]]:g} after"
    )


def assert_states_equal(actual: Any, expected: Any, what: str = "state") -> None:
    """Nested dictionaries of arrays and numbers, bit by bit."""
    if isinstance(expected, dict):
        assert isinstance(actual, dict), what
        assert actual.keys() == expected.keys(), f"{what}: {list(actual)} and {list(expected)}"
        for key in expected:
            assert_states_equal(actual[key], expected[key], f"{what}.{key}")
    else:
        assert_bits_equal(np.asarray(actual), np.asarray(expected), what)


# Simulated ranks.


def asks(*requests: Any) -> Any:
    """A program that makes these requests and returns the answers."""
    answers = []
    for request in requests:
        answers.append((yield request))
    return answers


def watched(program: Any, seen: list[Any]) -> Any:
    """The same program, whose requests are kept."""
    answer = None
    while True:
        try:
            request = program.send(answer)
        except StopIteration as stop:
            return stop.value
        seen.append(request)
        answer = yield request


@dataclass(frozen=True)
class Step:
    """What one exchange did, as NumPy arrays by rank. `kept` is None if the memory has no accumulator."""

    accumulated: list[np.ndarray]
    reduced: list[Reduced]
    totals: list[np.ndarray]
    applied: list[np.ndarray]
    used: list[np.ndarray]
    kept: list[np.ndarray] | None
    rounds: list[Round]

    @property
    def finite(self) -> list[bool]:
        return [bool(reduced.finite) for reduced in self.reduced]

    def num_used(self, rank: int) -> int:
        used = self.reduced[rank].used
        return len(self.accumulated[rank]) if used is None else len(used.indices)


class Ranks:
    """One bucket on P simulated ranks, step after step.

    Every step also checks what holds for all methods: the inputs and the states it starts from are left alone.
    """

    def __init__(self, exchange: Exchange, size: int, backend: BackEnd | None = None) -> None:
        self.exchange = exchange
        self.size = size
        self.backend = backend or _numpy_back_end()
        self.states = [exchange.init(self.backend.ops) for _ in range(size)]
        self.number = 0
        slots = 2 if size in (4, 6) else 1  # other sizes are hosts of one rank
        self.groups = hosts(size // slots, slots)
        self.weights = frozen(np.random.default_rng(1).normal(size=exchange.spec.size), np.float32)  # for who asks
        self.speaks: Sequence[Any] = [None] * size

    def step(self, grads: Sequence[np.ndarray], k: int) -> Step:
        """One exchange of one gradient per rank."""
        backend, memory = self.backend, self.exchange.memory
        inputs = [backend.array(grad) for grad in grads]
        before = [self.numpy_state(state) for state in self.states]
        accumulated = [
            np.array(backend.numpy(memory.compensate(backend.ops, self.size, grad, state["memory"])[0]))
            for grad, state in zip(inputs, self.states)
        ]
        simulator = Simulator(self.size, ops=backend.ops, groups=self.groups)
        weights = backend.array(self.weights)
        worlds = [
            replace(simulator.world(rank, self.number), weights=lambda: weights, speaks=self.speaks[rank])
            for rank in range(self.size)
        ]
        results = simulator.run(
            [
                self.exchange.step(backend.ops, world, grad, k, state)
                for world, grad, state in zip(worlds, inputs, self.states)
            ]
        )
        for rank in range(self.size):
            assert_bits_equal(np.asarray(backend.numpy(inputs[rank])), np.asarray(grads[rank]), f"input of rank {rank}")
            assert_states_equal(self.numpy_state(self.states[rank]), before[rank], f"old state of rank {rank}")
        self.states = [state for _, state in results]
        self.number += 1
        reduced = [one for one, _ in results]
        key = memory.accumulator
        return Step(
            accumulated,
            reduced,
            [np.array(backend.numpy(one.total)) for one in reduced],
            [np.array(backend.numpy(one.applied)) for one in reduced],
            [self._used(one, x) for one, x in zip(reduced, accumulated)],
            None if key is None else [np.array(backend.numpy(state["memory"][key])) for state in self.states],
            simulator.rounds,
        )

    def numpy_state(self, state: Any) -> Any:
        """A copy as NumPy arrays."""
        if isinstance(state, dict):
            return {key: self.numpy_state(value) for key, value in state.items()}
        return np.array(state if isinstance(state, (int, float)) else self.backend.numpy(state))

    def _used(self, reduced: Reduced, x: np.ndarray) -> np.ndarray:
        if reduced.used is None:
            return x
        used = np.zeros_like(x)
        indices = self.backend.numpy(reduced.used.indices)
        assert len(np.unique(indices)) == len(indices), f"an index was used twice: {np.sort(indices)}"
        used[indices] = self.backend.numpy(reduced.used.values)
        return used


def total_words(rounds: Sequence[Round], size: int) -> float:
    """Words of the busiest rank."""
    return max(sum(one.words[rank] for one in rounds) for rank in range(size))


def short_repr(value: Any) -> str:
    """Like repr, without the addresses of objects: parallel workers must agree on the names of tests."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def num_ranks(item: Any) -> int:
    """The number of ranks that a test runs on, by its marker `parallel(ranks=N)`; 1 without it."""
    marker = item.get_closest_marker("parallel")
    return 1 if marker is None else int(marker.kwargs["ranks"])


def describe_ranks(counts: dict[int, int]) -> str:
    """How many tests ran on how many ranks, in words."""
    parts = [
        f"{count} test{'s' * (count != 1)} on {ranks} rank{'s' * (ranks != 1)}"
        for ranks, count in sorted(counts.items())
    ]
    return "ran: " + (", ".join(parts) or "no test")
