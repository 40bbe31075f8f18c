"""Node classification on a graph that is cut into parts: one GraphSAGE model per rank, averaged now and then.

    horovodrun -np 4 python examples/pytorch_gnn_node_classification.py --mode super --minutes 1
    horovodrun -np 4 python examples/pytorch_gnn_node_classification.py --mode sync --minutes 1   # to compare
    python examples/pytorch_gnn_node_classification.py --mode single --minutes 1                  # the whole graph
    horovodrun -np 2 python examples/pytorch_gnn_node_classification.py --synthetic --steps 100   # needs no data

The graph is WordNet: sets of synonyms with their relations, and 45 classes such as noun.animal. It comes with
`sudo apt-get install wordnet-base`; --data names another folder. Six tenths of the nodes are trained on. The metric is
the accuracy on the test nodes, of the averaged model on the whole graph. Rank 0 measures it after the training, of
models that were kept meanwhile: the seconds of a curve are seconds of training.

Needs PyTorch Geometric and pymetis: pip install 'hvd-sparse[gnn]'
"""

from __future__ import annotations

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

FANOUTS = (10, 5)
TRAIN, TEST = 0, 2  # of GraphData.split


class Classifier(nn.Module):
    """Two layers of GraphSAGE, and scores for all classes."""

    def __init__(self, num_features: int, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(num_features, hidden), SAGEConv(hidden, hidden)
        self.scores = nn.Linear(hidden, num_classes)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Scores (n, classes) of n nodes. `edges`: (2, e), or a sparse matrix with a row for every target."""
        return self.scores(self.second(self.first(x, edges).relu(), edges).relu())


def node_batches(part: graph.Part, batch_size: int, seed: int, device: torch.device) -> Iterator[Any]:
    """Without end: sampled neighbourhoods of training nodes with a known class.

    Raises:
        DataError: there are none.
    """
    nodes = np.flatnonzero((part.arrays["split"] == TRAIN) & (part.arrays["y"] >= 0))
    if not len(nodes):
        raise DataError(f"The part of rank {hvd.rank()} has no training nodes: start fewer ranks.")
    sampler = graph.NeighborSampler(part.graph, FANOUTS, seed)
    sampled = (batch for epoch in itertools.count() for batch in sampler.batches(nodes, batch_size, epoch))
    return (graph.to_pyg(batch, x=part.arrays["x"], y=part.arrays["y"]).to(device) for batch in sampled)


def node_loss(model: nn.Module, data: Any) -> torch.Tensor:
    """Cross-entropy at the nodes that the batch was sampled for, which come first."""
    return F.cross_entropy(model(data.x, data.edge_index)[: data.batch_size], data.y[: data.batch_size])


class Accuracy:
    """The metric, on the test nodes of the whole graph."""

    def __init__(self, data: graph_data.GraphData, device: torch.device) -> None:
        self.nodes = torch.from_numpy(np.flatnonzero((data.split == TEST) & (data.y >= 0))).to(device)
        self.x, self.y = (torch.from_numpy(values).to(device) for values in (data.x, data.y))
        self.edges = training.sparse_matrix(data.graph).to(device)

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> float:
        guesses = model(self.x, self.edges)[self.nodes].argmax(1)
        return float((guesses == self.y[self.nodes]).double().mean())


def main() -> None:
    parser = training.make_parser(__doc__, lr=0.003, batch_size=256)
    args = training.parse(parser)
    device = training.start(args)

    def make() -> tuple[graph_data.GraphData, graph.Graph]:
        data = graph_data.synthetic() if args.synthetic else graph_data.wordnet(args.data or graph_data.WORDNET)
        return data, data.graph

    try:
        part, facts, data = training.open_part(args, make)
        batches = node_batches(part, args.batch_size, args.seed * hvd.size() + hvd.rank(), device)
    except DataError as error:
        sys.exit(f"error: {error}")
    model = Classifier(part.arrays["x"].shape[1], args.hidden, facts["num_classes"]).to(device)
    optimizer = training.wrap(args, model)
    done = training.train(args, model, optimizer, batches, node_loss)
    graph_results.report(args, facts, model, done, "accuracy", Accuracy(data, device) if hvd.rank() == 0 else None)


if __name__ == "__main__":
    main()
