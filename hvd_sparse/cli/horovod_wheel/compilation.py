"""The compilation: the compiler's wrapper, the build with its progress, the first real error of its log."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvd_sparse.cli.horovod_wheel.process import run_logged

# Horovod asks for C++14, the headers of today's frameworks for C++17: the last -std wins.
CXX_STANDARD = "c++17"

LINE_SECONDS = 20.0

_PERCENT = re.compile(r"^\s*\[\s*(\d{1,3})%\]\s*(.*)$")

# What counts as an error, most telling kind first. Of the first kind that occurs, the first line is shown.
# They are, in this order: compilers at a place in a file, compilers, CMake, linkers, Python, the system.
_ERRORS = (
    re.compile(r"^\s*\S+?[:(]\d+(?:[:,]\d+)?\)?:? (?:fatal )?error\b:? .*"),
    re.compile(r"^\s*(?:\S*(?:c\+\+|g\+\+|gcc|clang|nvcc)\S*): (?:fatal )?error\b:? .*"),
    re.compile(r"^\s*CMake Error\b.*"),
    re.compile(r"^.*(?:undefined reference to|cannot find -l|ld: error:|ld: cannot).*"),
    re.compile(r"^\s*(?:\w+\.)*\w*(?:Error|Exception): .+"),
    re.compile(r"^.*\b(?:No space left on device|command not found|Permission denied).*"),
)


def write_wrapper(folder: Path, compiler: Sequence[str]) -> Path:
    """A script in `folder` that calls the compiler with the options that Horovod's sources need today."""
    path = folder / "c++"
    # GCC 13 and later no longer bring <cstdint> along with other headers, which Gloo counts on.
    script = f'#!/bin/sh\nexec {shlex.join(compiler)} -include cstdint "$@" -std={CXX_STANDARD}\n'
    path.write_text(script, encoding="utf-8")
    path.chmod(0o755)
    return path


def compile_wheel(source: Path, folder: Path, environment: Mapping[str, str], log: Path) -> int:
    """Builds the wheel of `source` into `folder` and returns pip's exit code; everything printed goes to `log`."""
    command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
    command += ["--wheel-dir", str(folder), str(source)]
    with Progress() as progress:
        return run_logged(command, source, environment, log, progress.show)


class Progress:
    """CMake's percentages: a bar on a terminal, a line now and then elsewhere. On stderr: stdout is for the result."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._printed = self._started
        self._percent = 0
        self._bar = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:  # the tool also runs before the package's dependencies are there
                return
            layout = "{desc} {percentage:3.0f}%|{bar}| {elapsed}{postfix}"
            size = shutil.get_terminal_size()  # tqdm stays blank on a terminal that does not know its size
            self._bar = tqdm(total=100, desc="Horovod", bar_format=layout, ncols=size.columns, nrows=size.lines)
            self._bar.set_postfix_str("preparing")

    def show(self, line: str) -> None:
        """Takes one line of the compilation's output."""
        found = _PERCENT.match(line)
        # Parallel compilation prints percentages out of order.
        percent = max(self._percent, min(int(found.group(1)), 100)) if found else self._percent
        if self._bar is not None:
            if found:
                self._bar.set_postfix_str(found.group(2).rsplit("/", 1)[-1][:40], refresh=False)
            self._bar.update(percent - self._percent)
        elif time.monotonic() - self._printed >= LINE_SECONDS:
            self._printed = time.monotonic()
            seconds = self._printed - self._started
            print(f"compiling Horovod: {percent:3d}% after {seconds:.0f} s", file=sys.stderr, flush=True)
        self._percent = percent

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()


def first_error(text: str) -> str:
    """The first real error of a build log with the lines that explain it, or its last lines when none is recognised."""
    lines = text.splitlines()
    if any("Killed signal terminated program" in line for line in lines):
        return "the compiler was killed, most likely for want of memory: call again with fewer --jobs"
    for pattern in _ERRORS:
        for index, line in enumerate(lines):
            if pattern.match(line):
                return _with_context(lines, index)
    return "\n".join(line for line in lines[-8:] if line.strip()) or "the log is empty"


def _with_context(lines: Sequence[str], index: int, most: int = 6) -> str:
    """A line and those below it that are indented deeper: the compiler's excerpt, CMake's explanation."""

    def indent(line: str) -> int:
        return len(line) - len(line.lstrip())

    taken = [lines[index]]
    for line in lines[index + 1 : index + most]:
        if line.strip() and indent(line) <= indent(lines[index]):
            break
        if line.strip():
            taken.append(line)
    return "\n".join(line[:300] for line in taken)
