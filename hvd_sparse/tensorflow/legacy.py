"""tf-keras 2 (TF_USE_LEGACY_KERAS=1): every gradient goes through `apply_gradients`."""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf

from hvd_sparse.tensorflow.averager import Averager
from hvd_sparse.tensorflow.wrapped import Wrapped

_CLASSES: dict[type, type] = {}


class WrappedLegacy(Wrapped):
    """Optimizers of tf-keras 2, new and legacy."""

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars: Any, *arguments: Any, **keywords: Any) -> Any:
        """Average, then apply."""
        pairs = list(grads_and_vars)
        if self.averager and pairs:
            grads, variables = zip(*pairs)
            pairs = list(zip(self.averager(grads, variables), variables))
        return super().apply_gradients(pairs, *arguments, **keywords)  # type: ignore[misc]


def is_legacy(optimizer: Any) -> bool:
    """Whether this is an optimizer of tf-keras 2. The package is looked at only if the script has imported it."""
    tf_keras = sys.modules.get("tf_keras")
    if tf_keras is None:
        return False
    return isinstance(optimizer, (tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer))


def put_on(optimizer: Any, request: Any, averager: Averager | None) -> None:
    """Make it a `Wrapped` one, in place."""
    base = optimizer.__class__
    if base not in _CLASSES:
        body = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
        body["__class__"] = property(lambda self: base)
        _CLASSES[base] = type(base.__name__, (WrappedLegacy, base), body)
    for name, value in (("averager", averager), ("wrap_request", request), ("__class__", _CLASSES[base])):
        object.__setattr__(optimizer, name, value)
