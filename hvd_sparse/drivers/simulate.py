"""P ranks in lock-step inside one process, without threads: exact counts of words and rounds, an optional clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import reduce
from itertools import accumulate
from typing import Any

from hvd_sparse.collectives.requests import AllGather, AllReduce, AllToAll, Broadcast, Request, num_words
from hvd_sparse.ops.base import Ops
from hvd_sparse.ops.numpy import NumpyOps
from hvd_sparse.types import HvdSparseError, Program, T, World


@dataclass(frozen=True)
class Link:
    """`alpha_seconds` per collective and `bytes_per_second` of one rank's link."""

    alpha_seconds: float = 1.5e-3
    bytes_per_second: float = 1.25e9


@dataclass(frozen=True)
class Round:
    """One collective: its kind, tag and shape on rank 0, and the words (4 bytes) that each rank sent or received.

    Words that only a graph knows, while it is traced, are NaN.
    """

    kind: str
    tag: str
    shape: tuple[int, ...]
    words: tuple[float, ...]
    group: str = "global"


class Simulator:
    """Runs one program per rank and answers their requests.

    Args:
        size: P.
        link: gives every round a duration; `seconds` adds them up.
        ops: the library that the programs' arrays belong to.
        groups: the sets of ranks that make up a group, {"local": [[0, 1], [2, 3]], "cross": [[0, 2], [1, 3]]} say;
            every rank is in one set of each. `hosts` makes these two.
        links: the links of groups that have others, by name.

    Words are counted as in the cost table of the algorithms' conventions: allreduce 2m(P-1)/P, allgather the other
    ranks' blocks, alltoall the larger of what goes to and comes from others, broadcast m.

    Raises:
        HvdSparseError: ranks made different requests in one round; the message shows each rank's. ValueError: a
            request that Horovod would refuse.
    """

    def __init__(
        self,
        size: int,
        link: Link | None = None,
        ops: Ops | None = None,
        groups: dict[str, list[list[int]]] | None = None,
        links: dict[str, Link] | None = None,
    ) -> None:
        self.size = size
        self.link = link
        self.ops = NumpyOps() if ops is None else ops
        self.groups = {"global": [list(range(size))], **(groups or {})}
        self.links = links or {}
        self.rounds: list[Round] = []
        self.seconds = 0.0

    @property
    def words(self) -> float:
        """Words of the busiest rank over all rounds so far."""
        return max((sum(one.words[r] for one in self.rounds) for r in range(self.size)), default=0.0)

    def world(self, rank: int, step: int = 0) -> World:
        """What this rank knows about the others."""
        sets = {name: next(ranks for ranks in sets if rank in ranks) for name, sets in self.groups.items()}
        places = {name: (ranks.index(rank), len(ranks)) for name, ranks in sets.items() if name != "global"}
        return World(rank, self.size, step, places)

    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        """The ranks' results, in rank order."""
        if len(programs) != self.size:
            raise ValueError(f"`programs` must have one entry per rank ({self.size}). Received: {len(programs)}.")
        answers: list[Any] = [None] * self.size
        while True:
            results: dict[int, T] = {}
            requests: dict[int, Request] = {}
            for rank, program in enumerate(programs):
                try:
                    requests[rank] = program.send(answers[rank])
                except StopIteration as stop:
                    results[rank] = stop.value
            if not requests:
                return [results[rank] for rank in range(self.size)]
            self._check(requests, results)
            answers = self._answer([requests[rank] for rank in range(self.size)])

    def _check(self, requests: dict[int, Request], results: dict[int, Any]) -> None:
        described = dict.fromkeys(results, "nothing, its program has ended")
        described.update({rank: _describe(request) for rank, request in requests.items()})
        if len(set(described.values())) > 1:
            lines = "; ".join(f"rank {rank}: {described[rank]}" for rank in sorted(described))
            raise HvdSparseError(f"Ranks made different requests in round {len(self.rounds)}. {lines}.")

    def _answer(self, requests: list[Any]) -> list[Any]:
        first = requests[0]
        if first.group not in self.groups:
            raise ValueError(
                f"`groups` must have the group that {first.tag!r} names. Received: {first.group!r}; known are "
                f"{', '.join(self.groups)}."
            )
        answers: list[Any] = [None] * self.size
        words = [0.0] * self.size
        for ranks in self.groups[first.group]:
            found, counted = self._answer_set([requests[rank] for rank in ranks])
            for rank, answer, number in zip(ranks, found, counted):
                answers[rank], words[rank] = answer, number
        shape = tuple(first.tensor.shape)
        self.rounds.append(Round(type(first).__name__, first.tag, shape, tuple(words), first.group))
        link = self.links.get(first.group, self.link)
        if link:
            self.seconds += link.alpha_seconds + 4 * max(words) / link.bytes_per_second
        return answers

    def _answer_set(self, requests: list[Any]) -> tuple[list[Any], list[float]]:
        """Answers and words of the ranks that one collective connects."""
        first, tensors, size = requests[0], [request.tensor for request in requests], len(requests)
        if isinstance(first, AllReduce):
            combine = {"sum": self.ops.add, "max": self.ops.maximum, "min": self.ops.minimum}[first.op]
            total = reduce(combine, tensors)
            answers = [self.ops.scale(total, 1) for _ in range(size)]  # which programs may write over
            return answers, [2 * num_words(t) * (size - 1) / size for t in tensors]
        if isinstance(first, AllGather):
            gathered = self.ops.concat(tensors)
            return [gathered] * size, [num_words(gathered) - num_words(t) for t in tensors]
        if isinstance(first, Broadcast):
            return [tensors[first.root]] * size, [num_words(t) * (size > 1) for t in tensors]
        return self._all_to_all(requests)

    def _all_to_all(self, requests: list[AllToAll]) -> tuple[list[Any], list[float]]:
        ranks = range(len(requests))
        splits = [_known(request.splits) for request in requests]
        traced = not all(isinstance(count, int) for counts in splits for count in counts)
        for request, counts in zip(requests, splits):
            if len(counts) != len(ranks) or not (traced or sum(counts) <= int(request.tensor.shape[0])):
                raise ValueError(
                    f"`splits` must have one entry per rank ({len(ranks)}) and add up to {request.tensor.shape[0]} "
                    f"rows at most. Received: splits={counts} in {request.tag!r}."
                )
        row_words = float(math.prod(int(width) for width in requests[0].tensor.shape[1:]))
        edges = [[0, *accumulate(counts)] for counts in splits]
        answers, words = [], []
        for r in ranks:
            received = [splits[s][r] for s in ranks]
            blocks = [requests[s].tensor[edges[s][r] : edges[s][r + 1]] for s in ranks]
            answers.append((self.ops.concat(blocks), self.ops.integers(received, requests[r].tensor)))
            sent = math.nan if traced else max(sum(splits[r]), sum(received)) - splits[r][r]
            words.append(row_words * sent)
        return answers, words


def hosts(num_hosts: int, slots: int) -> dict[str, list[list[int]]]:
    """The groups "local" and "cross" of hosts with as many ranks each, numbered host by host."""
    local = [[host * slots + slot for slot in range(slots)] for host in range(num_hosts)]
    return {"local": local, "cross": [list(ranks) for ranks in zip(*local)]}


def run(program: Program[T]) -> T:
    """The result of one program that is alone (P = 1)."""
    return Simulator(1).run([program])[0]


def _known(splits: Any) -> list[Any]:
    """The counts as ints, unless only the graph that is being traced knows them."""
    size = len(splits) if isinstance(splits, tuple) else int(splits.shape[0])
    try:
        return [int(splits[rank]) for rank in range(size)]
    except TypeError:
        return [splits[rank] for rank in range(size)]


def _describe(request: Request) -> str:
    free = ("tensor", "splits")
    settings = ", ".join(f"{f.name}={getattr(request, f.name)!r}" for f in fields(request) if f.name not in free)
    shape = tuple(request.tensor.shape)
    if isinstance(request, AllToAll) or (isinstance(request, AllGather) and not request.same_length):
        shape = ("any", *shape[1:])
    dtype = getattr(request.tensor.dtype, "name", str(request.tensor.dtype).removeprefix("torch."))
    return f"{type(request).__name__}({settings}, shape={shape}, dtype={dtype})"
