"""Tells before training whether the network will be the bottleneck, and which exchange to use on how many ranks.

Needs a link (a probe's JSON file, or bandwidth and latency) and a model (its size and the time of a backward pass, or
the trace that `DistributedOptimizer(..., profile=FILE)` records). Prints predicted step times; nothing is run.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvd_sparse.cli.errors import CommandError, UsageError
from hvd_sparse.cli.report import as_png, new_figure, output_file, write
from hvd_sparse.planner.cost import TRAFFIC
from hvd_sparse.planner.events import GRID, fuse
from hvd_sparse.planner.forecast import Model, Network, Row, forecast
from hvd_sparse.planner.link import Link
from hvd_sparse.types import check_count, check_positive, listed

EXAMPLES = """\
examples:
  hvd-sparse plan --bandwidth 10gbit --latency 50us --params 25.6e6 --backward 120ms
  hvd-sparse plan --probe out/probe.json --trace out/profile.json --ranks 4,8,16 --png out/plan.png
"""

BUCKET_BYTES = 4 * 2**20  # of the even profile; as by default in training
MOST_BUCKETS = 1000  # more say nothing more
LATENCY = "1.5ms"  # of a Horovod collective over TCP, where nothing was measured
SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
BYTES_PER_SECOND = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6}
RANKS = ",".join(str(2**power) for power in range(1, 11))
ASSUMPTIONS = """\
Assumptions: ranks compute at equal speed; the link is fully used at the given rate; latency does not depend on the
number of ranks; gradients travel in the order in which they become ready, one exchange at a time, as 8-byte entries;
negotiating, selecting entries and adding take no time. Measure with `hvd-sparse probe` and a short run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    link = parser.add_argument_group("the link: a probe, or numbers")
    link.add_argument("--probe", metavar="FILE", help="what `hvd-sparse probe --json FILE` wrote")
    link.add_argument("--bandwidth", metavar="RATE", help="that one rank really reaches: 800mbit, 10gbit")
    link.add_argument("--latency", metavar="TIME", help=f"of one collective: 50us, 2ms (default: {LATENCY})")
    model = parser.add_argument_group("the model: numbers, or a trace")
    model.add_argument("--params", metavar="N", help="trained parameters, 25.6e6 say, with float32 gradients")
    model.add_argument("--backward", metavar="TIME", help="of one backward pass: 120ms")
    model.add_argument("--step", metavar="TIME", help="of one step on one rank (default: 1.5 times --backward)")
    model.add_argument("--trace", metavar="FILE", help="times and sizes of gradients, as recorded in training")
    what = parser.add_argument_group("what to predict")
    what.add_argument("--ranks", metavar="LIST", default=RANKS, help="numbers of ranks (default: 2,4,8 to 1024)")
    what.add_argument("--collective", metavar="NAME", help=f"{', '.join(TRAFFIC)} (default: the best)")
    what.add_argument("--target", metavar="SHARE", default="0.95", help="scaling factor to reach (default: 0.95)")
    what.add_argument("--json", metavar="FILE", help="also write the numbers there")
    what.add_argument("--png", metavar="FILE", help="also draw step time and scaling over ranks")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if args.collective not in (None, *TRAFFIC):
        raise UsageError(f"`--collective` must be one of {listed(TRAFFIC)}. Received: --collective={args.collective}.")
    target = read_number(args.target, "--target", most=1.0)
    ranks = [int(read_number(word, "--ranks", whole=True)) for word in args.ranks.split(",")]
    json_file = output_file(args.json, "--json", (".json",)) if args.json else None
    png_file = output_file(args.png, "--png", (".png",)) if args.png else None
    network, model = read_network(args), read_model(args)
    try:
        rows = [forecast(model, network, num_ranks, args.collective, target) for num_ranks in ranks]
    except ValueError as error:
        raise UsageError(str(error)) from None
    if json_file is not None:
        content = {"version": 1, "target": target, "model": asdict(model), "network": asdict(network)}
        content["rows"] = [asdict(row) for row in rows]
        write(json_file, (json.dumps(content, indent=1) + "\n").encode(), "--json")
    if png_file is not None:
        write(png_file, draw(rows, model.step_seconds, target), "--png")
    print("\n".join([*describe(model, network, rows, target), "", *table(rows), "", ASSUMPTIONS]))
    return 0


# From the command line and files.


def read_network(args: argparse.Namespace) -> Network:
    """The links, measured or given."""
    if (args.probe is None) == (args.bandwidth is None):
        received = "neither" if args.probe is None else f"--probe={args.probe} --bandwidth={args.bandwidth}"
        raise UsageError(f"give the link as `--probe` or as `--bandwidth`, one of them. Received: {received}.")
    if args.probe is None:
        latency = read_quantity(args.latency or LATENCY, "--latency", SECONDS)
        return Network({"global": Link(latency, 1 / read_quantity(args.bandwidth, "--bandwidth", BYTES_PER_SECOND))})
    if args.latency is not None:
        raise UsageError(f"`--latency` belongs to `--bandwidth`; a probe has its own. Received: {args.latency}.")
    return read_file(args.probe, "--probe", "what `hvd-sparse probe --json` writes", network_of)


def network_of(probe: Mapping[str, Any]) -> Network:
    """The network of a probe file."""
    links = {
        group: Link(
            check_positive(link["latency_seconds"], f"{group}.latency_seconds"),
            1 / check_positive(link["bytes_per_second"], f"{group}.bytes_per_second"),
        )
        for group, link in probe["links"].items()
        if link is not None
    }
    num_ranks = check_count(probe["num_ranks"], "num_ranks")
    if num_ranks < 2 or "global" not in links:
        raise ValueError("it knows no link between ranks: run the probe on two ranks or more, `horovodrun -np 2`.")
    return Network(links, num_ranks, check_count(probe.get("local_size") or 1, "local_size"))


def read_model(args: argparse.Namespace) -> Model:
    """The model's profile, recorded or made up."""
    numbers = {name: getattr(args, name) for name in ("params", "backward", "step") if getattr(args, name) is not None}
    received = " ".join(f"--{name}={value}" for name, value in numbers.items()) or "neither"
    if args.trace is not None:
        if numbers:
            raise UsageError(f"`--trace` replaces `--params`, `--backward` and `--step`. Received: {received}.")
        return read_file(args.trace, "--trace", "what DistributedOptimizer(..., profile=FILE) records", model_of)
    if not {"params", "backward"} <= set(numbers):
        raise UsageError(f"give the model as `--params` and `--backward`, or as `--trace`. Received: {received}.")
    num_bytes = 4 * read_number(args.params, "--params", whole=True)
    backward = read_quantity(args.backward, "--backward", SECONDS)
    whole = read_quantity(args.step, "--step", SECONDS) if args.step else 1.5 * backward
    if whole < backward:
        raise UsageError(f"`--step` must be at least `--backward`. Received: {received}.")
    num_buckets = min(math.ceil(num_bytes / BUCKET_BYTES), MOST_BUCKETS)
    note = "" if args.step else ", where forward is taken as half of backward"
    return Model(((backward / num_buckets, num_bytes / num_buckets),) * num_buckets, whole, note)


def model_of(trace: Mapping[str, Any]) -> Model:
    """The model of a trace file."""
    events = tuple((float(delay), float(size)) for delay, size in trace["events"])
    step_seconds, backward = check_positive(trace["step_seconds"], "step_seconds"), sum(delay for delay, _ in events)
    if not fuse(events):
        raise ValueError("`events` must hold gradients. Received: none.")
    if step_seconds < backward:
        raise ValueError(f"`step_seconds` must hold all events, {backward:g} s. Received: {step_seconds:g}.")
    return Model(events, step_seconds, ", as recorded")


def read_file(name: str, option: str, what: str, parse: Any) -> Any:
    """What `parse` makes of a JSON file of version 1."""
    try:
        text = Path(name).expanduser().read_bytes()
    except OSError as error:
        raise UsageError(f"`{option}` must be a file: {what}. Received: {name} ({error.strerror}).") from None
    try:
        content = json.loads(text)
        if content["version"] != 1:
            raise ValueError(f"its version is {content['version']!r}, and this program reads version 1")
        return parse(content)
    except KeyError as error:
        why = f"it has no {error}"
    except (AttributeError, TypeError, ValueError) as error:
        why = str(error)
    raise CommandError(f"{name} is not {what}: {why}")


def read_number(value: str, option: str, whole: bool = False, most: float = math.inf) -> float:
    """A positive number."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number <= most or number == math.inf or (whole and number % 1):
        kind = "whole number of 1 or more" if whole else f"number above 0 and up to {most:g}"
        raise UsageError(f"`{option}` must be a {kind}. Received: {option}={value}.")
    return number


def read_quantity(value: str, option: str, units: Mapping[str, float]) -> float:
    """A positive number with a unit, in seconds or bytes per second."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?) ?([a-z]+)", value.strip().lower())
    if found is None or found[2] not in units or float(found[1]) == 0:
        example = f"20{list(units)[-2]}"
        known = ", ".join(units)
        raise UsageError(
            f"`{option}` must be a number above 0 with a unit out of {known}: {example}. Received: {option}={value}."
        )
    return float(found[1]) * units[found[2]]


# For people.


def describe(model: Model, network: Network, rows: Sequence[Row], target: float) -> list[str]:
    """The model, the link, and whether it is the bottleneck: on the probe's ranks, or else on the most."""
    num_bytes, backward = (sum(event[i] for event in model.events) for i in (1, 0))
    link, row = network.links["global"], max(rows, key=lambda row: (row.num_ranks == network.num_ranks, row.num_ranks))
    busy = row.dense.busy / row.dense_seconds
    is_slow = row.dense.scaling < target
    lines = [
        f"Model: {num_bytes / 4:,.0f} parameters, {num_bytes / 1e6:.1f} MB of gradients; backward takes "
        f"{1e3 * backward:.1f} ms of a step of {1e3 * model.step_seconds:.1f} ms on one rank{model.note}.",
        f"Link: {8e-9 * link.bandwidth:.3g} Gbit/s per rank, {1e3 * link.latency:.3g} ms per collective.",
        "",
        f"Is the network the bottleneck on {row.num_ranks} ranks? {'Yes' if is_slow else 'No'}: dense, it is busy for "
        f"{busy:.0%} of a step, and the scaling factor is {row.dense.scaling:.3f} (target {target:g}).",
    ]
    if row.choice.collective != "dense":
        lines.append(f"With {plan_name(row)} the scaling factor is {row.scaling:.3f}.")
    if is_slow and row.needed is None:
        lines.append(f"No compression factor of an allreduce up to {max(GRID):g} reaches the target.")
    elif is_slow:
        lines.append(f"A compression factor of {row.needed:g} of an allreduce reaches the target.")
    if all(row.dense.scaling >= target for row in rows):
        lines.append("No compression is needed on any of these numbers of ranks: hvd.Compression.none will do.")
    return lines


def plan_name(row: Row) -> str:
    """The choice in words."""
    choice = row.choice
    return "dense" if choice.collective == "dense" else f"{choice.collective} at density {choice.density:g}"


def table(rows: Sequence[Row]) -> list[str]:
    """A line for every number of ranks, under a heading."""
    lines = [("ranks", "dense ms", "scaling", "choice", "step ms", "scaling")]
    for row in rows:
        times = [f"{1e3 * seconds:.1f}" for seconds in (row.dense_seconds, row.choice.seconds)]
        shares = [f"{share:.3f}" for share in (row.dense.scaling, row.scaling)]
        lines.append((f"{row.num_ranks}", times[0], shares[0], plan_name(row), times[1], shares[1]))
    widths = [max(map(len, column)) for column in zip(*lines)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths)) for line in lines]


def draw(rows: Sequence[Row], step_seconds: float, target: float) -> bytes:
    """The PNG file: step time and scaling over the number of ranks."""
    figure, ((left, right),) = new_figure(1, 2, width=5.0, height=4.0)
    rows = sorted(rows, key=lambda row: row.num_ranks)
    ranks = [row.num_ranks for row in rows]
    left.plot(ranks, [1e3 * row.dense_seconds for row in rows], "o-", label="dense")
    left.plot(ranks, [1e3 * row.choice.seconds for row in rows], "s-", label="chosen")
    left.axhline(1e3 * step_seconds, color="0.6", linestyle="--", label="one rank")
    right.plot(ranks, [row.dense.scaling for row in rows], "o-", label="dense")
    right.plot(ranks, [row.scaling for row in rows], "s-", label="chosen")
    right.axhline(target, color="0.6", linestyle="--", label="target")
    for axis, label in ((left, "predicted step, ms"), (right, "scaling factor")):
        axis.set_xscale("log", base=2)
        axis.set_xticks(ranks, [str(number) for number in ranks], minor=False)
        axis.set_xlabel("ranks")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.legend(loc="lower right")
    return as_png(figure)
