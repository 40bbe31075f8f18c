"""Results of the PyTorch examples on graphs: counts of all ranks, the metric over time, a table, a plot."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from graph_training import Training
from results import save, show

import hvd_sparse.torch as hvd


def report(
    args: argparse.Namespace, facts: dict[str, Any], model: torch.nn.Module, training: Training, metric: str,
    evaluate: Callable[[torch.nn.Module], float] | None,
) -> None:  # fmt: skip
    """Gather the ranks' counts; on rank 0 evaluate the models that were kept, print a table and write files."""
    row = [training.steps, training.seconds, training.waiting_share, training.bytes_sent, training.num_rounds]
    ranks = hvd.allgather(torch.tensor([row], dtype=torch.float64), name="counts").tolist()
    if evaluate is None:
        return
    curve = []
    for seconds, step, weights in training.models:
        model.load_state_dict(weights)
        curve.append({"seconds": seconds, "step": step, metric: evaluate(model)})
    steps, seconds, shares, sent, rounds = zip(*ranks)
    busy = [share for share, number in zip(shares, steps) if number]
    results = {
        "mode": args.mode,
        "metric": metric,
        "ranks": hvd.size(),
        "partition": facts["partition"],
        "kept_edges": facts["kept_edges"],
        "steps": [int(number) for number in steps],
        "seconds": max(seconds),
        "steps_per_second": sum(steps) / max(seconds),
        "waiting_share": sum(busy) / len(busy),
        "rounds": int(rounds[0]),
        "bytes_per_rank": max(sent),
        metric: curve[-1][metric],
        "curve": curve,
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
    }
    print_table(results)
    save(args.json, results)
    if args.plot:
        draw(results, args.plot)


def print_table(results: dict[str, Any]) -> None:
    """The results of one run."""
    metric = results["metric"]
    rows = {
        "mode": results["mode"],
        "ranks": results["ranks"],
        "parts": f"{results['partition']}, {results['kept_edges']:.1%} of the edges are within one",
        "steps of each rank": ", ".join(map(str, results["steps"])),
        "seconds of training": f"{results['seconds']:.1f}",
        "steps per second": f"{results['steps_per_second']:.1f} (all ranks)",
        "waiting": f"{results['waiting_share']:.2%} of the time",
        "averages of the model": results["rounds"],
        "sent per rank": f"{results['bytes_per_rank'] / 1e6:.3f} MB",
        f"{metric} at the start": f"{results['curve'][0][metric]:.4f}",
        metric: f"{results[metric]:.4f}",
    }
    show(rows)


def draw(results: dict[str, Any], path: Path) -> None:
    """The metric over the seconds of training."""
    try:
        import matplotlib as mpl
    except ImportError:
        sys.exit("error: --plot needs matplotlib: pip install matplotlib")
    mpl.use("Agg")  # no display needed
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    seconds, values = zip(*((point["seconds"], point[results["metric"]]) for point in results["curve"]))
    axes.plot(seconds, values, "o-", color="#1f5fa8", linewidth=1.6)
    title = f"mode {results['mode']}, {results['ranks']} ranks"
    axes.set(xlabel="seconds of training", ylabel=results["metric"], title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"plot: {path}")
