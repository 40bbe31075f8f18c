"""Averages that are one step late, and travel meanwhile."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

import torch

from hvd_sparse.config import Config
from hvd_sparse.drivers.horovod_torch import HorovodTorch
from hvd_sparse.torch.averager import Averager
from hvd_sparse.torch.bucket import Bucket
from hvd_sparse.torch.census import Census, census_program, check_failures
from hvd_sparse.types import HvdSparseError, Reduced, num_kept


class DelayedAverager(Averager):
    """Gives out the averages of the step before while those of this step travel: see `hvd_sparse.memories.delayed`.

    A bucket's exchange starts when its gradients are complete, and is waited for when its next ones are. All ranks have
    started it by then, at the end of the backward pass at the latest, so that no rank waits for one that waits for it.
    What was sent leaves the memory at that time, whatever becomes of the step: a result that no step has applied is
    given out again, together with the next.

    Args:
        config: its memory is a `Delayed`.
        arguments: those of `Averager`.
    """

    def __init__(self, names: dict[Any, str], config: Config, driver: HorovodTorch, **arguments: Any) -> None:
        memory: Any = config.memory
        super().__init__(names, replace(config, memory=memory.memory), driver, **arguments)
        self.counters.scheme = ", ".join(config.describe().values())
        # By bucket: sums that have arrived and are not given out yet; those given out, until a step has applied them;
        # and those that are not finite, which are given out once, for a scaler to see.
        self._late: dict[str, torch.Tensor] = {}
        self._given: dict[str, torch.Tensor] = {}
        self._spoilt: dict[str, torch.Tensor] = {}
        self._any_late = False
        self._census: Census | None = None
        self._present: frozenset[Any] = frozenset()  # parameters that `_given` is for

    def _forget_gradients(self) -> None:
        super()._forget_gradients()
        self._waiting: dict[str, dict[Any, None]] = {}  # parameters with a gradient, by bucket

    # -- during backward -----------------------------------------------------------------------------------------------

    def _feed(self, parameter: Any) -> None:
        bucket = self._bucket_of.get(parameter)
        if bucket is None or bucket.started or parameter.grad is None or parameter.grad.is_sparse:
            return
        waiting = self._waiting.setdefault(bucket.layout.spec.name, {})
        waiting[parameter] = None
        self.driver.poll()
        if len(waiting) == len(bucket.parameters):
            self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        self._started = self._started or time.perf_counter()
        self._arrive(bucket)
        spec, world = bucket.layout.spec, self.driver.world(self.num_exchanges)
        for parameter in self._waiting.get(spec.name, ()):
            bucket.add(parameter, self._local_grad(parameter), world.size, 1.0 / self._scale)
        self.driver.start(spec.name, bucket.program(world, num_kept(self._density, spec.size)))

    def _arrive(self, bucket: Bucket) -> None:
        """Wait for this bucket's exchange in flight, if there is one, and take in what it came to."""
        name = bucket.layout.spec.name
        if not self.driver.has(name):
            return
        reduced: Reduced = self.driver.wait(name)
        if bool(reduced.finite):
            bucket.commit()
            self._late_of(bucket).add_(reduced.total)
        else:
            bucket.discard()
            self._spoilt[name] = reduced.total.clone()

    def _late_of(self, bucket: Bucket) -> torch.Tensor:
        spec, device = bucket.layout.spec, bucket.parameters[0].device
        if spec.name not in self._late:
            saved = (self.loaded or {}).get("late", {}).get(_key(bucket))
            self._late[spec.name] = torch.zeros(spec.size, device=device) if saved is None else saved.to(device).clone()
        return self._late[spec.name]

    # -- the exchange --------------------------------------------------------------------------------------------------

    def _exchange(self, active: bool, failure: str) -> Census:
        census = super()._exchange(active, failure)
        if not active:  # the others apply it, and this rank will get their weights
            self.settle(used=True)
        return census

    def _replace_gradients(self, active: bool, failure: str) -> Census:
        census = self._last_census(active, failure)
        if not self.buckets:
            self._plan_buckets([p for p in self.names if p.requires_grad])
        for parameter in self._touched:
            self._feed(parameter)
        for bucket in self.buckets:
            if not bucket.started:
                self._start(bucket)
        self._give_out(census)
        self._any_late = True
        return census

    def _last_census(self, active: bool, failure: str) -> Census:
        """That of the exchange before, so that nobody waits; of the first one, its own."""
        if self.driver.has("census"):
            self._census = self.driver.wait("census")
        alarm = self.meter.is_alarmed()
        program = census_program(list(self.names), self._touched, active, alarm, failure)
        self.driver.start("census", program)
        if self._census is None:
            self._census = self.driver.wait("census")
        check_failures(self._census, self.driver, failure)
        if self._census.row_sparse:
            name = self.names[next(p for p in self.names if p in self._census.row_sparse)]
            raise HvdSparseError(f"`memory` 'delayed' is for dense gradients. That of {name!r} is sparse: use another.")
        return self._census

    def _give_out(self, census: Census) -> None:
        size = self.driver.world(0).size
        gain = self._scale / size if self.average else self._scale
        again = self._present if not self._given else frozenset()
        results = {}
        for bucket in self.buckets:
            name, late = bucket.layout.spec.name, self._late_of(bucket)
            spoilt = self._spoilt.pop(name, None)
            given = late * gain if spoilt is None else late + spoilt
            results[name] = Reduced(given, used=None, finite=spoilt is None)
            used = self._given.get(name)  # whose memory is the next to be filled
            self._given[name], self._late[name] = late, torch.zeros_like(late) if used is None else used.zero_()
        self._present = census.present | again
        self._install(results, replace(census, present=self._present))
        for parameter in self._touched - self._present:  # its first average is yet to come
            parameter.grad = None

    # -- the outcome ---------------------------------------------------------------------------------------------------

    def settle(self, used: bool) -> None:
        """Decide about the averages that were given out last, unless that is done: unused ones are kept for later."""
        if not self._pending:
            return
        self._pending = False
        if not used:
            for name, given in self._given.items():
                self._late[name].add_(given)
            self._given = {}
        self.counters.skipped_steps += not (used and all(self._finite))

    def land(self) -> None:
        """Wait for everything that is in flight."""
        for bucket in self.buckets:
            self._arrive(bucket)
        if self.driver.has("census"):
            self._census = self.driver.wait("census")

    def flush(self) -> bool:
        """Replace gradients by what no step has applied; False if there is nothing."""
        self.zeroed()
        if not self._any_late or self._census is None:
            return False
        self.land()
        self._spoilt.clear()
        self._give_out(self._census)
        self.averaged, self._pending, self._any_late = True, True, False
        return True

    def save(self) -> dict[str, Any]:
        self.land()
        saved = {_key(bucket): self._late_of(bucket).cpu().clone() for bucket in self.buckets}
        if self._pending:  # as if they were never given out, like the residual of other averagers
            for bucket in self.buckets:
                saved[_key(bucket)] += self._given[bucket.layout.spec.name].cpu()
        return {**super().save(), "late": saved or (self.loaded or {}).get("late", {})}

    def load(self, saved: dict[str, Any]) -> None:
        with contextlib.suppress(HvdSparseError):  # after a failure nothing arrives any more
            self.land()
        self.driver.abandon()
        super().load(saved)
        self._late, self._any_late = {}, True

    def close(self) -> None:
        self.land()
        super().close()


def _key(bucket: Bucket) -> str:
    return f"{bucket.layout.spec.name}:{bucket.layout.spec.size}"
