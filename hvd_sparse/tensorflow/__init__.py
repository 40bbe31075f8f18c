"""`horovod.tensorflow` with sparse gradient exchange: `import hvd_sparse.tensorflow as hvd`.

Everything of `horovod.tensorflow` is here as the same object, except what the last lines name.
"""

from typing import Any as _Any

try:
    import horovod.tensorflow as _horovod
except ImportError as error:
    raise ImportError(
        "hvd_sparse.tensorflow needs TensorFlow, and Horovod built for it. Build it with: "
        "hvd-sparse build-horovod --frameworks tensorflow --install"
    ) from error

from horovod.tensorflow import *  # noqa: F403

from hvd_sparse.averaging.outer import OuterSGD as OuterSGD
from hvd_sparse.tensorflow.choices import Compression as Compression
from hvd_sparse.tensorflow.distributed import wrap_optimizer as _wrap_optimizer
from hvd_sparse.tensorflow.periodic import PeriodicAveraging as PeriodicAveraging
from hvd_sparse.tensorflow.tape import DistributedGradientTape as DistributedGradientTape
from hvd_sparse.tensorflow.variables import broadcast_model as broadcast_model
from hvd_sparse.tensorflow.variables import broadcast_variables as broadcast_variables
from hvd_sparse.types import HvdSparseError as HvdSparseError


def DistributedOptimizer(
    optimizer: _Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: _Any = None,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: _Any = _horovod.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | None = None,
    process_set: _Any = _horovod.global_process_set,
    scale_local_gradients: bool = True,
    *,
    metrics_log: _Any = None,
) -> _Any:
    """Average gradients over ranks, sparsely, in a Keras optimizer: the same object, wrapped in place.

    See `hvd_sparse.tensorflow.keras.DistributedOptimizer`, whose arguments these are, in Horovod's other order.
    """
    return _wrap_optimizer(
        optimizer, compression, sparse_as_dense, op, gradient_predivide_factor, num_groups or groups,
        backward_passes_per_step, average_aggregated_gradients, process_set, metrics_log,
    )  # fmt: skip
