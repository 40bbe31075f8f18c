"""The lab itself: links keep to their rates, jobs run on all hosts, and nothing is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import netlab
import netns
import pytest
from netlab import Job, NetLab

pytestmark = pytest.mark.netlab

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SLEEPER = ["bash", "-c", "trap 'echo end of $HOROVOD_RANK; exit 1' TERM; echo up; while :; do sleep 0.05; done"]


def outside() -> tuple[str, str]:
    """What a lab must not change."""
    home = Path.home() / ".ssh"
    keys = {path.name: path.stat().st_mtime_ns for path in home.glob("*")} if home.is_dir() else {}
    return subprocess.check_output([netns.find_tool("ip"), "-o", "link"], text=True), str(keys)


def traces() -> list[Path]:
    """What the labs of this process have left."""
    name = f"{netns.PREFIX}-{os.getpid()}-*"
    return [*netns.NETNS.glob(name), *netns.FILES.glob(name)]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = outside()
    yield
    assert outside() == before
    assert traces() == []


def until(happened: Callable[[], object], what: str, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"no {what} after {seconds} s"
        time.sleep(0.05)


def until_up(job: Job, ranks: int) -> None:
    until(lambda: job.output.count("up") == ranks or not job.running(), "rank")
    assert job.running(), job.output


def megabits(lab: NetLab, sender: int, receiver: int) -> float:
    """The throughput between two hosts."""
    script = [sys.executable, str(HERE / "traffic.py")]
    with lab.popen(receiver, [*script, "receive"], stdout=subprocess.PIPE, text=True) as receiving:
        assert receiving.stdout.readline() == "ready\n"
        sent = lab.exec_in(sender, [*script, "send", lab.addresses[receiver], "0.7"])
        assert sent.returncode == 0, sent.stderr
        return float(receiving.stdout.read()) / 1e6


def test_links_keep_to_their_rates() -> None:
    with NetLab(3, "100mbit", slow={2: "20mbit"}) as lab:
        assert megabits(lab, 0, 1) == pytest.approx(100, rel=0.15)
        assert megabits(lab, 2, 0) == pytest.approx(20, rel=0.15)  # what it sends
        assert megabits(lab, 0, 2) == pytest.approx(20, rel=0.15)  # what it receives
        lab.set_rate("50mbit", host=1)
        assert megabits(lab, 0, 1) == pytest.approx(50, rel=0.15)
        lab.set_rate("200mbit")
        assert megabits(lab, 1, 2) == pytest.approx(200, rel=0.15)
        lab.set_rate("loopback")
        assert megabits(lab, 1, 2) > 400


def test_hosts_are_apart() -> None:
    before = outside()
    with NetLab(2) as lab, NetLab(1) as other:
        assert outside() == before
        assert lab.addresses == ["10.77.0.1", "10.77.0.2"]
        assert other.addresses == ["10.77.0.1"]
        assert [len(lab.processes(host)) for host in range(2)] == [1, 1]  # sshd
        for host, address in enumerate(lab.addresses):
            name = lab.exec_in(
                host, [sys.executable, "-c", "import socket as s; print(s.gethostbyname(s.gethostname()))"]
            )
            assert name.stdout.strip() == address, name.stderr
            there = lab.exec_in(0, ["ssh", address, "echo", "$SSH_CONNECTION"])  # also to itself
            assert there.stdout.split()[2:] == [address, "2222"], there.stderr
        assert len({lab.processes(0)[0], lab.processes(1)[0], other.processes(0)[0]}) == 3


@pytest.mark.parallel(ranks=4)
def test_horovod_runs_on_four_hosts_and_the_exit_code_is_passed_on() -> None:
    command = [sys.executable, "ci/netlab.py", "run", "--hosts", "4", "--rate", "1gbit", "--env", "GREETING=good day"]
    done = subprocess.run(
        [*command, "--", os.path.relpath(sys.executable, ROOT), "tests/netlab/hello.py"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90,
    )  # fmt: skip
    for rank in range(4):
        expected = f"[{rank}]<stdout>:rank {rank} of 4 at 10.77.0.{rank + 1} in {ROOT} says good day"
        assert expected in done.stdout, done.stdout
    assert done.returncode == 7, done.stdout


@pytest.mark.parallel(ranks=2)
def test_the_limit_ends_everything() -> None:
    with NetLab(2) as lab:
        before = [lab.processes(host) for host in range(2)]
        job = lab.start(SLEEPER)
        until_up(job, 2)
        done = job.wait(0.1)
        assert done.code is None
        assert [f"end of {rank}" in done.output for rank in range(2)] == [True] * 2, done.output
        assert [lab.processes(host) for host in range(2)] == before


@pytest.mark.parallel(ranks=4)
def test_two_ranks_on_each_host_a_schedule_and_a_rank_that_is_killed() -> None:
    script = "echo up: $HOROVOD_RANK $HOROVOD_LOCAL_SIZE $HOROVOD_LOCAL_RANK $HOROVOD_CROSS_SIZE $HOROVOD_CROSS_RANK"
    with NetLab(2, "1gbit", slow={1: "50mbit"}) as lab:
        schedule = [(0, "2gbit"), (0.3, "300mbit"), (900, "1mbit")]
        job = lab.start(["bash", "-c", f"{script}; while :; do sleep 0.05; done"], slots=2, schedule=schedule)
        until_up(job, 4)
        rates = [lab.exec_in(host, ["tc", "qdisc", "show", "dev", "eth0"]).stdout.split()[7] for host in range(2)]
        ranks = lab.ranks()
        on_host = [[rank for rank in ranks if ranks[rank] in lab.processes(host)] for host in range(2)]
        os.kill(ranks[3], signal.SIGKILL)
        done = job.wait(20)
        assert lab.ranks() == {}
    assert [sorted(found) for found in on_host] == [[0, 1], [2, 3]]
    said = sorted(line.partition("up: ")[2] for line in done.output.splitlines() if "up: " in line)
    assert said == [f"{rank} 2 {rank % 2} 2 {rank // 2}" for rank in range(4)]
    assert rates == ["300Mbit", "50Mbit"]
    assert "Process 3 exit with status code 255" in done.output  # what ssh says of a command that a signal ended
    assert done.code == 255


OWNER = """
import time
from netlab import NetLab
with NetLab(2) as lab:
    print(lab.popen(1, ["sleep", "1000"]).pid, flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_lab_that_ends_early_leaves_nothing(end: signal.Signals) -> None:
    folder = str(Path(netlab.__file__).parent)
    with NetLab(1) as mine, subprocess.Popen(
        [sys.executable, "-c", OWNER], env={**os.environ, "PYTHONPATH": folder},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as owner:  # fmt: skip
        sleeper = int(owner.stdout.readline())
        name = f"{netns.PREFIX}-{owner.pid}-*"
        owner.send_signal(end)
        owner.wait(20)
        left = [*netns.NETNS.glob(name), *netns.FILES.glob(name)]
        assert bool(left) == bool(netns.started(sleeper)) == (end == signal.SIGKILL)
        if end == signal.SIGKILL:
            with NetLab(1):
                pass
            assert not [*netns.NETNS.glob(name), *netns.FILES.glob(name)]
            assert not netns.started(sleeper)
        assert mine.processes(0), "the lab of another owner is gone too"
