"""Averages gradients over ranks inside a graph."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_sparse.buckets import Layout, plan_buckets, split_evenly
from hvd_sparse.drivers.horovod_tensorflow import HorovodTensorFlow
from hvd_sparse.exchange import bucket_exchange
from hvd_sparse.meter import Meter
from hvd_sparse.metrics import Counters
from hvd_sparse.ops.tensorflow import TensorFlowOps
from hvd_sparse.saved_state import pack, unpack
from hvd_sparse.schemes.dense import Dense
from hvd_sparse.tensorflow.bucket import Bucket
from hvd_sparse.tensorflow.network import TensorFlowNetwork
from hvd_sparse.tensorflow.plan import Plan, plan_for_gradients, plan_for_variables
from hvd_sparse.tensorflow.request import WrapRequest
from hvd_sparse.tensorflow.rows import sum_rows
from hvd_sparse.tensorflow.watchdog import Watchdog
from hvd_sparse.types import Spec, num_kept


class Averager:
    """Callable on the gradients of one optimizer or tape; the same variables in every call.

    The first call plans: ranks agree on which variables have gradients, buckets get their variables, all before the
    first graph is finished. Every call exchanges. In a graph the exchange becomes part of it; eagerly it runs in a
    graph of its own, since Horovod's eager operations have no names.
    """

    def __init__(self, request: WrapRequest, driver: HorovodTensorFlow) -> None:
        self.request = request
        self.config = request.config
        self.driver = driver
        self.counters = Counters(scheme=request.scheme_in_words())
        self.buckets: list[Bucket] = []
        self.loaded: dict[str, Any] | None = None
        self.meter = Meter(self.config.controller, TensorFlowNetwork(driver), driver.world(0))
        self._ladder = tuple(dict.fromkeys(self.config.controller.ladder()))
        self._variables: list[Any] = []
        self._names: dict[int, str] = {}  # by id of the variable
        self._plan = Plan((), frozenset(), frozenset(), frozenset())
        self._is_final = False  # the plan knows what gradients look like
        self._eager_exchange = tf.function(self._exchange, autograph=False, reduce_retracing=True)
        self._eager_agree = tf.function(self._agree, autograph=False)
        with tf.init_scope():
            self.step = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._totals = tf.Variable(tf.zeros([3], tf.float64), trainable=False)  # bytes, seconds, steps not applied
            self.watchdog = Watchdog(self.config.timeout_seconds)

    @tf.autograph.experimental.do_not_convert
    def __call__(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Averages of `grads` over ranks, in the order given. None stays None if it is so on every rank."""
        if self.driver.world(0).size == 1:
            return list(grads)
        self.prepare(variables)
        names = [self._name_of(variable) for variable in variables]
        given = dict(zip(names, grads))
        if not self._is_final:
            with tf.init_scope():
                self._adopt(plan_for_gradients(self.driver, self._plan, given, self.request.sparse_as_dense))
                self._is_final = True
        exchange = self._eager_exchange if tf.executing_eagerly() else self._exchange
        averages = exchange(self._plan.gradients(given))
        return [averages[name] if name in self._plan.present else None for name in names]

    @tf.autograph.experimental.do_not_convert
    def prepare(self, variables: Sequence[Any]) -> None:
        """Make the state for these variables, together with the other ranks, unless that is done.

        Keras builds an optimizer before it traces a train step; state that is made then costs no second trace.
        """
        if self._variables or self.driver.world(0).size == 1:
            return
        self._variables = list(variables)
        with tf.init_scope():
            plan = plan_for_variables(self.driver, variables)
            self._names = {id(variable): slot.name for variable, slot in zip(self._variables, plan.slots)}
            self._adopt(plan)

    def everywhere(self, flag: Any) -> Any:
        """Whether a 0-d boolean is true on all ranks."""
        if self.driver.world(0).size == 1:
            return flag
        return (self._eager_agree if tf.executing_eagerly() else self._agree)(flag)

    def _agree(self, flag: Any) -> Any:
        wrong = tf.reshape(tf.cast(tf.logical_not(flag), tf.float32), [1])
        program = Dense().reduce(TensorFlowOps(), self.driver.world(0), Spec("flag", 1), wrong, 1, {})
        return self.driver.run("flag", program)[0].total[0] < 0.5

    def _name_of(self, variable: Any) -> str:
        name = self._names.get(id(variable))
        if name is None:
            known = ", ".join(self._names.values())
            raise ValueError(f"Variable {variable.name!r} is not one of those of the first step: {known}.")
        return name

    def _adopt(self, plan: Plan) -> None:
        """Make buckets for `plan`, unless those that exist fit it."""
        unchanged = self.buckets and plan.row_sparse == self._plan.row_sparse
        self._plan = plan
        if unchanged:
            return
        config, parameters, groups = self.config, plan.parameters(), self.request.num_groups
        grouped = split_evenly(parameters, groups) if groups else None
        self.buckets = []
        for layout in plan_buckets(parameters, config.bucket_bytes, config.min_size, grouped):
            self.buckets.append(Bucket(layout, bucket_exchange(layout, config), self.request.half))
            if self.loaded is not None:
                self.buckets[-1].load(self.loaded["memory"], self.loaded["scheme"])
        choices = {name: "rows" if name in plan.rows else "dense" for name in plan.row_sparse}
        self.counters.sparse_gradients = choices

    def _exchange(self, grads: dict[str, Any]) -> dict[str, Any]:
        """Averages by name, for gradients by name: dense, or IndexedSlices for those that travel as rows."""
        step = self.watchdog.begin(self.step)
        with tf.control_dependencies(tf.nest.flatten(grads, expand_composites=True)):
            started = tf.timestamp()
        if len(self._ladder) == 1:
            averages, totals = self._exchange_at(self._ladder[0], grads, step)
        else:
            rung = tf.numpy_function(self._decide, [step], tf.int32)
            branches = [lambda density=density: self._exchange_at(density, grads, step) for density in self._ladder]
            averages, totals = tf.switch_case(tf.ensure_shape(rung, []), branches)
        with tf.control_dependencies(list(averages.values())):
            seconds = tf.timestamp() - started
            if len(self._ladder) > 1 or self.meter.log:
                tf.numpy_function(self._after_exchange, [step, seconds], [])
        self._totals.assign_add(tf.stack([totals[0], seconds, totals[1]]))
        self.watchdog.end(self.step, seconds)
        return averages

    def _exchange_at(self, density: float, grads: dict[str, Any], step: Any) -> tuple[dict[str, Any], list[Any]]:
        share = 1.0 / self.driver.world(0).size if self.request.average else 1.0
        later, gain = (share, 1.0) if self.request.half else (1.0, share)  # not in 16 bits
        world = replace(self.driver.world(step), gain=gain)
        variables = {self._names[id(variable)]: variable for variable in self._variables}
        for bucket in self.buckets:
            seen = replace(world, weights=partial(_flat, bucket.layout, variables))
            k = num_kept(density, bucket.layout.spec.size)
            self.driver.start(bucket.layout.spec.name, bucket.program(seen, _flat(bucket.layout, grads), k))
        rows = [slot for slot in self._plan.slots if slot.name in self._plan.rows]
        for slot in rows:
            values = tf.cast(tf.reshape(grads[slot.name].values, [-1, slot.width]), tf.float32)
            program = sum_rows(world, grads[slot.name].indices, values, slot.shape[0])
            self.driver.start(f"rows.{slot.name}", program)
        results = self.driver.finish()
        num_bytes = tf.cast(self.driver.num_bytes, tf.float64)
        averages: dict[str, Any] = {}
        finite = []
        for bucket in self.buckets:
            reduced = results[bucket.layout.spec.name]
            finite.append(reduced.finite)
            parts = tf.split(tf.cast(reduced.applied, tf.float32) * later, [m.size for m in bucket.layout.members])
            averages.update((m.name, part) for m, part in zip(bucket.layout.members, parts))
        averages.update((slot.name, results[f"rows.{slot.name}"] * share) for slot in rows)
        averages = {s.name: tf.cast(tf.reshape(averages[s.name], s.shape), s.dtype) for s in self._plan.slots}
        skipped = tf.cast(tf.logical_not(tf.reduce_all(tf.stack([*finite, True]))), tf.float64)
        return averages, [num_bytes, skipped]

    def _decide(self, step: Any) -> Any:
        self.counters.density = self.meter.next_plan(int(step)).density
        return np.int32(self._ladder.index(self.counters.density))

    def _after_exchange(self, step: Any, seconds: Any) -> None:
        if len(self._ladder) == 1:
            self.meter.next_plan(int(step))
        compressed = sum(bucket.layout.spec.size for bucket in self.buckets if not bucket.layout.dense)
        self.meter.after_exchange(int(step), time.perf_counter(), float(seconds), num_elements=compressed)

    def save(self) -> dict[str, Any]:
        """What `load` takes; see `hvd_sparse.saved_state`."""
        parts = [bucket.save() for bucket in self.buckets] or ([self.loaded] if self.loaded else [])
        return pack(self.driver.world(int(self.step.numpy())), self.meter.state, parts)

    def load(self, saved: dict[str, Any]) -> None:
        """Take over a saved state, also before the variables are known."""
        sizes = {slot.name: math.prod(slot.shape) for slot in self._plan.slots}
        self.loaded = unpack(saved, self.driver.world(0), sizes)
        self.step.assign(saved["num_exchanges"])
        self.meter.load(saved["controller"])
        for bucket in self.buckets:
            bucket.load(self.loaded["memory"], self.loaded["scheme"])

    def metrics(self) -> dict[str, Any]:
        """See `Counters.as_dict` and `Meter.as_dict`. What hides behind backward is not measured."""
        num_bytes, seconds, skipped = (float(total) for total in self._totals.numpy())
        counters, size = self.counters, self.driver.world(0).size
        counters.num_exchanges = int(self.step.numpy())
        if len(self._ladder) == 1:
            self._decide(counters.num_exchanges)
        elements = sum(math.prod(slot.shape) for slot in self._plan.slots)
        counters.bytes_dense = 8.0 * elements * (size - 1) / size * counters.num_exchanges
        counters.exchange_seconds = counters.exposed_seconds = seconds
        counters.skipped_steps = int(skipped)
        norm = sum(bucket.norm_squared() for bucket in self.buckets) ** 0.5
        counters.reason = self.meter.plan.reason
        return {**counters.as_dict(num_bytes, norm), **self.meter.as_dict()}


def _flat(layout: Layout, tensors: dict[str, Any]) -> Any:
    """(n,) float32: the bucket's part of tensors or variables by name."""
    members = [tf.reshape(tf.convert_to_tensor(tensors[member.name]), [-1]) for member in layout.members]
    return tf.concat([tf.cast(member, tf.float32) for member in members], 0)
