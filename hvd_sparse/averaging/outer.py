"""What becomes of the mean: it is the next model, or the direction of a step towards it."""

from __future__ import annotations

from typing import Any, Protocol

from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, State, check_positive


class Outer(Protocol):
    """An optimizer whose gradient is anchor - mean. Every rank runs it on equal numbers: it must be deterministic."""

    def step(self, ops: Ops, anchor: Array, mean: Array, state: State) -> tuple[Array, State]:
        """The next model (n,) and the next state; `state` is {} at first."""

    def describe(self) -> str:
        """Every setting in words: equal on all ranks."""


class OuterSGD:
    """Step from the last averaged model towards the mean of the ranks' models: DiLoCo.

    Traffic: none of its own; two more passes over the model per round, and one float32 per element for the momentum.
    Choose it when ranks train alone for hundreds of steps, with the defaults. Avoid it below some ten steps per round,
    where momentum on top of the inner optimizer's is too much. `OuterSGD(lr=1, momentum=0)` is the plain mean, bit for
    bit.

    Args:
        lr: of the step; 1 goes to the mean itself.
        momentum: in [0, 1).
        nesterov: look ahead along the momentum.

    Raises:
        ValueError: out of range.

    Reference: A. Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023,
    arXiv:2311.08105. The update is that of `torch.optim.SGD`.

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> outer, ops = OuterSGD(), NumpyOps()
        >>> theta, state = outer.step(ops, np.array([1.0]), np.array([0.8]), {})
        >>> theta, state = outer.step(ops, theta, np.array([0.7]), state)
        >>> theta.round(5)
        array([0.57538])
    """

    def __init__(self, lr: float = 0.7, momentum: float = 0.9, nesterov: bool = True) -> None:
        self.lr = float(check_positive(lr, "lr"))
        if isinstance(momentum, bool) or not isinstance(momentum, (int, float)) or not 0 <= momentum < 1:
            raise ValueError(f"`momentum` must be a number in [0, 1). Received: momentum={momentum!r}.")
        self.momentum = float(momentum)
        self.nesterov = bool(nesterov and momentum)

    def step(self, ops: Ops, anchor: Array, mean: Array, state: State) -> tuple[Array, State]:
        if self.lr == 1 and not self.momentum:
            return mean, state  # anchor - (anchor - mean) would round
        direction = ops.add(anchor, mean, -1.0)
        if self.momentum:
            velocity = ops.add(direction, state["velocity"], self.momentum) if state else direction
            direction = ops.add(direction, velocity, self.momentum) if self.nesterov else velocity
            state = {"velocity": velocity}
        return ops.add(anchor, direction, -self.lr), state

    def describe(self) -> str:
        return f"OuterSGD(lr={self.lr:g}, momentum={self.momentum:g}, nesterov={self.nesterov})"


def is_outer(candidate: Any) -> bool:
    """Whether it has the methods of `Outer`, and is an object."""
    return all(hasattr(candidate, name) for name in ("step", "describe")) and not isinstance(candidate, type)
