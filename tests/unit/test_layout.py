"""The shape of the package: who may import whom, how large files get, what the registry points at."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hvd_sparse
from hvd_sparse import registry

ROOT = Path(hvd_sparse.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if "__pycache__" not in path.parts)
NAMES = [str(path.relative_to(ROOT)) for path in FILES]

# An import never goes to a higher level. Keys: modules and packages right under hvd_sparse.
LEVELS = {
    "types": 0,
    "metrics": 0,
    "buckets": 1,
    "agreement": 1,
    "saved_state": 1,
    "ops": 1,
    "planner": 1,
    "graph": 1,
    "wire": 2,
    "sparsifiers": 3,
    "collectives": 3,
    "memories": 3,
    "controllers": 3,
    "schemes": 3,
    "registry": 3,
    "config": 4,
    "exchange": 4,
    "averaging": 4,
    "meter": 4,
    "records": 1,
    "drivers": 5,
    "torch": 6,
    "tensorflow": 6,
    "cli": 6,
}
FRAMEWORKS = {"torch": "torch", "tensorflow": "tensorflow", "keras": "tensorflow"}  # import: folder
every_file = pytest.mark.parametrize("name", NAMES)


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported, wherever the statement stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield node.module or ""
            if node.module == "hvd_sparse":
                yield from (f"hvd_sparse.{alias.name}" for alias in node.names)


def parsed(name: str) -> ast.AST:
    return ast.parse((ROOT / name).read_text(encoding="utf-8"))


def part_of(name: str) -> str:
    """The module or package right under hvd_sparse that the file belongs to."""
    return Path(name).parts[0].removesuffix(".py")


def upward(part: str, modules: list[str]) -> list[str]:
    """Those of our modules that `part` may not import."""
    ours = [module.split(".") for module in modules if module.startswith("hvd_sparse.")]
    return [".".join(path) for path in ours if LEVELS.get(path[1], 0) > LEVELS[part]]


def foreign(name: str, modules: list[str]) -> list[str]:
    """The frameworks among the modules that the file may not import."""
    found = []
    for module in modules:
        root = module.split(".")[0]
        if root == "horovod":
            allowed = part_of(name) in ("torch", "tensorflow") or name.startswith("drivers/horovod_")
            found += [] if allowed else [module]
        elif root in FRAMEWORKS:
            folder = FRAMEWORKS[root]
            allowed = part_of(name) == folder or name in (f"ops/{folder}.py", f"drivers/horovod_{folder}.py")
            allowed = allowed or (root, name) == ("torch", "graph/pyg.py")  # for who has PyTorch Geometric
            found += [] if allowed else [module]
    return found


def test_the_package_is_found():
    assert len(FILES) > 30
    assert {"types.py", "ops/numpy.py", "drivers/simulate.py"} <= set(NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "__init__.py"])
def test_imports_go_one_way(name):
    assert part_of(name) in LEVELS, f"say in LEVELS where {part_of(name)} stands"
    assert upward(part_of(name), list(imports(parsed(name)))) == []


@every_file
def test_frameworks_stay_in_their_files(name):
    assert foreign(name, list(imports(parsed(name)))) == []


def test_fronts_do_not_know_each_other():
    for name in NAMES:
        for front, other in (("torch", "tensorflow"), ("tensorflow", "torch")):
            if part_of(name) == front or name == f"drivers/horovod_{front}.py":
                assert not [module for module in imports(parsed(name)) if module.startswith(f"hvd_sparse.{other}")]


def test_these_rules_can_be_broken():
    assert upward("ops", ["hvd_sparse.exchange", "hvd_sparse.types"]) == ["hvd_sparse.exchange"]
    assert upward("memories", ["hvd_sparse.drivers.simulate"]) == ["hvd_sparse.drivers.simulate"]
    assert upward("types", ["hvd_sparse.ops.base"]) == ["hvd_sparse.ops.base"]
    assert foreign("exchange.py", ["torch.nn"]) == ["torch.nn"]
    assert foreign("ops/torch.py", ["torch", "tensorflow", "horovod.torch"]) == ["tensorflow", "horovod.torch"]
    assert foreign("drivers/horovod_torch.py", ["torch", "horovod.torch", "keras"]) == ["keras"]
    tree = ast.parse("def f():\n    from hvd_sparse import exchange\n    import horovod.torch as h")
    assert list(imports(tree)) == ["hvd_sparse", "hvd_sparse.exchange", "horovod.torch"]


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("statement", ["import hvd_sparse", "import hvd_sparse.config, hvd_sparse.exchange"])
def test_importing_the_core_imports_no_library(statement):
    heavy = {"numpy", "torch", "tensorflow", "keras", "horovod"}
    modules = modules_after(statement)
    assert "hvd_sparse" in modules
    assert modules & heavy == set()


def test_the_oracle_imports_no_framework():
    modules = modules_after("import hvd_sparse.ops.numpy, hvd_sparse.drivers.simulate")
    assert "numpy" in modules
    assert modules & {"torch", "tensorflow", "keras", "horovod"} == set()


@every_file
def test_files_are_short(name):
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= 300


@every_file
def test_no_assert_and_no_print(name):
    """A user's mistake raises an error that says what is wrong, also under `python -O`; the rest is logged."""
    tree = parsed(name)
    assert [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)] == []
    if part_of(name) != "cli":
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        assert [call.lineno for call in calls if call.func.id == "print"] == []


@every_file
def test_every_module_says_what_it_is(name):
    tree = parsed(name)
    assert ast.get_docstring(tree) or not (ROOT / name).read_text(encoding="utf-8").strip()


# The registry

ENTRIES = [(kind, name) for kind, names in registry.METHODS.items() for name in names]


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_entries_lead_to_documented_classes(kind, name):
    found = registry.method_class(kind, name)
    assert isinstance(found, type)
    assert found.__module__.rsplit(".", 1)[1] == name, "the file's name is the name in the registry"
    assert found.__doc__
    assert ">>>" in found.__doc__, "an example"
    assert "+SKIP" not in found.__doc__, "an example that runs"
    assert found.__doc__.strip().splitlines()[0].endswith("."), "one line that says what it does"


@pytest.mark.parametrize("kind", registry.METHODS)
def test_every_method_file_is_registered(kind):
    folder = {"memory": "memories"}.get(kind, f"{kind}s")
    files = {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__", "requests", "slices", "factors"}
    assert files == set(registry.METHODS[kind])


def test_unknown_names():
    with pytest.raises(ValueError, match="`scheme` must be one of 'sparse', 'dense'"):
        registry.method_class("scheme", "none")
