"""Sampled neighbourhoods, negatives and the measure of link prediction."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

from hvd_sparse.graph import Batch, GlobalNegatives, Graph, LocalNegatives, NeighborSampler, mrr, split_edges, to_pyg

NUM_NODES = 200
GRAPH = Graph.from_edges(*np.random.default_rng(2).integers(NUM_NODES, size=(2, 3000)), NUM_NODES)  # 15 neighbours each
DEGREES = np.diff(GRAPH.indptr)


def same(first: Batch, second: Batch) -> bool:
    names = ("nodes", "edge_src", "edge_dst")
    return all(np.array_equal(getattr(first, name), getattr(second, name)) for name in names)


def edges(batch: Batch) -> list[tuple[int, int]]:
    return list(zip(batch.nodes[batch.edge_src].tolist(), batch.nodes[batch.edge_dst].tolist()))


@given(
    st.lists(st.integers(1, 20), max_size=3), st.sets(st.integers(0, NUM_NODES - 1), max_size=20), st.integers(0, 99)
)
def test_batches_are_pieces_of_the_graph(fanouts, seeds, seed):
    batch = NeighborSampler(GRAPH, fanouts, seed).sample(list(seeds))
    found = edges(batch)
    assert batch.nodes[: batch.num_seeds].tolist() == list(seeds)
    assert len(set(batch.nodes.tolist())) == len(batch.nodes)
    assert len(set(found)) == len(found)
    assert GRAPH.has_edges(*np.array(found, int).reshape(-1, 2).T).all()
    # Hop by hop: who is expanded, and into how many.
    front, seen = set(seeds), set(seeds)
    for fanout in fanouts:
        into = {node: [a for a, b in found if b == node] for node in front}
        for node, sources in into.items():
            assert len(sources) <= min(fanout, DEGREES[node])
            assert len(sources) == DEGREES[node] or DEGREES[node] > fanout
            assert sources or not DEGREES[node]
        front = set().union(*into.values()) - seen
        seen |= front
    assert set(batch.nodes.tolist()) == seen


def test_all_neighbours():
    batch = NeighborSampler(GRAPH, [-1]).sample([5, 3])
    assert edges(batch) == [
        (int(src), node) for node in (5, 3) for src in GRAPH.indices[GRAPH.indptr[node] : GRAPH.indptr[node + 1]]
    ]
    assert same(batch, NeighborSampler(GRAPH, [1000]).sample([5, 3]))


def test_neighbours_are_drawn_equally_often():
    node = int(DEGREES.argmax())
    sampler, counts = NeighborSampler(GRAPH, [1]), np.zeros(NUM_NODES)
    for _ in range(4000):
        counts[sampler.sample([node]).nodes[1:]] += 1
    chosen = counts[counts > 0]
    assert len(chosen) == DEGREES[node] - GRAPH.has_edges(node, node)
    assert np.abs(chosen - 4000 / DEGREES[node]).max() < 5 * (4000 / DEGREES[node]) ** 0.5


def test_an_isolated_node():
    batch = NeighborSampler(Graph.from_edges([0], [1], 3), [4, 4]).sample([2])
    assert (batch.nodes.tolist(), batch.edge_src.tolist(), batch.num_seeds) == ([2], [], 1)


def test_samples_depend_on_seed_and_count():
    first, second, other = (NeighborSampler(GRAPH, [5, 5], seed) for seed in (7, 7, 8))
    one, two = first.sample([1, 2]), first.sample([1, 2])
    assert not same(one, two)
    assert same(one, second.sample([1, 2]))
    assert same(two, second.sample([1, 2]))
    assert not same(one, other.sample([1, 2]))


def test_batches_depend_on_seed_and_epoch():
    sampler, nodes = NeighborSampler(GRAPH, [5], 7), np.arange(0, NUM_NODES, 2)
    sampler.sample([1])
    first = list(sampler.batches(nodes, 30, 4))
    again = list(NeighborSampler(GRAPH, [5], 7).batches(nodes, 30, 4))
    assert all(map(same, first, again))
    assert [batch.num_seeds for batch in first] == [30, 30, 30, 10]
    seeds = np.concatenate([batch.nodes[: batch.num_seeds] for batch in first])
    assert seeds.tolist() != nodes.tolist()
    assert sorted(seeds.tolist()) == nodes.tolist()
    assert not same(first[0], next(sampler.batches(nodes, 30, 5)))
    in_order = list(sampler.batches(nodes, 30, 4, shuffle=False))
    assert np.concatenate([batch.nodes[: batch.num_seeds] for batch in in_order]).tolist() == nodes.tolist()


def test_mapped_graphs(tmp_path):
    GRAPH.save(tmp_path / "graph")
    mapped = NeighborSampler(Graph.open(tmp_path / "graph"), [5, 5]).sample([4, 9])
    assert same(mapped, NeighborSampler(GRAPH, [5, 5]).sample([4, 9]))


@pytest.mark.parametrize("kind", ["numpy", "mapped", "torch"])
def test_pyg_data(kind, tmp_path):
    x, y = np.arange(NUM_NODES * 3, dtype=np.float32).reshape(-1, 3), np.arange(NUM_NODES)
    if kind == "torch":
        x, y = torch.from_numpy(x), torch.from_numpy(y)
    elif kind == "mapped":
        np.save(tmp_path / "x.npy", x)
        x = np.load(tmp_path / "x.npy", mmap_mode="r")
    batch = NeighborSampler(GRAPH, [4, 4]).sample([9, 1])
    data = to_pyg(batch, x=x, y=y)
    assert isinstance(data, Data)
    assert data.validate()
    assert data.y.tolist() == data.n_id.tolist() == batch.nodes.tolist()
    assert data.x[:, 0].tolist() == (3 * batch.nodes).tolist()
    assert (data.batch_size, data.num_nodes) == (2, len(batch.nodes))
    assert data.edge_index.tolist() == [batch.edge_src.tolist(), batch.edge_dst.tolist()]


def test_messages_flow_to_the_seeds():
    """One layer on a batch with all neighbours is one layer on the whole graph."""
    torch.manual_seed(0)
    layer, x = SAGEConv(3, 2), torch.randn(NUM_NODES, 3)
    whole = layer(x, torch.from_numpy(np.stack(GRAPH.to_edges())))
    data = to_pyg(NeighborSampler(GRAPH, [-1]).sample([9, 1, 100]), x=x)
    torch.testing.assert_close(layer(data.x, data.edge_index)[:3], whole[[9, 1, 100]])


# Negatives.


@given(st.lists(st.integers(0, NUM_NODES - 1), max_size=20), st.integers(1, 30))
def test_negatives_are_no_edges(sources, num_negatives):
    drawn = LocalNegatives(NUM_NODES, graph=GRAPH).sample(sources, num_negatives)
    assert drawn.shape == (len(sources), num_negatives)
    assert ((drawn >= 0) & (drawn < NUM_NODES)).all()
    column = np.array(sources, int)[:, None]
    assert not GRAPH.has_edges(column, drawn).any()
    assert not (column == drawn).any()


def test_negatives_are_spread_evenly():
    counts = np.bincount(LocalNegatives(50).sample(range(50), 1000).ravel(), minlength=50)
    assert np.abs(counts - 1000).max() < 150


def test_a_node_with_an_edge_to_every_other_still_gets_negatives():
    full = Graph.from_edges(np.repeat(range(4), 4), np.tile(range(4), 4), 4)
    assert LocalNegatives(4, graph=full).sample([0], 5).shape == (1, 5)


@pytest.mark.parametrize("kind", [LocalNegatives, GlobalNegatives])
def test_negatives_depend_on_seed_epoch_and_step(kind):
    def draw(sampler) -> list:
        return sampler.sample([1, 2], 10).tolist()

    first, second = kind(NUM_NODES, 3, GRAPH), kind(NUM_NODES, 3, GRAPH)
    drawn = [draw(first) for _ in range(3)]
    assert [draw(second) for _ in range(3)] == drawn
    assert drawn[0] != drawn[1]
    second.set_epoch(0, step=2)
    assert draw(second) == drawn[2]
    second.set_epoch(1)
    assert draw(second) not in drawn
    assert draw(kind(NUM_NODES, 4, GRAPH)) not in drawn


# Link prediction.


def test_mrr_check_value():
    ranks_2_1_3 = [[2.0, 0.0], [1.0, 3.0], [1.5, 1.0]]
    assert round(mrr([2.0, 5.0, 1.0], ranks_2_1_3), 6) == 0.611111


def test_mrr_of_nothing_learnt():
    assert mrr(np.zeros(5), np.zeros((5, 9))) == 0.1
    assert mrr([np.nan], [[0.0, 1.0, 2.0]]) == 0.25
    assert mrr([1.0], [[np.nan, 0.0, 2.0]]) == 1 / 3
    assert mrr([1.0], np.zeros((1, 0))) == 1


@given(st.floats(0.05, 0.95), st.integers(0, 1000))
def test_held_out_edges(fraction, seed):
    graph = Graph.from_edges(*GRAPH.to_edges(), NUM_NODES, undirected=True)
    split = split_edges(graph, fraction, seed)
    held, kept = (
        set(zip(split.src.tolist(), split.dst.tolist())),
        set(zip(*(e.tolist() for e in split.train.to_edges()))),
    )
    assert not held & kept
    assert held | kept == set(zip(*(ends.tolist() for ends in graph.to_edges())))
    assert held == {(b, a) for a, b in held}
    assert all(a != b for a, b in held)
    assert abs(len(held) / graph.num_edges - fraction) < 0.06
    assert split.src.tolist() == split_edges(graph, fraction, seed).src.tolist()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: NeighborSampler(GRAPH, [0]), "`fanouts` must be a whole number, 1 or more. Received: fanouts=0"),
        (lambda: NeighborSampler(GRAPH, [5], 0.5), "`seed` must be an int"),
        (lambda: NeighborSampler(GRAPH, [5]).sample([1, 1]), "`seeds` must be distinct; np.unique"),
        (lambda: NeighborSampler(GRAPH, [5]).sample([200]), "`seeds` must be whole numbers from 0 to 199"),
        (lambda: NeighborSampler(GRAPH, [5]).batches([1, 2], 0, 0), "`batch_size` must be a whole number, 1 or more"),
        (lambda: LocalNegatives(0), "`num_nodes` must be a whole number"),
        (lambda: LocalNegatives(5, graph=GRAPH), "`graph` must have num_nodes=5 nodes. Received: 200 nodes"),
        (lambda: LocalNegatives(5).sample([5], 1), "`positives_src` must be whole numbers from 0 to 4"),
        (lambda: LocalNegatives(5).sample([1], 0), "`num_negatives` must be a whole number, 1 or more"),
        (lambda: split_edges(GRAPH, 1), "`fraction` must be a number between 0 and 1. Received: fraction=1"),
        (
            lambda: mrr([1.0], [[1.0], [2.0]]),
            r"`scores_pos` must be of shape \(b,\) .* Received: shapes \(1,\) and \(2",
        ),
        (lambda: mrr([], np.zeros((0, 3))), "b at least 1"),
    ],
)
def test_errors(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_without_pyg(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_geometric.data", None)
    with pytest.raises(ImportError, match=r"pip install 'hvd-sparse\[gnn\]'"):
        to_pyg(NeighborSampler(GRAPH, [1]).sample([0]))


def test_numpy_is_enough():
    code = (
        "import sys, hvd_sparse.graph\n"
        "names = 'torch', 'tensorflow', 'torch_geometric', 'pymetis', 'scipy', 'horovod'\n"
        "sys.exit(', '.join(name for name in names if name in sys.modules) or None)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
