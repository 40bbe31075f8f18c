"""The torch front on 2 and 3 ranks: the scenarios of users, and the promises of the design."""

import pytest
from harness import case_names, launched


@pytest.mark.parallel(ranks=2)
@pytest.mark.parametrize("case", case_names("torch_scenarios"))
def test_scenario(case: str) -> None:
    launched("torch_scenarios", 2).check(case)


@pytest.mark.parallel(ranks=3)
@pytest.mark.parametrize("case", case_names("torch_promises"))
def test_promise(case: str) -> None:
    launched("torch_promises", 3).check(case)


@pytest.mark.parallel(ranks=2)
@pytest.mark.parametrize("case", case_names("memory_cases"))
def test_memory(case: str) -> None:
    launched("memory_cases", 2).check(case)
