"""Link prediction on Debian's package graph: periodic averaging on three kinds of parts against synchronous training.

    sudo .venv/bin/python ci/bench/gnn.py --minutes 2                        # 4 hosts, 100 Mbit/s, 3 seeds: an hour
    .venv/bin/python ci/bench/gnn.py --minutes 1 --rate none --seeds 0       # 4 ranks of this machine, without root
    .venv/bin/python ci/bench/gnn.py --minutes 0.1 --rate none --synthetic   # what it prints, in three minutes

Hosts are network namespaces with links of limited rate (ci/netlab.py, which needs root). Every run is one of
examples/pytorch_gnn_link_prediction.py and lasts equally long by the clock; evaluations come after it. `single` is one
process with the whole graph. Prints a table, writes JSON and a PNG.

    seed N      MRR after the run: 100 negatives, held-out edges of the whole graph
    steps/s     of all ranks together
    waiting     share of the time in exchanges, for slower ranks and the network; mean over ranks
    MB          sent by each rank
    to sync     seconds until the MRR that `sync` ends with; x sync: how many times fewer than `sync` itself needs

Then one of the ranks sleeps in each step so that it is half as fast, and in other runs one part is missing.

Ends with status 1 if a run failed or a bar is not held: random and super parts at most 0.005 of MRR below min-cut; 1.5
times less time to sync's MRR; with the slow rank 1.7 times as many steps per second as sync; averaging, every 5 s or
more, under 2 %.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import report
from gnn_bars import AVERAGED, judge, rows_of
from netlab import DEFAULTS, Done, NetLab, NetLabError, parse_rate

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "pytorch_gnn_link_prediction.py"
MODES = ("random", "super", "min-cut", "sync", "adaptive", "single")
START_SECONDS = 240  # for imports, partitions and evaluations, after which a run is given up


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, default=2, help="of training in each run (%(default)s)")
    add("--seeds", type=report.listed, default="0,1,2", help="(%(default)s)")
    add("--modes", type=report.listed, default=",".join(MODES), help="(%(default)s)")
    add("--hosts", type=int, default=4, help="one rank each (%(default)s)")
    add("--rate", default="100mbit", help="of all links; none: no links, ranks of this machine (%(default)s)")
    add("--every-seconds", type=float, default=5, help="between averages (%(default)s)")
    add("--points", type=int, default=48, help="models that are evaluated in each run (%(default)s)")
    add("--no-slow", action="store_true", help="leave out the runs with a slow rank")
    add("--no-drop", action="store_true", help="leave out the runs without a part")
    add("--data", type=Path, help="a saved apt-cache dumpavail (default: that of this machine)")
    add("--synthetic", action="store_true", help="a small graph instead: for a look at the benchmark itself")
    add("--json", type=Path, default=ROOT / "out" / "gnn.json")
    add("--png", type=Path, default=ROOT / "out" / "gnn.png")
    args = parser.parse_args(arguments)
    try:
        args.seeds = [int(seed) for seed in args.seeds]
        if args.rate != "none":
            parse_rate(args.rate)
    except ValueError as error:
        parser.error(f"--seeds are whole numbers, --rate is none or as tc writes it. {error}")
    if unknown := set(args.modes) - set(MODES):
        parser.error(f"--modes are of {', '.join(MODES)}. Received: {', '.join(unknown)}.")
    if min(args.minutes, args.every_seconds) <= 0 or args.hosts < 2 or args.points < 1 or not args.seeds:
        parser.error(
            "--minutes and --every-seconds must be positive, --hosts 2 or more, --points and --seeds 1 or more."
        )
    return args


class Launcher:
    """Runs the example, in the lab or on this machine. `runs` are the results so far, in order.

    Args:
        lab: None: ranks of this machine.
        folder: for what runs share.
    """

    def __init__(self, args: argparse.Namespace, lab: NetLab | None, folder: Path) -> None:
        self.args, self.lab, self.folder = args, lab, folder
        self.runs: list[dict[str, Any]] = []
        self.common = ["--minutes", str(args.minutes), "--every-seconds", str(args.every_seconds)]
        self.common += ["--points", str(args.points), "--cache", str(folder / "parts"), "--no-bar"]
        if args.synthetic:
            self.common.append("--synthetic")
        else:
            self.common += ["--data", str(args.data or _list_packages(folder / "packages.txt"))]

    def run(self, name: str, mode: str, seed: int, *options: str) -> dict[str, Any] | None:
        """The results of one run, None if it failed; both are noted under `name`."""
        file = self.folder / "results.json"
        file.unlink(missing_ok=True)
        print(f"{time.strftime('%H:%M:%S')} {name}, seed {seed}", file=sys.stderr, flush=True)
        command = [sys.executable, str(EXAMPLE), "--mode", mode, "--seed", str(seed), "--json", str(file)]
        done = self._launch([*command, *self.common, *options], alone=mode == "single")
        results = json.loads(file.read_text()) if done.code == 0 and file.exists() else None
        failure = ""
        if results is None:
            print(done.output[-3000:], file=sys.stderr, flush=True)
            failure = "took too long" if done.code is None else f"ended with status {done.code}"
        else:
            print(f"         MRR {results['MRR']:.4f}", file=sys.stderr, flush=True)
        self.runs.append({"name": name, "mode": mode, "seed": seed, "failure": failure, "results": results})
        report.save(self.args.json, report.settings_of(self.args), self.runs)
        return results

    def _launch(self, command: list[str], alone: bool) -> Done:
        limit = 60 * self.args.minutes + START_SECONDS
        if self.lab and not alone:
            return self.lab.horovodrun(command, limit_seconds=limit)
        ranks = str(self.args.hosts)
        launcher = [str(Path(sys.executable).parent / "horovodrun"), "--gloo", "-np", ranks, "-H", f"localhost:{ranks}"]
        process = subprocess.Popen(
            command if alone else [*launcher, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, text=True, env={**DEFAULTS, **os.environ},
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.terminate()  # horovodrun ends its ranks
            output, _ = process.communicate()
            return Done(None, output)
        return Done(process.returncode, output)


def _list_packages(file: Path) -> Path:
    """What apt knows now, so that all runs see the same graph."""
    try:
        done = subprocess.run(["apt-cache", "dumpavail"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: Debian's packages cannot be listed: {error}. Give a saved `apt-cache dumpavail` with --data.")
    file.write_bytes(done.stdout)
    return file


def run_all(launcher: Launcher) -> None:
    """Every run; their results are in `launcher.runs`."""
    args = launcher.args
    seconds_per_step = []
    for seed in args.seeds:
        for mode in args.modes:
            results = launcher.run(mode, mode, seed)
            if results and mode in AVERAGED:
                seconds_per_step.append(results["seconds"] / statistics.mean(results["steps"]))
    if seconds_per_step and not args.no_slow:
        slow = f"{args.hosts - 1}:{statistics.median(seconds_per_step):.5f}"
        for mode in args.modes:
            if mode in ("super", "sync"):
                launcher.run(f"{mode}, a slow rank", mode, args.seeds[0], "--slow", slow)
    if not args.no_drop and "super" in args.modes:
        for seed in args.seeds:
            launcher.run("super, a part missing", "super", seed, "--drop-part", "1")


def draw(runs: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    """MRR over the seconds of training, and the steps per second of all ranks."""
    figure, axes = report.new_figure(1, 2, width=7, height=4.5)
    left, right = axes[0]
    names = list(dict.fromkeys(run["name"] for run in runs))
    for number, name in enumerate(names):
        found = [run["results"] for run in runs if run["name"] == name and run["results"]]
        for repeat, results in enumerate(found):
            seconds, values = zip(*((point["seconds"], point["MRR"]) for point in results["curve"]))
            style = {"linestyle": "--" if "," in name else "-", "linewidth": 1.2, "color": f"C{number}"}
            left.plot(seconds, values, **style, label=None if repeat else name)
        if found:
            speed = statistics.mean(results["steps_per_second"] for results in found)
            right.barh(name, speed, color=f"C{number}")
            right.text(speed, name, f" {speed:.0f}", va="center", fontsize=8)
    where = "on one machine" if args.rate == "none" else f"with links of {args.rate}"
    left.set(xlabel="seconds of training", ylabel="MRR", title=f"{args.hosts} ranks {where}")
    left.legend(fontsize=8)
    right.set(xlabel="steps per second, all ranks")
    right.invert_yaxis()
    report.save_figure(figure, args.png)


def main() -> int:
    """The exit status."""
    args = parse_arguments()
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            lab = None if args.rate == "none" else stack.enter_context(NetLab(args.hosts, args.rate))
            launcher = Launcher(args, lab, Path(folder))
            run_all(launcher)
    except NetLabError as error:
        sys.exit(f"error: {error}. Or take ranks of this machine: --rate none")
    rows = rows_of(launcher.runs, args.seeds)
    columns = {f"seed{seed}": (f"seed {seed}", ".4f") for seed in args.seeds}
    columns |= {
        "steps_per_second": ("steps/s", ".1f"),
        "waiting": ("waiting %", ".2f"),
        "megabytes": ("MB", ".2f"),
        "to_sync": ("to sync", ".1f"),
        "ratio": ("x sync", ".2f"),
    }
    print(report.format_table(rows, columns))
    draw(launcher.runs, args)
    verdicts = judge(rows, args.seeds, args.every_seconds)
    print("\n" + "\n".join([f"files: {args.json}, {args.png}", *verdicts]))
    failed = any(run["failure"] for run in launcher.runs)
    return 1 if failed or any("NOT HELD" in line for line in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
