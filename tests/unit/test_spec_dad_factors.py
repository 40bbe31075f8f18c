"""dAD: gradients of linear layers as products of gathered factors, exact, where that is fewer words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import BACK_ENDS, assert_bits_equal, assert_close, frozen
from hypothesis import given
from hypothesis import strategies as st

from hvd_sparse.collectives.factors import Product, is_smaller, sum_products
from hvd_sparse.drivers.simulate import Simulator

# The check values: rank 0 has two rows, rank 1 one. A column of ones is the input of the bias.
A = [np.array([[1, 2], [0, 1]]), np.array([[3, -1]])]
D = [np.array([[1, 0, -1], [2, 1, 0]]), np.array([[0, 1, 1]])]


@pytest.fixture(params=["numpy", "torch"])
def backend(request):
    return BACK_ENDS[request.param]()


def product(backend: Any, inputs: np.ndarray, outputs: np.ndarray, known: bool = True, extra: float = 0.0) -> Product:
    """A rank's part. Unknown factors are those that something else was added to."""
    whole = frozen((outputs.T @ inputs + extra).reshape(-1), np.float32)
    factors = tuple(backend.array(frozen(matrix, np.float32)) for matrix in (inputs, outputs))
    return Product((outputs.shape[1], inputs.shape[1]), backend.array(whole), factors if known else None)


def exchanged(backend: Any, ranks: list[list[Product]]) -> tuple[list[Any], Simulator]:
    """Totals and choices of rank 0, once it is checked that the others have the same bits."""
    simulator = Simulator(len(ranks), ops=backend.ops)
    programs = [sum_products(backend.ops, simulator.world(r), layers) for r, layers in enumerate(ranks)]
    results = [[(backend.numpy(total), yes) for total, yes in result] for result in simulator.run(programs)]
    for result in results[1:]:
        for (total, yes), (first, also) in zip(result, results[0]):
            assert_bits_equal(total, first)
            assert yes == also
    return results[0], simulator


def drawn(seed: int, rows: list[int], shape: tuple[int, int]) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(r, shape[1])), rng.normal(size=(r, shape[0]))) for r in rows]


def test_toy(backend):
    """Zeros around it make the toy large enough to be worth factors."""
    ranks = []
    for a, d in zip(A, D):
        inputs, outputs = np.zeros((len(a), 9)), np.zeros((len(a), 9))
        inputs[:, :2], inputs[:, 2], outputs[:, :3] = a, 1, d
        ranks.append([product(backend, inputs, outputs)])
    [(total, as_factors)], simulator = exchanged(backend, ranks)
    assert as_factors
    assert [one.tag for one in simulator.rounds] == ["count", "rows"]
    assert total[:3, :2].tolist() == [[1, 4], [3, 0], [2, -3]]
    assert total[:3, 2].tolist() == [3, 2, 0]
    assert not total[3:].any()
    assert not total[:, 3:].any()


def test_toy_is_too_small_for_factors(backend):
    [(total, as_factors)], simulator = exchanged(backend, [[product(backend, a, d)] for a, d in zip(A, D)])
    assert not as_factors
    assert [one.tag for one in simulator.rounds] == ["count", "whole"]
    assert total.tolist() == [[1, 4], [3, 0], [2, -3]]


@pytest.mark.parametrize(("shape", "threshold"), [((4096, 4096), 4096), ((768, 768), 768), ((768, 3072), 1228.8)])
def test_thresholds(shape, threshold):
    below = int(np.ceil(threshold)) - 1
    assert is_smaller(1, [below], shape)
    assert not is_smaller(1, [below + 1], shape)
    assert is_smaller(3, [below // 3] * 3, shape)
    assert not is_smaller(3, [1, below // 3 + 1, 0], shape)
    assert not is_smaller(3, [1, 0, -1], shape)


def test_words_of_the_specification():
    """d = 1024, R = 32, P = 8: 458,752 words, and a count for every other rank; an allreduce takes 1,835,008."""
    backend = BACK_ENDS["numpy"]()
    part = product(backend, np.zeros((32, 1024)), np.zeros((32, 1024)))
    _, simulator = exchanged(backend, [[part]] * 8)
    assert simulator.words == 458_752 + 7
    _, simulator = exchanged(backend, [[Product(part.shape, part.whole, None)]] * 8)
    assert simulator.words == 1_835_008 + 7


@pytest.mark.parametrize("rows", [[4], [4, 4], [0, 5], [3, 0, 6], [1, 2, 3, 4, 5], [0, 0]])
def test_all_layers_travel_together(rows, backend):
    """Two as factors, one of which is not square; one that is too small; one that a rank does not know."""
    size, shapes = len(rows), [(40, 60), (3, 2), (50, 50), (30, 80)]
    data = [drawn(number, rows, shape) for number, shape in enumerate(shapes)]
    ranks = [
        [product(backend, *data[n][r], known=n != 2 or r > 0, extra=0.5 * (n == 2 and r == 0)) for n in range(4)]
        for r in range(size)
    ]
    results, simulator = exchanged(backend, ranks)
    for number, (total, as_factors) in enumerate(results):
        expected = sum(d.T @ a for a, d in data[number]) + 0.5 * (number == 2)
        assert_close(total, expected, 1e-5)
        assert as_factors == is_smaller(size, [-1] if number == 2 else rows, shapes[number])
    assert results[0][1]
    assert results[3][1]
    assert not results[2][1]
    assert [one.tag for one in simulator.rounds] == ["count", *["rows"] * any(rows), "whole"]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.integers(1, 40), st.integers(1, 40))
def test_never_more_words_than_dense(rows, height, width):
    backend = BACK_ENDS["numpy"]()
    size, data = len(rows), drawn(0, rows, (height, width))
    results, simulator = exchanged(backend, [[product(backend, *one)] for one in data])
    words = max(sum(one.words[r] for one in simulator.rounds if one.tag != "count") for r in range(size))
    dense = 2 * height * width * (size - 1) / size
    assert words <= dense
    if results[0][1]:
        others = max(sum(rows) - own for own in rows)
        assert words == others * (height + width)
    else:
        assert size * max(rows) * (height + width) >= 2 * height * width


def test_what_is_not_finite_arrives_everywhere(backend):
    data = drawn(0, [2, 2], (40, 40))
    data[1][1][0, 3] = np.nan
    [(total, as_factors)], _ = exchanged(backend, [[product(backend, *one)] for one in data])
    assert as_factors
    assert not np.isfinite(total[3]).any()
    assert np.isfinite(total[:3]).all()


def test_inputs_are_not_modified():
    """They are read-only arrays, and the total is none of them."""
    backend = BACK_ENDS["numpy"]()
    part = product(backend, np.ones((1, 2)), np.ones((1, 2)))
    for known in (part, Product(part.shape, part.whole, None)):
        [(total, _)], _ = exchanged(backend, [[known]])
        assert not any(np.shares_memory(total, array) for array in (part.whole, *(part.factors or ())))
