"""Network namespaces of netlab.py: making them, limiting their links, finding and killing what runs inside.

Names are hvdlab-PID-STARTED-SERIAL-PART with the process that owns the lab and the time it started, so that labs run
side by side and a later one can tell which are left of a process that has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Container, Sequence
from pathlib import Path

NETNS = Path("/run/netns")
FILES = Path("/etc/netns")
PREFIX = "hvdlab"
SUBNET = "10.77.0"
MOST_HOSTS = 64
PORT = 2222
KEY = "/etc/ssh/lab_key"
OFFER = "/etc/ssh/lab_hosts"
UNLIMITED = ("loopback", "none")
# What a link sends at once after a pause. More would carry small messages past the limit, less costs too much time.
# 0.5 ms loses a quarter of 1 Gbit/s when other processes keep the limiter from its turn.
BURST_SECONDS = 1e-3
QUEUE_SECONDS = 50e-3
SMALLEST_BURST = 6400  # four frames
LARGEST_PACKET = 65536  # of segmentation offload
CAPABILITIES = 1 << 12 | 1 << 21  # CAP_NET_ADMIN, CAP_SYS_ADMIN

SSHD_CONFIG = f"""Port {PORT}
HostKey /etc/ssh/host_key
AuthorizedKeysFile {KEY}.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
PidFile none
MaxStartups 200
LogLevel ERROR
"""
SSH_CONFIG = f"""Port {PORT}
IdentityFile {KEY}
IdentitiesOnly yes
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""


class BadArgument(ValueError, argparse.ArgumentTypeError):
    """What argparse shows as it is, unlike the text of another ValueError."""


class NetLabError(RuntimeError):
    """The machine cannot run a lab."""


def parse_rate(text: str) -> int | None:
    """Bits per second of `100mbit`; None for `loopback` and `none`."""
    if text in UNLIMITED:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", text)
    bits = round(float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]) if match else 0
    if not 64_000 <= bits <= 100_000_000_000:
        raise BadArgument(
            f"a rate must be 64kbit to 100gbit, or loopback. Received: {text!r}. Write for example 100mbit."
        )
    return bits


def parse_schedule(text: str) -> list[tuple[float, str]]:
    """Seconds and rates of `0s:1gbit,20s:100mbit`, in order."""
    steps = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)s:([\w.]+)", part.strip())
        if not match:
            raise BadArgument(
                f"a schedule must be 0s:RATE,... Received: {part!r}. Write for example 0s:1gbit,20s:100mbit."
            )
        parse_rate(match[2])
        steps.append((float(match[1]), match[2]))
    times = [second for second, _ in steps]
    if times != sorted(set(times)):
        raise BadArgument(f"the times of a schedule must increase. Received: {text!r}. Sort them and name each once.")
    return steps


def parse_slow(text: str) -> dict[int, str]:
    """Host numbers and rates of `0:100mbit,2:50mbit`."""
    slow: dict[int, str] = {}
    for part in text.split(","):
        number, _, rate = part.strip().partition(":")
        if not number.isdecimal() or not rate or int(number) in slow:
            raise BadArgument(
                f"slow hosts must be 0:RATE,..., each once. Received: {part!r}. Write for example 0:50mbit."
            )
        parse_rate(rate)
        slow[int(number)] = rate
    return slow


def missing() -> str:
    """What this machine lacks and how to get it; empty if a lab can start."""
    if os.geteuid() != 0:
        return "needs root: run it with sudo"
    status = Path("/proc/self/status").read_text()
    allowed = int(re.search(r"^CapEff:\s*(\w+)$", status, re.MULTILINE)[1], 16)
    if allowed & CAPABILITIES != CAPABILITIES:
        return "needs root that may make network namespaces: start the container with --privileged"
    tools = {"sshd": "openssh-server", "ssh": "openssh-client", "ip": "iproute2", "tc": "iproute2"}
    packages = sorted({package for tool, package in tools.items() if not find_tool(tool)})
    return f"needs {' and '.join(packages)}: run apt-get install {' '.join(packages)}" if packages else ""


def find_tool(name: str) -> str | None:
    """Its path; sbin is not on everyone's PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin")


def inside(name: str, command: Sequence[str]) -> list[str]:
    """The command line that runs a command in a namespace."""
    return [find_tool("ip") or "ip", "netns", "exec", name, *command]


def call(*command: str, lines: Sequence[str] = ()) -> None:
    """Run a tool; `lines` go to its standard input."""
    text = "".join(f"{line}\n" for line in lines)
    tool = find_tool(command[0]) or command[0]
    done = subprocess.run([tool, *command[1:]], input=text, capture_output=True, text=True)
    if done.returncode:
        raise NetLabError(
            f"`{shlex.join(command)}` failed: {(done.stderr or done.stdout).strip()}\n{text}The lab needs network "
            "namespaces, veth, bridge and tbf of the kernel: try modprobe -a veth bridge sch_tbf, or another machine."
        )


def started(pid: int) -> str | None:
    """When a process started, in ticks since boot; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def make_switch(switch: str) -> None:
    """A namespace with a bridge."""
    call("ip", "netns", "add", switch)
    call("ip", "-n", switch, "-batch", "-", lines=["link add switch type bridge", "link set switch up"])


def make_host(name: str, switch: str, number: int, key: Path) -> None:
    """A namespace with eth0, whose other end is a port of the switch, and its files of /etc."""
    address = f"{SUBNET}.{number + 1}"
    ssh = FILES / name / "ssh"
    ssh.mkdir(parents=True)
    # Horovod and Gloo look the machine's own name up and must find the address that the other hosts can reach. The
    # others have names because c10d asks for them, also in the form of IPv6.
    numbers = range(MOST_HOSTS)
    names = [f"{form}{SUBNET}.{other + 1} host{other}" for form in ("", "::ffff:") for other in numbers]
    lines = ["127.0.0.1 localhost", f"{address} {socket.gethostname()}", *names]
    (FILES / name / "hosts").write_text("\n".join(lines) + "\n")
    (ssh / "ssh_config").write_text(SSH_CONFIG)
    (ssh / "sshd_config").write_text(SSHD_CONFIG)
    for source in (key, key.with_suffix(".pub")):
        shutil.copy(source, ssh / source.name)  # keeps the mode, which ssh insists on
    call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(ssh / "host_key"))
    call("ip", "netns", "add", name)
    port = f"port{number}"
    # Created between the two namespaces: the root namespace never sees the link.
    lines = [f"link add {port} type veth peer name eth0 netns {name}", f"link set {port} master switch up"]
    call("ip", "-n", switch, "-batch", "-", lines=lines)
    lines = ["link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up"]
    call("ip", "-n", name, "-batch", "-", lines=lines)


def write_offer(name: str, addresses: Sequence[str]) -> None:
    """What a host finds in its file `OFFER`, a line per address."""
    file = FILES / name / "ssh" / Path(OFFER).name
    unfinished = file.with_suffix(".new")
    unfinished.write_text("".join(f"{address}\n" for address in addresses))
    unfinished.replace(file)  # at once: who reads it meanwhile must not miss a host


def limit_link(name: str, switch: str, number: int, rate: str) -> None:
    """Limit what a host sends and, at its port of the switch, what it receives."""
    bits = parse_rate(rate)
    queue, packet = "noqueue", LARGEST_PACKET
    if bits:
        burst = max(SMALLEST_BURST, round(bits / 8 * BURST_SECONDS))
        size = burst + round(bits / 8 * QUEUE_SECONDS)
        queue = f"tbf rate {bits}bit burst {burst}b limit {size}b"
        packet = min(packet, burst - 100)  # larger ones the limiter would have to cut
    call("ip", "-n", name, "link", "set", "eth0", "gso_max_size", str(packet))
    for namespace, device in ((name, "eth0"), (switch, f"port{number}")):
        call("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *queue.split())


def start_sshd(name: str) -> int:
    """Start the sshd of a host; returns its process once it listens."""
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd wants it, the Debian package makes it at boot only
    command = inside(name, [find_tool("sshd") or "sshd", "-D", "-e", "-f", "/etc/ssh/sshd_config"])
    log = FILES / name / "ssh" / "sshd.log"
    with log.open("w") as file:
        sshd = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
    deadline = time.monotonic() + 10
    while f":{PORT:04X} 00000000:0000 0A" not in Path(f"/proc/{sshd.pid}/net/tcp").read_text():
        if sshd.poll() is not None or time.monotonic() > deadline:
            raise NetLabError(f"sshd of {name} does not listen. Try it with sshd -t. It printed: {log.read_text()}")
        time.sleep(0.01)
    return sshd.pid


def processes_in(namespaces: Sequence[str]) -> list[int]:
    """All processes of some namespaces, in the order in which they started."""
    inodes = set()
    for name in namespaces:
        with contextlib.suppress(OSError):
            inodes.add((NETNS / name).stat().st_ino)
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{entry.name}/ns/net").st_ino in inodes and (since := started(int(entry.name))):
                    found.append((int(since), int(entry.name)))
    return [pid for _, pid in sorted(found)]


def kill_in(namespaces: Sequence[str], spare: Container[int] = ()) -> None:
    """Kill what runs in some namespaces, also what starts meanwhile."""
    deadline = time.monotonic() + 10
    while pids := [pid for pid in processes_in(namespaces) if pid not in spare]:
        if time.monotonic() > deadline:
            raise NetLabError(f"processes {pids} do not end. Look at them with ps, then run: ci/netlab.py clean")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def remove(namespaces: Sequence[str]) -> None:
    """Remove namespaces with what runs inside, and their files."""
    kill_in(namespaces)
    for name in namespaces:
        try:
            call("ip", "netns", "del", name)
        except NetLabError:
            if (NETNS / name).exists():  # else another lab that cleans was faster, or it was never made
                raise
        shutil.rmtree(FILES / name, ignore_errors=True)


def clean() -> list[str]:
    """Remove the namespaces whose owner has ended; returns their names."""
    names = {path.name for folder in (NETNS, FILES) if folder.is_dir() for path in folder.glob(f"{PREFIX}-*")}
    stale = []
    for name in sorted(names):
        match = re.fullmatch(rf"{PREFIX}-(\d+)-(\d+)-\d+-\w+", name)
        if match and started(int(match[1])) != match[2]:
            stale.append(name)
    remove(stale)
    return stale
