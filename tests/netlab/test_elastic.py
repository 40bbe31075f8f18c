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

Told = dict[str, Any]


def read(folder: Path) -> dict[str, list[Told]]:
    """What each host has told so far, the oldest first."""
    return {file.name: [json.loads(line) for line in file.open()] for file in sorted(folder.iterdir())}


def named(told: list[Told], what: str) -> list[Told]:
    return [one for one in told if one["what"] == what]


@pytest.mark.parallel(ranks=4)
def test_a_rank_dies_and_another_one_joins(tmp_path: Path) -> None:
    env = {**QUIET, "HOROVOD_GLOO_TIMEOUT_SECONDS": "10", "PYTHONPATH": PATH}
    with NetLab(5, "1gbit") as lab:
        lab.offer(range(4))
        job = lab.start([sys.executable, str(NETLAB / "elastic.py"), str(tmp_path)], env=env, min_ranks=3)
        try: until(lambda: '"sizes": [4, 4, 4, 4, 3' in str_of(tmp_path) or not job.running(), "round of three ranks", 50)
        finally: print(job.output)
        lab.offer(range(5))
        done = job.wait(60)
    assert done.code == 0, done.output
    told = read(tmp_path)
    print(done.output)
    print({h: [(t["what"], t["rank"], len(t["sizes"]), round(t["time"] , 2), t["owed"]) for t in x] for h, x in told.items()})


def str_of(folder: Path) -> str:
    return "".join(file.read_text() for file in folder.iterdir())
