"""P ranks in lock-step inside one process, without threads: exact counts of words and rounds, an optional clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any

from hvd_sparse.collectives.requests import AllGather, AllReduce, AllToAll, Broadcast, Request, num_words
from hvd_sparse.ops.base import Ops
from hvd_sparse.ops.numpy import NumpyOps
from hvd_sparse.types import HvdSparseError, Program, T


@dataclass(frozen=True)
class Link:
    """`alpha_seconds` per collective and `bytes_per_second` of one rank's link."""

    alpha_seconds: float = 1.5e-3
    bytes_per_second: float = 1.25e9


@dataclass(frozen=True)
class Round:
    """One collective: its kind, tag and shape on rank 0, and the words (4 bytes) that each rank sent or received."""

    kind: str
    tag: str
    shape: tuple[int, ...]
    words: tuple[float, ...]


class Simulator:
    """Runs one program per rank and answers their requests.

    Args:
        size: P.
        link: gives every round a duration; `seconds` adds them up.
        ops: the library that the programs' arrays belong to.

    Words are counted as in the cost table of the algorithms' conventions: allreduce 2m(P-1)/P, allgather the other
    ranks' blocks, alltoall the larger of what goes to and comes from others, broadcast m.

    Raises:
        HvdSparseError: ranks made different requests in one round; the message shows each rank's. ValueError: a
            request that Horovod would refuse.
    """

    def __init__(self, size: int, link: Link | None = None, ops: Ops | None = None) -> None:
        self.size = size
        self.link = link
        self.ops = NumpyOps() if ops is None else ops
        self.rounds: list[Round] = []
        self.seconds = 0.0

    @property
    def words(self) -> float:
        """Words of the busiest rank over all rounds so far."""
        return max((sum(one.words[r] for one in self.rounds) for r in range(self.size)), default=0.0)

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
        first, tensors = requests[0], [request.tensor for request in requests]
        size = self.size
        if first.group != "global":
            raise ValueError(f"Only the group 'global' is simulated. Received: group={first.group!r} in {first.tag!r}.")
        if isinstance(first, AllReduce):
            combine = {"sum": self.ops.add, "max": self.ops.maximum, "min": self.ops.minimum}[first.op]
            total = reduce(combine, tensors)
            answers, words = [total] * size, [2 * num_words(t) * (size - 1) / size for t in tensors]
        elif isinstance(first, AllGather):
            gathered = self.ops.concat(tensors)
            answers, words = [gathered] * size, [num_words(gathered) - num_words(t) for t in tensors]
        elif isinstance(first, Broadcast):
            answers, words = [tensors[first.root]] * size, [num_words(t) * (size > 1) for t in tensors]
        else:
            answers, words = self._all_to_all(requests)
        self.rounds.append(Round(type(first).__name__, first.tag, tuple(tensors[0].shape), tuple(words)))
        if self.link:
            self.seconds += self.link.alpha_seconds + 4 * max(words) / self.link.bytes_per_second
        return answers

    def _all_to_all(self, requests: list[AllToAll]) -> tuple[list[Any], list[float]]:
        ranks = range(self.size)
        splits = [[int(count) for count in request.splits] for request in requests]
        blocks = []
        for request, counts in zip(requests, splits):
            if len(counts) != self.size or sum(counts) > int(request.tensor.shape[0]):
                raise ValueError(
                    f"`splits` must have one entry per rank ({self.size}) and add up to {request.tensor.shape[0]} rows "
                    f"at most. Received: splits={counts} in {request.tag!r}."
                )
            edges = [sum(counts[:r]) for r in range(self.size + 1)]
            blocks.append([request.tensor[edges[r] : edges[r + 1]] for r in ranks])
        sent = [sum(num_words(blocks[r][s]) for s in ranks if s != r) for r in ranks]
        received = [sum(num_words(blocks[s][r]) for s in ranks if s != r) for r in ranks]
        answers = []
        for r in ranks:
            counts = self.ops.integers([splits[s][r] for s in ranks], requests[r].tensor)
            answers.append((self.ops.concat([blocks[s][r] for s in ranks]), counts))
        return answers, [max(pair) for pair in zip(sent, received)]


def run(program: Program[T]) -> T:
    """The result of one program that is alone (P = 1)."""
    return Simulator(1).run([program])[0]


def _describe(request: Request) -> str:
    free = ("tensor", "splits")
    settings = ", ".join(f"{f.name}={getattr(request, f.name)!r}" for f in fields(request) if f.name not in free)
    shape = tuple(request.tensor.shape)
    if isinstance(request, AllToAll) or (isinstance(request, AllGather) and not request.same_length):
        shape = ("any", *shape[1:])
    dtype = getattr(request.tensor.dtype, "name", str(request.tensor.dtype).removeprefix("torch."))
    return f"{type(request).__name__}({settings}, shape={shape}, dtype={dtype})"
