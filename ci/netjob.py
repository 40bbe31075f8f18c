"""A horovodrun in the lab of netlab.py."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import netns

if TYPE_CHECKING:
    from netlab import NetLab

GRACE_SECONDS = 5.0
Schedule = Sequence[tuple[float, str]]


@dataclass(frozen=True)
class Done:
    """How a job ended."""

    code: int | None  # None: the time limit struck
    output: str  # of horovodrun and all ranks, in the order in which it came


class Job:
    """A horovodrun under way. `wait` has to follow: it removes what is left of the job."""

    def __init__(
        self, lab: NetLab, command: Sequence[str], env: Mapping[str, str], stream: bool, schedule: Schedule
    ) -> None:
        self._lab = lab
        self._over = threading.Event()
        self._before = set(netns.processes_in(lab.namespaces))
        self._chunks: list[bytes] = []
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._process = lab.popen(0, command, env=env, start_new_session=True, **pipes)
        self._reader = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._reader.start()
        self._changes = threading.Thread(target=self._change_rates, args=(schedule,), daemon=True)
        self._changes.start()

    def _change_rates(self, schedule: Schedule) -> None:
        since = time.monotonic()
        for second, rate in schedule:
            if self._over.wait(since + second - time.monotonic()):
                return
            for host in set(range(self._lab.hosts)) - set(self._lab.slow):
                self._lab.set_rate(rate, host)

    def _read(self, stream: bool) -> None:
        while chunk := os.read(self._process.stdout.fileno(), 65536):
            self._chunks.append(chunk)
            if stream:
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()

    @property
    def output(self) -> str:
        """What it has printed up to now."""
        return b"".join(self._chunks).decode(errors="replace")

    def running(self) -> bool:
        """Whether horovodrun has not ended yet."""
        return self._process.poll() is None

    def wait(self, limit_seconds: float | None = None) -> Done:
        """Wait for the end or make one at the limit."""
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(limit_seconds)
            if code is None:
                # The ranks first: horovodrun would cut their output before they can print their stacks.
                ranks = self._lab.ranks().values()
                for pid in ranks:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(GRACE_SECONDS if ranks else 0)
        finally:
            self._over.set()
            self._changes.join()
            netns.kill_in(self._lab.namespaces, spare=self._before)
            self._process.wait()
            self._reader.join(5)
        told = re.findall(r"^Exit code: (\d+)$", self.output, re.MULTILINE)
        return Done(int(told[-1]) if code == 1 and told else code, self.output)  # horovodrun itself always says 1
