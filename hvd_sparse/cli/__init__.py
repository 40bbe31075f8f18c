"""Console script `hvd-sparse`.

A command is a module with `add_arguments(parser)`, `run(args) -> int` and `EXAMPLES`, named in `COMMANDS`. Only the
module of the command that is called gets imported, so `hvd-sparse --help` stays fast and needs neither a framework nor
Horovod.

Exit codes: 0 done, 1 the work failed, 2 the command line is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

import hvd_sparse
from hvd_sparse.cli.errors import CommandError, UsageError

PROGRAM = "hvd-sparse"

# name: (module, one line for --help)
COMMANDS: dict[str, tuple[str, str]] = {
    "build-horovod": ("hvd_sparse.cli.build_horovod", "build the Horovod wheel for the frameworks of this environment"),
    "probe": ("hvd_sparse.cli.probe", "measure latency and bandwidth between ranks, under horovodrun"),
    "plan": ("hvd_sparse.cli.plan", "predict step times, and whether compression is needed, from a link and a model"),
    "report": ("hvd_sparse.cli.report", "turn the metrics log of a run into a page or picture"),
}

EXAMPLES = """\
examples:
  hvd-sparse build-horovod --install            build (or find in the cache) and install Horovod
  horovodrun -np 2 hvd-sparse probe --json probe.json                        measure the network
  hvd-sparse plan --probe probe.json --params 25.6e6 --backward 120ms        is it the bottleneck?
  hvd-sparse report run.jsonl --out run.html                                 what a training decided, and why
  hvd-sparse build-horovod --help               all options of one command
"""


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a wrong command line as an exception and accepts no abbreviations."""

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See `{self.prog} --help`.")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code.

    Args:
        argv: the words after the program's name; the process's own by default.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words and words[0] in COMMANDS else ""
    prog = f"{PROGRAM} {name}".rstrip()
    try:
        return _run_command(name, prog, words[1:]) if name else _run_top(words)
    except UsageError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    except CommandError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    except SystemExit as stop:  # argparse ends --help and --version this way
        return stop.code if isinstance(stop.code, int) else 0


def _run_command(name: str, prog: str, words: list[str]) -> int:
    module_name, _ = COMMANDS[name]
    module = importlib.import_module(module_name)
    parser = Parser(prog, (module.__doc__ or "").strip(), module.EXAMPLES)
    module.add_arguments(parser)
    result: int = module.run(parser.parse_args(words))
    return result


def _run_top(words: list[str]) -> int:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:{width}}  {line}" for name, (_, line) in COMMANDS.items())
    parser = Parser(PROGRAM, f"Tools for hvd_sparse.\n\ncommands:\n{listing}", EXAMPLES)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {hvd_sparse.__version__}")
    parser.add_argument("command", nargs="?", help="one of the commands above")
    args, rest = parser.parse_known_args(words)
    if args.command is None:
        parser.error(f"unknown option {rest[0]}" if rest else "a command is missing")
    parser.error(f"`command` must be one of {', '.join(COMMANDS)}. Received: {args.command}")
