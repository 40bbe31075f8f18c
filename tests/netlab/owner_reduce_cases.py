"""`owner_reduce` with torch on 4 hosts of one rank, and an example from end to end."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from harness import ROOT
from scenario import assert_equal, assert_same_on_ranks, batches, flat, make_model, sgd, train, train_reference

import hvd_sparse.torch as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def case_four_hosts() -> None:
    assert (SIZE, hvd.local_size(), hvd.cross_size()) == (4, 1, 4)


def case_ranks_are_equal() -> None:
    for settings in ({}, {"wire": "compact"}, {"collective": "hierarchical"}):  # one rank per host: the same
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(200, 301), torch.nn.ReLU(), torch.nn.Linear(301, 10))
        compression = hvd.Compression.sparse(0.01, bucket_bytes=2**16, **settings)
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), compression)
        for step in range(4):
            x = torch.randn(16, 200, generator=torch.Generator().manual_seed(10 * step + RANK))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        assert_same_on_ranks(flat(model))
        metrics = optimizer.metrics()
        assert metrics["num_exchanges"] == 4
        assert 0 < metrics["bytes_sent"] < 0.05 * metrics["bytes_dense"]


def case_density_one_is_dense() -> None:
    model, reference = make_model(), make_model()
    compression = hvd.Compression.sparse(1.0, min_size=1)
    train(model, hvd.DistributedOptimizer(sgd(model), model.named_parameters(), compression), batches(5))
    train_reference(reference, sgd(reference), batches(5))
    assert_equal(flat(model), flat(reference))


def case_the_slowest_link_counts() -> None:
    """Three hosts could send ten times as much as the first one: all of them choose what suits that."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1000, 1000)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), hvd.Compression.adaptive(period=8))
    densities = []
    for step in range(24):
        x = torch.randn(16, 1000, generator=torch.Generator().manual_seed(10 * step + RANK))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        densities.append(optimizer.metrics()["density"])
    metrics = optimizer.metrics()
    assert 5e6 < metrics["bandwidth_bytes_per_second"] < 25e6, metrics  # of 12.5e6; a link starts with some credit
    assert densities[-1] < 0.05, metrics
    told = (densities, metrics["reason"], metrics["bandwidth_bytes_per_second"])
    assert hvd.allgather_object(told) == [told] * SIZE
    assert_same_on_ranks(flat(model))


def case_the_example() -> None:
    script, folder = ROOT / "examples" / "pytorch_fashion_mnist.py", os.environ["IMAGES"]
    results = Path(sys.argv[2], "results")
    options = ["--steps", "3", "--batch-size", "20", "--data", folder, "--json", str(results)]
    with (
        mock.patch.object(sys, "argv", [str(script), *options]),
        mock.patch.object(sys, "path", [str(script.parent), *sys.path]),
    ):
        found: dict[str, Any] = runpy.run_path(str(script), run_name="__main__")
    assert "main" in found
    if RANK == 0:
        told = json.loads(results.read_text())
        assert (told["ranks"], told["steps"], len(told["loss_per_step"])) == (4, 3, 3)
        assert 0 < told["bytes_per_step"] < 0.05 * told["dense_bytes_per_step"]
