"""What the user may ask for, checked once and equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hvd_sparse.averaging.outer import is_outer
from hvd_sparse.averaging.trigger import EverySeconds, EverySteps, Interval
from hvd_sparse.config import Config
from hvd_sparse.memories.residual import Residual
from hvd_sparse.types import check_count, check_positive, listed

WEIGHTS = ("uniform", "steps", "samples")
OPTIMIZER_STATE = ("local", "average", "reset")
BUFFERS = ("local", "average", "rank0")


@dataclass(frozen=True)
class Settings:
    """How models are averaged. `PeriodicAveraging` of a front documents the fields."""

    interval: Interval = field(default_factory=lambda: EverySteps(1))
    warmup_steps: int = 0
    weights: str = "uniform"
    outer: Any = None
    optimizer_state: str = "local"
    buffers: str = "local"
    overlap: bool = False
    sparse: Config | None = None
    timeout_seconds: float = 3600.0

    def describe(self) -> dict[str, Any]:
        """Every setting in words."""
        outer = "mean" if self.outer is None else self.outer.describe() if is_outer(self.outer) else "optimizer"
        names = ("warmup_steps", "weights", "optimizer_state", "buffers", "overlap")
        return {
            "interval": self.interval.describe(),
            **{name: getattr(self, name) for name in names},
            "outer": outer,
            "sparse": self.sparse.describe() if self.sparse else None,
        }


def check_settings(
    every_steps: Any = None,
    every_seconds: Any = None,
    warmup_steps: Any = 0,
    weights: Any = "uniform",
    outer: Any = None,
    optimizer_state: Any = "local",
    buffers: Any = "local",
    overlap: Any = False,
    sparse: Any = None,
    timeout_seconds: Any = 3600.0,
) -> Settings:
    """The settings, or an error that says what is wrong with them.

    >>> check_settings(every_seconds=30, weights="steps").describe()["interval"]
    'every 30 s'
    """
    if (every_steps is None) == (every_seconds is None):
        raise ValueError(
            f"`every_steps` must be given, or `every_seconds`, and not both. "
            f"Received: every_steps={every_steps!r}, every_seconds={every_seconds!r}."
        )
    if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0:
        raise ValueError(f"`warmup_steps` must be a whole number, 0 or more. Received: warmup_steps={warmup_steps!r}.")
    _check_choice("weights", weights, WEIGHTS)
    _check_choice("optimizer_state", optimizer_state, OPTIMIZER_STATE)
    _check_choice("buffers", buffers, BUFFERS)
    if sparse is not None:
        _check_sparse(sparse)
    if every_seconds is None:
        interval: Interval = EverySteps(check_count(every_steps, "every_steps"))
    else:
        interval = EverySeconds(check_positive(every_seconds, "every_seconds"))
    timeout = float(check_positive(timeout_seconds, "timeout_seconds"))
    return Settings(
        interval, warmup_steps, weights, outer, optimizer_state, buffers, bool(overlap), sparse, timeout
    )  # fmt: skip


def _check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"`{name}` must be one of {listed(known)}. Received: {name}={value!r}.")


def _check_sparse(sparse: Any) -> None:
    if not isinstance(sparse, Config):
        raise TypeError(f"`sparse` must be Compression.sparse(...) or None. Received: sparse={sparse!r}.")
    if hasattr(sparse.controller, "due"):
        raise ValueError(
            f"`sparse` must have a density of its own, Compression.sparse(density=0.01) say: rounds are too rare to "
            f"measure the network. Received: a {type(sparse.controller).__name__} controller."
        )
    if not isinstance(sparse.memory, Residual):
        raise ValueError(
            f"`sparse` must keep what it does not send: memory='residual'; momentum belongs to `outer`. "
            f"Received: {type(sparse.memory).__name__}."
        )
