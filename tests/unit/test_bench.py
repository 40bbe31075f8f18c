"""The pure parts of the speed benchmarks in ci/bench: names, diaries, pooling, tables. Nothing is launched."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "ci" / "bench"))

import contenders
import launches
import own_seconds
import report
import step_time
import time_to_accuracy
import workloads
from netlab import Done  # step_time has put its folder on the path


def block(name: str, number: int, seconds: float, steps: int = 2, sent: int = 2_000_000) -> list[dict[str, Any]]:
    facts = {"round": number, "steps": steps, "seconds": seconds, "sent": sent}
    return [note("start", name), note("block", name, **facts), note("end", name)]


def note(event: str, name: str, **facts: Any) -> dict[str, Any]:
    return {"event": event, "contender": name, **facts}


# Names and arguments.


def test_a_method_without_density_stands_for_all_of_them() -> None:
    names = contenders.expand(["horovod", "allgather", "allgather@0.01", "leader@0.5", "horovod"], [0.1, 0.01])
    assert names == ["horovod", "allgather@0.1", "allgather@0.01", "leader@0.5"]


@pytest.mark.parametrize("name", ["gossip", "horovod@0.1", "allgather@0", "allgather@2", "allgather@much"])
def test_wrong_contenders_are_refused(name: str) -> None:
    with pytest.raises(ValueError):
        contenders.expand([name], [0.01])


def test_families() -> None:
    names = contenders.expand(step_time.NAMES, [0.01])
    assert {contenders.family(name) for name in names} == set(contenders.FAMILIES)
    assert [name for name in names if contenders.family(name) == "ddp"] == [n for n in names if n.startswith("ddp")]


def test_arguments() -> None:
    args = step_time.parse_arguments([])
    assert args.hosts == [2, 4]
    assert args.models == ["mlp", "lstm", "embedding"]
    assert {f"owner_reduce@{density}" for density in ("0.1", "0.01", "0.001")} <= set(args.contenders)
    args = step_time.parse_arguments(["--hosts", "4", "--contenders", "allgather", "--density", "0.5"])
    assert (args.hosts, args.contenders) == ([4], ["allgather@0.5"])
    assert time_to_accuracy.parse_arguments([]).models == ["mlp", "lstm"]


@pytest.mark.parametrize(
    "arguments",
    [["--rates", "fast"], ["--hosts", "two"], ["--hosts", "0"], ["--models", "gpt"], ["--contenders", "x"]],
)
def test_wrong_arguments_end_the_program(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        step_time.parse_arguments(arguments)
    assert "error:" in capsys.readouterr().err


def test_only_models_with_a_goal_are_trained_to_it() -> None:
    with pytest.raises(SystemExit):
        time_to_accuracy.parse_arguments(["--models", "embedding"])


# Diaries.


def test_a_line_that_was_cut_short_is_left_out() -> None:
    assert launches.read_diary('{"a": 1}\n{"b": 2}\n{"c"') == [{"a": 1}, {"b": 2}]
    assert launches.read_diary("") == []


def test_a_contender_that_fails_on_all_ranks_is_a_failure_and_no_culprit() -> None:
    diary = [note("start", "a"), note("failed", "a", error="TypeError: no"), note("end", "a"), *block("b", 0, 1.0)]
    assert launches.failures([diary, diary]) == {"a": "TypeError: no"}
    assert launches.culprit([diary, diary], 60) is None


def test_a_contender_that_does_not_end_is_the_culprit() -> None:
    diary = [*block("a", 0, 1.0), *block("b", 0, 1.0), note("start", "a")]
    name, how = launches.culprit([diary, diary], 60) or ("", "")
    assert name == "a"
    assert "silent for 60 s" in how


def test_a_contender_that_fails_on_some_ranks_is_the_culprit() -> None:
    waiting = [note("start", "a")]
    failed = [*waiting, note("failed", "a", error="ValueError: mine")]
    name, how = launches.culprit([waiting, failed], 60) or ("", "")
    assert (name, how) == ("a", "failed on 1 of 2 ranks: rank 1: ValueError: mine")
    assert launches.failures([waiting, failed]) == {}


SETTINGS = {"model": "mlp", "limit": 9}


class Lab:
    """Stands in for NetLab: "hangs" never ends, the others do."""

    hosts, addresses = 2, ["10.77.0.1", "10.77.0.2"]

    def __init__(self) -> None:
        self.launched: list[list[str]] = []

    def horovodrun(self, command: list[str], **_: Any) -> Done:
        settings = json.loads(Path(command[-1]).read_text())
        self.launched.append(settings["contenders"])
        hung = False
        for rank in range(self.hosts):
            notes = []
            for name in settings["contenders"]:
                hung = name == "hangs"
                notes += [note("start", name)] if hung else block(name, 0, 1.0 + rank)
                if hung:
                    break
            Path(settings["folder"], f"{rank}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in notes))
        return Done(1 if hung else 0, "text\nlast line\n")


def test_a_launch_is_repeated_without_the_culprit(capsys: pytest.CaptureFixture[str]) -> None:
    lab, outcome = Lab(), launches.Outcome()
    for _ in range(2):
        launches.launch_all(lab, "script.py", SETTINGS | {"contenders": ["a", "hangs", "b"]}, 1, 99, outcome)
    assert lab.launched == [["a", "hangs", "b"], ["a", "b"], ["a", "b"]]
    assert list(outcome.failures) == ["hangs"]
    assert report.pool(outcome.diaries)["seconds"] == {"a": [1.0] * 3, "b": [1.0] * 2}
    assert "going on without it" in capsys.readouterr().err


def test_a_launch_that_dies_outside_of_all_contenders_fails_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lab, "horovodrun", lambda *_, **__: Done(None, "no such host"))
    outcome = launches.Outcome()
    launches.launch_all(Lab(), "script.py", SETTINGS | {"contenders": ["a", "b"]}, 1, 99, outcome)
    assert outcome.failures == dict.fromkeys("ab", "the launch failed: no such host")


# Numbers.


def test_the_slowest_rank_counts_and_incomplete_rounds_do_not() -> None:
    first = [
        [*block("a", 0, 1.0), *block("a", 1, 2.0), *block("a", 2, 9.0), note("counted", "a", value=5.0)],
        [*block("a", 0, 3.0, sent=4_000_000), *block("a", 1, 1.0), note("counted", "a", value=7.0)],
    ]
    first[0].append(note("measuring", "a", value=0.004))
    first[1].append(note("measuring", "a", value=0.01))
    samples = report.pool([first, [block("a", 0, 4.0), block("a", 0, 4.0)]])
    assert samples["seconds"] == {"a": [1.5, 1.0, 2.0]}
    assert samples["sent"] == {"a": [2e6, 1e6, 1e6]}
    assert (samples["counted"], samples["measuring"]) == ({"a": [7.0]}, {"a": [0.01]})


def rows() -> list[dict[str, Any]]:
    seconds = {"computation": [0.1], "horovod": [0.9, 1.0, 8.0], "allgather@0.01": [0.2]}
    samples = {
        "seconds": seconds, "sent": {"horovod": [3e6]}, "counted": {"allgather@0.01": [5e5]},
        "measuring": {"allgather@0.01": [0.01]},
    }  # fmt: skip
    return report.step_rows([*seconds, "ddp"], samples, {"ddp": "no\nway"})


def test_medians_and_ratios() -> None:
    by_name = {row["name"]: row for row in rows()}
    assert by_name["horovod"]["milliseconds"] == pytest.approx(1000)
    assert by_name["horovod"]["ratio"] == 1
    assert by_name["horovod"]["sent_mb"] == pytest.approx(3)
    assert by_name["allgather@0.01"]["ratio"] == pytest.approx(5)
    assert by_name["allgather@0.01"]["efficiency"] == pytest.approx(0.5)
    assert by_name["allgather@0.01"]["counted_mb"] == pytest.approx(0.5)
    assert by_name["allgather@0.01"]["measuring"] == pytest.approx(0.01)
    assert by_name["horovod"]["measuring"] is by_name["ddp"]["measuring"] is None
    assert by_name["ddp"]["milliseconds"] is by_name["ddp"]["ratio"] is None


def test_a_table_has_a_line_for_everybody() -> None:
    head, *lines = report.format_table(rows(), step_time.COLUMNS).splitlines()
    assert head.split()[:2] == ["contender", "ms/step"]
    assert lines[1].split() == ["horovod", "1000.0", "10.0%", "1.00", "3.000", "-", "-", "3"]
    assert lines[3].split() == ["ddp", "failed", "(no", "way)"]


def test_bars() -> None:
    def cell(rate: str, ratio: float | None) -> dict[str, Any]:
        return {"hosts": 4, "model": "mlp", "rate": rate, "rows": [{"name": "owner_reduce@0.01", "ratio": ratio}]}

    lines = step_time.judge([cell("100mbit", 14.5), cell("1gbit", 2.0), cell("10gbit", 1.0)])
    assert [line.rpartition(": ")[2] for line in lines] == ["held", "NOT HELD"]
    assert step_time.judge([cell("1gbit", None)])[0].endswith("not measured")
    assert step_time.judge([]) == []


def test_the_best_fixed_density() -> None:
    ratios = {"adaptive": 1.8, **dict.fromkeys(contenders.FIXED, 1.0), contenders.FIXED[-1]: 2.1}
    rows = [{"name": name, "ratio": ratio, "measuring": None} for name, ratio in ratios.items()]
    cell = {"hosts": 2, "model": "mlp", "rate": "1gbit", "rows": rows}
    (line,) = step_time.judge([cell])
    assert "adaptive: 0.86 of the best fixed configuration, by_size@0.001" in line
    assert line.endswith("NOT HELD")
    assert step_time.judge([{**cell, "rows": rows[:-1]}]) == []  # without the whole ladder nobody knows the best


@pytest.mark.parametrize(("share", "verdict"), [(0.004, "held"), (0.02, "NOT HELD")])
def test_measuring_has_a_bar(share: float, verdict: str) -> None:
    rows = [{"name": "adaptive", "ratio": None, "measuring": share}]
    (line,) = step_time.judge([{"hosts": 2, "model": "lstm", "rate": "1gbit", "rows": rows}])
    assert line.endswith(f"bar 1%: {verdict}")


def test_goals() -> None:
    def curve(*values: float) -> list[dict[str, float]]:
        return [{"step": 10.0 * i, "seconds": 2.0 * i, "value": value} for i, value in enumerate(values, start=1)]

    curves = {
        "horovod": [curve(0.5, 0.6, 0.86)],
        "allgather@0.01": [curve(0.85)],
        "leader@0.01": [curve(0.3)],
        "ddp": [[]],
    }
    dense, sparse, late, failed = time_to_accuracy.goal_rows(workloads.find("mlp"), curves, {"ddp": "no"})
    assert (dense["steps"], dense["seconds"], dense["ratio"]) == (30, 6, 1)
    assert (sparse["steps"], sparse["ratio"], sparse["failure"]) == (10, 3, "")
    assert (late["steps"], late["ratio"], late["final"], late["failure"]) == (None, None, 0.3, "goal not reached")
    assert (failed["final"], failed["failure"]) == (None, "no")


@pytest.mark.parametrize(
    ("name", "least", "most"), [("mlp", 3.7e6, 3.8e6), ("lstm", 5e6, 5.5e6), ("embedding", 3e6, 4e6)]
)
def test_sizes_of_models(name: str, least: float, most: float) -> None:
    model = workloads.find(name).make_model()
    assert least <= sum(parameter.numel() for parameter in model.parameters()) <= most


def test_goals_have_a_direction() -> None:
    assert workloads.find("mlp").reached(0.9)
    assert not workloads.find("mlp").reached(0.8)
    assert workloads.find("lstm").reached(5.0)
    assert not workloads.find("lstm").reached(6.0)
    assert not workloads.find("lstm").reached(float("nan"))


def test_the_learning_rate_falls_to_zero_in_trainings_of_known_length() -> None:
    workload = workloads.find("mlp")
    assert workload.factor(10_000) == 1
    workload.num_steps = 99
    assert [workload.factor(step) for step in (50, 98)] == pytest.approx([0.5, 0.02])


def test_seeds_change_weights_and_order() -> None:
    weights, orders = [], []
    for seed in (0, 0, 1):
        workload = workloads.find("embedding")
        workload.num_words, workload.seed = 50, seed
        weights.append(next(workload.make_model().parameters()).sum().item())
        orders.append([workload.order(rank) for rank in range(2)])
    assert weights[0] == weights[1] != weights[2]
    assert orders == [[0, 1], [0, 1], [1000, 1001]]


def test_only_a_programs_own_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(own_seconds.time, "perf_counter", lambda: now[0])

    def program() -> Generator[str, int, int]:
        now[0] += 1
        answer = yield "request"
        now[0] += 2
        return answer + 1

    clock = own_seconds.Clock()
    running = clock.program(program())
    assert running.send(None) == "request"
    now[0] += 100
    with pytest.raises(StopIteration) as stop:
        running.send(6)
    assert (stop.value.value, clock.seconds) == (7, 3)
