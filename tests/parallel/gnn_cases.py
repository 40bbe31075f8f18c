"""The PyTorch examples on graphs and text in several modes, short, each as one call of its main(). For 2 ranks."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import pytorch_diloco_text
import pytorch_gnn_link_prediction
import pytorch_gnn_node_classification

import hvd_sparse.torch as hvd

hvd.init()
FOLDER = Path(tempfile.mkdtemp())  # rank 0's is used


def run(module: Any, *options: str) -> dict[str, Any]:
    """What rank 0 writes; {} on the others."""
    file = FOLDER / "results.json"
    before, sys.argv = sys.argv, [module.__name__, *options, "--json", str(file), "--no-bar"]
    try:
        module.main()
    finally:
        sys.argv = before
    return json.loads(file.read_text()) if hvd.rank() == 0 else {}


def on_graph(module: Any, *options: str) -> dict[str, Any]:
    """The same, on the small graph."""
    results = run(module, "--synthetic", "--cache", str(FOLDER / "parts"), "--batch-size", "32", *options)
    if results:
        metric = results["metric"]
        assert results[metric] == results["curve"][-1][metric]
        assert results["ranks"] == 2
        assert results["steps_per_second"] == sum(results["steps"]) / results["seconds"]
    return results


def case_models_are_averaged() -> None:
    options = ["--mode", "super", "--steps", "60", "--every-steps", "10", "--points", "4", "--lr", "0.01"]
    picture = FOLDER / "plots" / "link.png"
    results = on_graph(pytorch_gnn_link_prediction, *options, "--plot", str(picture))
    if results:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert results["steps"] == [60, 60]
        assert results["rounds"] == 7  # one more when no rank has steps left
        assert [point["step"] for point in results["curve"]] == [0, 20, 30, 50, 60]
        assert results["MRR"] > results["curve"][0]["MRR"] + 0.05
        assert 0.5 < results["kept_edges"] < 1
        num_parameters = 16 * 64 * 2 + 64 + 64 * 64 * 2 + 64
        assert 7 * 4 * num_parameters < results["bytes_per_rank"] < 7.2 * 4 * num_parameters
        assert len(list((FOLDER / "parts").glob("super-2-0-*/part_*"))) == 2


def case_synchronous_ranks_end_together() -> None:
    results = on_graph(pytorch_gnn_link_prediction, "--mode", "sync", "--minutes", "0.02", "--points", "3")
    if results:
        first, second = results["steps"]
        assert first == second > 0
        assert first % 10 == 0  # they ask each other at every tenth step
        assert results["bytes_per_rank"] == first * 4 * (16 * 64 * 2 + 64 + 64 * 64 * 2 + 64)
        assert 0 < results["waiting_share"] < 1


def case_adaptive() -> None:
    results = on_graph(pytorch_gnn_node_classification, "--mode", "adaptive", "--steps", "30", "--lr", "0.02")
    if results:
        assert results["steps"] == [30, 30]
        assert results["accuracy"] > results["curve"][0]["accuracy"] + 0.2
        assert results["bytes_per_rank"] > 0


def case_a_part_is_missing() -> None:
    options = ["--mode", "random", "--minutes", "0.03", "--every-seconds", "0.3", "--drop-part", "0", "--lr", "0.02"]
    results = on_graph(pytorch_gnn_node_classification, *options)
    if results:
        assert results["steps"][0] > 0
        assert results["steps"][1] == 0
        assert results["rounds"] >= 4
        assert results["accuracy"] > results["curve"][0]["accuracy"] + 0.1


def case_a_slow_rank_takes_fewer_steps() -> None:
    options = ["--mode", "min-cut", "--minutes", "0.02", "--every-seconds", "0.3", "--slow", "1:0.1"]
    results = on_graph(pytorch_gnn_link_prediction, *options)
    if results:
        fast, slow = results["steps"]
        assert slow <= 13
        assert fast > slow
        assert results["partition"] == "min-cut"


def case_outer_optimizer_on_text() -> None:
    text = FOLDER / "text"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 500)  # equal on all ranks
    options = ["--data", str(text), "--steps", "24", "--every-steps", "6", "--batch-size", "4", "--length", "16"]
    results = run(pytorch_diloco_text, *options, "--width", "16", "--layers", "1", "--lr", "0.01")
    if results:
        assert results["rounds"] == 5  # one more when no rank has steps left
        assert results["loss_per_step"][-1] < results["loss_per_step"][0]
        # A round sends the model and six numbers.
        assert results["dense_bytes_per_rank"] == 24 * 4 * results["parameters"]
        assert results["bytes_per_rank"] < 5.2 * 4 * results["parameters"]
