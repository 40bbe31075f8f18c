"""S2 Reducer: its count-sketch, with the code of the scheme `sketch`, and the lossless union of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import assert_bits_equal, frozen
from test_spec_gs_sgd import cells_of

from hvd_sparse.drivers.simulate import Simulator
from hvd_sparse.ops.numpy import NumpyOps
from hvd_sparse.ops.torch import TorchOps
from hvd_sparse.schemes.sketch import decode, encode, hashed_cells
from hvd_sparse.torch.rows import sum_rows

OPS = NumpyOps()
ROWS, WIDTH, CELLS = 4, 3, 7
HASHES = [3, 1, 6, 4, 2, 0, 5, 3, 1, 6, 4, 2]
SIGNS = [1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1]


def rows(**given: list[float]) -> np.ndarray:
    """A gradient of which some rows, "r0" say, are not zero, flat."""
    table = np.zeros((ROWS, WIDTH), np.float32)
    for name, values in given.items():
        table[int(name[1:])] = values
    return frozen(table.reshape(-1))


G_0, G_1 = rows(r0=[1, 2, 0], r3=[3, -1, 2]), rows(r1=[4, 1, 1], r3=[1, 1, 1])


def test_the_hash_functions_of_the_toy():
    places = range(ROWS * WIDTH)
    assert [(5 * t + 3) % CELLS for t in places] == HASHES
    assert [1 if t * (t + 1) // 2 % 2 == 0 else -1 for t in places] == SIGNS


def test_toy(backend):
    cells = [backend.array(cells_of(HASHES, SIGNS, CELLS))]
    tables = [encode(backend.ops, backend.array(g), cells, CELLS) for g in (G_0, G_1)]
    assert [backend.numpy(table).tolist() for table in tables] == [
        [[0, -2, 2, 1, 1, 0, -3]],
        [[-1, 0, 2, 0, 3, 0, -1]],
    ]
    together = tables[0] + tables[1]
    assert backend.numpy(together).tolist() == [[-1, -2, 4, 1, 4, 0, -4]]
    of_sum = encode(backend.ops, backend.array(frozen(G_0 + G_1)), cells, CELLS)
    assert_bits_equal(backend.numpy(together), backend.numpy(of_sum))
    decoded = backend.numpy(decode(backend.ops, together, cells)).reshape(ROWS, WIDTH)
    used = (G_0 + G_1).reshape(ROWS, WIDTH).any(axis=1)
    assert used.tolist() == [True, True, False, True]
    assert decoded[used].tolist() == [[1, 2, 4], [4, 4, 1], [4, -4, 4]]
    exact = (G_0 + G_1).reshape(ROWS, WIDTH)[used]
    assert exact.tolist() == [[1, 2, 0], [4, 1, 1], [4, 0, 3]]
    error = np.linalg.norm(decoded[used] - exact) / np.linalg.norm(exact)
    assert error == pytest.approx(0.935414, abs=1e-6)


def relative_error(num_rows: int, share: float, seed: int = 0, num_nonzero: int = 20_000) -> float:
    """At known places, of 400 rows of 50 in a table of 2000, with `share` cells per element that is not zero."""
    rng = np.random.default_rng(seed)
    table = np.zeros((2000, 50), np.float32)
    used = rng.choice(2000, num_nonzero // 50, replace=False)
    table[used] = rng.normal(size=(len(used), 50))
    num_cells = int(share * num_nonzero / num_rows)
    x = table.reshape(-1)
    cells = hashed_cells(OPS, len(x), num_rows, num_cells, str(seed), x)
    decoded = decode(OPS, encode(OPS, x, cells, num_cells), cells).reshape(table.shape)
    return float(np.linalg.norm(decoded[used] - table[used]) / np.linalg.norm(table))


@pytest.mark.parametrize("share", [0.25, 0.5, 1, 2, 4, 8, 16])
def test_error_of_one_row(share):
    published = {0.25: 2.00, 0.5: 1.43, 1: 1.01, 2: 0.71, 4: 0.51, 8: 0.36, 16: 0.25}[share]
    error = relative_error(1, share)
    assert error <= 1.1 * share**-0.5
    assert error == pytest.approx(published, rel=0.1)


@pytest.mark.parametrize(("num_rows", "published"), [(3, [0.43, 0.24, 0.13]), (5, [0.43, 0.22, 0.096])])
def test_error_of_several_rows(num_rows, published):
    for share, expected in zip((4, 8, 16), published):
        assert relative_error(num_rows, share) == pytest.approx(expected, rel=0.15)


def test_unbiased():
    """The mean over 200 seeds is within three standard errors of the truth, nearly everywhere."""
    x = frozen(np.random.default_rng(0).normal(size=60), np.float32)
    draws = []
    for seed in range(200):
        cells = hashed_cells(OPS, len(x), 1, 20, str(seed), x)
        draws.append(decode(OPS, encode(OPS, x, cells, 20), cells))
    deviation = np.abs(np.mean(draws, axis=0) - x) / (np.std(draws, axis=0) / 200**0.5)
    assert np.mean(deviation < 3) >= 0.97
    assert deviation.max() < 4.5


# The union of rows: `Embedding(sparse=True)` in PyTorch. TensorFlow's: tests/parallel/keras_cases.py.


def union_of(tables: list[np.ndarray]) -> tuple[list[torch.Tensor], Simulator]:
    """The sums of all ranks' rows, and what they cost."""
    simulator = Simulator(len(tables), ops=TorchOps())
    grads = [torch.from_numpy(np.array(table)).to_sparse(1) for table in tables]
    results = simulator.run([sum_rows(simulator.world(rank), grad) for rank, grad in enumerate(grads)])
    assert all(bool(finite) for _, _, finite in results)
    return [total for total, _, _ in results], simulator


def test_the_union_of_the_toy_is_exact():
    """In a table of 100 rows: the toy's own four are smaller as they are."""
    tables = [np.concatenate([g.reshape(ROWS, WIDTH), np.zeros((96, WIDTH), np.float32)]) for g in (G_0, G_1)]
    totals, _ = union_of(tables)
    for total in totals:
        assert total.is_sparse
        assert total.indices()[0].tolist() == [0, 1, 3]
        assert_bits_equal(total.to_dense().numpy(), tables[0] + tables[1])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("share", [0.01, 0.05])
def test_the_words_of_the_union(size, share):
    """At most 2 D words per row of the union and V / 2; a fifth of dense, too."""
    num_rows, width = 32_000, 16
    tables = []
    for rank in range(size):
        used = np.random.default_rng(rank).choice(num_rows, int(share * num_rows), replace=False)
        table = np.zeros((num_rows, width), np.float32)
        table[used] = rank + 1
        tables.append(table)
    totals, simulator = union_of(tables)
    union = int(np.any(tables, axis=(0, 2)).sum())
    assert totals[0].indices().shape[1] == union
    assert simulator.words <= 2 * width * union + num_rows / 2
    assert simulator.words <= 0.2 * 2 * num_rows * width * (size - 1) / size
