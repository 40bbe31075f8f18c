"""Child processes: a short one whose output is wanted, a long one whose output is followed and logged."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType


def capture(command: Sequence[str], folder: Path | None = None, timeout: float | None = None) -> tuple[int, list[str]]:
    """Runs a command and returns its exit code and the lines it printed, errors included.

    A command that cannot start or runs past `timeout` seconds has exit code 127.
    """
    try:
        result = subprocess.run(
            list(command),
            cwd=folder,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, [str(error)]
    return result.returncode, result.stdout.strip().splitlines()


def run_logged(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path, on_line: Callable[[str], None]
) -> int:
    """Runs a command in `folder`, writes what it prints to `log` and hands every line to `on_line`."""
    with log.open("w", encoding="utf-8") as file:
        file.write(f"$ cd {folder}\n$ {shlex.join(command)}\n")
        process = subprocess.Popen(
            list(command),
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # a group of its own, so that stopping reaches the compilers too
        )
        try:
            with _signals_raise():
                for line in process.stdout or ():
                    file.write(line)
                    on_line(line)
                return process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Turns the signals that end a process at once into SystemExit, so that its children are ended first."""

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # signals can only be caught there
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
