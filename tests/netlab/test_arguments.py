"""Rates, schedules, and what the command line says of wrong ones. Needs no root."""

import netlab
import netns
import pytest
from netlab import NetLab, NetLabError, parse_rate, parse_schedule, parse_slow


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("64kbit", 64_000),
        ("100mbit", 100_000_000),
        ("1.5gbit", 1_500_000_000),
        ("100gbit", 100_000_000_000),
        ("loopback", None),
        ("none", None),
    ],
)
def test_rates(text: str, bits: int) -> None:
    assert parse_rate(text) == bits


@pytest.mark.parametrize("text", ["", "100", "100mbps", "100Mbit", "-1mbit", "0mbit", "63kbit", "101gbit", "1e3mbit"])
def test_wrong_rates(text: str) -> None:
    with pytest.raises(ValueError, match=rf"64kbit to 100gbit.*Received: '{text}'.*100mbit"):
        parse_rate(text)


def test_schedules() -> None:
    assert parse_schedule("0s:1gbit, 2.5s:1.5mbit,40s:none") == [(0, "1gbit"), (2.5, "1.5mbit"), (40, "none")]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "0s:RATE.*''"),
        ("1gbit", "0s:RATE.*'1gbit'"),
        ("5:1gbit", "0s:RATE.*'5:1gbit'"),
        ("-5s:1gbit", "0s:RATE"),
        ("0s:1gbit,,", "0s:RATE.*''"),
        ("0s:fast", "64kbit to 100gbit.*'fast'"),
        ("5s:1gbit,2s:1mbit", "must increase"),
        ("5s:1gbit,5s:1mbit", "must increase"),
    ],
)
def test_wrong_schedules(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_schedule(text)


def test_slow_hosts() -> None:
    assert parse_slow("0:100mbit, 2:50mbit") == {0: "100mbit", 2: "50mbit"}


@pytest.mark.parametrize("text", ["", "0", "x:1gbit", "-1:1gbit", "0:1gbit,0:1mbit", "0:fast", "0:"])
def test_wrong_slow_hosts(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be .*Received: '.*'\. Write for example"):
        parse_slow(text)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"hosts": 0}, "`hosts` must be in 1..64. Received: hosts=0"),
        ({"hosts": 2, "rate": "fast"}, "Received: 'fast'"),
        ({"hosts": 2, "slow": {2: "1mbit"}}, r"hosts of 0..1. Received: slow=\{2: '1mbit'\}. Remove \[2\]"),
        ({"hosts": 2, "slow": {1: "fast"}}, "Received: 'fast'"),
    ],
)
def test_wrong_labs(options: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        NetLab(**options)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--hosts 0 -- true", "argument --hosts: must be a number in 1..64. Received: '0'"),
        ("--hosts four -- true", "argument --hosts: must be a number in 1..64. Received: 'four'"),
        ("--slots 0 -- true", "argument --slots: must be a number"),
        ("--rate fast -- true", "argument --rate: a rate must be 64kbit to 100gbit, or loopback. Received: 'fast'"),
        ("--slow 7:1mbit -- true", "`slow` must name hosts of 0..3. Received: slow={7: '1mbit'}. Remove [7]"),
        ("--slow 1 -- true", "argument --slow: slow hosts must be 0:RATE,..., each once. Received: '1'"),
        ("--rate-schedule 5 -- true", "argument --rate-schedule: a schedule must be 0s:RATE,... Received: '5'"),
        ("--limit 0 -- true", "argument --limit: must be a positive number of seconds. Received: '0'"),
        ("--min-np 0 -- true", "argument --min-np: must be a number in 1..64. Received: '0'"),
        ("--hosts 2 --min-np 3 -- true", "argument --min-np: must be in 1..2, the ranks that start. Received: 3"),
        ("--env 1 -- true", "argument --env: must be NAME=VALUE. Received: '1'"),
        ("--hosts 2 --", "no command"),
    ],
)
def test_wrong_command_lines(arguments: str, complaint: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        netlab.main(["run", *arguments.split()])
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["run", "--", "true"], ["clean"]])
def test_says_that_it_needs_root(
    arguments: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 65534)
    assert netlab.main(arguments) == 1
    assert capsys.readouterr().err == "netlab: the lab needs root: run it with sudo\n"


def test_says_which_packages_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(netns, "CAPABILITIES", 0)
    monkeypatch.setattr(netns, "find_tool", lambda name: None)
    said = "needs iproute2 and openssh-client and openssh-server: run apt-get install iproute2 openssh-client"
    assert netns.missing().startswith(said)


def test_says_what_the_kernel_lacks() -> None:
    with pytest.raises(NetLabError, match=r"(?s)`false --option` failed.*namespaces, veth, bridge and tbf.*modprobe"):
        netns.call("false", "--option")
