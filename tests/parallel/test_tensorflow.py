"""TensorFlow on 2 ranks."""

import pytest
from harness import case_names, launched


@pytest.mark.parallel(ranks=2)
@pytest.mark.parametrize("case", case_names("tensorflow_driver"))
def test_driver(case: str) -> None:
    launched("tensorflow_driver", 2, 120.0).check(case)
