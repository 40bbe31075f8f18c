"""Runs programs over Horovod's asynchronous operations on torch tensors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import torch

from hvd_sparse.collectives.requests import AllGather, AllReduce, AllToAll, Request
from hvd_sparse.drivers.groups import world_of
from hvd_sparse.records import Trace
from hvd_sparse.types import HvdSparseError, Program, World

_log = logging.getLogger("hvd_sparse")
_OPERATORS = {"sum": hvd.Sum, "max": hvd.Max, "min": hvd.Min}
# Between two looks at the pending operations, growing while nothing happens: looks cost ranks that share cores dearly.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 5e-5, 1e-3
_WARN_SECONDS = 60.0


class ExchangeFailed(HvdSparseError, hvd.HorovodInternalError):
    """Horovod broke off an operation: another rank died or shut down. Elastic training catches this class."""


@dataclass
class _Running:
    program: Program[Any]
    request: Any = None
    handle: int = -1
    label: str = ""
    since: float = 0.0


class HorovodTorch:
    """Several programs at a time, advanced round by round.

    A round of one program is started as soon as its previous answer is there, and never waited for before every other
    program has been given the chance to start its own: ranks may start programs in any order.

    Args:
        prefix: leads the names of all operations; equal on all ranks, and used by one driver at a time.
        process_sets: Horovod's process sets by group name; "global" is required.
        timeout_seconds: longest wait for one operation.
        patient: long waits are part of the plan; they are no reason for a warning, only for the error at the end.

    Attributes:
        num_bytes: sent by this rank so far, counted as the simulator counts words.
        trace: where rounds are recorded.
        agree: called before the next program starts, then set to None: ranks compare their settings.

    Raises:
        HvdSparseError: the time is up. ExchangeFailed: Horovod reports that another rank failed.
    """

    def __init__(
        self, prefix: str, process_sets: Mapping[str, Any], timeout_seconds: float, patient: bool = False
    ) -> None:
        self.prefix = prefix
        self.process_sets = process_sets
        self.timeout_seconds = timeout_seconds
        self.patient = patient
        self.num_bytes = 0.0
        self.trace: Trace | None = None
        self.agree: Callable[[], None] | None = None
        self._running: dict[str, _Running] = {}
        self._results: dict[str, Any] = {}

    def world(self, step: int) -> World:
        """The ranks that take part, at exchange number `step`."""
        return world_of(self.process_sets, step)

    def start(self, name: str, program: Program[Any]) -> None:
        """Run `program` up to its first request. `name` is unique among the programs that run."""
        agree, self.agree = self.agree, None
        if agree:
            agree()
        self._running[name] = _Running(program)
        self._advance(name, None)

    def has(self, name: str) -> bool:
        """Whether this program was started and its result is not fetched yet."""
        return name in self._running or name in self._results

    def abandon(self) -> None:
        """Forget all programs: one of them failed."""
        self._running, self._results = {}, {}

    def poll(self) -> bool:
        """Advance every program whose answer has arrived; True if there was one."""
        moved = False
        for name in list(self._running):
            running = self._running[name]
            if hvd.poll(running.handle):
                moved = True
                answer = self._answer(running)
                if self.trace:
                    kind, size = type(running.request).__name__, _bytes(running.request.tensor)
                    self.trace.event(name, running.request.tag, kind, size, running.since, time.time())
                self._advance(name, answer)
        return moved

    def finish(self) -> dict[str, Any]:
        """Wait for all programs; their results by name."""
        self._advance_while(lambda: bool(self._running))
        results, self._results = self._results, {}
        return results

    def wait(self, name: str) -> Any:
        """Wait for one program, while others advance; its result."""
        self._advance_while(lambda: name in self._running)
        return self._results.pop(name)

    def run(self, name: str, program: Program[Any]) -> Any:
        """The result of one program."""
        self.start(name, program)
        return self.wait(name)

    def _advance_while(self, unfinished: Callable[[], bool]) -> None:
        since, warned = time.monotonic(), False
        while unfinished():
            if self.poll():
                since, warned = time.monotonic(), False
                continue
            waited = time.monotonic() - since
            if waited > self.timeout_seconds:
                raise HvdSparseError(f"{self._complaint(waited)} Giving up: `timeout_seconds` is over.")
            if waited > _WARN_SECONDS and not warned and not self.patient:
                _log.warning("%s", self._complaint(waited))
                warned = True
            time.sleep(min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS + waited / 4))

    def _advance(self, name: str, answer: Any) -> None:
        running = self._running[name]
        try:
            request = running.program.send(answer)
        except StopIteration as stop:
            del self._running[name]
            self._results[name] = stop.value
            return
        running.request = request
        running.label, running.since = f"{self.prefix}.{name}.{request.tag}", time.time()
        try:
            running.handle = self._submit(request, running.label)
        except (RuntimeError, ValueError) as error:
            del self._running[name]
            raise self._failure(running.label, error) from error

    def _submit(self, request: Request, name: str) -> int:
        group = self.process_sets[request.group]
        tensor = request.tensor.contiguous()
        if isinstance(request, AllReduce):
            self.num_bytes += 2 * _bytes(tensor) * (group.size() - 1) / group.size()
            return hvd.allreduce_async(tensor, name=name, op=_OPERATORS[request.op], process_set=group)
        if isinstance(request, AllGather):
            return hvd.allgather_async(tensor, name=name, process_set=group)
        if isinstance(request, AllToAll):
            splits = torch.as_tensor(request.splits, dtype=torch.int32)
            row_bytes = _bytes(tensor) / max(1, tensor.shape[0])
            self.num_bytes += row_bytes * (int(splits.sum()) - int(splits[group.rank()]))
            return hvd.alltoall_async(tensor, splits=splits, name=name, process_set=group)
        self.num_bytes += _bytes(tensor)
        return hvd.broadcast_async(tensor, request.root, name=name, process_set=group)

    def _answer(self, running: _Running) -> Any:
        try:
            answer = hvd.synchronize(running.handle)
        except hvd.HorovodInternalError as error:
            raise self._failure(running.label, error) from error
        if isinstance(running.request, AllGather):
            self.num_bytes += _bytes(answer) - _bytes(running.request.tensor)
        return answer

    def _failure(self, label: str, error: Exception) -> ExchangeFailed:
        return ExchangeFailed(
            f"Rank {hvd.rank()} could not finish the exchange {label!r}: another rank failed, or left while this one "
            f"went on (the output of that rank says why; for uneven numbers of batches, call hvd.join() after the "
            f"training loop). Horovod says: {error}"
        )

    def _complaint(self, waited: float) -> str:
        labels = ", ".join(running.label for running in self._running.values())
        advice = (
            "Do all ranks run the same number of batches (if not, call hvd.join() after the training loop), take the "
            "same branches, and wrap the same optimizers in the same order?"
        )
        if self.patient:
            advice = "Do all of them still take steps, or call finish()?"
        return f"Rank {hvd.rank()} has waited {waited:.0f} s for the other ranks to take part in: {labels}. {advice}"


def text_program(text: str, tag: str = "text") -> Program[list[str]]:
    """Every rank's text, on every rank, in rank order."""
    data = torch.tensor(list(text.encode()) or [32], dtype=torch.uint8)
    lengths = yield AllGather(torch.tensor([len(data)], dtype=torch.int32), tag=f"{tag}.length")
    everything = yield AllGather(data, tag=tag)
    parts = torch.split(everything, lengths.tolist())
    return [bytes(part.tolist()).decode().strip() for part in parts]


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
