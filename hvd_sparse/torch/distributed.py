"""`DistributedOptimizer`: Horovod's signature, wrapped in place."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from hvd_sparse.agreement import next_prefix
from hvd_sparse.drivers.groups import check_elastic, check_host_groups, is_elastic, make_host_groups
from hvd_sparse.drivers.horovod_torch import HorovodTorch
from hvd_sparse.memories.delayed import Delayed
from hvd_sparse.records import MetricsLog, Trace, open_for_rank
from hvd_sparse.schemes.lazy import Lazy
from hvd_sparse.torch import membership
from hvd_sparse.torch.averager import Averager
from hvd_sparse.torch.delayed import DelayedAverager
from hvd_sparse.torch.elastic_state import register_handlers
from hvd_sparse.torch.factored import FactoredAverager
from hvd_sparse.torch.lazy import LazyAverager
from hvd_sparse.torch.profile import Profile
from hvd_sparse.torch.request import WrapRequest, check_request
from hvd_sparse.torch.wrapped import wrap

_log = logging.getLogger("hvd_sparse")


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: None | int | Sequence[Sequence[torch.Tensor]] = None,
    sparse_as_dense: bool = False,
    process_set: Any = hvd.global_process_set,
    *,
    grad_scaler: Any = None,
    metrics_log: Any = None,
    trace: Any = None,
    profile: Any = None,
    factors: torch.nn.Module | None = None,
) -> Any:
    """Average gradients over ranks, sparsely, before each step.

    The optimizer object itself is returned: its class becomes a subclass of what it was, so state, hooks, schedulers
    and `isinstance` stay valid. Gradients are averaged when `backward()` returns, as with PyTorch's DDP; clipping,
    GradScaler and closures need nothing special. `p.grad` are views of one buffer per bucket, which the next exchange
    overwrites.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        named_parameters: as `model.named_parameters()`; names key the saved state.
        compression: `Compression.adaptive(...)` (default: `Compression.adaptive()`), `Compression.sparse(...)` for a
            density of your own, or `Compression.none` / `.fp16` for Horovod's own optimizer wrapper.
        backward_passes_per_step: backward passes whose gradients are accumulated before an exchange.
        op: `Average` or `Sum`. Adasum needs `Compression.none`.
        gradient_predivide_factor: as in Horovod; sums are in float32, so it changes nothing here.
        num_groups: Horovod's older name of an int for `groups`.
        groups: an int: so many buckets of about equal size; lists of parameters: one bucket each.
        sparse_as_dense: gradients of `Embedding(sparse=True)` travel densely.
        process_set: ranks that average with each other.
        grad_scaler: the `torch.amp.GradScaler` in use. Residuals then hold unscaled gradients and survive a change
            of the scale; without it gradients are taken as they come.
        metrics_log: file for a JSON line per exchange, see `hvd-sparse report`. Like the next two it is rank 0's, or
            every rank's own if its name has "{rank}" in it.
        trace: file for a Chrome trace of all messages.
        profile: file for the times at which gradients become ready, see `hvd-sparse plan --trace`.
        factors: the model. Weights of its `torch.nn.Linear` layers are averaged without compression, by a gather of
            the layers' inputs and output gradients, if those are smaller than the weights in the first exchange: see
            `hvd_sparse.collectives.factors`. Where they are not, or do not make up the gradient (a layer that is used
            twice, a penalty on its weight, code of torch.compile), it travels whole. Layers keep their inputs, also
            checkpointed ones, and a copy of the gradient until the end of backward. Not with elastic training,
            `backward_passes_per_step` and the memories "momentum", "sgc" and "delayed".

    Returns:
        `optimizer`, with the further methods `synchronize`, `skip_synchronize`, `set_backward_passes_per_step`,
        `metrics`, `compression_state_dict`, `load_compression_state_dict`, `flush`, `lazy_step`, `local_weights` and
        `close`.

    Elastic training: wrap outside of the function that `hvd.elastic.run` runs. `hvd.elastic.TorchState` then keeps the
    residuals as well; after a resize survivors keep theirs, a new rank begins with none, and what a lost rank had not
    sent is lost. Not with `process_set`, nor with the collective "hierarchical".

    Raises:
        ValueError, TypeError: an argument is out of range or cannot be honoured.
        HvdSparseError: ranks wrap different models or configurations, or another rank refused; on every rank. In
            elastic training at the first exchange.
    """
    if compression in (hvd.Compression.none, hvd.Compression.fp16):
        if factors is not None:
            raise ValueError(
                f"`factors` cannot be used with compression={compression.__name__}: use Compression.sparse."
            )
        _log.info("Horovod's own DistributedOptimizer, as compression=%s asks for.", compression.__name__)
        return hvd.DistributedOptimizer(
            optimizer, named_parameters, compression, backward_passes_per_step, op, gradient_predivide_factor,
            num_groups, groups, sparse_as_dense, process_set,
        )  # fmt: skip
    if not hvd.is_initialized():
        raise ValueError("Horovod is not initialised: call hvd.init() before wrapping an optimizer.")
    if not process_set.included():
        return optimizer
    request, refusal, files = WrapRequest(), None, {}
    try:
        request = check_request(
            optimizer, named_parameters, compression, backward_passes_per_step, op, gradient_predivide_factor,
            num_groups or groups, factors,
        )  # fmt: skip
        check_elastic(process_set)
        check_host_groups(hvd, process_set, request.config.groups)
        names = {"metrics_log": metrics_log, "trace": trace, "profile": profile}
        if hasattr(optimizer, "wrap_request"):  # whose files are in use
            names = {}
        files = {name: open_for_rank(name, file, process_set.rank()) for name, file in names.items()}
    except (ValueError, TypeError) as error:
        refusal = error
    driver = HorovodTorch(next_prefix(process_set), {"global": process_set}, request.config.timeout_seconds)
    settings = request.describe()
    if is_elastic():
        membership.agree_later(driver, settings)
    elif process_set.size() > 1:
        membership.agree(driver, settings, refusal)
    if refusal is not None:
        raise refusal
    driver.process_sets = make_host_groups(hvd, process_set, request.config.groups)
    if already := getattr(optimizer, "wrap_request", None):
        if already.describe() != settings:
            raise ValueError("`optimizer` is wrapped already, with other settings. Call its close() first.")
        return optimizer
    averager, recorder = None, Profile(files["profile"], request.names) if files["profile"] else None
    if process_set.size() > 1 or is_elastic():
        kind: Any = LazyAverager if isinstance(request.config.chosen, Lazy) else Averager
        kind = DelayedAverager if isinstance(request.config.memory, Delayed) else kind
        if factors is not None:
            kind = functools.partial(FactoredAverager, model=factors)
        averager = kind(
            request.names, request.config, driver, average=op == hvd.Average, passes=request.passes,
            groups=request.groups, sparse_as_dense=sparse_as_dense, grad_scaler=grad_scaler,
        )  # fmt: skip
        membership.register(averager, optimizer)
        if files["metrics_log"]:
            averager.meter.log = MetricsLog(files["metrics_log"])
        if files["trace"]:
            driver.trace = Trace(files["trace"], process_set.rank())
    try:
        wrap(optimizer, request, averager)
    except TypeError:
        if averager:
            averager.close()
        raise
    register_handlers()
    if recorder:
        recorder.watch_our_work()
        optimizer.register_step_post_hook(lambda *_: recorder.step_taken())
    if process_set.rank() == 0:
        elements = sum(parameter.numel() for parameter in request.names)
        _log.info(
            "%s: %d ranks, %d parameters with %d elements; %s", type(optimizer).__name__, process_set.size(),
            len(request.names), elements, ", ".join(f"{k}={v}" for k, v in request.config.describe().items()),
        )  # fmt: skip
    return optimizer
