"""Slices of a bucket, of which every rank searches another one: how it is cut, and how the cuts move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array

_WIDTH = 64  # elements that stay together when slices are dealt
_UNIT = 32  # a block that moves between slices is a multiple of it
_SKEW = 1.05  # times the mean is too many

Slice = tuple[Array, Any, Callable[[Array], Array]]  # elements, perhaps padded; their number; the indices of places


def dealt_slice(ops: Ops, x: Array, n: int, num_slices: int, number: Any) -> Slice:
    """Short runs are dealt to the slices in turn: every slice has its share of every layer."""
    width = max(1, min(_WIDTH, n // num_slices))
    row = width * num_slices
    num_rows, start = n // row, number * width
    whole, rest = x[: num_rows * row], ops.pad(x[num_rows * row :], row, 0)
    runs = ops.concat([ops.reshape(part, (-1, row))[:, start : start + width] for part in (whole, rest)])
    length = num_rows * width + ops.clip(n - num_rows * row - start, 0, width)
    first = ops.integers([start], x)

    def indices(places: Array) -> Array:
        return places // width * row + first + places % width

    return ops.reshape(runs, ((num_rows + 1) * width,)), length, indices


def contiguous_slice(ops: Ops, x: Array, start: Any, stop: Any) -> Slice:
    """The elements from `start` to `stop`."""
    first = ops.integers([start], x)
    return x[start:stop], stop - start, lambda places: places + first


def unit_of(n: int, num_slices: int, num_blocks: int) -> int:
    """Elements of a block if slices are made of about `num_blocks`; 0 where these are too many."""
    return n // num_blocks // _UNIT * _UNIT if num_slices <= num_blocks else 0


def equal_blocks(num_slices: int, num_blocks: int) -> list[int]:
    """The number of blocks of each slice."""
    return [num_blocks // num_slices + (number < num_blocks % num_slices) for number in range(num_slices)]


def bounds(blocks: Sequence[int], unit: int, n: int) -> list[int]:
    """Where slices begin, and n: the last one has what is left."""
    return [*(unit * edge for edge in accumulate(blocks[:-1], initial=0)), n]


def rebalance(blocks: list[int], counts: list[float], unit: int, n: int, least: int) -> None:
    """Move a block wherever a slice has too many entries and its neighbour too few, and its share of entries with it.

    Args:
        blocks: of each slice.
        counts: entries found in each slice.
        unit: elements of a block.
        least: blocks that a slice keeps.
    """
    mean, moving = sum(counts) // len(counts), unit * sum(counts) / n
    for left in range(len(blocks) - 1 if mean else 0):
        for giver, taker in ((left, left + 1), (left + 1, left)):
            is_skewed = counts[giver] > _SKEW * mean and counts[taker] < mean / _SKEW
            if is_skewed and blocks[giver] > least:
                blocks[giver], blocks[taker] = blocks[giver] - 1, blocks[taker] + 1
                counts[giver], counts[taker] = counts[giver] - moving, counts[taker] + moving
                break
