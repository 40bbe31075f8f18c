"""Makes ci/netlab.py and the harness of tests/parallel importable; skips what needs a lab where none can start."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "parallel"))
sys.path.insert(0, str(Path(__file__).parent.parent.parent / "ci"))

from netlab import missing

REASON = missing()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if REASON and item.get_closest_marker("netlab"):
            item.add_marker(pytest.mark.skip(reason=REASON))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "netlab" in report.keywords]
    if REASON and skipped:
        terminalreporter.write_line(f"skipped {len(skipped)} tests on several hosts: {REASON}")
