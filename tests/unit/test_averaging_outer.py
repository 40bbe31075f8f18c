"""The outer optimizer: check values, and `torch.optim.SGD` as the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import assert_bits_equal, assert_close, floats
from hypothesis import given
from hypothesis import strategies as st

from hvd_sparse.averaging.outer import OuterSGD, is_outer
from hvd_sparse.ops.numpy import NumpyOps


def path(outer, anchor, means, ops=None, array=lambda x: x):
    """The anchors after each round."""
    state, found = {}, []
    for mean in means:
        anchor, state = outer.step(ops or NumpyOps(), anchor, array(mean), state)
        found.append(anchor)
    return found


MEANS = [np.array([x]) for x in (0.8, 0.7, 0.65)]


def test_diloco():
    found = path(OuterSGD(0.7, 0.9, nesterov=True), np.array([1.0]), MEANS)
    assert_close(np.concatenate(found), [0.734, 0.57538, 0.553287], 1e-6)


def test_the_plain_mean_bit_for_bit(backend):
    means = [floats(0.8, -0.0, 1e-30), floats(0.7, 0.1, 3e30)]
    found = path(OuterSGD(1, momentum=0), backend.array(floats(1, 1, 1)), means, backend.ops, backend.array)
    for anchor, mean in zip(found, means):
        assert_bits_equal(backend.numpy(anchor), mean)
    rounded = path(OuterSGD(0.5, momentum=0), backend.array(floats(1, 1, 1)), means, backend.ops, backend.array)
    assert backend.numpy(rounded[0]).tolist() != means[0].tolist()


@given(
    lr=st.floats(0.1, 1.5), momentum=st.sampled_from([0.0, 0.5, 0.9]), nesterov=st.booleans(),
    means=st.lists(st.floats(-2, 2), min_size=1, max_size=5),
)  # fmt: skip
def test_as_torch(lr, momentum, nesterov, means):
    import torch

    nesterov = nesterov and momentum > 0
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    reference = torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=nesterov)
    expected = []
    for mean in means:
        parameter.grad = parameter.detach() - mean
        reference.step()
        expected.append(parameter.item())
    found = path(OuterSGD(lr, momentum, nesterov), np.array([1.0]), [np.array([mean]) for mean in means])
    assert_close(np.concatenate(found), expected, 1e-12)


@pytest.mark.parametrize("arguments", [{"lr": 0}, {"lr": -1}, {"momentum": 1.0}, {"momentum": -0.1}, {"momentum": "x"}])
def test_out_of_range(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"`{name}` must be a .*Received: {name}="):
        OuterSGD(**arguments)


def test_what_is_an_outer_optimizer():
    assert is_outer(OuterSGD())
    assert not is_outer(OuterSGD)
    assert not is_outer(0.7)
    assert OuterSGD(0.7, 0.9, True).describe() == "OuterSGD(lr=0.7, momentum=0.9, nesterov=True)"
