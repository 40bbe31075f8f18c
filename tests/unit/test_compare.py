"""The pure parts of ci/bench/compare.py: who takes part, what is known of whom, the table. Nothing is launched."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "ci" / "bench"))

import compare
import contenders
import launches
import report
import scaling
from netlab import Done  # compare has put its folder on the path

from hvd_sparse import registry
from hvd_sparse.memories.momentum import Momentum


class Late:
    """Stands in for a memory around another one."""

    keys, accumulator, compensate, update, for_dense = (), None, None, None, None

    def __init__(self, memory: Any = "residual") -> None:
        self.memory = memory


def note(event: str, name: str, **facts: Any) -> dict[str, Any]:
    return {"event": event, "contender": name, **facts}


# Who takes part.


def test_every_name_of_the_registry_takes_part_once() -> None:
    found, kinds = contenders.registered(), registry.METHODS
    assert {name for name in kinds["sparsifier"] if name != "threshold"} < found.keys()
    assert {name for name in kinds["collective"] if name != "shared_allreduce"} < found.keys()
    assert {f"owner_reduce-{name}" for name in kinds["memory"] if name != "momentum"} < found.keys()
    assert {name for name in kinds["scheme"] if name not in ("sparse", "dense")} < found.keys()
    described = [str(contenders.config_of(f"{name}@0.01").describe()) for name in contenders.METHODS]
    assert len(set(described)) >= len(described) - 1  # without a momentum, `residual` is the default memory


def test_what_is_registered_later_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    later = {
        "sparsifier": "hvd_sparse.sparsifiers.random_block:RandomBlock",
        "collective": "hvd_sparse.collectives.allgather:AllGatherSum",
        "memory": f"{__name__}:Late",
        "scheme": "hvd_sparse.schemes.dense:Dense",
    }
    for kind, path in later.items():
        monkeypatch.setitem(registry.METHODS[kind], f"new_{kind}", path)
    shared = "hvd_sparse.collectives.shared_allreduce:SharedAllReduce"
    monkeypatch.setitem(registry.METHODS["collective"], "new_shared", shared)
    found = contenders.registered()
    assert found["new_sparsifier"] == {"sparsifier": "new_sparsifier"}
    assert found["new_collective"] == {"collective": "new_collective"}
    assert found["owner_reduce-new_memory"] == {"memory": "new_memory"}
    assert found["new_scheme"] == {"scheme": "new_scheme"}
    assert "new_shared" not in found  # which no default sparsifier suits
    new = {name: arguments for name, arguments in found.items() if "new" in name}
    monkeypatch.setattr(contenders, "METHODS", new)
    names = ["new_collective@0.01", "new_sparsifier@0.1", "new_scheme@0.01", "owner_reduce-new_memory@0.01"]
    assert compare.parse_arguments([]).contenders == names


def test_memories_get_the_momentum_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.METHODS["memory"], "late", f"{__name__}:Late")
    assert contenders.config_of("owner_reduce@0.01", 0.75).memory.momentum == 0.75
    assert registry.name_of("memory", contenders.config_of("owner_reduce@0.01").memory) == "residual"
    plain = contenders.config_of("owner_reduce-residual@0.01", 0.75).memory
    assert registry.name_of("memory", plain) == "residual"
    around = contenders.with_memory({"memory": "late"}, 0.75)["memory"]
    assert isinstance(around.memory, Momentum)
    assert around.memory.momentum == 0.75
    inner = contenders.with_memory({"memory": "late"}, 0.0)["memory"].memory
    assert registry.name_of("memory", inner) == "residual"


def test_blind_selections_have_ten_times_the_density() -> None:
    assert [contenders.usual("random_block", density) for density in (0.01, 0.5)] == [
        "random_block@0.1",
        "random_block@1",
    ]
    assert contenders.usual("leader", 0.01) == "leader@0.01"
    names = contenders.expand(["methods", "random_block@0.01"], [0.01])
    assert {"random_block@0.1", "random_block@0.01", "owner_reduce@0.01"} < {*names}
    assert len(names) == len(contenders.METHODS) + 1


def test_who_keeps_everything() -> None:
    names = ["owner_reduce", "low_rank", "gtopk", "owner_reduce-none"]
    assert [contenders.conserves(f"{name}@0.01") for name in names] == [True, True, False, False]


def test_arguments() -> None:
    args = compare.parse_arguments([])
    assert (args.hosts, args.rate, args.ranks, args.seeds) == (4, "1gbit", [4, 16, 64, 256, 1024], [0, 1, 2])
    assert args.parts == ["time", "simulator", "accuracy"]
    args = compare.parse_arguments(["--parts", "simulator", "--contenders", "random_block,topk@0.5,topk"])
    assert (args.parts, args.contenders) == (["simulator"], ["random_block@0.1", "topk@0.5", "topk@0.01"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--parts", "space"], ["--contenders", "gossip"], ["--contenders", "adaptive"], ["--contenders", "horovod"],
        ["--hosts", "0"], ["--rate", "fast"], ["--density", "2"], ["--ranks", "0"], ["--seeds", ""], ["--seeds", "a"],
    ],
)  # fmt: skip
def test_wrong_arguments_end_the_program(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.parse_arguments(arguments)
    assert "error:" in capsys.readouterr().err


# The simulator.


def test_the_last_step_is_counted() -> None:
    assert scaling.simulate(None, 4, 64, 1.0, steps=3) == (4 * 2 * 64 * 3 / 4, 1)
    first, second = (scaling.simulate({}, 4, 4096, 0.01, steps) for steps in (1, 2))
    assert first == second


def test_matrices_are_as_square_as_can_be() -> None:
    assert [scaling.nearly_square(size) for size in (12, 36, 7)] == [(3, 4), (6, 6), (1, 7)]


@pytest.mark.parametrize(
    ("seconds", "sent", "worth"), [(1.0, 1e3, True), (16.0, 1e3, False), (1.0, 4e6, False), (15.0, 3.9e6, True)]
)
def test_sizes_that_cost_too_much_are_left_out(seconds: float, sent: float, worth: bool) -> None:
    assert compare.affordable(64, {"seconds": seconds, "bytes": sent}, 256, most_seconds=60) == worth


def test_a_method_that_fails_has_the_sizes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_at_16(arguments: Any, size: int, *_: Any, **__: Any) -> tuple[float, int]:
        assert arguments == contenders.METHODS["topk"]
        if size == 16:
            raise ValueError("too many")
        return 8.0, 2

    monkeypatch.setattr(scaling, "simulate", fail_at_16)
    args = compare.parse_arguments(["--ranks", "16,4,64"])
    found = compare.simulate(args, "topk@0.01")
    assert [(size, one["bytes"], one["rounds"]) for size, one in found["sizes"].items()] == [(4, 8.0, 2)]
    assert found["failure"] == "P=16: ValueError: too many"


# Time and training.


class Lab:
    """Stands in for NetLab: everybody comes to a tenth of the seed, the sketch in ten minutes, others in one."""

    hosts, addresses = 2, ["10.77.0.1", "10.77.0.2"]

    def __init__(self, *settings: Any) -> None:
        self.settings = settings

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def horovodrun(self, command: list[str], **_: Any) -> Done:
        settings = json.loads(Path(command[-1]).read_text())
        seconds = {name: 600 if name.startswith("sketch") else 60 for name in settings["contenders"]}
        facts = {"seed": settings["seed"], "value": settings["seed"] / 10}
        lines = [json.dumps(note("finished", name, seconds=number, **facts)) for name, number in seconds.items()]
        Path(settings["folder"], "0.jsonl").write_text("\n".join([*lines, ""]))
        return Done(0 if self.settings == (2, "loopback") else 1, "")


def test_the_share_of_the_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(args: Any, lab: Lab, model: str) -> dict[str, Any]:
        assert (lab.settings, model) == ((3, "1gbit"), "mlp")
        return {"rows": [{"name": name, "milliseconds": 8.0, "failure": ""} for name in args.contenders]}

    def own(name: str, model: str, num_ranks: int) -> float:
        assert (model, num_ranks) == ("mlp", 3)
        if name == "leader@0.01":
            raise ValueError("no")
        return 0.002

    monkeypatch.setattr(compare, "NetLab", Lab)
    monkeypatch.setattr(compare.step_time, "measure", measured)
    monkeypatch.setattr(compare, "own_seconds", own)
    rows = compare.measure_time(compare.parse_arguments(["--hosts", "3", "--contenders", "topk,leader"]))
    assert list(rows) == ["computation", "horovod", "topk@0.01", "leader@0.01"]
    assert [row.get("codec") for row in rows.values()] == [None, None, 0.25, None]
    assert rows["leader@0.01"]["failure"] == "codec: ValueError: no"


def test_what_was_finished_is_not_repeated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    launched = []

    def launch(lab: Any, script: str, settings: dict[str, Any], *_: Any) -> tuple[bool, list[Any], str]:
        launched.append(settings["contenders"])
        if "hangs" not in settings["contenders"]:
            return True, [[note("finished", "b", seed=0, value=0.5, seconds=1)]], ""
        before = [note("start", "a"), note("end", "a"), note("finished", "a", seed=0, value=0.25, seconds=1)]
        return False, [[*before, note("start", "hangs")]], "text"

    monkeypatch.setattr(launches, "launch", launch)
    outcome = launches.Outcome()
    settings = {"model": "mlp", "limit": 9, "contenders": ["a", "hangs", "b"]}
    launches.launch_all(None, "script.py", settings, 1, 99, outcome)
    assert launched == [["a", "hangs", "b"], ["b"]]
    assert list(outcome.failures) == ["hangs"]
    assert compare.accuracies(outcome) == {"a": {0: 25.0}, "b": {0: 50.0}}
    assert "going on without it" in capsys.readouterr().err


def test_a_launch_per_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "NetLab", Lab)
    args = compare.parse_arguments(["--seeds", "3,5", "--contenders", "topk,sketch"])
    found = compare.accuracies(compare.measure_accuracy(args))
    both = {3: 30.0, 5: 50.0}
    assert found == {"horovod": both, "topk@0.01": both, "sketch@0.01": {3: 30.0}}  # which is slow


# The table.

ARGUMENTS = ["--contenders", "topk,random_block@0.1,owner_reduce-none,leader", "--ranks", "4,16"]


def rows() -> list[dict[str, Any]]:
    seconds = {"computation": [0.1], "horovod": [0.6], "topk@0.01": [0.2]}
    samples = {"seconds": seconds, "sent": {"topk@0.01": [5e5]}, "counted": {}, "measuring": {}}
    times = {row["name"]: row for row in report.step_rows([*seconds, "leader@0.01"], samples, {"leader@0.01": "slow"})}
    times["topk@0.01"]["codec"] = 0.25
    sizes = {4: {"bytes": 1500.0, "rounds": 2, "seconds": 0.1}, 16: {"bytes": 2000.0, "rounds": 3, "seconds": 1.0}}
    found = {
        "time": times,
        "simulator": {
            "topk@0.01": {"sizes": sizes, "failure": ""}, "leader@0.01": {"sizes": {}, "failure": "P=4: no"}
        },
        "accuracy": {
            "horovod": {0: 88.0, 1: 90.0}, "topk@0.01": {0: 87.7, 1: 89.7}, "random_block@0.1": {1: 88.0},
            "owner_reduce-none@0.01": {0: 80.0, 1: 80.0},
        },
        "failures": {"leader@0.01": "hung"},
    }  # fmt: skip
    return compare.joined(compare.parse_arguments(ARGUMENTS), found)


def test_what_the_parts_know_comes_together() -> None:
    by_name = {row["name"]: row for row in rows()}
    assert list(by_name) == ["computation", "horovod", "topk", "random_block@0.1", "owner_reduce-none", "leader"]
    topk = by_name["topk"]
    assert (topk["keeps"], topk["kb4"], topk["kb16"], topk["rounds"]) == ("yes", 1.5, 2.0, 3)
    assert [topk[key] for key in ("milliseconds", "ratio", "sent_mb", "codec")] == pytest.approx([200, 3, 0.5, 0.25])
    assert (topk["accuracy"], topk["points"]) == pytest.approx((88.7, -0.3))
    assert by_name["random_block@0.1"]["points"] == pytest.approx(-2)  # of the seed that both have
    assert by_name["horovod"]["points"] is by_name["computation"]["accuracy"] is by_name["leader"]["kb4"] is None
    assert by_name["leader"]["failure"] == "slow; P=4: no; hung"
    assert [by_name[name]["keeps"] for name in ("computation", "horovod", "owner_reduce-none")] == ["-", "yes", "no"]


def test_a_table_has_the_columns_of_its_parts() -> None:
    args = compare.parse_arguments(ARGUMENTS)
    head, *lines = report.format_table(rows(), compare.columns(args)).splitlines()
    titles = "contender keeps ms/step x dense MB sent codec kB P=4 kB P=16 rounds accuracy points seeds"
    assert " ".join(head.split()) == titles
    topk = "topk yes 200.0 3.00 0.500 25.0% 1.50 2.00 3 88.70 -0.30 2"
    assert " ".join(lines[2].split()) == topk
    assert lines[5].split()[:3] == ["leader", "yes", "-"]
    assert lines[5].endswith("(slow; P=4: no; hung)")
    args = compare.parse_arguments([*ARGUMENTS, "--parts", "accuracy"])
    assert list(compare.columns(args)) == ["keeps", "accuracy", "points", "seeds"]


def test_verdicts() -> None:
    topk, random_block, others = compare.judge(rows())
    assert topk == "topk: accuracy -0.30 points from dense; bar -0.5: held"
    assert random_block == "random_block@0.1: accuracy -2.00 points from dense; bar -0.5: NOT HELD"
    assert others == "without a bar, because they lose something: owner_reduce-none -9.00 points"
    assert compare.judge([]) == []


def test_the_figure_needs_an_accuracy_and_a_cost(tmp_path: Path) -> None:
    file = tmp_path / "figure.png"
    args = compare.parse_arguments([*ARGUMENTS, "--png", str(file)])
    assert not compare.draw([row for row in rows() if row["accuracy"] is None], args)
    assert not file.exists()
    assert compare.draw(rows(), args)
    assert file.stat().st_size > 1000
