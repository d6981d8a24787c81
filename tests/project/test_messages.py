"""Messages of errors and warnings are short: one sentence of cause and one of remedy."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from splince_fast import exceptions

PACKAGE = Path(exceptions.__file__).parent
CLASSES = {name for name, value in vars(exceptions).items() if inspect.isclass(value)}
MOST = 240  # characters of literal text, without the values that are filled in
Assigned = list[tuple[int, str, ast.expr]]  # line, name and value


def name_of(node: ast.expr) -> str:
    """Last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def text_of(node: ast.expr, assigned: Assigned) -> str:
    """Literal text of a message: of the longest branch, and of the names assigned before."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part, assigned) for part in parts)
        case ast.FormattedValue(value=value) | ast.NamedExpr(value=value):
            return text_of(value, assigned)
        case ast.BinOp(left=left, right=right, op=ast.Add()):
            return text_of(left, assigned) + text_of(right, assigned)
        case ast.IfExp(body=body, orelse=other):
            return max((text_of(branch, assigned) for branch in (body, other)), key=len)
        case ast.Name(id=name, lineno=line):
            before = [entry for entry in assigned if entry[1] == name and entry[0] < line]
            if before:
                at, _, value = max(before, key=lambda entry: entry[0])
                return text_of(value, [entry for entry in assigned if entry[0] < at])
    return ""


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and literal text of each message: of errors, of `warn`, and of pairs with a class."""
    for function in [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)] or [tree]:
        nodes = list(ast.walk(function))
        assigned = [
            (node.lineno, node.targets[0].id, node.value)
            for node in nodes
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        ]
        for node in nodes:
            arguments: list[ast.expr] = []
            if isinstance(node, ast.Call) and name_of(node.func) in {*CLASSES, "warn", "refuse"}:
                arguments = node.args
            elif isinstance(node, ast.Tuple) and any(name_of(e) in CLASSES for e in node.elts):
                arguments = node.elts
            texts = (text_of(argument, assigned) for argument in arguments)
            yield from ((node.lineno, text) for text in texts if text)


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_messages_are_short(path: Path) -> None:
    found = set(messages(ast.parse(path.read_text(encoding="utf-8"))))
    assert not [(line, len(text), text) for line, text in sorted(found) if len(text) > MOST]


def test_control_long_messages_are_seen_wherever_they_are_made() -> None:
    long = "x" * (MOST + 1)
    for code in (
        f"raise InputError('{long}')",
        f"raise InputError(f'{long}{{n}}') from error",
        f"text = f'a{{n}}' '{long}'\n    warn(text, PrecisionWarning)",
        f"cause = '{long}' if n else ''\n    raise sf.exceptions.LabelError(f'{{cause}}')",
        f"yield PrecisionWarning, '{long}'",
    ):
        ((_, text),) = set(messages(ast.parse(f"def f():\n    {code}")))
        assert len(text) > MOST
    assert not list(messages(ast.parse("def f():\n    raise KeyError('a')")))
    count = sum(len(list(messages(ast.parse(path.read_text("utf-8"))))) for path in FILES)
    assert count > 300
