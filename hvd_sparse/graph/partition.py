"""Which rank keeps which node: random nodes (RandomTMA), random clusters (SuperTMA). See metis.py for minimum cuts.

A part is the subgraph that its nodes induce; edges between parts are dropped. Random parts drop more of them than
minimum cuts, and yet the averaged model is better: all parts look alike. Letters: N nodes, M parts.

Reference: J. Zhu, A. Reganti, E. Huang, C. Dickens, N. Rao, K. Subbian, D. Koutra, Simplifying Distributed Neural
Network Training on Massive Graphs: Randomized Partitions Improve Model Aggregation, arXiv:2305.09887. Ours: the hash,
so that any rank knows any node's part without being told.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_sparse.graph.checks import Ints, check_number, check_seed, numbers_below, whole_numbers
from hvd_sparse.graph.hashing import hash64

Parts = npt.NDArray[np.int32]

_MAX_PARTS = 2**31 - 1
_CHUNK = 2**18  # nodes hashed at a time: the temporary arrays stay in the processor's cache


def random_parts(num_nodes: int, num_parts: int, seed: int = 0) -> Parts:
    """The part (N,) of every node, each one drawn by itself: floor(hash32(node, seed) * num_parts / 2**32).

    After a resize only `num_parts` changes, and nothing needs to be sent. Choose it when nothing is known about the
    graph, or for sheer size: 10 million nodes take a tenth of a second. Parts differ in size by chance, about
    sqrt(N / M) nodes.

    Args:
        num_nodes: N.
        num_parts: M, usually the number of ranks.
        seed: any int, equal on all ranks.

    Raises:
        TypeError, ValueError: an argument is no such number.

    Example:
        >>> random_parts(16, 4).tolist()
        [2, 0, 3, 3, 0, 0, 1, 1, 3, 2, 2, 1, 2, 1, 3, 2]
    """
    num_nodes = check_number(num_nodes, "num_nodes")
    parts = np.empty(num_nodes, np.int32)
    for start in range(0, num_nodes, _CHUNK):
        nodes = np.arange(start, min(start + _CHUNK, num_nodes))
        parts[start : start + _CHUNK] = random_part_of(nodes, num_parts, seed)
    return parts


def random_part_of(nodes: npt.ArrayLike, num_parts: int, seed: int = 0) -> Parts:
    """What `random_parts` says about these nodes (k,), without the others."""
    num_parts = _check_parts(num_parts)
    high = hash64(whole_numbers(nodes, "nodes"), check_seed(seed)) >> np.uint64(32)
    return ((high * np.uint64(num_parts)) >> np.uint64(32)).astype(np.int32)


def super_parts(cluster_of_node: npt.ArrayLike, num_parts: int, seed: int = 0) -> Parts:
    """The part (N,) of every node, when whole clusters are drawn: parts look alike, and keep the edges inside clusters.

    Clusters are shuffled. With g = clusters / parts, every part but the last takes floor(g) of them, and one more with
    the probability of g's fraction; the last takes the rest.

    Choose it on graphs with local structure; the clusters come from `clusters`, and there should be many more of them
    than parts: published runs have 15,000. Avoid it where clusters are uneven and few.

    Args:
        cluster_of_node: (N,) numbers from 0.
        num_parts: M, usually the number of ranks.
        seed: any int, equal on all ranks.

    Raises:
        TypeError, ValueError: an argument is no such number, or a part gets no nodes.

    Example:
        >>> super_parts([0, 0, 1, 1, 2, 2, 3, 3], 2).tolist()
        [0, 0, 0, 0, 1, 1, 1, 1]
    """
    num_parts, seed = _check_parts(num_parts), check_seed(seed)
    cluster_of_node = numbers_below(cluster_of_node, _MAX_PARTS, "cluster_of_node")
    num_clusters = int(cluster_of_node.max(initial=-1)) + 1
    shuffled = np.argsort(hash64(np.arange(num_clusters), seed), kind="stable")
    size, rest = divmod(num_clusters, num_parts)
    draws = hash64(num_clusters + np.arange(num_parts - 1), seed) >> np.uint64(11)
    ends = np.cumsum(size + (draws < rest / num_parts * 2.0**53)).clip(max=num_clusters)
    part_of_cluster = np.empty(num_clusters, np.int32)
    part_of_cluster[shuffled] = np.searchsorted(ends, np.arange(num_clusters), side="right")
    parts = part_of_cluster[cluster_of_node]
    part_sizes(parts, num_parts)
    return parts


def part_sizes(part_of_node: npt.ArrayLike, num_parts: int) -> Ints:
    """Nodes in each part (M,).

    Raises:
        TypeError, ValueError: parts are not from 0 to num_parts - 1, or one of them has no nodes.
    """
    parts = numbers_below(part_of_node, _check_parts(num_parts), "part_of_node")
    sizes = np.bincount(parts, minlength=num_parts)
    if not sizes.all():
        raise ValueError(
            f"`part_of_node` must give every part a node: a rank cannot train without. Take fewer parts (ranks), "
            f"another seed or, for super_parts, more clusters. Received: nothing for part "
            f"{_shortened(np.flatnonzero(sizes == 0))}, sizes {_shortened(sizes)}."
        )
    return sizes


def _check_parts(num_parts: Any) -> int:
    num_parts = check_number(num_parts, "num_parts")
    if num_parts > _MAX_PARTS:
        raise ValueError(f"`num_parts` must be below 2**31. Received: num_parts={num_parts}.")
    return num_parts


def _shortened(values: Ints) -> str:
    """1, 2, 3, ... for a message: at most 32 of them."""
    return ", ".join(map(str, values[:32].tolist())) + (", ..." if len(values) > 32 else "")
