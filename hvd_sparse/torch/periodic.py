"""`PeriodicAveraging`: ranks train alone and average their models now and then. The optimizer is wrapped in place."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import horovod.torch as hvd
import torch

from hvd_sparse.agreement import next_prefix
from hvd_sparse.averaging.averager import PeriodicAverager
from hvd_sparse.averaging.settings import Settings, check_settings
from hvd_sparse.drivers.groups import check_host_groups, is_elastic, make_host_groups
from hvd_sparse.drivers.horovod_torch import HorovodTorch
from hvd_sparse.ops.torch import TorchOps
from hvd_sparse.torch import membership
from hvd_sparse.torch.elastic_state import check_elastic, register_handlers
from hvd_sparse.torch.outer import outer_for
from hvd_sparse.torch.periodic_wrapped import check_parameters, wrap
from hvd_sparse.torch.replica import TorchReplica
from hvd_sparse.torch.rounds import Rounds

_log = logging.getLogger("hvd_sparse")
_wrapped: list[weakref.ref[torch.optim.Optimizer]] = []


def PeriodicAveraging(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None = None,
    *,
    every_steps: int | None = None,
    every_seconds: float | None = None,
    warmup_steps: int = 0,
    weights: str = "uniform",
    outer: Any = None,
    optimizer_state: str = "local",
    buffers: str = "local",
    overlap: bool = False,
    sparse: Any = None,
    process_set: Any = hvd.global_process_set,
    timeout_seconds: float = 3600.0,
) -> Any:
    """Train alone, and average the models of all ranks every now and then: local SGD, DiLoCo, model aggregation.

    The optimizer object itself is returned; schedulers, hooks and `isinstance` stay valid. A round takes place inside
    `optimizer.step()`, at the first step boundary at which it is due, and leaves the same parameters on all ranks.
    These need not have equal numbers of batches: each calls `optimizer.finish()` when its own are used up. A step that
    GradScaler skips does not count. A rank whose model is not finite spoils nothing: it goes on from the mean, with new
    optimizer state.

    Traffic: 2n(P-1)/P words per round, one collective. Memory: one float32 copy of the model, and up to four during a
    round. Models are averaged in float32, whatever their dtype.
    Choose it for ranks with uneven data or speed (a partition of a graph each), and for links that are too slow for one
    exchange per step. Avoid it where every step must see all ranks' data: then `DistributedOptimizer`.

    One wrapper at a time: ranks that average two models at two times would wait for each other for ever. If several
    optimizers train one model, or several networks (a GAN's, as one ModuleList), wrap the one that steps last. Between
    rounds call nothing that all ranks must call: no `hvd.join`, no metric that is averaged, no commit.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        model: whose parameters are averaged, also those that the optimizer lacks. Equal on all ranks at the first step.
        every_steps: local steps between rounds.
        every_seconds: seconds between rounds, instead: ranks of different speed take different numbers of steps, and
            none waits longer than about one step of the slowest.
        warmup_steps: so many first steps average gradients over ranks instead (with a closure: evaluations).
        weights: of a rank in the mean: "uniform", local "steps", or "samples", which `optimizer.count_samples` counts.
            A rank without a step since the last round has weight 0.
        outer: takes the mean further. None: nothing does. `OuterSGD()`: DiLoCo. A function from parameters to a
            `torch.optim.Optimizer`, or such an optimizer of the model's parameters, new: its gradient is the last
            averaged model less the mean.
        optimizer_state: "local", "average" (floating-point tensors that exist at the first round), or "reset" after
            each round.
        buffers: "local"; "average" the floating-point ones; or all of "rank0".
        overlap: train on while a copy is averaged; progress made meanwhile is kept on top of the mean, so that models
            are equal only after `finish`. Not with elastic training.
        sparse: `Compression.sparse(...)`: send the largest entries of what changed since the last round, and keep the
            rest for later rounds. Two collectives more.
        process_set: ranks that average with each other. Not with elastic training.
        timeout_seconds: longest wait for the other ranks. A rank that is done waits for the next round of the others.

    Returns:
        `optimizer`, with the further methods `finish`, `metrics`, `stop`, `count_samples`, `flush`,
        `averaging_state_dict`, `load_averaging_state_dict`, `restart_averaging` and `close`, and the properties
        `just_averaged` and `stopped`.

    Elastic training: wrap outside of the function that `hvd.elastic.run` runs, and commit only right after a round.
    `TorchState` then keeps the anchor, the outer momentum and the counters as well. After a resize survivors keep what
    their sparse deltas still owe, and what a lost rank owed is lost, unless `optimizer.flush()` precedes the commit.

        state = hvd.elastic.TorchState(model=model, optimizer=optimizer)
        ...
        optimizer.step()
        if optimizer.just_averaged:
            state.commit()

    Raises:
        ValueError, TypeError: an argument is out of range or cannot be honoured.
        HvdSparseError: ranks have different models or settings, or another one refused; on every rank. At the first
            exchange also: ranks start from different values.

    Reference: S. U. Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019, arXiv:1805.09767; for time
    intervals J. Zhu et al., Simplifying Distributed Neural Network Training on Massive Graphs, 2023, arXiv:2305.09887,
    here without a server. `OuterSGD` names DiLoCo.

    Example:
        >>> optimizer = hvd.PeriodicAveraging(optimizer, model, every_seconds=120)              # doctest: +SKIP
        >>> for batch in batches_of_this_rank:                                                  # doctest: +SKIP
        ...     optimizer.zero_grad()
        ...     loss_of(model, batch).backward()
        ...     optimizer.step()
        >>> optimizer.finish()                                                                  # doctest: +SKIP
    """
    if not hvd.is_initialized():
        raise ValueError("Horovod is not initialised: call hvd.init() before wrapping an optimizer.")
    settings, refusal, request = Settings(), None, {}
    replica: Any = None
    outer_step: Any = None
    try:
        settings = check_settings(
            every_steps, every_seconds, warmup_steps, weights, outer, optimizer_state, buffers, overlap, sparse,
            timeout_seconds,
        )  # fmt: skip
        _check_elastic(process_set, settings)
        check_host_groups(hvd, process_set, settings.sparse.groups if settings.sparse else ())
        replica = _replica(optimizer, model, buffers)
        outer_step = outer_for(outer, list(replica.names))
        words = outer_step.describe() if outer_step else "mean"
        request = {**settings.describe(), "outer": words, "parameters": replica.describe()}
    except (ValueError, TypeError) as error:
        refusal = error
    if not process_set.included():
        if refusal is not None:
            raise refusal
        wrap(optimizer, None, request)
        return optimizer
    driver = HorovodTorch(next_prefix(process_set), {"global": process_set}, settings.timeout_seconds, patient=True)
    if process_set.size() > 1 and not is_elastic():
        membership.agree(driver, request, refusal)
    if refusal is not None:
        raise refusal
    rounds = None
    if process_set.size() > 1 or is_elastic():
        driver.process_sets = make_host_groups(hvd, process_set, settings.sparse.groups if settings.sparse else ())
        averager = PeriodicAverager(TorchOps(), replica, settings, outer=outer_step)
        rounds = Rounds(optimizer, averager, driver, lambda: membership.agree(driver, request, None))
    wrap(optimizer, rounds, request)
    _wrapped.append(weakref.ref(optimizer))
    register_handlers()
    if process_set.rank() == 0:
        shown = ", ".join(f"{name}={value}" for name, value in request.items() if name != "parameters")
        _log.info("%s: %d ranks average models; %s", type(optimizer).__name__, process_set.size(), shown)
    return optimizer


def _replica(optimizer: Any, model: Any, buffers: str) -> TorchReplica:
    """The model, checked."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"`optimizer` must be a torch.optim.Optimizer. Received: {type(optimizer).__name__}.")
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"`model` must be the torch.nn.Module whose parameters are averaged. Received: model={model!r}."
        )
    if hasattr(optimizer, "averaging_request") and optimizer.averaging_request is not None:
        raise ValueError("`optimizer` is wrapped already. Call its close() first.")
    if hasattr(optimizer, "set_backward_passes_per_step"):
        raise ValueError("`optimizer` must be a plain one: gradients that are averaged leave nothing to average.")
    _check_alone()
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.SyncBatchNorm, hvd.SyncBatchNorm)):
            raise ValueError(
                f"`model` must have no SyncBatchNorm: ranks take different numbers of steps, and would wait for each "
                f"other for ever. Use BatchNorm, and choose `buffers`. Received: one at {name!r}."
            )
    replica = TorchReplica(model, optimizer, buffers)
    if not replica.names:
        raise ValueError("`model` must have parameters. Received: a model without any.")
    for parameter, name in replica.names.items():
        if parameter.is_meta or not parameter.is_floating_point():
            raise ValueError(
                f"Parameter {name!r} must be of a real floating-point dtype, on a device. "
                f"Received: {parameter.dtype} on {parameter.device}."
            )
    check_parameters(optimizer, replica)
    return replica


def _check_alone() -> None:
    def alive() -> list[Any]:
        return [ref for ref in _wrapped if getattr(ref(), "averaging_request", None)]

    if alive():
        gc.collect()  # so that what a garbage collector has not done yet makes no difference
    _wrapped[:] = alive()
    if _wrapped:
        raise ValueError(
            "`optimizer` must be the only one whose model is averaged: ranks that average two models at two times "
            "would wait for each other for ever. Call close() of the other, or give `model` all that is to be averaged."
        )


def _check_elastic(process_set: Any, settings: Settings) -> None:
    check_elastic(process_set)
    if is_elastic() and settings.overlap:
        raise ValueError("`overlap` cannot be used with elastic training: nothing to commit is equal on all ranks.")
