"""One rank of a launch: worker.py MODULE FOLDER RANKS LIMIT_SECONDS. See harness.py."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

from harness import case_names


def main() -> int:
    module, folder, ranks, limit_seconds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    faulthandler.dump_traceback_later(limit_seconds, exit=True)  # Horovod's stall inspector says nothing in most hangs
    rank = int(os.environ["HOROVOD_RANK"])
    report: dict[str, str] = {}

    def save() -> None:
        temporary = folder / f"{rank}.tmp"
        temporary.write_text(json.dumps(report))
        temporary.rename(folder / f"{rank}.json")

    cases = importlib.import_module(module)
    if cases.hvd.size() != ranks:
        raise SystemExit(f"expected {ranks} ranks, found {cases.hvd.size()}")
    chosen = os.environ.get("HVD_SPARSE_CASES", "")  # for debugging: only those whose name has this in it
    for name in [name for name in case_names(module) if chosen in name]:
        print("case", name, flush=True)
        since = time.monotonic()
        try:
            getattr(cases, name)()
            report[name] = ""
        except BaseException:
            report[name] = traceback.format_exc()
            print(report[name], flush=True)
        save()
        if report[name]:
            return 1
        print(f"case {name} took {time.monotonic() - since:.1f} s", flush=True)
    wait_for_others(folder, ranks, report)
    return 0


def wait_for_others(folder: Path, ranks: int, report: dict[str, str]) -> None:
    """Horovod aborts a rank that is still at work when one of its process sets has left."""
    end = time.monotonic() + 30
    for other in range(ranks):
        file = folder / f"{other}.json"
        while not (file.exists() and len(json.loads(file.read_text())) == len(report)) and time.monotonic() < end:
            time.sleep(0.02)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a failed rank must not wait for the others in Horovod's own shutdown
