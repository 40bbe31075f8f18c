"""Every rank searches a slice of its own, for all ranks."""

from __future__ import annotations

import math
from typing import Any

from hvd_sparse.collectives.requests import AllGather
from hvd_sparse.ops.base import Ops
from hvd_sparse.sparsifiers.slices import (
    Slice,
    bounds,
    contiguous_slice,
    dealt_slice,
    equal_blocks,
    rebalance,
    unit_of,
)
from hvd_sparse.sparsifiers.threshold import at_least
from hvd_sparse.types import Array, Program, Spec, State, World, check_count, listed

MODES = ("micro", "exdyna")
LAYOUTS = ("interleaved", "contiguous")
_BAND = 1.1  # counts within this factor of k need only small corrections
_SLACK = 1.25  # of messages


class Exclusive:
    """The magnitudes above a common threshold, of which each rank finds those in a slice of its own.

    Slices rotate: step after step a rank searches another one. All ranks send their values wherever any of them has
    found something. The threshold follows the number of entries that are found.

    Traffic per rank and step, with shared_allreduce: P - 1 + 3.75k(P-1)/P words in two collectives of constant shape:
    room for 1.25 k entries, of which about k are used.
    Choose it for many ranks (16 and more) with slow processors: a rank selects from n / P elements, and the volume
    does not grow with P. Avoid it with shards that differ, because only the rank whose turn it is can offer an entry,
    by its own value; and with few ranks, where `owner_reduce` selects better for the same volume.

    Args:
        mode: "micro": slices of equal size. "exdyna": blocks move, one at a time, from slices with many entries to
            neighbours with few; needs contiguous slices. Its slices depend on what was found: not in a TensorFlow
            graph. Where a 1024th of the bucket has less than 32 elements, slices stay equal.
        layout: "interleaved": runs of 64 elements are dealt to the slices in turn, which balances them from the start.
            "contiguous", as published.
        num_blocks: into how many "exdyna" divides a bucket.

    Raises:
        ValueError: no such mode or layout, "exdyna" with interleaved slices, or in a TensorFlow graph.

    Reference: D. Yoon, S. Oh, ExDyna, CCGrid 2024, arXiv:2402.13781; MiCRO, HiPC 2023, arXiv:2310.00967. Ours:
    interleaved slices, messages of constant length, and a threshold that begins, and begins again where k changes, at
    the k-th largest magnitude of the rank in the middle (published: 1 / (2 sqrt(k)), which can be far off). Each
    message tells it in one word more.

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.drivers.simulate import Simulator
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> from hvd_sparse.types import Spec, World
        >>> part, ops, spec = Exclusive(layout="contiguous"), NumpyOps(), Spec("b", 4)
        >>> inputs = [np.float32([1, -5, 2, 9]), np.float32([7, 0, 8, 0])]
        >>> programs = [part.select(ops, World(r, 2), spec, inputs[r], 2, part.init(ops, spec)) for r in range(2)]
        >>> Simulator(2).run(programs)[0][0]
        array([1, 2], dtype=int32)
    """

    shared_indices = True
    blind = False
    entry_bytes = 4 * (_SLACK + 2 * (_SLACK - 1) + 1)  # of the index, of what is sent in vain, of the value

    def __init__(self, mode: str = "micro", layout: str = "interleaved", num_blocks: int = 1024) -> None:
        if mode not in MODES:
            raise ValueError(f"`mode` must be one of {listed(MODES)}. Received: mode={mode!r}.")
        if layout not in LAYOUTS:
            raise ValueError(f"`layout` must be one of {listed(LAYOUTS)}. Received: layout={layout!r}.")
        if mode == "exdyna" and layout != "contiguous":
            raise ValueError(
                f"`layout` must be 'contiguous' with mode='exdyna', which moves the boundaries of slices; interleaved "
                f"ones are balanced without. Received: layout={layout!r}."
            )
        self.mode = mode
        self.layout = layout
        self.num_blocks = check_count(num_blocks, "num_blocks")

    def init(self, ops: Ops, spec: Spec) -> State:
        return {"threshold": 0.0, "k": 0, **({"blocks": 0} if self.mode == "exdyna" else {})}

    def capacity(self, spec: Spec, k: int, num_ranks: int) -> int:
        """The most entries that all ranks may find together: a quarter more than k, and one of each rank at least."""
        return min(spec.size, num_ranks * _room(k, num_ranks))

    def select(self, ops: Ops, world: World, spec: Spec, x: Array, k: int, state: State) -> Program[tuple[Any, State]]:
        n, num_ranks, room = spec.size, world.size, _room(k, world.size)
        blocks = self._blocks(world, n, state)
        is_set = (abs(state["k"] - k) < 1) & (state["threshold"] > 0)
        threshold = ops.cond(is_set, lambda: state["threshold"], lambda: ops.kth_largest(x, k))

        # What this rank finds in its slice; something, if the slice has elements.
        part, length, indices_of = self._slice(ops, world, n, x, blocks)
        found = ops.as_int32(at_least(ops, part, threshold))
        turn = ops.integers([world.step % ops.clip(length, 1, n)], x)
        found = ops.cond(ops.length(found) > 0, lambda: found, lambda: turn)
        mine = ops.pad(ops.as_int32(indices_of(ops.largest(part, found, room))), room, n)

        # What all have found.
        header = ops.bits(ops.scale(ops.zeros(1, x) + 1, threshold))
        words = yield AllGather(ops.concat([header, mine]), tag=f"slices.k{k}", same_length=True)
        words = ops.reshape(words, (num_ranks, 1 + room))
        indices = ops.distinct(ops.reshape(words[:, 1:], (-1,)), n)

        thresholds = ops.reshape(ops.floats(words[:, :1]), (-1,))
        threshold = ops.kth_largest(thresholds, (num_ranks + 1) // 2)  # one value, except where it was not set
        target = max(k, num_ranks)  # there are no fewer: every rank sends something
        ratio = ops.clip(ops.length(indices), 0.0, float(n)) / target
        after = {**state, "threshold": steered(ops, threshold, ratio), "k": k}
        return indices, {**after, **self._moved(ops, n, blocks, indices)}

    def _slice(self, ops: Ops, world: World, n: int, x: Array, blocks: list[int]) -> Slice:
        number = (world.step + world.rank) % world.size
        if self.layout == "interleaved":
            return dealt_slice(ops, x, n, world.size, number)
        if blocks:
            edges = bounds(blocks, self._unit(n, world.size), n)
            return contiguous_slice(ops, x, edges[number], edges[number + 1])
        return contiguous_slice(ops, x, number * n // world.size, (number + 1) * n // world.size)

    # The slices of "exdyna" are made of blocks.

    def _unit(self, n: int, num_ranks: int) -> int:
        return unit_of(n, num_ranks, self.num_blocks) if self.mode == "exdyna" else 0

    def _blocks(self, world: World, n: int, state: State) -> list[int]:
        """How many each slice has; none where slices are equal."""
        if self.mode == "exdyna":
            _check_number(world.step)
        if not self._unit(n, world.size):
            return []
        kept = state["blocks"]
        is_ours = tuple(getattr(kept, "shape", ())) == (world.size,)  # 0 at first, others' after a change of P
        return [int(b) for b in kept] if is_ours else equal_blocks(world.size, self.num_blocks)

    def _moved(self, ops: Ops, n: int, blocks: list[int], indices: Array) -> State:
        """The same after some moved to where less was found."""
        if not blocks:
            return {}
        num_slices = len(blocks)
        unit = self._unit(n, num_slices)
        before = [int(b) for b in ops.searchsorted(indices, ops.integers(bounds(blocks, unit, n), indices))]
        counts = [float(stop - start) for start, stop in zip(before, before[1:])]
        rebalance(blocks, counts, unit, n, max(1, self.num_blocks // (4 * num_slices)))
        return {"blocks": ops.integers(blocks, indices)}


def steered(ops: Ops, threshold: Any, ratio: float) -> Any:
    """The next threshold, by how many times too many entries were found."""

    def raised() -> Any:
        return ops.cond(ratio > _BAND, lambda: threshold * 1.005, lambda: threshold * 1.00125)

    def lowered() -> Any:
        return ops.cond(ratio > 1 / _BAND, lambda: threshold * 0.99875, lambda: threshold * 0.995)

    return ops.cond(ratio > 1, raised, lowered)


def _room(k: int, num_ranks: int) -> int:
    """Entries that one rank may send."""
    return math.ceil(_SLACK * k / num_ranks)


def _check_number(step: Any) -> None:
    try:
        int(step)
    except TypeError as error:
        raise ValueError(
            "`mode` must be 'micro' in a TensorFlow graph, which cannot move the boundaries of slices by what was "
            "found. Received: mode='exdyna'."
        ) from error
