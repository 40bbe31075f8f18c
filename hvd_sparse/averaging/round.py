"""What ranks say to each other in one round: their models and a short trailer, in one buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hvd_sparse.collectives.requests import AllReduce
from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, Program


@dataclass(frozen=True)
class Report:
    """What one rank says about itself.

    Attributes:
        weight: of its model in the mean; 0 for one that has no data or no new step.
        steps: local steps since its last report.
        done: its data is exhausted: it only waits for the others.
        wants_stop: everybody shall stop.
        finite: nothing is wrong with its model; None: look at what is in the message.
        gives: its part `given` counts, and nobody else's.
    """

    weight: float
    steps: int = 0
    done: bool = False
    wants_stop: bool = False
    finite: bool | None = None
    gives: bool = False


@dataclass(frozen=True)
class Outcome:
    """The sums of all reports, equal on all ranks.

    Attributes:
        means: weighted means of the parts; None if no rank had any weight.
        given: the part of the rank that gave one; None if nobody did.
    """

    weight: float
    steps: int
    num_done: int
    stop: bool
    num_finite: int
    means: list[Array] | None = field(repr=False, default=None)
    given: Array | None = field(repr=False, default=None)


def average(ops: Ops, parts: Sequence[Array], report: Report, tag: str, given: Array | None = None) -> Program[Outcome]:
    """One round: the weighted means of `parts` over ranks, and `given` of the one rank that gives it.

    A rank with anything that is not finite takes part with weight 0, so that it receives the mean and spoils nothing.

    Traffic: 2n(P-1)/P words for all parts and the trailer together, one collective.

    Args:
        parts: float32 vectors, of equal lengths on all ranks.
        report: of this rank.
        tag: names the collective.
        given: another vector, of equal length on all ranks.

    Example: theta = [2, 4], [6, 0], [100, 100] with w = 1, 3, 0.
        >>> import numpy as np
        >>> from hvd_sparse.drivers.simulate import Simulator
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> models = [np.float32([2, 4]), np.float32([6, 0]), np.float32([100, 100])]
        >>> programs = [average(NumpyOps(), [x], Report(w), "model") for x, w in zip(models, (1, 3, 0))]
        >>> Simulator(3).run(programs)[0].means
        [array([5., 1.], dtype=float32)]
    """
    finite = report.finite if report.finite is not None else are_finite(ops, parts)
    weight = report.weight if finite else 0.0
    message = [_weighted(ops, part, weight) for part in parts]
    gives = given is not None and report.gives and bool(ops.all_finite(given))
    if given is not None:
        message.append(_weighted(ops, given, float(gives)))
    numbers = (weight, report.steps, report.done, report.wants_stop, finite, gives)
    like = [*message, ops.zeros(1)][0]
    trailer = [ops.zeros(1, like) + float(number) for number in numbers]
    total = yield AllReduce(ops.concat([*message, *trailer]), tag=tag)
    lengths = [int(part.shape[0]) for part in message]
    ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
    sums = [total[end - length : end] for end, length in zip(ends, lengths)]
    weight, steps, num_done, num_stops, num_finite, num_gives = (float(x) for x in total[sum(lengths) :])
    theirs = sums.pop() if given is not None else None
    return Outcome(
        weight, int(steps), int(num_done), num_stops > 0, int(num_finite),
        means=[part if weight == 1 else part / weight for part in sums] if weight > 0 else None,
        given=theirs if num_gives else None,
    )  # fmt: skip


def are_finite(ops: Ops, parts: Sequence[Array]) -> bool:
    """Whether nothing in them is infinite or NaN."""
    return all(bool(ops.all_finite(part)) for part in parts)


def keep_progress(mean: Array, now: Array, at_start: Array) -> Array:
    """The mean of models as they were, and what this rank has done meanwhile: the delta rule.

    >>> round(keep_progress(mean=0.8, now=1.3, at_start=1.0), 6)
    1.1
    """
    return mean + (now - at_start)


def _weighted(ops: Ops, part: Array, weight: float) -> Array:
    """Not a product where the weight is 0: the part may hold NaN."""
    if weight == 1:
        return part
    return ops.scale(part, weight) if weight else ops.zeros(ops.length(part), part)
