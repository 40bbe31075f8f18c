"""What methods declare about themselves is true: which pairs are legal, what they cost, what they share."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from helpers import BACK_ENDS, Ranks, assert_bits_equal, assert_same_on_ranks, total_words
from methods import DEFAULTS, KEPT, METHODS, PAIRS, SIZE, SIZES, is_legal, normal, parts, ranks_of

from hvd_sparse import registry
from hvd_sparse.config import sparse_config
from hvd_sparse.controllers import Seen
from hvd_sparse.exchange import Exchange
from hvd_sparse.schemes.sparse import SparseSum
from hvd_sparse.sparsifiers.topk import TopK
from hvd_sparse.types import Spec

# Words per rank and step: the bar of each collective, and of each scheme that stands alone.
BARS = {
    "owner_reduce": lambda n, k, size: 4 * (k // size) * (size - 1),
    "hierarchical": lambda n, k, size: 4 * (k // size) * (size - 1),  # here every host has one rank
    "allgather": lambda n, k, size: 2 * k * (size - 1),
    "by_size": lambda n, k, size: 2 * k * (size - 1),  # so few entries go in one round
    "shared_allreduce": lambda n, k, size: 2 * k * (size - 1) / size,
    "gtopk": lambda n, k, size: 2 * k * (1 + (size - 1).bit_length()) * (size > 1),
    "dense": lambda n, k, size: 2 * n * (size - 1) / size,
    "sketch": lambda n, k, size: 2 * (size - 1) / size * (3 * 2 * k + 2 * k) + 2 * k * (size > 1),
    "low_rank": lambda n, k, size: 2 * (size - 1) / size * (4 * (31 + 32) + 17),  # a matrix of 31 * 32, and the rest
    # Half of it as room for what the data may make of 4k(P-1)/P, and the round of every 64th step.
    "lazy": lambda n, k, size: (2 * k + 1) * (size - 1),
    "static": lambda n, k, size: 4 * (k // size) * (size - 1),
    "ok_topk": lambda n, k, size: (1.5 * 4 * k + 2 * (size - 1)) * (size - 1) / size,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "name", [*registry.METHODS["collective"], *sorted(set(registry.METHODS["scheme"]) - {"sparse"})]
)
def test_words(name, size):
    assert name in BARS, f"state the words of {name!r} per rank and step in BARS"
    methods = [
        method
        for method, (scheme, _) in METHODS.items()
        if name in [part.partition("(")[0] for part in method.split("-") if part in DEFAULTS]
        and (not isinstance(scheme, SparseSum) or _sends_nothing_to_choose(scheme))
    ]
    assert methods
    for method in methods:
        step = ranks_of(method, size, BACK_ENDS["numpy"]()).step(normal(0, size), KEPT)
        words, bar = total_words(step.rounds, size), BARS[name](SIZE, KEPT, size)
        varying = getattr(METHODS[method][0], "varying_words", False)
        assert words <= bar if varying else words == pytest.approx(bar), method


def _sends_nothing_to_choose(scheme: SparseSum) -> bool:
    return scheme.sparsifier.blind or isinstance(scheme.sparsifier, TopK)


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
def test_declared_shared_indices_are_shared(sparsifier, quick_backend):
    ranks = Ranks(Exchange(Spec("b", SIZE), *_allgathered(sparsifier)), 3, quick_backend)
    for number in range(3):
        step = ranks.step(normal(number, 3), KEPT)
        assert_same_on_ranks([quick_backend.numpy(one.used.indices) for one in step.reduced], "indices")


@sparsifiers("blind")
def test_declared_blindness_is_true(sparsifier, quick_backend):
    """A blind selection takes the same coordinates whatever the values: rescaled, it is unbiased."""
    exchange = Exchange(Spec("b", SIZE), *_allgathered(sparsifier))
    steps = [Ranks(exchange, 1, quick_backend).step(normal(seed, 1), KEPT) for seed in (0, 1)]
    indices = [quick_backend.numpy(step.reduced[0].used.indices) for step in steps]
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
        assert plan.density in controller.ladder()
        assert isinstance(plan.density, float)
        assert plan.reason
        assert json.loads(json.dumps(following)) == following
        state = following
        densities.append(plan.density)
    assert len(set(densities)) <= 8
    assert all(math.isfinite(density) for density in densities)
