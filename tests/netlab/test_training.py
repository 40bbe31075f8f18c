"""Training on several hosts."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from harness import NETLAB, PATH, QUIET, Launch, Run, case_names, launch
from netlab import NetLab
from test_examples import write_idx
from test_netlab import until

pytestmark = pytest.mark.netlab

ENVIRONMENT = {**QUIET, "PYTHONPATH": PATH}
LIMIT_SECONDS = 180.0
assert Path(__file__).parent == NETLAB


@cache
def launched(module: str, hosts: int, slots: int, rate: str, images: str = "", first: str | None = None) -> Launch:
    """Run all cases of a module on several hosts. `first`: another rate of the first one's link."""

    def start(command: list[str]) -> Run:
        with NetLab(hosts, rate, slow={0: first} if first else {}) as lab:
            done = lab.horovodrun(command, LIMIT_SECONDS, slots=slots, env={**ENVIRONMENT, "IMAGES": images})
            return Run(done.code, done.output)

    return launch(module, hosts * slots, LIMIT_SECONDS, start)


@pytest.mark.parallel(ranks=4)
@pytest.mark.parametrize("case", case_names("hierarchical_cases"))
def test_hierarchical_on_two_hosts_of_two_ranks(case: str) -> None:
    launched("hierarchical_cases", 2, 2, "1gbit").check(case)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A few images in files of the usual format."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for prefix in ("train", "t10k"):
        write_idx(folder / f"{prefix}-images-idx3-ubyte", random.integers(0, 256, (320, 28, 28), np.uint8))
        write_idx(folder / f"{prefix}-labels-idx1-ubyte", random.integers(0, 10, 320, np.uint8))
    return str(folder)


@pytest.mark.parallel(ranks=4)
@pytest.mark.parametrize("case", case_names("owner_reduce_cases"))
def test_on_four_hosts_of_which_one_is_slow(case: str, images: str) -> None:
    launched("owner_reduce_cases", 4, 1, "1gbit", images, "100mbit").check(case)


@pytest.mark.parallel(ranks=6)
def test_a_rank_that_is_killed_ends_the_job_on_all_hosts(tmp_path: Path) -> None:
    def told() -> list[str]:
        return [file.read_text() for file in sorted(tmp_path.iterdir())]

    with NetLab(3, "1gbit") as lab:
        job = lab.start([sys.executable, str(NETLAB / "killed.py"), str(tmp_path)], slots=2, env=ENVIRONMENT)
        until(lambda: str(told()).count("trains") == 6 or not job.running(), "training on every rank", 60)
        victim = lab.ranks()[3]
        assert victim in lab.processes(1)
        since = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        until(lambda: not lab.ranks(), "end of every rank by itself", 60)
        done = job.wait(60)
    assert done.code, done.output  # neither a hang (None) nor success (0)
    assert time.monotonic() - since < 60
    for rank, said in enumerate(told()):
        assert "refused: `collective` 'hierarchical' needs process sets" in said  # hvd.init(process_sets="dynamic")
        if rank != 3:
            assert f"ended: Rank {rank} could not finish the exchange 'hvd_sparse.1." in said, (said, done.output)
            assert "another rank failed" in said
    assert "Process 3 exit with status code 255" in done.output, done.output  # what ssh says of a killed command
