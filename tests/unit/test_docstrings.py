"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import hvd_sparse

ROOT = Path(hvd_sparse.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


def failures(module: object) -> tuple[int, str]:
    """How many examples there are, and what went wrong, in words."""
    lines: list[str] = []
    runner, count = doctest.DocTestRunner(), 0
    for test in doctest.DocTestFinder(exclude_empty=True).find(module):
        count += len(test.examples)
        runner.run(test, out=lines.append)
    return count, "".join(lines)


def test_modules_are_found():
    assert len(MODULES) > 10
    assert "hvd_sparse.sparsifiers.topk" in MODULES


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    count, report = failures(importlib.import_module(name))
    assert count
    assert not report, report


def test_a_wrong_example_is_noticed(tmp_path, monkeypatch):
    (tmp_path / "wrong_example.py").write_text('"""Sums.\n\n>>> 1 + 1\n3\n"""\n')
    monkeypatch.syspath_prepend(tmp_path)
    count, report = failures(importlib.import_module("wrong_example"))
    assert count == 1
    assert "Expected:\n    3\nGot:\n    2" in report
