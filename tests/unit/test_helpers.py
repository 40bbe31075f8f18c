"""The comparators and hooks that the other tests rest on can fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import (
    BACK_ENDS,
    Ranks,
    assert_bits_equal,
    assert_close,
    assert_conserved,
    assert_same_on_ranks,
    assert_states_equal,
    describe_ranks,
    floats,
    frozen,
)

from hvd_sparse.collectives.requests import AllReduce
from hvd_sparse.exchange import Exchange
from hvd_sparse.memories.residual import Residual
from hvd_sparse.types import Reduced, Sparse, Spec

NAN = float("nan")


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (floats(1, 2), floats(1, np.nextafter(np.float32(2), np.float32(3)))),
        (floats(0.0), floats(-0.0)),
        (floats(1, 2), floats(1)),
        (floats(1), np.array([1.0])),
        (floats(NAN), np.array([0x7FC00001], np.int32).view(np.float32)),
    ],
    ids=["last bit", "sign of zero", "length", "dtype", "payload of NaN"],
)
def test_bits_equal_fails(actual, expected):
    with pytest.raises(AssertionError, match="arrays: "):
        assert_bits_equal(actual, expected)


def test_bits_equal_passes():
    assert_bits_equal(floats(1, NAN, -0.0), floats(1, NAN, -0.0))


@pytest.mark.parametrize(
    ("actual", "expected", "tolerance"),
    [
        (floats(1.001), floats(1), 1e-4),
        (floats(1, 2), floats(1), 1.0),
        (floats(NAN), floats(NAN), 1.0),
        (floats(1), floats(np.inf), 1.0),
        (floats(1), floats(np.nextafter(np.float32(1), np.float32(2))), 0.0),
    ],
)
def test_close_fails(actual, expected, tolerance):
    with pytest.raises(AssertionError, match="arrays: "):
        assert_close(actual, expected, tolerance)


def test_close_is_relative_to_the_largest_magnitude():
    assert_close(floats(1e6, 1), floats(1e6 + 5, 1))
    with pytest.raises(AssertionError):
        assert_close(floats(1e6, 1), floats(1e6 + 50, 1))


def test_same_on_ranks_fails():
    assert_same_on_ranks([floats(1), floats(1)])
    with pytest.raises(AssertionError, match="rank 2 and of rank 0"):
        assert_same_on_ranks([floats(1), floats(1), floats(2)])
    with pytest.raises(AssertionError, match="no rank"):
        assert_same_on_ranks([])


@pytest.mark.parametrize(
    ("total", "kept"),
    [
        (floats(2, 0), [floats(0, 3), floats(0, 3)]),  # an entry is lost
        (floats(2, 4), [floats(1, 0), floats(0, 3)]),  # an entry stays and is sent
        (floats(2, 4), [floats(0, 3)]),  # a rank is missing
        (floats(2, NAN), [floats(0, 0), floats(0, 3)]),
    ],
)
def test_conserved_fails(total, kept):
    with pytest.raises(AssertionError):
        assert_conserved([floats(1, 4), floats(1, 3)], total, kept)


def test_conserved_passes():
    accumulated = [floats(1, 4), floats(1, 3)]
    assert_conserved(accumulated, floats(2, 4), [floats(0, 0), floats(0, 3)], tolerance=0)


@pytest.mark.parametrize("other", [{"a": {"b": floats(2)}}, {"a": {}}, {"a": {"b": floats(1), "c": 1}}, {"a": 1}])
def test_states_equal_fails(other):
    state = {"a": {"b": floats(1)}}
    assert_states_equal(state, {"a": {"b": floats(1)}})
    with pytest.raises(AssertionError):
        assert_states_equal(other, state)


def test_frozen_arrays_refuse_to_be_written():
    with pytest.raises(ValueError, match="read-only"):
        floats(1)[0] = 2


def test_back_ends_convert_both_ways():
    for make in BACK_ENDS.values():
        backend = make()
        for x in (floats(1, NAN), frozen([1, 2], np.int32)):
            assert_bits_equal(backend.numpy(backend.array(x)), x)


class Spoiler:
    """A scheme that writes to what it is given."""

    def __init__(self, used_twice: bool = False) -> None:
        self.used_twice = used_twice

    def init(self, ops, spec, like=None):
        return {}

    def reduce(self, ops, world, spec, x, k, state):
        total = yield AllReduce(x, tag="x")
        if self.used_twice:
            return Reduced(total, Sparse(np.array([0, 0]), x[:2], spec.size), True), state
        x[0] = 7
        return Reduced(total, None, True), state


class Overwriting(Residual):
    def compensate(self, ops, num_ranks, grad, state, alpha=1.0, out=None):
        state["residual"][0] += 1
        return state["residual"], state


def test_ranks_notice_an_overwritten_input():
    class Careless(Residual):
        def compensate(self, ops, num_ranks, grad, state, alpha=1.0, out=None):
            return grad, {"residual": grad}

    with pytest.raises(AssertionError, match="input of rank 0"):
        Ranks(Exchange(Spec("b", 2), Spoiler(), Careless()), 1, BACK_ENDS["torch"]()).step([floats(1, 2)], 1)
    with pytest.raises(ValueError, match="read-only"):
        Ranks(Exchange(Spec("b", 2), Spoiler(), Careless()), 1).step([floats(1, 2)], 1)


def test_ranks_notice_an_overwritten_state():
    with pytest.raises(AssertionError, match="old state of rank 0"):
        Ranks(Exchange(Spec("b", 2), Spoiler(), Overwriting()), 1).step([floats(1, 2)], 1)


def test_ranks_notice_an_index_that_is_used_twice():
    with pytest.raises(AssertionError, match="used twice"):
        Ranks(Exchange(Spec("b", 2), Spoiler(True), Residual()), 1).step([floats(1, 2)], 1)


def test_description_of_ranks():
    assert describe_ranks({2: 60, 1: 412, 3: 1}) == "ran: 412 tests on 1 rank, 60 tests on 2 ranks, 1 test on 3 ranks"
    assert describe_ranks({}) == "ran: no test"


def test_summary_counts_what_ran(tmp_path: Path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = parallel: ranks\n")
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_one(): pass\n"
        "def test_failing(): assert False\n"
        "@pytest.mark.skip\ndef test_skipped(): pass\n"
        "@pytest.mark.parallel(ranks=3)\n@pytest.mark.parametrize('x', [1, 2])\ndef test_many(x): pass\n"
    )
    (tmp_path / "conftest.py").write_text((Path(__file__).parent.parent / "conftest.py").read_text())
    (tmp_path / "helpers.py").write_text((Path(__file__).parent.parent / "helpers.py").read_text())
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", tmp_path], cwd=tmp_path, capture_output=True, text=True
    )
    assert "ran: 2 tests on 1 rank, 2 tests on 3 ranks" in done.stdout, done.stdout + done.stderr
