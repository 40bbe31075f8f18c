"""Whole rounds of several ranks in one process."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from helpers import assert_bits_equal, assert_close, assert_conserved, floats
from hypothesis import given
from hypothesis import strategies as st

from hvd_sparse.averaging.averager import PeriodicAverager, Snapshot
from hvd_sparse.averaging.outer import OuterSGD
from hvd_sparse.averaging.settings import check_settings
from hvd_sparse.config import sparse_config
from hvd_sparse.drivers.simulate import Simulator
from hvd_sparse.ops.numpy import NumpyOps
from hvd_sparse.sparsifiers.topk import TopK
from hvd_sparse.types import HvdSparseError, World


class Model:
    """A replica whose parameters are a vector."""

    def __init__(self, values, averaged=(), given=None):
        self.values = np.array(values, np.float32)
        self.averaged = np.array(averaged, np.float32)
        self.given = None if given is None else np.array(given, np.float32)
        self.resets = self.writes = 0
        self.shapes = ((1,), (len(self.values) - 1,))

    def read(self):
        return Snapshot(self.values.copy(), self.averaged.copy(), None if self.given is None else self.given.copy())

    def write(self, parameters, averaged=None, given=None):
        self.writes += 1
        self.values = np.array(parameters)
        self.averaged = self.averaged if averaged is None else np.array(averaged)
        self.given = self.given if given is None else np.array(given)

    def reset_optimizer(self):
        self.resets += 1

    def digest(self, values):
        return zlib.crc32(values.tobytes())

    def export(self, values):
        return np.array(values)

    restore = export


class Ranks:
    """Averagers that begin with equal models."""

    def __init__(self, size, start=(0.0, 0.0), models=None, **settings):
        settings = check_settings(**{"every_steps": 1, **settings})
        self.models = models or [Model(start) for _ in range(size)]
        self.averagers = [PeriodicAverager(NumpyOps(), model, settings) for model in self.models]
        for averager in self.averagers:
            averager.begin()

    def train(self, *moves, steps=None):
        """Each rank moves its parameters, in one step or in `steps`; None: it has no data."""
        for rank, (model, averager, move) in enumerate(zip(self.models, self.averagers, moves)):
            if move is not None:
                model.values = model.values + np.float32(move)
                for _ in range(steps[rank] if steps else 1):
                    averager.schedule.count_step()

    def programs(self, done=(), **arguments):
        size = len(self.averagers)
        return [
            averager.round(World(rank, size, averager.num_rounds), done=rank in done, **arguments)
            for rank, averager in enumerate(self.averagers)
        ]

    def round(self, **arguments):
        simulator = Simulator(len(self.averagers))
        outcomes = simulator.run(self.programs(**arguments))
        return simulator, outcomes

    @property
    def values(self):
        return [model.values for model in self.models]


def assert_all_equal(ranks, expected):
    for values in ranks.values:
        assert_bits_equal(values, ranks.values[0])
        assert_close(values, expected, 1e-6)


def test_plain_mean_of_those_that_stepped():
    ranks = Ranks(3)
    ranks.train((2, 4), (6, 0), None)
    _, outcomes = ranks.round()
    assert_all_equal(ranks, (4, 2))
    assert (outcomes[0].steps, outcomes[0].weight) == (2, 2)


def test_weights_by_steps_and_samples():
    ranks = Ranks(3, weights="steps")
    ranks.train((2, 4), (6, 0), None, steps=(1, 3, 0))
    ranks.round()
    assert_all_equal(ranks, (5, 1))
    ranks = Ranks(2, weights="samples")
    ranks.train((2, 4), (6, 0))
    ranks.averagers[0].schedule.samples, ranks.averagers[1].schedule.samples = 10, 30
    ranks.round()
    assert_all_equal(ranks, (5, 1))


@pytest.mark.parametrize(("policy", "resets"), [("local", [1, 0]), ("average", [0, 0]), ("reset", [1, 1])])
def test_a_lost_model_comes_back(policy, resets, caplog):
    ranks = Ranks(2, optimizer_state=policy)
    ranks.train((np.nan, 1), (4, 2))
    _, outcomes = ranks.round()
    assert_all_equal(ranks, (4, 2))
    assert outcomes[0].num_finite == 1
    assert [model.resets for model in ranks.models] == resets
    assert "Rank 0's model is not finite" in caplog.text


def test_all_models_lost_is_the_anchor():
    ranks = Ranks(2, start=(7, 8))
    ranks.train((np.nan, 1), (4, np.inf))
    ranks.round()
    assert_all_equal(ranks, (7, 8))


def test_nobody_stepped():
    ranks = Ranks(2, start=(7, 8))
    ranks.round(done=(0, 1))
    assert_all_equal(ranks, (7, 8))


def test_one_rank_is_the_identity():
    for outer in (None, OuterSGD()):
        ranks = Ranks(1, start=(0.1, 0.3), outer=outer, weights="steps")
        ranks.train((1e-3, 7), steps=(3,))
        before = ranks.values[0].copy()
        simulator, _ = ranks.round()
        assert_bits_equal(ranks.values[0], before)
        assert (simulator.rounds, ranks.models[0].writes) == ([], 0)
        assert ranks.averagers[0].num_rounds == 1


def test_outer_lr_one_is_the_plain_mean_bit_for_bit():
    plain, outer = Ranks(3), Ranks(3, outer=OuterSGD(1, momentum=0))
    rng = np.random.default_rng(0)
    for _ in range(5):
        moves = rng.normal(size=(3, 2))
        for ranks in (plain, outer):
            ranks.train(*moves)
            ranks.round()
        assert_bits_equal(plain.values[0], outer.values[0])


def test_diloco_over_rounds():
    ranks = Ranks(2, start=(1.0,), outer=OuterSGD())
    for mean, expected in ((0.8, 0.734), (0.7, 0.57538), (0.65, 0.553287)):
        anchor = ranks.values[0][0]
        ranks.train(mean - 0.1 - anchor, mean + 0.1 - anchor)
        ranks.round()
        assert_all_equal(ranks, (expected,))


def test_buffers_and_optimizer_state_beside_the_model():
    models = [Model((0.0,), averaged=(rank, 1), given=(rank + 5, 2)) for rank in range(2)]
    ranks = Ranks(2, models=models, outer=OuterSGD(0.5, momentum=0))
    ranks.train(2, 4)
    ranks.round()
    assert_all_equal(ranks, (1.5,))  # half of the way
    for model in models:
        assert model.averaged.tolist() == [0.5, 1]
        assert model.given.tolist() == [5, 2]


def test_overlap_keeps_the_steps_made_meanwhile():
    ranks = Ranks(2, start=(1.0,), overlap=True)
    ranks.train(0.0, -0.4)  # the mean will be 0.8
    programs = ranks.programs()
    requests = [program.send(None) for program in programs]
    ranks.train(0.3, 0.0)
    total = requests[0].tensor + requests[1].tensor
    for program in programs:
        with pytest.raises(StopIteration):
            program.send(total)
    assert_close(ranks.values[0], [1.1], 1e-6)
    assert_close(ranks.values[1], [0.8], 1e-6)
    assert [averager.schedule.steps for averager in ranks.averagers] == [1, 1], "they count in the next round"
    ranks.round()
    assert_all_equal(ranks, (0.95,))


def test_progress_of_a_lost_model_is_not_kept():
    ranks = Ranks(2, start=(1.0,), overlap=True)
    ranks.train(np.nan, 1.0)
    programs = ranks.programs()
    requests = [program.send(None) for program in programs]
    ranks.train(1.0, None)
    for program in programs:
        with pytest.raises(StopIteration):
            program.send(requests[0].tensor + requests[1].tensor)
    assert_all_equal(ranks, (2.0,))


def test_ranks_that_start_from_different_models():
    ranks = Ranks(2)
    Simulator(2).run([averager.compare() for averager in ranks.averagers])
    ranks = Ranks(2, models=[Model((1, 2)), Model((1, 2.0000002))])
    with pytest.raises(HvdSparseError, match="Ranks start from different models"):
        Simulator(2).run([averager.compare() for averager in ranks.averagers])


@pytest.mark.parametrize("digests", [(0xFFFF0001, 0xFFFF0002), (0x00010007, 0x00020007), (7, 7)])
def test_all_bits_of_a_digest_count(digests):
    ranks = Ranks(2)
    for model, digest in zip(ranks.models, digests):
        model.digest = lambda values, digest=digest: digest
    if len(set(digests)) == 1:
        Simulator(2).run([averager.compare() for averager in ranks.averagers])
        return
    with pytest.raises(HvdSparseError):
        Simulator(2).run([averager.compare() for averager in ranks.averagers])


def test_gradients_of_the_warmup():
    ranks = Ranks(3, warmup_steps=1)
    gradients = [floats(1, 2), floats(3, 6), floats(9, 9)]
    programs = [a.gradients(g, done=r == 2) for r, (a, g) in enumerate(zip(ranks.averagers, gradients))]
    outcomes = Simulator(3).run(programs)
    assert outcomes[0].means[0].tolist() == [2, 4]
    assert outcomes[0].num_done == 1
    assert not ranks.averagers[0].schedule.warming_up


# Sparse deltas

SIZE = 37


def sparse_ranks(size, density=0.1, **settings):
    return Ranks(size, start=np.arange(SIZE), sparse=sparse_config(density, sparsifier="topk"), **settings)


@given(
    size=st.sampled_from([1, 2, 3, 5]), seed=st.integers(0, 99), weights=st.sampled_from(["uniform", "steps"]),
    empty=st.booleans(),
)  # fmt: skip
def test_sparse_deltas_are_conserved(size, seed, weights, empty):
    rng, ranks = np.random.default_rng(seed), sparse_ranks(size, weights=weights)
    for _ in range(4):
        steps = [0 if empty and rank == 0 else rank + 1 for rank in range(size)]
        moves = [rng.normal(size=SIZE) if count else None for count in steps]
        owed = [averager.residual["memory"]["residual"] for averager in ranks.averagers]
        before = ranks.averagers[0].anchor
        ranks.train(*moves, steps=steps)
        if size == 1:
            ranks.round()
            return
        counts = [bool(count) if weights == "uniform" else count for count in steps]
        shares = np.array(counts) / max(1, sum(counts))
        deltas = [share * (before - values) for share, values in zip(shares, ranks.values)]
        ranks.round()
        total = before - ranks.averagers[0].anchor
        kept = [averager.residual["memory"]["residual"] for averager in ranks.averagers]
        assert_conserved([e + d for e, d in zip(owed, deltas)], total, kept)
        assert_all_equal(ranks, ranks.averagers[0].anchor)


def test_a_dense_flush_sends_everything():
    sparse, plain = sparse_ranks(3), Ranks(3, start=np.arange(SIZE))
    rng = np.random.default_rng(0)
    for number in range(3):
        for ranks in (sparse, plain):
            ranks.train(*np.random.default_rng(number).normal(size=(3, SIZE)))
            ranks.round()
    assert np.abs(sparse.values[0] - plain.values[0]).max() > 0.1
    sparse.train(*rng.normal(size=(3, SIZE)))
    sparse.round(dense=True)
    assert all(not averager.residual["memory"]["residual"].any() for averager in sparse.averagers)
    sparse.round(dense=True)  # nothing is left to send


def test_density_one_is_the_plain_mean():
    sparse, plain = sparse_ranks(3, density=1.0), Ranks(3, start=np.arange(SIZE))
    for number in range(3):
        for ranks in (sparse, plain):
            ranks.train(*np.random.default_rng(number).normal(size=(3, SIZE)))
            ranks.round()
    assert_close(sparse.values[0], plain.values[0], 1e-6)


@pytest.mark.parametrize("scope", ["bucket", "parameter"])
def test_a_sparsifier_knows_the_parameters(scope):
    """The first element is a parameter of its own, which hardly moves."""
    ranks = Ranks(2, start=np.zeros(SIZE), sparse=sparse_config(0.1, sparsifier=TopK(scope)))
    ranks.train(*[np.r_[0.01, np.arange(1, SIZE)]] * 2)
    ranks.round()
    assert bool(ranks.averagers[0].anchor[0]) is (scope == "parameter")


def test_sparse_with_a_lost_model():
    ranks = sparse_ranks(2)
    ranks.train(np.full(SIZE, np.nan), np.ones(SIZE))
    ranks.round()
    assert np.isfinite(ranks.averagers[0].residual["memory"]["residual"]).all()
    assert_all_equal(ranks, ranks.averagers[1].anchor)


def test_sparse_with_lost_buffers_everywhere():
    ranks = Ranks(
        2,
        models=[Model(np.zeros(SIZE), averaged=[np.nan]) for _ in range(2)],
        sparse=sparse_config(0.5, sparsifier="topk"),
    )
    ranks.train(np.ones(SIZE), np.ones(SIZE))
    ranks.round()
    assert_all_equal(ranks, np.zeros(SIZE))


# Saved states


def test_saved_and_loaded_goes_on_bit_for_bit():
    settings = {"sparse": sparse_config(0.1, sparsifier="topk"), "outer": OuterSGD(), "start": np.arange(SIZE)}
    ranks = Ranks(2, **settings)

    def train(ranks, seed):
        ranks.train(*np.random.default_rng(seed).normal(size=(2, SIZE)))

    train(ranks, 0)
    ranks.round()
    train(ranks, 1)
    other = Ranks(2, models=[Model(values) for values in ranks.values], **{k: settings[k] for k in ("sparse", "outer")})
    for rank, averager in enumerate(ranks.averagers):
        other.averagers[rank].load(averager.save(World(rank, 2)), World(rank, 2))
    for both in (ranks, other):
        train(both, 2)
        both.round()
        both.round(dense=True)
    assert_bits_equal(other.values[0], ranks.values[0])
    assert other.averagers[0].num_rounds == 3


def test_the_residual_is_its_ranks_own(caplog):
    ranks = sparse_ranks(2)
    ranks.train(np.arange(SIZE), np.ones(SIZE))
    ranks.round()
    saved = ranks.averagers[0].save(World(0, 2))
    newcomer = sparse_ranks(3).averagers[2]
    newcomer.load(saved, World(2, 3))
    assert newcomer.residual == {}
    assert "Rank 2 of 3 loads the averaging state of rank 0 of 2" in caplog.text
    newcomer.begin()
    assert not newcomer.residual["memory"]["residual"].any()


def test_states_of_something_else():
    averager = Ranks(1).averagers[0]
    with pytest.raises(ValueError, match="must come from averaging_state_dict"):
        averager.load({"version": 1}, World(0, 1))
    saved = Ranks(1, start=(1, 2, 3)).averagers[0].save(World(0, 1))
    with pytest.raises(ValueError, match="as many parameters as this one, 2"):
        averager.load(saved, World(0, 1))
