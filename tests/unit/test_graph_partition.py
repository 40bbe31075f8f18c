"""Check values of RandomTMA's and SuperTMA's partitions, and minimum cuts."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import numpy as np
import pymetis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_sparse.graph import (
    Graph,
    clusters,
    kept_edges,
    min_cut_parts,
    part_sizes,
    random_part_of,
    random_parts,
    super_parts,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from graph_data import synthetic

SEEDS = st.integers(-(2**70), 2**70)
COMMUNITIES = synthetic(60, 100)


def ring(num_nodes: int) -> Graph:
    nodes = np.arange(num_nodes)
    return Graph.from_edges(nodes, (nodes + 1) % num_nodes, num_nodes)


def variation(parts: np.ndarray) -> float:
    """Total variation between the labels of a part and all labels, mean over parts. All labels are equally frequent."""
    counts = np.stack([np.bincount(COMMUNITIES.y[parts == part], minlength=60) for part in range(parts.max() + 1)])
    return float(np.abs(counts / counts.sum(1, keepdims=True) - 1 / 60).sum(1).mean() / 2)


# Random parts.


@pytest.mark.parametrize(
    ("num_parts", "expected"),
    [
        (4, [2, 0, 3, 3, 0, 0, 1, 1, 3, 2, 2, 1, 2, 1, 3, 2]),
        (3, [1, 0, 2, 2, 0, 0, 1, 1, 2, 1, 2, 1, 1, 0, 2, 1]),
        (1, [0] * 16),
    ],
)
def test_check_values(num_parts, expected):
    assert random_parts(16, num_parts).tolist() == expected


def test_100_000_nodes():
    parts = random_parts(100_000, 4)
    assert part_sizes(parts, 4).tolist() == [25_194, 24_751, 24_920, 25_135]
    src, dst = np.random.default_rng(0).integers(100_000, size=(2, 10**6))
    assert abs((parts[src] == parts[dst]).mean() - 0.2505) < 0.002


@given(st.integers(1, 3000), st.integers(1, 40), SEEDS)
def test_random_parts_are_recomputable(num_nodes, num_parts, seed):
    """By any rank, for any nodes, also after a resize."""
    parts = random_parts(num_nodes, num_parts, seed)
    assert parts.dtype == np.int32
    assert ((parts >= 0) & (parts < num_parts)).all()
    some = np.arange(num_nodes)[::-3]
    assert random_part_of(some, num_parts, seed).tolist() == parts[some].tolist()
    assert random_parts(2 * num_nodes, num_parts, seed)[:num_nodes].tolist() == parts.tolist()


def test_chunks_make_no_difference():
    num_nodes = 2**19 + 7
    assert np.array_equal(random_parts(num_nodes, 5), random_part_of(np.arange(num_nodes), 5))


def test_seeds_give_unrelated_parts():
    assert abs((random_parts(100_000, 4, 0) == random_parts(100_000, 4, 1)).mean() - 0.25) < 0.01


# Super parts.


@given(st.integers(1, 8), st.integers(20, 60), SEEDS)
def test_clusters_stay_whole(num_parts, clusters_per_part, seed):
    num_clusters = num_parts * clusters_per_part + num_parts // 2
    cluster_of_node = np.arange(3 * num_clusters) % num_clusters
    parts = super_parts(cluster_of_node, num_parts, seed)
    assert np.array_equal(parts, np.tile(parts[:num_clusters], 3))
    assert np.array_equal(parts, super_parts(cluster_of_node, num_parts, seed))
    sizes = part_sizes(parts, num_parts) // 3
    assert set(sizes[:-1].tolist()) <= {num_clusters // num_parts, num_clusters // num_parts + 1}
    assert sizes.sum() == num_clusters


def test_the_fraction_is_a_probability():
    """10 clusters on 4 parts: the first three take 2 or 3, equally often; the last what is left, 1 to 4."""
    sizes = np.stack([part_sizes(super_parts(np.arange(10), 4, seed), 4) for seed in range(400)])
    assert np.abs((sizes[:, :3] == 3).mean(0) - 0.5).max() < 0.1
    assert set(sizes[:, 3].tolist()) == {1, 2, 3, 4}


def test_every_cluster_gets_everywhere():
    parts = np.stack([super_parts(np.arange(12), 3, seed) for seed in range(600)])
    assert np.abs(np.stack([(parts == part).mean(0) for part in range(3)]) - 1 / 3).max() < 0.08


# The synthetic graph of the specification, 60 communities of 100 nodes.


@pytest.mark.parametrize(
    ("num_parts", "kept", "varied"),
    [
        (3, (0.333, 0.391, 0.866), (0.063, 0.196, 0.667)),
        (4, (0.252, 0.307, 0.850), (0.072, 0.237, 0.750)),
        (8, (0.125, 0.184, 0.826), (0.106, 0.333, 0.875)),
    ],
)
def test_kept_edges_and_labels(num_parts, kept, varied):
    partitions = (
        random_parts(6000, num_parts),
        super_parts(np.arange(6000) // 10, num_parts),  # ten nodes of a community to a cluster
        min_cut_parts(COMMUNITIES.graph, num_parts),
    )
    found = [kept_edges(COMMUNITIES.graph, parts) for parts in partitions]
    # METIS wants equal parts, and so cuts communities in two where they do not divide by the parts.
    assert np.abs(np.subtract(found, kept)).max() < 0.02
    assert np.abs(np.subtract([variation(parts) for parts in partitions], varied)).max() < 0.025


def test_clusters_of_metis_keep_more_edges_than_random_nodes():
    """And far fewer than minimum cuts, at a label variation between both."""
    cluster_of_node = clusters(COMMUNITIES.graph, 600)
    assert part_sizes(cluster_of_node, 600).max() < 30
    mixed = super_parts(cluster_of_node, 4)
    assert 0.28 < kept_edges(COMMUNITIES.graph, mixed) < 0.4
    assert 0.12 < variation(mixed) < 0.35


# Minimum cuts.


def test_a_ring_is_cut_in_arcs():
    parts = min_cut_parts(ring(1000), 4)
    assert parts.dtype == np.int32
    assert np.count_nonzero(parts != np.roll(parts, 1)) <= 8
    assert part_sizes(parts, 4).max() <= 258
    assert np.array_equal(parts, min_cut_parts(ring(1000), 4))


def test_directions_and_loops_do_not_matter():
    src, dst = ring(200).to_edges()
    loops = np.arange(200)
    other = Graph.from_edges(np.concatenate([src, dst, loops]), np.concatenate([dst, src, loops]), 200)
    assert np.array_equal(min_cut_parts(other, 4), min_cut_parts(ring(200), 4))


def test_one_part_and_no_edges():
    empty = Graph.from_edges([], [], 50)
    assert not min_cut_parts(ring(50), 1).any()
    assert part_sizes(min_cut_parts(empty, 2), 2).tolist() == [25, 25]


class Metis:
    """Counts calls."""

    def __init__(self) -> None:
        self.calls, self.original = 0, pymetis.part_graph

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.original(*args, **kwargs)


@pytest.fixture
def metis(monkeypatch) -> Metis:
    counter = Metis()
    monkeypatch.setattr(pymetis, "part_graph", counter)
    return counter


def test_the_cache_saves_the_work(metis, tmp_path):
    first = clusters(ring(100), 4, cache=tmp_path / "new")
    assert metis.calls == 1
    assert np.array_equal(clusters(ring(100), 4, cache=tmp_path / "new"), first)
    assert np.array_equal(min_cut_parts(ring(100), 4, cache=tmp_path / "new"), first)
    assert metis.calls == 1
    for graph, number, seed in ((ring(101), 4, 0), (ring(100), 5, 0), (ring(100), 4, 1)):
        clusters(graph, number, seed, cache=tmp_path / "new")
    assert metis.calls == 4
    assert len(list((tmp_path / "new").iterdir())) == 4


def test_nothing_is_written_without_a_cache(metis, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clusters(ring(100), 4)
    clusters(ring(100), 4)
    assert metis.calls == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["empty", "cut", "bit", "text", "other graph"])
def test_damaged_cache_files_are_replaced(damage, metis, tmp_path, caplog):
    expected = clusters(ring(100), 4, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    middle = len(content) // 2
    if damage == "other graph":
        np.savez(file, cluster_of_node=np.zeros(7, np.int32))
    else:
        file.write_bytes(
            {
                "empty": b"",
                "cut": content[:middle],
                "bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
                "text": b"hello",
            }[damage]
        )
    with caplog.at_level(logging.WARNING, "hvd_sparse"):
        assert np.array_equal(clusters(ring(100), 4, cache=tmp_path), expected)
    assert metis.calls == 2
    assert "computed again" in caplog.text
    assert file.name in caplog.text
    assert np.array_equal(clusters(ring(100), 4, cache=tmp_path), expected)
    assert metis.calls == 2


def test_without_pymetis(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(ImportError, match=r"pip install 'hvd-sparse\[gnn\]'"):
        clusters(ring(10), 2)


# Errors.


def test_a_part_without_nodes_is_named():
    message = (
        r"`part_of_node` must give every part a node.*fewer parts.*Received: nothing for part 1, 3, sizes 2, 0, 1, 0"
    )
    with pytest.raises(ValueError, match=message):
        part_sizes([0, 0, 2], 4)
    with pytest.raises(ValueError, match="nothing for part"):
        super_parts([0, 1], 3)
    with pytest.raises(ValueError, match="nothing for part"):
        super_parts([], 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: random_parts(0, 2), "`num_nodes` must be a whole number, 1 or more"),
        (lambda: random_parts(5, 0), "`num_parts` must be a whole number, 1 or more. Received: num_parts=0"),
        (lambda: random_parts(5, 2**31), r"`num_parts` must be below 2\*\*31"),
        (lambda: random_parts(5, 2, "a"), "`seed` must be an int. Received: seed='a'"),
        (lambda: random_parts(5, 2, True), "`seed` must be an int"),
        (lambda: random_part_of([0.5], 2), "`nodes` must be a 1-D array of whole numbers"),
        (lambda: super_parts([-1, 0], 2), "`cluster_of_node` must be whole numbers from 0"),
        (lambda: super_parts([0, 1], 2, None), "`seed` must be an int"),
        (lambda: part_sizes([0, 4], 4), "`part_of_node` must be whole numbers from 0 to 3. Received: .* from 0 to 4"),
        (lambda: clusters(ring(9), 10), "`num_clusters` must be at most the number of nodes, 9. Received: .*=10"),
        (lambda: clusters(ring(9), 0), "`num_clusters` must be a whole number, 1 or more"),
    ],
)
def test_errors(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
