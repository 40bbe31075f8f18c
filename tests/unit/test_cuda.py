"""The torch operations on a GPU agree with the NumPy oracle, and stay there."""

import numpy as np
import pytest
import torch

from hvd_sparse.config import sparse_config
from hvd_sparse.drivers.simulate import Simulator
from hvd_sparse.exchange import Exchange
from hvd_sparse.ops.numpy import NumpyOps
from hvd_sparse.ops.torch import TorchOps
from hvd_sparse.types import Spec, World

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")]


@pytest.fixture
def values():
    """Distinct magnitudes: every back end selects the same."""
    generator = np.random.default_rng(0)
    return (generator.permutation(100_003) + 1).astype(np.float32) * generator.choice([-1, 1], 100_003).astype(
        np.float32
    )


def test_selection(values):
    x, oracle, ops = torch.from_numpy(values).cuda(), NumpyOps(), TorchOps()
    assert ops.top_abs(x, 100).is_cuda
    assert np.array_equal(ops.top_abs(x, 100).cpu(), oracle.top_abs(values, 100))
    assert float(ops.kth_largest(x, 100)) == oracle.kth_largest(values, 100)
    found = ops.above(x, 90_000.0)
    assert np.array_equal(found.cpu(), oracle.above(values, 90_000.0))
    assert np.array_equal(ops.largest(x, found, 50).cpu(), oracle.largest(values, oracle.above(values, 90_000.0), 50))
    x[7] = float("nan")
    assert 7 in ops.above(x, 90_000.0).tolist()
    assert 7 in ops.top_abs(x, 3).tolist()


def totals(config, spec, values):
    """Of three steps of two ranks, by the oracle and on the GPU."""
    results = []
    for ops, place in ((NumpyOps(), lambda a: a), (TorchOps(), lambda a: torch.from_numpy(a.copy()).cuda())):
        exchange = Exchange(spec, config.scheme(), config.memory)
        states = [exchange.init(ops, place(values)) for _ in range(2)]
        found = []
        for step in range(3):
            grads = [place(np.roll(values, 17 * rank + step)) for rank in range(2)]
            programs = [exchange.step(ops, World(r, 2, step), grads[r], 2000, states[r]) for r in range(2)]
            outcomes = Simulator(2, ops=ops).run(programs)
            states = [state for _, state in outcomes]
            found.append(outcomes[0][0].total)
        results.append([total.cpu().numpy() if torch.is_tensor(total) else total for total in found])
    return zip(*results)


@pytest.mark.parametrize("sparsifier", ["threshold", "topk", "random_block"])
@pytest.mark.parametrize("memory", ["residual", "momentum"])
def test_steps(values, sparsifier, memory):
    config = sparse_config(0.02, sparsifier=sparsifier, memory=memory)
    for expected, got in totals(config, Spec("b", len(values)), values):
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_low_rank(values):
    spec = Spec("b", len(values), shapes=((100, 1000), (3,)))
    for expected, got in totals(sparse_config(scheme="low_rank"), spec, values):
        np.testing.assert_allclose(got, expected, atol=1e-4 * abs(expected).max())
