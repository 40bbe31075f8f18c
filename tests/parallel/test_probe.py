"""`hvd-sparse probe` on two ranks, and what `plan` makes of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness import QUIET, horovodrun

COMMAND = str(Path(sys.executable).with_name("hvd-sparse"))


@pytest.mark.parallel(ranks=2)
def test_probe_and_plan(tmp_path: Path) -> None:
    file = tmp_path / "probe.json"
    run = horovodrun(2, [COMMAND, "probe", "--json", str(file), "--repeats", "2"], limit_seconds=90)
    assert run.code == 0, run.output
    assert run.output.count("2 ranks, 2 on this host") == 1
    told = json.loads(file.read_text())
    assert (told["version"], told["num_ranks"], told["local_size"]) == (1, 2, 2)
    assert told["links"]["local"] is told["links"]["cross"] is None  # nothing else than all ranks
    link = told["links"]["global"]
    assert 0 < link["latency_seconds"] < 1
    assert link["bytes_per_second"] > 1e6
    assert set(told["collectives"]) == {"allreduce", "allgather", "alltoall", "broadcast"}
    assert all(seconds > 0 for row in told["collectives"].values() for seconds in row.values())

    command = [COMMAND, "plan", "--probe", str(file), "--params", "25.6e6", "--backward", "120ms"]
    plan = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert plan.returncode == 0, plan.stderr
    assert f"{8e-9 * link['bytes_per_second']:.3g} Gbit/s" in plan.stdout
    assert plan.stdout.count("\n 1024 ") == 1


@pytest.mark.parametrize(
    ("options", "told", "code"),
    [
        ([], "There is one rank", 1),
        (["--repeats", "none"], "`--repeats` must be a whole number", 2),
        (["--json", "/nowhere/probe.json"], "`--json` must be in a folder that exists", 2),
    ],
)
def test_refusals(options: list[str], told: str, code: int) -> None:
    run = subprocess.run([COMMAND, "probe", *options], capture_output=True, text=True, timeout=60, env={**QUIET})
    assert (run.returncode, told in run.stderr) == (code, True), run.stderr
