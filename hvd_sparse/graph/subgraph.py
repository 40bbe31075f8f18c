"""The part of a graph that one rank trains on. Letters: N nodes of the whole graph, M parts, k nodes of a part."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_sparse.graph.checks import Ints, numbers_below
from hvd_sparse.graph.csr import Graph, ranges
from hvd_sparse.graph.partition import part_sizes
from hvd_sparse.graph.storage import new_folder, open_array, write_array

_RESERVED = ("nodes", "indptr", "indices")


@dataclass(frozen=True, eq=False)
class Part:
    """Some nodes with the edges among them.

    Attributes:
        nodes: (k,) int64, their numbers in the whole graph, ascending.
        graph: on the numbers 0 to k - 1: local node i is nodes[i].
        num_cut_edges: edges into these nodes from others, which are dropped. Summed over parts: all cut edges.
        arrays: by name, (k, ...): the rows of these nodes, where `write_parts` was given any.
    """

    nodes: Ints
    graph: Graph
    num_cut_edges: int
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)


def induced(graph: Graph, nodes: npt.ArrayLike) -> Part:
    """The subgraph of some nodes and all edges among them; every edge to another node is dropped.

    Of a mapped graph only the rows of these nodes are read, in the order of the file. Takes 4 bytes of memory per node
    of the whole graph and about 30 per edge into these nodes.

    Args:
        nodes: (k,) distinct node numbers in any order, or a boolean mask (N,), such as `parts == hvd.rank()`.

    Raises:
        TypeError, ValueError: `nodes` are not such, or none.

    Example:
        >>> graph = Graph.from_edges([0, 1, 2, 3], [1, 2, 3, 0], num_nodes=4)
        >>> part = induced(graph, [3, 2, 0])
        >>> part.nodes.tolist(), [ends.tolist() for ends in part.graph.to_edges()], part.num_cut_edges
        ([0, 2, 3], [[2, 1], [0, 2]], 1)
    """
    return _induced(graph, _ascending(nodes, graph.num_nodes), np.full(graph.num_nodes, -1, np.int32))


def write_parts(
    graph: Graph,
    part_of_node: npt.ArrayLike,
    folder: str | os.PathLike[str],
    arrays: Mapping[str, npt.NDArray[Any]] | None = None,
    num_parts: int | None = None,
) -> None:
    """Write every part to a folder of its own, `folder`/part_0 and so on, for `open_part`.

    One rank does this once; on several hosts, copy to each the folders of its ranks. All files appear together or,
    after an error, none.

    Args:
        part_of_node: (N,) from `random_parts` and the like.
        folder: new or empty. Another number of parts needs another folder.
        arrays: by name, (N, ...): features, labels and the like; each part gets the rows of its nodes.
        num_parts: M. None: the highest part and those below.

    Raises:
        TypeError, ValueError: a part without nodes, an array with another number of rows or a name that is taken, or
            a folder with files in it.
    """
    parts = np.asarray(part_of_node)
    arrays = {name: np.asarray(values) for name, values in (arrays or {}).items()}
    if parts.shape != (graph.num_nodes,):
        raise ValueError(f"`part_of_node` must have {graph.num_nodes} elements. Received: shape {parts.shape}.")
    for name, values in arrays.items():
        if not name.isidentifier() or name in _RESERVED or values.shape[:1] != (graph.num_nodes,):
            raise ValueError(
                f"`arrays` must have {graph.num_nodes} rows each and names of letters other than "
                f"{', '.join(_RESERVED)}. Received: {name!r} of shape {values.shape}."
            )
    sizes = part_sizes(parts, int(parts.max()) + 1 if num_parts is None else num_parts)
    order, ends = np.argsort(parts, kind="stable"), np.cumsum(sizes)
    local = np.full(graph.num_nodes, -1, np.int32)
    with new_folder(folder) as temporary:
        for number, nodes in enumerate(np.split(order, ends[:-1])):
            part, target = _induced(graph, nodes, local), temporary / f"part_{number}"
            target.mkdir()
            part.graph.write(target)
            write_array(target, "nodes", part.nodes)
            for name, values in arrays.items():
                write_array(target, name, values[nodes])
            described = {"num_parts": len(sizes), "num_cut_edges": part.num_cut_edges, "arrays": list(arrays)}
            (target / "part.json").write_text(json.dumps(described) + "\n", encoding="utf-8")


def open_part(folder: str | os.PathLike[str], part: int, num_parts: int | None = None) -> Part:
    """Part number `part` of those that `write_parts` wrote, mapped into memory: its own files, and no page of them yet.

    Args:
        num_parts: how many there must be, such as hvd.size(), lest some are left out unnoticed. None: any number.

    Raises:
        FileNotFoundError, ValueError: there is no such part, another number of parts, or a file is damaged.
    """
    source = Path(folder) / f"part_{part}"
    if not (source / "part.json").is_file():
        raise FileNotFoundError(
            f"`folder` must have been made by write_parts, and `part` be one of its parts. Received: no {source}."
        )
    described = json.loads((source / "part.json").read_text(encoding="utf-8"))
    if num_parts not in (None, described["num_parts"]):
        raise ValueError(
            f"`num_parts` must be {described['num_parts']}, the parts in {folder}; write_parts makes others in another "
            f"folder. Received: num_parts={num_parts!r}."
        )
    arrays = {name: open_array(source, name) for name in described["arrays"]}
    graph = Graph(open_array(source, "indptr"), open_array(source, "indices"))
    return Part(open_array(source, "nodes"), graph, described["num_cut_edges"], arrays)


def _ascending(nodes: npt.ArrayLike, num_nodes: int) -> Ints:
    chosen = np.asarray(nodes)
    if chosen.dtype == np.bool_:
        if chosen.shape != (num_nodes,):
            raise ValueError(f"`nodes` as a mask must have {num_nodes} elements. Received: shape {chosen.shape}.")
        chosen = np.flatnonzero(chosen)
    ascending = np.sort(numbers_below(chosen, num_nodes, "nodes"))
    if not len(ascending):
        raise ValueError(
            "`nodes` must be at least one: this part of the graph is empty, and a rank cannot train without nodes. "
            "Take fewer parts (ranks) or another seed; part_sizes tells which parts are empty. Received: no nodes."
        )
    if (ascending[1:] == ascending[:-1]).any():
        raise ValueError("`nodes` must be distinct. Received: a node twice.")
    return ascending


def _induced(graph: Graph, nodes: Ints, local: npt.NDArray[np.int32]) -> Part:
    """`local` (N,): all -1, before and after."""
    starts = graph.indptr[nodes]
    counts = graph.indptr[nodes + 1] - starts
    local[nodes] = np.arange(len(nodes))
    sources = local[graph.indices[ranges(starts, counts)]]
    local[nodes] = -1
    inside = sources >= 0
    num_inside = np.concatenate([[0], np.cumsum(inside)])
    indptr = num_inside[np.concatenate([[0], np.cumsum(counts)])]
    return Part(nodes, Graph(indptr, sources[inside]), len(inside) - int(num_inside[-1]))
