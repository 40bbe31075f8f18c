"""Scenarios T1 to T15, T18 and T19 of users, on torch."""

from __future__ import annotations

import copy
import math
import warnings
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
    train_reference,
)

import hvd_sparse.torch as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def wrap(model: torch.nn.Module, optimizer: Any = None, density: float = 0.25, **arguments: Any) -> Any:
    """As a user would, but with the tiny parameters of M worth compressing."""
    names = {"sparsifier": "topk", "min_size": 1}
    settings = {key: arguments.pop(key) for key in ("sparsifier", "scheme", "memory", "min_size") if key in arguments}
    compression = hvd.Compression.sparse(density=density, **{**names, **settings})
    return hvd.DistributedOptimizer(
        sgd(model) if optimizer is None else optimizer, model.named_parameters(), compression, **arguments
    )


def residuals(optimizer: Any) -> torch.Tensor:
    memory = optimizer.compression_state_dict()["memory"]
    return torch.cat([arrays["residual"].reshape(-1) for _, arrays in sorted(memory.items()) if arrays])


def case_t1_density_one_equals_reference() -> None:
    model, reference = make_model(), make_model()
    train(model, wrap(model, density=1.0), batches(20))
    train_reference(reference, sgd(reference), batches(20))
    assert_equal(flat(model), flat(reference))
    assert_same_on_ranks(flat(model))


def case_t1_sparse_update_and_error_feedback_identity() -> None:
    model = make_model()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.0), density=0.1)
    local, sent = torch.zeros(0), torch.zeros(0)
    weights = [p for p in model.parameters() if p.dim() > 1]
    for step, batch in enumerate(batches(10)):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        averaged = torch.cat([p.grad.reshape(-1) for p in weights]).clone()
        if step == 0:
            assert 0 < int((averaged != 0).sum()) <= SIZE * math.ceil(0.1 * len(averaged))
        optimizer.step()
        own = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss_of(model, batch), weights)])
        local = own if step == 0 else local + own
        sent = averaged if step == 0 else sent + averaged
    names = dict(model.named_parameters())
    memory = optimizer.compression_state_dict()["memory"]
    left = torch.cat([memory[name]["residual"].reshape(-1) for name, p in names.items() if p.dim() > 1])
    assert float(left.abs().max()) > 0
    assert_equal(summed(local), sent * SIZE + summed(left), 1e-5)


def _embedding(indices: list[int], **arguments: Any) -> tuple[torch.nn.Embedding, Any]:
    torch.manual_seed(0)
    table = torch.nn.Embedding(1000, 4, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=0.1), table.named_parameters(), **arguments
    )
    table(torch.tensor(indices)).sum().backward()
    return table, optimizer


def case_t2_sparse_embedding_stays_sparse() -> None:
    table, optimizer = _embedding([1, 1, 2] if RANK == 0 else [2, 3])
    grad = table.weight.grad
    assert grad.is_sparse
    dense = grad.to_dense()
    assert_equal(dense[1], torch.full((4,), 1.0))
    assert_equal(dense[2], torch.full((4,), 1.0))
    assert_equal(dense[3], torch.full((4,), 0.5))
    assert int((dense != 0).any(1).sum()) == 3
    assert optimizer.metrics()["sparse_gradients"] == {"weight": "rows"}
    # 2 coalesced rows, padded to 8, of 1 + 4 words, one count, one census: far less than the table
    assert optimizer.metrics()["bytes_sent"] < 300 < optimizer.metrics()["bytes_dense"]
    optimizer.step()
    assert_same_on_ranks(table.weight)


def case_sparse_embeddings_beside_other_layers() -> None:
    """Of several row-sparse parameters one must not be taken for another."""
    torch.manual_seed(0)
    tables = [torch.nn.Embedding(rows, 4, sparse=True) for rows in (50, 60)]
    head = torch.nn.Linear(4, 2)
    model = torch.nn.ModuleList([*tables, head])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        words = torch.tensor([step, RANK + 1, 7])
        head(tables[0](words) + tables[1](words + 1)).square().sum().backward()
        optimizer.step()
    assert set(optimizer.metrics()["sparse_gradients"]) == {"0.weight", "1.weight"}
    for parameter in model.parameters():
        assert_same_on_ranks(parameter)


def case_t3_full_embedding_goes_dense() -> None:
    table, optimizer = _embedding(list(range(1000)))
    other, _ = _embedding(list(range(1000)), sparse_as_dense=True)
    assert optimizer.metrics()["sparse_gradients"] == {"weight": "dense"}
    assert table.weight.grad.is_sparse
    assert_equal(table.weight.grad.to_dense(), other.weight.grad.to_dense())
    assert_equal(table.weight.grad.to_dense(), torch.ones(1000, 4))


def case_t5_tiny_gradients_come_back() -> None:
    """A tiny value must not be flushed for ever. With 16-bit values on the wire: tests/unit/test_wire.py."""
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0),
        compression=hvd.Compression.sparse(density=0.25, min_size=1, sparsifier="topk"),
    )
    gradient = torch.tensor([[1e6, 1e-9], [0.0, 0.0]])
    for step in range(3):
        optimizer.zero_grad()
        (weight * (gradient if step == 0 else torch.zeros(2, 2))).sum().backward()
        optimizer.step()
        assert bool(torch.isfinite(weight).all())
    assert_equal(weight.detach() / torch.tensor([[1e6, 1e-9], [1, 1]]), torch.tensor([[-1.0, -1.0], [0, 0]]))


def case_t6_bfloat16() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model = make_model().to(dtype)
        optimizer = wrap(model)
        for x, y in batches(5):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x.to(dtype)).float(), y)
            loss.backward()
            optimizer.step()
        assert bool(torch.isfinite(loss))
        assert all(p.grad.dtype == dtype for p in model.parameters())
        assert_same_on_ranks(flat(model))
        assert residuals(optimizer).dtype == torch.float32


def case_t7_zero_grad() -> None:
    model = make_model()
    optimizer = wrap(model)
    for arguments, expected in (({"set_to_none": True}, None), ({"set_to_none": False}, 0.0), ({}, None)):
        loss_of(model, next(batches(1))).backward()
        optimizer.zero_grad(**arguments)
        for p in model.parameters():
            assert p.grad is None if expected is None else float(p.grad.abs().max()) == 0


def case_t7_zeroing_in_every_way_trains_alike() -> None:
    results = []
    for zero in ("optimizer none", "optimizer zeros", "model none", "model zeros"):
        model = make_model()
        optimizer = wrap(model)
        for batch in batches(6):
            (optimizer if zero.startswith("optimizer") else model).zero_grad(set_to_none=zero.endswith("none"))
            loss_of(model, batch).backward()
            optimizer.step()
        results.append(flat(model))
        assert optimizer.metrics()["skipped_steps"] == 0
    for other in results[1:]:
        assert torch.equal(results[0], other)


class _Custom(torch.optim.SGD):
    def __init__(self, params: Any, wd: float) -> None:
        super().__init__(params, lr=0.1, momentum=0.9, weight_decay=wd)


def case_t8_wrapping_keeps_the_object() -> None:
    model = make_model()
    optimizer = _Custom(model.parameters(), wd=0.01)
    optimizer.note = "later"
    train(model, optimizer, batches(1, seed=5))
    wrapped = wrap(model, optimizer)
    assert wrapped is optimizer
    assert isinstance(wrapped, _Custom)
    assert isinstance(wrapped, torch.optim.Optimizer)
    assert wrapped.note == "later"
    assert wrapped.defaults["lr"] == 0.1
    assert sum("momentum_buffer" in state for state in wrapped.state.values()) == 4
    assert wrap(model, optimizer) is optimizer
    with pytest.raises(ValueError, match="wrapped already"):
        wrap(model, optimizer, density=0.5)
    torch.manual_seed(1)
    new = torch.nn.Parameter(torch.randn(4, 3))
    wrapped.add_param_group({"params": new})
    assert wrapped.param_groups[1]["lr"] == 0.1
    before = new.detach().clone()
    for x, y in batches(3):
        wrapped.zero_grad()
        (loss_of(model, (x, y)) + (x[:, :4] @ new).square().mean()).backward()
        wrapped.step()
    assert float((new - before).abs().max()) > 0
    assert_same_on_ranks(new)
    assert_same_on_ranks(flat(model))
    assert type(copy.deepcopy(wrapped)) is _Custom
    wrapped.close()
    assert type(wrapped) is _Custom


def case_t9_gan() -> None:
    generator, discriminator = (
        make_model(),
        torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)),
    )
    torch.manual_seed(3)
    for p in discriminator.parameters():
        torch.nn.init.normal_(p, std=0.3)
    g = wrap(generator, sgd(generator, 0.01))
    d = wrap(discriminator, sgd(discriminator, 0.01))
    bce = torch.nn.functional.binary_cross_entropy_with_logits
    for x, y in batches(10):
        real = torch.nn.functional.one_hot(y, 3).float()
        d.zero_grad()
        bce(discriminator(real), torch.ones(16, 1)).backward()
        bce(discriminator(generator(x).detach()), torch.zeros(16, 1)).backward()
        d.step()
        g.zero_grad()
        bce(discriminator(generator(x)), torch.ones(16, 1)).backward()
        g.step()
        d.zero_grad()
    assert_same_on_ranks(flat(generator))
    assert_same_on_ranks(flat(discriminator))
    assert g.metrics()["num_exchanges"] == 10
    assert g.metrics()["skipped_steps"] == 0
    assert d.metrics()["num_exchanges"] == 30
    assert d.metrics()["skipped_steps"] == 10


def case_two_backward_passes_before_a_step_add_up() -> None:
    """Both passes are averaged and added, as under DDP, without backward_passes_per_step."""
    model, reference = make_model(), make_model()
    optimizer, plain = wrap(model, density=1.0), sgd(reference)
    for first, second in zip(batches(5), batches(5, seed=200 + RANK)):
        optimizer.zero_grad()
        loss_of(model, first).backward()
        loss_of(model, second).backward()
        optimizer.step()
        plain.zero_grad()
        (loss_of(reference, first) + loss_of(reference, second)).backward()
        for p in reference.parameters():
            p.grad = hvd.allreduce(p.grad)
        plain.step()
    assert_equal(flat(model), flat(reference))


def case_t10_rewrapping_and_schedulers() -> None:
    model = make_model()
    inner = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, 0.1)
    calls, rates, hooks = [], [], []
    inner.register_step_post_hook(lambda *_: calls.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            optimizer = wrap(model, inner)
            rates.append(optimizer.param_groups[0]["lr"])
            train(model, optimizer, batches(2))
            scheduler.step()
            hooks.append(sum(len(p._post_accumulate_grad_hooks) for p in model.parameters()))
    assert hooks == [4, 4, 4]
    assert len(calls) == 6
    assert [round(rate, 6) for rate in rates] == [0.1, 0.01, 0.001]
    assert optimizer.metrics()["num_exchanges"] == 6
    assert_same_on_ranks(flat(model))


def case_t10_a_new_optimizer_over_the_same_model() -> None:
    model = make_model()
    for _ in range(3):
        optimizer = wrap(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
        train(model, optimizer, batches(2))
        scheduler.step()
        assert optimizer.metrics()["num_exchanges"] == 2
        assert sum(len(p._post_accumulate_grad_hooks) for p in model.parameters()) == 4


def case_t11_broadcast_optimizer_state() -> None:
    model = make_model()
    for p in model[0].parameters():
        p.requires_grad_(False)
    optimizer = wrap(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    before = flat(model)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert torch.equal(before, flat(model))
    train(model, optimizer, batches(5))
    before, kept = flat(model), residuals(optimizer)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert torch.equal(before, flat(model))
    assert torch.equal(kept, residuals(optimizer))
    everybody = hvd.allgather(kept.reshape(1, -1))
    assert not torch.equal(everybody[0], everybody[1])
    train(model, optimizer, batches(1))
    assert_same_on_ranks(flat(model))


def case_t11_unfreezing_later() -> None:
    model = make_model()
    for p in model[0].parameters():
        p.requires_grad_(False)
    optimizer = wrap(model)
    before = flat(model[0])
    train(model, optimizer, batches(2))
    assert torch.equal(before, flat(model[0]))
    for p in model[0].parameters():
        p.requires_grad_(True)
    train(model, optimizer, batches(5))
    assert float((before - flat(model[0])).abs().max()) > 1e-4
    assert_same_on_ranks(flat(model))


def case_t12_state_resumes_bit_for_bit() -> None:
    def resume(saved: tuple[Any, Any, Any] | None, parts: dict[str, Any]) -> tuple[Any, Any]:
        model = make_model()
        momentum = 0.0 if "memory" in parts else 0.9
        optimizer = wrap(model, sgd(model, 0.1, momentum), **parts)
        if saved:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            optimizer.load_compression_state_dict(saved[2])
        return model, optimizer

    own_state = {"sparsifier": None, "scheme": "ok_topk"}
    momentum = {"sparsifier": "random_block", "memory": "momentum"}
    for choice in ({"sparsifier": "topk"}, momentum, {"sparsifier": "threshold"}, own_state):
        model, optimizer = resume(None, choice)
        data = list(batches(10))
        train(model, optimizer, data[:5])
        parts = (model.state_dict(), optimizer.state_dict(), optimizer.compression_state_dict())
        path = f"/tmp/hvd_sparse_t12_{RANK}.pt"
        torch.save(copy.deepcopy(parts), path)
        train(model, optimizer, data[5:])
        again, optimizer = resume(torch.load(path, weights_only=True), choice)
        assert optimizer.compression_state_dict()["memory"].keys() == parts[2]["memory"].keys()
        train(again, optimizer, data[5:])
        assert torch.equal(flat(model), flat(again)), choice
        assert optimizer.metrics()["num_exchanges"] == 5


def case_t13_grad_scaler() -> None:
    model, plain = make_model(), make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer, unscaled = wrap(model, grad_scaler=scaler), wrap(plain)
    for batch in batches(10):
        scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    train(plain, unscaled, batches(10))
    assert_equal(flat(model), flat(plain), 1e-4)


def case_t13_infinity_on_one_rank() -> None:
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = wrap(model, grad_scaler=scaler)
    for step, batch in enumerate(batches(5)):
        before, kept = flat(model), residuals(optimizer) if step else None
        loss = loss_of(model, batch) * (float("inf") if step == 3 and RANK == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step == 3:
            assert torch.equal(before, flat(model))
            assert torch.equal(kept, residuals(optimizer))
        else:
            assert not torch.equal(before, flat(model))
        assert scaler.get_scale() == 2.0 ** (9 if step >= 3 else 10)
        assert bool(torch.isfinite(residuals(optimizer)).all())
    assert_same_on_ranks(flat(model))
    assert optimizer.metrics()["skipped_steps"] == 1


def case_t13_a_change_of_scale_leaves_the_residual() -> None:
    model, plain = make_model(), make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer, unscaled = wrap(model, grad_scaler=scaler), wrap(plain)
    for step, batch in enumerate(batches(6)):
        scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update(2.0**9 if step == 2 else None)
        optimizer.zero_grad()
    train(plain, unscaled, batches(6))
    assert_equal(flat(model), flat(plain), 1e-4)
    assert_equal(residuals(optimizer), residuals(unscaled), 1e-4)


def case_non_finite_without_a_scaler_reaches_every_rank() -> None:
    for sparsifier in ("topk", "threshold", "random_block"):
        model = make_model()
        optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.0), sparsifier=sparsifier)
        train(model, optimizer, batches(2))
        kept = residuals(optimizer)
        optimizer.zero_grad()
        (loss_of(model, next(batches(1))) * (float("nan") if RANK == 1 else 1.0)).backward()
        assert not bool(torch.isfinite(flat_grad(model)).all())
        optimizer.step()
        assert torch.equal(kept, residuals(optimizer))


def case_t14_clipping() -> None:
    model = make_model()
    optimizer = wrap(model)
    loss_of(model, next(batches(1))).backward()
    optimizer.synchronize()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert_same_on_ranks(norm)
    assert optimizer.metrics()["num_exchanges"] == 1
    optimizer.zero_grad()
    loss_of(model, next(batches(1))).backward()
    assert_same_on_ranks(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01))
    optimizer.step()
    assert optimizer.metrics()["num_exchanges"] == 2
    assert_same_on_ranks(flat(model))


def case_t15_accumulation_with_an_early_step() -> None:
    model, reference = make_model(), make_model()
    optimizer, plain = wrap(model, density=1.0, backward_passes_per_step=4), sgd(reference)
    for number, batch in enumerate(batches(10), 1):
        loss_of(model, batch).backward()
        loss_of(reference, batch).backward()
        if number in (4, 8, 10):
            optimizer.step()
            optimizer.zero_grad()
            for p in reference.parameters():
                p.grad = hvd.allreduce(p.grad)
            plain.step()
            plain.zero_grad()
    assert optimizer.metrics()["num_exchanges"] == 3
    assert_equal(flat(model), flat(reference))


class _Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main, self.extra, self.idle = make_model(), torch.nn.Linear(8, 3), torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, use_extra: bool) -> torch.Tensor:
        return self.main(x) + self.extra(x) if use_extra else self.main(x)


def case_t18_unused_parameters() -> None:
    torch.manual_seed(0)
    model = _Branches()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1))
    idle, before = flat(model.idle), flat(model.extra)
    for step, (x, y) in enumerate(batches(10)):
        optimizer.zero_grad()
        extra = flat(model.extra)
        torch.nn.functional.cross_entropy(model(x, RANK == 0 and step != 4), y).backward()
        optimizer.step()
        if step == 4:
            assert model.extra.weight.grad is None
            assert torch.equal(extra, flat(model.extra))
    assert torch.equal(idle, flat(model.idle))
    assert not torch.equal(before, flat(model.extra))
    assert_same_on_ranks(flat(model))


def case_t19_uneven_numbers_of_batches() -> None:
    model = make_model()
    optimizer = wrap(model)
    train(model, optimizer, batches(5 if RANK == 0 else 8))
    kept = residuals(optimizer)
    last = hvd.join()
    if RANK == 0:
        assert torch.equal(kept, residuals(optimizer))
    assert last == SIZE - 1
    assert optimizer.metrics()["num_exchanges"] == 9
    assert_same_on_ranks(flat(model))
    buffers = [optimizer.state[p]["momentum_buffer"].reshape(-1) for p in model.parameters()]
    assert_same_on_ranks(torch.cat(buffers))
    train(model, optimizer, batches(2))
    assert_same_on_ranks(flat(model))


def case_t19_uneven_with_two_optimizers() -> None:
    left, right = make_model(), make_model(1)
    first, second = wrap(left), wrap(right)
    for batch in batches(3 + 2 * RANK):
        for model, optimizer in ((right, second), (left, first)):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    hvd.join()
    assert_same_on_ranks(flat(left))
    assert_same_on_ranks(flat(right))
