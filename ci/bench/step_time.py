"""Seconds per training step with every way to average gradients, over networks of several speeds.

    sudo .venv/bin/python ci/bench/step_time.py                                       # everything: more than an hour
    sudo .venv/bin/python ci/bench/step_time.py --hosts 4 --rates 1gbit --models mlp  # some minutes

Hosts are network namespaces with links of limited rate (ci/netlab.py, which needs root); `loopback` is no limit. All
contenders of a family train in the same processes, each its own copy of the model, and take turns in random order: a
few steps each, timed between barriers, the slowest rank counting. Horovod's and PyTorch's families alternate, launch by
launch. What is compared are medians over all blocks of steps:

    ms/step     zero_grad, forward, backward and step, including the exchange
    efficiency  the time without any exchange (`computation`, four ranks on the same cores) / this time
    x dense     Horovod's dense time / this time
    MB sent     by the host's network interface per step, with all headers and messages
    MB counted  per step and rank, by optimizer.metrics()
    measuring   share of the time that goes into measuring the network and deciding: a period of 50 steps, at the end

Ends with status 1 if a contender failed or a bar is not held. Needs the Debian packages dataset-fashion-mnist and
dict-gcide.
"""

from __future__ import annotations

import argparse
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
from workloads import WORKLOADS

ROOT = Path(__file__).resolve().parents[2]
NAMES = [
    "computation", "horovod", "adaptive", "horovod-fp16", "ddp", "ddp-bf16", "ddp-fp16", "ddp-powersgd", "allgather",
    "owner_reduce", "leader", "owner_reduce-compact@0.01",
]  # fmt: skip
COLUMNS = {
    "milliseconds": ("ms/step", ".1f"),
    "efficiency": ("efficiency", ".1%"),
    "ratio": ("x dense", ".2f"),
    "sent_mb": ("MB sent", ".3f"),
    "counted_mb": ("MB counted", ".3f"),
    "measuring": ("measuring", ".2%"),
    "blocks": ("blocks", "d"),
}
# (hosts, model, contender): rate -> how many times as fast as Horovod's dense path it has to be.
BARS = {
    (4, "mlp", "owner_reduce@0.01"): {"100mbit": 14.0, "1gbit": 2.2},
    (4, "mlp", "adaptive"): {"100mbit": 18.0, "1gbit": 3.0, "10gbit": 1.3, "loopback": 0.95},
}
MEASURING = 0.01  # largest share of the time of `adaptive` that may go into measuring and deciding
NEAR_BEST = 0.9  # step rate of `adaptive` / that of the best density of the ladder, or dense


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--hosts", type=report.listed, default="2,4", help="numbers of hosts (%(default)s)")
    add("--rates", type=report.listed, default="100mbit,1gbit,10gbit,loopback", help="of all links (%(default)s)")
    add("--models", type=report.listed, default="mlp,lstm,embedding", help=f"of {', '.join(WORKLOADS)} (%(default)s)")
    add(
        "--contenders", type=report.listed,
        help=f"NAME or METHOD@DENSITY, best-fixed for the ladder ({','.join(NAMES)}; with slots, hierarchical)",
    )  # fmt: skip
    add("--density", type=report.listed, default="0.1,0.01,0.001", help="of the methods without one (%(default)s)")
    add("--slots", type=int, default=1, help="ranks per host (%(default)s)")
    add("--repeats", type=int, default=2, help="launches of each family, alternated (%(default)s)")
    add("--seconds", type=float, default=45, help="of rounds per launch, but at least five (%(default)s)")
    add("--rounds", type=int, default=20, help="per launch at most (%(default)s)")
    add("--limit", type=float, default=90, help="seconds of silence after which a contender is given up (%(default)s)")
    add("--json", type=Path, default=ROOT / "out" / "step_time.json")
    add("--png", type=Path, default=ROOT / "out" / "step_time.png")
    args = parser.parse_args(arguments)
    try:
        args.hosts = [int(number) for number in args.hosts]
        names = args.contenders or [*NAMES, *["hierarchical"] * (args.slots > 1)]
        args.contenders = contenders.expand(names, [float(density) for density in args.density])
        for rate in args.rates:
            parse_rate(rate)
    except ValueError as error:
        parser.error(str(error))
    if unknown := set(args.models) - set(WORKLOADS):
        parser.error(f"--models are of {', '.join(WORKLOADS)}. Received: {', '.join(unknown)}.")
    if min([*args.hosts, args.slots, args.repeats, args.rounds]) < 1:
        parser.error("--hosts, --slots, --repeats and --rounds must be 1 or more.")
    return args


def measure(args: argparse.Namespace, lab: NetLab, model: str) -> dict[str, Any]:
    """All launches of one model in a lab as it is."""
    outcome = Outcome()
    for _ in range(args.repeats):
        for family in contenders.FAMILIES:
            names = [name for name in args.contenders if contenders.family(name) == family]
            settings = {
                "family": family, "contenders": names, "model": model, "seconds": args.seconds, "limit": args.limit,
                "rounds": args.rounds, "least_rounds": 5,
            }  # fmt: skip
            # Slow contenders in slow networks may need several budgets for their five rounds; a silent one ends itself.
            launch_all(lab, "step_time_rank.py", settings, args.slots, 20 * args.seconds + 2 * args.limit, outcome)
    samples = report.pool(outcome.diaries)
    return {
        "model": model,
        "rows": report.step_rows(args.contenders, samples, outcome.failures),
        "samples": samples,
        "failures": outcome.failures,
    }


def judge(cells: list[dict[str, Any]]) -> list[str]:
    """A line for each bar that was measured."""
    lines = []
    for (hosts, model, name), bars in BARS.items():
        for cell in cells:
            if (cell["hosts"], cell["model"]) != (hosts, model) or cell["rate"] not in bars:
                continue
            if name not in [row["name"] for row in cell["rows"]]:
                continue
            bar, found = bars[cell["rate"]], next(row["ratio"] for row in cell["rows"] if row["name"] == name)
            verdict = "not measured" if found is None else "held" if found >= bar else "NOT HELD"
            measured = "" if found is None else f"{found:.2f}; "
            lines.append(f"{hosts} hosts, {cell['rate']}, {model}, {name}: {measured}bar {bar:g} x dense: {verdict}")
    for cell in cells:
        shares = [
            row["measuring"] for row in cell["rows"] if row["name"] == "adaptive" and row["measuring"] is not None
        ]
        for share in shares:
            verdict = "held" if share <= MEASURING else "NOT HELD"
            where = f"{cell['hosts']} hosts, {cell['rate']}, {cell['model']}"
            lines.append(f"{where}, adaptive: {share:.2%} of the time for measuring; bar {MEASURING:.0%}: {verdict}")
        speed = {row["name"]: row["ratio"] for row in cell["rows"] if row["ratio"] is not None}
        best = max((name for name in contenders.FIXED if name in speed), key=lambda name: speed[name], default=None)
        if best and "adaptive" in speed and set(contenders.FIXED) <= speed.keys():
            found = speed["adaptive"] / speed[best]
            verdict = "held" if found >= NEAR_BEST else "NOT HELD"
            lines.append(
                f"{cell['hosts']} hosts, {cell['rate']}, {cell['model']}, adaptive: {found:.2f} of the best fixed "
                f"configuration, {best}; bar {NEAR_BEST:g}: {verdict}"
            )
    return lines


def draw(cells: list[dict[str, Any]], names: list[str], file: Path) -> None:
    """Bars of the speed in units of Horovod's dense path: a row of panels per model, a column per number of hosts."""
    models, hosts, rates = (list(dict.fromkeys(cell[key] for cell in cells)) for key in ("model", "hosts", "rate"))
    figure, axes = report.new_figure(len(models), len(hosts), width=3.5 + 2 * len(rates), height=3.8)
    labelled: set[str] = set()
    for cell in cells:
        panel = axes[models.index(cell["model"])][hosts.index(cell["hosts"])]
        panel.set(title=f"{cell['model']}, {cell['hosts']} hosts", ylabel="speed / Horovod dense", yscale="log")
        report.logarithmic(panel.yaxis)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set_xticks(range(len(rates)), rates)
        for number, row in enumerate(cell["rows"]):
            if row["ratio"] is not None:
                place = rates.index(cell["rate"]) + 0.85 * ((number + 0.5) / len(names) - 0.5)
                look = {"color": f"C{number % 10}", "hatch": "" if number < 10 else "///", "edgecolor": "white"}
                label = None if row["name"] in labelled else row["name"]
                panel.bar(place, row["ratio"], 0.8 / len(names), linewidth=0.3, label=label, **look)
                labelled.add(row["name"])
    figure.legend(loc="outside right upper", fontsize=8)
    report.save_figure(figure, file)


def main() -> int:
    """The exit status."""
    args = parse_arguments()
    cells: list[dict[str, Any]] = []
    try:
        for hosts in args.hosts:
            with NetLab(hosts, args.rates[0]) as lab:
                for rate in args.rates:
                    lab.set_rate(rate)
                    for model in args.models:
                        started = time.monotonic()
                        cells.append({"hosts": hosts, "rate": rate, "slots": args.slots, **measure(args, lab, model)})
                        cells[-1]["seconds"] = time.monotonic() - started
                        print(f"\n{model}, {hosts} hosts x {args.slots} ranks, {rate} ({cells[-1]['seconds']:.0f} s):")
                        print(report.format_table(cells[-1]["rows"], COLUMNS), flush=True)
                        report.save(args.json, report.settings_of(args), cells)
    except NetLabError as error:
        sys.exit(f"error: {error}")
    draw(cells, args.contenders, args.png)
    verdicts = judge(cells)
    print("\n" + "\n".join([f"files: {args.json}, {args.png}", *verdicts]))
    return 1 if any(cell["failures"] for cell in cells) or any("NOT HELD" in line for line in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
