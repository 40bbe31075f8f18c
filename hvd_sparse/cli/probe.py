"""Measures latency and bandwidth between the ranks of a job, per collective, inside hosts and across them.

Run it under horovodrun on the hosts in question. Every collective is timed with messages of several sizes; the slowest
rank counts, and of repetitions the median. What `hvd-sparse plan --probe` needs is fitted to the allreduces.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hvd_sparse.cli.errors import CommandError, UsageError
from hvd_sparse.meter import measure_link
from hvd_sparse.types import check_count

EXAMPLES = """\
examples:
  horovodrun -np 4 -H host1:2,host2:2 hvd-sparse probe                 a table
  horovodrun -np 4 -H host1:2,host2:2 hvd-sparse probe --json p.json   and a file for `hvd-sparse plan --probe p.json`
"""
_SIZES = (4 * 2**10, 64 * 2**10, 2**20, 8 * 2**20)
_LIMIT_SECONDS = 1.0  # for the messages of one collective and size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    parser.add_argument("--repeats", default="5", metavar="N", help="messages per collective and size (%(default)s)")
    parser.add_argument("--framework", choices=["torch", "tensorflow"], help="whose Horovod (default: what is there)")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    try:
        repeats = check_count(int(args.repeats), "--repeats")
    except ValueError:
        message = f"`--repeats` must be a whole number, 1 or more. Received: --repeats={args.repeats}."
        raise UsageError(message) from None
    file = Path(args.json) if args.json else None
    if file and not file.resolve().parent.is_dir():
        raise UsageError(f"`--json` must be in a folder that exists. Received: --json={args.json}.")
    hvd, make = _horovod(args.framework)
    hvd.init(process_sets="dynamic")
    try:
        return _probe(hvd, make, repeats, file)
    finally:
        hvd.shutdown()


def _probe(hvd: Any, make: Callable[[Any], Any], repeats: int, file: Path | None) -> int:
    if hvd.size() < 2:
        raise CommandError("There is one rank, and nothing to measure. Run: horovodrun -np 2 hvd-sparse probe")
    groups = _groups(hvd)
    links, times = {}, {}
    for name, group in groups.items():
        if group is not None and group.size() > 1:
            link, _ = measure_link(_Messages(hvd, make, group, name), group.size())
            if link:
                links[name] = link
    everybody = _Messages(hvd, make, hvd.global_process_set, "global")
    for kind in ("allreduce", "allgather", "alltoall", "broadcast"):
        times[kind] = {size: everybody.median_seconds(kind, size, repeats) for size in _SIZES}
    # Every host has measured links of its own: the slowest one stands for all.
    found = {}
    for name, link in links.items():
        seconds_per_byte, latency = everybody.largest([link.seconds_per_byte, link.latency])
        found[name] = (latency, seconds_per_byte)
    if hvd.rank() == 0:
        result = {
            "version": 1,
            "num_ranks": hvd.size(),
            "local_size": hvd.local_size(),
            "links": {
                name: {"latency_seconds": found[name][0], "bytes_per_second": 1 / found[name][1]}
                if name in found
                else None
                for name in ("global", "local", "cross")
            },
            "collectives": {kind: {str(size): seconds for size, seconds in row.items()} for kind, row in times.items()},
        }
        print(table(result))
        if file:
            file.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def table(result: dict[str, Any]) -> str:
    """The result as text."""
    lines = [f"{result['num_ranks']} ranks, {result['local_size']} on this host", "", "link      latency   bandwidth"]
    for name, link in result["links"].items():
        if link:
            rate = 8e-9 * link["bytes_per_second"]
            lines.append(f"{name:<8}{1e3 * link['latency_seconds']:>6.2f} ms   {rate:.4g} Gbit/s")
    sizes = list(next(iter(result["collectives"].values())))
    lines += ["", "milliseconds  " + "".join(f"{int(size) // 1024:>9} KiB" for size in sizes)]
    for kind, row in result["collectives"].items():
        lines.append(f"{kind:<14}" + "".join(f"{1e3 * row[size]:>13.2f}" for size in sizes))
    return "\n".join([*lines, "", "KiB: of the vector of an allreduce or broadcast, of what a rank gives otherwise."])


def _horovod(framework: str | None) -> tuple[Any, Callable[[Any], Any]]:
    """Horovod's module for a framework, and what makes its tensors of NumPy arrays."""
    for name in [framework] if framework else ["torch", "tensorflow"]:
        try:
            front = importlib.import_module(f"hvd_sparse.{name}")
            network = importlib.import_module(f"hvd_sparse.{name}.network")
            return front, network.as_tensor
        except ImportError as error:
            problem = error
    raise CommandError(f"There is no Horovod to measure with: {problem}") from problem


def _groups(hvd: Any) -> dict[str, Any]:
    """Process sets of this rank: all ranks, those of its host, and those with its place on other hosts."""
    places = hvd.allgather_object((hvd.cross_rank(), hvd.local_rank()))
    groups: dict[str, Any] = {"global": hvd.global_process_set}
    for name, mine in (("local", 0), ("cross", 1)):
        groups[name] = None
        keys = [place[mine] for place in places]
        if not 1 < len(set(keys)) < hvd.size():  # one host, or one rank on each: nothing else than all ranks
            continue
        for key in sorted(set(keys)):
            ranks = [rank for rank, own in enumerate(keys) if own == key]
            group = hvd.add_process_set(ranks)
            if hvd.rank() in ranks:
                groups[name] = group
    return groups


class _Messages:
    """See `hvd_sparse.meter.Network`, of which the ranks of `group` are all."""

    def __init__(self, hvd: Any, make: Callable[[Any], Any], group: Any, name: str) -> None:
        self.hvd = hvd
        self.make = make
        self.group = group
        self.name = name

    def allreduce_seconds(self, num_bytes: int, group: str = "global") -> float:
        return self.seconds("allreduce", num_bytes)

    def seconds(self, kind: str, num_bytes: int) -> float:
        """Of one message on this rank."""
        length = -(-num_bytes // 4 // self.group.size()) * self.group.size()  # all to all in equal parts
        data, name = self.make(np.zeros(length, np.float32)), f"probe.{self.name}.{kind}.{num_bytes}"
        more: dict[str, Any] = {"op": self.hvd.Sum} if kind == "allreduce" else {}
        if kind == "broadcast":
            more = {"root_rank": 0}
        started = time.perf_counter()
        getattr(self.hvd, kind)(data, name=name, process_set=self.group, **more)
        return time.perf_counter() - started

    def median_seconds(self, kind: str, num_bytes: int, repeats: int) -> float:
        """The median of messages that follow each other, on the slowest rank."""
        found = []
        for _ in range(repeats + 1):
            [seconds] = self.largest([self.seconds(kind, num_bytes)])
            found.append(seconds)
            if sum(found) > _LIMIT_SECONDS:
                break
        return statistics.median(found[1:] or found)  # the first one is negotiated

    def largest(self, values: list[float]) -> list[float]:
        return self._reduced(values, self.hvd.Max)

    def total(self, values: list[float]) -> list[float]:
        return self._reduced(values, self.hvd.Sum)

    def _reduced(self, values: list[float], op: Any) -> list[float]:
        data, name = self.make(np.array(values)), f"probe.{self.name}.values"
        return np.asarray(self.hvd.allreduce(data, op=op, name=name, process_set=self.group)).tolist()
