"""One training while the network changes: the adaptive default against every fixed density.

    sudo .venv/bin/python ci/bench/changing_network.py

Four hosts (ci/netlab.py, which needs root) train the MLP on Fashion-MNIST; the rate of all links changes twice. Every
contender takes the same steps, each in a launch of its own; the rate changes at the same step for all of them. `dense`
is Horovod's path on links without a limit: only its accuracy counts. Prints a table, writes JSON and a PNG.

    seconds     of all steps, the slowest rank counting
    ms/step     the median of each phase
    accuracy    on the 10,000 test images
    settled     steps after each change until the density stays

Ends with status 1 if a bar is not held: settled within two periods of each change, less time than the best fixed
density, accuracy within half a point of dense.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import report
from contenders import FIXED, PERIOD
from launches import launch
from netlab import NetLab, NetLabError, parse_rate

ROOT = Path(__file__).resolve().parents[2]
POINTS = 0.5


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--hosts", type=int, default=4, help="(%(default)s)")
    add("--rates", type=report.listed, default="1gbit,100mbit,1gbit", help="one after the other (%(default)s)")
    add("--steps", type=int, default=200, help="with each rate (%(default)s)")
    add("--contenders", type=report.listed, default=["adaptive", *FIXED[1:]], help="METHOD@DENSITY, or adaptive")
    add("--limit", type=float, default=300, help="seconds of silence after which a contender is given up (%(default)s)")
    add("--json", type=Path, default=ROOT / "out" / "changing_network.json")
    add("--png", type=Path, default=ROOT / "out" / "changing_network.png")
    args = parser.parse_args(arguments)
    try:
        for rate in args.rates:
            parse_rate(rate)
    except ValueError as error:
        parser.error(str(error))
    if min(args.hosts - 1, args.steps) < 1:
        parser.error("--hosts must be 2 or more, --steps 1 or more.")
    return args


def measure(lab: NetLab, args: argparse.Namespace, name: str, rates: Sequence[str]) -> dict[str, Any]:
    """One contender's training."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "family": "horovod", "contenders": [name], "model": "mlp", "limit": args.limit, "rates": list(rates),
            "steps": args.steps, "control": folder,
        }  # fmt: skip
        done = threading.Event()
        setter = threading.Thread(target=set_rates, args=(lab, rates, Path(folder), done))
        setter.start()
        try:
            well, diaries, output = launch(lab, "changing_network_rank.py", settings, 1, 20 * args.limit)
        finally:
            done.set()
            setter.join()
    if not well:
        raise RuntimeError(f"{name} failed:\n{output[-3000:]}")
    phases = [note for note in diaries[0] if note["event"] == "phase"]
    return {
        "name": name,
        "seconds": sum(sum(note["seconds"]) for note in phases),
        "milliseconds": [1e3 * statistics.median(note["seconds"]) for note in phases],
        "accuracy": next(note["value"] for note in diaries[0] if note["event"] == "value"),
        "settled": [settled(note["densities"]) for note in phases],
        "steps": [second for note in phases for second in note["seconds"]],
        "densities": [density for note in phases for density in note["densities"]],
    }


def set_rates(lab: NetLab, rates: Sequence[str], folder: Path, done: threading.Event) -> None:
    """Set each phase's rate when the ranks ask for it."""
    for phase, rate in enumerate(rates):
        while not (folder / f"{phase}.wanted").exists():
            if done.wait(0.01):
                return
        lab.set_rate(rate)
        (folder / f"{phase}.set").touch()


def settled(densities: Sequence[float]) -> int:
    """Steps until the density of the last one is in use for good."""
    different = [step for step, density in enumerate(densities) if density != densities[-1]]
    return different[-1] + 1 if different else 0


def judge(rows: list[dict[str, Any]], dense: dict[str, Any]) -> list[str]:
    """A line for each bar."""
    adaptive = next((row for row in rows if row["name"] == "adaptive"), None)
    fixed = [row for row in rows if row["name"] != "adaptive"]
    if adaptive is None:
        return []
    points = 100 * (adaptive["accuracy"] - dense["accuracy"])
    lines = [
        (f"settled after {adaptive['settled']} steps; bar {2 * PERIOD}", max(adaptive["settled"]) <= 2 * PERIOD),
        (f"accuracy {points:+.2f} points from dense; bar -{POINTS}", points >= -POINTS),
    ]
    if fixed:
        best = min(fixed, key=lambda row: row["seconds"])
        text = f"{adaptive['seconds']:.1f} s; best fixed, {best['name']}: {best['seconds']:.1f} s"
        lines.append((text, adaptive["seconds"] < best["seconds"]))
    return [f"{text}: {'held' if holds else 'NOT HELD'}" for text, holds in lines]


def draw(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Density and time over steps."""
    figure, axes = report.new_figure(2, 1, width=9, height=3)
    for row in rows:
        look = {"linewidth": 2.0 if row["name"] == "adaptive" else 0.8, "label": row["name"]}
        axes[0][0].plot(running_sum(row["steps"]), **look)
        if row["name"] == "adaptive":
            axes[1][0].step(range(len(row["densities"])), row["densities"], where="post", **look)
    axes[0][0].set(ylabel="seconds so far", title=f"{args.hosts} hosts, links of {', '.join(args.rates)}")
    axes[0][0].legend(fontsize=8)
    axes[1][0].set(ylabel="density", xlabel="step", yscale="log")
    for panel in axes[:, 0]:
        for phase in range(1, len(args.rates)):
            panel.axvline(phase * args.steps, color="black", linewidth=0.6, linestyle=":")
    report.save_figure(figure, args.png)


def running_sum(values: Sequence[float]) -> list[float]:
    """Of the first, the first two, and so on."""
    found, total = [], 0.0
    for value in values:
        total += value
        found.append(total)
    return found


def main() -> int:
    """The exit status."""
    args = parse_arguments()
    rows: list[dict[str, Any]] = []
    try:
        with NetLab(args.hosts, "loopback") as lab:
            dense = measure(lab, args, "horovod", ["loopback"] * len(args.rates))
            for name in args.contenders:
                print(f"{time.strftime('%H:%M:%S')} {name}", file=sys.stderr, flush=True)
                rows.append(measure(lab, args, name, args.rates))
                report.save(args.json, report.settings_of(args), [dense, *rows])
    except (NetLabError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    shown = [
        {
            **row,
            "accuracy": 100 * row["accuracy"],
            **{f"phase{number}": value for number, value in enumerate(row["milliseconds"])},
            "settled": "/".join(map(str, row["settled"])) if row["name"] == "adaptive" else None,
        }
        for row in [*rows, {**dense, "seconds": None, "milliseconds": [None] * len(args.rates)}]
    ]
    columns = {"seconds": ("seconds", ".1f")}
    columns.update({f"phase{number}": (rate, ".1f") for number, rate in enumerate(args.rates)})
    columns.update({"accuracy": ("accuracy", ".2f"), "settled": ("settled", "")})
    print(report.format_table(shown, columns))
    draw(rows, args)
    verdicts = judge(rows, dense)
    print("\n" + "\n".join([f"files: {args.json}, {args.png}", *verdicts]))
    return 1 if any("NOT HELD" in line for line in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
