"""The choices for `DistributedOptimizer(compression=...)`."""

from __future__ import annotations

import horovod.tensorflow as hvd

from hvd_sparse.config import sparse_config


class Compression:
    """`none` and `fp16` are Horovod's own objects: everything is dense, and travels as it is or in half precision.

    `sparse(...)` is ours; see `hvd_sparse.config.sparse_config` for its arguments.
    """

    none = hvd.Compression.none
    fp16 = hvd.Compression.fp16
    sparse = staticmethod(sparse_config)
