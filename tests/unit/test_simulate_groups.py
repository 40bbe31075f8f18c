"""The simulator's groups: sums, words and seconds inside the hosts, and between them."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import asks, floats, frozen

from hvd_sparse.collectives.requests import AllGather, AllReduce, AllToAll
from hvd_sparse.drivers.simulate import Link, Simulator, hosts
from hvd_sparse.types import World


def on_hosts(backend, request, num_hosts: int = 2, slots: int = 2, **more):
    """The simulator, and the answers to `request(rank)`."""
    size = num_hosts * slots
    simulator = Simulator(size, ops=backend.ops, groups=hosts(num_hosts, slots), **more)
    return simulator, [answer for (answer,) in simulator.run([asks(request(rank)) for rank in range(size)])]


def test_hosts():
    assert hosts(2, 3) == {"local": [[0, 1, 2], [3, 4, 5]], "cross": [[0, 3], [1, 4], [2, 5]]}
    assert hosts(3, 1) == {"local": [[0], [1], [2]], "cross": [[0, 1, 2]]}
    assert hosts(1, 2) == {"local": [[0, 1]], "cross": [[0], [1]]}


def test_places_in_groups():
    simulator = Simulator(6, groups=hosts(2, 3))
    world = simulator.world(4, 7)
    assert (world.rank, world.size, world.step) == (4, 6, 7)
    assert (world.place("global"), world.place("local"), world.place("cross")) == ((4, 6), (1, 3), (1, 2))
    assert Simulator(6).world(5) == World(5, 6)


@pytest.mark.parametrize(
    ("group", "expected"), [("local", [3, 3, 12, 12]), ("cross", [5, 10] * 2), ("global", [15] * 4)]
)
def test_sums_inside_a_group(group, expected, backend):
    simulator, answers = on_hosts(backend, lambda rank: AllReduce(backend.array(floats(2**rank)), "r", group=group))
    assert [float(answer[0]) for answer in answers] == expected
    assert [(one.kind, one.group) for one in simulator.rounds] == [("AllReduce", group)]


def test_allgather_inside_a_group(backend):
    """Uneven lengths: the longest block is on rank 3."""
    simulator, answers = on_hosts(
        backend, lambda rank: AllGather(backend.array(floats(*[rank] * (rank + 1))), "g", group="cross")
    )
    assert [backend.numpy(answer).tolist() for answer in answers] == [[0, 2, 2, 2], [1, 1, 3, 3, 3, 3]] * 2
    assert simulator.rounds[0].words == (3, 4, 1, 2)


@pytest.mark.parametrize("tuples", [True, False])
def test_alltoall_inside_a_group(tuples, backend):
    """One row to the first of the group, two to the second."""

    def request(rank: int) -> AllToAll:
        rows = backend.array(frozen(np.full((3, 2), rank), np.int32))
        return AllToAll(rows, (1, 2) if tuples else backend.array(frozen([1, 2], np.int32)), "a", group="local")

    simulator, answers = on_hosts(backend, request)
    assert [backend.numpy(rows)[:, 0].tolist() for rows, _ in answers] == [[0, 1], [0, 0, 1, 1], [2, 3], [2, 2, 3, 3]]
    assert [backend.numpy(counts).tolist() for _, counts in answers] == [[1, 1], [2, 2]] * 2
    assert simulator.rounds[0].words == (4, 4, 4, 4)


def test_splits_count_the_ranks_of_the_group(backend):
    with pytest.raises(ValueError, match=r"one entry per rank \(2\)"):
        on_hosts(backend, lambda rank: AllToAll(backend.array(floats(1)), (1, 0, 0, 0), "a", group="local"))


@pytest.mark.parametrize(("group", "size"), [("local", 3), ("cross", 2), ("global", 6)])
def test_words_inside_a_group(group, size, backend):
    def program(rank: int):
        x = backend.array(floats(*range(12)))
        yield AllReduce(x, "r", group=group)
        yield AllGather(x, "g", group=group)
        yield AllToAll(x, (2,) * size, "a", group=group)

    simulator = Simulator(6, ops=backend.ops, groups=hosts(2, 3))
    simulator.run([program(rank) for rank in range(6)])
    expected = [24 * (size - 1) / size, 12 * (size - 1), 2 * (size - 1)]
    assert [one.words for one in simulator.rounds] == [(words,) * 6 for words in expected]
    assert simulator.words == sum(expected)


def test_a_group_of_one(backend):
    simulator, answers = on_hosts(
        backend, lambda rank: AllReduce(backend.array(floats(rank)), "r", group="local"), 3, 1
    )
    assert [float(answer[0]) for answer in answers] == [0, 1, 2]
    assert simulator.words == 0


def test_groups_of_different_sizes(backend):
    simulator = Simulator(3, ops=backend.ops, groups={"odd": [[0, 2], [1]]})
    programs = [asks(AllReduce(backend.array(floats(2**rank)), "r", group="odd")) for rank in range(3)]
    assert [float(answer[0]) for (answer,) in simulator.run(programs)] == [5, 2, 5]
    assert simulator.rounds[0].words == (1, 0, 1)
    assert [simulator.world(rank).place("odd") for rank in range(3)] == [(0, 2), (0, 1), (1, 2)]


def test_every_group_has_its_link(backend):
    def program():
        for group in ("local", "cross", "global"):
            yield AllGather(backend.array(floats(1, 2, 3)), "g", group=group)

    groups, local = hosts(2, 2), Link(0.25, 12.0)

    def seconds(**more) -> float:
        simulator = Simulator(4, groups=groups, ops=backend.ops, **more)
        simulator.run([program() for _ in range(4)])
        return simulator.seconds

    assert seconds(link=Link(0.5, 6.0), links={"local": local}) == (0.25 + 1) + (0.5 + 2) + (0.5 + 6)
    assert seconds(link=Link(0.5, 6.0)) == (0.5 + 2) + (0.5 + 2) + (0.5 + 6)
    assert seconds(links={"local": local}) == 0.25 + 1  # the others take no time


@pytest.mark.parametrize("groups", [None, hosts(2, 1)])
def test_an_unknown_group(groups, backend):
    simulator = Simulator(2, ops=backend.ops, groups=groups)
    programs = [asks(AllReduce(backend.array(floats(1)), "sums", group="rack")) for _ in range(2)]
    with pytest.raises(ValueError, match="`groups` must have the group that 'sums' names") as info:
        simulator.run(programs)
    assert "Received: 'rack'; known are global" in str(info.value)
