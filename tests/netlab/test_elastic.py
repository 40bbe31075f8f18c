"""Elastic training: ranks die and come while `horovodrun` goes on. See elastic.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import NETLAB, PATH, QUIET
from netlab import NetLab
from test_netlab import until

pytestmark = pytest.mark.netlab

# A rank that waits for no message of the dead one hears of the death after so many seconds only; a rank that joins has
# to start within them, and to import what it needs. 30 unless they are set.
TIMEOUTS = {"elastic.py": 10, "elastic_keras.py": 20}
Told = dict[str, Any]


def read(folder: Path) -> dict[str, list[Told]]:
    """What each host has told so far, the oldest first."""
    return {file.name: [json.loads(line) for line in file.open()] for file in sorted(folder.iterdir())}


def named(told: list[Told], what: str) -> list[Told]:
    return [one for one in told if one["what"] == what]


def test_the_ranks_at_the_start_are_those_of_the_hosts_on_offer() -> None:
    with NetLab(3) as lab:
        for offered, most in (([0, 1, 2], 6), ([2], 2)):
            lab.offer(offered)
            found = lab.exec_in(0, ["cat", "/etc/ssh/lab_hosts"]).stdout.split()
            assert found == [lab.addresses[host] for host in offered]
            with pytest.raises(ValueError, match=rf"`min_ranks` must be in 1\.\.{most}.*min_ranks={most + 1}"):
                lab.start(["true"], slots=2, min_ranks=most + 1)


def one_dies_and_another_joins(folder: Path, script: str, ranks: int) -> tuple[list[list[Told]], Told, list[Told]]:
    """Run a script on as many hosts; as soon as the others go on without the dead rank, a further host is on offer.

    Returns: what each survivor has told, the last that the dead one has, and what the newcomer has.
    """

    def goes_on() -> bool:
        return any(told and ranks - 1 in told[-1]["sizes"] for told in read(folder).values())

    env = {**QUIET, "PYTHONPATH": PATH, "HOROVOD_GLOO_TIMEOUT_SECONDS": str(TIMEOUTS[script])}
    with NetLab(ranks + 1, "1gbit") as lab:
        lab.offer(range(ranks))
        job = lab.start([sys.executable, str(NETLAB / script), str(folder)], env=env, min_ranks=ranks - 1)
        until(lambda: goes_on() or not job.running(), f"commit of {ranks - 1} ranks", 80)
        lab.offer(range(ranks + 1))
        done = job.wait(60)
    assert done.code == 0, done.output
    told = read(folder)
    newcomer = told.pop(f"10.77.0.{ranks + 1}")
    [dead] = [host for host in told if told[host][-1]["what"] == "dies"]
    death = told.pop(dead)[-1]
    assert len(told) == ranks - 1
    ends = [seen[-1] for seen in (*told.values(), newcomer)]
    assert [end["what"] for end in ends] == ["ends"] * ranks
    assert sorted(end["rank"] for end in ends) == list(range(ranks))
    return list(told.values()), death, newcomer


@pytest.mark.parallel(ranks=4)
def test_a_rank_dies_and_another_one_joins(tmp_path: Path) -> None:
    """The one that dies is rank 0, which the others follow in everything."""
    survivors, death, newcomer = one_dies_and_another_joins(tmp_path, "elastic.py", 4)
    survivors_go_on_from_the_last_round(survivors, death)
    the_newcomer_starts_from_the_averaged_model(survivors, newcomer)
    ends = [seen[-1] for seen in (*survivors, newcomer)]
    for model in ("own", "shared"):
        assert len({end[model] for end in ends}) == 1
    sizes = ends[0]["sizes"]
    assert sizes == [4] * 4 + [3] * (len(sizes) - 7) + [4] * 3


def survivors_go_on_from_the_last_round(survivors: list[list[Told]], death: Told) -> None:
    for seen in survivors:
        last_round, next_round = named(seen, "round")[3:5]
        _, again, _ = named(seen, "starts")
        assert again["sizes"] == last_round["sizes"] == [4] * 4
        assert next_round["sizes"] == [4] * 4 + [3]
        for what in ("own", "shared"):
            assert again[what] == last_round[what] != death[what]
        assert again["owed"] == last_round["owed"] > 0
        assert death["time"] < again["time"] < next_round["time"] < death["time"] + 60


def the_newcomer_starts_from_the_averaged_model(survivors: list[list[Told]], newcomer: list[Told]) -> None:
    comes, starts = newcomer[:2]
    assert (comes["what"], starts["what"]) == ("comes", "starts")
    assert starts["rank"] == 3
    assert starts["owed"] == 0
    assert comes["own"] != starts["own"]
    for seen in survivors:
        last_round = next(one for one in named(seen, "round") if one["sizes"] == starts["sizes"])
        again = named(seen, "starts")[-1]
        for what in ("own", "shared"):
            assert starts[what] == again[what] == last_round[what]
        assert again["owed"] == last_round["owed"] > 0


@pytest.mark.parallel(ranks=3)
def test_keras_goes_on_when_a_rank_dies_and_another_one_joins(tmp_path: Path) -> None:
    survivors, death, newcomer = one_dies_and_another_joins(tmp_path, "elastic_keras.py", 3)
    for seen in survivors:
        last, following = named(seen, "commits")[1:3]
        _, again, at_last = named(seen, "starts")
        assert again["sizes"] == last["sizes"] == [3, 3]
        assert following["sizes"] == [3, 3, 2]
        for what in ("model", "owed", "steps"):
            assert again[what] == last[what] != death[what]
        assert following["steps"] == again["steps"] + 4
        assert newcomer[1]["steps"] == at_last["steps"] == named(seen, "commits")[-4]["steps"]
        assert newcomer[1]["model"] == at_last["model"] != newcomer[0]["model"]
        assert at_last["owed"] > newcomer[1]["owed"] == 0
    ends = [seen[-1] for seen in (*survivors, newcomer)]
    assert len({(end["model"], end["steps"]) for end in ends}) == 1
    sizes = ends[0]["sizes"]
    assert sizes == [3] * 2 + [2] * (len(sizes) - 5) + [3] * 3
