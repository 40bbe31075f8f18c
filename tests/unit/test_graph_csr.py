"""Graphs as compressed sparse rows."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Data

from hvd_sparse.graph import Graph


@st.composite
def edge_lists(draw) -> tuple[np.ndarray, np.ndarray, int]:
    """Sources, targets and the number of nodes; repeated edges, loops and isolated nodes happen."""
    num_nodes = draw(st.integers(1, 12))
    ends = st.lists(st.tuples(st.integers(0, num_nodes - 1), st.integers(0, num_nodes - 1)), max_size=40)
    edges = np.array(draw(ends), np.int64).reshape(-1, 2)
    edges.flags.writeable = False
    return edges[:, 0], edges[:, 1], num_nodes


def pairs(graph: Graph) -> list[tuple[int, int]]:
    return list(zip(*(ends.tolist() for ends in graph.to_edges())))


@given(edge_lists(), st.booleans())
def test_edges_come_back_once_and_in_order(edges, undirected):
    src, dst, num_nodes = edges
    expected = set(zip(src.tolist(), dst.tolist()))
    if undirected:
        expected |= {(b, a) for a, b in expected}
    graph = Graph.from_edges(src, dst, num_nodes, undirected)
    assert pairs(graph) == sorted(expected, key=lambda edge: edge[::-1])
    assert (graph.num_nodes, graph.num_edges) == (num_nodes, len(expected))
    assert (graph.indptr.dtype, graph.indices.dtype) == (np.int64, np.int32)


@given(edge_lists())
def test_every_way_in_gives_the_same_graph(edges):
    src, dst, num_nodes = edges
    graph = Graph.from_edges(src, dst, num_nodes)
    matrix = scipy.sparse.csr_matrix((np.ones(len(src)), (src, dst)), shape=(num_nodes, num_nodes))
    data = Data(edge_index=torch.from_numpy(np.stack([src, dst])), num_nodes=num_nodes)
    shuffled = [np.random.default_rng(0).permutation(row) for row in np.split(graph.indices, graph.indptr[1:-1])]
    for other in (
        Graph.from_scipy(matrix),
        Graph.from_scipy(matrix.tocoo()),
        Graph.from_pyg(data),
        Graph.from_csr(graph.indptr, np.concatenate(shuffled)),
    ):
        assert (other.indptr.tolist(), other.indices.tolist()) == (graph.indptr.tolist(), graph.indices.tolist())


@given(edge_lists())
def test_has_edges(edges):
    src, dst, num_nodes = edges
    graph, every = Graph.from_edges(src, dst, num_nodes), np.arange(num_nodes)
    found = graph.has_edges(every[:, None], every)
    assert {(a, b) for a, b in np.argwhere(found).tolist()} == set(pairs(graph))


def test_self_loops_stay_and_are_one_edge():
    assert pairs(Graph.from_edges([1, 1], [1, 0], 2, undirected=True)) == [(1, 0), (0, 1), (1, 1)]


def test_saved_graphs_are_mapped(tmp_path):
    graph = Graph.from_edges([0, 1, 2], [1, 2, 0], np.int64(4))
    graph.save(tmp_path / "new" / "graph")
    opened = Graph.open(tmp_path / "new" / "graph")
    assert isinstance(opened.indptr, np.memmap)
    assert isinstance(opened.indices, np.memmap)
    assert pairs(opened) == pairs(graph)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["graph"]


def test_a_graph_without_edges(tmp_path):
    graph = Graph.from_edges([], [], 3)
    graph.save(tmp_path / "graph")
    assert pairs(Graph.open(tmp_path / "graph")) == []
    assert not graph.has_edges([0, 1], [1, 1]).any()


def test_files_are_not_overwritten(tmp_path):
    graph = Graph.from_edges([0], [1], 2)
    graph.save(tmp_path / "graph")
    with pytest.raises(ValueError, match="`folder` must be new or empty"):
        graph.save(tmp_path / "graph")


def test_missing_and_damaged_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*indptr.npy"):
        Graph.open(tmp_path)
    Graph.from_edges([0] * 9, range(9), 9).save(tmp_path / "graph")
    file = tmp_path / "graph" / "indices.npy"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"indices.npy is damaged"):
        Graph.open(tmp_path / "graph")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Graph.from_edges([0], [3], 3), "`dst` must be whole numbers from 0 to 2. Received: dst from 3 to 3"),
        (lambda: Graph.from_edges([-1], [0], 3), "`src` must be whole numbers from 0 to 2. Received: src from -1"),
        (lambda: Graph.from_edges([0, 1], [0], 3), "`src` and `dst` must be equally long. Received: 2 and 1"),
        (lambda: Graph.from_edges([0.0], [1], 3), r"`src` must be a 1-D array of whole numbers. Received: src=float64"),
        (lambda: Graph.from_edges([[0]], [1], 3), r"`src` must be a 1-D array of whole numbers. Received: .*\(1, 1\)"),
        (lambda: Graph.from_edges([], [], 0), "`num_nodes` must be a whole number, 1 or more. Received: num_nodes=0"),
        (lambda: Graph.from_edges([], [], 2**31), r"`num_nodes` must be below 2\*\*31. Received: num_nodes=2147483648"),
        (lambda: Graph.from_csr([0, 2, 1], [0]), "`indptr` must begin with 0 and never fall"),
        (lambda: Graph.from_csr([0, 2], [0]), "`src` and `dst` must be equally long"),
        (lambda: Graph.from_scipy(scipy.sparse.eye(2, 3)), r"`matrix` must be square. Received: .*\(2, 3\)"),
        (lambda: Graph.from_pyg(Data()), "`data` must be a torch_geometric.data.Data with an edge_index"),
        (lambda: Graph(np.array([0, 2]), np.zeros(1, np.int32)), "`indptr` must be int64 and run from 0 to the number"),
        (lambda: Graph(np.array([0, 1]), np.zeros(1, np.int64)), "which must be int32"),
    ],
)
def test_errors(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
