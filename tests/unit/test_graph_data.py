"""The graphs of the examples."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import graph_data
from datasets import DataError

# Written for this test, in the format of apt: an alternative, versions, a virtual package, one that does not exist.
PACKAGES = """\
Package: editor
Version: 2
Source: tools (1.0)
Section: editors
Architecture: amd64
Installed-Size: 100
Size: 50
Depends: libbase (>= 1.0), speller | missing
Recommends: mailer:any
Homepage: https://example.org
Description: small editor for text
 that has a longer description
 of two lines
Description-md5: 0

Package: editor
Version: 1
Depends: viewer

Package: libbase
Section: contrib/libs
Architecture: all
Depends: libbase
Description: base library

Package: post
Source: tools
Section: mail
Provides: mailer (= 1), speller
Description: mail for text terminals

Package: viewer
Section: editors
Provides: mailer
Enhances: editor
Description: text viewer
"""
# One synset of each kind, as WordNet writes them; the adjective's pointer goes to a satellite ("s").
SYNSETS = {
    "noun": [
        "  1 a licence, which comes first",
        "00000100 05 n 02 dog 0 hound 0 002 @ 00000200 n 0000 + 00000100 v 0101 | a domestic animal",
        "00000200 05 n 01 animal 0 000 | a living being",
    ],
    "verb": ['00000100 29 v 01 chase 0 001 + 00000100 n 0101 01 + 02 00 | go after; "chase the dog"'],
    "adj": [
        "00000300 00 a 01 tame 0 001 & 00000400 s 0000 | not wild",
        "00000400 00 s 01 docile 0 000 | easily handled",
    ],
    "adv": ["00000500 02 r 01 tamely 0 001 \\ 00000300 a 0101 | in a tame manner"],
}


def pairs(data) -> set[tuple[str, str]]:
    """Names of linked nodes, each pair once, without node numbers."""
    names = [name.partition("#")[0] for name in data.names]
    return {tuple(sorted((names[a], names[b]))) for a, b in zip(*data.graph.to_edges())}


def test_debian(tmp_path):
    (tmp_path / "packages.txt").write_text(PACKAGES)
    data = graph_data.debian_packages(tmp_path / "packages.txt")
    assert list(data.names) == ["editor", "libbase", "post", "viewer"]
    assert pairs(data) == {("editor", "libbase"), ("editor", "post"), ("editor", "viewer")}
    assert data.graph.num_edges == 6
    assert (data.x.shape, data.x.dtype) == ((4, 256), np.float32)
    assert np.isfinite(data.x).all()
    assert data.classes == []  # of 50 packages or more
    assert data.y.tolist() == [-1] * 4
    assert data.split[0] == data.split[2]  # one source


def test_debian_sections(tmp_path, monkeypatch):
    (tmp_path / "packages.txt").write_text(PACKAGES)
    monkeypatch.setattr(graph_data, "_MIN_CLASS_SIZE", 1)
    data = graph_data.debian_packages(tmp_path / "packages.txt")
    assert data.classes == ["editors", "libs", "mail"]
    assert data.y.tolist() == [0, 1, 2, 0]


def write_wordnet(folder: Path) -> Path:
    for kind, lines in SYNSETS.items():
        (folder / f"data.{kind}").write_text("\n".join(lines) + "\n")
    return folder


def test_wordnet(tmp_path):
    data = graph_data.wordnet(write_wordnet(tmp_path))
    assert pairs(data) == {("animal", "dog"), ("chase", "dog"), ("docile", "tame"), ("tame", "tamely")}
    assert [data.classes[label] for label in data.y] == [
        "noun.animal", "noun.animal", "verb.body", "adj.all", "adj.all", "adv.all"
    ]  # fmt: skip
    assert len(data.classes) == 45
    assert data.classes[44] == "adj.ppl"
    assert data.x.shape == (6, 256)


def test_hashed_words():
    x = graph_data.hashed_words(["a red door", "the red car", "the the", ""], 32)
    assert x.shape == (4, 32)
    assert np.linalg.norm(x, axis=1) == pytest.approx([1, 1, 1, 0])
    assert 0 < abs(float(x[0] @ x[1])) < 0.5
    assert np.array_equal(x, graph_data.hashed_words(["a red door", "the red car", "the the", ""], 32))


def test_the_synthetic_graph_is_frozen():
    """Equal on every machine, with every version of NumPy: change the digest only together with the graph."""
    data = graph_data.synthetic(4, 25, seed=1)
    digest = hashlib.sha256()
    for array in (data.graph.indptr, data.graph.indices, data.x, data.y, data.split):
        digest.update(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes())
    assert digest.hexdigest()[:16] == "fcba4bf785cd9625"
    assert not np.array_equal(data.graph.indices[:50], graph_data.synthetic(4, 25, seed=2).graph.indices[:50])


def test_synthetic_communities():
    data = graph_data.synthetic(60, 100)
    src, dst = data.graph.to_edges()
    assert abs(data.graph.num_edges / 2 - 60_000) < 100
    assert abs((data.y[src] == data.y[dst]).mean() - (0.8 + 0.2 / 60)) < 0.005
    assert np.array_equal(data.y, np.repeat(np.arange(60), 100))
    assert np.bincount(data.split) / 6000 == pytest.approx([0.6, 0.2, 0.2], abs=0.02)


def test_what_to_do_when_data_is_missing(tmp_path, monkeypatch):
    with pytest.raises(
        DataError, match=r"no file .*data.noun. Give .* --data DIR.* sudo apt-get install -y wordnet-base"
    ):
        graph_data.wordnet(tmp_path)
    with pytest.raises(DataError, match=r"sudo apt-get update.* --data packages.txt"):
        graph_data.debian_packages(tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(DataError, match=r"empty.txt lists 0 packages. Run: sudo apt-get update"):
        graph_data.debian_packages(tmp_path / "empty.txt")
    (tmp_path / "apt-cache").write_text(f"#!/bin/sh\ncat <<'END'\n{PACKAGES}\nEND\n")
    (tmp_path / "apt-cache").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(DataError, match=r"apt-cache dumpavail lists 4 packages. Run: sudo apt-get update"):
        graph_data.debian_packages()
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"Debian's packages cannot be listed: .*apt-cache"):
        graph_data.debian_packages()


def test_files_that_are_no_wordnet(tmp_path):
    write_wordnet(tmp_path)
    (tmp_path / "data.verb").write_text("hello\n")
    with pytest.raises(DataError, match=r"data.verb is not a data file of WordNet"):
        graph_data.wordnet(tmp_path)
    (tmp_path / "data.verb").write_text("")
    with pytest.raises(DataError, match="do not belong together"):
        graph_data.wordnet(tmp_path)
