"""Files about a training: what was exchanged and decided at every step, and when every message travelled."""

from __future__ import annotations

import atexit
import json
import math
import threading
import time
from pathlib import Path
from typing import Any, TextIO


def open_for_rank(argument: str, file: Any, rank: int) -> TextIO | None:
    """The file of this rank, open for writing. A name with "{rank}" is for all ranks, any other one for rank 0.

    Raises:
        ValueError: it cannot be written; names `argument`.
    """
    if file is None or (rank > 0 and "{rank}" not in str(file)):
        return None
    path = Path(str(file).replace("{rank}", str(rank)))
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"`{argument}` must be a file in a folder that can be written. Received: {argument}={str(file)!r} "
            f"({error.strerror})."
        ) from error


class MetricsLog:
    """One JSON object per exchange and line, for `hvd-sparse report`.

    Keys: step, density, collective, bandwidth_bytes_per_second, exchange_seconds (that the step waited), step_seconds,
    predicted_seconds, reason, changed.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, **values: Any) -> None:
        """Numbers that JSON lacks become null."""
        plain = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}
        self._file.write(json.dumps(plain) + "\n")
        self._file.flush()


class Trace:
    """A Chrome trace of our programs, for chrome://tracing or Perfetto, next to Horovod's own timeline.

    A row per bucket; an event per round, from its start to its answer, with its kind and bytes.
    """

    def __init__(self, file: TextIO, rank: int) -> None:
        self._file = file
        self._rank = rank
        self._rows: dict[str, int] = {}
        self._lock = threading.Lock()
        file.write("[\n")
        self._write({"name": "process_name", "ph": "M", "args": {"name": f"hvd_sparse, rank {rank}"}}, row=0)
        atexit.register(self.close)

    def event(self, program: str, tag: str, kind: str, num_bytes: int, started: float, ended: float) -> None:
        """A round of a program; times by `time.time`."""
        with self._lock:
            if program not in self._rows:
                self._rows[program] = len(self._rows) + 1
                self._write({"name": "thread_name", "ph": "M", "args": {"name": program}}, self._rows[program])
            event = {
                "name": f"{kind} {tag}", "ph": "X", "ts": round(1e6 * started), "dur": round(1e6 * (ended - started)),
                "args": {"bytes": num_bytes},
            }  # fmt: skip
            self._write(event, self._rows[program])

    def _write(self, event: dict[str, Any], row: int) -> None:
        self._file.write(json.dumps({**event, "pid": self._rank, "tid": row}) + ",\n")

    def close(self) -> None:
        """Finish the file. Viewers also read one that was cut off."""
        if not self._file.closed:
            end = {"name": "end", "ph": "i", "ts": round(1e6 * time.time()), "pid": self._rank, "tid": 0, "s": "p"}
            self._file.write(json.dumps(end) + "\n]\n")
            self._file.close()
