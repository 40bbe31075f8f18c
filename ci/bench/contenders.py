"""Who takes part in the speed benchmarks: every way to average gradients, by name.

Two families, since Horovod's background thread must not take time from PyTorch's DDP: each has processes of its own.
The methods of this package follow from its registry. Their contenders are called `method@density`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

import torch
from workloads import Batch, Workload

from hvd_sparse import registry
from hvd_sparse.config import Config, adaptive_config, sparse_config

MEMORY = "momentum"  # of every method that names no other, where the training has a momentum


def registered() -> dict[str, dict[str, Any]]:
    """Every method that the registry's names make: name -> how it differs from the default, for Compression.sparse.

    A collective takes part with the default sparsifier, any other sparsifier with the collective that suits it, a
    scheme as it is, and a memory that is not `MEMORY` with the default of everything else.
    """
    default, kinds = sparse_config(), registry.METHODS
    sparsifier, collective = (registry.name_of(kind, getattr(default, kind)) for kind in ("sparsifier", "collective"))
    suited = [name for name in kinds["collective"] if not _class("collective", name).needs_shared_indices]
    return {
        **{name: {"collective": name} for name in suited},
        **{name: {"sparsifier": name} for name in kinds["sparsifier"] if name != sparsifier},
        # `sparse` is all of the above, `dense` what everything is compared with.
        **{name: {"scheme": name} for name in kinds["scheme"] if name not in ("sparse", "dense")},
        **{f"{collective}-{name}": {"memory": name} for name in kinds["memory"] if name != MEMORY},
    }


def _class(kind: str, name: str) -> Any:
    return registry.method_class(kind, name)


# Keyword arguments of Compression.sparse.
METHODS: dict[str, dict[str, Any]] = {
    **registered(),
    "owner_reduce-fp16": {"collective": "owner_reduce", "wire": "fp16"},
    "owner_reduce-compact": {"collective": "owner_reduce", "wire": "compact"},
}


def config_of(name: str, momentum: float = 0.0) -> Config:
    """How the contender `method@density` exchanges gradients in a training with this momentum."""
    method, _, density = name.partition("@")
    return sparse_config(float(density), **with_memory(METHODS[method], momentum))


def with_memory(arguments: dict[str, Any], momentum: float) -> dict[str, Any]:
    """The arguments of Compression.sparse in a training with this momentum."""
    return {**arguments, "memory": _memory(arguments.get("memory", MEMORY), momentum)}


def _memory(name: str, momentum: float) -> Any:
    """The memory of this name. One that applies a momentum, itself or by another memory, gets that of the training."""
    if name == MEMORY and not momentum:
        return registry.create("memory", "residual")
    takes = signature(_class("memory", name)).parameters
    if "memory" in takes:
        return registry.create("memory", name, memory=_memory(MEMORY, momentum))
    return registry.create("memory", name, **({"momentum": momentum} if "momentum" in takes else {}))


def conserves(name: str) -> bool:
    """Whether nothing of a gradient is lost: it is applied, or a memory has it. Parts that lose something say so."""
    config = config_of(name)
    return bool(config.memory.keys) and bool(getattr(config.scheme(), "conserves", True))


def usual(method: str, density: float) -> str:
    """The contender of this method where others have this density: ten times it for one that is blind to values."""
    blind = getattr(sparse_config(**METHODS[method]).sparsifier, "blind", False)
    return f"{method}@{min(1.0, 10 * density) if blind else density:g}"


class Trainer:
    """A model in training.

    Args:
        workload: what it is.
        model: the plain model, to evaluate.
        optimizer: what steps.
        forward: the model that the loss is taken of, if it is a wrapper.
        late: an exchange may outlast its step; `finish` applies the last one.
    """

    def __init__(
        self,
        workload: Workload,
        model: torch.nn.Module,
        optimizer: Any,
        forward: Callable[..., Any] | None = None,
        late: bool = False,
    ) -> None:
        self.workload = workload
        self.late = late
        self.model = model
        self.forward = forward or model
        self.optimizer = optimizer
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, workload.factor)

    def step(self, batch: Batch) -> torch.Tensor:
        """Train on one batch."""
        self.optimizer.zero_grad()
        loss = self.workload.loss(self.forward, batch)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()

    def finish(self) -> None:
        """Apply what is still in flight, on all ranks alike: before an evaluation, and before others are timed."""
        if self.late:
            self.optimizer.flush()

    def close(self) -> None:
        """Stop averaging, so that nothing holds on to the model. `finish` comes first."""
        if hasattr(self.optimizer, "close"):
            self.optimizer.close()

    def counted_bytes(self) -> float | None:
        """Bytes per step that this rank has sent, where the optimizer says so."""
        if not hasattr(self.optimizer, "metrics"):
            return None
        metrics = self.optimizer.metrics()
        return float(metrics["bytes_sent"] / max(1, metrics["num_exchanges"]))

    def measuring_seconds(self) -> float:
        """That an adaptive optimizer has spent on measuring and deciding so far."""
        metrics = self.optimizer.metrics() if hasattr(self.optimizer, "metrics") else {}
        return float(metrics.get("measuring_seconds") or 0.0)


def make(name: str, workload: Workload) -> Trainer:
    """The trainer of a contender; in a process of its family, whose group is up."""
    model = workload.make_model()
    if name in _SPECIAL:
        _, wrap = _SPECIAL[name]
        return wrap(name, workload, model)
    return _sparse(name, workload, model)


def _sgd(workload: Workload, model: torch.nn.Module, momentum: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=workload.learning_rate, momentum=momentum)


def _named(name: str, model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """A tensor that is known by this name already, with another type, would throw the other out of Horovod's cache."""
    return [(f"{name}.{parameter}", value) for parameter, value in model.named_parameters()]


def _alone(name: str, workload: Workload, model: torch.nn.Module) -> Trainer:
    return Trainer(workload, model, _sgd(workload, model, workload.momentum))


def _horovod(name: str, workload: Workload, model: torch.nn.Module) -> Trainer:
    import horovod.torch as hvd

    compression = hvd.Compression.fp16 if name.endswith("fp16") else hvd.Compression.none
    optimizer = _sgd(workload, model, workload.momentum)
    return Trainer(workload, model, hvd.DistributedOptimizer(optimizer, _named(name, model), compression))


def _sparse(name: str, workload: Workload, model: torch.nn.Module) -> Trainer:
    """Where the memory applies the momentum, the optimizer must not."""
    import hvd_sparse.torch as hvd

    method, _, density = name.partition("@")
    arguments = with_memory(METHODS[method] if density else {}, workload.momentum)
    memory = arguments["memory"]
    if density:
        compression = hvd.Compression.sparse(float(density), **arguments)
    else:
        compression = hvd.Compression.adaptive(**arguments)
    optimizer = _sgd(workload, model, 0.0 if getattr(memory, "momentum", 0.0) else workload.momentum)
    wrapped = hvd.DistributedOptimizer(optimizer, _named(name, model), compression)
    return Trainer(workload, model, wrapped, late="late" in getattr(memory, "shared_keys", ()))


def _ddp(name: str, workload: Workload, model: torch.nn.Module) -> Trainer:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    if name == "ddp-powersgd":
        # One bucket: the callbacks of several start Gloo's operations in another order on every rank, which aborts.
        forward = DistributedDataParallel(model, bucket_cap_mb=4096)
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        forward.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        forward = DistributedDataParallel(model)
    if name == "ddp-bf16":
        # By its own name PyTorch refuses this hook, unless for NCCL; but Gloo sums bfloat16.
        forward.register_comm_hook(None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))  # noqa: PLW0108
    elif name == "ddp-fp16":
        forward.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return Trainer(workload, model, _sgd(workload, model, workload.momentum), forward)


_SPECIAL: dict[str, tuple[str, Callable[[str, Workload, torch.nn.Module], Trainer]]] = {
    "computation": ("horovod", _alone),  # nothing is exchanged
    "adaptive": ("horovod", _sparse),
    "horovod": ("horovod", _horovod),
    "horovod-fp16": ("horovod", _horovod),
    "ddp": ("ddp", _ddp),
    "ddp-bf16": ("ddp", _ddp),
    "ddp-fp16": ("ddp", _ddp),
    "ddp-powersgd": ("ddp", _ddp),
}
DENSE = "horovod"  # what all others are compared with
_ADAPTIVE: Any = adaptive_config()
PERIOD = _ADAPTIVE.controller.period  # exchanges between decisions
# What "best-fixed" stands for: everything that `adaptive` chooses from.
FIXED = [f"{_ADAPTIVE.controller.collective}@{density:g}" for density in _ADAPTIVE.controller.ladder()]
FAMILIES = ("horovod", "ddp")


def family(name: str) -> str:
    """Which processes this contender runs in."""
    return _SPECIAL[name][0] if name in _SPECIAL else "horovod"


def expand(names: Iterable[str], densities: Iterable[float]) -> list[str]:
    """Contenders without repetition: a method without a density stands for one of each.

    "methods" are all of `METHODS`, each at its `usual` density.

    Raises:
        ValueError: a name is unknown, or a density is none.
    """
    found: dict[str, None] = {}
    for name in names:
        method, at, density = name.partition("@")
        if name == "best-fixed":
            found.update(dict.fromkeys(FIXED))
        elif name == "methods":
            every = [usual(method, density) for method in METHODS for density in densities]
            found.update(dict.fromkeys(expand(every, ())))
        elif name in _SPECIAL:
            found[name] = None
        elif method not in METHODS:
            known = ", ".join([*_SPECIAL, "best-fixed", "methods", *METHODS])
            raise ValueError(f"a contender is one of {known}, with @DENSITY if you like. Received: {name!r}.")
        else:
            for one in [float(density)] if at else densities:
                if not 0 < one <= 1:
                    raise ValueError(f"a density must be in (0, 1]. Received: {name!r}.")
                found[f"{method}@{one:g}"] = None
    return list(found)
