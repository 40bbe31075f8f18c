"""Thresholds that are reused, and regions that fit where the entries are (Ok-Topk)."""

from __future__ import annotations

import math
from typing import Any

from hvd_sparse.collectives.requests import AllGather, AllReduce, AllToAll
from hvd_sparse.ops.base import Ops
from hvd_sparse.schemes.dense import Dense
from hvd_sparse.sparsifiers.threshold import at_least
from hvd_sparse.types import Array, Program, Reduced, Sparse, Spec, State, World, check_count, check_positive
from hvd_sparse.wire import FP32, message

Rule = tuple[float, float, float]

_MOST_RANKS = 1024  # the state has a place for every cut between their regions, so that it does not depend on P
_TIGHTENING = 1.03
_WIRE = FP32()


class OkTopk:
    """The k largest sums of what ranks select by thresholds that are reused; regions follow the entries.

    A rank selects what is above its threshold, and sends each entry to the rank whose region it lies in. Regions are
    agreed so that everybody receives about as much. The owner sums what arrives and returns what is above a threshold
    that all ranks share. Thresholds are exact in every `threshold_period`-th step; in between they follow the counts.
    What was not applied stays with the rank that has it.

    Traffic: about 6k(P-1)/P words per rank and step in two collectives, whose messages have room for 1.5k entries;
    every `region_period` steps a third, of P - 1 numbers. In a TensorFlow graph that third runs in every step: which
    step it is, only the graph knows, and a request cannot depend on that.
    Choose it for densities of 0.001 to 0.02 where the gradient's mass is in few places, which move slowly: the quotas
    of `owner_reduce` would bind. Avoid it where it is spread evenly (`owner_reduce` sends less), and where the density
    changes often: each change makes a step exact.

    Args:
        threshold_period: steps between exact thresholds; 128 for models like BERT.
        region_period: steps between new regions.
        capacity: room in messages, in units of k entries; the smallest of any surplus stay behind.
        tighten_rounds: how often a step raises a threshold by 3 % that more than 4k/3 entries pass.
        local_rule: (low, high, factor): next time the rank's threshold is lower by the factor if fewer than low * k
            entries passed, and higher if more than high * k did.
        global_rule: the same for the threshold of the sums.

    Raises:
        ValueError: an argument is out of range, or there are more than 1024 ranks.

    Reference: S. Li, T. Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, PPoPP 2022,
    arXiv:2201.07598. Ours: messages of fixed capacity; an exact step takes the shared threshold from the owners'
    largest sums, which travel anyway, so no round is needed for it; a rank that selects fewer than P entries votes for
    equal regions; a rank that is alone selects exactly.

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.drivers.simulate import Simulator
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> from hvd_sparse.types import Spec, World
        >>> scheme, ops, spec = OkTopk(), NumpyOps(), Spec("b", 6)
        >>> inputs = [np.float32([5, 1, 0, 0, 3, 0]), np.float32([1, 0, 0, 7, 3, 0])]
        >>> programs = [scheme.reduce(ops, World(r, 2), spec, inputs[r], 2, scheme.init(ops, spec)) for r in range(2)]
        >>> Simulator(2).run(programs)[0][0].total
        array([0., 0., 0., 7., 6., 0.], dtype=float32)
    """

    exact = True
    selects = False  # up to `capacity` times k
    periodic_tags = ("cuts",)
    varying_words = True
    keeps_cancelled = True

    def __init__(
        self,
        threshold_period: int = 32,
        region_period: int = 64,
        capacity: float = 1.5,
        tighten_rounds: int = 5,
        local_rule: Rule = (2 / 3, 5 / 4, 1.012),
        global_rule: Rule = (2 / 3, 4 / 3, 1.008),
    ) -> None:
        self.threshold_period = check_count(threshold_period, "threshold_period")
        self.region_period = check_count(region_period, "region_period")
        self.capacity = check_positive(capacity, "capacity")
        if capacity < 1:
            raise ValueError(f"`capacity` must be 1 or more, to hold k entries. Received: capacity={capacity!r}.")
        if isinstance(tighten_rounds, bool) or not isinstance(tighten_rounds, int) or tighten_rounds < 0:
            raise ValueError(
                f"`tighten_rounds` must be a whole number, 0 or more. Received: tighten_rounds={tighten_rounds!r}."
            )
        self.tighten_rounds = tighten_rounds
        self.local_rule = _check_rule(local_rule, "local_rule")
        self.global_rule = _check_rule(global_rule, "global_rule")

    def init(self, ops: Ops, spec: Spec, like: Array | None = None) -> State:
        """Thresholds are those for `k`, cuts those between the regions of `num_ranks`; 0: there are none yet."""
        cuts = ops.as_int32(ops.zeros(_MOST_RANKS - 1, like))
        return {"k": 0, "local": 0.0, "global": 0.0, "num_ranks": 0, "cuts": cuts}

    def reduce(
        self, ops: Ops, world: World, spec: Spec, x: Array, k: int, state: State
    ) -> Program[tuple[Reduced, State]]:
        n, num_ranks = spec.size, world.size
        if num_ranks > _MOST_RANKS:
            raise ValueError(f"`scheme` 'ok_topk' is for {_MOST_RANKS} ranks at most. Received: {num_ranks} ranks.")
        if k >= n:
            reduced, _ = yield from Dense().reduce(ops, world, spec, x, k, {})
            return reduced, state
        most = min(n, math.ceil(self.capacity * k))
        most_sums = min(n, math.ceil(self.capacity * k / num_ranks))
        exact = (world.step % self.threshold_period == 0) | _differ(state["k"], k) | (num_ranks == 1)

        # Everybody's entries go to the owners.
        chosen, lower = self._select(ops, x, k, most, exact, state["local"])
        edges, regions = yield from self._regions(ops, world, n, chosen, state)
        firsts = ops.searchsorted(chosen, edges)
        bits = ops.pad(ops.bits(ops.gather(x, chosen)), most, 0)
        rows = ops.join([ops.pad(chosen, most, n)[:, None], bits[:, None]])
        received, counts = yield AllToAll(rows, firsts[1:] - firsts[:-1], tag=f"entries.k{k}")
        arrived, sums = _summed(ops, received, counts, num_ranks, n, min(n, num_ranks * most))

        # The largest sums go to everybody.
        passing = ops.cond(exact, lambda: ops.above(sums, 0.0), lambda: ops.above(sums, state["global"]))
        mine = ops.largest(sums, passing, most_sums)
        largest = Sparse(ops.gather(arrived, mine), ops.gather(sums, mine), n)
        words, _ = _WIRE.pack(ops, n, *message(ops, largest, most_sums))
        everything = yield AllGather(words, tag=f"sums.k{k}", same_length=True)
        places, values = (ops.reshape(part, (-1,)) for part in _WIRE.unpack(ops, n, most_sums, everything))
        upper = ops.cond(exact, lambda: _kth_nonzero(ops, values, k), lambda: state["global"])
        taken = at_least(ops, values, upper)
        applied = ops.gather(places, taken)
        total = ops.scatter_sum(n, [(applied, ops.gather(values, taken) * world.gain)])

        used = ops.gather(chosen, ops.positions(ops.gather(ops.marks(n, applied), chosen)))
        reduced = Reduced(total, Sparse(used, ops.gather(x, used), n), ops.all_finite(values))
        thresholds = {
            "local": _adjusted(ops, lower, ops.length(chosen), k, self.local_rule),
            "global": _adjusted(ops, upper, ops.length(applied), k, self.global_rule),
        }
        return reduced, {"k": k, **thresholds, **regions}

    def _select(self, ops: Ops, x: Array, k: int, most: int, exact: Any, threshold: Any) -> tuple[Array, Any]:
        """Ascending indices of at most `most` entries, and the threshold that they passed."""

        def exactly() -> tuple[Array, Any]:
            found = ops.as_int32(ops.top_abs(x, k))
            return found, ops.kth_largest(ops.gather(x, found), k)

        def again() -> tuple[Array, Any]:
            found, limit = ops.as_int32(ops.above(x, threshold)), threshold
            values = ops.gather(x, found)
            for _ in range(self.tighten_rounds):
                limit = _tightened(ops, values, limit, k)
            return ops.gather(found, ops.above(values, limit)), limit

        found, limit = ops.cond(exact, exactly, again)
        found = ops.gather(found, ops.positions(ops.gather(x, found) != 0))
        return ops.largest(x, found, most), limit

    def _regions(self, ops: Ops, world: World, n: int, chosen: Array, state: State) -> Program[tuple[Array, State]]:
        """(P + 1,) where regions begin and end, equal on all ranks, and what the state keeps of it."""
        num_ranks, cuts = world.size, state["cuts"][: world.size - 1]
        due = (world.step % self.region_period == 0) | _differ(state["num_ranks"], num_ranks)
        if num_ranks > 1 and _may_be(due):
            sums = yield AllReduce(ops.as_int64(_cuts(ops, chosen, n, num_ranks)), tag="cuts")
            agreed, before = ops.as_int32(sums // num_ranks), cuts
            cuts = ops.cond(due, lambda: agreed, lambda: before)
        edges = ops.concat([ops.integers([0], cuts), cuts, ops.integers([n], cuts)])
        return edges, {"num_ranks": num_ranks, "cuts": ops.pad(cuts, _MOST_RANKS - 1, 0)}


def _tightened(ops: Ops, values: Array, threshold: Any, k: int) -> Any:
    crowded = ops.length(ops.above(values, threshold)) > 4 * k // 3
    return ops.cond(crowded, lambda: threshold * _TIGHTENING, lambda: threshold)


def _cuts(ops: Ops, chosen: Array, n: int, num_ranks: int) -> Array:
    """(P - 1,) where this rank would cut the bucket into parts of as many entries."""
    count = ops.length(chosen)
    # floor(count * m / P), of which the product may not fit into 32 bits.
    places = [count // num_ranks * m + count % num_ranks * m // num_ranks for m in range(1, num_ranks)]
    equal = [n * m // num_ranks for m in range(1, num_ranks)]
    return ops.cond(
        count >= num_ranks,  # so that cuts differ, and the agreed ones do
        lambda: ops.gather(chosen, ops.integers(places, chosen)),
        lambda: ops.integers(equal, chosen),
    )


def _summed(ops: Ops, rows: Array, counts: Array, num_ranks: int, n: int, most: int) -> tuple[Array, Array]:
    """Ascending distinct indices of the rows, and the sums of their values in rank order."""
    indices, values = rows[:, 0], ops.floats(rows[:, 1])
    arrived = ops.distinct(indices, n)
    slots, blocks, start = ops.searchsorted(arrived, indices), [], 0
    for rank in range(num_ranks):
        stop = start + counts[rank]
        blocks.append((slots[start:stop], values[start:stop]))
        start = stop
    return arrived, ops.scatter_sum(most, blocks)[: ops.length(arrived)]


def _kth_nonzero(ops: Ops, values: Array, k: int) -> Any:
    """The k-th largest magnitude, the smallest that is not 0 if there are fewer; 0 if there are none."""
    return ops.kth_largest(values, ops.clip(ops.length(ops.positions(values != 0)), 1, k))


def _adjusted(ops: Ops, threshold: Any, count: Any, k: int, rule: Rule) -> Any:
    """The threshold for the next step, when `count` entries have passed this one."""
    low, high, factor = rule
    return ops.cond(
        count < math.ceil(low * k),
        lambda: threshold / factor,
        lambda: ops.cond(count > math.floor(high * k), lambda: threshold * factor, lambda: threshold),
    )


def _differ(one: Any, other: int) -> Any:
    return abs(one - other) > 0  # where tensors are compared by identity, != would be True


def _may_be(flag: Any) -> bool:
    """Whether it is true, or known only when the graph that is being traced runs."""
    try:
        return bool(flag)
    except TypeError:
        return True


def _check_rule(rule: Rule, name: str) -> Rule:
    hint = f"`{name}` must be three numbers low, high, factor with 0 < low <= 1 <= high and factor > 1, for example "
    try:
        low, high, factor = (float(check_positive(number, name)) for number in rule)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{hint}(2 / 3, 5 / 4, 1.012). Received: {name}={rule!r}.") from error
    if not (low <= 1 <= high and factor > 1):
        raise ValueError(f"{hint}(2 / 3, 5 / 4, 1.012). Received: {name}={rule!r}.")
    return low, high, factor
