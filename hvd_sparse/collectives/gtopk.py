"""Entries are merged pairwise, up a tree, and of every two messages the k largest sums go on."""

from __future__ import annotations

from hvd_sparse.collectives.requests import AllToAll, Broadcast
from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, Program, Reduced, Sparse, Spec, World
from hvd_sparse.wire import FP32, message

_WIRE = FP32()


class GTopk:
    """Ranks merge their entries pairwise up a tree, k at a time; rank 0 tells everybody the k that survive.

    A baseline. What a merge drops is lost where its index survives through another branch: the rank that sent it takes
    it for used. With normal gradients that are half alike, at a density of 0.01, that is 6 % of what is applied on 4
    ranks, a fifth on 8, a third on 16; nothing on 2.

    Traffic: 2k words in each of ceil(log2 P) + 1 dependent rounds, of which the last, a broadcast, is negotiated anew
    in every step.
    Choose it to compare with. Avoid it otherwise: `owner_reduce` sends less in two rounds and loses nothing, and the
    scheme `ok_topk` applies the k largest sums, too.

    Args:
        account_leak: what a merge drops stays with the rank that merged, so that nothing is lost.

    Reference: S. Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low
    Bandwidth Networks, ICDCS 2019, arXiv:1901.04359. Ours: any number of ranks; a round is an alltoall in which most
    send nothing; `account_leak`.

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.drivers.simulate import Simulator
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> from hvd_sparse.types import Sparse, Spec, World
        >>> x, ops, spec = np.float32([3, 0, 1, 2]), NumpyOps(), Spec("b", 4)
        >>> local = [Sparse(np.array(chosen), x[chosen], 4) for chosen in ([0, 3], [2, 3])]
        >>> programs = [GTopk().reduce(ops, World(rank, 2), spec, x, 2, local[rank]) for rank in range(2)]
        >>> Simulator(2).run(programs)[0].total
        array([3., 0., 0., 4.], dtype=float32)
    """

    needs_shared_indices = False
    has_quotas = False
    keeps_cache = False

    def __init__(self, account_leak: bool = False) -> None:
        self.account_leak = bool(account_leak)

    @property
    def conserves(self) -> bool:
        return self.account_leak

    def reduce(self, ops: Ops, world: World, spec: Spec, x: Array, k: int, local: Sparse) -> Program[Reduced]:
        n, rank, stride = spec.size, world.rank, 1
        current, dropped = message(ops, local, k), []
        while stride < world.size:
            to = rank - stride if rank % (2 * stride) == stride else None
            words, _ = _WIRE.pack(ops, n, *current)
            received, _ = yield AllToAll(
                words, tuple(int(other == to) for other in range(world.size)), tag=f"merge{stride}.k{k}"
            )
            # Also where nothing arrives: a graph would leave out a request whose answer is not used.
            current, rest = _merged(ops, n, k, current, _WIRE.unpack(ops, n, k, received))
            dropped.append(rest)
            stride *= 2
        words, _ = _WIRE.pack(ops, n, *current)
        survivors = yield Broadcast(words, root=0, tag=f"sums.k{k}")
        places, values = (ops.reshape(part, (k,)) for part in _WIRE.unpack(ops, n, k, survivors))
        total = ops.scatter_sum(n, [(places, values * world.gain)])
        survived = ops.gather(ops.marks(n + 1, places), local.indices)
        used = ops.gather(local.indices, ops.positions(survived))
        kept = _with_dropped(ops, x, local.indices, dropped) if self.account_leak else None
        return Reduced(total, Sparse(used, ops.gather(x, used), n), ops.all_finite(values), kept=kept)


def _merged(
    ops: Ops, n: int, k: int, own: tuple[Array, Array], theirs: tuple[Array, Array]
) -> tuple[tuple[Array, Array], Sparse]:
    """The message of the k largest sums, and the others."""
    blocks = [(ops.reshape(indices, (-1,)), ops.reshape(values, (-1,))) for indices, values in (own, theirs)]
    arrived = ops.distinct(ops.concat([indices for indices, _ in blocks]), n)
    slots = [(ops.searchsorted(arrived, indices), values) for indices, values in blocks]  # padding adds 0 somewhere
    sums = ops.scatter_sum(2 * k, slots)[: ops.length(arrived)]
    largest = ops.largest(sums, ops.positions(sums != 0), k)
    others = ops.positions(~ops.marks(2 * k, largest)[: ops.length(arrived)])
    going, staying = (Sparse(ops.gather(arrived, i), ops.gather(sums, i), n) for i in (largest, others))
    return message(ops, going, k), staying


def _with_dropped(ops: Ops, x: Array, sent: Array, dropped: list[Sparse]) -> Array:
    """What this rank keeps: x without what it sent, and what its merges dropped."""
    kept = ops.clear(ops.scale(x, 1.0), sent)
    for rest in dropped:
        kept = ops.put(kept, rest.indices, ops.gather(kept, rest.indices) + rest.values)
    return kept
