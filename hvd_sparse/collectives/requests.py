"""What a program may ask of the network. A driver answers each request when every rank has made it.

`tag` names the round inside its program. It is constant over steps and equal on all ranks; together with a constant
shape and dtype it keeps Horovod's response cache valid, so a request whose shape follows a setting carries the
setting in its tag (`pairs.k1024`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Union

from hvd_sparse.types import Array


@dataclass(frozen=True)
class AllReduce:
    """Elementwise `op` ("sum", "max" or "min") over ranks. Answer: a tensor like `tensor`."""

    tensor: Array
    tag: str
    op: str = "sum"
    group: str = "global"


@dataclass(frozen=True)
class AllGather:
    """Answer: the ranks' tensors, concatenated along the first dimension in rank order; first lengths may differ.

    `same_length` promises that they do not, so that a graph knows the shape of the answer.
    """

    tensor: Array
    tag: str
    group: str = "global"
    same_length: bool = False


@dataclass(frozen=True)
class AllToAll:
    """Send `splits[r]` leading rows to rank r, packed from the front in rank order.

    `splits` is a tuple of ints, or int32 (P,) where they depend on the data; `tensor` may be longer than their sum.
    Answer: (rows received in rank order, int32 (P,) number received from each rank).
    """

    tensor: Array
    splits: Any
    tag: str
    group: str = "global"


@dataclass(frozen=True)
class Broadcast:
    """Answer: `tensor` of rank `root` on every rank. Shapes must agree. Horovod never caches a broadcast."""

    tensor: Array
    root: int
    tag: str
    group: str = "global"


Request = Union[AllReduce, AllGather, AllToAll, Broadcast]


def num_words(tensor: Array) -> float:
    """Size of a tensor in words of 4 bytes, whatever its dtype: every wire format here is made of words.

    NaN in a graph that does not know it yet.
    """
    return math.prod((math.nan if dimension is None else int(dimension) for dimension in tensor.shape), start=1.0)
