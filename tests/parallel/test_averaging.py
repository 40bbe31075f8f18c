"""Periodic averaging under horovodrun."""

import pytest
from harness import case_names, launched


@pytest.mark.parallel(ranks=3)
@pytest.mark.parametrize("case", case_names("averaging_cases"))
def test_torch(case: str) -> None:
    launched("averaging_cases", 3, 120.0).check(case)


@pytest.mark.parallel(ranks=2)
@pytest.mark.parametrize("case", case_names("averaging_keras_cases"))
def test_keras(case: str) -> None:
    launched("averaging_keras_cases", 2, 120.0).check(case)
