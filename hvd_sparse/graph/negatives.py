"""Targets for link prediction that are no edges. Letters: b positive edges, k negatives for each, N nodes."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from hvd_sparse.graph.checks import Ints, check_number, check_seed, numbers_below
from hvd_sparse.graph.csr import Graph

_MAX_DRAWS = 8


class NegativeSampler(Protocol):
    """What draws negatives. One of your own may weight nodes, or fetch them from other ranks."""

    def sample(self, positives_src: npt.ArrayLike, num_negatives: int) -> Ints:
        """For each source (b,) so many nodes (b, k) that stand in for the target of its edge."""


class LocalNegatives:
    """Uniform draws from the nodes of this rank's part: no other rank is asked.

    A node that has an edge from the source, or is the source, is drawn again, up to eight times when `graph` is given.

    Choose it for training: cheap, and what published periodic averaging does. Avoid it on minimum-cut parts, where
    local negatives are all alike (arXiv:2506.20818 blames them for lost accuracy), and for evaluation.

    Args:
        num_nodes: N of the part; negatives are its local numbers.
        seed: any int. Draws depend on it, the epoch and the number of calls in this epoch, and on nothing else.
        graph: true edges, which are avoided. None: negatives may be true edges, rarely in a large graph.

    Example:
        >>> graph = Graph.from_edges([0, 0], [1, 2], num_nodes=5)
        >>> sorted(set(LocalNegatives(5, graph=graph).sample([0], 10).ravel().tolist()))
        [3, 4]
    """

    def __init__(self, num_nodes: int, seed: int = 0, graph: Graph | None = None) -> None:
        self.num_nodes, self.seed = check_number(num_nodes, "num_nodes"), check_seed(seed)
        if graph is not None and graph.num_nodes != self.num_nodes:
            raise ValueError(f"`graph` must have num_nodes={num_nodes} nodes. Received: {graph.num_nodes} nodes.")
        self.graph = graph
        self.set_epoch(0)

    def set_epoch(self, epoch: int, step: int = 0) -> None:
        """The next call to `sample` is call number `step` of this epoch: to begin one, or to resume inside."""
        self.epoch, self.step = epoch, step

    def sample(self, positives_src: npt.ArrayLike, num_negatives: int) -> Ints:
        """Targets (b, num_negatives) for the sources (b,) of positive edges."""
        src = numbers_below(positives_src, self.num_nodes, "positives_src")
        rng = np.random.default_rng([self.seed % 2**64, self.epoch, self.step])
        self.step += 1
        drawn = rng.integers(self.num_nodes, size=(len(src), check_number(num_negatives, "num_negatives")))
        if self.graph is None:
            return drawn
        sources, flat = np.repeat(src, num_negatives), drawn.reshape(-1)
        wrong = np.arange(len(flat))
        for _ in range(_MAX_DRAWS):
            wrong = wrong[(flat[wrong] == sources[wrong]) | self.graph.has_edges(sources[wrong], flat[wrong])]
            if not len(wrong):
                break
            flat[wrong] = rng.integers(self.num_nodes, size=len(wrong))
        return flat.reshape(drawn.shape)


class GlobalNegatives(LocalNegatives):
    """Uniform draws from all nodes of the whole graph, whichever rank they are on.

    Choose it for evaluation, where all models must be asked the same questions, and for training where every rank can
    look up the features of any node, say in a mapped file. Sources and negatives are numbers of the whole graph.

    Args:
        num_nodes_total: N of the whole graph.
        seed: see `LocalNegatives`. Equal on all ranks: equal negatives.
        graph: the whole graph, mapped perhaps, whose edges are avoided.
    """

    def __init__(self, num_nodes_total: int, seed: int = 0, graph: Graph | None = None) -> None:
        super().__init__(num_nodes_total, seed, graph)
