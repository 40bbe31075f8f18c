"""The examples run from end to end: short, on small files of the usual format that the test writes itself."""

from __future__ import annotations

import gzip
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import QUIET, ROOT, horovodrun

SCRIPT = ROOT / "examples" / "pytorch_fashion_mnist.py"
NUM_PARAMETERS = 784 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 10 + 10
NUM_STEPS = 20

sys.path.insert(0, str(SCRIPT.parent))


def write_idx(path: Path, array: Any) -> None:
    """A uint8 array as an IDX file."""
    data = struct.pack(f">HBB{array.ndim}I", 0, 0x08, array.ndim, *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 + 101 images of noise with a bright row that gives the class away. One split is gzipped, one is not."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for prefix, number, suffix in (("train", 400, ".gz"), ("t10k", 101, "")):
        labels = random.integers(0, 10, number, np.uint8)
        images = random.integers(0, 100, (number, 28, 28), np.uint8)
        images[np.arange(number), 2 * labels] = 250
        write_idx(folder / f"{prefix}-images-idx3-ubyte{suffix}", images)
        write_idx(folder / f"{prefix}-labels-idx1-ubyte{suffix}", labels)
    return folder


def command(folder: Path, *options: str) -> list[str]:
    """Twenty steps in four epochs of two ranks."""
    short = ["--epochs", "9", "--steps", str(NUM_STEPS), "--batch-size", "40"]
    return [sys.executable, str(SCRIPT), "--data", str(folder), *short, *options]


def run_alone(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, env={**os.environ, **QUIET})


def check(results: dict[str, Any], ranks: int) -> None:
    """What holds for every run."""
    assert results["ranks"] == ranks
    assert results["steps"] == len(results["loss_per_step"]) == NUM_STEPS
    assert np.isfinite(results["loss_per_step"]).all()
    assert results["loss_per_step"][-1] < results["loss_per_step"][0]
    assert results["test_accuracy"] == results["tests"][-1]["accuracy"] > 0.2  # a guess is right once in ten times
    assert results["tests"][-1]["step"] == NUM_STEPS
    assert (results["test_accuracy"] * 101) == pytest.approx(round(results["test_accuracy"] * 101))  # all 101 images
    assert results["dense_bytes_per_step"] == 8 * NUM_PARAMETERS * (ranks - 1) / ranks


@pytest.mark.parallel(ranks=2)
def test_sparse_and_dense_on_two_ranks(folder: Path, tmp_path: Path) -> None:
    results = {}
    for name, options in (("sparse", ["--density", "0.01"]), ("dense", ["--dense"]), ("adaptive", [])):
        file = tmp_path / "results" / f"{name}.json"
        run = horovodrun(2, command(folder, "--json", str(file), *options), limit_seconds=60)
        assert run.code == 0, run.output
        assert "epoch 4, step 20 of 20" in run.output
        assert run.output.count("test accuracy  ") == 1  # one table, on one rank
        results[name] = json.loads(file.read_text())
        check(results[name], ranks=2)
    assert results["dense"]["bytes_per_step"] == results["dense"]["dense_bytes_per_step"]
    assert 0 < results["sparse"]["bytes_per_step"] < 0.025 * results["dense"]["bytes_per_step"]
    # The same weights and images to begin with.
    assert results["sparse"]["loss_per_step"][0] == pytest.approx(results["dense"]["loss_per_step"][0], rel=1e-5)

    compared = run_alone(
        [sys.executable, str(ROOT / "examples/compare_runs.py"), str(tmp_path / "results/dense.json"),
         str(tmp_path / "results/sparse.json"), "--plot", str(tmp_path / "plots/demo.png")]
    )  # fmt: skip
    assert compared.returncode == 0, compared.stderr
    assert "times fewer bytes than dense" in compared.stdout
    assert (tmp_path / "plots/demo.png").read_bytes().startswith(b"\x89PNG")


def test_alone_with_another_memory(folder: Path, tmp_path: Path) -> None:
    run = run_alone(command(folder, "--memory", "residual", "--bar", "--json", str(tmp_path / "results.json")))
    assert run.returncode == 0, run.stderr
    assert "20/20" in run.stderr  # the progress bar
    results = json.loads((tmp_path / "results.json").read_text())
    check(results, ranks=1)
    assert results["bytes_per_step"] == 0


def test_missing_files_are_named(tmp_path: Path) -> None:
    run = run_alone(command(tmp_path / "nowhere"))
    assert run.returncode == 1
    assert run.stderr.startswith("error: There is no file")
    assert str(tmp_path / "nowhere" / "train-images-idx3-ubyte") in run.stderr
    assert "apt-get install -y dataset-fashion-mnist" in run.stderr


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_read_idx(tmp_path: Path, suffix: str) -> None:
    from datasets import DataError, read_idx

    path = tmp_path / f"numbers{suffix}"
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    write_idx(path, array)
    np.testing.assert_array_equal(read_idx(path), array)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match=r"announces the shape|not a complete gzip"):
        read_idx(path)
    path.write_bytes(b"PNG")
    with pytest.raises(DataError, match=r"not an IDX file|not a complete gzip"):
        read_idx(path)


def test_read_idx_of_large_numbers(tmp_path: Path) -> None:
    from datasets import read_idx

    (tmp_path / "numbers").write_bytes(struct.pack(">HBBI2i", 0, 0x0C, 1, 2, -1, 70_000))
    assert read_idx(tmp_path / "numbers").tolist() == [-1, 70_000]


@pytest.mark.parallel(ranks=2)
def test_keras_on_two_ranks(folder: Path, tmp_path: Path) -> None:
    options = ["--data", str(folder), "--epochs", "2", "--batch-size", "20", "--density", "0.01"]
    options += ["--json", str(tmp_path / "keras.json")]
    script = ROOT / "examples" / "tensorflow2_keras_fashion_mnist.py"
    run = horovodrun(2, [sys.executable, str(script), *options], limit_seconds=90)
    assert run.code == 0, run.output
    results = json.loads((tmp_path / "keras.json").read_text())
    assert (results["ranks"], results["steps"]) == (2, 20)
    assert results["test_accuracy"] > 0.2
    assert 0 < results["bytes_per_step"] < 0.03 * results["dense_bytes_per_step"]


@pytest.mark.parallel(ranks=2)
def test_tensorflow_loop_on_two_ranks(folder: Path) -> None:
    script = ROOT / "examples" / "tensorflow2_custom_loop.py"
    options = ["--data", str(folder), "--steps", "30", "--batch-size", "20"]
    run = horovodrun(2, [sys.executable, str(script), *options], limit_seconds=90)
    assert run.code == 0, run.output
    assert "step 30 of 30" in run.output
    assert "test accuracy" in run.output
