"""Bytes and modelled seconds per step and method, from 2 to 1024 ranks.

    .venv/bin/python ci/bench/scaling.py

Bytes are counted by the simulator, which runs the real programs on normal data, every rank of them; seconds are the
model alpha per collective plus bytes over bandwidth, for a bucket of --elements scaled up from the simulated one.
Computing is not part of it. With the default sizes every rank's quota is a whole number of entries; at 256 ranks and
more it is so small that the one word which heads every message of `compact` shows. Prints a table, writes JSON and a
figure.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import report

from hvd_sparse.config import sparse_config
from hvd_sparse.drivers.simulate import Simulator, hosts
from hvd_sparse.exchange import Exchange
from hvd_sparse.ops.numpy import NumpyOps
from hvd_sparse.schemes.dense import Dense
from hvd_sparse.types import Spec, num_kept

# Name in the table -> arguments of Compression.sparse; None is a dense allreduce.
METHODS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "allgather": {"collective": "allgather"},
    "owner_reduce": {},
    "owner_reduce, compact": {"wire": "compact"},
    "leader": {"sparsifier": "leader"},
    "random_block": {"sparsifier": "random_block"},
}
MOST_GATHERED = 128  # ranks up to which allgather is simulated: its memory grows with P * P


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2**i for i in range(1, 11)], help="(%(default)s)")
    add("--density", type=float, default=0.01, help="(%(default)s)")
    add("--simulated", type=int, default=102_400, help="elements of the simulated bucket (%(default)s)")
    add("--elements", type=float, default=25.6e6, help="elements that seconds are modelled for (%(default)s)")
    add("--gbit", type=float, default=1.0, help="bandwidth of a rank in Gbit/s (%(default)s)")
    add("--alpha", type=float, default=1.5e-3, help="seconds per collective (%(default)s)")
    add("--json", type=Path, default=Path("out/scaling.json"), metavar="FILE", help="(%(default)s)")
    add("--png", type=Path, default=Path("out/scaling.png"), metavar="FILE", help="(%(default)s)")
    args = parser.parse_args()
    if min(args.ranks) < 1 or not 0 < args.density <= 1 or min(args.gbit, args.alpha, args.elements) <= 0:
        parser.error("--ranks must be 1 or more, --density in (0, 1], --gbit, --alpha and --elements positive")
    return args


def simulate(
    arguments: dict[str, Any] | None, size: int, num_elements: int, density: float, steps: int = 1
) -> tuple[float, int]:
    """Bytes that the busiest rank sends in the last of these steps, and its number of collectives."""
    config = sparse_config(density, **(arguments or {}))
    scheme = Dense() if arguments is None else config.scheme()
    spec = Spec("b", num_elements, shapes=(nearly_square(num_elements),))
    exchange, ops = Exchange(spec, scheme, config.memory), NumpyOps()
    simulator, k = Simulator(size, groups=hosts(size, 1)), num_kept(density, num_elements)
    rng, weights = np.random.default_rng(0), np.random.default_rng(1).standard_normal(num_elements, np.float32)
    states = [exchange.init(ops) for _ in range(size)]
    for step in range(steps):
        simulator.rounds.clear()
        worlds = [replace(simulator.world(rank, step), weights=lambda: weights) for rank in range(size)]
        grads = [rng.standard_normal(num_elements, np.float32) for _ in range(size)]
        programs = [exchange.step(ops, worlds[rank], grads[rank], k, states[rank]) for rank in range(size)]
        states = [state for _, state in simulator.run(programs)]
    return 4 * simulator.words, len(simulator.rounds)


def nearly_square(size: int) -> tuple[int, int]:
    """Rows and columns of a matrix of so many elements, for methods that want one."""
    rows = next(rows for rows in range(math.isqrt(size), 0, -1) if size % rows == 0)
    return rows, size // rows


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per method and number of ranks."""
    rows = []
    for name, arguments in METHODS.items():
        for size in args.ranks:
            if name == "allgather" and size > MOST_GATHERED:
                continue
            started = time.perf_counter()
            num_bytes, rounds = simulate(arguments, size, args.simulated, args.density)
            per_element = num_bytes / args.simulated
            seconds = rounds * args.alpha + per_element * args.elements / (args.gbit * 1e9 / 8)
            rows.append(
                {
                    "method": name, "ranks": size, "bytes_per_element": per_element, "collectives": rounds,
                    "seconds": seconds, "simulated_in_seconds": time.perf_counter() - started,
                }
            )  # fmt: skip
            print(".", end="", flush=True)
    print()
    return rows


def print_table(rows: list[dict[str, Any]], key: str, title: str, scale: float) -> None:
    """Methods by ranks."""
    sizes = sorted({row["ranks"] for row in rows})
    found = {(row["method"], row["ranks"]): row for row in rows}
    print(f"{title}\n{'method':<24}" + "".join(f"{size:>9}" for size in sizes))
    for name in METHODS:
        cells = [found.get((name, size)) for size in sizes]
        print(f"{name:<24}" + "".join(f"{scale * cell[key]:>9.3g}" if cell else f"{'-':>9}" for cell in cells))


def plot(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """The figure of the README."""
    figure, [axes] = report.new_figure(1, 2, width=5.5, height=4.2)
    for name in METHODS:
        own = [row for row in rows if row["method"] == name]
        ranks = [row["ranks"] for row in own]
        for axis, key, scale in ((axes[0], "bytes_per_element", args.elements / 1e6), (axes[1], "seconds", 1e3)):
            axis.plot(ranks, [scale * row[key] for row in own], marker="o", markersize=3, label=name)
    axes[0].set_ylabel("MB sent per rank and step")
    axes[1].set_ylabel("ms per exchange (model)")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("ranks")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.suptitle(f"{args.elements / 1e6:g} M elements, density {args.density:g}, {args.gbit:g} Gbit/s per rank")
    report.save_figure(figure, args.png)


def main() -> None:
    args = parse_arguments()
    rows = measure(args)
    print_table(rows, "bytes_per_element", "MB sent per rank and step", args.elements / 1e6)
    print_table(rows, "seconds", "ms per exchange, modelled", 1e3)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    settings = report.settings_of(args)
    args.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")
    plot(rows, args)
    print(f"wrote {args.json} and {args.png}")


if __name__ == "__main__":
    main()
