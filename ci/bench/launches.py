"""Starts the ranks of a benchmark in the lab, reads their diaries, and goes on without a contender that hangs."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PORT = 29500  # of torch.distributed on the first host, where nothing else listens

Diary = list[dict[str, Any]]


@dataclass
class Outcome:
    """What launches with the same settings brought, one after the other.

    Attributes:
        diaries: one list for every launch, of one diary per rank.
        failures: contender -> what went wrong.
    """

    diaries: list[list[Diary]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


def read_diary(text: str) -> Diary:
    """The lines of one rank; one that was cut short by the process's end is left out."""
    lines = text.split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def failures(diaries: Iterable[Diary]) -> dict[str, str]:
    """Contenders that failed on every rank alike, so that the others went on."""
    found = {}
    for diary in diaries:
        for note, following in itertools.pairwise(diary):
            if note["event"] == "failed" and following["event"] == "end":
                found[note["contender"]] = note["error"]
    return found


def culprit(diaries: list[Diary], limit: float) -> tuple[str, str] | None:
    """The contender that a launch ended in, and how; None if it was outside of all of them."""
    for rank, diary in enumerate(diaries):
        began = [note["contender"] for note in diary if note["event"] == "start"]
        ended = [note["contender"] for note in diary if note["event"] == "end"]
        if len(began) == len(ended):
            continue
        name = began[-1]
        errors = [
            f"rank {other}: {note['error']}"
            for other, notes in enumerate(diaries)
            for note in notes[-1:]
            if note["event"] == "failed"
        ]
        how = f"failed on {len(errors)} of {len(diaries)} ranks: {errors[0]}" if errors else ""
        return name, how or f"rank {rank} did not finish; silent for {limit:g} s, or its process ended"
    return None


def launch(
    lab: Any, script: str, settings: dict[str, Any], slots: int, most_seconds: float
) -> tuple[bool, list[Diary], str]:
    """Run one script on all ranks. Whether it ended well, the diaries, and what it printed.

    Args:
        lab: a `netlab.NetLab`.
        script: a file in this folder.
        settings: for its ranks; `limit` is the number of seconds after which a silent rank ends itself.
        slots: ranks per host.
        most_seconds: after these, the launch is ended whatever it does.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "settings.json")
        place = {"folder": folder, "address": lab.addresses[0], "port": PORT, "interface": "eth0"}
        file.write_text(json.dumps({**settings, **place}))
        command = [sys.executable, str(HERE / script), str(file)]
        done = lab.horovodrun(command, slots=slots, limit_seconds=most_seconds, env={"PYTHONUNBUFFERED": "1"})
        files = [Path(folder, f"{rank}.jsonl") for rank in range(lab.hosts * slots)]
        return done.code == 0, [read_diary(one.read_text()) if one.exists() else [] for one in files], done.output


def launch_all(
    lab: Any, script: str, settings: dict[str, Any], slots: int, most_seconds: float, outcome: Outcome
) -> None:
    """Launch, and again without the contender that ended it, until all others have had their turn.

    What came of it is added to `outcome`, whose failed contenders are left out from the beginning. Those that were
    `finished` when another one ended the launch do not run again.
    """
    finished: set[str] = set()
    while names := [name for name in settings["contenders"] if name not in finished | outcome.failures.keys()]:
        now = {**settings, "contenders": names}
        print(f"{time.strftime('%H:%M:%S')} {settings['model']}: {', '.join(names)}", file=sys.stderr, flush=True)
        well, diaries, output = launch(lab, script, now, slots, most_seconds)
        outcome.diaries.append(diaries)
        outcome.failures.update(failures(diaries))
        finished |= {note["contender"] for diary in diaries[:1] for note in diary if note["event"] == "finished"}
        if well:
            return
        guilty = culprit(diaries, settings["limit"])
        print(output[-3000:], file=sys.stderr, flush=True)
        if guilty is None:
            outcome.failures.update(dict.fromkeys(names, f"the launch failed: {_last_line(output)}"))
            return
        outcome.failures[guilty[0]] = guilty[1]
        print(f"{guilty[0]}: {guilty[1]}; going on without it", file=sys.stderr, flush=True)


def _last_line(output: str) -> str:
    return (output.strip().splitlines() or ["it printed nothing"])[-1]
