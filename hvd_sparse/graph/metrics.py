"""Link prediction: which edges to hold out, and how well they are found. How much of a graph its parts keep."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvd_sparse.graph.checks import Ints, check_seed
from hvd_sparse.graph.csr import Graph
from hvd_sparse.graph.hashing import hash64


@dataclass(frozen=True, eq=False)
class EdgeSplit:
    """`train`: the graph less the edges from `src` (h,) to `dst` (h,), which are held out."""

    train: Graph
    src: Ints
    dst: Ints


def split_edges(graph: Graph, fraction: float, seed: int = 0) -> EdgeSplit:
    """Hold out about this fraction of the edges: pairs of nodes are drawn by their hash, both directions together.

    Edges of a node to itself stay. A pair's fate depends on its node numbers, `graph.num_nodes` and `seed` alone.

    Raises:
        TypeError, ValueError: `fraction` is not between 0 and 1, or `seed` not an int.

    Example:
        >>> split = split_edges(Graph.from_edges([0, 1, 2, 3], [1, 2, 3, 0], num_nodes=4, undirected=True), 0.25)
        >>> split.src.tolist(), split.dst.tolist(), split.train.num_edges
        ([1, 0], [0, 1], 6)
    """
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction < 1:
        raise ValueError(f"`fraction` must be a number between 0 and 1. Received: fraction={fraction!r}.")
    src, dst = graph.to_edges()
    pairs = np.minimum(src, dst) * graph.num_nodes + np.maximum(src, dst)
    held = (hash64(pairs, check_seed(seed)) < np.uint64(fraction * 2**64)) & (src != dst)
    train = Graph.from_edges(src[~held], dst[~held], graph.num_nodes)
    return EdgeSplit(train, src[held], dst[held])


def mrr(scores_pos: npt.ArrayLike, scores_neg: npt.ArrayLike) -> float:
    """Mean reciprocal rank of the positives (b,) among their own negatives (b, k); ties count against the positive.

    So does a score that is not a number. 1 is perfect; scores that say nothing, all equal, get 1 / (k + 1).

    Raises:
        ValueError: shapes do not match, or there are no positives.

    Example:
        >>> round(mrr([2.0, 5.0, 1.0], [[2.0, 0.0], [1.0, 3.0], [1.5, 1.0]]), 6)
        0.611111
    """
    positives, negatives = np.asarray(scores_pos), np.asarray(scores_neg)
    if positives.ndim != 1 or negatives.ndim != 2 or len(positives) != len(negatives) or not len(positives):
        raise ValueError(
            f"`scores_pos` must be of shape (b,) and `scores_neg` of shape (b, k), b at least 1. Received: shapes "
            f"{positives.shape} and {negatives.shape}."
        )
    ranks = 1 + (~(negatives < positives[:, None])).sum(1)
    return float((1 / ranks).mean())


def kept_edges(graph: Graph, part_of_node: npt.NDArray[np.integer]) -> float:
    """The fraction of the edges whose ends are in the same part."""
    src, dst = graph.to_edges()
    return float((part_of_node[src] == part_of_node[dst]).mean())
