"""Graphs that are trained in parts, with `PeriodicAveraging`: partitions, subgraphs, samplers. NumPy only.

parts = graph.random_parts(whole.num_nodes, hvd.size())             # or super_parts, min_cut_parts
graph.write_parts(whole, parts, "parts", {"x": x, "y": y})          # once, on one rank
part = graph.open_part("parts", hvd.rank(), hvd.size())             # mapped: no rank reads another's files
for batch in graph.NeighborSampler(part.graph, [10, 10]).batches(nodes, 1024, epoch):
    data = graph.to_pyg(batch, **part.arrays)
"""

from hvd_sparse.graph.csr import Graph
from hvd_sparse.graph.metis import clusters, min_cut_parts
from hvd_sparse.graph.metrics import EdgeSplit, kept_edges, mrr, split_edges
from hvd_sparse.graph.negatives import GlobalNegatives, LocalNegatives, NegativeSampler
from hvd_sparse.graph.partition import part_sizes, random_part_of, random_parts, super_parts
from hvd_sparse.graph.pyg import to_pyg
from hvd_sparse.graph.sampler import Batch, NeighborSampler
from hvd_sparse.graph.subgraph import Part, induced, open_part, write_parts

__all__ = [
    "Batch",
    "EdgeSplit",
    "GlobalNegatives",
    "Graph",
    "LocalNegatives",
    "NegativeSampler",
    "NeighborSampler",
    "Part",
    "clusters",
    "induced",
    "kept_edges",
    "min_cut_parts",
    "mrr",
    "open_part",
    "part_sizes",
    "random_part_of",
    "random_parts",
    "split_edges",
    "super_parts",
    "to_pyg",
    "write_parts",
]
