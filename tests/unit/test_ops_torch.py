"""What is particular to torch: 16-bit gradients, memory that is used again, views."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import assert_close, short_repr

from hvd_sparse.memories.momentum import Momentum
from hvd_sparse.memories.none import NoMemory
from hvd_sparse.memories.residual import Residual
from hvd_sparse.ops.numpy import NumpyOps
from hvd_sparse.ops.torch import TorchOps

# Gradients of 16 bits: state stays float32, and neither a loss scale nor many small terms are lost in them.

HALVES = ["float16", "bfloat16"]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("memory", [Residual(), Momentum(0.9), Momentum(0.9, nesterov=True)], ids=short_repr)
@pytest.mark.parametrize("in_place", [False, True])
def test_half_gradients_enter_float32_states(dtype, memory, in_place):
    ops = TorchOps()
    grad = torch.tensor([1.0, 0.333], dtype=getattr(torch, dtype))
    state = {key: torch.zeros(2) for key in memory.keys}
    reference, wide = {key: torch.zeros(2) for key in memory.keys}, grad.float()
    spare = {key: torch.zeros(2) for key in memory.keys} if in_place else None
    for _ in range(5):
        x, following = memory.compensate(ops, 1, grad, state, alpha=2.0**-26, out=spare)
        state, spare = following, state if in_place else None
        y, reference = memory.compensate(ops, 1, wide, reference, alpha=2.0**-26)
        assert x.dtype == torch.float32
        assert {value.dtype for value in state.values()} == {torch.float32}
        assert x[0] != 0
        assert_close(x.numpy() * 2.0**26, y.numpy() * 2.0**26, 1e-6)


@pytest.mark.parametrize("memory", [Residual(), Momentum(0.9), Momentum(0.9, nesterov=True)], ids=short_repr)
def test_half_gradients_in_the_oracle(memory):
    grad = np.array([1.0], np.float16)
    state = {key: NumpyOps().zeros(1, grad) for key in memory.keys}
    x, state = memory.compensate(NumpyOps(), 1, grad, state, alpha=2.0**-26)
    assert {x.dtype, *(value.dtype for value in state.values())} == {np.dtype(np.float32)}
    assert x[0] != 0


@pytest.mark.parametrize("dtype", HALVES)
def test_half_gradients_are_clipped_by_their_true_norm(dtype):
    """300 squared does not fit into float16."""
    memory = Momentum(0.0, clip_norm=1.0)
    state = {key: torch.zeros(3) for key in memory.keys}
    x, _ = memory.compensate(TorchOps(), 1, torch.full((3,), 300.0, dtype=getattr(torch, dtype)), state)
    assert_close(x.numpy(), np.full(3, 3**-0.5), 1e-3)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_loss_scale_is_undone_in_float32_without_memory_too(dtype):
    grad = torch.tensor([1.0], dtype=getattr(torch, dtype))
    x, _ = NoMemory().compensate(TorchOps(), 1, grad, {}, alpha=2.0**-26)
    assert x.dtype == torch.float32
    assert x.item() == 2.0**-26


@pytest.mark.parametrize("dtype", HALVES)
def test_half_values_travel_as_float32(dtype):
    values = torch.tensor([1.5, -2.25, 3.0], dtype=getattr(torch, dtype))
    x, _ = NoMemory().compensate(TorchOps(), 1, values, {})
    assert TorchOps().floats(TorchOps().bits(x)).tolist() == [1.5, -2.25, 3.0]


# TorchOps(reuse=True)


def torch_blocks(*values: float, indices: tuple[int, ...] = (0, 1)) -> list:
    return [(torch.tensor(indices, dtype=torch.int32), torch.tensor(values))]


def test_reuse_writes_over_the_previous_sum():
    ops = TorchOps(reuse=True)
    first = ops.scatter_sum(3, torch_blocks(1, 2))
    second = ops.scatter_sum(3, torch_blocks(5, indices=(2,)))
    assert second.tolist() == [0, 0, 5]
    assert first.data_ptr() == second.data_ptr()


def test_reuse_starts_from_what_it_is_given():
    ops = TorchOps(reuse=True)
    ops.scatter_sum(3, torch_blocks(1, 2))
    assert ops.scatter_sum(3, torch_blocks(5, indices=(2,)), onto=torch.tensor([7.0])).tolist() == [7, 0, 5]
    assert ops.scatter_sum(3, torch_blocks(5, indices=(3,))).tolist() == [0, 0, 0]


def test_reuse_of_marks():
    """By length; what was marked before is not."""
    ops = TorchOps(reuse=True)
    first = ops.marks(4, torch.tensor([1, 3, 1]))
    other = ops.marks(5, torch.tensor([4]))
    second = ops.marks(4, torch.tensor([0]))
    assert second.tolist() == [True, False, False, False]
    assert first.data_ptr() == second.data_ptr()
    assert other.tolist() == [False] * 4 + [True]
    assert ops.marks(4, torch.tensor([], dtype=torch.int64)).tolist() == [False] * 4


def test_marks_may_be_reused_after_their_indices_changed():
    ops, indices = TorchOps(reuse=True), torch.tensor([1, 2])
    ops.marks(4, indices)
    indices.zero_()
    assert ops.marks(4, torch.tensor([3])).tolist() == [False, False, False, True]


def test_reuse_forgets_when_told():
    ops = TorchOps(reuse=True)
    first = ops.scatter_sum(3, torch_blocks(1, 2))
    ops.forget()
    second = ops.scatter_sum(3, torch_blocks(5, indices=(2,)))
    assert first.tolist() == [1, 2, 0]
    assert second.tolist() == [0, 0, 5]


@pytest.mark.parametrize(("n", "dtype"), [(4, torch.float32), (2, torch.float32), (3, torch.float64)])
def test_reuse_follows_size_and_dtype(n, dtype):
    ops = TorchOps(reuse=True)
    ops.scatter_sum(3, torch_blocks(1, 2))
    total = ops.scatter_sum(n, [(torch.tensor([1]), torch.tensor([3.0], dtype=dtype))])
    assert total.dtype == dtype
    assert total.tolist() == [0, 3, *[0] * (n - 2)]


def test_without_reuse_every_sum_is_its_own():
    ops = TorchOps()
    first = ops.scatter_sum(2, torch_blocks(1, 2))
    ops.scatter_sum(2, torch_blocks(3, 4))
    assert first.tolist() == [1, 2]


def test_selection_takes_tensors_that_require_gradients():
    x = torch.tensor([1.0, -3.0, 2.0], requires_grad=True)
    assert TorchOps().top_abs(x, 2).tolist() == [1, 2]
    assert TorchOps().above(x, 1.5).tolist() == [1, 2]
    assert TorchOps().kth_largest(x, 2) == 2


def test_selection_takes_views():
    """A bucket's part, every other element: nothing is contiguous for ever."""
    x = torch.arange(10.0)[::2]
    assert TorchOps().top_abs(x, 2).tolist() == [3, 4]
    assert TorchOps().above(x, 3.0).tolist() == [2, 3, 4]
    assert TorchOps().floats(TorchOps().bits(x)).tolist() == x.tolist()
