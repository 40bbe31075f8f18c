"""`DistributedOptimizer` for Keras 3 and tf-keras 2, wrapped in place."""

from __future__ import annotations

import logging
from typing import Any

import horovod.tensorflow as hvd
import keras

from hvd_sparse.records import MetricsLog, open_for_rank
from hvd_sparse.tensorflow import legacy
from hvd_sparse.tensorflow.averager import Averager
from hvd_sparse.tensorflow.request import WrapRequest, agreed_driver, check_request
from hvd_sparse.tensorflow.wrapped import put_on

_log = logging.getLogger("hvd_sparse")


def wrap_optimizer(
    optimizer: Any,
    compression: Any,
    sparse_as_dense: bool,
    op: Any,
    predivide: float,
    groups: Any,
    passes: Any,
    average_passes: bool,
    process_set: Any,
    metrics_log: Any = None,
) -> Any:
    """What both facades' `DistributedOptimizer` do, which document the arguments."""
    if not hvd.is_initialized():
        raise ValueError("Horovod is not initialised: call hvd.init() before wrapping an optimizer.")
    if not process_set.included():
        return optimizer
    request, refusal, file = WrapRequest(), None, None
    try:
        optimizer = _checked_optimizer(optimizer, passes)
        momentum = getattr(optimizer, "momentum", 0.0) or getattr(optimizer, "beta_1", 0.0)
        request = check_request(compression, sparse_as_dense, op, predivide, groups, passes, average_passes, momentum)
        if not hasattr(optimizer, "wrap_request"):
            file = open_for_rank("metrics_log", metrics_log, process_set.rank())
    except (ValueError, TypeError) as error:
        refusal = error
    already = None if refusal else getattr(optimizer, "wrap_request", None)
    if already is not None:
        if already.describe() != request.describe():
            raise ValueError("`optimizer` is wrapped already, with other settings. Call its close() first.")
        return optimizer
    driver = agreed_driver(process_set, request, refusal)
    averager = Averager(request, driver) if driver else None
    if averager and file:
        averager.meter.log = MetricsLog(file)
    (legacy.put_on if legacy.is_legacy(optimizer) else put_on)(optimizer, request, averager)
    if averager and getattr(optimizer, "_trainable_variables", None):  # built already
        averager.prepare(optimizer._trainable_variables)
    if process_set.rank() == 0:
        _log.info("%s: %d ranks; %s", type(optimizer).__name__, process_set.size(), request.scheme_in_words())
    return optimizer


def _checked_optimizer(optimizer: Any, passes: Any) -> Any:
    if legacy.is_legacy(optimizer):
        if passes != 1:
            raise ValueError(f"`backward_passes_per_step` must be 1 with tf-keras 2. Received: {passes!r}.")
        return optimizer
    if isinstance(optimizer, (str, dict)):
        optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"`optimizer` must be a Keras optimizer. Received: {type(optimizer).__name__}.")
    if isinstance(passes, int) and passes > 1:
        accumulating = getattr(optimizer, "inner_optimizer", optimizer)
        if accumulating.built:
            raise ValueError("`backward_passes_per_step` must be given before the optimizer is built or has trained.")
        accumulating.gradient_accumulation_steps = passes
    return optimizer
