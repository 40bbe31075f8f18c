"""Clusters and minimum-cut parts from METIS, through pymetis, kept on disk. Letters: N nodes, m edges."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import zipfile
import zlib
from pathlib import Path

import numpy as np

from hvd_sparse.graph.checks import check_number, check_seed
from hvd_sparse.graph.csr import Graph
from hvd_sparse.graph.partition import Parts, part_sizes

_logger = logging.getLogger("hvd_sparse")


def clusters(graph: Graph, num_clusters: int, seed: int = 0, cache: str | os.PathLike[str] | None = None) -> Parts:
    """The cluster (N,) of every node: about equally large, with few edges between them. For `super_parts`.

    METIS takes a second or two for a million edges, and may answer differently on another kind of machine: all ranks
    need one answer, so let them share `cache`, or let one rank compute and the others receive. Some clusters of a
    graph with few edges may be empty.

    Args:
        graph: direction is ignored, and so are edges from a node to itself.
        num_clusters: at most N; for super_parts many more than there are ranks, such as N / 100.
        seed: any int.
        cache: a folder where results are kept under a name that is computed from all arguments.

    Raises:
        ImportError: pymetis is not installed. TypeError, ValueError: an argument is no such number.

    Reference: G. Karypis, V. Kumar, A Fast and High Quality Multilevel Scheme for Partitioning Irregular Graphs,
    SIAM Journal on Scientific Computing, 1998.
    """
    num_clusters, seed = check_number(num_clusters, "num_clusters"), check_seed(seed)
    if num_clusters > graph.num_nodes:
        raise ValueError(
            f"`num_clusters` must be at most the number of nodes, {graph.num_nodes}. "
            f"Received: num_clusters={num_clusters}."
        )
    path = None if cache is None else Path(cache) / f"metis-{_key(graph, num_clusters, seed)}.npz"
    found = None if path is None else _read(path, graph.num_nodes, num_clusters)
    if found is None:
        found = _metis(graph, num_clusters, seed)
        if path is not None:
            _write(path, found)
    return found


def min_cut_parts(graph: Graph, num_parts: int, seed: int = 0, cache: str | os.PathLike[str] | None = None) -> Parts:
    """The part (N,) of every node, with as few edges between parts as METIS finds. Arguments as for `clusters`.

    Most edges stay, but parts differ: each has its own kinds of nodes. The baseline that random parts are measured by.

    Raises:
        ValueError: a part gets no nodes, as may happen in graphs with few edges. Otherwise as for `clusters`.
    """
    parts = clusters(graph, num_parts, seed, cache)
    part_sizes(parts, num_parts)
    return parts


def _metis(graph: Graph, num_clusters: int, seed: int) -> Parts:
    try:
        import pymetis
    except ImportError as error:
        raise ImportError("Clusters and minimum cuts need pymetis: pip install 'hvd-sparse[gnn]'") from error
    src, dst = graph.to_edges()
    other = src != dst
    both = Graph.from_edges(src[other], dst[other], graph.num_nodes, undirected=True)
    # Arrays of METIS's own width are not copied.
    width = pymetis.zero_copy_dtype()
    adjacency = pymetis.CSRAdjacency(both.indptr.astype(width), both.indices.astype(width))
    answer = pymetis.part_graph(num_clusters, adjacency=adjacency, options=pymetis.Options(seed=seed % 2**31))
    return np.asarray(answer.vertex_part, np.int32)


def _key(graph: Graph, num_clusters: int, seed: int) -> str:
    digest = hashlib.sha256(f"{graph.num_nodes} {num_clusters} {seed}".encode())
    digest.update(np.ascontiguousarray(graph.indptr).data)
    digest.update(np.ascontiguousarray(graph.indices).data)
    return digest.hexdigest()[:32]


def _read(path: Path, num_nodes: int, num_clusters: int) -> Parts | None:
    """What the file says, None if there is none or it is damaged; the zip format has a checksum."""
    try:
        with np.load(path, allow_pickle=False) as file:
            found = file["cluster_of_node"]
    except FileNotFoundError:
        return None
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        _logger.warning("%s is damaged (%s) and is computed again.", path, error)
        return None
    if found.shape != (num_nodes,) or found.dtype != np.int32 or found.min() < 0 or found.max() >= num_clusters:
        _logger.warning("%s does not hold clusters of this graph and is computed again.", path)
        return None
    return found


def _write(path: Path, cluster_of_node: Parts) -> None:
    """Ranks may do this at the same time, and read what others have written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.stem}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            np.savez_compressed(file, cluster_of_node=cluster_of_node)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
