"""The TensorFlow and Keras front on 2 ranks."""

import pytest
from harness import case_names, launched


@pytest.mark.parallel(ranks=2)
@pytest.mark.parametrize("case", case_names("keras_cases"))
def test_keras(case: str) -> None:
    launched("keras_cases", 2, 280.0).check(case)


@pytest.mark.parallel(ranks=2)
@pytest.mark.parametrize("case", case_names("legacy_keras_cases"))
def test_legacy_keras(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    launched("legacy_keras_cases", 2).check(case)


@pytest.mark.parallel(ranks=2)
@pytest.mark.parametrize("case", case_names("keras_memory_cases"))
def test_memory(case: str) -> None:
    launched("keras_memory_cases", 2, 200.0).check(case)
