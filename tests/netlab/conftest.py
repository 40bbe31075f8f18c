"""Makes ci/netlab.py and the harness of tests/parallel importable; skips what needs a lab where none can start."""

import sys
from pathlib import Path

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
