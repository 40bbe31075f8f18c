"""A graph as two arrays. Letters: N nodes, m edges, k rows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_sparse.graph.checks import Ints, check_number, numbers_below, whole_numbers
from hvd_sparse.graph.storage import new_folder, open_array, write_array

_MAX_NODES = 2**31 - 1  # node numbers are int32: half the memory, and what PyTorch Geometric can index anyway


@dataclass(frozen=True, eq=False)
class Graph:
    """Compressed sparse rows: row v lists, in ascending order, the sources of the edges into v, each one once.

    So a row holds the nodes that v receives messages from in a graph neural network. The constructor takes the two
    arrays as they are and looks only at their shapes, so that mapped files stay unread; the class methods check.
    For a DGL graph: `Graph.from_edges(*(ends.numpy() for ends in g.edges()), g.num_nodes())`.

    Attributes:
        indptr: (N + 1,) int64, row v is indices[indptr[v] : indptr[v + 1]].
        indices: (m,) int32.

    Example:
        >>> graph = Graph.from_edges([0, 1, 1], [1, 2, 0], num_nodes=3)
        >>> graph.indptr.tolist(), graph.indices.tolist()
        ([0, 1, 2, 3], [1, 0, 1])
    """

    indptr: Ints
    indices: npt.NDArray[np.int32]

    def __post_init__(self) -> None:
        ends = (self.indptr[0], self.indptr[-1]) if self.indptr.ndim == 1 and len(self.indptr) else None
        if ends != (0, len(self.indices)) or self.indptr.dtype != np.int64 or self.indices.dtype != np.int32:
            raise ValueError(
                f"`indptr` must be int64 and run from 0 to the number of `indices`, which must be int32. Received: "
                f"indptr={self.indptr.dtype}{self.indptr.shape} with first and last element {ends}, "
                f"indices={self.indices.dtype}{self.indices.shape}."
            )

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        return len(self.indices)

    @classmethod
    def from_edges(cls, src: npt.ArrayLike, dst: npt.ArrayLike, num_nodes: int, undirected: bool = False) -> Graph:
        """From the sources and targets (m,) of edges, in any order. Repeated edges are stored once.

        Args:
            undirected: store every edge in both directions.

        Raises:
            TypeError, ValueError: no 1-D arrays of whole numbers in [0, num_nodes), or not equally many.
        """
        num_nodes = check_number(num_nodes, "num_nodes")
        if num_nodes > _MAX_NODES:
            raise ValueError(f"`num_nodes` must be below 2**31. Received: num_nodes={num_nodes}.")
        sources, targets = numbers_below(src, num_nodes, "src"), numbers_below(dst, num_nodes, "dst")
        if len(sources) != len(targets):
            raise ValueError(f"`src` and `dst` must be equally long. Received: {len(sources)} and {len(targets)}.")
        keys = targets * num_nodes + sources
        if undirected:
            keys = np.concatenate([keys, sources * num_nodes + targets])
        keys.sort()
        if len(keys):
            keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])]
        indptr = np.searchsorted(keys, np.arange(num_nodes + 1) * num_nodes).astype(np.int64)
        return cls(indptr, (keys % num_nodes).astype(np.int32))

    @classmethod
    def from_csr(cls, indptr: npt.ArrayLike, indices: npt.ArrayLike) -> Graph:
        """From compressed sparse rows whose row v lists the sources of the edges into v, in any order."""
        starts = whole_numbers(indptr, "indptr")
        rows = np.diff(starts)
        if len(starts) < 2 or starts[0] != 0 or rows.min() < 0:
            raise ValueError(f"`indptr` must begin with 0 and never fall. Received: indptr={starts!r}.")
        return cls.from_edges(indices, np.repeat(np.arange(len(rows)), rows), len(rows))

    @classmethod
    def from_scipy(cls, matrix: Any) -> Graph:
        """From a square scipy.sparse matrix in any format: a non-zero element (i, j) is an edge from i to j."""
        if len(matrix.shape) != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"`matrix` must be square. Received: a matrix of shape {matrix.shape}.")
        src, dst = matrix.nonzero()
        return cls.from_edges(src, dst, matrix.shape[0])

    @classmethod
    def from_pyg(cls, data: Any) -> Graph:
        """From the edge_index of a torch_geometric.data.Data. Edge attributes are left out."""
        edges = getattr(data, "edge_index", None)
        if edges is None:
            raise ValueError(f"`data` must be a torch_geometric.data.Data with an edge_index. Received: {data!r}.")
        src, dst = edges.cpu().numpy()
        return cls.from_edges(src, dst, data.num_nodes)

    def to_edges(self) -> tuple[Ints, Ints]:
        """Sources and targets (m,) of the edges, ordered by target; np.stack(graph.to_edges()) is PyG's edge_index."""
        return self.indices.astype(np.int64), np.repeat(np.arange(self.num_nodes), np.diff(self.indptr))

    def has_edges(self, src: npt.ArrayLike, dst: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Whether there is an edge from src[i] to dst[i], by bisection of all rows at once. Shapes broadcast."""
        sources, targets = np.broadcast_arrays(src, dst)
        if not self.num_edges:
            return np.zeros(sources.shape, np.bool_)
        low, high = self.indptr[targets], self.indptr[targets + 1]
        ends, last = high, self.num_edges - 1
        while np.any(low < high):
            middle = (low + high) // 2
            right = (low < high) & (self.indices[np.minimum(middle, last)] < sources)
            low, high = np.where(right, middle + 1, low), np.where(right, high, middle)
        return (low < ends) & (self.indices[np.minimum(low, last)] == sources)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write indptr.npy and indices.npy into `folder`, which must be new or empty."""
        with new_folder(folder) as temporary:
            self.write(temporary)

    def write(self, folder: Path) -> None:
        """`save` without its safeguards, beside what else is in the folder."""
        write_array(folder, "indptr", self.indptr)
        write_array(folder, "indices", self.indices)

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Graph:
        """The graph that `save` wrote, mapped into memory and not read."""
        return cls(open_array(folder, "indptr"), open_array(folder, "indices"))


def ranges(starts: Ints, counts: Ints) -> Ints:
    """The whole numbers starts[0], starts[0] + 1, ... (counts[0] of them), starts[1], ... as one array."""
    shifts = starts - (np.cumsum(counts) - counts)
    return np.arange(counts.sum()) + np.repeat(shifts, counts)
