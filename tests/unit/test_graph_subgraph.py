"""The parts of a graph, in memory and on disk."""

from __future__ import annotations

import shutil
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_sparse.graph import Graph, Part, induced, open_part, part_sizes, random_parts, write_parts

NUM_NODES = 60
RNG = np.random.default_rng(1)
GRAPH = Graph.from_edges(*RNG.integers(NUM_NODES, size=(2, 300)), NUM_NODES)
X, Y = RNG.normal(size=(NUM_NODES, 3)).astype(np.float32), np.arange(NUM_NODES)
PARTS = random_parts(NUM_NODES, 4)


def global_edges(part: Part) -> set[tuple[int, int]]:
    src, dst = part.graph.to_edges()
    return set(zip(part.nodes[src].tolist(), part.nodes[dst].tolist()))


EDGES = global_edges(Part(np.arange(NUM_NODES), GRAPH, 0))


@given(st.sets(st.integers(0, NUM_NODES - 1), min_size=1), st.randoms())
def test_exactly_the_edges_inside_remain(chosen, random):
    nodes = list(chosen)
    random.shuffle(nodes)
    part = induced(GRAPH, nodes)
    assert part.nodes.tolist() == sorted(chosen)
    assert global_edges(part) == {edge for edge in EDGES if chosen.issuperset(edge)}
    assert part.num_cut_edges == sum(a not in chosen and b in chosen for a, b in EDGES)
    rows = np.split(part.graph.indices, part.graph.indptr[1:-1])
    assert all(np.all(row[1:] > row[:-1]) for row in rows)
    mask = np.isin(np.arange(NUM_NODES), nodes)
    assert global_edges(induced(GRAPH, mask)) == global_edges(part)


def test_the_whole_graph_is_a_part_of_itself():
    part = induced(GRAPH, np.ones(NUM_NODES, bool))
    assert part.num_cut_edges == 0
    assert np.array_equal(part.graph.indptr, GRAPH.indptr)
    assert np.array_equal(part.graph.indices, GRAPH.indices)


@given(st.integers(1, 6), st.integers(0, 1000))
def test_parts_are_disjoint_and_complete(num_parts, seed):
    parts = random_parts(NUM_NODES, num_parts, seed)
    found = [induced(GRAPH, parts == part) for part in range(num_parts)]
    assert sorted(np.concatenate([part.nodes for part in found]).tolist()) == list(range(NUM_NODES))
    kept = [global_edges(part) for part in found]
    assert sum(map(len, kept)) == len(set().union(*kept))
    assert sum(map(len, kept)) + sum(part.num_cut_edges for part in found) == GRAPH.num_edges


@pytest.fixture
def folder(tmp_path):
    write_parts(GRAPH, PARTS, tmp_path / "parts", {"x": X, "y": Y})
    return tmp_path / "parts"


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_needs_its_own_files_alone(rank, folder):
    for other in {0, 1, 2, 3} - {rank}:
        shutil.rmtree(folder / f"part_{other}")
    stored, expected = open_part(folder, rank), induced(GRAPH, rank == PARTS)
    mapped = [stored.nodes, stored.graph.indptr, stored.graph.indices, *stored.arrays.values()]
    assert len(mapped) == 5
    assert all(isinstance(array, np.memmap) for array in mapped)
    assert stored.nodes.tolist() == expected.nodes.tolist()
    assert global_edges(stored) == global_edges(expected)
    assert stored.num_cut_edges == expected.num_cut_edges
    assert np.array_equal(stored.arrays["x"], X[stored.nodes])
    assert np.array_equal(stored.arrays["y"], stored.nodes)
    assert stored.arrays["x"].dtype == np.float32


def test_dropped_parts_stay_missing(folder):
    shutil.rmtree(folder / "part_2")
    with pytest.raises(FileNotFoundError, match=r"`part` be one of its parts. Received: no .*part_2"):
        open_part(folder, 2)
    assert open_part(folder, 3).graph.num_nodes == part_sizes(PARTS, 4)[3]


def test_a_mapped_graph_is_read_where_its_rows_are(tmp_path):
    """Nodes of one hundredth of a 400 MB file: a process that takes them stays far below its size."""
    num_nodes, degree = 2_000_000, 50
    folder = tmp_path / "graph"
    folder.mkdir()
    np.save(folder / "indptr.npy", np.arange(num_nodes + 1) * degree)
    indices = np.lib.format.open_memmap(folder / "indices.npy", "w+", np.int32, (num_nodes * degree,))
    indices[:: degree * 1000] = 1
    indices.flush()
    code = (
        "import resource, sys; import numpy as np; from hvd_sparse.graph import Graph, induced\n"
        "graph = Graph.open(sys.argv[1])\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak(); part = induced(graph, np.arange(500_000, 520_000)); print(peak() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 150_000  # kB


def test_arrays_may_be_mapped(tmp_path):
    np.save(tmp_path / "x.npy", X)
    write_parts(GRAPH, PARTS, tmp_path / "parts", {"x": np.load(tmp_path / "x.npy", mmap_mode="r")})
    assert np.array_equal(open_part(tmp_path / "parts", 1).arrays["x"], X[PARTS == 1])


def test_nothing_is_left_of_a_failure(tmp_path):
    with pytest.raises(ValueError, match="Object arrays"):
        write_parts(GRAPH, PARTS, tmp_path / "parts", {"x": np.array([None] * NUM_NODES)})
    assert not list(tmp_path.iterdir())


def test_the_number_of_parts_is_checked(folder):
    assert open_part(folder, 0, 4).graph.num_nodes
    with pytest.raises(ValueError, match=r"`num_parts` must be 4, .* Received: num_parts=3"):
        open_part(folder, 0, 3)


def test_another_partition_needs_another_folder(folder):
    with pytest.raises(ValueError, match="`folder` must be new or empty"):
        write_parts(GRAPH, random_parts(NUM_NODES, 3), folder)
    assert open_part(folder, 3).nodes.tolist() == np.flatnonzero(PARTS == 3).tolist()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: induced(GRAPH, []), "`nodes` must be at least one: .*fewer parts .* Received: no nodes"),
        (lambda path: induced(GRAPH, PARTS == 4), "`nodes` must be at least one"),
        (lambda path: induced(GRAPH, [1, 1]), "`nodes` must be distinct"),
        (lambda path: induced(GRAPH, [60]), "`nodes` must be whole numbers from 0 to 59. Received: nodes from 60"),
        (lambda path: induced(GRAPH, [True]), r"`nodes` as a mask must have 60 elements. Received: shape \(1,\)"),
        (
            lambda path: write_parts(GRAPH, PARTS * 2, path),
            r"every part a node.* Received: nothing for part 1, 3, 5, sizes \d+, 0, \d+, 0, \d+, 0, \d+\.",
        ),
        (lambda path: write_parts(GRAPH, PARTS, path, num_parts=5), "nothing for part 4"),
        (
            lambda path: write_parts(GRAPH, PARTS[1:], path),
            r"`part_of_node` must have 60 elements. Received: .*\(59,\)",
        ),
        (lambda path: write_parts(GRAPH, PARTS, path, {"x": X[1:]}), r"`arrays` must have 60 rows .*'x' of shape \(59"),
        (lambda path: write_parts(GRAPH, PARTS, path, {"nodes": X}), "names of letters other than nodes, indptr, indi"),
        (lambda path: write_parts(GRAPH, PARTS, path, {"../x": X}), "names of letters"),
    ],
)
def test_errors(call, message, tmp_path):
    with pytest.raises((TypeError, ValueError), match=message):
        call(tmp_path / "parts")
    assert not list(tmp_path.iterdir())


def test_ten_million_edges(tmp_path):
    """Random parts of a random graph, its rows included and written to disk, take under 5 s and 2 GB."""
    code = (
        "import resource, sys, time; import numpy as np\n"
        "from hvd_sparse.graph import Graph, open_part, random_parts, write_parts\n"
        "src, dst = np.random.default_rng(0).integers(1_000_000, size=(2, 10_000_000))\n"
        "started = time.process_time()\n"
        "graph = Graph.from_edges(src, dst, 1_000_000)\n"
        "parts = random_parts(1_000_000, 4)\n"
        "write_parts(graph, parts, sys.argv[1])\n"
        "print(time.process_time() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)\n"
        "assert sum(open_part(sys.argv[1], part).graph.num_nodes for part in range(4)) == 1_000_000\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "parts")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seconds, gigabytes = map(float, done.stdout.split())
    assert seconds < 5
    assert gigabytes < 2
