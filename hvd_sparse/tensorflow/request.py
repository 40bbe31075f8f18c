"""The arguments of the TensorFlow wrappers, checked before anything is touched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import horovod.tensorflow as hvd

from hvd_sparse.agreement import compare, next_prefix, statement
from hvd_sparse.config import Config, adaptive_config, check_wrapping, sparse_config
from hvd_sparse.drivers.groups import check_host_groups, is_elastic, make_host_groups
from hvd_sparse.drivers.horovod_tensorflow import HorovodTensorFlow
from hvd_sparse.tensorflow.texts import exchange_text

_BUCKET_BYTES = 16 * 2**20


@dataclass(frozen=True)
class WrapRequest:
    """What one rank wants."""

    config: Config = field(default_factory=adaptive_config)
    half: bool = False
    passes: int = 1
    average: bool = True
    average_passes: bool = False
    num_groups: int = 0
    sparse_as_dense: bool = False

    def describe(self) -> dict[str, Any]:
        """What must be equal on all ranks."""
        own = ("half", "passes", "average", "average_passes", "num_groups", "sparse_as_dense")
        return {**self.config.describe(), **{name: getattr(self, name) for name in own}}

    def scheme_in_words(self) -> str:
        """For the metrics."""
        return ", ".join(self.config.describe().values())


def check_request(
    compression: Any,
    sparse_as_dense: bool = False,
    op: Any = hvd.Average,
    predivide: float = 1.0,
    groups: Any = None,
    passes: Any = 1,
    average_passes: bool = False,
    momentum: Any = 0.0,
) -> WrapRequest:
    """The request, or an error that says what is wrong with it."""
    if compression in (hvd.Compression.none, hvd.Compression.fp16):
        config = sparse_config(density=1.0, memory="none", sparsifier="topk")
    else:
        config = adaptive_config() if compression is None else compression
    if getattr(getattr(config, "controller", None), "gain_floor", None) is not None:
        raise ValueError("`gain_floor` is for PyTorch: a graph does not tell the gain. Leave it out here.")
    if is_elastic() and hasattr(getattr(config, "memory", None), "shared_keys"):
        raise ValueError(
            f"`memory` must be 'residual', 'momentum' or 'none' in an elastic job: a new rank would lack what the "
            f"others share. Received: {type(config.memory).__name__}."
        )
    average = check_wrapping(config, compression, op, (hvd.Average, hvd.Sum), predivide, passes, momentum)
    if groups is not None and (isinstance(groups, bool) or not isinstance(groups, int) or groups < 0):
        raise ValueError(f"`groups` must be an int here: a number of buckets. Received: groups={groups!r}.")
    half = compression is hvd.Compression.fp16
    config = config.with_buckets(_BUCKET_BYTES)
    return WrapRequest(config, half, passes, average, average_passes, groups or 0, sparse_as_dense)


def agreed_driver(
    process_set: Any, request: WrapRequest | None, refusal: Exception | None = None
) -> HorovodTensorFlow | None:
    """The driver of a wrapper that every rank makes alike; None if there is nobody to exchange with.

    Raises:
        HvdSparseError: ranks differ, or another one refused. Or `refusal` itself, after the others were told.
    """
    driver = HorovodTensorFlow(next_prefix(process_set), {"global": process_set})
    groups = request.config.groups if request else ()
    if refusal is None:
        try:
            check_host_groups(hvd, process_set, groups)
        except ValueError as error:
            refusal = error
    if process_set.size() > 1:
        settings = request.describe() if request else {}
        compare(exchange_text(driver, "wrap", statement(settings, refusal)), refusal)
    if refusal is not None:
        raise refusal
    driver.process_sets = make_host_groups(hvd, process_set, groups)
    return driver if process_set.size() > 1 or is_elastic() else None
