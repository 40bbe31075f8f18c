"""Fixtures and hooks of all tests."""

from __future__ import annotations

import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

from helpers import BACK_ENDS, QUICK_BACK_ENDS, BackEnd, describe_ranks, num_ranks

# The same examples everywhere and every time, and no time limit on a single one: CI machines are slow now and then.
settings.register_profile(
    "hvd_sparse",
    derandomize=True,
    deadline=None,
    max_examples=30,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("hvd_sparse")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs the tests in the background ignores it

_RAN: Counter[int] = Counter()


@pytest.fixture(scope="session", params=list(BACK_ENDS))
def backend(request: pytest.FixtureRequest) -> BackEnd:
    """Every array library in turn."""
    return BACK_ENDS[request.param]()


@pytest.fixture(scope="session", params=QUICK_BACK_ENDS)
def quick_backend(request: pytest.FixtureRequest) -> BackEnd:
    """Those that are quick enough for thousands of small steps; the others are compared with the oracle."""
    return BACK_ENDS[request.param]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    report = yield
    report.num_ranks = num_ranks(item)
    return report


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" and not report.skipped:
        _RAN[report.num_ranks] += 1


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(describe_ranks(_RAN))
