"""Memories that change what the optimizer gets, selections that look at the weights, and silent ranks, on torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from scenario import (
    assert_equal,
    assert_same_on_ranks,
    batches,
    flat,
    flat_grad,
    loss_of,
    make_model,
    sgd,
    summed,
    train,
)

import hvd_sparse.torch as hvd
from hvd_sparse.memories.sgc import SGC
from hvd_sparse.schemes.lazy import Lazy
from hvd_sparse.sparsifiers.importance import Importance
from hvd_sparse.sparsifiers.topk import TopK

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def wrap(
    model: torch.nn.Module, optimizer: Any = None, density: float = 0.1, grad_scaler: Any = None, **settings: Any
) -> Any:
    settings = {"min_size": 1, **({} if "scheme" in settings else {"sparsifier": "topk"}), **settings}
    if optimizer is None:
        optimizer = sgd(model, momentum=0.0)
    compression = hvd.Compression.sparse(density=density, **settings)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression, grad_scaler=grad_scaler)


def pair() -> tuple[torch.nn.Module, torch.nn.Module]:
    return make_model(), make_model()


# -- importance --------------------------------------------------------------------------------------------------------


def case_importance_looks_at_the_weights_of_its_bucket() -> None:
    """A gradient of ones everywhere: the smallest weights go first."""
    torch.manual_seed(3)
    model = torch.nn.Linear(8, 8, bias=False)
    optimizer = wrap(model, density=4 / 64, sparsifier=Importance(eps=1e-6))
    for _ in range(2):
        before = model.weight.detach().clone()
        smallest = before.abs().reshape(-1).argsort()[:4].sort().values
        optimizer.zero_grad()
        model.weight.sum().backward()
        residual = optimizer.compression_state_dict()["memory"]["weight"]["residual"].reshape(-1)
        importance = (residual + 1) / (before.abs().reshape(-1) + 1e-6)
        expected = importance.argsort()[-4:].sort().values
        if float(residual.abs().sum()) == 0:
            assert torch.equal(expected, smallest)
        assert torch.equal(model.weight.grad.reshape(-1).nonzero().reshape(-1), expected)
        optimizer.step()
    assert_same_on_ranks(model.weight)


# -- sgc ---------------------------------------------------------------------------------------------------------------


def case_sgc_at_density_one_is_momentum_sgd() -> None:
    model, reference = pair()
    train(model, wrap(model, density=1.0, memory="sgc"), batches(20))
    plain = wrap(reference, sgd(reference, momentum=0.9), density=1.0)
    train(reference, plain, batches(20))
    assert_equal(flat(model), flat(reference), 1e-5)
    assert_same_on_ranks(flat(model))


def case_sgc_refuses_another_momentum() -> None:
    model = make_model()
    adam = torch.optim.Adam(model.parameters())
    for optimizer in (sgd(model), adam, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)):
        with pytest.raises(ValueError, match="give the optimizer momentum=0"):
            wrap(model, optimizer, memory="sgc")
    wrap(model, adam).close()


def case_sgc_with_a_loss_scale_that_changes() -> None:
    models = pair()
    for model, scale in zip(models, (1.0, 512.0)):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2, enabled=scale != 1)
        optimizer = wrap(model, memory=SGC(0.5), density=0.25, grad_scaler=scaler)
        for batch in batches(6):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert_equal(flat(models[0]), flat(models[1]), 1e-5)


def case_sgc_a_result_that_is_thrown_away_changes_nothing() -> None:
    models = pair()
    for model, twice in zip(models, (False, True)):
        optimizer = wrap(model, memory=SGC(0.5))
        for batch in batches(5):
            for _ in range(1 + twice):
                optimizer.zero_grad()
                loss_of(model, batch).backward()
            optimizer.step()
    assert torch.equal(flat(models[0]), flat(models[1]))


def case_sgc_state_survives() -> None:
    models = pair()
    data = list(batches(8))
    optimizer = wrap(models[0], memory=SGC(0.5))
    train(models[0], optimizer, iter(data[:4]))
    saved, weights = optimizer.compression_state_dict(), copy.deepcopy(models[0].state_dict())
    train(models[0], optimizer, iter(data[4:]))
    models[1].load_state_dict(weights)
    resumed = wrap(models[1], memory=SGC(0.5))
    resumed.load_compression_state_dict(saved)
    train(models[1], resumed, iter(data[4:]))
    assert torch.equal(flat(models[0]), flat(models[1]))


def case_local_weights() -> None:
    """Gradients are taken elsewhere on every rank; weights are restored bit for bit and equal on all of them."""
    model = make_model()
    optimizer = wrap(model, memory=SGC(0.5), density=0.05)
    moved = 0.0
    for batch in batches(6):
        before = flat(model)
        saved = optimizer.compression_state_dict()["memory"]
        optimizer.zero_grad()
        with optimizer.local_weights():
            for name, parameter in model.named_parameters():
                residual = saved.get(name, {}).get("residual", torch.zeros_like(parameter))
                expected = before_of(model, before, name) - 0.1 * residual
                assert_equal(parameter.detach(), expected, 1e-6)
            moved += float((flat(model) - before).abs().max())
            loss_of(model, batch).backward()
        assert torch.equal(flat(model), before)
        optimizer.step()
        assert_same_on_ranks(flat(model))
    assert moved > 0
    with pytest.raises(ZeroDivisionError), optimizer.local_weights():
        raise ZeroDivisionError
    assert_same_on_ranks(flat(model))


def before_of(model: torch.nn.Module, weights: torch.Tensor, name: str) -> torch.Tensor:
    start = 0
    for other, parameter in model.named_parameters():
        if other == name:
            return weights[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    raise KeyError(name)


def case_local_weights_are_for_sgd_and_a_residual() -> None:
    model = make_model()
    for optimizer, memory in (
        (torch.optim.Adam(model.parameters()), "residual"),
        (None, "momentum"),
        (None, "delayed"),
    ):
        wrapped = wrap(model, optimizer, memory=memory)
        with pytest.raises(ValueError, match="`local_weights`"), wrapped.local_weights():
            pass
        wrapped.close()


# -- delayed -----------------------------------------------------------------------------------------------------------


def case_delayed_is_one_step_late() -> None:
    """On weights that do not move, gradients are those of the step before, and a flush gives the last."""
    plain, late = pair()
    optimizers = [
        wrap(model, sgd(model, lr=0.0, momentum=0.0), memory=m) for model, m in ((plain, "residual"), (late, "delayed"))
    ]
    expected = torch.zeros_like(flat(plain))
    for batch in batches(6):
        for model, optimizer in zip((plain, late), optimizers):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        assert_equal(flat_grad(late), expected, 1e-6)
        expected = flat_grad(plain)
    assert float(expected.abs().sum()) > 0
    assert optimizers[1].averager.flush()
    assert_equal(flat_grad(late), expected, 1e-6)
    optimizers[1].step()
    assert not optimizers[1].averager.flush()
    saved = [optimizer.compression_state_dict()["memory"] for optimizer in optimizers]
    assert saved[0].keys() == saved[1].keys()
    for name in saved[0]:
        for key in saved[0][name]:
            assert torch.equal(saved[0][name][key], saved[1][name][key])


def case_delayed_quadratic() -> None:
    """w = 1, lr = 0.5, density 1: 1, 0.5, 0, -0.25, and the flush applies a gradient of 0."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = wrap(model, sgd(model, lr=0.5, momentum=0.0), density=1.0, memory="delayed")
    for expected in (1, 0.5, 0, -0.25):
        optimizer.zero_grad()
        (model.weight**2 / 2).sum().backward()
        optimizer.step()
        assert float(model.weight.detach()) == expected
    optimizer.flush()
    assert float(model.weight.detach()) == -0.25
    optimizer.flush()  # nothing is left


def case_delayed_nothing_is_lost() -> None:
    """With a collective that rejects entries; some results are thrown away, and come with the next."""
    model = make_model()
    optimizer = wrap(model, sgd(model, lr=0.0, momentum=0.0), memory="delayed", collective="owner_reduce")
    weights = [p for p in model.parameters() if p.dim() > 1]
    entered = applied = torch.zeros(sum(p.numel() for p in weights))
    for number, batch in enumerate(batches(9)):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        entered = entered + torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss_of(model, batch), weights)])
        if number % 3 != 1:
            applied = applied + torch.cat([p.grad.reshape(-1) for p in weights])
            optimizer.step()
    if not optimizer.averager.flush():
        raise AssertionError
    applied = applied + torch.cat([p.grad.reshape(-1) for p in weights])
    optimizer.step()
    memory, names = optimizer.compression_state_dict()["memory"], {p: name for name, p in model.named_parameters()}
    kept = torch.cat([memory[names[p]]["residual"].reshape(-1) for p in weights])
    assert_equal(summed(entered), SIZE * applied + summed(kept), 1e-4)


def case_delayed_is_in_flight_meanwhile() -> None:
    """After the step, exchanges of all buckets run on; the next backward fetches them."""
    model = make_model()
    optimizer = wrap(model, memory="delayed", bucket_bytes=256)
    names = []
    for batch in batches(3):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        averager = optimizer.averager
        names = [bucket.layout.spec.name for bucket in averager.buckets]
        assert len(names) > 2
        assert all(averager.driver.has(name) for name in names)
        optimizer.step()
        assert all(averager.driver.has(name) for name in names)
    optimizer.flush()
    assert not any(optimizer.averager.driver.has(name) for name in names)
    assert_same_on_ranks(flat(model))


def case_delayed_state_survives() -> None:
    """Saved between two steps, what was in flight is in the file, and goes on bit for bit."""
    models, data = pair(), list(batches(8))
    optimizer = wrap(models[0], memory="delayed", bucket_bytes=256)
    train(models[0], optimizer, iter(data[:4]))
    saved, weights = optimizer.compression_state_dict(), copy.deepcopy(models[0].state_dict())
    assert any(bool(late.any()) for late in saved["late"].values())
    train(models[0], optimizer, iter(data[4:]))
    models[1].load_state_dict(weights)
    resumed = wrap(models[1], memory="delayed", bucket_bytes=256)
    resumed.load_compression_state_dict(saved)
    train(models[1], resumed, iter(data[4:]))
    for one in (optimizer, resumed):
        one.flush()
    assert torch.equal(flat(models[0]), flat(models[1]))


def case_delayed_with_a_scaler() -> None:
    """An infinity on one rank: all skip the step in which it would be applied, one later, and go on."""
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=1000)
    optimizer = wrap(model, memory="delayed", grad_scaler=scaler)
    for number, batch in enumerate(batches(8)):
        before = flat(model)
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        scaler.scale(loss * float("inf") if number == 3 and RANK == SIZE - 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(flat(model), before) == (number in (0, 4))
        assert_same_on_ranks(flat(model))
    assert scaler.get_scale() == 256
    assert optimizer.metrics()["skipped_steps"] == 1
    assert bool(torch.isfinite(flat(model)).all())


def case_delayed_parameters_that_appear_later() -> None:
    """The second head has gradients from the third step on, and on rank 0 only."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
    optimizer = wrap(model, memory="delayed", density=1.0)
    for step in range(5):
        optimizer.zero_grad()
        out = model[0](torch.ones(4))
        (out.sum() + model[1](torch.ones(4)).sum() if step >= 2 and RANK == 0 else out.sum()).backward()
        grad = model[1].weight.grad
        if step <= 2:
            assert grad is None
        else:
            assert_equal(grad, torch.full((4, 4), 1 / SIZE))
        optimizer.step()
        assert_same_on_ranks(flat(model))


def case_delayed_uneven_batches() -> None:
    model = make_model()
    optimizer = wrap(model, memory="delayed")
    train(model, optimizer, batches(4 + 2 * RANK))
    hvd.join()
    assert_same_on_ranks(flat(model))
    train(model, optimizer, batches(3))
    optimizer.flush()
    assert_same_on_ranks(flat(model))


def case_delayed_refuses_rows_and_what_adapts() -> None:
    table = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=0.1), table.named_parameters(), hvd.Compression.sparse(memory="delayed")
    )
    with pytest.raises(hvd.HvdSparseError, match=r"'delayed' is for dense gradients\. That of 'weight' is sparse"):
        table(torch.tensor([RANK])).sum().backward()
    optimizer.close()


# -- lazy --------------------------------------------------------------------------------------------------------------


def case_lazy_trace() -> None:
    """sasg.md: f_r = (w - a_r)^2 / 2 with a = (0, 4); the average's rate of 0.2 is one of 0.1 for the sum."""
    model = torch.nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(1)
    optimizer = wrap(model, sgd(model, lr=0.2, momentum=0.0), density=0.25, scheme=Lazy(history=2))
    seen, spoke, sent = [], [], []
    for _ in range(6):
        silent, num_bytes = optimizer.metrics()["silent_steps"], optimizer.metrics()["bytes_sent"]
        optimizer.lazy_step(lambda: (model.weight[0, 0] - 4 * RANK) ** 2 / 2)
        seen.append(float(model.weight.detach()[0, 0]))
        spoke.append(1 - (optimizer.metrics()["silent_steps"] - silent))
        sent.append(optimizer.metrics()["bytes_sent"] - num_bytes)
        assert_same_on_ranks(model.weight)
    assert seen == pytest.approx([1.2, 1.36, 1.52, 1.616, 1.712, 1.7696], abs=1e-6)
    assert spoke == [1, 1, 0, 1, 0, 1]
    assert sent[1] - sent[2] == 3 * 4, "an index, a value, and the rank"


def case_lazy_trains() -> None:
    """Fewer messages; the model is the same on all ranks, and the loss is about that of steps without silence."""
    models, losses = pair(), []
    data = next(batches(1))
    for model, threshold in zip(models, (0.0, 1.0)):
        optimizer = wrap(model, sgd(model, momentum=0.0), scheme=Lazy(threshold=threshold))
        first = float(loss_of(model, data))
        losses.append([float(optimizer.lazy_step(lambda model=model: loss_of(model, data))) for _ in range(60)])
        assert losses[-1][0] == pytest.approx(first)
        assert_same_on_ranks(flat(model))
        assert (optimizer.metrics()["silent_steps"] > 10) == (threshold > 0)
    silent, plain = (first - last for first, *_, last in reversed(losses))
    assert silent > 0.8 * plain > 0


def case_lazy_without_silence_is_allgather() -> None:
    """A threshold of 0 is only met by a gradient that does not change; a step's own random numbers are as usual."""
    models = pair()
    lazy = wrap(models[0], scheme=Lazy(threshold=0))
    plain = wrap(models[1], sparsifier=TopK("parameter"), collective="allgather")
    torch.manual_seed(7)
    for batch in batches(14):
        lazy.lazy_step(lambda batch=batch: loss_of(models[0], noisy(batch)))
    torch.manual_seed(7)
    for batch in batches(14):
        plain.zero_grad()
        loss_of(models[1], noisy(batch)).backward()
        plain.step()
    assert torch.equal(flat(models[0]), flat(models[1]))
    assert lazy.metrics()["silent_steps"] == 0


def case_lazy_compares_gradients_of_the_same_random_numbers() -> None:
    """Weights stay where they are, so that gradients differ by their dropout only."""
    model, data = make_model(), next(batches(1))
    optimizer = wrap(model, sgd(model, lr=0.0, momentum=0.0), scheme=Lazy(history=2))
    for _ in range(5):
        optimizer.lazy_step(lambda: loss_of(model, noisy(data)))
    assert optimizer.metrics()["silent_steps"] == 2


def noisy(batch: Any) -> Any:
    return torch.nn.functional.dropout(batch[0], 0.3), batch[1]


def case_lazy_state_survives() -> None:
    models = pair()
    data = next(batches(1))

    def steps(model: torch.nn.Module, optimizer: Any, count: int) -> list[float]:
        return [float(optimizer.lazy_step(lambda: loss_of(model, data))) for _ in range(count)]

    optimizer = wrap(models[0], scheme="lazy")
    steps(models[0], optimizer, 15)
    saved, weights = optimizer.compression_state_dict(), copy.deepcopy(models[0].state_dict())
    expected = steps(models[0], optimizer, 15)
    models[1].load_state_dict(weights)
    resumed = wrap(models[1], scheme="lazy")
    resumed.load_compression_state_dict(saved)
    assert steps(models[1], resumed, 15) == expected
    assert torch.equal(flat(models[0]), flat(models[1]))
    assert resumed.metrics()["silent_steps"] == optimizer.metrics()["silent_steps"] > 0
    resumed.load_compression_state_dict({**saved, "lazy": {**saved["lazy"], "rank": SIZE}})  # another rank's
    before = resumed.metrics()["silent_steps"]
    steps(models[1], resumed, 10)
    assert resumed.metrics()["silent_steps"] == before == 0
    assert_same_on_ranks(flat(models[1]))


def case_lazy_what_is_not_finite_is_forgotten_by_all() -> None:
    model, data = make_model(), next(batches(1))
    optimizer = wrap(model, scheme=Lazy(history=2))
    for number in range(8):
        spoilt = float("nan") if number == 4 and RANK == 0 else 1.0
        before, saved = copy.deepcopy(model.state_dict()), optimizer.compression_state_dict()
        optimizer.lazy_step(lambda spoilt=spoilt: loss_of(model, data) * spoilt)
        after = optimizer.compression_state_dict()
        if number == 4:
            assert torch.isnan(flat(model)).any()
            assert_same_on_ranks(torch.isnan(flat(model)).float())
            assert after["lazy"]["moves"] == saved["lazy"]["moves"]
            assert after["lazy"]["silence"] == saved["lazy"]["silence"]
            for name, arrays in saved["memory"].items():
                for key, array in arrays.items():
                    assert torch.equal(after["memory"][name][key], array)
            model.load_state_dict(before)  # as whoever checks for it would do
    assert_same_on_ranks(flat(model))
    assert optimizer.metrics()["skipped_steps"] == 1


def case_lazy_refuses_what_it_cannot_do() -> None:
    model, table = make_model(), torch.nn.Embedding(10, 4, sparse=True)
    for settings in ({}, {"scheme": "lazy", "memory": "delayed"}):
        optimizer = wrap(model, **settings)
        with pytest.raises(ValueError, match="`lazy_step` needs scheme='lazy' and a memory other than 'delayed'"):
            optimizer.lazy_step(lambda: loss_of(model, next(batches(1))))
        optimizer.close()
    optimizer = wrap(model, scheme="lazy", grad_scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="wrap without `grad_scaler`"):
        optimizer.lazy_step(lambda: loss_of(model, next(batches(1))))
    optimizer.close()
    optimizer = wrap(table, sgd(table, momentum=0.0), scheme="lazy")
    with pytest.raises(ValueError, match=r"`lazy_step` is for dense gradients\. That of 'weight' is sparse"):
        optimizer.lazy_step(lambda: table(torch.tensor([RANK])).sum())
    optimizer.close()


def case_lazy_uneven_batches() -> None:
    model = make_model()
    optimizer = wrap(model, scheme=Lazy(history=2))
    data = next(batches(1))
    for _ in range(6 + 3 * RANK):
        optimizer.lazy_step(lambda: loss_of(model, data))
    hvd.join()
    assert_same_on_ranks(flat(model))
