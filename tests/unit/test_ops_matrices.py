"""Operations of linear algebra, and the hash that seeds them, on every back end."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import assert_bits_equal, assert_close, floats, frozen

from hvd_sparse.ops.base import PRIME

RNG = np.random.default_rng(0)
COLUMN = RNG.normal(size=(7, 1))
MATRICES = {
    "independent": RNG.normal(size=(7, 3)),
    "of one column": COLUMN,
    "square": RNG.normal(size=(4, 4)),
    "nearly dependent": COLUMN @ np.ones((1, 3)) + 1e-4 * RNG.normal(size=(7, 3)),
    "large": 1e15 * RNG.normal(size=(7, 3)),
    "small": 1e-15 * RNG.normal(size=(7, 3)),
}
DEPENDENT = {
    "zeros": np.zeros((7, 3)),
    "a column of zeros": np.concatenate([COLUMN, np.zeros((7, 1)), RNG.normal(size=(7, 1))], axis=1),
    "one direction": COLUMN @ [[1, 2, -3]],
}


@pytest.mark.parametrize("name", [*MATRICES, *DEPENDENT])
def test_orthonormal(name, backend):
    matrix = frozen({**MATRICES, **DEPENDENT}[name], np.float32)
    array = backend.array(matrix)
    found = backend.numpy(backend.ops.orthonormal(array))
    assert found.dtype == np.float32
    assert_close(found.T @ found, np.eye(matrix.shape[1]), 1e-5)
    scale = max(1e-30, float(abs(matrix).max()))
    assert_close(found @ (found.T @ (matrix / scale)), matrix / scale, 1e-5)
    assert_bits_equal(backend.numpy(array), matrix)
    assert_bits_equal(found, backend.numpy(backend.ops.orthonormal(array)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_orthonormal_of_what_is_not_finite(bad, backend):
    matrix = np.ones((5, 2))
    matrix[2, 1] = bad
    found = backend.numpy(backend.ops.orthonormal(backend.array(frozen(matrix, np.float32))))
    assert not np.isfinite(found).all()


@pytest.mark.parametrize("shape", [(2, 3), (1, 4), (5, 1)])
def test_transpose(shape, backend):
    x = frozen(RNG.normal(size=shape), np.float32)
    assert_bits_equal(backend.numpy(backend.ops.transpose(backend.array(x))), x.T)


@pytest.mark.parametrize("terms", [[5], [0, 0], [PRIME - 1, PRIME - 1], [PRIME - 2, 7, PRIME - 3, 123_456_789]])
def test_residues(terms, backend):
    """As plain integers: nothing overflows, whatever the coefficients."""
    expected = []
    for place in range(2000):
        value = 0
        for term in terms:
            value = (value * place + term) % PRIME
        expected.append(value)
    found = backend.numpy(backend.ops.residues(2000, terms, backend.array(floats(0))))
    assert_bits_equal(found, np.int32(expected))


def test_residues_of_large_places(backend):
    """Their products are beyond 32 bits, and beyond what a float64 would hold."""
    found = backend.numpy(backend.ops.residues(10_000_000, [PRIME - 1, PRIME - 5], backend.array(floats(0))))
    assert int(found[-1]) == ((PRIME - 1) * 9_999_999 + PRIME - 5) % PRIME
    assert found.min() >= 0
