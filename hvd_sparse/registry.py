"""What can be chosen by name. Adding an algorithm is one file and one line here."""

from __future__ import annotations

from importlib import import_module
from typing import Any

METHODS: dict[str, dict[str, str]] = {
    "sparsifier": {
        "threshold": "hvd_sparse.sparsifiers.threshold:Threshold",
        "topk": "hvd_sparse.sparsifiers.topk:TopK",
        "random_block": "hvd_sparse.sparsifiers.random_block:RandomBlock",
    },
    "collective": {
        "allgather": "hvd_sparse.collectives.allgather:AllGatherSum",
        "shared_allreduce": "hvd_sparse.collectives.shared_allreduce:SharedAllReduce",
    },
    "memory": {
        "residual": "hvd_sparse.memories.residual:Residual",
        "momentum": "hvd_sparse.memories.momentum:Momentum",
        "none": "hvd_sparse.memories.none:NoMemory",
    },
    "controller": {
        "fixed": "hvd_sparse.controllers.fixed:Fixed",
        "warmup": "hvd_sparse.controllers.warmup:Warmup",
    },
    "scheme": {
        "sparse": "hvd_sparse.schemes.sparse:SparseSum",
        "dense": "hvd_sparse.schemes.dense:Dense",
    },
}

_INTERFACES = {"sparsifier": "select", "collective": "reduce", "memory": "compensate", "controller": "decide"}


def method_class(kind: str, name: str) -> type:
    """The class registered under `name`.

    Raises:
        ValueError: no such name; the message lists those that there are.
    """
    try:
        module, _, attribute = METHODS[kind][name].partition(":")
    except KeyError:
        known = ", ".join(repr(known) for known in METHODS[kind])
        raise ValueError(f"`{kind}` must be one of {known}, or an object. Received: {kind}={name!r}.") from None
    found: type = getattr(import_module(module), attribute)
    return found


def create(kind: str, choice: Any, **arguments: Any) -> Any:
    """An instance for `choice`: a registered name, or an object that already is one (a third party's, say)."""
    if isinstance(choice, str):
        return method_class(kind, choice)(**arguments)
    if isinstance(choice, type) or not hasattr(choice, _INTERFACES[kind]):
        known = ", ".join(repr(known) for known in METHODS[kind])
        raise TypeError(
            f"`{kind}` must be one of {known}, or an object with a method `{_INTERFACES[kind]}`. "
            f"Received: {kind}={choice!r}."
        )
    return choice
