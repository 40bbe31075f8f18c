"""How methods get onto an optimizer that exists already, and off again."""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch

_CLASSES: dict[tuple[type, type], type] = {}


class InPlace:
    """Base of a mixin that `put_on` sets in front of the class that an optimizer had."""

    def _take_off(self, **attributes: Any) -> None:
        """Become the plain optimizer again; `attributes` are what its own then say."""
        for handle in self.__dict__.pop(_hooks_of(type(self).__bases__[0]), ()):
            handle.remove()
        self.__dict__.update(attributes)
        self.__class__ = type(self).__bases__[1]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy or a pickle is a plain optimizer: hooks belong to this process and these parameters.
        return copyreg.__newobj__, (type(self).__bases__[1],), self.__getstate__()  # type: ignore[attr-defined]


def put_on(
    optimizer: torch.optim.Optimizer,
    mixin: type[InPlace],
    attributes: dict[str, Any],
    hooks: tuple[Callable[..., Any], Callable[..., Any]] | None,
) -> None:
    """Make `optimizer` one of class `mixin`, in place.

    Args:
        attributes: set on it.
        hooks: called before and after each step; None: none.

    Raises:
        TypeError: Python cannot change the class of this object (one with __slots__, say).
    """
    base = type(optimizer)
    if (mixin, base) not in _CLASSES:
        body = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        _CLASSES[mixin, base] = type(base.__name__, (mixin, base), body)
    try:
        optimizer.__class__ = _CLASSES[mixin, base]
    except TypeError as error:
        raise TypeError(f"`optimizer` of class {base.__name__} cannot be wrapped in place: {error}.") from error
    optimizer.__dict__.update(attributes)
    if hooks:
        # Hooks rather than an overridden step(): a scheduler made before wrapping holds the old bound method.
        before, after = hooks
        handles = (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after))
        optimizer.__dict__[_hooks_of(mixin)] = handles


def is_broadcasting_state() -> bool:
    """Whether this step is how Horovod's broadcast_optimizer_state makes missing state (elastic training calls it)."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is hvd.broadcast_optimizer_state.__code__:
            return True
        frame = frame.f_back
    return False


def _hooks_of(mixin: type) -> str:
    return f"_{mixin.__name__}_hooks"
