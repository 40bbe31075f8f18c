"""`horovod.torch` with sparse gradient exchange: `import hvd_sparse.torch as hvd`.

Everything of `horovod.torch` is here as the same object, except what the last lines name.
"""

try:
    import horovod.torch as _horovod
except ImportError as error:
    raise ImportError(
        "hvd_sparse.torch needs Horovod built for the installed PyTorch. Build it with: "
        "hvd-sparse build-horovod --frameworks torch --install"
    ) from error
if not hasattr(_horovod, "allreduce_async"):
    raise ImportError(
        "Horovod is installed, but without its PyTorch extension. Build it with: "
        "hvd-sparse build-horovod --frameworks torch --install --force"
    )

from horovod.torch import *  # noqa: F403

from hvd_sparse.averaging.outer import OuterSGD as OuterSGD
from hvd_sparse.torch.choices import Compression as Compression
from hvd_sparse.torch.distributed import DistributedOptimizer as DistributedOptimizer
from hvd_sparse.torch.membership import join as join
from hvd_sparse.torch.optimizer_state import broadcast_optimizer_state as broadcast_optimizer_state
from hvd_sparse.torch.periodic import PeriodicAveraging as PeriodicAveraging
from hvd_sparse.types import HvdSparseError as HvdSparseError
