"""Link prediction on a graph that is cut into parts: one GraphSAGE model per rank, averaged now and then.

    horovodrun -np 4 python examples/pytorch_gnn_link_prediction.py --mode super --minutes 2
    horovodrun -np 4 python examples/pytorch_gnn_link_prediction.py --mode sync --minutes 2      # to compare
    python examples/pytorch_gnn_link_prediction.py --mode single --minutes 2                     # the whole graph
    horovodrun -np 4 python examples/pytorch_gnn_link_prediction.py --drop-part 1                # a part is missing
    horovodrun -np 2 python examples/pytorch_gnn_link_prediction.py --synthetic --steps 100      # needs no data

The graph is Debian's packages and what they depend on: `sudo apt-get update`, or a saved `apt-cache dumpavail` with
--data. A tenth of the edges is held out. The metric is the mean reciprocal rank (MRR) of a held-out edge among 100
negatives, ties counted against it, of the averaged model on the whole graph. Rank 0 measures it after the training, of
models that were kept meanwhile: the seconds of a curve are seconds of training. On several hosts, --cache must be a
folder that they share: rank 0 writes all parts there, and each rank reads its own.

Needs PyTorch Geometric and pymetis: pip install 'hvd-sparse[gnn]'
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import graph_data
import graph_results
import graph_training as training
import numpy as np
import torch
import torch.nn.functional as F
from datasets import DataError
from torch import nn
from torch_geometric.nn import SAGEConv

import hvd_sparse.torch as hvd  # was: import horovod.torch as hvd
from hvd_sparse import graph

HELD_OUT = 0.1  # of the edges
NUM_NEGATIVES = 100  # per edge, in the metric
NUM_TESTS = 4000  # held-out edges that are looked at
FANOUTS = (10, 5)


class Encoder(nn.Module):
    """Two layers of GraphSAGE: a vector for every node."""

    def __init__(self, num_features: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(num_features, hidden), SAGEConv(hidden, hidden)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Vectors (n, hidden) of n nodes. `edges`: (2, e), or a sparse matrix with a row for every target."""
        return self.second(self.first(x, edges).relu(), edges)


def link_batches(part: graph.Part, batch_size: int, seed: int, device: torch.device) -> Iterator[Any]:
    """Without end: sampled neighbourhoods, and where in them sources, targets and negatives (3, batch_size) are."""
    sampler = graph.NeighborSampler(part.graph, FANOUTS, seed)
    negatives = graph.LocalNegatives(part.graph.num_nodes, seed, part.graph)
    src, dst = part.graph.to_edges()
    for epoch in itertools.count():
        negatives.set_epoch(epoch)
        order = np.random.default_rng([seed, epoch]).permutation(len(src))
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            ends = np.stack([src[chosen], dst[chosen], negatives.sample(src[chosen], 1)[:, 0]])
            seeds, places = np.unique(ends, return_inverse=True)
            batch = _without(sampler.sample(seeds), ends[0], ends[1])
            data = graph.to_pyg(batch, x=part.arrays["x"]).to(device)
            yield data, torch.from_numpy(places.reshape(ends.shape)).to(device)


def _without(batch: graph.Batch, src: Any, dst: Any) -> graph.Batch:
    """The batch, with no message along an edge whose existence is the question, in either direction."""
    ends = batch.nodes[batch.edge_src], batch.nodes[batch.edge_dst]
    width = int(batch.nodes.max()) + 1
    asked = np.minimum(src, dst) * width + np.maximum(src, dst)
    kept = ~np.isin(np.minimum(*ends) * width + np.maximum(*ends), asked)
    return dataclasses.replace(batch, edge_src=batch.edge_src[kept], edge_dst=batch.edge_dst[kept])


def link_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Edges shall score high, negatives low. The score is the product of both ends' vectors."""
    data, (src, dst, negative) = batch
    vectors = model(data.x, data.edge_index)
    positives, negatives = ((vectors[src] * vectors[other]).sum(1) for other in (dst, negative))
    return F.softplus(-positives).mean() + F.softplus(negatives).mean()


class Mrr:
    """The metric, on the whole graph: edges and negatives are the same for every model, seed and mode."""

    def __init__(self, data: graph_data.GraphData, split: graph.EdgeSplit, device: torch.device) -> None:
        chosen = np.random.default_rng(0).permutation(len(split.src))[:NUM_TESTS]
        src, dst = split.src[chosen], split.dst[chosen]
        sampler = graph.GlobalNegatives(data.graph.num_nodes, seed=0, graph=data.graph)
        targets = np.concatenate([dst[:, None], sampler.sample(src, NUM_NEGATIVES)], 1)
        self.src, self.targets = torch.from_numpy(src).to(device), torch.from_numpy(targets).to(device)
        self.x = torch.from_numpy(data.x).to(device)
        self.edges = training.sparse_matrix(split.train).to(device)

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> float:
        vectors = model(self.x, self.edges)
        # One operation for edges and negatives: nodes with equal vectors must get equal scores, to the last bit.
        parts = zip(self.src.split(500), self.targets.split(500))
        scores = torch.cat([(vectors[src][:, None] * vectors[targets]).sum(2) for src, targets in parts]).cpu()
        return graph.mrr(scores[:, 0], scores[:, 1:])


def main() -> None:
    parser = training.make_parser(__doc__, lr=0.003, batch_size=64)
    args = training.parse(parser)
    device = training.start(args)
    split: Any = None

    def make() -> tuple[graph_data.GraphData, graph.Graph]:
        nonlocal split
        data = graph_data.synthetic() if args.synthetic else graph_data.debian_packages(args.data)
        split = graph.split_edges(data.graph, HELD_OUT)
        return data, split.train

    try:
        part, facts, data = training.open_part(args, make)
    except DataError as error:
        sys.exit(f"error: {error}")
    model = Encoder(part.arrays["x"].shape[1], args.hidden).to(device)
    optimizer = training.wrap(args, model)
    batches = link_batches(part, args.batch_size, args.seed * hvd.size() + hvd.rank(), device)
    done = training.train(args, model, optimizer, batches, link_loss)
    graph_results.report(args, facts, model, done, "MRR", Mrr(data, split, device) if hvd.rank() == 0 else None)


if __name__ == "__main__":
    main()
