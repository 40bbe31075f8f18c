"""The README's Python blocks, one after the other, as one script on two ranks and alone."""

import subprocess
import sys
from pathlib import Path

import pytest
from harness import QUIET, ROOT, horovodrun

sys.path.insert(0, str(ROOT / "tests/unit"))


@pytest.fixture(params=["torch", "keras"])
def script(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    from test_readme import blocks

    path = tmp_path / "readme.py"
    chosen = [
        block for block in blocks(ROOT / "README.md", "python") if ("keras" in block) == (request.param == "keras")
    ]
    path.write_text("\n".join(chosen))
    return path


@pytest.mark.parallel(ranks=2)
def test_on_two_ranks(script: Path) -> None:
    run = horovodrun(2, [sys.executable, str(script)], limit_seconds=90)
    assert run.code == 0, run.output
    assert run.output.count("bytes sent instead of") == 2


def test_alone(script: Path) -> None:
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, env={**QUIET})
    assert run.returncode == 0, run.stderr
    assert "0 bytes sent instead of 0" in run.stdout
