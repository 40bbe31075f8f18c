"""Check values of Ok-Topk: thresholds that are reused, regions that ranks agree on."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
from helpers import (
    E4,
    Ranks,
    assert_bits_equal,
    assert_conserved,
    assert_same_on_ranks,
    assert_states_equal,
    frozen,
    total_words,
    watched,
)
from methods import constant, integers, normal

from hvd_sparse.drivers.simulate import Simulator
from hvd_sparse.exchange import Exchange
from hvd_sparse.memories.residual import Residual
from hvd_sparse.ops.numpy import NumpyOps
from hvd_sparse.schemes.ok_topk import OkTopk
from hvd_sparse.types import Spec, World
from hvd_sparse.wire import FP32

OPS = NumpyOps()
SIZES = [1, 2, 3, 5, 8]


def ranks_of(n: int, size: int, backend=None, **arguments: Any) -> Ranks:
    return Ranks(Exchange(Spec("b", n), OkTopk(**arguments), Residual()), size, backend)


def nonzeros(vector: np.ndarray) -> dict[int, float]:
    return {int(index): float(vector[index]) for index in np.flatnonzero(vector)}


def states(ranks: Ranks) -> list[dict[str, Any]]:
    return [ranks.numpy_state(state)["scheme"] for state in ranks.states]


def cuts(ranks: Ranks) -> list[int]:
    """Between the regions; equal on all ranks."""
    found = states(ranks)
    assert_same_on_ranks([state["cuts"] for state in found], "cuts")
    assert {int(state["num_ranks"]) for state in found} == {ranks.size}
    assert not found[0]["cuts"][ranks.size - 1 :].any()
    return found[0]["cuts"][: ranks.size - 1].tolist()


def values_of(ranks: Ranks, key: str) -> list[float]:
    return [float(state[key]) for state in states(ranks)]


def exchange(
    scheme: OkTopk, x: list[np.ndarray], k: int, step: int = 0, before: Any = None
) -> tuple[list[Any], Simulator, list[list[Any]]]:
    """Results, counts and requests of one exchange of accumulators, on NumPy."""
    simulator, spec, size = Simulator(len(x)), Spec("b", len(x[0])), len(x)
    before = before or [scheme.init(OPS, spec)] * size
    seen: list[list[Any]] = [[] for _ in x]
    programs = [scheme.reduce(OPS, World(r, size, step), spec, x[r], k, before[r]) for r in range(size)]
    return simulator.run([watched(program, seen[r]) for r, program in enumerate(programs)]), simulator, seen


def num_selected(seen: list[list[Any]]) -> list[int]:
    """|S| by rank: what the alltoall distributes."""
    return [int(sum(next(one for one in requests if one.tag.startswith("entries")).splits)) for requests in seen]


def num_sums(seen: list[list[Any]], n: int) -> list[int]:
    """Entries that are not padding in each owner's last message."""
    counts = []
    for requests in seen:
        words = requests[-1].tensor
        places, _ = FP32().unpack(OPS, n, words.shape[1] // 2, words)
        counts.append(int(np.count_nonzero(places < n)))
    return counts


# The shared data


def test_e4(backend):
    ranks = ranks_of(16, 4, backend)
    step = ranks.step(E4, 4)
    assert_same_on_ranks(step.totals)
    assert cuts(ranks) == [7, 9, 11]
    assert values_of(ranks, "global") == [15] * 4
    assert values_of(ranks, "local") == [13] * 4
    assert nonzeros(step.totals[0]) == {0: 32, 6: -29, 11: 15, 12: 44}
    assert [float(np.abs(kept).sum()) for kept in step.kept] == [120, 120, 106, 78]
    assert [float(kept.sum()) for kept in step.kept] == [-10, -30, -2, -52]
    assert (step.kept[0][8], step.kept[2][8]) == (15, -15), "they cancelled"
    assert_conserved(step.accumulated, step.totals[0], step.kept, 0)


def test_e4_words():
    """The last message has room for two entries of each owner. The text gathers magnitudes before it (7 words): the
    largest sums themselves say as much."""
    results, simulator, seen = exchange(OkTopk(), E4, 4)
    assert [(one.kind, max(one.words)) for one in simulator.rounds] == [
        ("AllReduce", 4.5), ("AllToAll", 10), ("AllGather", 12),
    ]  # fmt: skip
    assert str(seen[0][0].tensor.dtype) == "int64", "sums of indices may not fit into 32 bits"
    applied = np.flatnonzero(results[0][0].total)
    region = np.searchsorted([7, 9, 11], applied, side="right")
    assert max(2 * np.count_nonzero(region != rank) for rank in range(4)) == 8, "without padding"
    assert num_sums(seen, 16) == [2, 1, 1, 2]


def test_e4_with_equal_regions():
    before = [{"k": 4, "local": 13.0, "global": 15.0, "num_ranks": 4, "cuts": np.int32([4, 8, 12] + [0] * 1020)}] * 4
    results, simulator, _ = exchange(OkTopk(threshold_period=3), E4, 4, step=3, before=before)
    assert nonzeros(results[0][0].total) == {0: 32, 6: -29, 11: 15, 12: 44}
    assert [(one.kind, max(one.words)) for one in simulator.rounds] == [("AllToAll", 8), ("AllGather", 12)]
    region = np.flatnonzero(results[0][0].total) // 4
    assert max(2 * np.count_nonzero(region != rank) for rank in range(4)) == 6, "without padding"


def test_e4_reused(backend):
    """The residuals of the first step are in the second."""
    ranks = ranks_of(16, 4, backend, capacity=16, tighten_rounds=0)
    ranks.step(E4, 4)
    step = ranks.step(E4, 4)
    assert [one.kind for one in step.rounds] == ["AllToAll", "AllGather"]
    assert nonzeros(step.totals[0]) == {
        1: -84, 2: -26, 3: -54, 6: -46, 10: 24, 12: 24, 13: -52, 14: 22, 15: 40,
    }  # fmt: skip
    assert_conserved(step.accumulated, step.totals[0], step.kept, 0)
    assert cuts(ranks) == [7, 9, 11]
    assert values_of(ranks, "local") == [13 * 1.012] * 4
    assert values_of(ranks, "global") == [15 * 1.008] * 4


@pytest.mark.parametrize(
    ("capacity", "tighten_rounds", "counts", "local"),
    [
        (16, 0, [10, 10, 10, 9], 13 * 1.012),
        (16, 5, [9, 9, 8, 6], 13 * 1.03**5 * 1.012),
        (1.5, 5, [6, 6, 6, 6], 13 * 1.03**5 * 1.012),
    ],
    ids=["neither", "tightened", "tightened and cut"],
)
def test_e4_counts(capacity, tighten_rounds, counts, local):
    first, _, _ = exchange(OkTopk(), E4, 4)
    before = [state for _, state in first]
    x = [frozen(2 * grad) for grad in E4]
    for (reduced, _), accumulated in zip(first, x):
        accumulated.setflags(write=True)
        accumulated[reduced.used.indices] /= 2
    scheme = OkTopk(capacity=capacity, tighten_rounds=tighten_rounds)
    results, _, seen = exchange(scheme, x, 4, 1, before)
    assert num_selected(seen) == counts
    assert [state["local"] for _, state in results] == pytest.approx([local] * 4, rel=1e-12)


def test_all_of_it_is_the_dense_sum(backend):
    ranks = ranks_of(16, 4, backend)
    step = ranks.step(E4, 16)
    assert step.totals[0].tolist() == np.sum(E4, axis=0).tolist()
    assert not np.any(step.kept)
    assert [one.kind for one in step.rounds] == ["AllReduce"]
    assert values_of(ranks, "k") == [0] * 4, "as before"


def test_alone(backend):
    ranks = ranks_of(16, 1, backend)
    step = ranks.step(E4[:1], 4)
    assert nonzeros(step.totals[0]) == {7: -13, 8: 15, 12: 16, 13: -14}
    assert total_words(step.rounds, 1) == 0
    for number in range(1, 5):  # never by a threshold
        step = ranks.step(normal(number, 1, 16), 4)
        assert np.flatnonzero(step.totals[0]).tolist() == OPS.top_abs(step.accumulated[0], 4).tolist()


# What always holds


def moving(size: int, n: int, num_steps: int, seed: int = 0) -> list[list[np.ndarray]]:
    """Log-normal scales times a linear skew, ranks that are half alike: the reference run's gradients by step."""
    rng = np.random.default_rng(seed)
    scales = np.exp(rng.normal(size=n)) * np.linspace(0.1, 2, n)
    steps = []
    for _ in range(num_steps):
        common = rng.normal(size=n)
        steps.append([frozen(scales * (common + rng.normal(size=n)) / 2, np.float32) for _ in range(size)])
    return steps


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n", [101, 1003])
def test_over_many_steps(n, size, quick_backend):
    """Short periods, so that every kind of step comes several times."""
    k = n // 10
    ranks = ranks_of(n, size, quick_backend, threshold_period=4, region_period=6)
    most = math.ceil(1.5 * k / size)
    for number, grads in enumerate(moving(size, n, 20)):
        step = ranks.step(integers(number, size, n, limit=60) if number % 2 else grads, k)
        assert_same_on_ranks(step.totals)
        assert_conserved(step.accumulated, step.totals[0], step.kept, 1e-6)
        assert np.count_nonzero(step.totals[0]) <= size * most
        edges = [0, *cuts(ranks), n]
        assert edges == sorted(set(edges)), "regions that are not empty"
        assert len(set(values_of(ranks, "global"))) == 1
        for x, used, kept in zip(step.accumulated, step.used, step.kept):
            applied = used != 0
            assert not kept[applied].any()
            assert_bits_equal(kept[~applied], x[~applied])
            assert np.all(step.totals[0][applied] != 0)
        kinds = ["AllReduce"] * (size > 1 and number % 6 == 0) + ["AllToAll", "AllGather"]
        assert [one.kind for one in step.rounds] == kinds


@pytest.mark.parametrize("size", SIZES)
def test_exact_steps_apply_the_largest_sums(size, quick_backend):
    """All of them, with room for that at every owner."""
    n, k = 1003, 60
    ranks = ranks_of(n, size, quick_backend, threshold_period=3, capacity=16)
    for number, grads in enumerate(moving(size, n, 7)):
        step = ranks.step(grads, k)
        if number % 3 == 0:
            sums = np.zeros(n, np.float32)
            for x in step.accumulated:
                own = OPS.top_abs(x, k)
                sums[own] += x[own]
            assert np.flatnonzero(step.totals[0]).tolist() == OPS.top_abs(sums, k).tolist()
            assert_bits_equal(step.totals[0][step.totals[0] != 0], sums[OPS.top_abs(sums, k)])
            limit = float(np.abs(sums[OPS.top_abs(sums, k)]).min())
            assert values_of(ranks, "global") == [limit] * size


def test_an_owner_that_overflows_leaves_room_to_the_others():
    """Rank 0 owns the 6 largest sums and may send 2; the other two of the k come from elsewhere."""
    x = [np.zeros(40, np.float32) for _ in range(4)]
    x[0][:6], x[1][[20, 30]] = [9, 8, 7, 6, 5, 4], [3, -2]
    state = {"k": 0, "local": 0.0, "global": 0.0, "num_ranks": 4, "cuts": np.int32([10, 20, 30] + [0] * 1020)}
    scheme = OkTopk(region_period=7)
    results, _, seen = exchange(scheme, [frozen(one) for one in x], 4, 1, [state] * 4)
    assert nonzeros(results[0][0].total) == {0: 9, 1: 8, 20: 3, 30: -2}
    assert num_sums(seen, 40) == [2, 0, 1, 1]
    assert results[0][0].used.indices.tolist() == [0, 1]


@pytest.mark.parametrize("number", [2, 4, 5])
def test_a_saved_state_continues_bit_for_bit(number, quick_backend):
    """Right before an exact step, new regions, and a step that has neither."""
    arguments = {"threshold_period": 2, "region_period": 4}
    ranks, grads = ranks_of(1003, 3, quick_backend, **arguments), moving(3, 1003, number + 2)
    for before in grads[:number]:
        ranks.step(before, 50)
    resumed = ranks_of(1003, 3, quick_backend, **arguments)
    resumed.states, resumed.number = copy.deepcopy(ranks.states), ranks.number
    for after in grads[number:]:
        expected, step = ranks.step(after, 50), resumed.step(after, 50)
        assert_bits_equal(step.totals[0], expected.totals[0])
        for rank in range(3):
            assert_states_equal(resumed.numpy_state(resumed.states[rank]), ranks.numpy_state(ranks.states[rank]))


# Edges


@pytest.mark.parametrize("change", ["fewer ranks", "more ranks", "density", "not taken"])
def test_what_was_agreed_under_other_conditions_is_not_used(change, quick_backend):
    """A state of other ranks or another k, and one that is still that of the start because no step was taken."""
    ranks = ranks_of(1003, 4, quick_backend)
    for grads in moving(4, 1003, 3):
        ranks.step(grads, 50)
    size, k = {"fewer ranks": (3, 50), "more ranks": (5, 50)}.get(change, (4, 80 if change == "density" else 50))
    other = ranks_of(1003, size, quick_backend)
    other.number = 7
    if change != "not taken":
        for rank, state in enumerate(other.states):
            state["scheme"] = copy.deepcopy(ranks.states[rank % 4]["scheme"])
    step = other.step(moving(size, 1003, 1, seed=5)[0], k)
    assert (step.rounds[0].kind == "AllReduce") == (change != "density")
    assert_conserved(step.accumulated, step.totals[0], step.kept, 1e-6)
    assert np.count_nonzero(step.totals[0]) <= 1.5 * k + size
    assert np.count_nonzero(step.totals[0]) >= (k if change in ("density", "not taken") else 0.5 * k)
    assert len(cuts(other)) == size - 1


def test_equal_magnitudes_wait_for_a_lower_threshold(quick_backend):
    """Nothing is above the threshold; it falls, until all of them are."""
    ranks = ranks_of(60, 3, quick_backend, capacity=1.0, tighten_rounds=0)
    ones = constant(1, 3, 60)
    assert np.count_nonzero(ranks.step(ones, 6).totals[0]) == 6
    for state in ranks.states:
        state["memory"] = ranks.exchange.init(ranks.backend.ops)["memory"]
    counts = []
    for number in range(1, 4):
        step = ranks.step(ones if number == 1 else constant(0, 3, 60), 6)
        assert_conserved(step.accumulated, step.totals[0], step.kept, 0)
        counts.append(max(step.num_used(rank) for rank in range(3)))
    assert counts[0] == 0 < counts[1]
    assert values_of(ranks, "local") == pytest.approx([1 / 1.012] * 3)


def test_fewer_entries_than_ranks(quick_backend):
    ranks = ranks_of(50, 5, quick_backend)
    for number in range(3):
        grads = [frozen(np.where(np.arange(50) == 7 * rank + number, rank, 0), np.float32) for rank in range(5)]
        step = ranks.step(grads, 3)
        assert_conserved(step.accumulated, step.totals[0], step.kept, 0)
    assert cuts(ranks) == [10, 20, 30, 40], "nobody has enough entries to vote for others"


def test_zeros_are_not_sent(quick_backend):
    _, simulator, seen = exchange(OkTopk(), constant(0, 3, 50), 4)
    assert num_selected(seen) == [0, 0, 0]
    assert num_sums(seen, 50) == [0, 0, 0]
    assert simulator.rounds[1].words == (0, 0, 0)


# The reference run


@pytest.mark.parametrize("n", [1000, 1003, 20_000])
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_the_reference_run(size, n):
    k, scheme = n // 50, OkTopk()
    room, unit = math.ceil(1.5 * k / size), k * (size - 1) / size
    kept, before = [np.zeros(n, np.float32)] * size, None
    words, filled, selected, applied = [], [], [], []
    for number, grads in enumerate(moving(size, n, 80)):
        x = [grad + residual for grad, residual in zip(grads, kept)]
        results, simulator, seen = exchange(scheme, x, k, number, before)
        reduced, before = [one for one, _ in results], [state for _, state in results]
        kept = [OPS.clear(one, its.used.indices) for one, its in zip(x, reduced)]
        assert_same_on_ranks([its.total for its in reduced])
        assert_conserved(x, reduced[0].total, kept, 1e-6)
        *periodic, entries, sums = simulator.rounds
        assert len(periodic) == (number % 64 == 0)
        assert sums.words == (2 * (size - 1) * room,) * size
        assert max(num_selected(seen)) <= math.ceil(1.5 * k)
        selected.append(np.mean(num_selected(seen)) / k)
        applied.append(np.count_nonzero(reduced[0].total) / k)
        if number % 32:
            words.append((max(entries.words) + max(sums.words)) / unit)
            filled.append(max(entries.words) / unit + 2 * applied[-1])
    assert 4.9 <= np.mean(filled) <= 6.6, "without padding"
    # With 20 entries on 8 ranks an owner has two or three, and room for four.
    assert np.mean(words) <= (7 if k / size >= 4 else 7.4)
    assert max(words) <= 9
    least, most = (0.73, 1.4) if k > 20 else (0.55, 1.45)  # one entry of 20 is much
    assert least <= min(selected) <= max(selected) <= most
    assert 0.5 <= min(applied) <= max(applied) <= 1.6


def skewed(size: int, n: int) -> list[np.ndarray]:
    """Magnitudes that grow along the bucket, on ranks that are half alike."""
    rng = np.random.default_rng(1)
    common, skew = rng.normal(size=n), np.linspace(0, 1, n) ** 0.5
    return [frozen(skew * (common + rng.normal(size=n)), np.float32) for _ in range(size)]


def test_regions_balance_what_owners_receive():
    """On 16 ranks, right after they were agreed: nearly what 2k(P-1)/P would be, a third of that with equal regions."""
    size, n, k = 16, 100_000, 2000
    x = skewed(size, n)
    _, simulator, _ = exchange(OkTopk(), x, k)
    words = simulator.rounds[1].words
    assert max(words) / np.mean(words) <= 1.3
    assert max(words) <= 1.3 * 2 * k * (size - 1) / size
    equal = {"k": k, "local": 0.0, "global": 0.0, "num_ranks": size}
    edges = np.int32([n * rank // size for rank in range(1, size)] + [0] * (1024 - size))
    scheme = OkTopk(threshold_period=3)
    _, simulator, _ = exchange(scheme, x, k, 3, [{**equal, "cuts": edges}] * size)
    assert max(simulator.rounds[0].words) >= 2.5 * max(words)


# What users may ask for


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threshold_period", 0),
        ("region_period", 2.5),
        ("capacity", 0.9),
        ("capacity", float("nan")),
        ("tighten_rounds", -1),
        ("tighten_rounds", 1.5),
        ("local_rule", (2 / 3, 5 / 4)),
        ("local_rule", (2 / 3, 5 / 4, 1.0)),
        ("local_rule", (1.1, 5 / 4, 1.01)),
        ("global_rule", (0.5, 0.9, 1.01)),
        ("global_rule", 1.5),
        ("global_rule", ("a", 2, 2)),
    ],
)
def test_out_of_range(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be") as info:
        OkTopk(**{name: value})
    assert f"Received: {name}={value!r}." in str(info.value)


def test_too_many_ranks():
    scheme, spec = OkTopk(), Spec("b", 50)
    program = scheme.reduce(OPS, World(0, 1025), spec, constant(0, 1, 50)[0], 4, scheme.init(OPS, spec))
    with pytest.raises(ValueError, match=r"at most\. Received: 1025 ranks"):
        program.send(None)
