"""The methods that a wrapped Keras optimizer has, and how they get onto an object that exists already.

Keras 3 offers one public way through which every gradient goes, `apply`, and calls none of the methods that Horovod
0.28.1 overrides. Keras serialises `obj.__class__`, so that is made to answer with the class the optimizer had: files
load anywhere, without this package.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import control_flow_util

from hvd_sparse.metrics import Counters
from hvd_sparse.saved_state import pack
from hvd_sparse.tensorflow.averager import Averager
from hvd_sparse.types import World

_CLASSES: dict[type, type] = {}
_OWN_ATTRIBUTES = ("averager", "wrap_request", "_exchange_when_clipping", "_exchanged_variables")


class Wrapped:
    """Mixed into the class of a wrapped optimizer, in front of the class it had."""

    averager: Averager | None

    def metrics(self) -> dict[str, Any]:
        """Density, bytes, seconds and more of this rank; keys as in `hvd_sparse.metrics.Counters.as_dict`."""
        if self.averager:
            return self.averager.metrics()
        return Counters(scheme="none", reason="one rank: nothing to exchange").as_dict(0, 0.0)

    def compression_state_dict(self) -> dict[str, Any]:
        """This rank's residuals, thresholds and counters; see `hvd_sparse.saved_state`. Save one per rank."""
        return self.averager.save() if self.averager else pack(World(0, 1), {}, [])

    def load_compression_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over what this rank saved. See `hvd_sparse.saved_state` for a changed number of ranks."""
        if self.averager:
            self.averager.load(saved)

    def close(self) -> None:
        """Stop averaging and become the plain optimizer again. Compile the model again afterwards."""
        base = self.__class__  # of the wrapped object: the class it had
        for name in _OWN_ATTRIBUTES:
            self.__dict__.pop(name, None)
        object.__dict__["__class__"].__set__(self, base)


class WrappedKeras(Wrapped):
    """Keras 3 optimizers other than LossScaleOptimizer."""

    _exchange_when_clipping: bool

    @tf.autograph.experimental.do_not_convert
    def build(self, variables: Any) -> None:
        """As in Keras. Inside a LossScaleOptimizer, that one is wrapped too: its ranks must agree to skip a step."""
        outer = _scaling_optimizer_of(self)
        if outer is not None and not isinstance(outer, Wrapped):
            own = {"averager": self.averager, "wrap_request": self.wrap_request}  # type: ignore[attr-defined]
            _change_class(outer, WrappedLossScale, own)
        super().build(variables)  # type: ignore[misc]
        if self.averager:
            self.averager.prepare(list(variables))

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Average, then apply. With gradient accumulation the average comes later, once per update."""
        grads, variables = _prepared(self, grads, trainable_variables)
        if self.averager and grads and not self._exchange_when_clipping:
            grads = self.averager(grads, variables)
        elif grads:
            object.__setattr__(self, "_exchanged_variables", [v for g, v in zip(grads, variables) if g is not None])
        return super().apply(grads, trainable_variables)  # type: ignore[misc]

    @tf.autograph.experimental.do_not_convert
    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        # The only place between accumulation and clipping; inside a cond on the step counter, equal on all ranks.
        if self.averager and self._exchange_when_clipping:
            grads = self.averager(list(grads), self._exchanged_variables)  # type: ignore[attr-defined]
        if self._exchange_when_clipping and not self.wrap_request.average_passes:  # type: ignore[attr-defined]
            grads = [g if g is None else g * self.wrap_request.passes for g in grads]  # type: ignore[attr-defined]
        return super()._clip_gradients(grads)  # type: ignore[misc]


class WrappedLossScale(Wrapped):
    """LossScaleOptimizer around a wrapped optimizer: ranks agree on whether gradients are finite, so that all of them
    enter the branch in which the inner optimizer exchanges, or none does.
    """

    @tf.autograph.experimental.do_not_convert
    def check_finite(self, grads: Any) -> Any:
        """Whether the gradients of all ranks are finite."""
        here = super().check_finite(grads)  # type: ignore[misc]
        return self.averager.everywhere(here) if self.averager else here


def put_on(optimizer: Any, request: Any, averager: Averager | None) -> None:
    """Make a Keras 3 optimizer a `Wrapped` one, in place; of a LossScaleOptimizer, the inner one as well."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        put_on(optimizer.inner_optimizer, request, averager)
        _change_class(optimizer, WrappedLossScale, {"averager": averager, "wrap_request": request})
        return
    accumulating = bool(optimizer.gradient_accumulation_steps)
    own = {"averager": averager, "wrap_request": request, "_exchange_when_clipping": accumulating}
    _change_class(optimizer, WrappedKeras, {**own, "_exchanged_variables": None})


def _change_class(optimizer: Any, mixin: type, attributes: dict[str, Any]) -> None:
    base = optimizer.__class__
    if base not in _CLASSES:
        body = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
        body["__class__"] = property(lambda self: base)
        _CLASSES[base] = type(base.__name__, (mixin, base), body)
    # Past Keras' own __setattr__, which would track these as part of the optimizer.
    for name, value in {**attributes, "__class__": _CLASSES[base]}.items():
        object.__setattr__(optimizer, name, value)


def _scaling_optimizer_of(optimizer: Any) -> Any:
    """The LossScaleOptimizer that is building `optimizer` right now, if that is why it is built.

    Keras puts one around the optimizer of a mixed_float16 model when it compiles, and users may as well.
    """
    frame: Any = sys._getframe(2)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.optimizers.LossScaleOptimizer) and caller.inner_optimizer is optimizer:
            return caller
        frame = frame.f_back
    return None


def _prepared(optimizer: Any, grads: Any, trainable_variables: Any) -> tuple[list[Any], list[Any]]:
    """Gradients and variables as lists, with the optimizer built as Keras itself would."""
    if not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(tf_ops.get_default_graph()):
        raise RuntimeError(
            "Horovod's operations cannot be compiled by XLA, which this model asks for (Keras does by itself where a "
            "GPU is visible): use model.compile(..., jit_compile=False), or add BroadcastGlobalVariablesCallback."
        )
    grads = list(grads)
    if trainable_variables is None:
        return grads, list(optimizer._trainable_variables)
    variables = list(trainable_variables)
    if grads and not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
        optimizer.built = True
    return grads, variables
