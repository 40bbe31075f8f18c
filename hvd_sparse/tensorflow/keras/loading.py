"""Loading a model and going on with distributed training."""

from __future__ import annotations

from typing import Any

import keras

from hvd_sparse.tensorflow.distributed import wrap_optimizer


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = None,
) -> Any:
    """`keras.models.load_model`, then wrap the optimizer it was compiled with.

    Args:
        filepath: a `.keras` or `.h5` file, written with or without this package.
        custom_optimizers: optimizer classes that the file names.
        custom_objects: as in Keras.
        compression: as in `DistributedOptimizer`.
    """
    import horovod.tensorflow as hvd

    named = {one.__name__: one for one in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**named, **(custom_objects or {})})
    if model.optimizer is not None:
        wrap_optimizer(model.optimizer, compression, False, hvd.Average, 1.0, None, 1, False, hvd.global_process_set)
    return model
