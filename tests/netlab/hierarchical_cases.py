"""`hierarchical` with torch on 2 hosts of 2 ranks."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from cache_cases import DENSITY, SHAPES, gradients, negotiated_again
from scenario import (
    assert_equal,
    assert_same_on_ranks,
    batches,
    flat,
    make_model,
    sgd,
    summed,
    train,
    train_reference,
)
from timeline import ask_for_timeline, read_timeline

import hvd_sparse.torch as hvd

TIMELINE = ask_for_timeline(sys.argv[2])
hvd.init(process_sets="dynamic")
RANK, SIZE, NUM_LOCAL, NUM_HOSTS = hvd.rank(), hvd.size(), hvd.local_size(), hvd.cross_size()


def hierarchical(**settings: Any) -> Any:
    return hvd.Compression.sparse(**{"min_size": 1, "density": 0.1, "collective": "hierarchical", **settings})


def case_two_hosts_of_two_ranks() -> None:
    assert (SIZE, NUM_LOCAL, NUM_HOSTS) == (4, 2, 2)


def case_ranks_are_equal_and_use_branches_in_any_order() -> None:
    for settings in ({"memory": "momentum"}, {"sparsifier": "topk", "wire": "compact"}):
        torch.manual_seed(0)
        branches = torch.nn.ModuleList(torch.nn.Linear(11, 11) for _ in range(3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(branches.parameters(), lr=0.1),
            branches.named_parameters(),
            hierarchical(bucket_bytes=64, **settings),
        )
        before = flat(branches)
        for step in range(4):
            random = torch.Generator().manual_seed(10 * step + RANK)
            hidden = torch.randn(8, 11, generator=random)
            for number in torch.randperm(3, generator=random).tolist():
                hidden = hidden + branches[number](hidden) / 3
            optimizer.zero_grad()
            hidden.square().mean().backward()
            optimizer.step()
        assert len(optimizer.averager.buckets) > 3
        assert not torch.equal(before, flat(branches))
        assert_same_on_ranks(flat(branches))
        optimizer.close()


def case_density_one_is_dense() -> None:
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), hierarchical(density=1.0))
    train(model, optimizer, batches(6))
    train_reference(reference, sgd(reference), batches(6))
    assert_equal(flat(model), flat(reference))
    optimizer.close()


def case_adaptive_tells_links_apart() -> None:
    """Ranks of one host are nearer to each other than hosts are, and the prediction rests on both links."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, 512)
    compression = hvd.Compression.adaptive(collective="hierarchical", min_size=1, period=4)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), compression)
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.ones(8, 1024)).square().mean().backward()
        optimizer.step()
    links = optimizer.averager.meter.measured.links
    assert links["local"].bandwidth > 1.25e8 > 0.8 * links["cross"].bandwidth
    assert optimizer.averager.meter.measured.num_local == NUM_LOCAL
    assert_same_on_ranks(flat(model))
    optimizer.close()


def case_conservation_over_a_run() -> None:
    """A rank keeps what its part of the host's sum has not sent: together that is all that has not arrived."""
    torch.manual_seed(0)
    model = torch.nn.Linear(151, 93, bias=False)  # an odd number of elements
    for settings in ({}, {"wire": "compact"}):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), hierarchical(**settings)
        )
        sent, local = torch.zeros(93, 151), torch.zeros(93, 151)
        for step in range(4):
            x = torch.randn(16, 151, generator=torch.Generator().manual_seed(10 * step + RANK))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            assert 0 < int((model.weight.grad != 0).sum()) <= 0.1 * model.weight.numel()
            sent += model.weight.grad * SIZE
            optimizer.step()
            local += torch.autograd.grad(model(x).square().mean(), model.weight)[0]
        left = optimizer.compression_state_dict()["memory"]["weight"]["residual"]
        assert_equal(summed(local), sent + summed(left), 1e-5)
        assert float(left.abs().max()) > 0
        assert optimizer.metrics()["residual_norm"] > 0
        optimizer.close()


def case_bytes() -> None:
    n, k = 151 * 93, 1404
    torch.manual_seed(0)
    model = torch.nn.Linear(151, 93, bias=False)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), hierarchical())
    model(torch.randn(4, 151)).square().mean().backward()
    inside = 4 * (2 * n + -(-n // NUM_LOCAL) * NUM_LOCAL) * (NUM_LOCAL - 1) / NUM_LOCAL
    quota = k // NUM_LOCAL // NUM_HOSTS
    between = 2 * 8 * quota * (NUM_HOSTS - 1)
    census = 2 * 4 * 5 * (SIZE - 1) / SIZE  # five flags
    metrics = optimizer.metrics()
    assert abs(metrics["bytes_sent"] - (inside + between + census)) <= 1, (metrics, inside, between, census)
    assert metrics["bytes_dense"] == int(8 * n * (SIZE - 1) / SIZE)
    optimizer.close()


def case_a_process_set_is_refused() -> None:
    several = hvd.add_process_set([0, 1, 2])
    if several.included():
        model = make_model()
        with pytest.raises(ValueError, match=r"hierarchical.*needs all ranks: it cannot be used with `process_set`"):
            hvd.DistributedOptimizer(sgd(model), model.named_parameters(), hierarchical(), process_set=several)
    hvd.remove_process_set(several)


def case_nothing_is_negotiated_twice() -> None:
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters.values(), 0.1), parameters.items(), hierarchical(density=DENSITY)
    )
    for step in range(6):
        optimizer.zero_grad()
        given = gradients(step, RANK)
        sum((p * torch.from_numpy(given[name])).sum() for name, p in parameters.items()).backward()
        optimizer.step()
    assert_same_on_ranks(flat(torch.nn.ParameterList(parameters.values())))
    hvd.stop_timeline()
    if RANK == 0:  # which leads one of the sets of each kind, and sees no other
        uses, prefix = read_timeline(TIMELINE), optimizer.averager.driver.prefix
        assert not negotiated_again(uses, prefix)
        for tag in ("host", "entries", "sums", "parts"):
            assert any(f".{prefix}.b1.{tag}" in name and use.ran == 6 for name, use in uses.items()), (tag, uses)
