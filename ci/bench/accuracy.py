"""Test accuracy with sparse gradients against Horovod's dense path: same seeds, epochs and hyper-parameters.

Runs the Fashion-MNIST example under horovodrun, dense and with every combination of --sparsifiers, --memories and
--wires, once per seed, one run after the other. Prints a table, writes JSON, and ends with status 1 if the mean
accuracy of a sparse combination is more than --points below dense, or it sends more than --share of the dense bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import report

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {
    "torch": ROOT / "examples" / "pytorch_fashion_mnist.py",
    "keras": ROOT / "examples" / "tensorflow2_keras_fashion_mnist.py",
}


def run_example(framework: str, num_ranks: int, options: list[str]) -> dict[str, Any]:
    """What the example wrote with --json.

    Raises:
        RuntimeError: it failed; with the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        horovodrun = str(Path(sys.executable).with_name("horovodrun"))
        script = [sys.executable, str(EXAMPLES[framework]), *options, "--json", str(file)]
        # The launcher imports TensorFlow, which is talkative. One thread per rank: they share the cores.
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [horovodrun, "-np", str(num_ranks), *script],
            env={**os.environ, **quiet},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode != 0 or not file.exists():
            raise RuntimeError(f"{' '.join(script)} failed with status {done.returncode}:\n{done.stdout[-3000:]}")
        results: dict[str, Any] = json.loads(file.read_text())
        return results


def compare(name: str, runs: list[dict[str, Any]], dense: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of the table. Accuracy in per cent."""
    accuracies = [100 * run["test_accuracy"] for run in runs]
    mean = statistics.mean(accuracies)
    return {
        "name": name,
        "accuracies": accuracies,
        "mean": mean,
        "points": mean - statistics.mean(100 * run["test_accuracy"] for run in dense),
        "share": max(run["bytes_per_step"] / run["dense_bytes_per_step"] for run in runs),
        "seconds": statistics.mean(run["seconds"] for run in runs),
        "accuracy_per_epoch": [[test["accuracy"] for test in run["tests"]] for run in runs],
    }


def print_table(rows: list[dict[str, Any]], seeds: list[int]) -> None:
    """Accuracies in per cent, the difference from dense in points."""
    columns = "".join(f"{f'seed {seed}':>9}" for seed in seeds)
    print(f"{'exchange':<26}{columns}{'mean':>9}{'points':>9}{'bytes':>9}{'seconds':>9}")
    for row in rows:
        accuracies = "".join(f"{accuracy:>9.2f}" for accuracy in row["accuracies"])
        print(
            f"{row['name']:<26}{accuracies}{row['mean']:>9.2f}{row['points']:>+9.2f}{row['share']:>9.2%}"
            f"{row['seconds']:>9.1f}"
        )


def parse_arguments() -> argparse.Namespace:
    """The command line. What is not known here goes to the example, dense and sparse alike."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=sorted(EXAMPLES), default="torch")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--sparsifiers", nargs="+", default=["threshold"], metavar="NAME")
    parser.add_argument("--memories", nargs="+", default=["momentum"], metavar="NAME")
    parser.add_argument("--wires", nargs="+", default=["fp32"], metavar="NAME", help="others than fp32: PyTorch only")
    parser.add_argument("--points", type=float, default=0.5, help="accuracy that may be lost (%(default)s)")
    parser.add_argument("--share", type=float, default=0.025, help="of the dense bytes that may be sent (%(default)s)")
    parser.add_argument("--json", type=Path, default=ROOT / "out" / "accuracy.json")
    args, args.others = parser.parse_known_args()
    return args


def main() -> int:
    """The exit status."""
    args = parse_arguments()
    variants = {"dense": ["--dense"]}
    for sparsifier, memory, wire in itertools.product(args.sparsifiers, args.memories, args.wires):
        options = ["--density", str(args.density), "--sparsifier", sparsifier, "--memory", memory]
        if wire == "fp32":
            variants[f"{sparsifier}, {memory}"] = options
        elif sparsifier not in ("leader", "random_block"):  # which send no indices
            variants[f"{sparsifier}, {memory}, {wire}"] = [*options, "--wire", wire]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for seed, name in itertools.product(args.seeds, variants):
        common = ["--epochs", str(args.epochs), "--seed", str(seed), *args.others]
        run = run_example(args.framework, args.ranks, [*common, *variants[name]])
        runs[name].append(run)
        print(
            f"seed {seed}, {name}: {run['test_accuracy']:.2%} after {run['steps']} steps", file=sys.stderr, flush=True
        )
    rows = [compare(name, runs[name], runs["dense"]) for name in variants]
    settings = report.settings_of(args)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")
    print_table(rows, args.seeds)
    failed = [row["name"] for row in rows[1:] if row["points"] < -args.points or row["share"] > args.share]
    limits = f"at most {args.points:g} points lost and {args.share:.1%} of the bytes sent"
    print(f"{limits}: {'NOT HELD by ' + '; '.join(failed) if failed else 'held'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
