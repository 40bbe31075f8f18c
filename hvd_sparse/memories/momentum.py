"""Momentum correction (DGC)."""

from __future__ import annotations

import math

from hvd_sparse.memories import Memory, remainder
from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, Reduced, State, check_fraction, check_positive


class Momentum:
    """Accumulate the velocity instead of the gradient, so that late entries carry the momentum they missed.

    u = m u + g, v = v + u, x = v; sent entries leave v, and (masking) u as well, which stops stale momentum. The
    optimizer behind it must have no momentum of its own.

    Memory: two float32 per element. Choose it for momentum SGD at densities of 0.01 and less, with the warm-up
    controller. Avoid it with Adam and its kin, which keep their own moments.

    Args:
        momentum: m, that of the training, in [0, 1).
        nesterov: u = m (u + g), v = v + u + g instead.
        masking: what becomes of u where v was sent. True: it is cleared (DGC), so that an entry which is sent in every
            step has no momentum. "stale": the share u / v of it stays, all of such an entry and about 1 / T of one
            that has waited for T steps, which ends nearer to dense when the learning rate falls, at 0.1 most, and is
            slower to start. False: it stays, which is stale at low densities. A bucket that is sent whole is never
            masked: it is momentum SGD exactly.
        clip_norm: limit the 2-norm of each gradient tensor to clip_norm / sqrt(P) before it is accumulated.

    Raises:
        ValueError: an argument is out of range.

    Reference: Y. Lin et al., Deep Gradient Compression, ICLR 2018, arXiv:1712.01887, section 3. Differs in that only
    what a collective accepted is cleared and masked; "stale" is ours.

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> one, state = np.float32([1]), {"velocity": np.float32([0]), "accumulated": np.float32([0])}
        >>> for _ in range(2):
        ...     x, state = Momentum(0.9).compensate(NumpyOps(), 1, one, state)
        >>> state["velocity"], x
        (array([1.9], dtype=float32), array([2.9], dtype=float32))
    """

    keys = ("velocity", "accumulated")
    accumulator = "accumulated"

    def __init__(
        self,
        momentum: float = 0.9,
        nesterov: bool = False,
        masking: bool | str = True,
        clip_norm: float | None = None,
    ) -> None:
        self.momentum = check_fraction(momentum, "momentum")
        self.nesterov = bool(nesterov)
        if isinstance(masking, str) and masking != "stale":
            raise ValueError(f"`masking` must be True, False or 'stale'. Received: masking={masking!r}.")
        self.masking = masking if masking == "stale" else bool(masking)
        self.clip_norm = None if clip_norm is None else check_positive(clip_norm, "clip_norm")

    def compensate(
        self, ops: Ops, num_ranks: int, grad: Array, state: State, alpha: float = 1.0, out: State | None = None
    ) -> tuple[Array, State]:
        out = out or dict.fromkeys(self.keys)
        gain = self._gain(ops, num_ranks, grad, alpha)
        # The state leads every sum: it has the precision, a gradient of 16 bits would round or underflow.
        if self.nesterov:
            velocity = ops.blend(state["velocity"], self.momentum, grad, gain * self.momentum, out=out["velocity"])
            moved = ops.add(velocity, grad, gain)
        else:
            velocity = moved = ops.blend(state["velocity"], self.momentum, grad, gain, out=out["velocity"])
        accumulated = ops.add(state["accumulated"], moved, out=out["accumulated"])
        return accumulated, {"velocity": velocity, "accumulated": accumulated}

    def update(self, ops: Ops, reduced: Reduced, state: State) -> State:
        velocity = state["velocity"]
        if self.masking and reduced.used is not None:
            places = reduced.used.indices
            if self.masking == "stale":
                fresh = _fresh(ops, ops.gather(velocity, places), ops.gather(state["accumulated"], places))
                velocity = ops.put(velocity, places, fresh)
            else:
                velocity = ops.clear(velocity, places)
        return {"velocity": velocity, "accumulated": remainder(ops, state["accumulated"], reduced)}

    def for_dense(self) -> Memory:
        return self

    def _gain(self, ops: Ops, num_ranks: int, grad: Array, alpha: float) -> float:
        if self.clip_norm is None:
            return alpha
        norm = alpha * ops.norm_squared(grad) ** 0.5
        limit = self.clip_norm / math.sqrt(num_ranks)
        return alpha * ops.clip(limit / (norm + 1e-12), 0.0, 1.0)


def _fresh(ops: Ops, velocity: Array, accumulated: Array) -> Array:
    """What is not stale of the velocity: the share of the smaller of the two in the larger, if they point one way."""
    largest = 1e-30 - ops.minimum(-abs(velocity), -abs(accumulated))  # never 0
    share = (velocity / largest) * (accumulated / largest)
    return velocity * ((share + abs(share)) / 2)
