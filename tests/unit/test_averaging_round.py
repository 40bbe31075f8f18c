"""The round on the wire: weighted means, ranks that do not count, the trailer. Check values of random_tma.md."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import assert_bits_equal, assert_close, floats, frozen
from hypothesis import given
from hypothesis import strategies as st

from hvd_sparse.averaging.round import Report, average, keep_progress
from hvd_sparse.drivers.simulate import Simulator


def run(backend, models, reports, given_parts=None):
    """The outcomes of all ranks; `models`: of each rank one vector, or a list of parts."""
    given_parts = given_parts or [None] * len(models)
    programs = []
    for model, report, extra in zip(models, reports, given_parts):
        parts = [backend.array(part) for part in (model if isinstance(model, list) else [model])]
        theirs = None if extra is None else backend.array(extra)
        programs.append(average(backend.ops, parts, report, "model", theirs))
    simulator = Simulator(len(models), ops=backend.ops)
    return simulator, simulator.run(programs)


def test_weighted_mean(backend):
    models = [floats(2, 4), floats(6, 0), floats(100, 100)]
    _, outcomes = run(backend, models, [Report(1), Report(3), Report(0)])
    for outcome in outcomes:
        assert_bits_equal(backend.numpy(outcome.means[0]), floats(5, 1))
        assert outcome.weight == 4


def test_delta_rule(backend):
    now, copy, mean = (backend.array(floats(x)) for x in (1.3, 1.0, 0.8))
    assert_close(backend.numpy(keep_progress(mean, now, copy)), [1.1], 1e-6)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_model_that_is_not_finite_does_not_count(wrong, backend):
    models = [floats(1, 2), floats(wrong, 5), floats(3, 4)]
    _, outcomes = run(backend, models, [Report(1)] * 3)
    for outcome in outcomes:
        assert_bits_equal(backend.numpy(outcome.means[0]), floats(2, 3))
        assert (outcome.weight, outcome.num_finite) == (2, 2)


def test_one_bad_part_takes_out_the_whole_rank(backend):
    models = [[floats(1), floats(2)], [floats(5), floats(np.nan)]]
    _, outcomes = run(backend, models, [Report(1)] * 2)
    assert [backend.numpy(part).tolist() for part in outcomes[1].means] == [[1], [2]]
    _, outcomes = run(backend, [floats(1), floats(5)], [Report(1), Report(1, finite=False)])
    assert backend.numpy(outcomes[0].means[0]).tolist() == [1]


def test_nobody_has_weight(backend):
    _, outcomes = run(backend, [floats(1), floats(np.nan)], [Report(0), Report(5)])
    assert all(outcome.means is None for outcome in outcomes)


def test_trailer(backend):
    reports = [Report(2, 7, done=True), Report(1, 3, wants_stop=True), Report(0, 0, done=True)]
    _, outcomes = run(backend, [floats(0)] * 3, reports)
    for outcome in outcomes:
        assert (outcome.weight, outcome.steps, outcome.num_done, outcome.stop, outcome.num_finite) == (
            3,
            10,
            2,
            True,
            3,
        )
    _, outcomes = run(backend, [floats(0)] * 2, [Report(1)] * 2)
    assert not outcomes[0].stop


def test_what_one_rank_gives(backend):
    models, theirs = [floats(1), floats(3)], [floats(7, 8), floats(np.nan, 9)]
    _, outcomes = run(backend, models, [Report(5, gives=True), Report(5)], theirs)
    for outcome in outcomes:
        assert backend.numpy(outcome.given).tolist() == [7, 8]
        assert backend.numpy(outcome.means[0]).tolist() == [2]
    _, outcomes = run(backend, models, [Report(1), Report(1, gives=True)], theirs)
    assert outcomes[0].given is None, "what it gives is not finite"


def test_one_collective_of_constant_shape(backend):
    simulator, _ = run(backend, [[floats(1, 2), floats(3)]] * 4, [Report(1)] * 4)
    (only,) = simulator.rounds
    assert (only.kind, only.tag, only.shape) == ("AllReduce", "model", (9,))
    other, _ = run(backend, [[floats(1, 2), floats(np.nan)]] * 4, [Report(0, 9, True, True)] * 4)
    assert other.rounds == simulator.rounds


@given(
    values=st.lists(st.lists(st.integers(-50, 50), min_size=3, max_size=3), min_size=1, max_size=5),
    weights=st.lists(st.integers(0, 9), min_size=5, max_size=5),
)
def test_the_mean_is_the_weighted_mean(values, weights, quick_backend):
    models = [frozen(row, np.float32) for row in values]
    used = np.array(weights[: len(models)], np.float64)
    _, outcomes = run(quick_backend, models, [Report(float(w)) for w in used])
    if used.sum() == 0:
        assert outcomes[0].means is None
        return
    expected = (used[:, None] * np.array(values)).sum(0) / used.sum()
    for outcome in outcomes:
        assert_close(quick_backend.numpy(outcome.means[0]), expected, 1e-6)
