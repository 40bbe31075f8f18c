"""Check values of lazy uploads (sasg.md): the rule, what is sent, and what a silent rank keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from helpers import (
    Ranks,
    Step,
    assert_bits_equal,
    assert_close,
    assert_same_on_ranks,
    assert_states_equal,
    floats,
    frozen,
    total_words,
)
from methods import SIZES, integers, normal, parts

from hvd_sparse.collectives.allgather import AllGatherSum
from hvd_sparse.drivers.simulate import Simulator
from hvd_sparse.exchange import Exchange
from hvd_sparse.memories.residual import Residual
from hvd_sparse.schemes.lazy import Lazy
from hvd_sparse.schemes.sparse import SparseSum
from hvd_sparse.sparsifiers.topk import TopK
from hvd_sparse.types import Spec, World

N, K = 97, 9
SPEC = Spec("b", N, shapes=((9, 10), (7,)))
Gradient = Callable[[int, np.ndarray], np.ndarray]


def ranks_of(size: int, backend=None, scheme=None, spec: Spec = SPEC, memory=None) -> Ranks:
    return Ranks(Exchange(spec, scheme or Lazy(), memory or Residual()), size, backend)


def train(
    ranks: Ranks, gradient: Gradient, w: np.ndarray, gamma: float, k: int, num_steps: int
) -> Iterator[tuple[list[bool], Step, np.ndarray]]:
    """The specification's text around the exchange: who spoke, what it came to, and the model after every step."""
    scheme, size = ranks.exchange.scheme, ranks.size
    spoke_at, silence, moves = [w] * size, [1] * size, []
    for _ in range(num_steps):
        speaks = []
        for rank in range(size):
            change = float(np.sum((gradient(rank, w) - gradient(rank, spoke_at[rank])) ** 2))
            must = scheme.must_speak(len(moves), silence[rank], size)
            speaks.append(must or scheme.has_news(change, moves, size))
        ranks.speaks = speaks
        step = ranks.step([frozen(gradient(rank, w), np.float32) for rank in range(size)], k)
        for rank in range(size):
            spoke_at[rank], silence[rank] = (w, 1) if speaks[rank] else (spoke_at[rank], silence[rank] + 1)
        before, w = w, w - gamma * step.totals[0]
        moves = [*moves, float(np.sum((w - before) ** 2)) / gamma][-scheme.history :]
        yield speaks, step, w


# The rule


def test_a_trace(backend):
    """f_r = (w - a_r)^2 / 2 with a = (0, 4): one coordinate of four, so that its sparse vectors fit."""
    ranks, targets = ranks_of(2, backend, Lazy(history=2), Spec("b", 4)), (0, 4)
    seen = train(ranks, lambda rank, w: (w - targets[rank]) * (np.arange(4) == 0), np.ones(4), 0.1, 1, 6)
    uploads, models = [], []
    for speaks, step, w in seen:
        uploads.append(tuple(map(int, speaks)))
        models.append(float(w[0]))
        assert not np.any(step.kept), "nothing is left out"
        assert_same_on_ranks(step.totals)
    assert uploads == [(1, 1), (1, 1), (0, 0), (1, 1), (0, 0), (1, 1)]
    assert models == pytest.approx([1.2, 1.36, 1.52, 1.616, 1.712, 1.7696], abs=1e-6)


def test_the_bound():
    """Squared moves of 0.04 and 0.01, made with a rate of 0.1; the one before them does not count any more."""
    moves = [7.0, 0.04 / 0.1, 0.01 / 0.1]
    for threshold in (1.0, 2.0):
        scheme, bound = Lazy(history=3, threshold=threshold), 0.125 * threshold
        assert not scheme.has_news(bound - 1e-9, moves, 2)
        assert scheme.has_news(bound + 1e-9, moves, 2)
    assert not Lazy(history=1).has_news(0, [7.0], 2)
    assert Lazy(history=1).has_news(1e-30, [7.0], 2)


@pytest.mark.parametrize("change", [math.nan, math.inf])
def test_what_is_not_finite_is_news(change):
    assert Lazy(threshold=math.inf).has_news(change, [1.0] * 10, 2)
    assert Lazy().has_news(change, [1.0] * 10, 2)


def test_when_a_rank_must_speak():
    scheme = Lazy(history=10)
    assert [scheme.must_speak(step, 1, 2) for step in (0, 9, 10)] == [True, True, False]
    assert [scheme.must_speak(50, silence, 2) for silence in (10, 11)] == [False, True]
    assert scheme.must_speak(50, 1, 1), "alone"


def test_the_longest_silence():
    """Whatever is tolerated: a message in every 11th step."""
    ranks = ranks_of(2, scheme=Lazy(threshold=math.inf))
    seen = train(ranks, lambda rank, w: w - rank, np.ones(N), 1e-3, K, 43)
    spoke = [number for number, (speaks, *_) in enumerate(seen) if all(speaks)]
    assert spoke == [*range(10), 20, 31, 42]


def test_messages_are_saved_on_the_way_to_the_same_place():
    """Least squares on ten ranks whose data differ; the authors need 0.4 of the messages for MNIST."""
    rng, size, n, k = np.random.default_rng(0), 10, 200, 20
    data = [rng.normal(size=(50, n)) * (1 + rank) / 5 for rank in range(size)]
    truth = rng.normal(size=n)

    def gradient(rank: int, w: np.ndarray) -> np.ndarray:
        return data[rank].T @ (data[rank] @ (w - truth)) / 50

    counts = []
    for threshold in (0.0, 1.0):
        ranks = ranks_of(size, scheme=Lazy(threshold=threshold), spec=Spec("b", n))
        spoken = 0
        for speaks, _, w in train(ranks, gradient, np.zeros(n), 0.004, k, 400):
            spoken += sum(speaks)
            if np.linalg.norm(w - truth) < 0.2 * np.linalg.norm(truth):
                break
        else:
            pytest.fail(f"not there yet with a threshold of {threshold}")
        counts.append(spoken)
    assert counts[1] < 0.6 * counts[0]


# What is sent


@pytest.mark.parametrize("speaks", [None, True])
@pytest.mark.parametrize("size", SIZES)
def test_without_silence_it_is_the_allgather_of_top_k(size, speaks, backend):
    ranks = ranks_of(size, backend)
    ranks.speaks = [speaks] * size
    plain = ranks_of(size, backend, SparseSum(TopK("parameter"), AllGatherSum()))
    for number in range(4):
        step, other = (one.step(normal(number, size, N), K) for one in (ranks, plain))
        assert_bits_equal(step.totals[0], other.totals[0])
        for rank in range(size):
            assert_bits_equal(step.kept[rank], other.kept[rank])


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_specification_word_for_word(size, backend):
    """T and e of the text, while a draw decides who speaks; what was uploaded is what T and e came to."""
    ranks, rng = ranks_of(size, backend, spec=Spec("b", N)), np.random.default_rng(size)
    last, residual = (np.zeros((size, N), np.float32) for _ in range(2))
    entered, uploaded = (np.zeros((size, N)) for _ in range(2))
    for number in range(8):
        ranks.speaks = [bool(draw) for draw in rng.random(size) < (0.5 if number else 2)]
        grads = normal(number, size, N)
        for rank in range(size):
            if ranks.speaks[rank]:
                x = grads[rank] + residual[rank]
                chosen = np.argsort(-np.abs(x))[:K]
                last[rank], residual[rank] = 0, x
                last[rank, chosen], residual[rank, chosen] = x[chosen], 0
                entered[rank] += grads[rank]
                uploaded[rank] += last[rank]
        step, total = ranks.step(grads, K), np.zeros(N, np.float32)
        for rank in range(size):
            total = total + last[rank]
        for rank in range(size):
            silent = not ranks.speaks[rank]
            assert bool(step.reduced[rank].silent) == silent
            assert step.num_used(rank) == (0 if silent else K)
            assert_bits_equal(step.totals[rank], total)
            assert_bits_equal(step.kept[rank], residual[rank])
            assert_close(uploaded[rank] + step.kept[rank], entered[rank])
        # Counted on the wire: a message has its rank's number in front of the entries.
        others = [sum(ranks.speaks) - ranks.speaks[rank] for rank in range(size)]
        assert [(one.kind, one.words) for one in step.rounds] == [
            ("AllGather", tuple(others[rank] * (2 * K + 1) for rank in range(size)))
        ]


@pytest.mark.parametrize("memory", [memory for _, memory in parts("memory")], ids=[name for name, _ in parts("memory")])
def test_a_silent_step_has_not_happened_for_the_memory(memory, quick_backend):
    ranks = ranks_of(3, quick_backend, memory=memory)
    ranks.step(normal(0, 3, N), K)
    before = [ranks.numpy_state(state)["memory"] for state in ranks.states]
    ranks.speaks = [True, False, False]
    first = ranks.step(normal(1, 3, N), K)
    after = [ranks.numpy_state(state)["memory"] for state in ranks.states]
    for rank in (1, 2):
        assert_states_equal(after[rank], before[rank])
    if memory.keys:
        with pytest.raises(AssertionError):
            assert_states_equal(after[0], before[0])
    ranks.speaks = [False] * 3
    second = ranks.step(normal(2, 3, N), K)
    assert_bits_equal(first.totals[0], second.totals[0])
    assert total_words(second.rounds, 3) == 0, "all are silent"
    assert len(second.rounds) == 1


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_rank_whose_numbers_are_not_finite_speaks(value, backend):
    ranks = ranks_of(3, backend)
    ranks.step(normal(0, 3, N), K)
    ranks.speaks, before = [True, False, False], [ranks.numpy_state(state) for state in ranks.states]
    grads = [np.array(grad) for grad in normal(1, 3, N)]
    grads[1][5] = value
    step = ranks.step([frozen(grad) for grad in grads], K)
    assert [bool(reduced.silent) for reduced in step.reduced] == [False, False, True]
    assert step.finite == [False] * 3
    for rank in range(3):
        assert_states_equal(ranks.numpy_state(ranks.states[rank]), before[rank])
    assert all(ranks.step(normal(2, 3, N), K).finite)


def test_everybody_speaks_when_what_was_sent_does_not_fit_any_more(backend):
    ranks, other = ranks_of(2, backend), ranks_of(3, backend)
    ranks.speaks = [False, False]
    steps = [ranks.step(normal(number, 2, N), k) for number, k in enumerate((K, K, K + 1, K + 1))]
    assert [bool(step.reduced[0].silent) for step in steps] == [False, True, False, True]
    assert np.count_nonzero(steps[3].totals[0]) > K
    # A rank has come: whose state it takes over is the others'.
    other.states, other.speaks = [*ranks.states, ranks.states[0]], [False] * 3
    steps = [other.step(normal(number, 3, N), K + 1) for number in range(2)]
    assert [bool(step.reduced[0].silent) for step in steps] == [False, True]


@pytest.mark.parametrize(("size", "k"), [(2, 49), (5, 20), (2, N)])
def test_where_messages_would_exceed_the_bucket_it_is_dense(size, k, quick_backend):
    ranks = ranks_of(size, quick_backend)
    ranks.speaks = [False] * size
    grads = integers(0, size, N)
    step = ranks.step(grads, k)
    assert step.totals[0].tolist() == np.sum(grads, axis=0).tolist()
    assert not np.any(step.kept)
    assert [one.tag for one in step.rounds] == ["dense"]


def test_averages_are_of_all_ranks(quick_backend):
    """A silent rank counts: the gain is that of all of them."""
    ops, scheme, spec = quick_backend.ops, Lazy(), Spec("b", 4)
    states = [scheme.init(ops, spec) for _ in range(2)]
    for speaks, expected in (([True, True], [1, 0, 2, 0]), ([False, True], [1, 3, 0, 0])):
        x = [quick_backend.array(grad) for grad in (floats(2, 0, 0, 0), floats(0, 0, 4, 0))]
        if not speaks[0]:
            x = [quick_backend.array(grad) for grad in (floats(9, 9, 9, 9), floats(0, 6, 4, 0))]
        worlds = [World(rank, 2, gain=0.5, speaks=speaks[rank]) for rank in range(2)]
        programs = [scheme.reduce(ops, worlds[rank], spec, x[rank], 1, states[rank]) for rank in range(2)]
        results = Simulator(2, ops=ops).run(programs)
        states = [state for _, state in results]
        assert [quick_backend.numpy(reduced.total).tolist() for reduced, _ in results] == [expected] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"history": 0}, "`history` must be a whole number, 1 or more. Received: history=0"),
        ({"threshold": -1}, "`threshold` must be a number, 0 or more. Received: threshold=-1"),
        ({"threshold": math.nan}, "`threshold` must be a number, 0 or more. Received: threshold=nan"),
        ({"threshold": True}, "`threshold` must be a number, 0 or more. Received: threshold=True"),
    ],
)
def test_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Lazy(**arguments)
