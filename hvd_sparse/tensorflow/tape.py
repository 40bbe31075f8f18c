"""`DistributedGradientTape`: the gradients it computes are averages."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvd_sparse.metrics import Counters
from hvd_sparse.tensorflow.averager import Averager
from hvd_sparse.tensorflow.request import agreed_driver, check_request

_averagers: dict[Any, Averager | None] = {}


class WrappedTape(tf.GradientTape):
    """A tape whose `gradient` averages over ranks. `sources` may hold Keras or TensorFlow variables."""

    averager: Averager | None

    @tf.autograph.experimental.do_not_convert
    def gradient(self, target: Any, sources: Any, *arguments: Any, **keywords: Any) -> Any:
        """As `tf.GradientTape.gradient`, averaged."""
        flat = tf.nest.flatten(sources)
        plain = [source.value if isinstance(source, keras.Variable) else source for source in flat]
        grads = super().gradient(target, plain, *arguments, **keywords)
        if self.averager:
            grads = self.averager(grads, plain)
        return tf.nest.pack_sequence_as(sources, grads)

    def metrics(self) -> dict[str, Any]:
        """As `DistributedOptimizer`'s."""
        if self.averager:
            return self.averager.metrics()
        return Counters(scheme="none", reason="one rank: nothing to exchange").as_dict(0, 0.0)


@tf.autograph.experimental.do_not_convert
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
    *,
    key: str = "tape",
) -> Any:
    """Make `gradtape` compute averages over ranks, in place.

    A tape lives for one step, its residual must not: tapes that are wrapped with an equal `key` and equal settings
    share one. A script with several models gives each its own key. Not with elastic training.

    Args:
        gradtape: a `tf.GradientTape`.
        device_dense, device_sparse, scale_local_gradients: accepted as by Horovod; without effect here.
        compression: `Compression.sparse(...)`, `.none` or `.fp16`; the default is `Compression.sparse()`.
        sparse_as_dense: `tf.IndexedSlices` travel densely.
        op: `Average` or `Sum`.
        gradient_predivide_factor: as in Horovod; sums are in float32, so it changes nothing here.
        num_groups, groups: a number of buckets of about equal size.
        process_set: ranks that average with each other; the others keep their own gradients.
        key: names the residual to use.

    Raises:
        ValueError, TypeError: an argument is out of range. HvdSparseError: ranks differ.
    """
    request = check_request(compression, sparse_as_dense, op, gradient_predivide_factor, num_groups or groups)
    identity = (key, str(request.describe()), process_set.process_set_id)
    if identity not in _averagers:
        with tf.init_scope():
            driver = agreed_driver(process_set, request) if process_set.included() else None
            _averagers[identity] = Averager(request, driver) if driver else None
    gradtape.averager = _averagers[identity]
    gradtape.__class__ = WrappedTape
    return gradtape
