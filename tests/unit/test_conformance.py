"""What every method promises, over the whole registry: a new method is tested by being registered.

A method is a sparsifier, a collective and a memory, or a scheme of its own and a memory. VARIANTS lists arguments where
the defaults do not do for small exact tests; everything else is made without arguments.
"""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import numpy as np
import pytest
from helpers import (
    BACK_ENDS,
    BackEnd,
    Ranks,
    Step,
    assert_bits_equal,
    assert_close,
    assert_conserved,
    assert_same_on_ranks,
    assert_states_equal,
    frozen,
    total_words,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hvd_sparse import registry
from hvd_sparse.config import sparse_config
from hvd_sparse.controllers import Seen
from hvd_sparse.exchange import Exchange
from hvd_sparse.schemes.dense import Dense
from hvd_sparse.schemes.sparse import SparseSum
from hvd_sparse.types import Spec

# 1009 is prime, and at k = 100 large enough for a threshold that is really estimated from a sample.
SIZE, KEPT = 1009, 100
SIZES = [1, 2, 3, 5]  # of the world

VARIANTS: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("sparsifier", "threshold"): [{}, {"min_hits": 16}],
    # Powers of two: integer gradients stay exact in float32.
    ("memory", "momentum"): [
        {"momentum": 0.5},
        {"momentum": 0.5, "nesterov": True},
        {"momentum": 0.5, "masking": False},
    ],
    ("controller", "fixed"): [{"density": 0.01}],
    ("controller", "warmup"): [{"density": 0.001, "warmup_steps": 12}],
}


def parts(kind: str) -> list[tuple[str, Any]]:
    """(name, object) of every method of a kind, in every variant."""
    found = []
    for name in registry.METHODS[kind]:
        for arguments in VARIANTS.get((kind, name), [{}]):
            words = ",".join(f"{key}={value}" for key, value in arguments.items())
            found.append((name + (f"({words})" if words else ""), registry.create(kind, name, **arguments)))
    return found


def is_legal(sparsifier: Any, collective: Any) -> bool:
    return sparsifier.shared_indices or not collective.needs_shared_indices


PAIRS = list(itertools.product(parts("sparsifier"), parts("collective")))
METHODS: dict[str, tuple[Any, Any]] = {}
for _memory_name, _memory in parts("memory"):
    for (_sparsifier_name, _sparsifier), (_collective_name, _collective) in PAIRS:
        if is_legal(_sparsifier, _collective):
            _config = sparse_config(sparsifier=_sparsifier, collective=_collective, memory=_memory)
            METHODS[f"{_sparsifier_name}-{_collective_name}-{_memory_name}"] = (_config.scheme(), _memory)
    for _scheme_name in registry.METHODS["scheme"]:
        if _scheme_name != "sparse":
            METHODS[f"{_scheme_name}-{_memory_name}"] = (registry.create("scheme", _scheme_name), _memory)

every_method = pytest.mark.parametrize("method", METHODS)


def ranks_of(method: str, size: int, backend: BackEnd, num_elements: int = SIZE) -> Ranks:
    scheme, memory = METHODS[method]
    return Ranks(Exchange(Spec("b", num_elements), scheme, memory), size, backend)


def normal(seed: int, size: int, num_elements: int = SIZE) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [frozen(rng.normal(size=num_elements), np.float32) for _ in range(size)]


def integers(seed: int, size: int, num_elements: int = SIZE, limit: int = 8) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [frozen(rng.integers(-limit, limit + 1, num_elements), np.float32) for _ in range(size)]


def constant(value: float, size: int, num_elements: int = SIZE) -> list[np.ndarray]:
    return [frozen(np.full(num_elements, value), np.float32)] * size


def assert_sound(step: Step, method: str, k: int, tolerance: float = 1e-5) -> None:
    """What holds after every step with finite data."""
    scheme, _ = METHODS[method]
    assert all(step.finite)
    assert_same_on_ranks(step.totals)
    sparse = isinstance(scheme, SparseSum) and k < len(step.totals[0])
    if sparse:
        assert max(step.num_used(rank) for rank in range(len(step.used))) <= k
    for rank, (used, x) in enumerate(zip(step.used, step.accumulated)):
        assert_bits_equal(used[used != 0], x[used != 0], f"used and accumulated of rank {rank}")
    gain = len(step.totals[0]) / k if sparse and scheme.rescale else 1.0
    scale = max(1.0, gain * max(float(np.abs(x).max()) for x in step.accumulated))
    assert_close(
        step.totals[0] / scale, gain * np.sum(step.used, axis=0, dtype=np.float64) / scale, max(tolerance, 1e-6)
    )
    if step.kept is not None:
        assert_conserved(step.accumulated, step.totals[0], step.kept, tolerance)


@every_method
@pytest.mark.parametrize("size", SIZES)
def test_integers_are_conserved_exactly(method, size, backend):
    ranks = ranks_of(method, size, backend)
    for number in range(4):
        assert_sound(ranks.step(integers(number, size), KEPT), method, KEPT, tolerance=0)


@every_method
@settings(max_examples=10)
@given(data=st.data())
def test_floats_are_conserved(method, backend, data):
    size = data.draw(st.sampled_from(SIZES), "ranks")
    num_elements = data.draw(st.integers(1, 24), "n")
    k = data.draw(st.integers(1, num_elements + 2), "k")
    values = st.floats(-1e6, 1e6, width=32)
    grads = data.draw(arrays(np.float32, (3, size, num_elements), elements=values), "gradients")
    ranks = ranks_of(method, size, backend, num_elements)
    for grad in grads:
        assert_sound(ranks.step(list(frozen(grad)), k), method, k)


@every_method
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32), size=st.sampled_from(SIZES), density=st.floats(0.005, 1), scale=st.floats(-30, 30))
def test_any_scale_and_density(method, backend, seed, size, density, scale):
    ranks = ranks_of(method, size, backend)
    k = max(1, int(density * SIZE))
    for number in range(3):
        grads = [frozen(grad * np.float32(2.0**scale)) for grad in normal(seed + number, size)]
        assert_sound(ranks.step(grads, k), method, k)


@every_method
@pytest.mark.parametrize("size", SIZES)
def test_density_one_is_dense(method, size, backend):
    _, memory = METHODS[method]
    ranks = ranks_of(method, size, backend, 37)
    dense = Ranks(Exchange(Spec("b", 37), Dense(), memory), size, backend)
    for number in range(3):
        grads = normal(number, size, 37)
        step, other = ranks.step(grads, 37), dense.step(grads, 37)
        assert_sound(step, method, 37, tolerance=1e-6)
        assert_close(step.totals[0], other.totals[0], 1e-6)
        assert_close(step.totals[0], np.sum(step.accumulated, axis=0), 1e-6)
        if step.kept is not None:
            assert not np.any(step.kept)


@every_method
def test_more_than_all_is_all(method, backend):
    exact, more = (ranks_of(method, 3, backend, 5) for _ in range(2))
    grads = normal(0, 3, 5)
    assert_bits_equal(exact.step(grads, 5).totals[0], more.step(grads, 9).totals[0])


@every_method
@pytest.mark.parametrize("size", [1, 3])
def test_all_zero(method, size, backend):
    ranks = ranks_of(method, size, backend)
    for _ in range(3):
        step = ranks.step(constant(0, size), KEPT)
        assert_sound(step, method, KEPT, tolerance=0)
        assert not np.any(step.totals)
        assert step.kept is None or not np.any(step.kept)
    assert_sound(ranks.step(integers(0, size), KEPT), method, KEPT, tolerance=0)


@every_method
def test_ties(method, backend):
    ranks = ranks_of(method, 3, backend)
    for number in range(6):
        signs = [frozen(np.sign(grad)) for grad in normal(number, 3)]
        assert_sound(ranks.step(signs, KEPT), method, KEPT, tolerance=0)


@every_method
@pytest.mark.parametrize("num_elements", [1, 2, 7, SIZE])
@pytest.mark.parametrize("size", [3, 5])
def test_one_entry_and_fewer_elements_than_ranks(method, size, num_elements, backend):
    ranks = ranks_of(method, size, backend, num_elements)
    for number in range(3):
        assert_sound(ranks.step(integers(number, size, num_elements), 1), method, 1, tolerance=0)


@pytest.mark.parametrize("method", [name for name, (_, memory) in METHODS.items() if memory.accumulator == "residual"])
def test_everything_is_sent_in_the_end(method, backend):
    """Zero gradients after one: what was kept arrives, and nothing else."""
    ranks = ranks_of(method, 3, backend, 37)
    first = integers(0, 3, 37)
    total = ranks.step(first, 9).totals[0].astype(np.float64)
    for _ in range(40):
        step = ranks.step(constant(0, 3, 37), 9)
        total += step.totals[0]
    assert not np.any(step.kept)
    assert_close(total, np.sum(first, axis=0), tolerance=0)


def poisoned(kind: str, size: int) -> list[np.ndarray]:
    """Gradients of which some are not finite, on the last rank only (opposite infinities: on two)."""
    grads = [np.array(grad) for grad in normal(5, size)]
    if kind == "all infinite":
        grads[-1][:] = np.inf
    elif kind == "half infinite":
        grads[-1][::2] = -np.inf
    elif kind == "opposite infinities":
        grads[0][17], grads[-1][17] = -np.inf, np.inf
    elif kind == "all nan":
        grads[-1][:] = np.nan
    else:
        grads[-1][SIZE - 1] = float(kind)
    return [frozen(grad) for grad in grads]


@every_method
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("size", [1, 3])
def test_what_is_not_finite_never_enters_the_state(method, size, backend):
    ranks = ranks_of(method, size, backend)
    ranks.step(integers(0, size), KEPT)
    before = [ranks.numpy_state(state) for state in ranks.states]
    for kind in ("nan", "inf", "-inf", "all infinite", "half infinite", "all nan", "opposite infinities"):
        step = ranks.step(poisoned(kind, size), KEPT)
        assert step.finite == [False] * size, kind
        assert all(not np.isfinite(total).all() for total in step.totals), f"{kind}: every rank must see it in the sum"
        for rank, state in enumerate(ranks.states):
            assert_states_equal(ranks.numpy_state(state), before[rank], f"{kind}, state of rank {rank}")
    assert_sound(ranks.step(integers(1, size), KEPT), method, KEPT, tolerance=0)


@every_method
@pytest.mark.parametrize("size", [2, 5])
def test_requests_keep_their_shape(method, size, backend):
    """A constant name and shape keeps Horovod's response cache valid."""
    ranks = ranks_of(method, size, backend)
    spikes = [frozen(grad * (np.arange(SIZE) % 97 == 0)) for grad in normal(1, size)]
    steps = [normal(0, size), constant(0, size), constant(1, size), spikes, normal(2, size)]
    rounds = [[(one.kind, one.tag, one.shape) for one in ranks.step(grads, KEPT).rounds] for grads in steps]
    assert rounds[0]
    assert rounds == [rounds[0]] * len(steps)


# Words per rank and step: the bar of each collective, and of each scheme that stands alone.
BARS = {
    "allgather": lambda n, k, size: 2 * k * (size - 1),
    "shared_allreduce": lambda n, k, size: 2 * k * (size - 1) / size,
    "dense": lambda n, k, size: 2 * n * (size - 1) / size,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [*registry.METHODS["collective"], *(set(registry.METHODS["scheme"]) - {"sparse"})])
def test_words(name, size):
    assert name in BARS, f"state the words of {name!r} per rank and step in BARS"
    methods = [
        method
        for method, (scheme, _) in METHODS.items()
        if name in method.split("-") and (not isinstance(scheme, SparseSum) or scheme.sparsifier.blind)
    ]
    assert methods
    for method in methods:
        step = ranks_of(method, size, BACK_ENDS["numpy"]()).step(normal(0, size), KEPT)
        assert total_words(step.rounds, size) == BARS[name](SIZE, KEPT, size), method


@pytest.mark.parametrize("other", [name for name in BACK_ENDS if name != "numpy"])
@pytest.mark.parametrize("size", [1, 3])
@every_method
def test_back_ends_agree(method, size, other):
    oracle, ranks = (ranks_of(method, size, BACK_ENDS[name]()) for name in ("numpy", other))
    for number in range(4):
        grads = normal(number, size)
        expected, step = oracle.step(grads, KEPT), ranks.step(grads, KEPT)
        assert_close(step.totals[0], expected.totals[0], 1e-6)
        assert [(one.kind, one.tag, one.shape) for one in step.rounds] == [
            (one.kind, one.tag, one.shape) for one in expected.rounds
        ]
        for rank in range(size):
            assert_close(step.used[rank], expected.used[rank], 1e-6)


@every_method
def test_a_copied_state_continues_bit_for_bit(method, backend):
    ranks = ranks_of(method, 2, backend)
    ranks.step(normal(0, 2), KEPT)
    saved, number = copy.deepcopy(ranks.states), ranks.number
    expected = [ranks.step(normal(seed, 2), KEPT).totals[0] for seed in (1, 2)]
    resumed = ranks_of(method, 2, backend)
    resumed.states, resumed.number = saved, number
    for seed, total in zip((1, 2), expected):
        assert_bits_equal(resumed.step(normal(seed, 2), KEPT).totals[0], total)


ILLEGAL = [(one, other) for one, other in PAIRS if not is_legal(one[1], other[1])]


@pytest.mark.parametrize(("sparsifier", "collective"), ILLEGAL, ids=[f"{one[0]}-{other[0]}" for one, other in ILLEGAL])
def test_illegal_pairs_are_refused(sparsifier, collective):
    with pytest.raises(ValueError, match=type(sparsifier[1]).__name__):
        SparseSum(sparsifier[1], collective[1])
    with pytest.raises(ValueError, match=type(collective[1]).__name__):
        sparse_config(sparsifier=sparsifier[1], collective=collective[1])


def test_there_are_illegal_pairs():
    assert len(ILLEGAL) >= 2


def sparsifiers(attribute: str) -> Any:
    """Those that declare it."""
    declared = [(name, part) for name, part in parts("sparsifier") if getattr(part, attribute)]
    assert declared
    return pytest.mark.parametrize("sparsifier", [part for _, part in declared], ids=[name for name, _ in declared])


@sparsifiers("shared_indices")
def test_declared_shared_indices_are_shared(sparsifier, backend):
    ranks = Ranks(Exchange(Spec("b", SIZE), *_allgathered(sparsifier)), 3, backend)
    for number in range(3):
        step = ranks.step(normal(number, 3), KEPT)
        assert_same_on_ranks([backend.numpy(one.used.indices) for one in step.reduced], "indices")


@sparsifiers("blind")
def test_declared_blindness_is_true(sparsifier, backend):
    """A blind selection takes the same coordinates whatever the values: rescaled, it is unbiased."""
    exchange = Exchange(Spec("b", SIZE), *_allgathered(sparsifier))
    steps = [Ranks(exchange, 1, backend).step(normal(seed, 1), KEPT) for seed in (0, 1)]
    indices = [backend.numpy(step.reduced[0].used.indices) for step in steps]
    assert_bits_equal(indices[0], indices[1])
    assert len(indices[0]) == KEPT


def _allgathered(sparsifier: Any) -> tuple[Any, Any]:
    config = sparse_config(sparsifier=sparsifier, collective="allgather", memory="none")
    return config.scheme(), config.memory


@pytest.mark.parametrize("controller", [part for _, part in parts("controller")], ids=lambda part: type(part).__name__)
def test_controllers(controller):
    """Densities in (0, 1], few of them, the same on every rank, from a state of plain numbers."""
    state, densities = controller.init(), []
    for step in range(40):
        (plan, following), (again, _) = (controller.decide(Seen(step), dict(state)) for _ in range(2))
        assert plan == again
        assert 0 < plan.density <= 1
        assert isinstance(plan.density, float)
        assert plan.reason
        assert all(isinstance(value, (int, float, str)) for value in following.values())
        state = following
        densities.append(plan.density)
    assert len(set(densities)) <= 8
    assert all(math.isfinite(density) for density in densities)
