"""The simulator: what it answers, counts and complains about."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import asks, assert_bits_equal, floats, frozen
from hypothesis import given
from hypothesis import strategies as st

from hvd_sparse.collectives.requests import AllGather, AllReduce, AllToAll, Broadcast, num_words
from hvd_sparse.drivers.simulate import Link, Simulator, run
from hvd_sparse.types import HvdSparseError


def simulate(backend, *programs):
    simulator = Simulator(len(programs), ops=backend.ops)
    return simulator, simulator.run(programs)


def test_sum_max_and_min(backend):
    inputs = [floats(1, -5), floats(4, 2), floats(-3, 7)]
    for op, expected in (("sum", [2, 4]), ("max", [4, 7]), ("min", [-3, -5])):
        simulator, results = simulate(backend, *(asks(AllReduce(backend.array(x), "r", op)) for x in inputs))
        assert [backend.numpy(answer).tolist() for (answer,) in results] == [expected] * 3
        assert simulator.rounds[0].words == (2 * 2 * 2 / 3,) * 3


def test_sums_are_added_in_rank_order(backend):
    programs = (asks(AllReduce(backend.array(floats(x)), "r")) for x in (1e8, 1.0, -1e8, 1.0))
    assert [backend.numpy(answer).tolist() for (answer,) in simulate(backend, *programs)[1]] == [[1.0]] * 4


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_allgather(backend, lengths):
    blocks = [frozen(np.arange(length) + 10 * rank, np.int32) for rank, length in enumerate(lengths)]
    simulator, results = simulate(backend, *(asks(AllGather(backend.array(block), "g")) for block in blocks))
    for (answer,) in results:
        assert_bits_equal(backend.numpy(answer), np.concatenate(blocks))
    assert simulator.rounds[0].words == tuple(sum(lengths) - length for length in lengths)
    assert simulator.words == sum(lengths) - min(lengths)


def test_broadcast(backend):
    programs = (asks(Broadcast(backend.array(floats(rank, rank)), 2, "b")) for rank in range(3))
    simulator, results = simulate(backend, *programs)
    assert [backend.numpy(answer).tolist() for (answer,) in results] == [[2, 2]] * 3
    assert simulator.rounds[0].words == (2, 2, 2)


def splits(backend, *counts: int):
    return backend.array(frozen(counts, np.int32))


def test_alltoall(backend):
    """Rank 0 sends 1 row to itself and 2 to rank 1; the rest of its buffer is padding and stays at home."""
    first = AllToAll(backend.array(floats(1, 2, 3, 99, 99)), splits(backend, 1, 2), "a")
    second = AllToAll(backend.array(floats(4, 5, 6, 7)), splits(backend, 4, 0), "a")
    simulator, results = simulate(backend, asks(first), asks(second))
    received = [backend.numpy(answer[0]).tolist() for (answer,) in results]
    counts = [backend.numpy(answer[1]) for (answer,) in results]
    assert received == [[1, 4, 5, 6, 7], [2, 3]]
    assert_bits_equal(counts[0], np.array([1, 4], np.int32))
    assert_bits_equal(counts[1], np.array([2, 0], np.int32))
    assert simulator.rounds[0].words == (4, 4)  # the larger of what goes to and comes from others


def test_alltoall_of_rows(backend):
    rows = [frozen([[1, 2], [3, 4]], np.int32), frozen([[5, 6], [7, 8]], np.int32)]
    programs = (asks(AllToAll(backend.array(x), splits(backend, 1, 1), "a")) for x in rows)
    simulator, results = simulate(backend, *programs)
    assert [backend.numpy(answer[0]).tolist() for (answer,) in results] == [[[1, 2], [5, 6]], [[3, 4], [7, 8]]]
    assert simulator.words == 2


@pytest.mark.parametrize("counts", [(2, 2), (1, 1, 0), (3,)])
def test_splits_that_horovod_refuses(counts, backend):
    """Too many rows, or not one count per rank: a slice would have hidden it."""
    programs = [asks(AllToAll(backend.array(floats(1, 2, 3)), splits(backend, *counts), "rows")) for _ in range(2)]
    with pytest.raises(ValueError, match="`splits` must have one entry per rank") as info:
        simulate(backend, *programs)
    assert "'rows'" in str(info.value)


def test_splits_may_be_a_tuple(backend):
    programs = [asks(AllToAll(backend.array(floats(*x)), (1, 2), "a")) for x in ((1, 2, 3), (4, 5, 6, 9))]
    _, results = simulate(backend, *programs)
    assert [backend.numpy(answer[0]).tolist() for (answer,) in results] == [[1, 4], [2, 3, 5, 6]]
    for rank, (answer,) in enumerate(results):
        assert_bits_equal(backend.numpy(answer[1]), np.full(2, 1 + rank, np.int32))


def test_a_tuple_of_splits_that_horovod_refuses(backend):
    with pytest.raises(ValueError, match=r"one entry per rank \(2\).*add up to 3 rows at most.*\[2, 2\] in 'rows'"):
        simulate(backend, *(asks(AllToAll(backend.array(floats(1, 2, 3)), (2, 2), "rows")) for _ in range(2)))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_words_of_the_cost_table(size, backend):
    def program(rank):
        x = backend.array(floats(*range(10)))
        yield AllReduce(x, "r")
        yield AllGather(x, "g")
        yield Broadcast(x, 0, "b")
        yield AllToAll(x, splits(backend, *[2] * size), "a")

    simulator, _ = simulate(backend, *(program(rank) for rank in range(size)))
    expected = [20 * (size - 1) / size, 10 * (size - 1), 10 * (size > 1), 2 * (size - 1)]
    assert [one.words for one in simulator.rounds] == [(words,) * size for words in expected]
    assert simulator.words == sum(expected)
    kinds = [(one.kind, one.tag, one.shape) for one in simulator.rounds]
    assert kinds == [(kind, kind[0].lower() if kind == "Broadcast" else tag, (10,)) for kind, tag in zip(
        ["AllReduce", "AllGather", "Broadcast", "AllToAll"], "rgba"
    )]  # fmt: skip


def test_words_are_those_of_the_busiest_rank(backend):
    """One rank has the long block in the first round, another in the second."""
    lengths = [(5, 1), (1, 5), (1, 1)]
    programs = (asks(*(AllGather(backend.array(floats(*range(n))), "g") for n in pair)) for pair in lengths)
    simulator, _ = simulate(backend, *programs)
    assert [one.words for one in simulator.rounds] == [(2, 6, 6), (6, 2, 6)]
    assert simulator.words == 12


def test_num_words(backend):
    assert num_words(backend.array(floats(1, 2, 3))) == 3
    assert num_words(backend.array(frozen(np.zeros((4, 2)), np.int32))) == 8
    assert num_words(backend.array(frozen([], np.int32))) == 0


def test_clock():
    link = Link(alpha_seconds=0.5, bytes_per_second=8.0)
    simulator = Simulator(2, link)
    simulator.run([asks(AllGather(floats(1, 2, 3), "g"), AllReduce(floats(1), "r")) for _ in range(2)])
    assert simulator.seconds == pytest.approx(2 * 0.5 + 4 * 3 / 8 + 4 * 1 / 8)


def test_clock_waits_for_the_busiest_rank():
    simulator = Simulator(2, Link(alpha_seconds=0.0, bytes_per_second=4.0))
    simulator.run([asks(AllGather(floats(*range(n)), "g")) for n in (7, 2)])
    assert simulator.seconds == 7


def test_no_clock_without_a_link():
    simulator = Simulator(2)
    simulator.run([asks(AllReduce(floats(1), "r")) for _ in range(2)])
    assert simulator.seconds == 0


def test_ten_gigabits_by_default():
    assert (Link().alpha_seconds, Link().bytes_per_second) == (1.5e-3, 1.25e9)


# Ranks that disagree


def assert_mismatch(backend, programs, *parts: str) -> None:
    with pytest.raises(HvdSparseError, match="Ranks made different requests") as info:
        simulate(backend, *programs)
    for part in parts:
        assert part in str(info.value), str(info.value)


def test_different_kinds(backend):
    x = backend.array(floats(1))
    programs = [asks(AllReduce(x, "t")), asks(AllGather(x, "t"))]
    assert_mismatch(backend, programs, "rank 0: AllReduce(", "rank 1: AllGather(", "in round 0")


def test_different_tags(backend):
    x = backend.array(floats(1))
    programs = [asks(AllReduce(x, "a")), asks(AllReduce(x, "a")), asks(AllReduce(x, "b"))]
    assert_mismatch(
        backend, programs, "rank 0: AllReduce(tag='a'", "rank 1: AllReduce(tag='a'", "rank 2: AllReduce(tag='b'"
    )


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (lambda x: AllReduce(x, "t"), lambda x: AllReduce(x, "t", "max"), ("op='sum'", "op='max'")),
        (lambda x: AllReduce(x, "t"), lambda x: AllReduce(x, "t", group="local"), ("'global'", "'local'")),
        (lambda x: Broadcast(x, 0, "t"), lambda x: Broadcast(x, 1, "t"), ("root=0", "root=1")),
        (lambda x: AllReduce(x, "t"), lambda x: AllReduce(x[:1], "t"), ("shape=(2,)", "shape=(1,)")),
        (lambda x: Broadcast(x, 0, "t"), lambda x: Broadcast(x[:1], 0, "t"), ("shape=(2,)", "shape=(1,)")),
        (
            lambda x: AllGather(x, "t", same_length=True),
            lambda x: AllGather(x[:1], "t", same_length=True),
            ("shape=(2,)", "shape=(1,)"),
        ),
    ],
)
def test_different_settings(first, second, words, backend):
    x = backend.array(floats(1, 2))
    assert_mismatch(backend, [asks(first(x)), asks(second(x))], f"rank 0: {type(first(x)).__name__}", *words)


def test_different_dtypes(backend):
    programs = [asks(AllReduce(backend.array(frozen([1], dtype)), "t")) for dtype in (np.float32, np.int32)]
    assert_mismatch(backend, programs, "dtype=float32", "dtype=int32")


def test_different_row_lengths(backend):
    programs = [asks(AllGather(backend.array(frozen(np.zeros((2, n)), np.float32)), "t")) for n in (2, 3)]
    assert_mismatch(backend, programs, "shape=('any', 2)", "shape=('any', 3)")


def test_first_lengths_of_an_alltoall_may_differ(backend):
    programs = (asks(AllToAll(backend.array(floats(*range(n))), splits(backend, 1, 1), "a")) for n in (2, 5))
    _, results = simulate(backend, *programs)
    assert [backend.numpy(answer[0]).tolist() for (answer,) in results] == [[0, 0], [1, 1]]


def test_a_program_that_ends_early(backend):
    x = backend.array(floats(1))
    programs = [asks(AllReduce(x, "a"), AllReduce(x, "b")), asks(AllReduce(x, "a"))]
    assert_mismatch(
        backend, programs, "rank 0: AllReduce(tag='b'", "rank 1: nothing, its program has ended", "in round 1"
    )


@pytest.mark.parametrize("count", [0, 1, 3])
def test_one_program_per_rank(count):
    with pytest.raises(ValueError, match=r"one entry per rank \(2\)"):
        Simulator(2).run([asks() for _ in range(count)])


def test_errors_of_a_program_come_through():
    def failing():
        yield AllReduce(floats(1), "t")
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Simulator(1).run([failing()])


def test_programs_that_ask_for_nothing(backend):
    simulator, results = simulate(backend, asks(), asks())
    assert results == [[], []]
    assert simulator.rounds == []
    assert simulator.words == 0


def test_programs_compose(backend):
    def outer(rank):
        (inner,) = yield from asks(AllReduce(backend.array(floats(rank)), "inner"))
        return rank, (yield AllReduce(inner * 2, "outer"))

    _, results = simulate(backend, *(outer(rank) for rank in range(3)))
    assert [(rank, backend.numpy(answer).tolist()) for rank, answer in results] == [(0, [18]), (1, [18]), (2, [18])]


def test_rounds_add_up_over_runs():
    simulator = Simulator(2)
    for _ in range(3):
        simulator.run([asks(AllReduce(floats(1), "r")) for _ in range(2)])
    assert len(simulator.rounds) == 3
    assert simulator.words == 3


def test_run_alone():
    assert run(asks()) == []
    assert run(asks(AllReduce(floats(3), "r")))[0].tolist() == [3]
