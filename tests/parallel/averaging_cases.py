"""Periodic averaging on torch: T19, T20, and what `PeriodicAveraging` promises. For 3 ranks."""

from __future__ import annotations

import copy
import io
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import horovod.torch as horovod
import pytest
import torch
from scenario import Batch, Model, assert_equal, assert_same_on_ranks, batches, flat, loss_of, make_model, sgd, summed
from scenario import train as train_alone
from scenario import train_reference as train_with_averaged_gradients

import hvd_sparse.torch as hvd

PAIR, SINGLE = hvd.ProcessSet([0, 1]), hvd.ProcessSet([2])
hvd.init(process_sets=[PAIR, SINGLE])
RANK, SIZE = hvd.rank(), hvd.size()
_open: list[Any] = []


def wrap(model: Model, optimizer: Any = None, **settings: Any) -> Any:
    """As a user would; the wrapper of the case before is closed."""
    for old in _open:
        if hasattr(old, "close"):
            old.close()
    _open[:] = [hvd.PeriodicAveraging(sgd(model) if optimizer is None else optimizer, model, **settings)]
    return _open[0]


def train(model: Model, optimizer: Any, data: Iterable[Batch], finish: bool = True) -> list[torch.Tensor]:
    """The usual loop; the models right after each round."""
    rounds = []
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        if optimizer.just_averaged:
            rounds.append(flat(model))
    if finish:
        optimizer.finish()
    return rounds


def train_reference(model: Model, optimizer: Any, every: int, then: Callable[[], None] = lambda: None) -> None:
    """Local SGD by Horovod's allreduce, for 12 batches."""
    for step, batch in enumerate(batches(12), 1):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        if step % every == 0:
            for name, p in model.named_parameters():
                p.data.copy_(horovod.allreduce(p.data, op=horovod.Average, name=f"reference.{name}"))
            then()


def differs_on_ranks(tensor: torch.Tensor) -> bool:
    gathered = horovod.allgather(tensor.detach().reshape(1, -1), name="differs")
    return not torch.equal(gathered[0], gathered[1])


def case_every_steps_is_local_sgd() -> None:
    model, reference = make_model(), make_model()
    optimizer = wrap(model, every_steps=4)
    rounds = train(model, optimizer, batches(11), finish=False)
    assert differs_on_ranks(flat(model)), "between two rounds"
    rounds += train(model, optimizer, [list(batches(12))[11]])
    train_reference(reference, sgd(reference), 4)
    assert_equal(flat(model), flat(reference))
    assert len(rounds) == 3
    for after in rounds:
        assert_same_on_ranks(after)
    metrics = optimizer.metrics()
    assert (metrics["num_steps"], metrics["num_rounds"]) == (12, 4), "and that of finish"
    message = 4 * (sum(p.numel() for p in model.parameters()) + 6)
    digests = 2 * 4 * 4 * (SIZE - 1) / SIZE
    assert metrics["bytes_sent"] == int(digests + 4 * 2 * message * (SIZE - 1) / SIZE)
    assert metrics["waiting_seconds"] > 0
    assert metrics["reason"] == "every 4 steps"


def case_t20_warmup_and_a_skipped_step() -> None:
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = wrap(model, every_steps=4, warmup_steps=2)
    after_step, rounds = [], []
    for step, batch in enumerate(batches(14)):
        optimizer.zero_grad()
        loss = loss_of(model, batch) * (float("inf") if step == 7 and RANK == 1 else 1.0)
        scaler.scale(loss).backward()
        if step == 7 and RANK == 1:  # nothing of this step enters a round
            before = flat(model)
        scaler.step(optimizer)
        scaler.update()
        if step == 7 and RANK == 1:
            assert torch.equal(before, flat(model))
        after_step.append(flat(model))
        if optimizer.just_averaged:
            rounds.append(step)
    assert rounds == ([5, 10] if RANK == 1 else [5, 9, 13])
    assert optimizer.metrics()["num_steps"] == (13 if RANK == 1 else 14)
    saved = optimizer.averaging_state_dict()["schedule"]
    assert (saved["num_warmup"], saved["num_steps"]) == (2, 13 if RANK == 1 else 14)
    optimizer.finish()
    assert_same_on_ranks(flat(model))
    for step in (0, 1, 5):
        assert_same_on_ranks(after_step[step])
    assert_same_on_ranks(after_step[rounds[1]])
    assert differs_on_ranks(after_step[3])


def case_steps_that_a_fused_optimizer_skips_do_not_count() -> None:
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = wrap(model, torch.optim.AdamW(model.parameters(), fused=True), every_steps=2, warmup_steps=1)
    for step, batch in enumerate(batches(5)):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch) * (float("inf") if step == 2 * RANK else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.finish()
    assert optimizer.metrics()["num_steps"] == 4
    assert_same_on_ranks(flat(model))


def case_warmup_equals_averaged_gradients() -> None:
    model, reference = make_model(), make_model()
    data = list(batches(6))
    optimizer = wrap(model, every_steps=100, warmup_steps=4)
    train(model, optimizer, data[:4], finish=False)
    train_with_averaged_gradients(reference, sgd(reference), iter(data[:4]))
    assert_equal(flat(model), flat(reference))
    assert_same_on_ranks(flat(model))
    train(model, optimizer, data[4:], finish=False)
    assert differs_on_ranks(flat(model)), "the warm-up is over"
    optimizer.finish()
    assert_same_on_ranks(flat(model))


def case_t19_uneven_numbers_of_batches() -> None:
    for settings in ({}, {"warmup_steps": 7}, {"warmup_steps": 100}, {"overlap": True}):
        model = make_model()
        optimizer = wrap(model, every_steps=2, **settings)
        train(model, optimizer, batches((5, 8, 0)[RANK]))
        assert_same_on_ranks(flat(model))
        assert_equal(summed(flat(model)) / SIZE, flat(model))
        assert differs_from_start(model)
        assert optimizer.metrics()["num_steps"] == (5, 8, 0)[RANK]


def differs_from_start(model: Model) -> bool:
    return bool((flat(model) - flat(make_model())).abs().max() > 1e-3)


def case_a_rank_without_data_does_not_count() -> None:
    """After the first round only rank 0 takes steps, so that its model is the mean."""
    model = make_model()
    optimizer = wrap(model, every_steps=3)
    rounds = train(model, optimizer, batches((9, 3, 0)[RANK]))
    assert_same_on_ranks(flat(model))
    if RANK == 0:
        alone, data = make_model(), list(batches(9))
        plain = sgd(alone)
        train_alone(alone, plain, iter(data[:3]))
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(rounds[0], alone.parameters())
        train_alone(alone, plain, iter(data[3:]))
        assert_equal(flat(alone), flat(model))


def case_every_seconds_with_a_slow_rank() -> None:
    model = make_model()
    every, step_seconds = 0.25, (0.005, 0.005, 0.04)[RANK]
    optimizer = wrap(model, every_seconds=every, weights="steps")
    waits, end = [], time.monotonic() + 1.6
    for batch in batches(10**6):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        time.sleep(step_seconds)
        optimizer.step()
        if optimizer.just_averaged:
            waits.append(optimizer.metrics()["last_waiting_seconds"])
        if time.monotonic() > end:
            break
    optimizer.finish()
    metrics = optimizer.metrics()
    assert_same_on_ranks(flat(model))
    rounds = horovod.allgather(torch.tensor([metrics["num_rounds"]]), name="rounds").tolist()
    assert len(set(rounds)) == 1, rounds
    assert 3 <= rounds[0] <= 9
    steps = horovod.allgather(torch.tensor([metrics["num_steps"]]), name="steps").tolist()
    assert min(steps[:2]) > 2 * steps[2], steps
    median = sorted(waits[1:])[len(waits[1:]) // 2]
    assert median < 0.1, f"at most a step of the slowest rank, but for this machine's own pauses: {waits}"


def case_a_model_that_is_not_finite_gets_the_mean() -> None:
    for settings in ({}, {"sparse": hvd.Compression.sparse(0.3, sparsifier="topk")}, {"overlap": True}):
        model = make_model()
        optimizer = wrap(model, every_steps=3, **settings)
        for step, batch in enumerate(batches(9)):
            optimizer.zero_grad()
            (loss_of(model, batch) * (float("nan") if step == 4 and RANK == 1 else 1.0)).backward()
            optimizer.step()
            if optimizer.just_averaged and not settings.get("overlap"):
                assert bool(flat(model).isfinite().all())
        optimizer.finish()
        assert bool(flat(model).isfinite().all())
        assert optimizer.rounds.averager.last.num_finite == SIZE, "with new momentum"
        assert_same_on_ranks(flat(model))
        assert differs_from_start(model)


OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def case_outer_lr_one_is_the_plain_mean_bit_for_bit() -> None:
    choices: list[Callable[[Model], Any]] = [
        lambda model: None,
        lambda model: hvd.OuterSGD(1, momentum=0),
        lambda model: lambda parameters: torch.optim.SGD(parameters, lr=1),
        lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
    ]
    found = []
    for choice in choices:
        model = make_model()
        train(model, wrap(model, every_steps=3, outer=choice(model)), batches(10))
        found.append(flat(model))
    assert all(torch.equal(found[0], other) for other in found[1:])


def case_diloco() -> None:
    reference = make_model()
    anchor = [p.detach().clone() for p in reference.parameters()]
    outer = torch.optim.SGD([torch.nn.Parameter(p) for p in anchor], **OUTER)

    def step_outwards() -> None:
        for kept, p in zip(outer.param_groups[0]["params"], reference.parameters()):
            kept.grad = kept.detach() - p.detach()
        outer.step()
        for kept, p in zip(outer.param_groups[0]["params"], reference.parameters()):
            p.data.copy_(kept)

    train_reference(reference, sgd(reference), 4, step_outwards)
    choices: list[Callable[[Model], Any]] = [
        lambda model: hvd.OuterSGD(**OUTER),
        lambda model: lambda parameters: torch.optim.SGD(parameters, **OUTER),
        lambda model: torch.optim.SGD(model.parameters(), **OUTER),
    ]
    for choice in choices:
        model = make_model()
        rounds = train(model, wrap(model, every_steps=4, outer=choice(model)), batches(12), finish=False)
        assert_equal(rounds[-1], flat(reference))
        assert_same_on_ranks(rounds[-1])


def case_sparse_deltas_conserve() -> None:
    model = make_model()
    optimizer = wrap(model, every_steps=2, sparse=hvd.Compression.sparse(0.1, sparsifier="topk"))
    anchor = flat(model)
    owed = torch.zeros_like(anchor)
    for step, batch in enumerate(batches(8)):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if step % 2 == 0:
            optimizer.step()
            continue
        before_round = _after_plain_step(model, optimizer)
        optimizer.step()
        kept = optimizer.averaging_state_dict()["residual"]["memory"]["residual"]
        accumulated = summed((anchor - before_round) / SIZE + owed)
        assert_equal(accumulated, (anchor - flat(model)) + summed(kept), 1e-5)
        assert 0 < int((anchor != flat(model)).sum()) < len(anchor) / 2
        anchor, owed = flat(model), kept
        assert_same_on_ranks(anchor)
    assert optimizer.metrics()["residual_norm"] > 0
    if RANK == 0:
        optimizer.zero_grad()
    optimizer.flush()
    assert optimizer.metrics()["residual_norm"] == 0
    assert_equal(flat(model), anchor - summed(owed), 1e-5)
    train(model, optimizer, batches(3))
    assert optimizer.metrics()["residual_norm"] == 0, "finish sends everything"
    assert_same_on_ranks(flat(model))


def _after_plain_step(model: Model, optimizer: Any) -> torch.Tensor:
    """What the step would make of the model, without a round."""
    twin = copy.deepcopy(model)
    plain = sgd(twin)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(twin.parameters(), model.parameters()):
        p.grad = q.grad.clone()
    plain.step()
    return flat(twin)


def case_overlap_keeps_what_is_done_meanwhile() -> None:
    model = make_model()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=1.0), every_steps=2, overlap=True)
    taken = torch.zeros_like(flat(model))
    start = flat(model)
    for step in range(7):
        move = torch.full_like(start, float(RANK + 1) * 2.0**-step)
        torch.nn.utils.vector_to_parameters(move, [p.grad for p in _with_grads(model)])
        optimizer.step()
        taken += move
        time.sleep(0.02)
    assert optimizer.metrics()["num_rounds"] >= 2
    optimizer.finish()
    assert_same_on_ranks(flat(model))
    assert_equal(flat(model), start - summed(taken) / SIZE, 1e-5)


def _with_grads(model: Model) -> list[Any]:
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return list(model.parameters())


def _batch_norm_model() -> Model:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3))


def case_buffers() -> None:
    for policy in ("local", "average", "rank0"):
        model = _batch_norm_model()
        norm = model[1]
        optimizer = wrap(model, every_steps=2, buffers=policy, weights="steps")
        train(model, optimizer, batches(1), finish=False)
        local = norm.running_mean.clone()
        train(model, optimizer, batches(3 if RANK else 2, seed=RANK), finish=False)
        optimizer.finish()
        assert differs_on_ranks(local)
        assert differs_on_ranks(norm.running_mean) == (policy == "local"), policy
        counted = (4 if RANK else 3) if policy != "rank0" else 3
        assert int(norm.num_batches_tracked) == counted, policy
        assert_same_on_ranks(flat(model))


def case_optimizer_state() -> None:
    for policy in ("local", "average", "reset"):
        model = make_model()
        optimizer = wrap(model, torch.optim.Adam(model.parameters()), every_steps=3, optimizer_state=policy)
        train(model, optimizer, batches((3, 3, 0)[RANK]), finish=False)
        if RANK == 2:
            optimizer.finish()
        else:
            assert optimizer.just_averaged
        state = [optimizer.state.get(p, {}) for p in model.parameters()]
        if policy == "reset":
            assert not any(state)
        if RANK < 2:
            optimizer.finish()
        moments = torch.cat([s["exp_avg"].reshape(-1) if s else torch.zeros(0) for s in state])
        if policy == "average":
            assert_same_on_ranks(moments)
            assert float(state[0]["step"]) == 3
        elif policy == "local":
            assert len(moments) == (0 if RANK == 2 else len(flat(model)))
        train(model, optimizer, batches(2))


def case_state_dict_resumes_bit_for_bit() -> None:
    settings = {"every_steps": 3, "outer": hvd.OuterSGD(), "warmup_steps": 1}
    sparse = hvd.Compression.sparse(0.2, sparsifier="topk")
    for more in ({}, {"sparse": sparse}, {"outer": lambda p: torch.optim.SGD(p, **OUTER)}):
        data = list(batches(12))
        model = make_model()
        optimizer = wrap(model, **{**settings, **more})
        train(model, optimizer, data[:8], finish=False)
        file = io.BytesIO()
        states = [model.state_dict(), optimizer.state_dict(), optimizer.averaging_state_dict()]
        torch.save(states, file)
        train(model, optimizer, data[8:])
        num_rounds = optimizer.metrics()["num_rounds"]
        other = make_model(seed=7)
        loaded = wrap(other, **{**settings, **more})
        file.seek(0)
        model_state, optimizer_state, averaging_state = torch.load(file, weights_only=True)
        other.load_state_dict(model_state)
        loaded.load_state_dict(optimizer_state)
        loaded.load_averaging_state_dict(averaging_state)
        train(other, loaded, data[8:])
        assert torch.equal(flat(other), flat(model))
        assert loaded.metrics()["num_steps"] == 12
        assert loaded.metrics()["num_rounds"] == num_rounds > 3


def case_h_one_is_gradient_averaging() -> None:
    model, reference = make_model(), make_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, wrap(model, plain, every_steps=1), batches(8))
    train_with_averaged_gradients(reference, torch.optim.SGD(reference.parameters(), lr=0.1), batches(8))
    assert_equal(flat(model), flat(reference))


def _closure(model: Model, optimizer: Any, batch: Batch) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    return closure


def case_closures() -> None:
    makers: list[Callable[[Model], Any]] = [sgd, lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3)]
    for make in makers:
        model, reference = make_model(), make_model()
        optimizer = wrap(model, make(model), every_steps=2, warmup_steps=2)
        for number, batch in enumerate(batches(6)):
            closure = _closure(model, optimizer, batch)
            loss = optimizer.step(closure) if number % 2 else optimizer.step(closure=closure)
            assert float(loss.detach()) > 0
            if number == 1 and make is sgd:
                train_with_averaged_gradients(reference, sgd(reference), batches(2))
                assert_equal(flat(model), flat(reference))
        optimizer.finish()
        assert_same_on_ranks(flat(model))
        assert optimizer.metrics()["num_steps"] == 6
        assert optimizer.metrics()["num_rounds"] >= 3


def case_in_place() -> None:
    model = make_model()
    plain = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 2, 0.1)
    calls: list[int] = []
    plain.register_step_post_hook(lambda *_: calls.append(1))
    kind = type(plain)
    optimizer = wrap(model, plain, every_steps=2)
    assert optimizer is plain
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(copy.deepcopy(optimizer)) is kind
    for batch in batches(4):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)
    assert len(calls) == 4
    assert optimizer.metrics()["num_rounds"] == 2
    assert_same_on_ranks(flat(model))
    optimizer.close()
    assert type(optimizer) is kind
    train_alone(model, optimizer, batches(4))
    assert differs_on_ranks(flat(model)), "closed"


def case_half_models_and_row_sparse_gradients() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        model = make_model().to(dtype)
        optimizer = wrap(model, every_steps=2, warmup_steps=1)
        for x, y in batches(5):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x.to(dtype)).float(), y).backward()
            optimizer.step()
        optimizer.finish()
        assert all(p.dtype == dtype for p in model.parameters())
        assert_same_on_ranks(flat(model))
    torch.manual_seed(0)
    table = torch.nn.Embedding(20, 4, sparse=True)
    optimizer = wrap(table, torch.optim.SGD(table.parameters(), lr=0.1), every_steps=2, warmup_steps=1)
    for _ in range(4):
        optimizer.zero_grad()
        table(torch.tensor([1, RANK + 2])).sum().backward()
        assert table.weight.grad.is_sparse
        optimizer.step()
    optimizer.finish()
    assert_same_on_ranks(table.weight)


def case_weights_by_samples() -> None:
    model = make_model()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=1.0), every_steps=1, weights="samples")
    start = flat(model)
    torch.nn.utils.vector_to_parameters(torch.full_like(start, RANK), [p.grad for p in _with_grads(model)])
    optimizer.count_samples(10 * (RANK + 1))
    optimizer.step()
    expected = sum(10 * (r + 1) * r for r in range(SIZE)) / sum(10 * (r + 1) for r in range(SIZE))
    assert_equal(flat(model), start - expected)
    with pytest.raises(ValueError, match="call optimizer"):
        optimizer.step()


def case_one_rank_stops_all() -> None:
    model = make_model()
    optimizer = wrap(model, every_steps=2)
    for number, batch in enumerate(batches(100)):
        if optimizer.stopped:
            break
        if number == 4 and RANK == 1:
            optimizer.stop()
        train(model, optimizer, [batch], finish=False)
    assert number == 6
    train(model, optimizer, batches(RANK), finish=False)  # who goes on anyway waits for nobody, and is not heard
    optimizer.finish()
    assert_same_on_ranks(flat(model))
    assert not optimizer.stopped
    train(model, optimizer, batches(2))
    assert optimizer.metrics()["num_rounds"] == 5, "another run"
    model = make_model()
    optimizer = wrap(model, every_steps=2, warmup_steps=5)
    if RANK == 1:
        optimizer.stop()
    train(model, optimizer, batches(1))
    assert_same_on_ranks(flat(model))
    assert differs_from_start(model)


def case_process_set() -> None:
    model = make_model()
    optimizer = wrap(model, every_steps=2, process_set=PAIR)
    train(model, optimizer, batches(5))
    assert optimizer.metrics()["num_rounds"] == (0 if RANK == 2 else 3)
    gathered = horovod.allgather(flat(model).reshape(1, -1), name="pair")
    assert torch.equal(gathered[0], gathered[1])
    assert not torch.equal(gathered[0], gathered[2])


def case_one_rank_is_the_identity() -> None:
    model, plain = make_model(), make_model()
    settings = {"outer": hvd.OuterSGD(), "warmup_steps": 1, "optimizer_state": "reset", "process_set": SINGLE}
    optimizer = wrap(model, every_steps=2, **settings)
    train(model, optimizer, batches(5))
    train_alone(plain, sgd(plain), batches(5))
    assert torch.equal(flat(model), flat(plain))
    assert optimizer.metrics()["reason"] == "one rank: nothing to average"
    assert optimizer.averaging_state_dict() == {}
    assert not optimizer.just_averaged
    assert not optimizer.stopped


def refuses(match: str, error: type[Exception] = ValueError, model: Any = None, **settings: Any) -> None:
    model = make_model() if model is None else model
    with pytest.raises(error, match=match):
        wrap(model, sgd(model), **settings)


def case_errors_of_all_ranks() -> None:
    refuses("`every_steps` must be given, or `every_seconds`, and not both", every_steps=1, every_seconds=1)
    refuses("`every_steps` must be given, or `every_seconds`, and not both")
    refuses("`weights` must be one of 'uniform', 'steps', 'samples'", every_steps=1, weights="rows")
    refuses("`model` must have no SyncBatchNorm", every_steps=1, model=torch.nn.Sequential(hvd.SyncBatchNorm(3)))
    refuses("`model` must have no SyncBatchNorm", every_steps=1, model=torch.nn.SyncBatchNorm(3))
    refuses("`outer` must be OuterSGD", TypeError, every_steps=1, outer=0.7)
    refuses("`outer` must be a new optimizer", every_steps=1, outer=sgd(make_model()))
    with pytest.raises(TypeError, match=r"`model` must be the torch\.nn\.Module"):
        hvd.PeriodicAveraging(sgd(make_model()), every_steps=1)
    with pytest.raises(ValueError, match="`model` must have every parameter of the optimizer"):
        hvd.PeriodicAveraging(sgd(make_model()), make_model(), every_steps=1)
    model = make_model()
    optimizer = wrap(model, every_steps=1)
    with pytest.raises(ValueError, match="wrapped already"):
        hvd.PeriodicAveraging(optimizer, model, every_steps=1)
    other = make_model()
    with pytest.raises(ValueError, match="`optimizer` must be the only one"):
        hvd.PeriodicAveraging(sgd(other), other, every_steps=1)
    both = hvd.DistributedOptimizer(sgd(other), other.named_parameters())
    optimizer.close()
    with pytest.raises(ValueError, match="`optimizer` must be a plain one"):
        hvd.PeriodicAveraging(both, other, every_steps=1)
    both.close()


def case_errors_of_one_rank_reach_all() -> None:
    mine: dict[str, Any] = {"weights": "rows"} if RANK == 1 else {}
    if RANK == 1:
        refuses("`weights` must be one of", every_steps=1, **mine)
    else:
        refuses("rank 1: `weights` must be one of", hvd.HvdSparseError, every_steps=1)
    refuses("interval: rank 0", hvd.HvdSparseError, every_steps=1 + RANK)
    refuses("outer: rank 0", hvd.HvdSparseError, every_steps=1, outer=hvd.OuterSGD(lr=1 + RANK))
    model = torch.nn.Linear(8, 3 + RANK)
    refuses(r"parameter bias: rank 0 .*\[3\]", hvd.HvdSparseError, every_steps=1, model=model)
    model = make_model(seed=RANK)
    with pytest.raises(hvd.HvdSparseError, match="Ranks start from different models"):
        train(model, wrap(model, every_steps=2), batches(2))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = wrap(model, every_steps=2)
    train(model, optimizer, batches(2))
    assert_same_on_ranks(flat(model))


def case_elastic_state() -> None:
    os.environ["HOROVOD_ELASTIC"] = "1"
    try:
        refuses("`process_set` cannot be used with elastic", every_steps=1, process_set=PAIR)
        refuses("`overlap` cannot be used with elastic", every_steps=1, overlap=True)
        if PAIR.included():
            with pytest.raises(ValueError, match="`process_set` cannot be used with elastic"):
                hvd.DistributedOptimizer(sgd(make_model()), process_set=PAIR)
        model = make_model(seed=RANK)
        sparse = hvd.Compression.sparse(0.2, sparsifier="topk")
        optimizer = wrap(model, every_steps=2, outer=hvd.OuterSGD(), sparse=sparse)
    finally:
        del os.environ["HOROVOD_ELASTIC"]
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
    state.sync()  # a new rank has another model
    assert_same_on_ranks(flat(model))
    train(model, optimizer, batches(4), finish=False)
    assert optimizer.just_averaged
    state.batch = 4
    state.commit()
    committed, owed = flat(model), optimizer.metrics()["residual_norm"]
    velocity = optimizer.averaging_state_dict()["outer"]["velocity"]
    train(model, optimizer, batches(3), finish=False)
    state.restore()  # as after the death of a rank
    state.sync()
    assert torch.equal(flat(model), committed)
    assert state.batch == 4
    assert optimizer.metrics()["residual_norm"] == owed > 0
    assert torch.equal(optimizer.averaging_state_dict()["outer"]["velocity"], velocity)
    train(model, optimizer, batches(2), finish=False)
    optimizer.flush()
    assert optimizer.metrics()["residual_norm"] == 0
    state.commit()
    train(model, optimizer, batches(1), finish=False)
    with pytest.raises(ValueError, match="right after a round"):
        state.commit()
    optimizer.finish()
    assert_same_on_ranks(flat(model))
    assert optimizer.metrics()["num_rounds"] >= 4
