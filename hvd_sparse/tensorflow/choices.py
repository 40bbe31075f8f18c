"""The choices for `DistributedOptimizer(compression=...)`."""

from __future__ import annotations

import horovod.tensorflow as hvd

from hvd_sparse.config import adaptive_config, sparse_config


class Compression:
    """`none` and `fp16` are Horovod's own objects: everything is dense, and travels as it is or in half precision.

    `adaptive(...)`, the default, and `sparse(...)` are ours; see `hvd_sparse.config` for their arguments.
    """

    none = hvd.Compression.none
    fp16 = hvd.Compression.fp16
    adaptive = staticmethod(adaptive_config)
    sparse = staticmethod(sparse_config)
