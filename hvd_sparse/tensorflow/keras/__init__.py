"""`horovod.tensorflow.keras` for Keras 3, with sparse gradient exchange: `import hvd_sparse.tensorflow.keras as hvd`.

Horovod 0.28.1 trains Keras 3 models on every rank alone, without an error. Here gradients are averaged.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

import horovod.tensorflow as _horovod
from horovod.tensorflow.keras import *  # noqa: F403

from hvd_sparse.averaging.outer import OuterSGD as OuterSGD
from hvd_sparse.tensorflow import Compression as Compression
from hvd_sparse.tensorflow import HvdSparseError as HvdSparseError
from hvd_sparse.tensorflow.distributed import wrap_optimizer as _wrap_optimizer
from hvd_sparse.tensorflow.keras.loading import load_model as load_model
from hvd_sparse.tensorflow.keras.periodic import PeriodicAveragingCallback as PeriodicAveragingCallback
from hvd_sparse.tensorflow.periodic import PeriodicAveraging as PeriodicAveraging
from hvd_sparse.tensorflow.variables import broadcast_model as broadcast_model
from hvd_sparse.tensorflow.variables import broadcast_variables as broadcast_variables

# Not `from ... import`: that would find Horovod's modules of these names, which are attributes here by now.
callbacks = _import_module("hvd_sparse.tensorflow.keras.callbacks")
elastic = _import_module("hvd_sparse.tensorflow.keras.elastic")


def DistributedOptimizer(
    optimizer: _Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: _Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: _Any = _horovod.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | None = None,
    process_set: _Any = _horovod.global_process_set,
    scale_local_gradients: bool = True,
    *,
    metrics_log: _Any = None,
) -> _Any:
    """Average gradients over ranks, sparsely, before each update.

    The optimizer object itself is returned, wrapped in place: state, name, schedules and `isinstance` stay valid, and
    `.keras` files say the class it had, so they load without this package. Works in compiled `fit`, `run_eagerly`,
    custom loops, with clipping, averages of weights, gradient accumulation and `LossScaleOptimizer`. Wrap before
    `model.compile`, or call `model.make_train_function(force=True)` afterwards: Keras keeps an old graph otherwise.

    Args:
        optimizer: any Keras 3 optimizer, or one of tf-keras 2.
        name, device_dense, device_sparse, scale_local_gradients: accepted as by Horovod; without effect here.
        compression: `Compression.adaptive(...)` (default: `Compression.adaptive()`), `Compression.sparse(...)` for a
            density of your own, or `.none` or `.fp16` for dense.
        sparse_as_dense: gradients of embeddings travel densely.
        gradient_predivide_factor: as in Horovod; sums are in float32, so it changes nothing here.
        op: `Average` or `Sum`.
        backward_passes_per_step: gradients of so many batches are accumulated before an update (Keras'
            `gradient_accumulation_steps`).
        average_aggregated_gradients: divide what was accumulated by their number.
        num_groups, groups: a number of buckets of about equal size.
        process_set: ranks that average with each other.
        metrics_log: file for a JSON line per exchange, see `hvd-sparse report`. It is rank 0's, or every rank's own if
            its name has "{rank}" in it.

    Returns:
        `optimizer`, with the further methods `metrics`, `compression_state_dict`, `load_compression_state_dict` and
        `close`.

    Raises:
        ValueError, TypeError: an argument is out of range or cannot be honoured.
        HvdSparseError: ranks wrap with different configurations, or another rank refused; on every rank.
    """
    return _wrap_optimizer(
        optimizer, compression, sparse_as_dense, op, gradient_predivide_factor, num_groups or groups,
        backward_passes_per_step, average_aggregated_gradients, process_set, metrics_log,
    )  # fmt: skip
