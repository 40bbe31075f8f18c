"""What one exchange sends, and how long that takes. n elements, k entries kept, P ranks, values of 4 bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hvd_sparse.planner.link import Link
from hvd_sparse.types import block_quota

_VALUE_BYTES = 4
_SHORT_BYTES = 1 << 17  # a millisecond of 1 Gbit/s: a collective costs more, whatever it carries
_BUCKET_SIZE = 1 << 20  # elements, of an ordinary bucket


@dataclass(frozen=True)
class Traffic:
    """What a rank sends over one link: collectives and bytes."""

    num_collectives: int
    num_bytes: float


def dense(n: int, k: int, num_ranks: int, entry_bytes: float = 8) -> Traffic:
    """An allreduce of everything. `k` and `entry_bytes` change nothing."""
    return _traffic(num_ranks, 1, 2 * _VALUE_BYTES * n * (num_ranks - 1) / num_ranks)


def flat(n: int, k: int, num_ranks: int, entry_bytes: float = 8) -> Traffic:
    """`owner_reduce`: the same number of entries, one at least, to each owner, and as many sums from it."""
    _, quota = block_quota(n, num_ranks, k)
    return _traffic(num_ranks, 2, 2 * entry_bytes * quota * (num_ranks - 1))


def shared(n: int, k: int, num_ranks: int, entry_bytes: float = 8) -> Traffic:
    """`shared_allreduce`: one rank's indices by broadcast, then an allreduce of values.

    `entry_bytes=4` stands for indices that all ranks know anyway: nothing but the allreduce. Where an allreduce carries
    the indices as well, as `Leader` does by default, it is as much as `flat`.
    """
    index_bytes = entry_bytes - _VALUE_BYTES
    values = 2 * _VALUE_BYTES * k * (num_ranks - 1) / num_ranks
    return _traffic(num_ranks, 2 if index_bytes else 1, index_bytes * k + values)


def gather(n: int, k: int, num_ranks: int, entry_bytes: float = 8) -> Traffic:
    """`allgather`: all entries of all ranks."""
    return _traffic(num_ranks, 1, entry_bytes * k * (num_ranks - 1))


def by_size(n: int, k: int, num_ranks: int, entry_bytes: float = 8) -> Traffic:
    """`by_size`: `gather` where it is short in buckets of the usual size, else `flat`."""
    in_bucket = math.ceil(k * min(1.0, _BUCKET_SIZE / n))
    return (gather if is_short(in_bucket, num_ranks, entry_bytes) else flat)(n, k, num_ranks, entry_bytes)


def is_short(k: int, num_ranks: int, entry_bytes: float) -> bool:
    """Whether k entries are so few that `gather` beats `flat`: a collective less is worth 128 KiB more."""
    more = entry_bytes * k * (num_ranks - 1) * (1 - 2 / num_ranks)
    return more <= _SHORT_BYTES


def tree(n: int, k: int, num_ranks: int, entry_bytes: float = 8) -> Traffic:
    """`gtopk`: k entries in every round up the tree, and once for everybody."""
    num_rounds = 1 + (num_ranks - 1).bit_length()
    return _traffic(num_ranks, num_rounds, num_rounds * entry_bytes * k)


def hierarchical(n: int, k: int, num_ranks: int, entry_bytes: float = 8, num_local: int = 1) -> dict[str, Traffic]:
    """`hierarchical`: dense inside a host of `num_local` ranks, and every rank's part of it as `flat` across hosts.

    Raises:
        ValueError: hosts would have different numbers of ranks.
    """
    if num_ranks % num_local:
        raise ValueError(
            f"`num_ranks` must be a multiple of `num_local`, the ranks of a host. "
            f"Received: num_ranks={num_ranks}, num_local={num_local}."
        )
    part = -(-n // num_local)
    inside = dense(n, n, num_local).num_bytes + gather(part, part, num_local, _VALUE_BYTES).num_bytes
    across = flat(part, max(1, k // num_local), num_ranks // num_local, entry_bytes)
    return {"local": _traffic(num_local, 2, inside), "cross": across}


def _traffic(num_ranks: int, num_collectives: int, num_bytes: float) -> Traffic:
    return Traffic(num_collectives, num_bytes) if num_ranks > 1 else Traffic(0, 0.0)


def _over_all_ranks(volume: Callable[[int, int, int, float], Traffic]) -> Callable[..., dict[str, Traffic]]:
    def by_group(n: int, k: int, num_ranks: int, entry_bytes: float = 8, num_local: int = 1) -> dict[str, Traffic]:
        return {"global": volume(n, k, num_ranks, entry_bytes)}

    return by_group


# Registered name of a collective, or "dense": (n, k, num_ranks, entry_bytes=8, num_local=1) -> group of ranks: traffic.
TRAFFIC: dict[str, Callable[..., dict[str, Traffic]]] = {
    "dense": _over_all_ranks(dense),
    "owner_reduce": _over_all_ranks(flat),
    "allgather": _over_all_ranks(gather),
    "by_size": _over_all_ranks(by_size),
    "shared_allreduce": _over_all_ranks(shared),
    "gtopk": _over_all_ranks(tree),
    "hierarchical": hierarchical,
}


def seconds(link: Link, traffic: Traffic, codec_seconds: float = 0.0) -> float:
    """Time of an exchange over one link. `codec_seconds`: selecting, packing and unpacking."""
    return traffic.num_collectives * link.latency + traffic.num_bytes * link.seconds_per_byte + codec_seconds


def seconds_by_group(links: Mapping[str, Link], traffics: Mapping[str, Traffic], codec_seconds: float = 0.0) -> float:
    """Time of an exchange over the links of several groups, one after the other: what `TRAFFIC` returns."""
    return codec_seconds + sum(seconds(links[group], traffic) for group, traffic in traffics.items())


def flat_density(link: Link, n: int, num_ranks: int, budget_seconds: float) -> float:
    """The density at which `flat` takes the budget: negative if its latency alone takes more, above 1 if all fits."""
    if num_ranks < 2:
        return math.inf
    spare = budget_seconds - 2 * link.latency
    return spare * link.bandwidth * num_ranks / (16 * n * (num_ranks - 1))


# Exchanges made of single messages: `link.latency` is that of a message. For studies; Horovod chooses for itself how
# an allreduce travels. S. Tyagi, M. Swany, IEEE BigData 2023, arXiv:2312.02493, which has their measured times in
# Table VI. The last two include the broadcast of indices.


def allgather_seconds(link: Link, dense_bytes: float, density: float, num_ranks: int) -> float:
    """Every rank's entries to every other rank."""
    sent = 2 * dense_bytes * density * (num_ranks - 1)
    return link.latency * math.log2(num_ranks) + sent * link.seconds_per_byte


def ring_seconds(link: Link, dense_bytes: float, density: float, num_ranks: int) -> float:
    """Indices by broadcast, values around a ring."""
    rounds, others = math.log2(num_ranks), num_ranks - 1
    sent = dense_bytes * density * (2 * others / num_ranks + rounds)
    return link.latency * (2 * others + rounds) + sent * link.seconds_per_byte


def tree_seconds(link: Link, dense_bytes: float, density: float, num_ranks: int) -> float:
    """Indices by broadcast, values up and down a tree."""
    rounds = math.log2(num_ranks)
    return 3 * rounds * (link.latency + dense_bytes * density * link.seconds_per_byte)
