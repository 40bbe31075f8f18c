"""Which part of a graph each rank of the GNN examples trains on. Rank 0 writes all parts into a folder, once."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
from datasets import DataError
from graph_data import GraphData

from hvd_sparse import graph
from hvd_sparse.graph import Graph, Part

CACHE = Path(__file__).resolve().parents[1] / "out" / "graphs"
PARTITIONS = ("random", "super", "min-cut", "whole")

_NODES_PER_CLUSTER = 100
_MIN_CLUSTERS = 8  # per part


def part_of_node(whole: Graph, partition: str, num_parts: int, seed: int, cache: Path = CACHE) -> Any:
    """The part (N,) of every node.

    Args:
        partition: "random" nodes, "super": random clusters of some hundred nodes, "min-cut": as few edges between parts
            as METIS finds, or "whole": no parts at all.
        cache: where METIS's results are kept.
    """
    if partition == "whole":
        return np.zeros(whole.num_nodes, np.int32)
    if partition == "random":
        return graph.random_parts(whole.num_nodes, num_parts, seed)
    if partition == "min-cut":
        return graph.min_cut_parts(whole, num_parts, seed, cache)
    num_clusters = max(whole.num_nodes // _NODES_PER_CLUSTER, _MIN_CLUSTERS * num_parts)
    clusters = graph.clusters(whole, min(num_clusters, whole.num_nodes), seed=0, cache=cache)
    return graph.super_parts(clusters, num_parts, seed)


def write(
    data: GraphData, whole: Graph, partition: str, num_parts: int, seed: int, cache: Path = CACHE
) -> dict[str, Any]:
    """Write all parts unless they are there: for one rank. What it returns is for all ranks.

    Args:
        data: features, labels and splits of the nodes.
        whole: the edges to train on.

    Raises:
        DataError: these nodes cannot be partitioned so.
    """
    if partition == "whole":
        num_parts, seed = 1, 0
    arrays = {"x": data.x, "y": data.y, "split": data.split}
    key = 0
    for array in (whole.indptr, whole.indices, *arrays.values()):
        key = zlib.crc32(np.ascontiguousarray(array).data, key)
    folder = cache / f"{partition}-{num_parts}-{seed}-{key:08x}"
    try:
        parts = part_of_node(whole, partition, num_parts, seed, cache)
        if not folder.exists():
            graph.write_parts(whole, parts, folder, arrays, num_parts)
    except (ValueError, OSError) as error:
        raise DataError(f"The graph cannot be cut into {num_parts} parts in {folder}: {error}") from error
    return {
        "folder": str(folder),
        "num_parts": num_parts,
        "num_classes": len(data.classes),
        "kept_edges": graph.kept_edges(whole, parts),
    }


def open_own(facts: dict[str, Any], rank: int, drop_part: int | None = None) -> Part:
    """The part of this rank, mapped into memory: no rank reads another's files.

    Args:
        facts: what `write` has returned.
        drop_part: the number of a part that the last rank gets, which then does not train.

    Raises:
        DataError: it is not there, as on another host that shares no folder with rank 0's.
    """
    num_parts = facts["num_parts"]
    number = rank % num_parts if drop_part is None else (rank + drop_part + 1) % num_parts
    try:
        return graph.open_part(facts["folder"], number, num_parts)
    except (OSError, ValueError) as error:
        raise DataError(f"{error} Give a folder that all ranks share with --cache.") from error
