"""The nouns that every part shares. Shapes: n elements in a bucket, k entries kept, P ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

Array = Any  # a 1-D numpy.ndarray, torch.Tensor or tf.Tensor: whatever the Ops in use works on
State = dict[str, Any]
T = TypeVar("T")
Program = Generator[Any, Any, T]  # yields requests (collectives.requests), receives their answers, returns T


class HvdSparseError(RuntimeError):
    """Ranks disagree, or one of them failed; the message names the cause and is raised on every rank."""


@dataclass(frozen=True)
class Spec:
    """A bucket: known before the first step and equal on every rank.

    `num_blocks`: the collective limits the entries of so many blocks of equal size, see `block_quota`. `shapes`: of the
    parameters that the bucket consists of, in order; () where they are not known.
    """

    name: str
    size: int
    dtype: str = "float32"
    num_blocks: int = 1
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def parts(self) -> tuple[int, ...]:
        """Elements of each parameter, as far as they are known."""
        return tuple(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class Sparse:
    """Entries of a vector of `size` elements: ascending int32 or int64 `indices` (k,) and their `values` (k,)."""

    indices: Array
    values: Array
    size: int


@dataclass(frozen=True)
class Reduced:
    """The outcome of one exchange.

    Attributes:
        total: (n,) sum over ranks, times the world's gain, bit-equal on all of them.
        used: the part of this rank's input that is inside `total`; None stands for all of it. With `kept` only its
            indices mean something: where something was applied.
        finite: 0-d boolean, equal on all ranks: no rank contributed an infinity or NaN.
        left: what stays of the input at the indices of `used`, like its values: rounding errors. None: nothing.
        kept: (n,) all that stays with this rank, where it is not its input less `used`. None: it is.
        given: (n,) what the optimizer gets in place of `total`. None: it gets that.
        silent: 0-d boolean: this rank's gradient is dropped, and its memory stays as it was before it. None: it is not.
    """

    total: Array
    used: Sparse | None
    finite: Any
    left: Array | None = None
    kept: Array | None = None
    given: Array | None = None
    silent: Any = None

    @property
    def applied(self) -> Array:
        """(n,) what the optimizer gets."""
        return self.total if self.given is None else self.given


@dataclass(frozen=True)
class World:
    """Who takes part. `step` counts exchanges and is equal on all ranks; an int, or a 0-d int64 tensor in a graph.

    `groups` maps further group names ("local", "cross") to (rank, size) inside them; "global" is (rank, size). Totals
    are handed out multiplied by `gain`: 1 / P makes them averages, and costs a pass over k entries, not over n.
    `weights` gives (n,) the bucket's parameters as they are now, equal on all ranks, to a method that asks for them.
    `speaks` tells a method that asks whether this rank's gradient is worth sending: a 0-d boolean; None where nobody
    has looked, and every rank's is.
    """

    rank: int
    size: int
    step: Any = 0
    groups: dict[str, tuple[int, int]] = field(default_factory=dict)
    gain: float = 1.0
    weights: Callable[[], Array] | None = None
    speaks: Any = None

    def place(self, group: str) -> tuple[int, int]:
        """(rank, size) inside the group."""
        return (self.rank, self.size) if group == "global" else self.groups[group]


def num_kept(density: float, size: int) -> int:
    """k for a bucket of `size` elements: at least one entry, never more than there are."""
    # The guard against 0.07 * 100 == 7.000000000000001 and 0.29 * 100 == 28.999999999999996.
    return max(1, min(size, math.floor(density * size + 1e-9)))


def block_quota(size: int, num_blocks: int, k: int) -> tuple[int, int]:
    """Elements of a block, where the last ones may be shorter or empty, and the entries that each may send."""
    block_size = -(-size // num_blocks)
    return block_size, min(block_size, max(1, k // num_blocks))


def block_span(size: int, block_size: int, block: int) -> tuple[int, int]:
    """Where a block of a vector of `size` elements begins and ends."""
    return min(block * block_size, size), min((block + 1) * block_size, size)


def cut_parts(parts: tuple[int, ...], start: int, stop: int) -> tuple[int, ...]:
    """What of the parts of a vector lies in its elements [start, stop)."""
    ends = [min(max(end, start), stop) for end in accumulate(parts, initial=0)]
    return tuple(end - begin for begin, end in zip(ends, ends[1:]) if end > begin)


def listed(names: Iterable[str]) -> str:
    """'a', 'b': the names that an argument may have, for a message."""
    return ", ".join(map(repr, names))


def check_density(density: Any, name: str = "density") -> float:
    """Return `density` as a float.

    Raises:
        TypeError: not a number. ValueError: outside (0, 1].
    """
    hint = f"`{name}` must be a number in (0, 1], for example 0.01 for one per cent. Received: {name}={density!r}."
    if isinstance(density, bool) or not isinstance(density, (int, float)):
        raise TypeError(hint)
    if not 0 < density <= 1:
        raise ValueError(hint)
    return float(density)


def check_fraction(value: Any, name: str) -> float:
    """Return `value` as a float if it is a number in [0, 1), else raise a ValueError that names it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ValueError(f"`{name}` must be in [0, 1). Received: {name}={value!r}.")
    return float(value)


def check_count(value: Any, name: str) -> int:
    """Return `value` as an int if it is a whole number of 1 or more, else raise a ValueError that names it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value < math.inf or value % 1:
        raise ValueError(f"`{name}` must be a whole number, 1 or more. Received: {name}={value!r}.")
    return int(value)


def check_positive(value: Any, name: str) -> float:
    """Return `value` if it is a positive finite number, else raise a ValueError that names it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"`{name}` must be a positive number. Received: {name}={value!r}.")
    return value
