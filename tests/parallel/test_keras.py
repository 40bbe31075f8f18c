"""The TensorFlow and Keras front on 2 ranks."""

import pytest
from harness import case_names, launched


@pytest.mark.parallel(ranks=2)
@pytest.mark.parametrize("case", case_names("keras_cases"))
def test_keras(case: str) -> None:
    launched("keras_cases", 2, 240.0).check(case)
