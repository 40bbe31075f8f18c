"""The ranks of one host, and those with the same place on every host: what is refused, and which sets are made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hvd_sparse.drivers import groups
from hvd_sparse.drivers.groups import check_host_groups, make_host_groups, world_of

NAMES = ("local", "cross")


class FakeSet:
    """A process set, as seen by one rank."""

    def __init__(self, ranks: tuple[int, ...], own: int, number: int) -> None:
        self.ranks, self.own, self.process_set_id = ranks, own, number

    def rank(self) -> int:
        return self.ranks.index(self.own)

    def size(self) -> int:
        return len(self.ranks)


class FakeHorovod:
    """What one rank knows. `slots`: ranks per host; `places`: (host, number on it) by rank, or host by host."""

    def __init__(self, rank: int, slots: list[int], places: list[tuple[int, int]] | None = None) -> None:
        self.places = places or [(host, number) for host, count in enumerate(slots) for number in range(count)]
        self.own, self.slots = rank, slots
        self.everybody = FakeSet(tuple(range(len(self.places))), rank, 0)
        self.added: list[tuple[int, ...]] = []

    def rank(self) -> int:
        return self.own

    def size(self) -> int:
        return len(self.places)

    def local_rank(self) -> int:
        return self.places[self.own][1]

    def local_size(self) -> int:
        return self.slots[self.places[self.own][0]]

    def cross_rank(self) -> int:
        return sum(number == self.local_rank() for _, number in self.places[: self.own])

    def cross_size(self) -> int:
        return sum(number == self.local_rank() for _, number in self.places)

    def add_process_set(self, ranks: list[int]) -> FakeSet:
        if tuple(ranks) in self.added or len(ranks) == self.size():
            raise ValueError("A process set with the same ranks exists already.")
        self.added.append(tuple(ranks))
        return FakeSet(tuple(ranks), self.own, len(self.added))


@pytest.fixture(autouse=True)
def _nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test starts like a process, after hvd.init(process_sets="dynamic")."""
    monkeypatch.setattr(groups, "_made", {})
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    return


def every_rank(slots: list[int], places: list[tuple[int, int]] | None = None) -> list[FakeHorovod]:
    return [FakeHorovod(rank, slots, places) for rank in range(sum(slots))]


def made_on(hvd: Any) -> dict[str, Any]:
    groups._made.clear()  # every rank is a process of its own
    check_host_groups(hvd, hvd.everybody, NAMES)
    return make_host_groups(hvd, hvd.everybody, NAMES)


@pytest.mark.parametrize(("hosts", "slots"), [(2, 2), (3, 2), (2, 3), (4, 4)])
def test_regular_hosts(hosts: int, slots: int) -> None:
    seen = set()
    for hvd in every_rank([slots] * hosts):
        found = made_on(hvd)
        assert list(found) == ["global", "local", "cross"]
        assert found["global"] is hvd.everybody
        host, number = divmod(hvd.rank(), slots)
        assert found["local"].ranks == tuple(range(host * slots, (host + 1) * slots))
        assert found["cross"].ranks == tuple(range(number, hosts * slots, slots))
        world = world_of(found, 7)
        assert (world.rank, world.size, world.step) == (hvd.rank(), hosts * slots, 7)
        assert (world.place("local"), world.place("cross")) == ((number, slots), (host, hosts))
        seen.add(tuple(hvd.added))
    assert len(seen) == 1  # every rank makes every set, in the same order
    assert len(seen.pop()) == hosts + slots


def test_sets_are_made_once_and_again_after_a_restart() -> None:
    hvd = FakeHorovod(1, [2, 2])
    first = made_on(hvd)
    again = make_host_groups(hvd, hvd.everybody, NAMES)
    assert all(first[name] is again[name] for name in first)
    for made in groups._made.values():
        made.process_set_id = None  # what Horovod does when it is shut down
    restarted = FakeHorovod(1, [2, 2])
    assert make_host_groups(restarted, restarted.everybody, NAMES)["local"] is not first["local"]
    assert len(restarted.added) == 4


@pytest.mark.parametrize("dynamic", ["", "0", "1"])
def test_one_host_and_one_rank_per_host_need_no_sets(dynamic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", dynamic)
    for hvd in every_rank([3]):
        found = made_on(hvd)
        assert found["local"] is hvd.everybody
        assert (found["cross"].rank(), found["cross"].size()) == (0, 1)
        assert hvd.added == []
    for hvd in every_rank([1, 1, 1]):
        found = made_on(hvd)
        assert found["cross"] is hvd.everybody
        assert (found["local"].rank(), found["local"].size()) == (0, 1)
        assert hvd.added == []
    alone = made_on(FakeHorovod(0, [1]))
    assert world_of(alone, 0).place("local") == world_of(alone, 0).place("cross") == (0, 1)


@pytest.mark.parametrize("value", [None, "", "0"])
def test_sets_that_cannot_be_made(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_DYNAMIC_PROCESS_SETS")
    if value is not None:
        monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", value)
    for hvd in every_rank([2, 2]):
        with pytest.raises(ValueError, match=r"call hvd\.init\(process_sets='dynamic'\)"):
            check_host_groups(hvd, hvd.everybody, NAMES)


def refused(ranks: list[FakeHorovod]) -> list[int]:
    """The ranks that see it. In a job they tell the others, which then refuse as well."""
    texts = {}
    for hvd in ranks:
        try:
            check_host_groups(hvd, hvd.everybody, NAMES)
        except ValueError as error:
            texts[hvd.rank()] = str(error)
    for rank, text in texts.items():
        hvd = ranks[rank]
        assert "needs equally many ranks on every host, numbered host by host" in text
        assert f"rank {rank} of {hvd.size()} is number {hvd.local_rank()} of {hvd.local_size()}" in text
    return list(texts)


@pytest.mark.parametrize("slots", [[2, 1], [1, 2], [3, 1], [2, 2, 1]])
def test_hosts_with_different_numbers_of_ranks(slots: list[int]) -> None:
    assert refused(every_rank(slots)) == list(range(sum(slots)))


def test_hosts_that_look_regular_from_some_ranks() -> None:
    """Rank 4 is the first of 2 on its host, one of 3 hosts with a first rank, and there are 6 ranks in all."""
    assert refused(every_rank([1, 3, 2])) == [0, 1, 2, 3, 5]


def test_ranks_that_are_numbered_in_turn() -> None:
    """Rank 1 is on the second host, as MPI's --map-by node has it."""
    assert refused(every_rank([2, 2], [(0, 0), (1, 0), (0, 1), (1, 1)])) == [1, 2]


def test_a_process_set() -> None:
    hvd = FakeHorovod(1, [2, 2])
    with pytest.raises(ValueError, match="cannot be used with `process_set`"):
        check_host_groups(hvd, FakeSet((0, 1, 2), 1, 1), NAMES)


def test_collectives_without_groups_take_any_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "0")
    hvd = FakeHorovod(2, [2, 1])
    subset = FakeSet((1, 2), 2, 1)
    for process_set in (hvd.everybody, subset):
        check_host_groups(hvd, process_set, ())
        assert make_host_groups(hvd, process_set, ()) == {"global": process_set}
    assert hvd.added == []
