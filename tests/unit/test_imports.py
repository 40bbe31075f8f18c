"""Each front brings its own framework and no other, and says what to do when it cannot be imported."""

import subprocess
import sys

import pytest


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("front", "stranger"),
    [("hvd_sparse.torch", "tensorflow"), ("hvd_sparse.tensorflow.keras", "torch"), ("hvd_sparse", "numpy")],
)
def test_a_front_imports_no_other_framework(front: str, stranger: str) -> None:
    done = run(f"import sys, {front}; print({stranger!r} in sys.modules)")
    assert done.stdout.strip().endswith("False"), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("front", "missing"),
    [
        ("hvd_sparse.torch", "horovod.torch"),
        ("hvd_sparse.tensorflow", "horovod.tensorflow"),
        ("hvd_sparse.tensorflow.keras", "tensorflow"),
    ],
)
def test_what_is_missing_is_named_with_the_command(front: str, missing: str) -> None:
    done = run(f"import sys; sys.modules[{missing!r}] = None; import {front}")
    assert done.returncode == 1
    assert "hvd-sparse build-horovod --frameworks" in done.stderr.strip().splitlines()[-1]


def test_an_unbuilt_extension_is_named_with_the_command() -> None:
    stub = (
        "import sys, types; sys.modules['horovod.torch'] = types.ModuleType('horovod.torch'); import hvd_sparse.torch"
    )
    assert "without its PyTorch extension" in run(stub).stderr
