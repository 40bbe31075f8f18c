"""The arguments of `DistributedOptimizer`, checked before anything is touched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import horovod.torch as hvd
import torch

from hvd_sparse.buckets import Parameter, split_evenly
from hvd_sparse.config import Config, adaptive_config, check_wrapping
from hvd_sparse.drivers.groups import is_elastic
from hvd_sparse.memories.none import NoMemory
from hvd_sparse.schemes.lazy import Lazy
from hvd_sparse.torch.linears import linear_weights

_BUCKET_BYTES = 4 * 2**20


@dataclass(frozen=True)
class WrapRequest:
    """What one rank wants; without parameters if it refused."""

    config: Config = field(default_factory=adaptive_config)
    names: dict[torch.nn.Parameter, str] = field(default_factory=dict)
    passes: int = 1
    average: bool = True
    groups: list[list[str]] | None = None
    factors: list[str] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """What must be equal on all ranks."""
        parameters = {name: f"{list(p.shape)} {p.dtype}" for p, name in self.names.items()}
        passes = {"backward_passes_per_step": self.passes, "average": self.average, "groups": self.groups}
        return {**self.config.describe(), **passes, "factors": self.factors, "parameters": parameters}


def check_request(
    optimizer: Any,
    named_parameters: Iterable[Any] | None,
    compression: Any,
    passes: Any,
    op: Any,
    predivide: float,
    groups: Any,
    factors: Any,
) -> WrapRequest:
    """The request, or an error that says what is wrong with it."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"`optimizer` must be a torch.optim.Optimizer. Received: {type(optimizer).__name__}.")
    config = adaptive_config() if compression is None else compression
    momentum = max((_momentum(group) for group in optimizer.param_groups), default=0.0)
    average = check_wrapping(config, compression, op, (hvd.Average, hvd.Sum), predivide, passes, momentum)
    names = _names(optimizer, named_parameters)
    config, grouped = config.with_buckets(_BUCKET_BYTES), _groups(groups, names)
    return WrapRequest(config, names, passes, average, grouped, _factors(factors, names, config, passes))


def _factors(model: Any, names: dict[torch.nn.Parameter, str], config: Config, passes: int) -> list[str]:
    """The names of the weights that may travel as factors."""
    if model is None:
        return []
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"`factors` must be the model, a torch.nn.Module. Received: {type(model).__name__}.")
    if passes > 1:
        raise ValueError(
            f"`factors` needs an exchange after every backward pass. Received: backward_passes_per_step={passes}."
        )
    if not isinstance(config.memory.for_dense(), NoMemory):
        raise ValueError(
            "`factors` needs a memory that leaves dense gradients alone, such as 'residual'. Received: "
            f"memory={type(config.memory).__name__}."
        )
    if isinstance(config.chosen, Lazy):
        raise ValueError("`factors` cannot be used with scheme='lazy', whose steps take gradients in their own way.")
    if is_elastic():
        raise ValueError("`factors` cannot be used with elastic training: a new rank does not know which layers do.")
    found = [names[weight] for weight in linear_weights(model, names)]
    if not found:
        raise ValueError(
            "`factors` must be a model with torch.nn.Linear layers that the optimizer trains. It has none."
        )
    return found


def _names(optimizer: torch.optim.Optimizer, named: Iterable[Any] | None) -> dict[torch.nn.Parameter, str]:
    ours = [
        (p, f"group{g}.{i}") for g, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"])
    ]
    if not ours:
        raise ValueError("`optimizer` has no parameters: is the model empty?")
    if named is not None:
        pairs = list(named)
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise ValueError("`named_parameters` must yield (name, parameter), as model.named_parameters() does.")
        known = {parameter: name for name, parameter in pairs}
        if len(set(known.values())) < len(known):
            twice = sorted({name for name in known.values() if list(known.values()).count(name) > 1})
            raise ValueError(f"`named_parameters` must have unique names. Received twice: {', '.join(twice)}.")
        nameless = [name for p, name in ours if p not in known]
        if nameless:
            raise ValueError(
                f"`named_parameters` must name every parameter of the optimizer. Missing: {len(nameless)}, the first "
                f"at {nameless[0]}. Is it the same model?"
            )
        ours = [(p, known[p]) for p, _ in ours]
    for parameter, name in ours:
        if parameter.is_meta:
            raise ValueError(f"Parameter {name!r} is on the meta device: materialise the model before wrapping.")
        if not parameter.is_floating_point():
            raise ValueError(f"Parameter {name!r} must be of a real floating-point dtype. Received: {parameter.dtype}.")
    return dict(ours)


def _momentum(group: dict[str, Any]) -> Any:
    """That of SGD and its kin, or the decay of the first moment of Adam and its kin."""
    first, *_ = group.get("betas") or (0.0,)
    return group.get("momentum") or first


def _groups(groups: Any, names: dict[torch.nn.Parameter, str]) -> list[list[str]] | None:
    if not groups:
        return None
    if isinstance(groups, int) and groups > 0:
        return split_evenly([Parameter(name, tuple(p.shape), "") for p, name in names.items()], groups)
    valid = isinstance(groups, Sequence) and all(isinstance(group, Sequence) for group in groups)
    if not valid or not all(isinstance(p, torch.Tensor) and p in names for group in groups for p in group):
        raise ValueError(
            f"`groups` must be an int or lists of the optimizer's parameters. Received: groups={groups!r}."
        )
    listed = [names[p] for group in groups for p in group]
    if len(set(listed)) < len(listed):
        raise ValueError("`groups` must name each parameter at most once.")
    return [[names[p] for p in group] for group in groups]
