"""A link between ranks as two numbers, fitted at the start and followed from then on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvd_sparse.types import check_positive

_LEAST_LATENCY = 1e-9  # seconds; a fit through noisy times may fall below zero
_LEAST_SECONDS_PER_BYTE = 1e-12  # 8 Tbit/s


@dataclass(frozen=True)
class Link:
    """Seconds per message or per collective, whichever the cost model in use counts, and seconds per byte of one rank.

    Example:
        >>> Link(latency=1.5e-3, seconds_per_byte=8e-10).bandwidth
        1250000000.0
    """

    latency: float
    seconds_per_byte: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return 1 / self.seconds_per_byte


def fit_link(
    small: tuple[float, float], large: tuple[float, float], num_ranks: int, per_collective: bool = False
) -> Link:
    """The link that explains two allreduces of different size.

    Args:
        small, large: (bytes of the vector, seconds).
        num_ranks: those that took part, two or more.
        per_collective: the latency is that of a collective, as in Horovod, not of one of a ring's 2(P-1) messages.

    Raises:
        ValueError: one rank, sizes that do not grow, or a time or size that is not positive and finite.

    Reference: S. Tyagi, M. Swany, Flexible Communication for Optimal Distributed Learning over Unpredictable Networks,
    IEEE BigData 2023, arXiv:2312.02493 (cost of a ring).

    Example:
        >>> fit_link((4096, 0.002), (8192, 0.003), num_ranks=2, per_collective=True)
        Link(latency=0.001, seconds_per_byte=2.44140625e-07)
    """
    if num_ranks < 2:
        raise ValueError(f"`num_ranks` must be 2 or more: one rank has no link. Received: num_ranks={num_ranks!r}.")
    for name, (num_bytes, seconds) in (("small", small), ("large", large)):
        check_positive(num_bytes, f"{name}[0]")
        check_positive(seconds, f"{name}[1]")
    if large[0] <= small[0]:
        raise ValueError(f"`large` must have more bytes than `small`. Received: small={small!r}, large={large!r}.")
    num_messages = 1 if per_collective else 2 * (num_ranks - 1)
    share = 2 * (num_ranks - 1) / num_ranks
    seconds_per_byte = max((large[1] - small[1]) / (share * (large[0] - small[0])), _LEAST_SECONDS_PER_BYTE)
    latency = (small[1] - share * seconds_per_byte * small[0]) / num_messages
    return Link(max(latency, _LEAST_LATENCY), seconds_per_byte)


def update(link: Link, num_bytes: float, seconds: float, num_collectives: int, weight: float) -> Link:
    """The link after one more exchange: a moving average of seconds per byte, quick to see a drop of bandwidth.

    Args:
        num_bytes: what this rank sent in the exchange.
        seconds: how long it took. One that is no time or no size (NaN, infinite, zero, negative) changes nothing.
        num_collectives: how many latencies it holds.
        weight: of the new sample, in (0, 1].

    Raises:
        ValueError: `weight` is out of range.

    Example:
        >>> update(Link(0.001, 1e-9), num_bytes=1e6, seconds=0.004, num_collectives=1, weight=0.5)
        Link(latency=0.001, seconds_per_byte=2e-09)
    """
    if not 0 < weight <= 1:
        raise ValueError(f"`weight` must be in (0, 1]. Received: weight={weight!r}.")
    if not (0 < num_bytes < math.inf and 0 < seconds < math.inf):
        return link
    sample = max((seconds - num_collectives * link.latency) / num_bytes, _LEAST_SECONDS_PER_BYTE)
    return Link(link.latency, (1 - weight) * link.seconds_per_byte + weight * sample)
