"""Ranks compare what they want before they train: the same error on every rank instead of a hang on one."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from hvd_sparse.types import HvdSparseError

_counters: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)  # by process set: only its ranks count


def next_prefix(process_set: Any) -> str:
    """Leads the operation names of the next wrapper of a process set, whose ranks wrap in the same order."""
    number = process_set.process_set_id
    return f"hvd_sparse.{f'set{number}.' if number else ''}{next(_counters[number])}"


def statement(settings: dict[str, Any], refusal: Exception | None = None) -> str:
    """What one rank tells the others: its settings, and why it cannot go on, if so."""
    return json.dumps({"refusal": str(refusal) if refusal else "", "settings": settings})


def compare(statements: Sequence[str], refusal: Exception | None = None) -> None:
    """Raise HvdSparseError if a rank refused or settings differ; not where this rank's own `refusal` says it better.

    `settings["parameters"]`, name -> description, is compared name by name.

    >>> compare([statement({"density": 0.1}), statement({"density": 0.2})])
    Traceback (most recent call last):
    hvd_sparse.types.HvdSparseError: Ranks wrap their optimizers differently. density: rank 0 0.1, rank 1 0.2
    """
    everybody = [json.loads(text) for text in statements]
    refusals = [f"rank {rank}: {one['refusal']}" for rank, one in enumerate(everybody) if one["refusal"]]
    if refusals and refusal is None:
        raise HvdSparseError(f"Another rank could not wrap its optimizer. {' '.join(refusals)}")
    different = _differences([one["settings"] for one in everybody])
    if different and not refusals:
        raise HvdSparseError(f"Ranks wrap their optimizers differently. {different}")


def _differences(settings: list[dict[str, Any]]) -> str:
    flat = [{**one, **{f"parameter {k}": v for k, v in one.get("parameters", {}).items()}} for one in settings]
    found = []
    for key in sorted(set().union(*flat) - {"parameters"}):
        values = [json.dumps(one.get(key, "absent")) for one in flat]
        if len(set(values)) > 1:
            found.append(f"{key}: " + ", ".join(f"rank {rank} {value}" for rank, value in enumerate(values)))
    orders = {tuple(one.get("parameters", {})) for one in settings}
    if not found and len(orders) > 1:
        found.append("the parameters are in different orders")
    more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
    return "; ".join(found[:5]) + more
