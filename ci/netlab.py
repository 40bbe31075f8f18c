"""A laboratory of several hosts on this machine, with links of a chosen rate. Needs root.

    .venv/bin/python ci/netlab.py run --hosts 4 --rate 100mbit -- .venv/bin/python examples/pytorch_fashion_mnist.py

Every host is a network namespace with an sshd on port 2222 and an interface eth0 at 10.77.0.1, 10.77.0.2, ...; a bridge
in a namespace of its own is the switch. The job runs under the real horovodrun, started on the first host. Nothing
outside changes but the folders of the hosts in /etc/netns, which `ip netns exec` mounts over /etc. What a killed lab
left is removed by the next one, or by `ci/netlab.py clean`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import netns
from netjob import Done, Job, Schedule
from netns import BadArgument, NetLabError, missing, parse_rate, parse_schedule, parse_slow

__all__ = ["Done", "Job", "NetLab", "NetLabError", "missing", "parse_rate", "parse_schedule", "parse_slow"]

DEFAULTS = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}  # the hosts share this machine's cores
_serial = itertools.count()


class NetLab:
    """Hosts that live as long as the `with` block.

    Args:
        hosts: how many, 1 to 64.
        rate: of every link in each direction, as tc writes it: `100mbit`, `1gbit`; `loopback` is unlimited.
        slow: host number -> a rate of its own.
    """

    def __init__(self, hosts: int, rate: str = "loopback", slow: Mapping[int, str] | None = None) -> None:
        if not 1 <= hosts <= netns.MOST_HOSTS:
            raise ValueError(f"`hosts` must be in 1..{netns.MOST_HOSTS}. Received: hosts={hosts}. Try 4.")
        self.slow = dict(slow or {})
        for limit in (rate, *self.slow.values()):
            parse_rate(limit)
        if outside := [number for number in self.slow if not 0 <= number < hosts]:
            raise ValueError(f"`slow` must name hosts of 0..{hosts - 1}. Received: slow={self.slow}. Remove {outside}.")
        self.hosts, self.rate = hosts, rate
        self.addresses = [f"{netns.SUBNET}.{number + 1}" for number in range(hosts)]
        prefix = f"{netns.PREFIX}-{os.getpid()}-{netns.started(os.getpid())}-{next(_serial)}"
        self.namespaces = [f"{prefix}-{number}" for number in range(hosts)]
        self._switch = f"{prefix}-switch"
        self._offered: list[int] = []
        self._old_handler: Any = None

    def __enter__(self) -> NetLab:
        if reason := missing():
            raise NetLabError(f"the lab {reason}")
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._old_handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            netns.clean()
            netns.make_switch(self._switch)
            with tempfile.TemporaryDirectory() as folder:
                key = Path(folder, Path(netns.KEY).name)
                netns.call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", netns.PREFIX, "-f", str(key))
                for number, name in enumerate(self.namespaces):
                    netns.make_host(name, self._switch, number, key)
            for number, name in enumerate(self.namespaces):
                self.set_rate(self.slow.get(number, self.rate), number)
                netns.start_sshd(name)
            self.offer(range(self.hosts))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            netns.remove([*self.namespaces, self._switch])
        finally:
            if self._old_handler is not None:
                signal.signal(signal.SIGTERM, self._old_handler)

    def set_rate(self, rate: str, host: int | None = None) -> None:
        """Change the rate of one host's link, or of all."""
        for number in range(self.hosts) if host is None else [host]:
            netns.limit_link(self.namespaces[number], self._switch, number, rate)

    def offer(self, hosts: Iterable[int]) -> None:
        """Name the hosts that an elastic job may use from now on; it looks every second. At the start: all."""
        self._offered = list(hosts)
        netns.write_offer(self.namespaces[0], [self.addresses[number] for number in self._offered])

    def popen(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on a host; options as those of subprocess.Popen. Ends with the lab at the latest."""
        return subprocess.Popen(netns.inside(self.namespaces[host], command), **options)

    def exec_in(self, host: int, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end; returns its code and texts. Options as those of subprocess.run."""
        options = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, **options}
        return subprocess.run(netns.inside(self.namespaces[host], command), **options)

    def processes(self, host: int) -> list[int]:
        """All processes of a host, the oldest first; the first is its sshd."""
        return netns.processes_in([self.namespaces[host]])

    def ranks(self) -> dict[int, int]:
        """The processes of the ranks that run now: rank -> pid."""
        found: dict[int, int] = {}
        for pid in netns.processes_in(self.namespaces):
            with contextlib.suppress(OSError):
                match = re.search(rb"(?:^|\0)HOROVOD_RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_bytes())
                if match:
                    found.setdefault(int(match[1]), pid)  # its children have the variable too, but are younger
        return found

    def start(
        self,
        command: Sequence[str],
        slots: int = 1,
        env: Mapping[str, str] | None = None,
        stream: bool = False,
        schedule: Schedule = (),
        min_ranks: int | None = None,
    ) -> Job:
        """Start a command as so many ranks on every host.

        Args:
            command: what every rank runs, in the current folder.
            slots: ranks per host.
            env: variables of the ranks besides those of this process.
            stream: also show the output.
            schedule: seconds from now and the rate that all links but those of `slow` get then.
            min_ranks: makes the job elastic: it starts on all hosts that `offer` names, takes in those that it names
                later, and goes on while so many ranks are left. The host of a rank that dies is not used again.
        """
        launcher = [
            str(Path(sys.executable).parent / "horovodrun"), "--disable-cache", "--gloo",
            *(self._fixed(slots) if min_ranks is None else self._elastic(slots, min_ranks)),
            "--ssh-port", str(netns.PORT), "--ssh-identity-file", netns.KEY, "--network-interfaces", "eth0",
        ]  # fmt: skip
        environment = {**DEFAULTS, **os.environ, **(env or {})}
        return Job(self, [*launcher, *command], environment, stream, schedule)

    def _fixed(self, slots: int) -> list[str]:
        return ["-np", str(self.hosts * slots), "-H", ",".join(f"{address}:{slots}" for address in self.addresses)]

    def _elastic(self, slots: int, min_ranks: int) -> list[str]:
        ranks = len(self._offered) * slots
        if not 1 <= min_ranks <= ranks:
            raise ValueError(
                f"`min_ranks` must be in 1..{ranks}, which start. Received: min_ranks={min_ranks}. Try {ranks}."
            )
        numbers = ["-np", str(ranks), "--min-np", str(min_ranks), "--slots-per-host", str(slots)]
        return [*numbers, "--host-discovery-script", f"cat {netns.OFFER}"]

    def horovodrun(self, command: Sequence[str], limit_seconds: float | None = None, **options: Any) -> Done:
        """Run a command to its end or the limit; options as those of `start`."""
        return self.start(command, **options).wait(limit_seconds)


def _rate(text: str) -> str:
    parse_rate(text)
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= netns.MOST_HOSTS:
        raise BadArgument(f"must be a number in 1..{netns.MOST_HOSTS}. Received: {text!r}. Write for example 4.")
    return int(text)


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text) or float(text) == 0:
        raise BadArgument(f"must be a positive number of seconds. Received: {text!r}. Write for example 60.")
    return float(text)


def _variable(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not name.isidentifier() or not sign:
        raise BadArgument(f"must be NAME=VALUE. Received: {text!r}. Write for example HOROVOD_CYCLE_TIME=1.")
    return name, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="netlab.py", description="Several hosts on this machine, with slow links.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("clean", help="remove what a killed lab left")
    run = commands.add_parser("run", help="run a command under horovodrun on several hosts")
    add = run.add_argument
    add("--hosts", type=_count, default=4, help="how many hosts (default 4)")
    add("--slots", type=_count, default=1, help="ranks per host (default 1)")
    add(
        "--rate", type=_rate, default="loopback", help="of all links: 100mbit, 1gbit, ... (default loopback: unlimited)"
    )
    add("--slow", type=parse_slow, metavar="0:RATE,...", help="hosts with a rate of their own: 0:50mbit,2:100mbit")
    add("--rate-schedule", type=parse_schedule, default=(), metavar="0s:RATE,...", help="change all links but those of "
        "--slow while the job runs: 0s:1gbit,20s:100mbit")  # fmt: skip
    add("--limit", type=_seconds, metavar="SECONDS", help="end the job after this time, with exit code 124")
    add("--min-np", type=_count, metavar="RANKS", help="elastic training: ranks that die are lost, and the job goes on "
        "while so many are left")  # fmt: skip
    add("--env", type=_variable, action="append", default=[], metavar="NAME=VALUE", help="for all ranks, repeatable")
    add("job", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what every rank runs")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        if given.command == "clean":
            if reason := missing():
                raise NetLabError(f"the lab {reason}")
            print("\n".join(netns.clean()) or "nothing to remove")
            return 0
        job = given.job[1:] if given.job[:1] == ["--"] else given.job
        if not job:
            parser.error("no command. Write it behind the options: run --hosts 4 -- python train.py")
        try:
            lab = NetLab(given.hosts, given.rate, given.slow)
        except ValueError as error:
            parser.error(str(error))
        if (given.min_np or 1) > given.hosts * given.slots:
            parser.error(f"argument --min-np: must be in 1..{given.hosts * given.slots}, the ranks that start. "
                         f"Received: {given.min_np}.")  # fmt: skip
        with lab:
            started = lab.start(job, given.slots, dict(given.env), True, given.rate_schedule, given.min_np)
            done = started.wait(given.limit)
    except NetLabError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 124 if done.code is None else done.code


if __name__ == "__main__":
    sys.exit(main())
