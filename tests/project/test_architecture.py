"""Imports point one way: between packages by layers, between modules without a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# From the ground up; each may import those before it.
LAYERS = [
    ["exceptions"],
    ["_kernels", "_runtime"],
    ["labels", "sources"],
    ["_solve"],
    ["moments", "report"],
    ["projection", "conditional", "transformer"],
    ["methods", "strength"],
    ["estimators", "config"],
    ["baselines", "evaluation", "nn"],
    ["demo"],
    ["cli", "__main__", "__init__"],
]
LEVEL = {name: i for i, name in enumerate(name for names in LAYERS for name in names)}
# Applications of the library: nothing imports them, nor the public names, but each other and the
# command line.
APPLICATIONS = {"nn", "baselines", "evaluation", "demo"}


def module_name(path: Path) -> str:
    """The dotted name of a file below the root."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted((ROOT / "splince_fast").rglob("*.py"))}


def imports_of(tree: ast.AST, modules: Iterable[str]) -> set[str]:
    """Modules that a module imports, inside functions too; imports for type checking left out."""
    names: list[str] = []
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending += node.orelse
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            members = (f"{node.module}.{alias.name}" for alias in node.names)
            names += [name if name in modules else node.module for name in members]
    return {name for name in names if name in modules}


GRAPH = {
    name: imports_of(ast.parse(path.read_text(encoding="utf-8")), MODULES) - {name}
    for name, path in MODULES.items()
}


def package_of(name: str) -> str:
    """The first part of a module's name below the package."""
    return (*name.split("."), "__init__")[1]


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_downwards(name: str) -> None:
    package = package_of(name)
    assert package in LEVEL, f"{package} stands in no layer: give it one"
    for other in map(package_of, GRAPH[name]):
        is_below = other in ("__init__", package) or LEVEL[other] < LEVEL[package]
        assert is_below, f"{name} imports {other}"
        if other in APPLICATIONS | {"__init__"}:
            assert package in {*APPLICATIONS, "cli", "__main__"}, f"{name} imports {other}"


def test_no_circle_between_modules() -> None:
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        pytest.fail(f"these modules import each other: {error.args[1]}")


def test_control_imports_and_circles_are_seen() -> None:
    text = (
        "def f():\n    from splince_fast import moments\n    from splince_fast.report import Report"
    )
    assert imports_of(ast.parse(text), MODULES) == {"splince_fast.moments", "splince_fast.report"}
    hidden = "if TYPE_CHECKING:\n    import splince_fast.moments"
    assert not imports_of(ast.parse(hidden), MODULES)
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()
