"""The command `hvd-sparse plan`, and the forecast that it prints."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_sparse.cli import main
from hvd_sparse.planner.choice import LADDER
from hvd_sparse.planner.forecast import Model, Network, forecast
from hvd_sparse.planner.link import Link

NUMBERS = ["--bandwidth", "10gbit", "--latency", "50us", "--params", "25.6e6", "--backward", "120ms"]
MODEL = ["--params", "25.6e6", "--backward", "120ms"]
VECTOR = [[0.002, 10e6], [0.002, 10e6], [0.002, 30e6], [0.004, 50e6], [0.001, 4e6]]
PROBE = {
    "version": 1,
    "num_ranks": 8,
    "local_size": 4,
    "links": {
        "global": {"latency_seconds": 1e-3, "bytes_per_second": 1.25e8},
        "local": {"latency_seconds": 1e-4, "bytes_per_second": 1e10},
        "cross": {"latency_seconds": 1e-3, "bytes_per_second": 1.25e8},
    },
    "collectives": {},
}


def written(folder: Path, content: Any, name: str) -> str:
    file = folder / name
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def lines_of(output: str) -> list[list[str]]:
    """The table's lines: ranks, dense ms, scaling, choice, step ms, scaling."""
    return [re.split(r"  +", one.strip()) for one in output.splitlines() if re.match(r" *\d+  ", one)]


def plan(tmp_path: Path, *words: str) -> dict[str, Any]:
    """What the command writes as JSON."""
    file = tmp_path / "plan.json"
    assert main(["plan", *words, "--json", str(file)]) == 0
    return json.loads(file.read_text())


# What is printed


def test_a_network_that_is_the_bottleneck(capsys):
    assert main(["plan", *NUMBERS, "--ranks", "8"]) == 0
    out = capsys.readouterr().out
    assert "25,600,000 parameters, 102.4 MB of gradients; backward takes 120.0 ms of a step of 180.0 ms" in out
    assert "forward is taken as half of backward" in out
    assert "Link: 10 Gbit/s per rank, 0.05 ms per collective." in out
    assert "Is the network the bottleneck on 8 ranks? Yes: dense, it is busy for 67% of a step" in out
    assert "the scaling factor is 0.843 (target 0.95)" in out
    assert "With owner_reduce at density 0.1 the scaling factor is 0.993." in out
    assert "A compression factor of 2 of an allreduce reaches the target." in out
    assert lines_of(out) == [["8", "213.6", "0.843", "owner_reduce at density 0.1", "181.2", "0.993"]]
    assert "Assumptions: " in out
    assert "No compression is needed" not in out


def test_a_network_that_is_none(capsys):
    assert main(["plan", "--bandwidth", "100gbit", "--latency", "50us", *MODEL]) == 0
    out = capsys.readouterr().out
    assert "Is the network the bottleneck on 1024 ranks? No: " in out
    assert "No compression is needed on any of these numbers of ranks: hvd.Compression.none will do." in out
    assert "compression factor" not in out
    rows = lines_of(out)
    assert [int(row[0]) for row in rows] == [2**power for power in range(1, 11)]
    assert {row[3] for row in rows} == {"dense"}


def test_a_target_that_nothing_reaches(capsys):
    assert main(["plan", "--bandwidth", "1mbit", *MODEL, "--ranks", "4"]) == 0
    out = capsys.readouterr().out
    assert "No compression factor of an allreduce up to 200 reaches the target." in out
    assert lines_of(out)[0][3] == "owner_reduce at density 0.001"


def test_columns_are_aligned(capsys):
    assert main(["plan", *NUMBERS]) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if re.match(r" *(ranks|\d+)  ", line)]
    assert len(table) == 11
    assert len({len(line) for line in table}) == 1


def test_one_rank_needs_no_network(capsys):
    assert main(["plan", *NUMBERS, "--ranks", "1"]) == 0
    out = capsys.readouterr().out
    assert lines_of(out) == [["1", "180.0", "1.000", "dense", "180.0", "1.000"]]
    assert "on 1 ranks? No: dense, it is busy for 0% of a step" in out


def test_the_default_latency_is_said(capsys):
    assert main(["plan", "--bandwidth", "10gbit", *MODEL]) == 0
    assert "1.5 ms per collective" in capsys.readouterr().out


def test_units(tmp_path):
    same = [
        ["--bandwidth", "1gbit", "--latency", "1.5ms", "--params", "1e6", "--backward", "20ms"],
        ["--bandwidth", "1000mbit", "--latency", "1500us", "--params", "1000000", "--backward", "0.02s"],
        ["--bandwidth", "1e6kbit", "--latency", "1.5e6ns", "--params", "1e6", "--backward", "20000us"],
        ["--bandwidth", "1 Gbit", "--latency", "1.5 MS", "--params", "1e6", "--backward", "2e-2s"],
    ]
    plans = [plan(tmp_path, *words, "--ranks", "4") for words in same]
    assert plans[0]["network"]["links"]["global"] == pytest.approx({"latency": 1.5e-3, "seconds_per_byte": 8e-9})
    for other in plans[1:]:
        assert other["rows"][0]["dense_seconds"] == pytest.approx(plans[0]["rows"][0]["dense_seconds"], rel=1e-12)


def test_a_step_that_is_given(tmp_path, capsys):
    found = plan(tmp_path, *NUMBERS, "--step", "200ms", "--ranks", "8")
    assert found["model"]["step_seconds"] == pytest.approx(0.2)
    assert "half of backward" not in capsys.readouterr().out
    assert sum(delay for delay, _ in found["model"]["events"]) == pytest.approx(0.12)
    assert sum(size for _, size in found["model"]["events"]) == pytest.approx(102.4e6)
    assert max(size for _, size in found["model"]["events"]) <= 4 * 2**20


def test_a_huge_model(tmp_path):
    found = plan(tmp_path, "--bandwidth", "400gbit", "--params", "1e12", "--backward", "20s", "--ranks", "1024")
    assert sum(size for _, size in found["model"]["events"]) == pytest.approx(4e12)
    assert len(found["model"]["events"]) == 1000


# Files


def test_a_trace(tmp_path, capsys):
    """The synthetic vector of what_if.md, at 4 ranks and 10 Gbit/s: buckets end at 66.0 and 130.8 ms."""
    trace = written(tmp_path, {"version": 1, "step_seconds": 0.03, "events": VECTOR}, "trace.json")
    found = plan(tmp_path, "--bandwidth", "10gbit", "--latency", "1.5ms", "--trace", trace, "--ranks", "4")
    dense = found["rows"][0]["dense"]
    assert dense["finishes"] == pytest.approx([0.0675, 0.1338])
    assert dense["overhead"] == pytest.approx(0.1228)
    assert dense["scaling"] == pytest.approx(0.1963, abs=5e-5)
    assert "as recorded" in capsys.readouterr().out


def test_a_probe(tmp_path, capsys):
    probe = written(tmp_path, {**PROBE, "links": {"global": PROBE["links"]["global"], "local": None}}, "probe.json")
    found = plan(tmp_path, "--probe", probe, *MODEL)
    assert "on 8 ranks? Yes" in capsys.readouterr().out
    by_hand = plan(tmp_path, "--bandwidth", "1gbit", "--latency", "1ms", *MODEL)
    for row, other in zip(found["rows"], by_hand["rows"]):
        assert row["choice"]["reason"] == other["choice"]["reason"]
        assert row["scaling"] == pytest.approx(other["scaling"])


def test_links_inside_hosts_are_used(tmp_path):
    found = plan(tmp_path, "--probe", written(tmp_path, PROBE, "probe.json"), *MODEL, "--ranks", "1,2,4,6,8,64")
    chosen = {row["num_ranks"]: row["choice"]["collective"] for row in found["rows"]}
    assert chosen == {
        1: "dense",
        2: "hierarchical",
        4: "hierarchical",  # one host: only its own link is used
        6: "owner_reduce",  # does not fill hosts
        8: "hierarchical",
        64: "hierarchical",
    }


@pytest.mark.parametrize("name", ["owner_reduce", "allgather", "shared_allreduce", "hierarchical", "dense"])
def test_a_collective_that_is_named_is_the_only_one(name, tmp_path):
    probe = written(tmp_path, PROBE, "probe.json")
    found = plan(tmp_path, "--probe", probe, *MODEL, "--ranks", "8,16", "--collective", name)
    assert {row["choice"]["collective"] for row in found["rows"]} == {name}


def test_a_picture(tmp_path):
    out = tmp_path / "new" / "plan.png"
    assert main(["plan", *NUMBERS, "--ranks", "8,2", "--png", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plan", *NUMBERS, "--png", str(tmp_path / "plan.png")]) == 1
    assert "pip install 'hvd-sparse[plot]'" in capsys.readouterr().err
    assert main(["plan", *NUMBERS]) == 0


# Errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bandwidth", "10gb", *MODEL], "`--bandwidth` must be a number above 0 with a unit out of kbit, mbit, gbit"),
        (["--bandwidth", "10", *MODEL], ": 20mbit. Received: --bandwidth=10."),
        (["--bandwidth", "0gbit", *MODEL], "Received: --bandwidth=0gbit."),
        (["--bandwidth=-1gbit", *MODEL], "Received: --bandwidth=-1gbit."),
        (["--bandwidth", "1.2.3gbit", *MODEL], "Received: --bandwidth=1.2.3gbit."),
        (
            ["--bandwidth", "1gbit", "--latency", "5min", *MODEL],
            "with a unit out of ns, us, ms, s: 20ms. Received: --lat",
        ),
        (["--bandwidth", "1gbit", "--params", "1e6", "--backward", "120"], "Received: --backward=120."),
        (
            ["--bandwidth", "1gbit", "--probe", "p.json", *MODEL],
            "one of them. Received: --probe=p.json --bandwidth=1gbit",
        ),
        (MODEL, "give the link as `--probe` or as `--bandwidth`, one of them. Received: neither."),
        (["--probe", "p.json", "--latency", "1ms", *MODEL], "`--latency` belongs to `--bandwidth`"),
        (
            ["--probe", "/nowhere/p.json", *MODEL],
            "`--probe` must be a file: what `hvd-sparse probe --json` writes. Received",
        ),
        (
            ["--bandwidth", "1gbit", "--trace", "/nowhere/t.json"],
            "Received: /nowhere/t.json (No such file or directory).",
        ),
        (["--bandwidth", "1gbit", "--trace", "t", *MODEL], "Received: --params=25.6e6 --backward=120ms."),
        (
            ["--bandwidth", "1gbit"],
            "give the model as `--params` and `--backward`, or as `--trace`. Received: neither.",
        ),
        (["--bandwidth", "1gbit", "--params", "1e6"], "or as `--trace`. Received: --params=1e6."),
        (
            ["--bandwidth", "1gbit", "--params", "1.5", "--backward", "1ms"],
            "`--params` must be a whole number of 1 or more",
        ),
        (["--bandwidth", "1gbit", "--params", "inf", "--backward", "1ms"], "Received: --params=inf."),
        ([*NUMBERS, "--step", "100ms"], "`--step` must be at least `--backward`. Received: --params=25.6e6 --ba"),
        ([*NUMBERS, "--ranks", "2,x"], "`--ranks` must be a whole number of 1 or more. Received: --ranks=x."),
        ([*NUMBERS, "--ranks", "0"], "Received: --ranks=0."),
        ([*NUMBERS, "--ranks", ""], "Received: --ranks=."),
        ([*NUMBERS, "--target", "1.5"], "`--target` must be a number above 0 and up to 1. Received: --target=1.5."),
        ([*NUMBERS, "--target", "nan"], "Received: --target=nan."),
        ([*NUMBERS, "--collective", "gossip"], "`--collective` must be one of 'dense', 'owner_reduce'"),
        (
            [*NUMBERS, "--collective", "hierarchical"],
            "`collective` hierarchical needs links measured inside and between",
        ),
        ([*NUMBERS, "--png", "plan.jpg"], "`--png` must be a .png file. Received: --png=plan.jpg."),
        (
            [*NUMBERS, "--json", "/dev/null/plan.json"],
            "`--json` must be in a place that can be written. Received: /dev/",
        ),
        (["--bandwith", "1gbit"], "unrecognized arguments: --bandwith 1gbit. See `hvd-sparse plan --help`."),
    ],
)
def test_wrong_arguments_exit_with_2(capsys, words, message):
    assert main(["plan", *words]) == 2
    out, error = capsys.readouterr()
    assert message in error
    assert len(error.splitlines()) == 1
    assert out == ""


def without(content: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name != key}


BROKEN_PROBES = [
    ("{", "Expecting property name"),
    ("", "Expecting value"),
    ([], "list indices"),
    ({}, "it has no 'version'"),
    ({**PROBE, "version": 2}, "its version is 2, and this program reads version 1"),
    (without(PROBE, "links"), "it has no 'links'"),
    (without(PROBE, "num_ranks"), "it has no 'num_ranks'"),
    ({**PROBE, "num_ranks": 1}, "run the probe on two ranks or more, `horovodrun -np 2`"),
    ({**PROBE, "links": {"global": None}}, "it knows no link between ranks"),
    ({**PROBE, "links": {"global": {"latency_seconds": 1e-3}}}, "it has no 'bytes_per_second'"),
    (
        {**PROBE, "links": {"global": {"latency_seconds": 1e-3, "bytes_per_second": 0}}},
        "`global.bytes_per_second` must be a positive number",
    ),
    ({**PROBE, "links": 7}, "'int' object has no attribute"),
]


@pytest.mark.parametrize(("content", "message"), BROKEN_PROBES)
def test_broken_probes_exit_with_1(tmp_path, capsys, content, message):
    probe = written(tmp_path, content, "probe.json")
    assert main(["plan", "--probe", probe, *MODEL]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"hvd-sparse plan: error: {probe} is not what `hvd-sparse probe --json` writes: ")
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"events": [[0.1]]}, "not enough values to unpack"),
        ({"events": [[-0.1, 5.0]]}, "`events` must be (seconds since the last, bytes), 0 or more"),
        ({"events": []}, "`events` must hold gradients"),
        ({"step_seconds": 0.001}, "`step_seconds` must hold all events, 0.011 s. Received: 0.001."),
        ({"step_seconds": None}, "`step_seconds` must be a positive number"),
        ({"version": None}, "its version is None"),
    ],
)
def test_broken_traces_exit_with_1(tmp_path, capsys, change, message):
    trace = written(tmp_path, {"version": 1, "step_seconds": 0.03, "events": VECTOR, **change}, "trace.json")
    assert main(["plan", "--bandwidth", "1gbit", "--trace", trace]) == 1
    assert message in capsys.readouterr().err


def test_help(capsys):
    assert main(["plan", "--help"]) == 0
    out = capsys.readouterr().out
    assert "hvd-sparse plan --bandwidth 10gbit --latency 50us --params 25.6e6 --backward 120ms" in out
    assert main(["--help"]) == 0
    assert "plan " in capsys.readouterr().out


def test_planning_imports_no_library():
    code = "import sys, hvd_sparse.cli.plan; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert "hvd_sparse" in modules
    assert modules & {"numpy", "torch", "tensorflow", "keras", "horovod", "matplotlib"} == set()


# The forecast

any_model = st.builds(
    Model,
    st.lists(st.tuples(st.floats(0, 0.01), st.integers(4, 10**8).map(float)), min_size=1, max_size=10).map(tuple),
    st.floats(0.2, 1),
)
any_network = st.builds(
    lambda latency, beta: Network({"global": Link(latency, beta)}), st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-6)
)


def test_a_target_is_missed_by_nothing():
    """Dense, at a scaling factor of 0.932, is not taken for one of 0.95, little though compression saves."""
    row = forecast(Model(((0.0048, 4.096e6),) * 25, 0.18), Network({"global": Link(5e-5, 8e-10)}), 4)
    assert 0.9 < row.dense.scaling < 0.95 < row.scaling
    assert row.choice.collective == "owner_reduce"


def test_what_stays_inside_a_host_takes_time():
    """A bucket of 1e6 elements, after backward: 12 n (L - 1) / L bytes inside, 16 k / L (N - 1) / N between hosts."""
    model, across = Model(((0.1, 4e6),), 0.2), Link(2e-3, 1e-7)
    links = {"global": across, "local": Link(1e-3, 1e-9), "cross": across}
    row = forecast(model, Network(links, 8, 4), 8, "hierarchical", target=0.9)
    inside, k = 2e-3 + 12e6 * 3 / 4 * 1e-9, row.choice.density * 1e6
    assert row.choice.seconds == pytest.approx(0.2 + inside + 4e-3 + 16 * (k // 4) / 2 * 1e-7)


@given(any_model, any_network, st.integers(1, 1024), st.floats(0.5, 0.99))
def test_a_forecast_is_never_slower_than_dense(model, network, num_ranks, target):
    row = forecast(model, network, num_ranks, None, target)
    assert row.choice.seconds <= row.dense_seconds
    assert 0 < row.scaling <= 1
    assert row.scaling >= row.dense.scaling
    assert row.choice.density in (1.0, *LADDER)
    if row.dense.scaling >= target + 1e-9:
        assert (row.choice.collective, row.needed) == ("dense", 1)
    if row.scaling < target - 1e-9:
        assert row.choice.density in (LADDER[-1], 1.0)
