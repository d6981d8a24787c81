"""Dependencies point one way: a room imports only rooms below it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "splince_fast"

# From the ground up; a room may import what stands before it, and itself.
FLOORS = [
    ["exceptions"],
    ["_threads", "_interrupts", "_files", "_fourth"],
    ["_kernels"],
    ["_validation"],
    ["_class_names"],
    ["_containers"],
    ["labels", "sources"],
    ["_variables"],
    ["_stage", "_state"],
    ["_workspace"],
    ["_accumulator"],
    ["_serial"],
    ["moments"],
    ["report"],
    ["integrations", "projection"],  # the bridge and the map know each other
    ["_policies", "_selection", "_failures"],
    ["methods", "strength"],
    ["nn"],
    ["_estimator"],
    ["estimators"],
    ["baselines"],
    ["config"],
    ["evaluation"],
    ["demo"],
    ["experiments"],
    ["cli"],
    ["__main__", "__init__"],
]
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(tree: ast.AST) -> set[str]:
    """Rooms of this package that a module imports, anywhere in it, type checking aside."""
    rooms: set[str] = set()
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
        rooms |= {n.split(".")[1] for n in names if n.startswith("splince_fast.")}
    return rooms


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    room = room_of(path)
    assert room in LEVEL, f"{room} has no floor: give it one"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    upwards = {
        r
        for r in imported_rooms(tree)
        if LEVEL.get(r, -1) >= LEVEL[room]
        and r != room
        and not {r, room} <= set(FLOORS[LEVEL["projection"]])
    }
    assert not upwards, f"{path.name} imports {upwards} from above"


def test_control_an_upward_import_is_seen() -> None:
    assert imported_rooms(ast.parse("def f():\n    from splince_fast.moments import Moments")) == {
        "moments"
    }


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_large_modules_owe_a_reason(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if len(text.splitlines()) > 400:
        assert "400 lines" in (ast.get_docstring(ast.parse(text)) or ""), (
            f"{path.name} is above 400 lines; split it, or say why in its docstring"
        )
