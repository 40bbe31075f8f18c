"""Ranks whose gradient has barely changed say nothing, and what they said last counts again (SASG)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvd_sparse.collectives.requests import AllGather
from hvd_sparse.ops.base import Ops
from hvd_sparse.schemes.dense import Dense
from hvd_sparse.sparsifiers.topk import TopK
from hvd_sparse.types import Array, Program, Reduced, Sparse, Spec, State, World, check_count
from hvd_sparse.wire import FP32, message

_TOP = TopK("parameter")
_WIRE = FP32()


class Lazy:
    """The k largest entries of ranks that have something new to say; of the others, what they sent last, once more.

    A rank has nothing new to say if its gradient differs from the one at the weights of its last message, on the same
    batch, by less than the model has moved lately would explain. Its gradient is then dropped: its residual stays as it
    was. What all ranks sent last is kept by everybody, and every step applies the sum of it. So nothing is lost of the
    gradients of steps in which a rank speaks.

    On PyTorch `optimizer.lazy_step(lambda: loss_of(model, batch))` takes a whole step in this way; after an ordinary
    `backward()`, and on TensorFlow, every rank speaks in every step, as with `topk` and `allgather`. Where P k exceeds
    n the exchange is dense, and nobody is silent.

    Traffic: (2k + 1)(number of others that speak) words per rank and step, in one collective. A rank that falls silent
    or speaks again changes the length of its message, which Horovod then negotiates anew.
    Memory: 8 bytes per element for what was sent last, and on PyTorch two copies of the model and a second gradient.
    Choose it where the network is very slow and a second forward and backward pass costs little beside it. Avoid it
    elsewhere: on convolutional networks the authors save a tenth to a fifth of the messages.

    Args:
        history: D, steps whose moves count; also the first steps, in which everybody speaks, and the longest silence.
        threshold: a; larger values allow more silence. The authors took 0.5 for MNIST, 1 for CIFAR-10, 1.25 for
            CIFAR-100. 0: silent only while nothing changes.

    Raises:
        ValueError: an argument is out of range.

    Reference: X. Deng et al., Communication-Efficient Distributed Learning via Sparse and Adaptive Stochastic Gradient,
    2021, arXiv:2112.04088. Ours: an allgather in place of a server; every move of the model is divided by the learning
    rate that it was made with, where the published code keeps the old rate for an epoch; a rank whose numbers are not
    finite speaks, and so does everybody when k or the number of ranks has changed.

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.drivers.simulate import Simulator
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> from hvd_sparse.types import Spec, World
        >>> scheme, ops, spec = Lazy(), NumpyOps(), Spec("b", 4)
        >>> states, inputs = [scheme.init(ops, spec)] * 2, [np.float32([5, 1, 0, 0]), np.float32([1, 0, 7, 0])]
        >>> for speaking in ([True, True], [True, False]):
        ...     worlds = [World(rank, 2, speaks=speaking[rank]) for rank in range(2)]
        ...     programs = [scheme.reduce(ops, worlds[r], spec, inputs[r], 1, states[r]) for r in range(2)]
        ...     results = Simulator(2).run(programs)
        ...     states, inputs[0] = [state for _, state in results], np.float32([2, 3, 0, 0])
        ...     print(results[0][0].total)
        [5. 0. 7. 0.]
        [0. 3. 7. 0.]
    """

    exact = True
    selects = True

    def __init__(self, history: int = 10, threshold: float = 1.0) -> None:
        self.history = check_count(history, "history")
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not threshold >= 0:
            raise ValueError(f"`threshold` must be a number, 0 or more. Received: threshold={threshold!r}.")
        self.threshold = float(threshold)

    def must_speak(self, num_steps: int, silence: int, num_ranks: int) -> bool:
        """Whether a rank speaks whatever its gradient, `silence` steps after it did last."""
        return num_ranks == 1 or num_steps < self.history or silence > self.history

    def has_news(self, change: float, moves: Sequence[float], num_ranks: int) -> bool:
        """Whether a rank's gradient has changed so much that it must be sent.

        Args:
            change: ||gradient - gradient at the weights of its last message||^2, both of the same batch.
            moves: of the last `history` steps, ||move of the model||^2 / (learning rate of the gradients' sum).
        """
        bound = self.threshold / num_ranks**2 * sum(moves[1:])  # as in the paper, one less than the history
        return not (math.isfinite(change) and change <= bound)

    def init(self, ops: Ops, spec: Spec, like: Array | None = None) -> State:
        """`last`: of every rank its last message. As P k is at most n, its size need not depend on P."""
        return {"k": 0, "num_ranks": 0, "last": ops.as_int32(ops.zeros(2 * spec.size, like))}

    def reduce(
        self, ops: Ops, world: World, spec: Spec, x: Array, k: int, state: State
    ) -> Program[tuple[Reduced, State]]:
        n, num_ranks, width = spec.size, world.size, 2 * k
        if k >= n or num_ranks * k > n:
            return (yield from Dense().reduce(ops, world, spec, x, k, state))
        silent = None
        if world.speaks is not None:
            is_outdated = abs(state["k"] - k) + abs(state["num_ranks"] - num_ranks) > 0
            silent = ~(is_outdated | world.speaks | ~ops.all_finite(x))

        def unless_silent(tensor: Array) -> Array:
            return tensor if silent is None else ops.cond(silent, lambda: tensor[:0], lambda: tensor)

        found, _ = yield from _TOP.select(ops, world, spec, x, k, {})
        chosen = unless_silent(found)
        local = Sparse(chosen, ops.gather(x, chosen), n)
        words, _ = _WIRE.pack(ops, n, *message(ops, local, k))
        signed = ops.join([ops.integers([world.rank], words)[:, None], words])
        heard = yield AllGather(unless_silent(signed), tag=f"news.k{k}", same_length=silent is None)

        # The latest of every rank, whose row in `last` is that of its number.
        columns = ops.as_int32(ops.wrapped_range(0, width, width, x))[None, :]
        places = ops.reshape(heard[:, :1] * width + columns, (-1,))
        last = ops.put(state["last"] + 0, places, ops.reshape(heard[:, 1:], (-1,)))
        rows = ops.reshape(last[: num_ranks * width], (num_ranks, width))
        indices, values = _WIRE.unpack(ops, n, k, rows)
        shares = values * world.gain
        total = ops.scatter_sum(n, [(indices[rank], shares[rank]) for rank in range(num_ranks)])
        reduced = Reduced(total, local, ops.all_finite(values), silent=silent)
        return reduced, {"k": k, "num_ranks": num_ranks, "last": last}
