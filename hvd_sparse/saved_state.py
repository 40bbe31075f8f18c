"""Residuals, thresholds and counters, saved per rank.

A saved state is a dictionary of arrays, numbers and strings: torch tensors from the torch front, so that
`torch.load(weights_only=True)` reads it, NumPy arrays from the TensorFlow front. Loaded by the rank that saved it,
training goes on bit for bit.

**If the number of ranks changed, or the file is another rank's:** counters and thresholds are taken over, and the
residual only by the rank that saved it; every other rank starts from a zero residual. So growing keeps the sum of
residuals, and shrinking loses that of the ranks that are gone. A warning says so, with the norm that is not taken over.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from hvd_sparse.types import State, World

_log = logging.getLogger("hvd_sparse")
_KEYS = {"version", "rank", "size", "num_exchanges", "controller", "memory", "scheme"}


def pack(world: World, controller: State, parts: Sequence[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """The state of one rank after `world.step` exchanges.

    Args:
        parts: of each bucket, {"memory": {parameter: {key: array}}, "scheme": {bucket: numbers and arrays}}.
    """
    return {
        "version": 1,
        "rank": world.rank,
        "size": world.size,
        "num_exchanges": world.step,
        "controller": dict(controller),
        "memory": {name: arrays for part in parts for name, arrays in part["memory"].items()},
        "scheme": {name: numbers for part in parts for name, numbers in part["scheme"].items()},
    }


def unpack(saved: dict[str, Any], world: World, sizes: dict[str, int]) -> dict[str, Any]:
    """`saved`, checked, with the residual that this rank may take over.

    Args:
        sizes: elements of each parameter, by name; empty if they are not known yet.

    Raises:
        ValueError: no such state, or of parameters with other sizes.
    """
    if not isinstance(saved, dict) or not saved.keys() >= _KEYS or saved["version"] != 1:
        raise ValueError(f"The state must come from compression_state_dict(). Received: {type(saved).__name__}.")
    memory = saved["memory"]
    for name, arrays in memory.items():
        for key, array in arrays.items():
            size = len(array.reshape(-1))
            if size != sizes.get(name, size):
                raise ValueError(f"`{key}` of {name!r} has {size} elements, the parameter {sizes[name]}.")
    unknown = [name for name in memory if sizes and name not in sizes]
    if unknown:
        _log.warning("The saved state has parameters that this model lacks; ignored: %s.", ", ".join(unknown))
    if (saved["rank"], saved["size"]) == (world.rank, world.size):
        return saved
    kept = saved["rank"] == world.rank
    squares = [float((array * array).sum()) for arrays in memory.values() for array in arrays.values()]
    _log.warning(
        "Rank %d of %d loads the state of rank %d of %d: its residual is %s (norm not taken over: %.3g).",
        world.rank, world.size, saved["rank"], saved["size"], "kept" if kept else "zeroed",
        0.0 if kept else sum(squares) ** 0.5,
    )  # fmt: skip
    if kept:
        return saved
    zeros = {name: {key: array * 0 for key, array in arrays.items()} for name, arrays in memory.items()}
    return {**saved, "memory": zeros}
