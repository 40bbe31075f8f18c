"""The methods that a wrapped optimizer has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hvd_sparse.config import check_passes
from hvd_sparse.metrics import Counters
from hvd_sparse.saved_state import pack
from hvd_sparse.torch.averager import Averager
from hvd_sparse.torch.delayed import DelayedAverager
from hvd_sparse.torch.in_place import InPlace, is_broadcasting_state, put_on
from hvd_sparse.torch.lazy import lazy_step
from hvd_sparse.torch.local_weights import local_weights
from hvd_sparse.torch.request import WrapRequest
from hvd_sparse.types import World


class Wrapped(InPlace):
    """Mixed into the class of a wrapped optimizer, in front of the class it had."""

    wrap_request: WrapRequest | None
    averager: Averager | None
    param_groups: list[dict[str, Any]]
    _skip_synchronize = False

    def synchronize(self) -> None:
        """Make sure that `p.grad` are averages. They are when backward returns, so there is rarely anything to do."""
        if self.averager and not self.averager.averaged:
            self.averager.exchange()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside this context `step()` takes gradients as they are."""
        self._skip_synchronize = True
        try:
            yield
        finally:
            self._skip_synchronize = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Exchange after so many backward passes from now on; equal on all ranks."""
        check_passes(passes)
        if self.averager:
            self.averager.passes = passes

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As in plain PyTorch. Averages that no step has used are thrown away, and residuals keep what they hold."""
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]
        if self.averager:
            self.averager.zeroed()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in plain PyTorch, on all ranks alike."""
        super().add_param_group(param_group)  # type: ignore[misc]
        if self.averager:
            group = len(self.param_groups) - 1
            added = self.param_groups[group]["params"]
            self.averager.adopt({parameter: f"added{group}.{i}" for i, parameter in enumerate(added)})

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

    def local_weights(self) -> contextlib.AbstractContextManager[None]:
        """Around forward and backward: take gradients at w - lr v, v being this rank's residual. For SGD."""
        return local_weights(self, self.averager)

    def lazy_step(self, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
        """With `scheme="lazy"`, on all ranks: a whole step, silent where the gradient of `loss()` is no news."""
        return lazy_step(self, self.averager, loss)

    def flush(self) -> None:
        """With `memory="delayed"`, on all ranks alike: take a step with what is still in flight. Otherwise nothing."""
        if isinstance(self.averager, DelayedAverager) and self.averager.flush():
            self.step()  # type: ignore[attr-defined]
            self.zero_grad()

    def close(self) -> None:
        """Stop averaging and become the plain optimizer again."""
        if self.averager:
            self.averager.close()
        self._take_off(averager=None, wrap_request=None)


def wrap(optimizer: torch.optim.Optimizer, request: WrapRequest, averager: Averager | None) -> None:
    """Make `optimizer` a `Wrapped` one; see `put_on`."""
    hooks = (_before_step, _after_step) if averager else None
    put_on(optimizer, Wrapped, {"wrap_request": request, "averager": averager}, hooks)


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    averager = optimizer.averager
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    due = closure is None and not optimizer._skip_synchronize and not averager.averaged
    if due and not is_broadcasting_state():
        averager.exchange()
    averager.stepping = True


def _after_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    optimizer.averager.settle(used=True)
    optimizer.averager.stepping = False
