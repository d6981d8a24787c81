"""Tests by the names of their functions, wherever their files lie."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path


@cache
def definitions() -> dict[str, list[Path]]:
    """Name of a test function or class -> the files under tests/ that define it."""
    found: defaultdict[str, list[Path]] = defaultdict(list)
    for path in sorted(Path(__file__).resolve().parent.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names = [node.name]
            elif isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            else:
                continue
            for name in names:
                if name.lower().startswith("test"):
                    found[name].append(path)
    return dict(found)
