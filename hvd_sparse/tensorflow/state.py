"""Residuals, thresholds and counters, saved per rank.

A saved state is a dictionary of NumPy arrays, numbers and strings. The rule for a changed number of ranks is that of
`hvd_sparse.torch.state`: counters and thresholds are taken over, the residual only by the rank that saved it.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from hvd_sparse.tensorflow.averager import Averager

_log = logging.getLogger("hvd_sparse")
_KEYS = {"version", "rank", "size", "num_exchanges", "controller", "memory", "scheme"}


def save(averager: Averager | None) -> dict[str, Any]:
    """The state of one rank."""
    empty: dict[str, Any] = {"memory": {}, "scheme": {}}
    if averager is None:
        return {"version": 1, "rank": 0, "size": 1, "num_exchanges": 0, "controller": {}, **empty}
    parts = [bucket.save() for bucket in averager.buckets] or [averager.loaded or empty]
    world = averager.driver.world(0)
    return {
        "version": 1,
        "rank": world.rank,
        "size": world.size,
        "num_exchanges": int(averager.step.numpy()),
        "controller": dict(averager.controller_state),
        "memory": {name: arrays for part in parts for name, arrays in part["memory"].items()},
        "scheme": {name: numbers for part in parts for name, numbers in part["scheme"].items()},
    }


def load(averager: Averager | None, saved: dict[str, Any]) -> None:
    """Take over `saved`.

    Raises:
        ValueError: not such a state.
    """
    if not isinstance(saved, dict) or not saved.keys() >= _KEYS or saved["version"] != 1:
        raise ValueError(f"The state must come from compression_state_dict(). Received: {type(saved).__name__}.")
    if averager is None:
        return
    world, memory = averager.driver.world(0), saved["memory"]
    if (saved["rank"], saved["size"]) != (world.rank, world.size):
        kept = saved["rank"] == world.rank
        squares = [float(np.square(array).sum()) for arrays in memory.values() for array in arrays.values()]
        _log.warning(
            "Rank %d of %d loads the state of rank %d of %d: its residual is %s (norm not taken over: %.3g).",
            world.rank, world.size, saved["rank"], saved["size"], "kept" if kept else "zeroed",
            0.0 if kept else sum(squares) ** 0.5,
        )  # fmt: skip
        if not kept:
            memory = {name: {key: array * 0 for key, array in arrays.items()} for name, arrays in memory.items()}
    averager.step.assign(saved["num_exchanges"])
    averager.controller_state = dict(saved["controller"])
    averager.loaded = {"memory": memory, "scheme": saved["scheme"]}
    for bucket in averager.buckets:
        bucket.load(memory, saved["scheme"])
