"""What can be chosen by name. Adding an algorithm is one file and one line here."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hvd_sparse.types import listed

METHODS: dict[str, dict[str, str]] = {
    "sparsifier": {
        "threshold": "hvd_sparse.sparsifiers.threshold:Threshold",
        "topk": "hvd_sparse.sparsifiers.topk:TopK",
        "leader": "hvd_sparse.sparsifiers.leader:Leader",
        "importance": "hvd_sparse.sparsifiers.importance:Importance",
        "random_block": "hvd_sparse.sparsifiers.random_block:RandomBlock",
        "random_k": "hvd_sparse.sparsifiers.random_k:RandomK",
        "block_topk": "hvd_sparse.sparsifiers.block_topk:BlockTopK",
        "exclusive": "hvd_sparse.sparsifiers.exclusive:Exclusive",
    },
    "collective": {
        "owner_reduce": "hvd_sparse.collectives.owner_reduce:OwnerReduce",
        "allgather": "hvd_sparse.collectives.allgather:AllGatherSum",
        "by_size": "hvd_sparse.collectives.by_size:BySize",
        "hierarchical": "hvd_sparse.collectives.hierarchical:Hierarchical",
        "shared_allreduce": "hvd_sparse.collectives.shared_allreduce:SharedAllReduce",
        "gtopk": "hvd_sparse.collectives.gtopk:GTopk",
    },
    "memory": {
        "residual": "hvd_sparse.memories.residual:Residual",
        "momentum": "hvd_sparse.memories.momentum:Momentum",
        "sgc": "hvd_sparse.memories.sgc:SGC",
        "delayed": "hvd_sparse.memories.delayed:Delayed",
        "none": "hvd_sparse.memories.none:NoMemory",
    },
    "controller": {
        "fixed": "hvd_sparse.controllers.fixed:Fixed",
        "warmup": "hvd_sparse.controllers.warmup:Warmup",
        "bandwidth": "hvd_sparse.controllers.bandwidth:Bandwidth",
    },
    "scheme": {
        "sparse": "hvd_sparse.schemes.sparse:SparseSum",
        "dense": "hvd_sparse.schemes.dense:Dense",
        "low_rank": "hvd_sparse.schemes.low_rank:LowRank",
        "sketch": "hvd_sparse.schemes.sketch:Sketch",
        "ok_topk": "hvd_sparse.schemes.ok_topk:OkTopk",
        "lazy": "hvd_sparse.schemes.lazy:Lazy",
        "static": "hvd_sparse.schemes.static:Static",
    },
}

_INTERFACES = {
    "sparsifier": ("shared_indices", "blind", "init", "select"),
    "collective": ("needs_shared_indices", "has_quotas", "reduce"),
    "memory": ("keys", "accumulator", "compensate", "update", "for_dense"),
    "controller": ("init", "decide"),
    "scheme": ("exact", "selects", "init", "reduce"),
}


def method_class(kind: str, name: str) -> type:
    """The class registered under `name`.

    Raises:
        ValueError: no such name; the message lists those that there are.
    """
    try:
        module, _, attribute = METHODS[kind][name].partition(":")
    except KeyError:
        known = listed(METHODS[kind])
        raise ValueError(f"`{kind}` must be one of {known}, or an object. Received: {kind}={name!r}.") from None
    found: type = getattr(import_module(module), attribute)
    return found


def create(kind: str, choice: Any, **arguments: Any) -> Any:
    """An instance for `choice`: a registered name, or an object that already is one (a third party's, say)."""
    if isinstance(choice, str):
        return method_class(kind, choice)(**arguments)
    missing = [name for name in _INTERFACES[kind] if not hasattr(choice, name)]
    if isinstance(choice, type) or missing:
        known = listed(METHODS[kind])
        lacks = "it is a class, not an object" if isinstance(choice, type) else f"it has no {', '.join(missing)}"
        raise TypeError(
            f"`{kind}` must be one of {known}, or an object with {', '.join(_INTERFACES[kind])}. "
            f"Received: {kind}={choice!r}; {lacks}."
        )
    return choice


def name_of(kind: str, part: Any) -> str | None:
    """The name under which the class of `part` is registered; None if it is a third party's."""
    path = f"{type(part).__module__}:{type(part).__name__}"
    return next((name for name, known in METHODS[kind].items() if known == path), None)


def summaries(kind: str) -> dict[str, str]:
    """Name -> the first line of the method's docstring."""
    return {name: (method_class(kind, name).__doc__ or "").strip().splitlines()[0] for name in METHODS[kind]}
