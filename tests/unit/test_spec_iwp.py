"""Check values of importance-weighted pruning: shared indices by |v| / |w| (iwp.md)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers import (
    E4,
    Ranks,
    assert_bits_equal,
    assert_conserved,
    assert_same_on_ranks,
    floats,
    frozen,
    short_repr,
    total_words,
)
from methods import SIZES, integers, normal

from hvd_sparse.collectives.shared_allreduce import SharedAllReduce
from hvd_sparse.config import sparse_config
from hvd_sparse.drivers.simulate import Simulator, run
from hvd_sparse.exchange import Exchange
from hvd_sparse.memories.momentum import Momentum
from hvd_sparse.memories.residual import Residual
from hvd_sparse.ops.numpy import NumpyOps
from hvd_sparse.schemes.sparse import SparseSum
from hvd_sparse.sparsifiers.importance import Importance
from hvd_sparse.sparsifiers.leader import INDEX_CARRIERS
from hvd_sparse.types import Spec, World

WEIGHTS, ACCUMULATED = floats(0.5, -0.01, 2, 0, 0.1), floats(0.05, 0.02, 0.1, 0.001, -0.3)
every_carrier = pytest.mark.parametrize("carrier", INDEX_CARRIERS)


def ranks_of(part: Importance, size: int, backend=None, n: int = 16, weights=None, memory=None) -> Ranks:
    ranks = Ranks(Exchange(Spec("b", n), SparseSum(part, SharedAllReduce()), memory or Residual()), size, backend)
    if weights is not None:
        ranks.weights = weights
    return ranks


def indices_of(step, backend) -> list[list[int]]:
    """Those that each rank used."""
    return [backend.numpy(reduced.used.indices).tolist() for reduced in step.reduced]


def root_of(seed: int, step: int, size: int) -> int:
    """The rank whose importance counts: the only one with entries of its own, in a probe with one entry per rank."""
    rank_of_index = [frozen(np.eye(size)[rank], np.float32) for rank in range(size)]
    probe = ranks_of(Importance(eps=1.0, seed=seed), size, n=size, weights=frozen(np.ones(size), np.float32))
    probe.number = step
    return int(probe.step(rank_of_index, 1).reduced[0].used.indices[0])


def seed_with_root(root: int, size: int) -> int:
    return next(seed for seed in itertools.count() if root_of(seed, 0, size) == root)


@pytest.mark.parametrize(
    ("eps", "expected", "top"),
    [
        (1e-8, [0.1, 1.999998, 0.05, 100_000, 2.9999997], [3, 4]),
        (1e-3, [0.0998004, 1.8181818, 0.0499750, 1.0, 2.9702970], [1, 4]),
    ],
)
def test_scores(eps, expected, top, backend):
    world, x = World(0, 1, weights=lambda: backend.array(WEIGHTS)), backend.array(ACCUMULATED)
    part = Importance(eps=eps)
    assert backend.numpy(part.scores(backend.ops, world, x)) == pytest.approx(expected, rel=1e-6)
    ((indices, _),) = Simulator(1, ops=backend.ops).run([part.select(backend.ops, world, Spec("b", 5), x, 2, {})])
    assert backend.numpy(indices).tolist() == top


def test_the_usual_eps_is_a_thousandth_of_the_root_mean_square(backend):
    world, x = World(0, 1, weights=lambda: backend.array(floats(3, 0, 0, -4))), backend.array(floats(3, 1, 0, 4))
    eps = 2.5e-3
    expected = [3 / (3 + eps), 1 / eps, 0, 4 / (4 + eps)]
    assert backend.numpy(Importance().scores(backend.ops, world, x)) == pytest.approx(expected, rel=1e-5)
    world = World(0, 1, weights=lambda: backend.array(floats(0, 0, 0, 0)))
    zero = backend.numpy(Importance().scores(backend.ops, world, x))
    assert np.isfinite(zero).all(), "weights that are all zero leave the order of |x|"
    assert np.argsort(zero).tolist() == [2, 1, 0, 3]


@every_carrier
def test_e4(carrier, backend):
    part = Importance(eps=1e-8, index_carrier=carrier, seed=seed_with_root(0, 4))
    step = ranks_of(part, 4, backend, weights=floats(*[2, 1, -4, 0.5] * 4)).step(E4, 4)
    assert indices_of(step, backend) == [[3, 7, 13, 15]] * 4
    expected = np.zeros(16)
    expected[[3, 7, 13, 15]] = [-31, 3, -16, 18]
    assert step.totals[0].tolist() == expected.tolist()
    assert_same_on_ranks(step.totals)
    assert_conserved(step.accumulated, step.totals[0], step.kept, tolerance=0)
    assert total_words(step.rounds, 4) == (4 + 6 if carrier == "broadcast" else 12)
    assert len(step.rounds) == 2


@pytest.mark.parametrize("scale", [2.0**-20, 0.37, 1000.0])
def test_the_scale_of_a_tensor_does_not_matter(scale):
    x, w = normal(0, 1, 200)[0], normal(1, 1, 200)[0]
    found = [
        run(
            Importance().select(
                NumpyOps(),
                World(0, 1, weights=lambda s=s: np.float32(s) * w),
                Spec("b", 200),
                np.float32(s) * x,
                20,
                {},
            )
        )[0].tolist()
        for s in (1.0, scale)
    ]
    assert found[0] == found[1]


def test_roots_are_drawn_evenly():
    roots = [root_of(3, step, 4) for step in range(400)]
    assert min(roots.count(rank) for rank in range(4)) > 70
    assert roots != [root_of(4, step, 4) for step in range(400)]


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_as_roots_send_what_each_of_them_wants(size, backend):
    """An entry of each rank, in another place each."""
    n, k = 8 * size, 2 * size
    grads = [frozen(np.isin(np.arange(n), (8 * rank, 8 * rank + 3)) * 5.0, np.float32) for rank in range(size)]
    step = ranks_of(Importance(num_roots=99), size, backend, n).step(grads, k)
    assert indices_of(step, backend)[0] == sorted(8 * rank + extra for rank in range(size) for extra in (0, 3))
    assert step.totals[0].tolist() == np.sum(grads, axis=0).tolist()
    assert not np.any(step.kept)


def test_roots_that_agree_leave_room(backend):
    """Two roots, one opinion: half the entries, in messages of the usual shape."""
    grads = normal(0, 3, 16)[:1] * 3
    step = ranks_of(Importance(num_roots=2), 3, backend).step(grads, 4)
    assert len(indices_of(step, backend)[0]) == 2
    assert [one.shape for one in step.rounds] == [(4,), (4,)]
    assert_conserved(step.accumulated, step.totals[0], step.kept, 1e-6)


def test_no_entry_starves():
    """A quarter of 16 entries wins by importance for ever; the others come as often as the random block says."""
    grads = [frozen((np.arange(16) < 2) * 100.0 + 0.01, np.float32)] * 2
    part, steps = Importance(eps=1.0, random_share=0.5), 800
    ranks, counts = ranks_of(part, 2, weights=frozen(np.ones(16), np.float32), memory=None), np.zeros(16)
    for _ in range(steps):
        counts[ranks.step(grads, 4).reduced[0].used.indices] += 1
    assert (counts[:2] == steps).all()
    rate, sigma = 1 / 8, (1 / 8 * 7 / 8 / steps) ** 0.5
    assert np.abs(counts[2:] / steps - rate).max() < 4 * sigma
    without = ranks_of(Importance(eps=1.0), 2, weights=frozen(np.ones(16), np.float32))
    seen = {int(index) for _ in range(5) for index in without.step(grads, 2).reduced[0].used.indices}
    assert seen == {0, 1}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("random_share", [0.0, 0.9])
def test_conservation_of_the_accumulated_velocity(size, random_share, backend):
    part = Importance(num_roots=2, random_share=random_share)
    ranks = ranks_of(part, size, backend, n=37, memory=Momentum(0.5))
    for number in range(6):
        step = ranks.step(integers(number, size, 37), 5)
        assert_same_on_ranks(step.totals)
        assert len({tuple(indices) for indices in indices_of(step, backend)}) == 1
        assert_conserved(step.accumulated, step.totals[0], step.kept, tolerance=0)


def test_one_of_sixty_four():
    """The bar: k + 2k(P-1)/P words in 2 rounds; values are a fiftieth of the dense words and less."""
    n, size = 6400, 4
    step = ranks_of(Importance(index_carrier="broadcast"), size, n=n).step(normal(0, size, n), n // 64)
    values = total_words(step.rounds[1:], size)
    assert total_words(step.rounds, size) == 100 + values == 250
    assert len(step.rounds) == 2
    assert 2 * n * (size - 1) / size / values >= 50


def test_equal_weights_are_top_k_of_the_root(backend):
    ones = frozen(np.ones(16), np.float32)
    part = Importance(eps=1.0, seed=seed_with_root(2, 4))
    step = ranks_of(part, 4, backend, weights=ones).step(E4, 4)
    assert indices_of(step, backend)[0] == [0, 8, 9, 12]


def test_weights_are_needed():
    with pytest.raises(ValueError, match=r"'importance' needs the weights: give World\(\.\.\., weights="):
        run(Importance().select(NumpyOps(), World(0, 1), Spec("b", 5), ACCUMULATED, 2, {}))


def test_only_who_asks_pays_for_weights():
    """The callable is not called by others."""

    def never():
        raise AssertionError

    scheme = sparse_config(sparsifier="topk", collective="allgather").scheme()
    run(scheme.reduce(NumpyOps(), World(0, 1, weights=never), Spec("b", 5), ACCUMULATED, 2, {}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_roots": 0}, "`num_roots` must be a whole number"),
        ({"eps": 0.0}, "`eps` must be a positive number"),
        ({"random_share": 1.0}, r"`random_share` must be in \[0, 1\). Received: random_share=1.0"),
        ({"random_share": -0.1}, r"`random_share` must be in \[0, 1\)"),
        ({"random_share": True}, r"`random_share` must be in \[0, 1\)"),
        ({"index_carrier": "pigeon"}, "`index_carrier` must be one of 'allreduce', 'broadcast'"),
        ({"index_carrier": "broadcast", "num_roots": 2}, "`index_carrier` must be 'allreduce' for several roots"),
    ],
    ids=short_repr,
)
def test_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Importance(**arguments)


def test_ranks_with_other_seeds_are_noticed():
    described = [sparse_config(sparsifier=Importance(seed=seed)).describe() for seed in (0, 1)]
    assert described[0] != described[1]
    with pytest.raises(TypeError, match="`seed` must be an int"):
        Importance(seed=0.5)


def test_bits_are_those_of_the_dense_sum_at_density_one(backend):
    grads = normal(0, 3, 16)
    step = ranks_of(Importance(num_roots=3), 3, backend).step(grads, 16)
    assert_bits_equal(step.totals[0], grads[0] + grads[1] + grads[2])
