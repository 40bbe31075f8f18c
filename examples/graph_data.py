"""Graphs of the examples, built from files that are on this machine. Nothing is downloaded."""

from __future__ import annotations

import re
import subprocess
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import DataError

from hvd_sparse.graph import Graph
from hvd_sparse.graph.hashing import hash64

WORDNET = Path("/usr/share/wordnet")
NUM_FEATURES = 256

_RELATIONS = ("Pre-Depends", "Depends", "Recommends", "Suggests", "Enhances")
_PACKAGE_NAME = re.compile(r"\s*([a-z0-9][a-z0-9+.\-]*)")
_WORD = re.compile(r"[a-z][a-z0-9+#]+")
_MAX_PROVIDERS = 8  # of a virtual package, each of which becomes an edge
_MIN_CLASS_SIZE = 50  # smaller sections have no label

_MIN_ARCHIVE = 10_000  # packages; an apt without lists knows but those that are installed
_CLASSES = (  # of WordNet, in the order of their numbers
    ("adj", "all pert"),
    ("adv", "all"),
    ("noun", "Tops act animal artifact attribute body cognition communication event feeling food group location"),
    ("noun", "motive object person phenomenon plant possession process quantity relation shape state substance time"),
    ("verb", "body change cognition communication competition consumption contact creation emotion motion perception"),
    ("verb", "possession social stative weather"),
    ("adj", "ppl"),
)


@dataclass(frozen=True)
class GraphData:
    """A graph with N nodes and what is known about them.

    Attributes:
        graph: every edge in both directions, none from a node to itself.
        x: (N, features) float32.
        y: (N,) int64, an index into `classes`, or -1 where the class is unknown.
        classes: their names.
        names: (N,) of the nodes.
        split: (N,) int8, 0 training, 1 validation, 2 test, about 60, 20 and 20 %; the same when nodes are added.
    """

    graph: Graph
    x: Any
    y: Any
    classes: Sequence[str]
    names: Sequence[str]
    split: Any


def debian_packages(path: str | Path | None = None) -> GraphData:
    """Debian's packages: an edge says that one needs or recommends the other, the class is its section.

    Debian 12 has 63,681 packages with 328,678 pairs and 53 classes. Features are hashed words of the short description,
    sizes, and whether it has a home page and is for all architectures; not the name, which gives the section away.
    Packages of one source are in one split.

    Args:
        path: the saved output of `apt-cache dumpavail`. None: ask this machine's apt.

    Raises:
        DataError: there is no such file, or apt knows no packages.
    """
    packages: dict[str, dict[str, str]] = {}
    for fields in _stanzas(_dumpavail(path)):
        packages.setdefault(fields["Package"], fields)  # the version that apt would install comes first
    names = sorted(packages)
    if len(names) < (_MIN_ARCHIVE if path is None else 1):
        raise DataError(
            f"{path or 'apt-cache dumpavail'} lists {len(names)} packages. Run: sudo apt-get update. "
            f"Or on a Debian machine: apt-cache dumpavail >packages.txt, and give the file with --data packages.txt."
        )
    every = [packages[name] for name in names]
    sections = [fields.get("Section", "").rpartition("/")[2] for fields in every]
    classes = sorted(name for name, count in Counter(sections).items() if name and count >= _MIN_CLASS_SIZE)
    class_numbers = {name: number for number, name in enumerate(classes)}
    facts = np.array(
        [
            [
                np.log1p(float(fields.get("Installed-Size", 0))),
                np.log1p(float(fields.get("Size", 0))),
                fields.get("Architecture") == "all",
                "Homepage" in fields,
            ]
            for fields in every
        ],
        np.float32,
    )
    facts = (facts - facts.mean(0)) / (facts.std(0) + 1e-6) * 0.1
    words = hashed_words(
        [fields.get("Description", fields.get("Description-en", "")) for fields in every], NUM_FEATURES - 4
    )
    return GraphData(
        graph=_undirected(_relations(names, every), len(names)),
        x=np.concatenate([words, facts], 1),
        y=np.array([class_numbers.get(section, -1) for section in sections], np.int64),
        classes=classes,
        names=names,
        split=_split(fields.get("Source", fields["Package"]).split(" ")[0] for fields in every),
    )


def wordnet(path: str | Path = WORDNET) -> GraphData:
    """WordNet: nodes are sets of synonyms, edges its relations, classes the 45 lexicographer files.

    WordNet 3.0 has 117,659 nodes and 183,789 pairs. Features are hashed words of the gloss.

    Args:
        path: the folder of data.noun, data.verb, data.adj and data.adv.

    Raises:
        DataError: there is no such file, or it is something else.
    """
    numbers: dict[tuple[str, str], int] = {}
    labels, names, glosses, pointers = [], [], [], []
    for letter, kind in (("n", "noun"), ("v", "verb"), ("a", "adj"), ("r", "adv")):
        file = Path(path) / f"data.{kind}"
        if not file.is_file():
            raise DataError(
                f"There is no file {file}. Give WordNet's folder with --data DIR, or install the Debian package, whose "
                f"files are in {WORDNET}: sudo apt-get install -y wordnet-base"
            )
        try:
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                if line.startswith(" "):  # the licence
                    continue
                # offset, class, kind, number of words (hex), words with a number, number of pointers, pointers | gloss
                head, _, gloss = line.partition("|")
                fields = head.split()
                node, num_words = len(labels), int(fields[3], 16)
                numbers[letter, fields[0]] = node
                labels.append(int(fields[1]))
                names.append(f"{fields[4]}#{node}")
                glosses.append(gloss)
                start = 5 + 2 * num_words
                for at in range(start, start + 4 * int(fields[start - 1]), 4):
                    # Satellite adjectives are in the file of adjectives.
                    pointers.append((node, fields[at + 2].replace("s", "a"), fields[at + 1]))
        except (ValueError, IndexError) as error:
            raise DataError(f"{file} is not a data file of WordNet: {error}.") from error
    try:
        edges = [(node, numbers[letter, offset]) for node, letter, offset in pointers]
    except KeyError as error:
        raise DataError(f"The files in {path} do not belong together: {error} is in none of them.") from error
    return GraphData(
        graph=_undirected(edges, len(labels)),
        x=hashed_words(glosses, NUM_FEATURES),
        y=np.array(labels, np.int64),
        classes=[f"{kind}.{topic}" for kind, topics in _CLASSES for topic in topics.split()],
        names=names,
        split=_split(names),
    )


def synthetic(num_communities: int = 8, nodes_per_community: int = 50, seed: int = 0) -> GraphData:
    """A small graph with communities, for tests: the same one everywhere and always.

    Ten edges per node, eight within the community and two to any node; fewer where communities are too small for that.
    Features (N, 16) are the community's own direction plus noise of the same size.
    """
    num_nodes = num_communities * nodes_per_community
    community = np.arange(num_nodes) // nodes_per_community

    def uniform(count: int, stream: int) -> Any:
        return (hash64(np.arange(count), seed * 8 + stream) >> np.uint64(11)) / 2**53

    def distinct(src: Any, dst: Any, count: int) -> tuple[Any, Any]:
        """The first `count` pairs that are no loops and have not been there before, in either direction."""
        keys = np.where(src == dst, -1, np.minimum(src, dst) * num_nodes + np.maximum(src, dst))
        unique, first = np.unique(keys, return_index=True)
        kept = np.sort(first[unique >= 0])[:count]
        return src[kept], dst[kept]

    num_draws = 16 * num_nodes
    src = (uniform(num_draws, 0) * num_nodes).astype(np.int64)
    near = community[src] * nodes_per_community + (uniform(num_draws, 1) * nodes_per_community).astype(np.int64)
    far = (uniform(num_draws, 2) * num_nodes).astype(np.int64)
    near_src, near_dst = distinct(src, near, 8 * num_nodes)
    far_src, far_dst = distinct(src[::-1], far, 2 * num_nodes)
    directions = uniform(num_communities * 16, 3).reshape(num_communities, 16) - 0.5
    noise = uniform(num_nodes * 16, 4).reshape(num_nodes, 16) - 0.5
    names = [str(node) for node in range(num_nodes)]
    edges = np.stack([np.concatenate([near_src, far_src]), np.concatenate([near_dst, far_dst])], 1)
    return GraphData(
        graph=_undirected(edges, num_nodes),
        x=(directions[community] + noise).astype(np.float32),
        y=community,
        classes=[f"community {number}" for number in range(num_communities)],
        names=names,
        split=_split(names),
    )


def hashed_words(texts: Sequence[str], num_features: int) -> Any:
    """(len(texts), num_features) float32: tf-idf of each word at a hashed place with a hashed sign; length 1."""
    vocabulary: dict[str, int] = {}
    rows, columns, counts = [], [], []
    for row, text in enumerate(texts):
        for word, count in Counter(_WORD.findall(text.lower())).items():
            rows.append(row)
            columns.append(vocabulary.setdefault(word, len(vocabulary)))
            counts.append(count)
    column = np.array(columns, np.int64)
    hashes = np.array([zlib.crc32(word.encode()) for word in vocabulary], np.int64)
    num_texts_with = np.bincount(column, minlength=len(vocabulary))
    weights = (1 + np.log(np.array(counts, np.float64))) * np.log(len(texts) / num_texts_with)[column]
    weights *= np.where((hashes >> 20) & 1, 1.0, -1.0)[column]
    places = np.array(rows, np.int64) * num_features + (hashes % num_features)[column]
    x = np.bincount(places, weights, len(texts) * num_features).reshape(len(texts), num_features)
    return (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)).astype(np.float32)


def _dumpavail(path: str | Path | None) -> str:
    try:
        if path is not None:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        return subprocess.run(
            ["apt-cache", "dumpavail"], check=True, capture_output=True, encoding="utf-8", errors="replace"
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise DataError(
            f"Debian's packages cannot be listed: {error}. On a Debian machine: sudo apt-get update, then "
            f"apt-cache dumpavail >packages.txt. Give the file with --data packages.txt."
        ) from error


def _stanzas(text: str) -> Iterator[dict[str, str]]:
    """Packages as fields; of a field with several lines, as a description is, the first one."""
    for block in text.split("\n\n"):
        lines = (line.partition(":") for line in block.splitlines() if line[:1] not in (" ", "\t"))
        fields = {name: value.strip() for name, _, value in lines}
        if "Package" in fields:
            yield fields


def _relations(names: Sequence[str], packages: Sequence[dict[str, str]]) -> list[tuple[int, int]]:
    numbers = {name: number for number, name in enumerate(names)}
    providers: dict[str, list[int]] = {}
    for number, fields in enumerate(packages):
        for name in _package_names(fields.get("Provides", "")):
            providers.setdefault(name, []).append(number)
    edges = []
    for number, fields in enumerate(packages):
        for relation in _RELATIONS:
            for name in _package_names(fields.get(relation, "")):
                others = [numbers[name]] if name in numbers else providers.get(name, [])[:_MAX_PROVIDERS]
                edges += [(number, other) for other in others]
    return edges


def _package_names(relation: str) -> Iterator[str]:
    """Every name in "a (>= 1), b | c:any"."""
    for alternative in relation.replace("|", ",").split(","):
        found = _PACKAGE_NAME.match(alternative)
        if found:
            yield found[1]


def _undirected(edges: Any, num_nodes: int) -> Graph:
    src, dst = np.asarray(edges, np.int64).reshape(-1, 2).T
    return Graph.from_edges(src[src != dst], dst[src != dst], num_nodes, undirected=True)


def _split(keys: Iterable[str]) -> Any:
    hashes = np.array([zlib.crc32(key.encode()) for key in keys], np.int64)
    return np.digitize(hashes / 2**32, [0.6, 0.8]).astype(np.int8)
