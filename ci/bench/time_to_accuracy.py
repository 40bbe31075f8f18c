"""Seconds of training until a goal, with every way to average gradients, over a slow network.

    sudo .venv/bin/python ci/bench/time_to_accuracy.py                               # 4 hosts, 100 Mbit/s: half an hour
    sudo .venv/bin/python ci/bench/time_to_accuracy.py --rate 1gbit --models mlp

Hosts are network namespaces with links of limited rate (ci/netlab.py, which needs root). The goals are 85 % test
accuracy on Fashion-MNIST (`mlp`) and a validation loss of 5.4 on text (`lstm`), with the same hyper-parameters for
everybody: SGD with momentum 0.9, in the memory where gradients are sparse and in the optimizer otherwise. Every
contender is a launch of its own. Evaluations, on a part of the test set, are outside the measured seconds, which are
those of the slowest rank:

    steps, seconds  until the goal is reached, or "-" if it was not
    s/step          of all steps
    x dense         Horovod's dense seconds until the goal / these
    final           accuracy or loss at the end of the run

Ends with status 1 if a contender failed or missed the goal. Needs the Debian packages dataset-fashion-mnist and
dict-gcide.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import contenders
import report
from launches import Outcome, launch_all
from netlab import NetLab, NetLabError, parse_rate
from workloads import WORKLOADS, Workload, find

ROOT = Path(__file__).resolve().parents[2]
NAMES = [
    "horovod", "adaptive", "horovod-fp16", "ddp", "ddp-bf16", "ddp-powersgd", "allgather@0.01", "owner_reduce@0.01",
    "owner_reduce-compact@0.01", "leader@0.01",
]  # fmt: skip
MODELS = [name for name, workload in WORKLOADS.items() if workload.goal is not None]
COLUMNS = {
    "steps": ("steps", ".0f"),
    "seconds": ("seconds", ".1f"),
    "seconds_per_step": ("s/step", ".3f"),
    "ratio": ("x dense", ".2f"),
    "final": ("final", ".4f"),
}
Curve = list[dict[str, float]]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--hosts", type=int, default=4, help="(%(default)s)")
    add("--slots", type=int, default=1, help="ranks per host (%(default)s)")
    add("--rate", default="100mbit", help="of all links (%(default)s)")
    add("--models", type=report.listed, default=",".join(MODELS), help="(%(default)s)")
    add("--contenders", type=report.listed, default=",".join(NAMES), help="NAME or METHOD@DENSITY (%(default)s)")
    add("--density", type=report.listed, default="0.01", help="of the methods without one (%(default)s)")
    add("--repeats", type=int, default=1, help="launches of every contender, in turn (%(default)s)")
    add("--every", type=int, default=10, help="steps between evaluations (%(default)s)")
    add("--steps", type=int, default=300, help="after which a contender has not reached the goal (%(default)s)")
    add("--limit", type=float, default=480, help="seconds of training, likewise (%(default)s)")
    add("--json", type=Path, default=ROOT / "out" / "time_to_accuracy.json")
    add("--png", type=Path, default=ROOT / "out" / "time_to_accuracy.png")
    args = parser.parse_args(arguments)
    try:
        args.contenders = contenders.expand(args.contenders, [float(density) for density in args.density])
        parse_rate(args.rate)
    except ValueError as error:
        parser.error(str(error))
    if unknown := set(args.models) - set(MODELS):
        parser.error(f"--models are of {', '.join(MODELS)}. Received: {', '.join(unknown)}.")
    if min(args.hosts, args.slots, args.repeats, args.every, args.steps) < 1:
        parser.error("--hosts, --slots, --repeats, --every and --steps must be 1 or more.")
    return args


def train(args: argparse.Namespace, lab: NetLab, model: str, name: str, outcome: Outcome) -> Curve:
    """One launch: the values of the metric on rank 0, up to where it came. A failure is noted in `outcome`."""
    settings = {
        "family": contenders.family(name), "contenders": [name], "model": model, "limit": 120 + 10 * args.every,
        "every": args.every, "most_steps": args.steps, "most_seconds": args.limit,
    }  # fmt: skip
    number = len(outcome.diaries)
    launch_all(lab, "time_to_accuracy_rank.py", settings, args.slots, 2 * args.limit + 300, outcome)
    diaries = outcome.diaries[number] if len(outcome.diaries) > number else [[]]
    curve = [note for note in diaries[0] if note["event"] == "value"]
    if curve:
        print("{contender}: {value:.4f} after {step} steps, {seconds:.1f} s".format(**curve[-1]), file=sys.stderr)
    return curve


def goal_rows(workload: Workload, curves: dict[str, list[Curve]], failures: dict[str, str]) -> list[dict[str, Any]]:
    """A row for every contender: medians over its launches if all of them reached the goal."""
    rows: list[dict[str, Any]] = []
    for name, launches in curves.items():
        ends = [curve[-1] for curve in launches if curve]
        reached = bool(ends) and name not in failures and all(workload.reached(end["value"]) for end in ends)
        rows.append({
            "name": name,
            "steps": statistics.median(end["step"] for end in ends) if reached else None,
            "seconds": statistics.median(end["seconds"] for end in ends) if reached else None,
            "seconds_per_step": statistics.median(end["seconds"] / end["step"] for end in ends) if ends else None,
            "final": statistics.median(end["value"] for end in ends) if ends else None,
            "failure": failures.get(name, "" if reached else "goal not reached"),
        })  # fmt: skip
    dense = next((row["seconds"] for row in rows if row["name"] == contenders.DENSE), None)
    return [{**row, "ratio": report.ratio(dense, row["seconds"])} for row in rows]


def draw(cells: list[dict[str, Any]], file: Path) -> None:
    """The metric over the seconds of training, a panel per model."""
    figure, axes = report.new_figure(1, len(cells), width=7, height=5)
    for cell, panel in zip(cells, axes[0], strict=True):
        workload = find(cell["model"])
        panel.set(title=f"{cell['model']}: {cell['title']}", xlabel="seconds of training", ylabel=workload.metric)
        panel.set_xscale("log")
        report.logarithmic(panel.xaxis)
        panel.axhline(workload.goal, color="black", linewidth=0.8, linestyle=":")
        for number, (name, launches) in enumerate(cell["curves"].items()):
            for repeat, curve in enumerate(launches):
                panel.plot([point["seconds"] for point in curve], [point["value"] for point in curve],
                           color=f"C{number}", label=name if repeat == 0 else None)  # fmt: skip
        panel.legend(fontsize=8)
    report.save_figure(figure, file)


def main() -> int:
    """The exit status."""
    args = parse_arguments()
    cells: list[dict[str, Any]] = []
    title = f"{args.hosts} hosts x {args.slots} ranks, {args.rate}"
    try:
        with NetLab(args.hosts, args.rate) as lab:
            for model in args.models:
                started, outcome, workload = time.monotonic(), Outcome(), find(model)
                curves: dict[str, list[Curve]] = {name: [] for name in args.contenders}
                cells.append({"model": model, "title": title, "rows": [], "curves": curves})
                for _ in range(args.repeats):
                    for name in args.contenders:
                        curves[name].append(train(args, lab, model, name, outcome))
                        cells[-1]["rows"] = goal_rows(workload, curves, outcome.failures)
                        report.save(args.json, report.settings_of(args), cells)
                seconds = time.monotonic() - started
                print(f"\n{model} to {workload.metric} {workload.goal:g}, {title} ({seconds:.0f} s):")
                print(report.format_table(cells[-1]["rows"], COLUMNS), flush=True)
    except NetLabError as error:
        sys.exit(f"error: {error}")
    draw(cells, args.png)
    print(f"\nfiles: {args.json}, {args.png}")
    return 1 if any(row["failure"] for cell in cells for row in cell["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
