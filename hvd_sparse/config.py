"""What the user asked for, checked once and equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

from hvd_sparse import registry
from hvd_sparse.collectives import Collective
from hvd_sparse.collectives.by_size import BySize
from hvd_sparse.collectives.owner_reduce import OwnerReduce
from hvd_sparse.controllers import Controller
from hvd_sparse.controllers.bandwidth import Bandwidth
from hvd_sparse.controllers.fixed import Fixed
from hvd_sparse.controllers.warmup import Warmup
from hvd_sparse.memories import Memory
from hvd_sparse.memories.delayed import Delayed
from hvd_sparse.planner.choice import LADDER
from hvd_sparse.schemes import Scheme
from hvd_sparse.schemes.sparse import SparseSum
from hvd_sparse.sparsifiers import Sparsifier
from hvd_sparse.types import check_count, check_positive
from hvd_sparse.wire import WireFormat, wire_format


@dataclass(frozen=True)
class Config:
    """How gradients are exchanged. Made by `Compression.sparse`, which documents the fields."""

    chosen: Scheme  # of the buckets that are compressed
    memory: Memory
    controller: Controller
    bucket_bytes: int  # 0: the front chooses
    min_size: int
    timeout_seconds: float
    alone: None | Scheme = None  # the scheme, if it has no such parts

    def scheme(self) -> Scheme:
        """The scheme of a bucket that is compressed."""
        return self.chosen

    @property
    def sparsifier(self) -> Any:
        """Which entries; None if the scheme has no such part."""
        return getattr(self.chosen, "sparsifier", None)

    @property
    def collective(self) -> Any:
        """How their sum travels; None if the scheme has no such part."""
        return getattr(self.chosen, "collective", None)

    def with_buckets(self, usual_bytes: int) -> Config:
        """The same with buckets of the size that suits a front, unless the user has chosen one."""
        return self if self.bucket_bytes else replace(self, bucket_bytes=usual_bytes)

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups of ranks that the scheme names beside "global"."""
        return tuple(getattr(self.chosen, "groups", ()))

    def describe(self) -> dict[str, str]:
        """Every setting in words: for the log, and to compare ranks."""
        own = {"sparsifier": self.sparsifier, "collective": self.collective}
        whole = own if isinstance(self.chosen, SparseSum) else {"scheme": self.chosen}
        parts = {**whole, "memory": self.memory, "controller": self.controller}
        words = {name: _words(part) for name, part in parts.items()}
        sizes = {name: str(getattr(self, name)) for name in ("bucket_bytes", "min_size", "timeout_seconds")}
        return {**words, **sizes}


def sparse_config(
    density: float = 0.01,
    *,
    sparsifier: None | str | Sparsifier = None,
    collective: None | str | Collective = None,
    wire: None | str | WireFormat = None,
    scheme: str | Scheme = "sparse",
    memory: str | Memory = "residual",
    controller: None | Controller = None,
    warmup_steps: int = 0,
    bucket_bytes: int | None = None,
    min_size: int = 1024,
    timeout_seconds: float = 600.0,
) -> Config:
    """Exchange only a fraction `density` of the gradient entries per step, and remember the rest.

    Args:
        density: k / n, in (0, 1]. 0.01 suits most models; at 1.0 every bucket is dense.
        sparsifier: which entries: "threshold" (None), "topk", "leader", "importance", "random_block", "random_k",
            "block_topk", "exclusive", or an object of your own.
        collective: how their sum travels: "owner_reduce", "allgather", "by_size" (one of these two), "hierarchical",
            "shared_allreduce", "gtopk", or an object. None takes "shared_allreduce" if the sparsifier's indices are
            equal on all ranks, and "owner_reduce" otherwise.
        wire: how entries are written: "fp32" (8 bytes each, the default), "fp16" (6), "compact" (4). Rounding errors
            stay in the memory.
        scheme: the whole of it: "sparse", which consists of the above, or one that has no such parts: "low_rank", whose
            setting is its rank, not the density (`LowRank(rank=2)` of hvd_sparse.schemes.low_rank), "ok_topk",
            "sketch", "lazy" (ranks with nothing new to say are silent: on PyTorch, `optimizer.lazy_step`), "static"
            (constant entries are known, and not sent), "dense", or an object.
        memory: what becomes of unsent entries: "residual", "momentum" (DGC; give the optimizer momentum=0), "sgc" (one
            momentum for all ranks; the same), "delayed" (applied one step late), "none".
        controller: an object that decides the density; replaces `density` and `warmup_steps`.
        warmup_steps: exchanges over which the density falls to `density` in five stages; 0 for none.
        bucket_bytes: gradients travel in buckets of about this size; a bucket starts as soon as it is complete. None:
            4 MiB, and 16 MiB in TensorFlow, whose graphs grow with the number of buckets.
        min_size: parameters with fewer elements, or with one dimension, are sent densely.
        timeout_seconds: longest wait for the other ranks before an error ends this one.

    Raises:
        ValueError, TypeError: an argument is out of range, or parts do not work together.

    Example:
        >>> sparse_config(0.05, sparsifier="random_block").describe()["collective"]
        'SharedAllReduce'
    """
    if controller is None:
        controller = Warmup(density, warmup_steps) if warmup_steps else Fixed(density)
    elif density != 0.01 or warmup_steps:
        raise ValueError(
            f"`controller` replaces `density` and `warmup_steps`: give it alone. "
            f"Received: density={density!r}, warmup_steps={warmup_steps!r}."
        )
    if isinstance(controller, str):
        raise TypeError(f"`controller` must be an object, Warmup(0.01, 1000) say. Received: controller={controller!r}.")
    if isinstance(min_size, bool) or not isinstance(min_size, int) or min_size < 0:
        raise ValueError(f"`min_size` must be a number of elements, 0 or more. Received: min_size={min_size!r}.")
    kept: Memory = registry.create("memory", memory)
    return Config(
        chosen=_scheme(scheme, sparsifier, collective, wire, kept),
        memory=kept,
        controller=registry.create("controller", controller),
        bucket_bytes=0 if bucket_bytes is None else check_count(bucket_bytes, "bucket_bytes"),
        min_size=min_size,
        timeout_seconds=float(check_positive(timeout_seconds, "timeout_seconds")),
    )


def adaptive_config(
    *,
    budget_seconds: float | None = None,
    exposed_fraction: float = 0.05,
    ladder: Sequence[float] = LADDER,
    period: int = 50,
    hysteresis: float = 0.1,
    margin: float = 0.1,
    gain_floor: float | None = None,
    **settings: Any,
) -> Config:
    """Measure the network and the computation, and exchange as much as hides behind it: everything, if that fits.

    Ranks decide together every `period` exchanges, and say why (`opt.metrics()`, and a log line per change).

    Args:
        budget_seconds: what an exchange may cost a step. None: `exposed_fraction` of the step, or a twentieth of it
            more than the cheapest plan costs.
        exposed_fraction: part of a step's time that may be spent on communication, in [0, 1).
        ladder: densities to choose from, beside dense.
        period: exchanges between decisions.
        hysteresis: relative difference in time that a change must make.
        margin: dense stays if compression would not make the exchange faster by this fraction.
        gain_floor: least share of the gradient's energy that is sent, 0.7 say. PyTorch only.
        settings: all others of `sparse_config`, except `density`, `controller`, `warmup_steps` and `scheme`. The usual
            `collective` is "by_size" in place of "owner_reduce": sparse rungs are short messages.

    Raises:
        ValueError, TypeError: an argument is out of range, or parts do not work together.

    Example:
        >>> adaptive_config(period=100, memory="momentum").controller.period
        100
    """
    for name in ("density", "controller", "warmup_steps"):
        if name in settings:
            raise ValueError(
                f"`{name}` is what adapts: leave it out, or choose Compression.sparse({name}=...). "
                f"Received: {name}={settings[name]!r}."
            )
    # The parts first: the controller predicts the volume of the collective that they come to.
    parts = sparse_config(**settings)
    if isinstance(parts.memory, Delayed):
        raise ValueError(
            "`memory` must not be 'delayed' here: what is hidden behind the next step cannot be measured. Choose "
            "Compression.sparse(memory='delayed')."
        )
    if not isinstance(parts.chosen, SparseSum):
        raise ValueError(
            f"`scheme` must be 'sparse' here, whose traffic can be predicted for every density: choose "
            f"Compression.sparse(scheme=...). Received: scheme={settings['scheme']!r}."
        )
    if settings.get("collective") is None and isinstance(parts.collective, OwnerReduce):
        parts = replace(parts, chosen=SparseSum(parts.sparsifier, BySize(parts.collective.wire), parts.chosen.rescale))
    controller = Bandwidth(
        budget_seconds, exposed_fraction, ladder, period, hysteresis, margin, gain_floor,
        registry.name_of("collective", parts.collective) or "owner_reduce", _entry_bytes(parts),
    )  # fmt: skip
    return replace(parts, controller=controller)


def _entry_bytes(parts: Config) -> float:
    """What an entry takes on the wire, as the planner counts."""
    sparsifier: Any = parts.sparsifier
    if sparsifier.blind:
        return 4  # everybody knows the index
    if parts.sparsifier.shared_indices:
        return float(getattr(parts.sparsifier, "entry_bytes", 8))
    collective = getattr(parts.collective, "across", parts.collective)
    return float(getattr(getattr(collective, "wire", None), "entry_bytes", 8))


def _scheme(scheme: Any, sparsifier: Any, collective: Any, wire: Any, memory: Memory) -> Scheme:
    """What was chosen by its parts, or as a whole."""
    if scheme != "sparse":
        given = {"sparsifier": sparsifier, "collective": collective, "wire": wire}
        extra = [f"{name}={value!r}" for name, value in given.items() if value is not None]
        if extra:
            raise ValueError(
                f"`scheme` replaces `sparsifier`, `collective` and `wire`: give it alone. "
                f"Received: scheme={scheme!r}, {', '.join(extra)}."
            )
        whole: Scheme = registry.create("scheme", scheme)
        return whole
    selection: Sparsifier = registry.create("sparsifier", "threshold" if sparsifier is None else sparsifier)
    if collective is None:
        collective = "shared_allreduce" if selection.shared_indices else "owner_reduce"
    return SparseSum(selection, _collective(collective, wire), selection.blind and not memory.keys)


def _collective(choice: str | Collective, wire: None | str | WireFormat) -> Collective:
    if wire is None:
        return registry.create("collective", choice)
    if not isinstance(choice, str):
        raise ValueError(
            f"`wire` belongs to the collective: {type(choice).__name__}(wire=...). Received: wire={wire!r}."
        )
    chosen = wire_format(wire)
    if "wire" in signature(registry.method_class("collective", choice)).parameters:
        return registry.create("collective", choice, wire=chosen)
    if not chosen.exact:
        raise ValueError(
            f"`wire` is for collectives that send indices and add nothing on the way: sums would round, and nobody "
            f"could keep what they lose. Received: wire={wire!r} with collective={choice!r}."
        )
    return registry.create("collective", choice)


def check_passes(passes: Any) -> int:
    """`passes` if it is a number of backward passes."""
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(f"`backward_passes_per_step` must be an int, 1 or more. Received: {passes!r}.")
    return passes


def check_wrapping(
    config: Any, compression: Any, op: Any, known_ops: tuple[Any, Any], predivide: Any, passes: Any, momentum: Any
) -> bool:
    """Whether gradients are averaged, not summed; an error if a front cannot honour what it was asked for.

    Args:
        config: what `compression` stands for.
        known_ops: Horovod's Average and Sum.
        momentum: that of the optimizer, or Adam's first one.
    """
    average, total = known_ops
    if not isinstance(config, Config):
        raise TypeError(
            f"`compression` must be Compression.sparse(...), Compression.none or Compression.fp16. "
            f"Received: compression={compression!r}."
        )
    if op not in (average, total):
        raise ValueError(f"`op` must be Average or Sum: Adasum has no sparse form. Received: op={op}.")
    if predivide != 1.0 and op != average:
        raise ValueError(f"`gradient_predivide_factor` needs op=Average. Received: {predivide!r} with op={op}.")
    check_passes(passes)
    own = getattr(config.memory, "momentum", None)
    if own and isinstance(momentum, (int, float)) and momentum:
        raise ValueError(
            f"`memory` applies the momentum itself ({own}): give the optimizer momentum=0 (SGD, not Adam). "
            f"Received: momentum={momentum!r}."
        )
    return bool(op == average)


def _words(part: Any) -> str:
    settings = {name: value for name, value in sorted(getattr(part, "__dict__", {}).items()) if name[0] != "_"}
    words = ", ".join(f"{name}={_plain(value)}" for name, value in settings.items())
    return type(part).__name__ + (f"({words})" if words else "")


def _plain(value: Any) -> str:
    """The value, unless its repr may hold an address, which differs between ranks."""
    return repr(value) if isinstance(value, (bool, int, float, str, tuple, type(None))) else _words(value)
