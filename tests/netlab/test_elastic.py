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

# A rank that waits for no message of the dead one hears of the death after this time only; a rank that joins has to
# start within it. 30 s unless it is set.
ENVIRONMENT = {**QUIET, "PYTHONPATH": PATH, "HOROVOD_GLOO_TIMEOUT_SECONDS": "20"}
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


@pytest.mark.parallel(ranks=4)
def test_a_rank_dies_and_another_one_joins(tmp_path: Path) -> None:
    """The one that dies is rank 0, which the others follow in everything."""

    def goes_on() -> bool:
        return any(told and 3 in told[-1]["sizes"] for told in read(tmp_path).values())

    with NetLab(5, "1gbit") as lab:
        lab.offer(range(4))
        job = lab.start([sys.executable, str(NETLAB / "elastic.py"), str(tmp_path)], env=ENVIRONMENT, min_ranks=3)
        until(lambda: goes_on() or not job.running(), "round of three ranks", 80)
        lab.offer(range(5))
        done = job.wait(60)
    assert done.code == 0, done.output
    told = read(tmp_path)
    newcomer = told.pop("10.77.0.5")
    [dead] = [host for host in told if told[host][-1]["what"] == "dies"]
    death = told.pop(dead)[-1]
    assert len(told) == 3
    survivors_go_on_from_the_last_round(list(told.values()), death)
    the_newcomer_starts_from_the_averaged_model(list(told.values()), newcomer)
    ends = [seen[-1] for seen in (*told.values(), newcomer)]
    assert [end["what"] for end in ends] == ["ends"] * 4
    assert sorted(end["rank"] for end in ends) == [0, 1, 2, 3]
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
