"""The examples on graphs run from end to end: short, on the small graph that is made from a seed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import QUIET, ROOT, case_names, horovodrun, launched

EXAMPLES = ROOT / "examples"
sys.path[:0] = [str(EXAMPLES), str(ROOT / "ci" / "bench")]


@pytest.mark.parallel(ranks=2)
@pytest.mark.parametrize("case", case_names("gnn_cases"))
def test_torch(case: str) -> None:
    launched("gnn_cases", 2, 90.0).check(case)


@pytest.mark.parallel(ranks=2)
def test_tensorflow_on_two_ranks(tmp_path: Path) -> None:
    options = ["--synthetic", "--steps", "40", "--every-steps", "10", "--batch-size", "32", "--lr", "0.02"]
    options += ["--json", str(tmp_path / "results.json"), "--cache", str(tmp_path / "parts")]
    run = horovodrun(2, [sys.executable, str(EXAMPLES / "tensorflow2_gnn.py"), *options], limit_seconds=90)
    assert run.code == 0, run.output
    assert run.output.count("test accuracy") == 1
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["ranks"], results["steps"], results["rounds"]) == (2, 40, 5)
    assert results["accuracy"] > 0.4  # a guess is right once in eight times
    assert results["bytes_per_rank"] > 0


def test_missing_data_is_named(tmp_path: Path) -> None:
    script = EXAMPLES / "pytorch_gnn_node_classification.py"
    command = [sys.executable, str(script), "--mode", "single", "--data", str(tmp_path / "nowhere"), "--steps", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **QUIET})
    assert run.returncode == 1
    assert run.stderr.strip().startswith("error: There is no file")
    assert "apt-get install -y wordnet-base" in run.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--minutes", "1", "--steps", "5"], "--minutes or --steps"),
        (["--every-seconds", "1", "--every-steps", "5"], "not allowed with argument"),
        (["--mode", "sync", "--drop-part", "1"], "--drop-part needs one of"),
        (["--slow", "3"], "must be RANK:SECONDS"),
        (["--slow", "3:-1"], "must be a positive number"),
        (["--steps", "0"], "must be 1 or more"),
    ],
)
def test_arguments_are_checked(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    import graph_training

    with pytest.raises(SystemExit):
        graph_training.parse(graph_training.make_parser("Test.", 0.1, 8), options)
    assert words in capsys.readouterr().err


def test_parts_are_written_once_and_rotated(tmp_path: Path) -> None:
    import graph_data
    import graph_parts

    data = graph_data.synthetic()
    facts = graph_parts.write(data, data.graph, "random", 4, 0, tmp_path)
    assert graph_parts.write(data, data.graph, "random", 4, 0, tmp_path) == facts
    assert len(list(tmp_path.iterdir())) == 1
    parts = [graph_parts.open_own(facts, rank).nodes.tolist() for rank in range(4)]
    assert sorted(node for part in parts for node in part) == list(range(data.graph.num_nodes))
    rotated = [graph_parts.open_own(facts, rank, drop_part=1).nodes.tolist() for rank in range(4)]
    assert rotated == [parts[2], parts[3], parts[0], parts[1]]  # the last rank has what is to be dropped
    with pytest.raises(graph_parts.DataError, match="--cache"):
        graph_parts.open_own({**facts, "folder": str(tmp_path / "nowhere")}, 0)
    with pytest.raises(graph_parts.DataError, match="1000 parts"):
        graph_parts.write(data, data.graph, "random", 1000, 0, tmp_path)


def run_of(name: str, seed: int, values: list[float], **facts: float) -> dict:
    """As ci/bench/gnn.py notes one: a value every ten seconds."""
    curve = [{"seconds": 10.0 * number, "MRR": value} for number, value in enumerate(values)]
    plain = {"steps_per_second": 100.0, "waiting_share": 0.01, "bytes_per_rank": 1e6}
    return {
        "name": name, "seed": seed, "failure": "", "results": {**plain, "MRR": values[-1], "curve": curve, **facts}
    }  # fmt: skip


def test_bars_of_the_benchmark() -> None:
    import gnn_bars

    runs = [
        run_of("super", 0, [0.1, 0.3, 0.4, 0.4]),
        run_of("super", 1, [0.1, 0.3, 0.4, 0.5]),
        run_of("random", 0, [0.1, 0.2, 0.25, 0.3], waiting_share=0.03),
        run_of("min-cut", 0, [0.1, 0.2, 0.3, 0.44]),
        run_of("sync", 0, [0.1, 0.2, 0.25, 0.3]),
        run_of("sync", 1, [0.1, 0.2, 0.25, 0.3]),
        run_of("super, a slow rank", 0, [0.1], steps_per_second=90.0),
        run_of("sync, a slow rank", 0, [0.1], steps_per_second=50.0),
        run_of("super, a part missing", 0, [0.1, 0.42]),
    ]
    rows = {row["name"]: row for row in gnn_bars.rows_of(runs, [0, 1])}
    assert (rows["super"]["to_sync"], rows["super"]["ratio"]) == (10, 3)
    assert (rows["random"]["to_sync"], rows["random"]["ratio"]) == (30, 1)
    assert rows["min-cut"]["seed1"] is None
    held = [line.endswith(": held") for line in gnn_bars.judge(list(rows.values()), [0, 1], 5.0)]
    #       parts: random, super; time: random, super; slow rank; waiting: random, super, min-cut; a part is missing
    assert held == [False, True, False, True, True, False, True, True, False]
    assert not any("averaging" in line for line in gnn_bars.judge(list(rows.values()), [0, 1], 1.0))
    assert gnn_bars.judge([], [0], 5.0) == []


def test_a_goal_that_was_missed_once_has_no_time() -> None:
    import gnn_bars

    runs = [run_of("sync", 0, [0.1, 0.5]), run_of("super", 0, [0.1, 0.4])]
    assert gnn_bars.rows_of(runs, [0])[1]["to_sync"] is None
    lines = gnn_bars.judge(gnn_bars.rows_of(runs, [0]), [0], 5.0)
    assert "super: sync's MRR not reached; bar 1.5: NOT HELD" in lines
