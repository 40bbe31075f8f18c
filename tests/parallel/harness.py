"""Runs cases on several ranks under the real horovodrun.

A case is a function `case_*` without arguments in a module of this folder, or of tests/netlab. All cases of a module
run one after the other in one launch, since starting the ranks costs more than most cases; pytest still reports each of
them. After a failed case the launch ends, and the cases behind it report that they did not run.
"""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NETLAB = HERE.parent / "netlab"
PATH = f"{ROOT}:{HERE}:{NETLAB}:{HERE.parent}"
FORK = multiprocessing.get_context("fork")
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0", "OMP_NUM_THREADS": "1", "HOROVOD_CYCLE_TIME": "0.5"}


@dataclass(frozen=True)
class Run:
    """How a launch ended."""

    code: int | None  # None: the time limit struck
    output: str


def horovodrun(ranks: int, command: list[str], limit_seconds: float, env: dict[str, str] | None = None) -> Run:
    """Run `command` on so many ranks of this machine; everything it started is gone afterwards."""
    from horovod.common.util import gloo_built  # here, as ranks import this module too
    from horovod.runner.launch import run_commandline

    gloo_built(verbose=False)  # imports TensorFlow in a process of its own, and remembers the answer
    arguments = ["horovodrun", "-np", str(ranks), "-H", f"localhost:{ranks}", "--gloo", *command]
    environment = {**os.environ, **QUIET, "PYTHONPATH": PATH, **(env or {})}
    with tempfile.TemporaryFile("w+") as output:
        launcher = FORK.Process(
            target=become_horovodrun, args=(run_commandline, arguments, environment, output.fileno())
        )
        launcher.start()
        launcher.join(limit_seconds)
        code = launcher.exitcode
        for end in (signal.SIGTERM, signal.SIGKILL):  # horovodrun ends its ranks, whose stacks are printed by then
            if launcher.exitcode is None:
                os.killpg(launcher.pid or 0, end)
                launcher.join(10)
        output.seek(0)
        return Run(code, output.read())


def become_horovodrun(
    main: Callable[[], object], arguments: list[str], environment: dict[str, str], output: int
) -> None:
    """What the command does, in a process that has its modules loaded already: `main` is its entry point."""
    os.setsid()
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(file, number)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 (pytest has replaced them)
    sys.argv = arguments
    sys.modules["__main__"] = ModuleType("__main__")  # its helper processes need not import pytest
    sys.exit(main())


def case_names(module: str) -> list[str]:
    """The cases of a module, in order, without importing it."""
    folder = HERE if (HERE / f"{module}.py").exists() else NETLAB
    tree = ast.parse((folder / f"{module}.py").read_text())
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")]


@dataclass(frozen=True)
class Launch:
    """The reports of all ranks: case name -> "" or a traceback."""

    reports: list[dict[str, str]]
    run: Run

    def check(self, case: str) -> None:
        """Fail if the case did not pass on every rank."""
        for rank, report in enumerate(self.reports):
            if case not in report:
                raise AssertionError(
                    f"{case} did not finish on rank {rank}. The launch printed:\n{self.run.output[-9000:]}"
                )
            if report[case]:
                raise AssertionError(f"{case} failed on rank {rank}:\n{report[case]}")


def launch(module: str, ranks: int, limit_seconds: float, start: Callable[[list[str]], Run]) -> Launch:
    """Run all cases of a module; `start` runs a command on every rank."""
    with tempfile.TemporaryDirectory() as folder:
        run = start([sys.executable, str(HERE / "worker.py"), module, folder, str(ranks), str(limit_seconds - 10)])
        files = [Path(folder, f"{rank}.json") for rank in range(ranks)]
        return Launch([json.loads(file.read_text()) if file.exists() else {} for file in files], run)


@cache
def launched(module: str, ranks: int, limit_seconds: float = 150.0) -> Launch:
    """Run all cases of a module once, on this machine."""
    return launch(module, ranks, limit_seconds, lambda command: horovodrun(ranks, command, limit_seconds))
