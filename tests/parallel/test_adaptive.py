"""The adaptive default on 2 ranks."""

import pytest
from harness import case_names, launched


@pytest.mark.parallel(ranks=2)
@pytest.mark.parametrize("case", case_names("adaptive_cases"))
def test_adaptive(case: str) -> None:
    launched("adaptive_cases", 2).check(case)
