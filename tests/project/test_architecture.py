"""Dependencies point one way: a package or module imports only what stands below it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "splince_fast"

# From the ground up; each may import what stands before it, and itself.
LAYERS = [
    ["exceptions"],
    ["_kernels", "_runtime"],
    ["labels", "sources"],
    ["_solve"],
    ["moments", "report"],
    ["projection"],
    ["methods", "strength"],
    ["estimators", "config", "nn"],
    ["baselines", "evaluation", "experiments"],
    ["cli", "__main__", "__init__"],
]
# Within a layer, too, the later may import the earlier: no circle can arise.
LEVEL = {name: i for i, name in enumerate(name for names in LAYERS for name in names)}


def top_level(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> set[str]:
    """Top-level names of this package that a module imports, type checking aside."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "splince_fast":
            names = [f"splince_fast.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        found |= {n.split(".")[1] for n in names if n.startswith("splince_fast.")}
    return found


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    name = top_level(path)
    assert name in LEVEL, f"{name} stands in no layer: give it one"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    upwards = {
        other for other in imported(tree) if LEVEL.get(other, -1) >= LEVEL[name] and other != name
    }
    assert not upwards, f"{path.name} imports {upwards} from above"


APPLICATIONS = {"__init__", "nn", "baselines", "evaluation", "experiments"}


def test_few_packages_and_few_arrows() -> None:
    """What a person can remember: at most 20 entries, 10 layers, and 80 arrows of the library.

    The packages that only use it, and that nothing but the command line uses, count apart.
    """
    entries = {top_level(path) for path in MODULES}
    arrows = {
        (top_level(path), other)
        for path in MODULES
        for other in imported(ast.parse(path.read_text(encoding="utf-8")))
        if other in entries and other != top_level(path)
    }
    assert len(entries) <= 20
    assert len(LAYERS) <= 10
    assert len([a for a in arrows if a[0] not in APPLICATIONS]) <= 80
    users = {a for a, b in arrows if b in APPLICATIONS}
    assert users <= APPLICATIONS | {"cli", "__main__"}


def test_control_an_upward_import_is_seen() -> None:
    tree = ast.parse("def f():\n    from splince_fast.moments import Moments")
    assert imported(tree) == {"moments"}
