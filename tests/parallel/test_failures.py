"""Whatever happens to one rank, every rank ends, soon, and says why."""

import sys
import time

import pytest
from harness import HERE, horovodrun


def end_of(way: str, ranks: int = 3) -> tuple[str, float]:
    since = time.monotonic()
    run = horovodrun(ranks, [sys.executable, str(HERE / "failing.py"), way], limit_seconds=90)
    assert run.code is not None, f"hung:\n{run.output}"
    assert run.code != 0, run.output
    return run.output, time.monotonic() - since


@pytest.mark.parallel(ranks=3)
@pytest.mark.parametrize(
    ("way", "cause"),
    [("raise", "rank 2 failed: KeyError: 'no such column'"), ("raise in backward", "rank 2 failed: ZeroDivisionError")],
)
def test_an_exception_on_one_rank_is_told_on_all(way: str, cause: str) -> None:
    output, seconds = end_of(way)
    assert seconds < 60
    for rank in (0, 1):
        assert any(f"rank {rank} ended" in line and cause in line for line in output.splitlines()), output


@pytest.mark.parallel(ranks=3)
@pytest.mark.parametrize("way", ["kill", "kill in exchange", "leave"])
def test_a_rank_that_is_gone_ends_the_others(way: str) -> None:
    output, seconds = end_of(way)
    assert seconds < 60
    assert "another rank failed, or left" in output, output
    assert ("Process 2 exit with status code 137" in output) == way.startswith("kill"), output


@pytest.mark.parallel(ranks=3)
def test_waiting_has_an_end() -> None:
    output, seconds = end_of("stall")
    assert seconds < 60
    assert "has waited" in output, output
    assert "`timeout_seconds` is over" in output, output


@pytest.mark.parallel(ranks=2)
@pytest.mark.parametrize(
    ("way", "told"), [("stall", "`timeout_seconds` is over"), ("raise", "Horovod has been shut down")]
)
def test_keras_ranks_do_not_wait_for_ever(way: str, told: str) -> None:
    since = time.monotonic()
    run = horovodrun(2, [sys.executable, str(HERE / "failing_keras.py"), way], limit_seconds=90)
    assert run.code, run.output  # neither a hang nor success
    assert time.monotonic() - since < 60
    assert "rank 0 ended after" in run.output, run.output
    assert told in run.output, run.output
