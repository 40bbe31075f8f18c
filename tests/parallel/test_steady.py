"""Many steps: Horovod's response cache is hit, and ranks that differ in the order of events do not wait for ever."""

import pytest
from harness import case_names, launched


@pytest.mark.parallel(ranks=3)
@pytest.mark.parametrize("case", case_names("torch_steady"))
def test_torch(case: str) -> None:
    launched("torch_steady", 3, 240.0).check(case)


@pytest.mark.parallel(ranks=2)
@pytest.mark.parametrize("case", case_names("tensorflow_steady"))
def test_tensorflow(case: str) -> None:
    launched("tensorflow_steady", 2, 240.0).check(case)
