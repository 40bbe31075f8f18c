"""Every registered method side by side: time, traffic and accuracy.

    sudo .venv/bin/python ci/bench/compare.py --hosts 4 --rate 1gbit --density 0.01    # everything: two hours
    .venv/bin/python ci/bench/compare.py --parts simulator                             # bytes and rounds only

The methods are those of the registry (contenders.METHODS), whatever it holds. All train with momentum 0.9 in the
memory, unless it is the memory that is compared. Methods that do not look at the values (`random_block`) have ten times
the density of the others. What has another setting than a density (the rank of `low_rank`) keeps its default.

`time`: the MLP on network namespaces (ci/netlab.py, which needs root), all contenders by turns in the same processes,
as in step_time.py. Every method needs about 0.1 GB in every rank.

    ms/step    the median; `computation` exchanges nothing, `horovod` is Horovod's dense path
    x dense    Horovod's dense time / this time
    MB sent    by a host's network interface per step
    codec      what a rank computes for the exchange, as a share of ms/step: own_seconds.py times the front's buckets on
               one thread with nothing beside it. It takes longer where ranks share cores, and may hide the network

`simulator`: one bucket of --elements, a nearly square matrix of normal gradients, in its second step.

    kB P=4     that the busiest of 4 ranks sends. "-" where, as fewer ranks tell, all messages would take more than 4 GB
               of memory (they grow with P * P), or the simulation more than --most-seconds (it grows with P at least)
    rounds     collectives one after the other, at the largest P

`accuracy`: the MLP on Fashion-MNIST, two ranks, links without a limit, SGD whose learning rate has fallen to zero after
--steps. Who needs more than --most-minutes for that trains with the first seed only.

    accuracy   in per cent of the 10,000 test images, mean over --seeds
    points     the difference from Horovod's dense path with the same seeds
    seeds      with how many

`keeps` says whether nothing is lost: what is not sent stays in a memory. Such methods have a bar of half a point of
accuracy. Figures are shown as they are: a bar that is not held is no error. Ends with status 1 if a method failed to
run. Needs the Debian package dataset-fashion-mnist.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import contenders
import report
import scaling
import step_time
from contenders import DENSE
from launches import Outcome, launch_all
from netlab import NetLab, NetLabError, parse_rate
from own_seconds import own_seconds

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("time", "simulator", "accuracy")
MODEL = "mlp"
ALONE = "computation"
POINTS = 0.5  # of accuracy that a method that conserves may lose
MOST_BYTES = 4e9  # of all messages of a simulation
SHOWN_POINTS = 5  # of accuracy below dense, in the figure


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parts", type=report.listed, default=list(PARTS), help=f"of {','.join(PARTS)} (all)")
    add(
        "--contenders",
        type=report.listed,
        default="methods",
        help="METHOD, METHOD@DENSITY, or %(default)s for all (%(default)s)",
    )
    add("--density", type=float, default=0.01, help="of the methods without one (%(default)s)")
    add("--hosts", type=int, default=4, help="of `time` (%(default)s)")
    add("--rate", default="1gbit", help="of all links of `time` (%(default)s)")
    add("--repeats", type=int, default=1, help="launches of `time` (%(default)s)")
    add("--seconds", type=float, default=120, help="of rounds per launch, but at least five (%(default)s)")
    add("--rounds", type=int, default=20, help="per launch at most (%(default)s)")
    add("--ranks", type=report.listed, default="4,16,64,256,1024", help="of `simulator` (%(default)s)")
    add("--elements", type=int, default=102_400, help="of the simulated bucket (%(default)s)")
    add("--most-seconds", type=float, default=90, help="of one simulation (%(default)s)")
    add("--seeds", type=report.listed, default="0,1,2", help="of `accuracy` (%(default)s)")
    add("--steps", type=int, default=600, help="of every training, about a minute (%(default)s)")
    add("--most-minutes", type=float, default=5, help="of a training, for a second seed (%(default)s)")
    add("--limit", type=float, default=90, help="seconds of silence after which a contender is given up (%(default)s)")
    add("--json", type=Path, default=ROOT / "out" / "compare.json")
    add("--png", type=Path, default=ROOT / "out" / "compare.png")
    parser.set_defaults(slots=1)  # for step_time
    args = parser.parse_args(arguments)
    try:
        args.ranks, args.seeds = ([int(number) for number in numbers] for numbers in (args.ranks, args.seeds))
        names = [
            contenders.usual(name, args.density) if name in contenders.METHODS else name for name in args.contenders
        ]
        args.contenders = contenders.expand(names, [args.density])
        parse_rate(args.rate)
    except ValueError as error:
        parser.error(str(error))
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts are of {', '.join(PARTS)}. Received: {', '.join(unknown)}.")
    if others := [name for name in args.contenders if "@" not in name]:
        parser.error(f"--contenders are of {', '.join(contenders.METHODS)}. Received: {', '.join(others)}.")
    if min(args.hosts, args.repeats, args.rounds, args.elements, args.steps, *args.ranks) < 1:
        parser.error("--hosts, --repeats, --rounds, --ranks, --elements and --steps must be 1 or more.")
    if not args.ranks or not args.seeds:
        parser.error("--ranks and --seeds must have a number at least.")
    return args


def measure_time(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Name -> the row of step_time, with the share of the codec."""
    everybody = argparse.Namespace(**{**vars(args), "contenders": [ALONE, DENSE, *args.contenders]})
    with NetLab(args.hosts, args.rate) as lab:
        rows = {row["name"]: row for row in step_time.measure(everybody, lab, MODEL)["rows"]}
    for row in (rows[name] for name in args.contenders if rows[name]["milliseconds"] is not None):
        try:
            row["own_milliseconds"] = 1e3 * own_seconds(row["name"], MODEL, args.hosts)
            row["codec"] = row["own_milliseconds"] / row["milliseconds"]
        except Exception as error:  # what was measured so far is worth keeping
            row["failure"] = f"codec: {type(error).__name__}: {error}"
    return rows


def simulate(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """{"sizes": {P: {"bytes", "rounds", "seconds"}}, "failure"}: as many sizes as are worth trying."""
    method, _, density = name.partition("@")
    arguments = None if name == DENSE else contenders.METHODS[method]
    sizes: dict[int, dict[str, float]] = {}
    for size in sorted(args.ranks):
        if sizes and not affordable(*list(sizes.items())[-1], size, args.most_seconds):
            break
        started = time.perf_counter()
        try:
            sent, rounds = scaling.simulate(arguments, size, args.elements, float(density or 1), steps=2)
        except Exception as error:  # the others are still to come
            return {"sizes": sizes, "failure": f"P={size}: {type(error).__name__}: {error}"}
        sizes[size] = {"bytes": sent, "rounds": rounds, "seconds": time.perf_counter() - started}
    return {"sizes": sizes, "failure": ""}


def affordable(known: int, found: dict[str, float], size: int, most_seconds: float) -> bool:
    """Whether to simulate `size` ranks, as far as what was found for `known`, which are fewer, can tell."""
    growth = size / known
    return growth * found["seconds"] <= most_seconds and growth**2 * known * found["bytes"] <= MOST_BYTES


def measure_accuracy(args: argparse.Namespace) -> Outcome:
    """A launch per seed: every contender trains in it, one after the other. Very slow ones take part in the first."""
    names, outcome = [DENSE, *args.contenders], Outcome()
    with NetLab(2, "loopback") as lab:
        for seed in args.seeds:
            settings = {
                "family": "horovod", "contenders": names, "model": MODEL, "limit": args.limit, "steps": args.steps,
                "seed": seed,
            }  # fmt: skip
            most_seconds = args.limit + len(names) * (args.limit + 5 * args.steps)
            launch_all(lab, "compare_rank.py", settings, 1, most_seconds, outcome)
            slow = {note["contender"] for note in finished(outcome) if note["seconds"] > 60 * args.most_minutes}
            names = [name for name in names if name == DENSE or name not in slow]
    return outcome


def finished(outcome: Outcome) -> list[dict[str, Any]]:
    """What rank 0 has noted of every training."""
    notes = (note for diaries in outcome.diaries for diary in diaries[:1] for note in diary)
    return [note for note in notes if note["event"] == "finished"]


def accuracies(outcome: Outcome) -> dict[str, dict[int, float]]:
    """Contender -> seed -> per cent."""
    found: dict[str, dict[int, float]] = {}
    for note in finished(outcome):
        found.setdefault(note["contender"], {})[note["seed"]] = 100 * note["value"]
    return found


def label(name: str, density: float) -> str:
    """The contender's name without the density that all have."""
    method, _, own = name.partition("@")
    return method if own in ("", f"{density:g}") else name


def joined(args: argparse.Namespace, found: dict[str, Any]) -> list[dict[str, Any]]:
    """A row of the table for everybody from what the parts have brought so far. What is not known is None.

    Args:
        found: `time`: name -> row. `simulator`: name -> sizes and failure. `accuracy`: name -> seed -> per cent.
            `failures`: name -> what went wrong in the last.
    """
    times, simulated, accuracy = (found.get(part, {}) for part in PARTS)
    dense, rows = accuracy.get(DENSE, {}), []
    for name in [ALONE] * (ALONE in times) + [DENSE, *args.contenders]:
        timed, sizes = times.get(name, {}), simulated.get(name, {}).get("sizes", {})
        own = accuracy.get(name, {})
        both = [own[seed] - dense[seed] for seed in own if seed in dense]
        failures = [timed.get("failure"), simulated.get(name, {}).get("failure"), found.get("failures", {}).get(name)]
        rows.append({
            "name": label(name, args.density),
            "keeps": "-" if name == ALONE else "yes" if name == DENSE or contenders.conserves(name) else "no",
            **{key: timed.get(key) for key in ("milliseconds", "ratio", "sent_mb", "codec")},
            **{f"kb{size}": sizes[size]["bytes"] / 1e3 if size in sizes else None for size in args.ranks},
            "rounds": sizes[max(sizes)]["rounds"] if sizes else None,
            "accuracy": statistics.mean(own.values()) if own else None,
            "points": statistics.mean(both) if both and name != DENSE else None,
            "seeds": len(own) or None,
            "failure": "; ".join(dict.fromkeys(failure for failure in failures if failure)),
        })  # fmt: skip
    return rows


def columns(args: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """Of the table: those of the parts that take place."""
    shown = {
        "time": {
            "milliseconds": ("ms/step", ".1f"), "ratio": ("x dense", ".2f"), "sent_mb": ("MB sent", ".3f"),
            "codec": ("codec", ".1%"),
        },
        "simulator": {**{f"kb{size}": (f"kB P={size}", ".2f") for size in args.ranks}, "rounds": ("rounds", "d")},
        "accuracy": {"accuracy": ("accuracy", ".2f"), "points": ("points", "+.2f"), "seeds": ("seeds", "d")},
    }  # fmt: skip
    return {"keeps": ("keeps", ""), **{key: look for part in args.parts for key, look in shown[part].items()}}


def judge(rows: Iterable[dict[str, Any]]) -> list[str]:
    """A line for the accuracy of each method that conserves, and one for the others."""
    lines, others = [], []
    for row in rows:
        if row["points"] is None:
            continue
        if row["keeps"] == "yes":
            verdict = "held" if row["points"] >= -POINTS else "NOT HELD"
            lines.append(f"{row['name']}: accuracy {row['points']:+.2f} points from dense; bar -{POINTS}: {verdict}")
        else:
            others.append(f"{row['name']} {row['points']:+.2f}")
    return lines + ([f"without a bar, because they lose something: {', '.join(others)} points"] if others else [])


def draw(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> bool:
    """Accuracy over the time of a step, or over bytes where that was not measured. False: there is nothing to draw."""
    least = f"kb{min(args.ranks)}"
    key, title = ("milliseconds", "ms per step") if "time" in args.parts else (least, f"kB at P = {min(args.ranks)}")
    points = [row for row in rows if row["accuracy"] is not None and row[key] is not None]
    if not points:
        return False
    dense = next((row["accuracy"] for row in points if row["name"] == DENSE), max(row["accuracy"] for row in points))
    figure, axes = report.new_figure(1, 1, width=9, height=5.5)
    panel = axes[0][0]
    panel.set(xlabel=title, ylabel="accuracy, per cent", xscale="log", title=f"density {args.density:g}")
    panel.margins(0.12)  # for the names
    report.logarithmic(panel.xaxis)
    panel.axhspan(dense - POINTS, dense, color="black", alpha=0.08, linewidth=0)
    for number, row in enumerate(sorted(points, key=lambda row: row["accuracy"])):
        height = max(row["accuracy"], dense - SHOWN_POINTS)
        text = row["name"] + (f" ({row['accuracy']:.1f})" if height > row["accuracy"] else "")
        panel.plot(row[key], height, marker="o" if row["keeps"] == "yes" else "x", color=f"C{number % 10}")
        panel.annotate(text, (row[key], height), xytext=(5, -8 if number % 2 else 4), textcoords="offset points",
                       fontsize=7, color=f"C{number % 10}")  # fmt: skip
    report.save_figure(figure, args.png)
    return True


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All parts, written to the JSON file one by one."""
    found: dict[str, Any] = {}
    for part in (part for part in PARTS if part in args.parts):
        if part == "simulator":
            found[part] = {name: simulate(args, name) for name in [DENSE, *args.contenders]}
        elif part == "time":
            found[part] = measure_time(args)
        else:
            outcome = measure_accuracy(args)
            found |= {part: accuracies(outcome), "failures": outcome.failures}
        report.save(args.json, report.settings_of(args), [{"rows": joined(args, found), **found}])
    return found


def main() -> int:
    """The exit status."""
    args = parse_arguments()
    try:
        rows = joined(args, measure(args))
    except NetLabError as error:
        sys.exit(f"error: {error}")
    print(report.format_table(rows, columns(args)))
    files = [args.json, *[args.png] * draw(rows, args)]
    print("\n" + "\n".join([f"files: {', '.join(map(str, files))}", *judge(rows)]))
    return 1 if any(row["failure"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
