"""Which parameters travel together. The same plan on every rank, from what is equal on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_sparse.types import Spec

_WORTH_SENDING = 8  # a bucket with less than this part of `bucket_bytes` waits for the next parameter


@dataclass(frozen=True)
class Member:
    """A parameter inside a bucket: elements [start, start + size) of the flat vector."""

    name: str
    start: int
    size: int


@dataclass(frozen=True)
class Layout:
    """A bucket's parameters. `dense` ones are not worth compressing."""

    spec: Spec
    members: tuple[Member, ...]
    dense: bool


@dataclass(frozen=True)
class Parameter:
    """What the plan needs to know. `place`: dtype and device, which no bucket mixes; `lossless`: never compress."""

    name: str
    shape: tuple[int, ...]
    place: str
    itemsize: int = 4
    lossless: bool = False

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def plan_buckets(
    parameters: Sequence[Parameter],
    bucket_bytes: int,
    min_size: int,
    groups: Sequence[Sequence[str]] | None = None,
    first: int = 0,
) -> list[Layout]:
    """Fill buckets in reverse order of registration: backward produces gradients roughly in that order.

    Args:
        parameters: in order of registration.
        bucket_bytes: a bucket is closed before it would grow beyond this, unless it has less than an eighth of it: a
            collective costs the same however small it is.
        min_size: parameters with fewer elements or with one dimension go to dense buckets.
        groups: names of parameters that shall share a bucket whatever its size (Horovod's `groups`).
        first: number of the first bucket, when others exist already.

    Example:
        >>> layouts = plan_buckets([Parameter("w", (2, 3), "cpu"), Parameter("b", (2,), "cpu")], 64, 4)
        >>> [(layout.spec.name, layout.spec.size, layout.dense) for layout in layouts]
        [('b0', 2, True), ('b1', 6, False)]
    """
    group_of = {name: number for number, group in enumerate(groups or ()) for name in group}
    open_buckets: dict[tuple[str, bool, int], list[Parameter]] = {}
    closed: list[tuple[bool, list[Parameter]]] = []
    for parameter in reversed(parameters):
        dense = parameter.lossless or len(parameter.shape) < 2 or parameter.size < min_size
        group = group_of.get(parameter.name, -1)
        key = (parameter.place, dense, group)
        members = open_buckets.setdefault(key, [])
        filled = sum(member.size * member.itemsize for member in members)
        is_full = filled + parameter.size * parameter.itemsize > bucket_bytes
        if group < 0 and is_full and filled * _WORTH_SENDING >= bucket_bytes:
            closed.append((dense, members))
            members = open_buckets[key] = []
        members.append(parameter)
    closed += [(key[1], members) for key, members in open_buckets.items()]
    return [_layout(f"b{first + number}", members, dense) for number, (dense, members) in enumerate(closed)]


def split_evenly(parameters: Sequence[Parameter], num_groups: int) -> list[list[str]]:
    """`num_groups` runs of consecutive parameters of about equal size (Horovod's `groups` as an int)."""
    total, done = sum(parameter.size for parameter in parameters), 0
    groups: list[list[str]] = [[] for _ in range(num_groups)]
    for parameter in parameters:
        groups[min(num_groups - 1, done * num_groups // max(1, total))].append(parameter.name)
        done += parameter.size
    return groups


def _layout(name: str, parameters: Sequence[Parameter], dense: bool) -> Layout:
    members, start = [], 0
    for parameter in parameters:
        members.append(Member(parameter.name, start, parameter.size))
        start += parameter.size
    shapes = tuple(parameter.shape for parameter in parameters)
    return Layout(Spec(name, start, shapes=shapes), tuple(members), dense)
