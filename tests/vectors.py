"""Hypothesis strategies for float32 vectors."""

from __future__ import annotations

import numpy as np
from helpers import frozen
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

NAN, INF = float("nan"), float("inf")
FINITE = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)  # TensorFlow takes subnormal numbers for zero
ANY = st.one_of(FINITE, st.sampled_from([0.0, -0.0, 1.0, -1.0, NAN, INF, -INF]))


def vectors(elements: st.SearchStrategy = FINITE, smallest: int = 1, largest: int = 40) -> st.SearchStrategy:
    shape = st.integers(smallest, largest)
    return arrays(np.float32, shape, elements=elements, fill=st.nothing()).map(frozen)
