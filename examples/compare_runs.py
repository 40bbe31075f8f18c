"""Puts results of the examples side by side.

    python examples/compare_runs.py out/dense.json out/sparse.json --plot out/compared.png

The files are those that an example writes with --json; the first one is what the others are compared with.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

COLORS = ("#1f5fa8", "#d2571b", "#2f8f4e", "#7a4fa3")


def print_table(runs):
    print(f"{'exchange':<44}{'test accuracy':>14}{'MB/step/rank':>14}{'bytes':>9}{'seconds':>9}")
    for run in runs:
        reference = runs[0]["bytes_per_step"]
        share = f"{run['bytes_per_step'] / reference:.2%}" if reference else "-"
        print(
            f"{run['mode']:<44}{run['test_accuracy']:>14.2%}{run['bytes_per_step'] / 1e6:>14.3f}{share:>9}"
            f"{run['seconds']:>9.1f}"
        )
    for run in runs[1:]:
        points = 100 * (run["test_accuracy"] - runs[0]["test_accuracy"])
        fewer = runs[0]["bytes_per_step"] / run["bytes_per_step"] if run["bytes_per_step"] else float("nan")
        print(f"{run['mode']}: {points:+.2f} points of accuracy, {fewer:.1f} times fewer bytes than {runs[0]['mode']}")


def smooth(values, width):
    """Means over a sliding window, and the step in the middle of each."""
    width = max(1, min(width, len(values)))
    means = np.convolve(values, np.ones(width) / width, mode="valid")
    return np.arange(len(means)) + 1 + (width - 1) / 2, means


def plot(runs, path):
    """Training loss and test accuracy over steps, one line for each run."""
    try:
        import matplotlib as mpl
    except ImportError:
        sys.exit("error: --plot needs matplotlib: pip install matplotlib")
    mpl.use("Agg")  # no display needed
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator, PercentFormatter

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    width = max(1, max(len(run["loss_per_step"]) for run in runs) // 40)
    for run, color in zip(runs, COLORS):
        label = f"{run['mode']}\n{run['bytes_per_step'] / 1e6:.3f} MB per step and rank"
        left.plot(*smooth(run["loss_per_step"], width), color=color, linewidth=1.6, label=label)
        steps, accuracies = zip(*((test["step"], test["accuracy"]) for test in run["tests"]))
        right.plot(steps, accuracies, "o-", color=color, linewidth=1.6)
    left.set(xlabel="step", ylabel=f"training loss (mean of {width} steps)", yscale="log")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 6, 8)))
    left.yaxis.set_minor_locator(NullLocator())
    left.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    right.set(xlabel="step", ylabel="test accuracy")
    right.yaxis.set_major_formatter(PercentFormatter(1, decimals=1))
    for axes in (left, right):
        axes.set_xlim(left=0)
        axes.margins(y=0.08)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.get_layout_engine().set(wspace=0.05)
    # Above both: inside there is no corner that stays free of lines in every run.
    figure.legend(loc="outside upper center", ncols=len(runs), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"plot: {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="FILE", help="results of an example, the reference first")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw training loss and test accuracy over steps")
    args = parser.parse_args()
    if len(args.runs) > len(COLORS):
        parser.error(f"at most {len(COLORS)} runs")
    runs = [json.loads(path.read_text()) for path in args.runs]
    print_table(runs)
    if args.plot:
        plot(runs, args.plot)


if __name__ == "__main__":
    main()
