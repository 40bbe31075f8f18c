"""Averages gradients over ranks by the time `backward()` returns."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hvd_sparse.config import Config
from hvd_sparse.drivers.horovod_torch import HorovodTorch
from hvd_sparse.meter import Meter
from hvd_sparse.metrics import Counters
from hvd_sparse.saved_state import pack, unpack
from hvd_sparse.torch.bucket import Bucket, energies, make_buckets
from hvd_sparse.torch.census import Census, census_program, check_failures
from hvd_sparse.torch.hooks import BackwardHooks, check_once
from hvd_sparse.torch.network import TorchNetwork
from hvd_sparse.torch.rows import has_nonzero, no_rows, sum_rows
from hvd_sparse.types import num_kept

_Param = Any  # torch.nn.Parameter; its grad may be None by type, but not where it is used here


class Averager:
    """The gradients of one wrapped optimizer.

    Every gradient goes straight into its bucket; a complete bucket starts its exchange while backward goes on; at the
    end of backward all of them are finished and `p.grad` becomes the average. What that did to residuals is kept back
    until `commit()`, and forgotten by `discard()`.

    Args:
        names: parameter -> name, in order of registration, equal on all ranks.
        config: how to exchange; `driver` runs the programs.
        average: divide by the number of ranks. passes: backward passes per exchange.
        groups: names of parameters that shall share a bucket; `sparse_as_dense`: no rows, but dense gradients.
        grad_scaler: the scaler whose scale gradients carry.
    """

    def __init__(
        self,
        names: dict[_Param, str],
        config: Config,
        driver: HorovodTorch,
        *,
        average: bool = True,
        passes: int = 1,
        groups: Sequence[Sequence[str]] | None = None,
        sparse_as_dense: bool = False,
        grad_scaler: Any = None,
    ) -> None:
        self.names, self.config, self.driver = names, config, driver
        self.average, self.passes = average, passes
        self.groups, self.sparse_as_dense, self.grad_scaler = groups, sparse_as_dense, grad_scaler
        self.buckets: list[Bucket] = []
        self.counters = Counters(scheme=", ".join(config.describe().values()))
        self.num_exchanges = 0
        self.meter = Meter(config.controller, TorchNetwork(driver, next(iter(names)).device), driver.world(0))
        self.loaded: dict[str, Any] | None = None  # a saved state, for buckets that are not planned yet
        self.closed = self.stepping = False  # stepping: inside the optimizer's step()
        self._pending = False  # the last exchange is neither committed nor discarded
        self._finite: list[Any] = []  # one flag per part of the last exchange
        self._bucket_of: dict[_Param, Bucket] = {}
        self._row_sparse: dict[_Param, None] = {}  # a list would compare tensors by their values
        self._forget_gradients()
        self.hooks = BackwardHooks(self._before_accumulation, self._after_accumulation, self._end_pass)
        self.adopt({})

    def _forget_gradients(self) -> None:
        self.averaged = False  # p.grad holds averages, and nothing was added since
        self._open = False  # gradients have arrived since the last exchange
        self._adding = False  # they were added to averages that had not been zeroed
        self._touched: set[_Param] = set()
        self._before: dict[_Param, torch.Tensor] = {}  # those averages
        self._num_passes, self._started, self._scale, self._density = 0, 0.0, 1.0, 1.0
        self.speaks: bool | None = None  # whether the coming exchange is worth it to this rank, if somebody has looked

    # -- during backward -----------------------------------------------------------------------------------------------

    def _before_accumulation(self, parameter: _Param) -> None:
        if (self.averaged or self._adding) and parameter not in self._touched and parameter.grad is not None:
            self._before[parameter] = parameter.grad.detach().clone()

    def _after_accumulation(self, parameter: _Param, again: bool) -> None:
        self._touched.add(parameter)
        self._begin()
        if self._num_passes == self.passes - 1:
            check_once(self.names[parameter], again and parameter in self._bucket_of)
            self._feed(parameter)

    def _end_pass(self) -> None:
        self._num_passes += 1
        if self._num_passes >= self.passes:
            self.exchange()

    def _begin(self) -> None:
        """First gradient since the last exchange: settle that one, and look at the plan and the loss scale."""
        if self._open:
            return
        self._open, self._adding, self.averaged = True, self.averaged and self._averages_are_kept(), False
        # Inside step() the optimizer has consumed the last result (LBFGS). One that was not zeroed is consumed too,
        # since the next is added to it. Otherwise it was thrown away.
        self.settle(used=self.stepping or self._adding)
        for bucket in self.buckets if self._adding else ():
            bucket.ops.forget()
        self._scale = float(self.grad_scaler.get_scale()) if self.grad_scaler is not None else 1.0
        self._density = self.meter.next_plan(self.num_exchanges, self.driver.world(0)).density

    def _averages_are_kept(self) -> bool:
        grads = itertools.chain(self._before.values(), (p.grad for p in self.names if p not in self._touched))
        return any(has_nonzero(grad) for grad in grads if grad is not None)

    def _feed(self, parameter: _Param) -> None:
        bucket = self._bucket_of.get(parameter)
        if bucket is None or not bucket.wants(parameter) or parameter.grad is None or parameter.grad.is_sparse:
            return
        bucket.add(parameter, self._local_grad(parameter), self.driver.world(0).size, 1.0 / self._scale)
        if bucket.num_missing == 0:
            self._start(bucket)
            self.driver.poll()

    def _local_grad(self, parameter: _Param) -> torch.Tensor:
        before = self._before.get(parameter)
        return parameter.grad if before is None else parameter.grad - before

    def _start(self, bucket: Bucket) -> None:
        self._started = self._started or time.perf_counter()
        spec, world = bucket.layout.spec, self.driver.world(self.num_exchanges)
        world = replace(world, gain=self._scale / world.size if self.average else self._scale, speaks=self.speaks)
        self.driver.start(spec.name, bucket.program(world, num_kept(self._density, spec.size)))

    def _start_outside_buckets(self) -> None:
        self._start_rows(self._row_sparse)

    def _start_rows(self, parameters: Iterable[_Param]) -> None:
        for parameter in parameters:
            grad = self._local_grad(parameter) if parameter in self._touched else no_rows(parameter)
            program = sum_rows(self.driver.world(self.num_exchanges), grad, self.sparse_as_dense)
            self.driver.start(self.names[parameter], program)

    # -- the exchange --------------------------------------------------------------------------------------------------

    def exchange(self, active: bool = True, failure: str = "") -> Census:
        """Exchange what was accumulated since the last time, whatever is missing, and install the averages.

        Args:
            active: this rank has gradients. One that has joined takes part with zeros.
            failure: what stopped this rank; makes every rank raise HvdSparseError with it.
        """
        try:
            return self._exchange(active, failure)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Forget the exchange that is going on, and what was accumulated for it."""
        self.driver.abandon()
        self.hooks.reset()
        self.settle(used=False)
        self._forget_gradients()
        for bucket in self.buckets:
            bucket.reset()

    def _exchange(self, active: bool, failure: str) -> Census:
        self._begin()
        waiting_since = time.perf_counter()
        self._started = self._started or waiting_since
        self.adopt({})
        if active and not self._adding:  # gradients that no hook has seen: written by hand, for example
            self._touched.update(p for p in self.names if p.grad is not None)
        census = self._replace_gradients(active, failure)
        self._count(time.perf_counter(), waiting_since, census)
        self._forget_gradients()
        self.averaged = self._pending = True
        return census

    def _replace_gradients(self, active: bool, failure: str) -> Census:
        """Send what is not on its way yet, and put averages in the place of gradients."""
        alarm = self.meter.is_alarmed()
        self.driver.start("census", census_program(list(self.names), self._touched, active, alarm, failure))
        results = {}
        if not self.buckets:  # which gradients are row-sparse is known only now: plan, then exchange
            results = self.driver.finish()
            self._find_row_sparse(results["census"])
            self._plan_buckets([p for p in self.names if p.requires_grad and p not in self._row_sparse])
        for parameter in self._touched:
            self._feed(parameter)
        for bucket in [bucket for bucket in self.buckets if not bucket.started]:
            self._start(bucket)
        self._start_outside_buckets()
        results.update(self.driver.finish())
        self._start_rows(self._find_row_sparse(results["census"]))
        results.update(self.driver.finish())
        census: Census = results["census"]
        check_failures(census, self.driver, failure)
        self._install(results, census)
        return census

    def _install(self, results: dict[str, Any], census: Census) -> None:
        """Replace p.grad by the average wherever some rank had a gradient."""
        self._finite = []
        grads = self._averages_outside_buckets(results)
        for bucket in self.buckets:
            self._finite.append(results[bucket.layout.spec.name].finite)
            grads.update(bucket.averages(results[bucket.layout.spec.name]))
        for parameter in census.present & grads.keys():
            before = self._before.get(parameter)
            if before is None and self._adding and parameter not in self._touched:
                before = parameter.grad
            parameter.grad = grads[parameter] if before is None else grads[parameter] + before

    def _averages_outside_buckets(self, results: dict[str, Any]) -> dict[_Param, torch.Tensor]:
        grads = {}
        for parameter in self._row_sparse:
            total, dense, finite = results[self.names[parameter]]
            self._finite.append(finite)
            grads[parameter] = total / self.driver.world(0).size if self.average else total
            self.counters.sparse_gradients[self.names[parameter]] = "dense" if dense else "rows"
        return grads

    def _find_row_sparse(self, census: Census) -> list[_Param]:
        new = [p for p in self.names if p in census.row_sparse and p not in self._row_sparse]
        self._row_sparse.update(dict.fromkeys(new))
        return new

    def _plan_buckets(self, parameters: Sequence[_Param]) -> None:
        named = {self.names[parameter]: parameter for parameter in parameters}
        for bucket in make_buckets(named, self.config, self.groups, first=len(self.buckets)):
            self.buckets.append(bucket)
            self._bucket_of.update((parameter, bucket) for parameter in bucket.parameters)
            if self.loaded is not None:
                bucket.load(self.loaded["memory"], self.loaded["scheme"])

    def adopt(self, names: dict[_Param, str]) -> None:
        """Take in further parameters, and those that require a gradient only now."""
        self.names.update(names)
        new = [p for p in self.names if self.hooks.watch(p)]
        if self.buckets:
            self._plan_buckets([p for p in new if p not in self._bucket_of])

    # -- the outcome ---------------------------------------------------------------------------------------------------

    def settle(self, used: bool) -> None:
        """Decide about the last exchange, unless that is done.

        Used: what was sent leaves the memory. Not used, or some rank's numbers were not finite: all stays as before.
        """
        if not self._pending:
            return
        self._pending = False
        taken = used and all(bool(flag) for flag in self._finite)
        for bucket in self.buckets:
            bucket.commit() if taken else bucket.discard()
        self.counters.skipped_steps += not taken

    def zeroed(self) -> None:
        """`zero_grad` was called."""
        self.settle(used=self.stepping)
        self._forget_gradients()

    def save(self) -> dict[str, Any]:
        """What `load` takes; see `hvd_sparse.saved_state`."""
        parts = [bucket.save() for bucket in self.buckets] or ([self.loaded] if self.loaded else [])
        return pack(self.driver.world(self.num_exchanges), self.meter.state, parts)

    def load(self, saved: dict[str, Any]) -> None:
        """Take over a saved state, also before buckets are planned."""
        self.loaded = unpack(saved, self.driver.world(0), {name: p.numel() for p, name in self.names.items()})
        self.settle(used=False)
        self.num_exchanges = saved["num_exchanges"]
        self.meter.load(saved["controller"])
        for bucket in self.buckets:
            bucket.load(self.loaded["memory"], self.loaded["scheme"])

    def close(self) -> None:
        """Average no more."""
        self.closed = True
        self.hooks.close()

    def metrics(self) -> dict[str, Any]:
        """See `Counters.as_dict` and `Meter.as_dict`."""
        norm = sum(bucket.norm_squared() for bucket in self.buckets) ** 0.5
        self.counters.reason = self.meter.plan.reason
        return {**self.counters.as_dict(self.driver.num_bytes, norm), **self.meter.as_dict()}

    def _count(self, now: float, waiting_since: float, census: Census) -> None:
        size, buckets = self.driver.world(0).size, self.buckets
        elements = sum(bucket.layout.spec.size for bucket in buckets) + sum(p.numel() for p in self._row_sparse)
        self.counters.add(self._density, 8 * elements * (size - 1) / size, now - self._started, now - waiting_since)
        compressed = [bucket for bucket in buckets if not bucket.layout.dense]
        self.meter.after_exchange(
            self.num_exchanges, now, now - waiting_since, max(0.0, waiting_since - self._started),
            num_elements=sum(bucket.layout.spec.size for bucket in compressed), alarmed=census.num_alarmed > 0,
            energies=lambda: energies(compressed),
        )  # fmt: skip
        self.num_exchanges += 1
