"""Residuals, thresholds and counters, saved per rank.

A saved state is a dictionary of tensors, numbers and strings, so `torch.load(weights_only=True)` reads it. Loaded by
the rank that saved it, training goes on bit for bit. **If the number of ranks changed, or the file is another rank's:**
counters and thresholds are taken over, and the residual only by the rank that saved it; every other rank starts from
a zero residual. So growing keeps the sum of residuals, and shrinking loses that of the ranks that are gone. A warning
says so, with the norm that was not taken over.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from hvd_sparse.torch.averager import Averager

_log = logging.getLogger("hvd_sparse")
_KEYS = {"version", "rank", "size", "num_exchanges", "controller", "memory", "scheme"}


def save(averager: Averager | None) -> dict[str, Any]:
    """The state of one rank. Tensors are copies on the CPU."""
    empty: dict[str, Any] = {"memory": {}, "scheme": {}}
    if averager is None:
        return {"version": 1, "rank": 0, "size": 1, "num_exchanges": 0, "controller": {}, **empty}
    parts = [bucket.save() for bucket in averager.buckets] or [averager.loaded or empty]
    world = averager.driver.world(0)
    return {
        "version": 1,
        "rank": world.rank,
        "size": world.size,
        "num_exchanges": averager.num_exchanges,
        "controller": dict(averager.controller_state),
        "memory": {name: arrays for part in parts for name, arrays in part["memory"].items()},
        "scheme": {name: numbers for part in parts for name, numbers in part["scheme"].items()},
    }


def load(averager: Averager | None, saved: dict[str, Any]) -> None:
    """Take over `saved`.

    Raises:
        ValueError: not such a state, or of parameters with other shapes.
    """
    if not isinstance(saved, dict) or not saved.keys() >= _KEYS or saved["version"] != 1:
        raise ValueError(f"The state must come from compression_state_dict(). Received: {type(saved).__name__}.")
    if averager is None:
        return
    sizes = {name: parameter.numel() for parameter, name in averager.names.items()}
    for name, arrays in saved["memory"].items():
        for key, array in arrays.items():
            if name in sizes and array.numel() != sizes[name]:
                raise ValueError(f"`{key}` of {name!r} has {array.numel()} elements, the parameter {sizes[name]}.")
    unknown = [name for name in saved["memory"] if name not in sizes]
    if unknown:
        _log.warning("The saved state has parameters that this model lacks; ignored: %s.", ", ".join(unknown))
    world = averager.driver.world(0)
    memory = saved["memory"]
    if (saved["rank"], saved["size"]) != (world.rank, world.size):
        kept = saved["rank"] == world.rank
        lost = 0.0 if kept else _norm(memory)
        _log.warning(
            "Rank %d of %d loads the state of rank %d of %d: its residual is %s (norm not taken over: %.3g).",
            world.rank, world.size, saved["rank"], saved["size"], "kept" if kept else "zeroed", lost,
        )  # fmt: skip
        if not kept:
            memory = {name: {key: array * 0 for key, array in arrays.items()} for name, arrays in memory.items()}
    averager.settle(used=False)
    averager.num_exchanges = saved["num_exchanges"]
    averager.controller_state = dict(saved["controller"])
    averager.loaded = {"memory": memory, "scheme": saved["scheme"]}
    for bucket in averager.buckets:
        bucket.load(memory, saved["scheme"])


def _norm(memory: dict[str, dict[str, torch.Tensor]]) -> float:
    return float(sum(float(array.square().sum()) for arrays in memory.values() for array in arrays.values()) ** 0.5)
