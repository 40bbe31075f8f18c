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


@pytest.mark.parametrize("sparsifier", ["threshold", "topk", "random_block"])
@pytest.mark.parametrize("memory", ["residual", "momentum"])
def test_steps(values, sparsifier, memory):
    config, spec, results = sparse_config(0.02, sparsifier=sparsifier, memory=memory), Spec("b", len(values)), []
    for ops, place in ((NumpyOps(), lambda a: a), (TorchOps(), lambda a: torch.from_numpy(a.copy()).cuda())):
        exchange = Exchange(spec, config.scheme(), config.memory)
        states = [exchange.init(ops, place(values)) for _ in range(2)]
        totals = []
        for step in range(3):
            grads = [place(np.roll(values, 17 * rank + step)) for rank in range(2)]
            programs = [exchange.step(ops, World(r, 2, step), grads[r], 2000, states[r]) for r in range(2)]
            outcomes = Simulator(2, ops=ops).run(programs)
            states = [state for _, state in outcomes]
            totals.append(outcomes[0][0].total)
        results.append([total.cpu().numpy() if torch.is_tensor(total) else total for total in totals])
    for expected, got in zip(*results):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
