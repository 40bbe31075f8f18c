"""How often Horovod negotiated an operation, told by the timeline that rank 0 writes.

Horovod 0.28.1 writes a phase NEGOTIATE_ALLREDUCE (and so on) also where the response cache answers. What it writes only
where ranks send their requests to rank 0 are the marks "0", "1", ... in that phase: this rank is ready.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_OPERATIONS = ("ALLREDUCE", "ALLGATHER", "ALLTOALL", "BROADCAST")


@dataclass(frozen=True)
class Use:
    """Of one operation, by name: how often it ran, and how often ranks had to agree on it."""

    ran: int
    negotiated: int


def ask_for_timeline(folder: str) -> Path:
    """Call it on every rank before hvd.init(). Rank 0's Horovod writes into the file until `hvd.stop_timeline()`."""
    file = Path(folder, "timeline.json")
    os.environ["HOROVOD_TIMELINE"] = str(file)
    return file


def read_timeline(file: Path) -> dict[str, Use]:
    """Every operation in which rank 0 took part."""
    events: list[dict[str, Any]] = json.loads(file.read_text())
    labels = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name" and "name" in e["args"]}
    seen = Counter((labels[event["pid"]], event["name"]) for event in events if event["ph"] in ("B", "X"))
    return {
        name: Use(sum(seen[name, operation] for operation in _OPERATIONS), seen[name, "0"]) for name in labels.values()
    }
