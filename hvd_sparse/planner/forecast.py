"""What to expect of a model on a network before it is trained there, and what to use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvd_sparse.planner.choice import LADDER, Choice, Option, choose
from hvd_sparse.planner.cost import TRAFFIC, Traffic, seconds
from hvd_sparse.planner.events import Event, Prediction, compression_needed, step
from hvd_sparse.planner.link import Link
from hvd_sparse.types import num_kept


@dataclass(frozen=True)
class Model:
    """One rank's step: gradients as they become ready, seconds of the whole, and where these come from, in words."""

    events: tuple[Event, ...]
    step_seconds: float
    note: str = ""


@dataclass(frozen=True)
class Network:
    """Links by group of ranks, "global" at least; on how many ranks they were measured, in all and on each host."""

    links: Mapping[str, Link]
    num_ranks: int | None = None
    num_local: int = 1


@dataclass(frozen=True)
class Row:
    """A number of ranks.

    Attributes:
        dense, dense_seconds: the step without compression.
        needed: the compression factor of an allreduce that reaches the target; None: no factor does.
        choice: what to use; its time is that of a step.
        scaling: with it.
    """

    num_ranks: int
    dense: Prediction
    dense_seconds: float
    needed: float | None
    choice: Choice
    scaling: float


def forecast(
    model: Model, network: Network, num_ranks: int, collective: str | None = None, target: float = 0.95
) -> Row:
    """What to expect of `num_ranks` ranks. The choice is the densest exchange whose scaling factor is `target`.

    Args:
        collective: the only one to consider beside dense; None: all that work with every sparsifier.

    Raises:
        ValueError: `collective` is "hierarchical", and the network's hosts or their links are not known.

    Example:
        >>> model, network = Model(((0.1, 1e8),), 0.2), Network({"global": Link(1e-3, 1e-8)})
        >>> forecast(model, network, 8).choice.reason.split("; ")[1]
        'owner_reduce at density 0.001 takes 205.5 ms and is the densest that fits'
    """
    link, alone = network.links["global"], model.step_seconds
    dense = step(model.events, alone, num_ranks, link.bandwidth, alpha=link.latency)
    needed = compression_needed(model.events, alone, num_ranks, link.bandwidth, target, alpha=link.latency)
    options = [
        Option(name, density, alone + _sparse_step(model, network, num_ranks, name, density).overhead)
        for name in _candidates(network, num_ranks, collective)
        for density in LADDER
    ]
    choice = choose(options, alone + dense.overhead, alone / target, margin=0.0)
    return Row(num_ranks, dense, alone + dense.overhead, needed, choice, alone / choice.seconds)


def _candidates(network: Network, num_ranks: int, collective: str | None) -> list[str]:
    num_local = min(network.num_local, num_ranks)
    has_hosts = num_local > 1 and num_ranks % num_local == 0 and {"local", "cross"} <= set(network.links)
    if num_ranks == 1 or collective == "dense":
        return []
    if collective == "hierarchical" and not has_hosts:
        raise ValueError(
            "`collective` hierarchical needs links measured inside and between hosts of several ranks, and numbers of "
            f"ranks that fill hosts. Received: {num_ranks} ranks, {network.num_local} per host, links "
            f"{', '.join(network.links)}."
        )
    if collective is not None:
        return [collective]
    return ["owner_reduce", "allgather", *(["hierarchical"] if has_hosts else [])]


def _sparse_step(model: Model, network: Network, num_ranks: int, collective: str, density: float) -> Prediction:
    """The step with a sparse exchange. What stays inside a host counts as time to encode."""

    def traffics(size: float) -> dict[str, Traffic]:
        n = max(1, round(size / 4))
        return TRAFFIC[collective](n, num_kept(density, n), num_ranks, 8, min(network.num_local, num_ranks))

    def inside(size: float) -> float:
        local = traffics(size).get("local")
        return seconds(network.links["local"], local) if local else 0.0

    group = "cross" if collective == "hierarchical" else "global"
    link = network.links[group]
    return step(
        model.events,
        model.step_seconds,
        num_ranks,
        link.bandwidth,
        alpha=link.latency,
        codec=inside,
        traffic=lambda size: traffics(size)[group],
    )
