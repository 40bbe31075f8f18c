"""The torch front over many steps: nothing is negotiated twice, and no order of events on the ranks makes them wait."""

from __future__ import annotations

import sys
import time
from typing import Any

import horovod.torch as horovod
import own_hash_seed  # noqa: F401  (the first import)
import pytest
import torch
from cache_cases import (
    BUCKET_BYTES,
    DENSITY,
    NUM_STEPS,
    SHAPES,
    UnevenGather,
    complaints,
    configurations,
    gradients,
    negotiated_again,
)
from scenario import assert_equal, assert_same_on_ranks, batches, flat, loss_of, make_model, sgd, summed, train
from timeline import ask_for_timeline, read_timeline

import hvd_sparse.torch as hvd
from hvd_sparse.controllers.warmup import Warmup
from hvd_sparse.sparsifiers.leader import Leader

TIMELINE = ask_for_timeline(sys.argv[2])
PAIR = hvd.ProcessSet([0, 1])
hvd.init(process_sets=[PAIR])
RANK, SIZE = hvd.rank(), hvd.size()


def sparse(**settings: Any) -> Any:
    return hvd.Compression.sparse(**{"min_size": 1, "density": 0.25, "sparsifier": "topk", **settings})


def _train_on(compression: Any) -> str:
    """Train through every kind of gradient; what the names of the operations start with."""
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters.values(), 0.1), parameters.items(), compression)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        given = gradients(step, RANK)
        sum((p * torch.from_numpy(given[name])).sum() for name, p in parameters.items()).backward()
        if all(bool(p.grad.isfinite().all()) for p in parameters.values()):
            optimizer.step()
    assert optimizer.metrics()["num_exchanges"] == NUM_STEPS
    assert optimizer.metrics()["skipped_steps"] > 0
    assert_same_on_ranks(flat(torch.nn.ParameterList(parameters.values())))
    return optimizer.averager.driver.prefix


def case_nothing_is_negotiated_twice() -> None:
    prefixes = {name: _train_on(config) for name, config in configurations().items()}
    settings = {"min_size": 1, "bucket_bytes": BUCKET_BYTES}
    ladder = _train_on(hvd.Compression.sparse(controller=Warmup(DENSITY, 8), **settings))
    uneven = _train_on(hvd.Compression.sparse(DENSITY, collective=UnevenGather(), **settings))
    broadcast = _train_on(hvd.Compression.sparse(DENSITY, sparsifier=Leader(index_carrier="broadcast"), **settings))
    for step in range(NUM_STEPS):
        horovod.allgather(torch.zeros(step % 3 if RANK == 1 else 1), name=".control.on one rank")
        horovod.alltoall(torch.zeros(SIZE, step % 3 + 1), name=".control.all to all")
        horovod.allreduce(torch.zeros(4), name=".control.constant")
    horovod.barrier()
    horovod.stop_timeline()
    if RANK > 0:
        return
    uses = read_timeline(TIMELINE)
    found = {name: complaints(uses, prefix, len(SHAPES)) for name, prefix in prefixes.items()}
    assert len(found) >= 12
    assert not any(found.values()), "\n".join(f"{name}: {what}" for name, what in found.items() if what)
    assert not negotiated_again(uses, ladder)
    assert len([name for name in uses if f".{ladder}.b2." in name]) > 6  # two rounds on several rungs
    # What must be seen, or nothing of the above says anything.
    for prefix, count in ((uneven, 2), (broadcast, 2), ("control", 2)):
        again = negotiated_again(uses, prefix)
        assert len(again) == count, (prefix, again)
        assert all(f"negotiated={NUM_STEPS}" in line for line in again), again


def case_hooks_in_another_order_on_each_rank() -> None:
    """Autograd completes the buckets of parallel branches in the order in which this rank used them."""
    for collective in ("owner_reduce", "allgather"):
        torch.manual_seed(0)
        branches = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(7))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(branches.parameters(), lr=0.0),
            branches.named_parameters(),
            sparse(collective=collective, bucket_bytes=64),
        )
        weights = [branch.weight for branch in branches]
        local, sent = ([torch.zeros(12, 12) for _ in weights] for _ in range(2))
        orders = []
        for step in range(4):
            order = torch.randperm(7, generator=torch.Generator().manual_seed(10 * step + RANK)).tolist()
            x = torch.randn(16, 12, generator=torch.Generator().manual_seed(10 * step + RANK))

            def loss(x: torch.Tensor = x, order: list[int] = order, branches: Any = branches) -> torch.Tensor:
                for number in order:
                    x = x + branches[number](x) / 7
                return x.square().mean()

            optimizer.zero_grad()
            started = _record_starts(optimizer)
            loss().backward()
            optimizer.step()
            orders.append([name for name in started if name != "census"])
            for i, gradient in enumerate(torch.autograd.grad(loss(), weights)):
                local[i] += gradient
                sent[i] += SIZE * weights[i].grad
        everybody = hvd.allgather_object(orders)
        for orders_of_step in list(zip(*everybody))[1:]:  # buckets are planned in the first
            assert len(set(map(tuple, orders_of_step))) == SIZE, orders_of_step
            assert all(len(order) >= 8 for order in orders_of_step)
        memory = optimizer.compression_state_dict()["memory"]
        for i in range(len(weights)):  # values that were mixed up between buckets would not add up
            assert_equal(summed(local[i]), sent[i] + summed(memory[f"{i}.weight"]["residual"]), 1e-5)


def _record_starts(optimizer: Any) -> list[str]:
    """The names of the programs that its driver starts from now on."""
    driver, names = optimizer.averager.driver, []

    def start(name: str, program: Any) -> None:
        names.append(name)
        type(driver).start(driver, name, program)

    driver.start = start
    return names


def case_sets_in_another_order_on_each_rank() -> None:
    names = ["left", "right", "top", "bottom", "head", "tail"]
    seen = hvd.allgather_object((hash("left"), list(set(names))))
    assert len({first for first, _ in seen}) == SIZE  # own_hash_seed has worked
    assert len({tuple(order) for _, order in seen}) > 1
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(9, 9) for name in names})
    table = torch.nn.Embedding(40, 9, sparse=True)
    groups = [[model[name].weight for name in names[start : start + 2]] for start in (0, 2, 4)]
    chosen = [
        hvd.DistributedOptimizer(sgd(model), model.named_parameters(), sparse(bucket_bytes=64), groups=groups),
        hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=0.1), table.named_parameters(), sparse(memory="none")
        ),
    ]
    for step in range(4):
        random = torch.Generator().manual_seed(10 * step + RANK)
        rows = torch.randint(0, 40, (6,), generator=random)
        hidden = table(rows)
        for name in set(names) if step % 2 else names[: 4 + RANK % 2]:  # some are unused
            hidden = hidden + model[name](hidden) / 6
        for optimizer in chosen:
            optimizer.zero_grad()
        hidden.square().mean().backward()
        for optimizer in chosen:
            optimizer.step()
    assert_same_on_ranks(flat(model))
    assert_same_on_ranks(flat(table))
    for optimizer in chosen:
        optimizer.close()
    unordered = {name: model[name].weight for name in set(names)}  # who builds the list from a set is told so
    with pytest.raises(hvd.HvdSparseError, match="parameters are in different orders"):
        hvd.DistributedOptimizer(torch.optim.SGD(unordered.values(), lr=0.1), unordered.items(), sparse())


def case_some_ranks_wrap_more_optimizers() -> None:
    """Ranks number what they wrap; those of a process set, which the others do not wrap, count apart."""
    alone, together = make_model(), make_model()
    own = hvd.DistributedOptimizer(sgd(alone), alone.named_parameters(), sparse(), process_set=PAIR)
    everybody = hvd.DistributedOptimizer(sgd(together), together.named_parameters(), sparse())
    for batch in batches(3):
        train(alone, own, iter([batch]))
        train(together, everybody, iter([batch]))
    assert_same_on_ranks(flat(together))
    weights = hvd.allgather_object(flat(alone))
    assert [torch.equal(weights[0], other) for other in weights] == [True, True, *[False] * (SIZE - 2)]


def case_a_rank_that_is_late() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), sparse())
    train(model, optimizer, batches(2))
    waited = optimizer.metrics()["exposed_seconds"]
    *_, batch = batches(3)
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    if RANK == 1:
        time.sleep(5)
    loss.backward()
    optimizer.step()
    waited = optimizer.metrics()["exposed_seconds"] - waited
    assert waited < 3 if RANK == 1 else waited > 4, waited
    train(model, optimizer, batches(2))
    assert optimizer.metrics()["num_exchanges"] == 5
    assert_same_on_ranks(flat(model))
