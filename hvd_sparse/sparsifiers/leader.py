"""The top-k of one rank, for all ranks."""

from __future__ import annotations

from typing import Any

from hvd_sparse.collectives.requests import AllGather, AllReduce, Broadcast
from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, Program, Spec, State, World, listed

MODES = ("star", "clt", "var")
INDEX_CARRIERS = ("allreduce", "broadcast")


class Leader:
    """The k largest magnitudes of one rank, the leader, whose indices all ranks use.

    Traffic per rank and step, with shared_allreduce: 4k(P-1)/P words in two collectives of constant shape. Where a
    broadcast carries the indices k + 2k(P-1)/P; "var" adds P - 1 words and a third collective.
    Choose it where ranks have their large entries in the same places: large batches, shards that are alike. The sum is
    an ordinary allreduce, and no other method whose indices follow the gradient sends less. Avoid it with shards that
    differ, small batches, and in early training (`warmup_steps`): what is large on the other ranks waits for its turn.

    Args:
        mode: who leads. "star": the ranks in turn, step modulo P. "clt": the same, under the name that it has in
            ScaleCom, whose other half is a filtered memory, `Residual(beta=0.1)`. "var": the rank whose selected
            entries have the largest sum of squares, the first of equals; NaN counts as the largest. Every rank then
            selects its own k entries before it knows whether it leads.
        index_carrier: how indices travel. "allreduce": a sum, to which only the leader contributes; its constant name
            and shape keep Horovod's response cache. "broadcast": about half the words of that, but Horovod negotiates
            a broadcast anew every time, and its root must be known: not in a TensorFlow graph.

    Raises:
        ValueError: no such mode or carrier, or a broadcast in a TensorFlow graph.

    Reference: C.-Y. Chen et al., ScaleCom, NeurIPS 2020, arXiv:2104.11125 (CLT-k); S. Tyagi, M. Swany, Flexible
    Communication for Optimal Distributed Learning over Unpredictable Networks, IEEE BigData 2023, arXiv:2312.02493
    (STAR, VAR). Ours: int32 indices, and "var" compares what would be sent now (the published code a norm of raw
    gradients over a window, which leaves rank 0 in the lead until the window is full).

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.drivers.simulate import Simulator
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> from hvd_sparse.types import Spec, World
        >>> inputs = [np.float32([1, -5, 2, 4]), np.float32([7, 0, 8, 0])]
        >>> for mode in ("star", "var"):
        ...     programs = [
        ...         Leader(mode).select(NumpyOps(), World(r, 2), Spec("b", 4), inputs[r], 2, {}) for r in range(2)
        ...     ]
        ...     print(Simulator(2).run(programs)[0][0])
        [1 3]
        [0 2]
    """

    shared_indices = True
    blind = False

    def __init__(self, mode: str = "star", index_carrier: str = "allreduce") -> None:
        if mode not in MODES:
            raise ValueError(f"`mode` must be one of {listed(MODES)}. Received: mode={mode!r}.")
        self.mode = mode
        self.index_carrier = check_index_carrier(index_carrier)

    @property
    def entry_bytes(self) -> int:
        """An index that is summed takes as much as a value."""
        return {"allreduce": 12, "broadcast": 8}[self.index_carrier]

    def init(self, ops: Ops, spec: Spec) -> State:
        return {}

    def select(self, ops: Ops, world: World, spec: Spec, x: Array, k: int, state: State) -> Program[tuple[Any, State]]:
        own, root = None, world.step % world.size
        if self.mode == "var":
            own = ops.as_int32(ops.top_abs(x, k))
            energy = ops.scale(ops.zeros(1, x) + 1, ops.norm_squared(ops.gather(x, own)))
            energies = yield AllGather(energy, tag="energies", same_length=True)
            root = _first_largest(ops, energies, world.size)
        if self.index_carrier == "broadcast":
            root = as_known(root)
        sent = ops.as_int32(ops.zeros(k, x))
        if not isinstance(root, int):  # known to the data only: every rank must have its own ready
            own = ops.as_int32(ops.top_abs(x, k)) if own is None else own
            leads = abs(root - world.rank) < 1  # where tensors are compared by identity, == would be False
            sent = ops.where(leads, own, sent)
        elif root == world.rank:
            sent = ops.as_int32(ops.top_abs(x, k)) if own is None else own
        if self.index_carrier == "broadcast":
            indices = yield Broadcast(sent, root, tag=f"indices.k{k}")
        else:
            indices = yield AllReduce(sent, tag=f"indices.k{k}")
        return indices, state


def _first_largest(ops: Ops, scores: Array, num_ranks: int) -> Any:
    """The lowest rank whose non-negative score is the largest, as a 0-d integer. NaN is larger than infinity."""
    bits = ops.bits(abs(scores))  # integers of the same order, which no graph optimiser rewrites; a NaN may have a sign
    largest = ops.row_max(ops.reshape(bits, (1, num_ranks)), 0)[0]
    countdown = ops.integers(list(range(num_ranks, 0, -1)), bits)
    found = ops.as_int32(bits >= largest) * countdown
    return num_ranks - ops.row_max(ops.reshape(found, (1, num_ranks)), 0)[0, 0]


def check_index_carrier(name: str) -> str:
    """`name` if it is one of INDEX_CARRIERS."""
    if name not in INDEX_CARRIERS:
        raise ValueError(f"`index_carrier` must be one of {listed(INDEX_CARRIERS)}. Received: index_carrier={name!r}.")
    return name


def as_known(root: Any) -> int:
    """A root's rank as the number that a broadcast needs; an error in a graph, where it is a tensor."""
    try:
        return int(root)
    except TypeError as error:
        raise ValueError(
            "`index_carrier` must be 'allreduce' in a TensorFlow graph, where the leader is a tensor: Horovod's "
            "broadcast needs a number. Received: index_carrier='broadcast'."
        ) from error
