"""The READMEs say what is true: their code runs, their table is the registry."""

import re
import runpy
from pathlib import Path

import pytest

from hvd_sparse import registry

ROOT = Path(__file__).parent.parent.parent


def blocks(file: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", file.read_text(), re.DOTALL | re.MULTILINE)


def test_blocks_are_found() -> None:
    assert len(blocks(ROOT / "README.md", "python")) >= 3
    assert len(blocks(ROOT / "hvd_sparse/README.md", "python")) == 1


def test_the_table_is_the_registry() -> None:
    table = (ROOT / "README.md").read_text().split("<!-- registry: begin -->")[1].split("<!-- registry: end -->")[0]
    rows = [
        f"| {kind} | `{name}` | {summary} |"
        for kind in registry.METHODS
        for name, summary in registry.summaries(kind).items()
    ]
    assert table.strip().splitlines()[2:] == rows


def test_adding_a_method_from_outside(tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(blocks(ROOT / "hvd_sparse/README.md", "python")[0])
    runpy.run_path(str(script))


@pytest.mark.parametrize(
    "command", [line for block in blocks(ROOT / "README.md", "console") for line in block.splitlines()]
)
def test_commands_exist(command: str) -> None:
    words = command.split("#")[0].split()
    if words[0] == "bash":
        assert (ROOT / words[1]).is_file()
    elif words[:2] == ["hvd-sparse", "build-horovod"]:
        from hvd_sparse.cli import main

        assert main([*words[1:], "--help"]) == 0
    else:
        assert words[0].endswith("horovodrun")
        assert (ROOT / next(word for word in words if word.startswith("examples/"))).is_file()
