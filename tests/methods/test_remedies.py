"""A remedy that a message names by a parameter works at the call that printed the message."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import splince_fast as sf
from splince_fast import baselines, evaluation, labels, sources

N = 1200
rng = np.random.default_rng(0)
AGE = np.concatenate([np.arange(1100), rng.integers(0, 1100, N - 1100)])
YEARS = rng.integers(20, 80, N)
Z, Y = rng.integers(0, 2, N), rng.integers(0, 2, N)
GRADES = (np.arange(N) % 4).astype(float)
TEXTS = np.array(["a", "b", "nan"])[np.arange(N) % 3]
X = rng.normal(size=(N, 8)) + np.outer(YEARS / 30, np.ones(8)) + np.outer(Y, np.arange(8))
FEW = slice(0, 12)

# Values for remedies that a message names without one.
VALUES: dict[str, Any] = {"max_amplification": 100.0}


def moments(column: Any, **options: Any) -> sf.Moments:
    return sf.Moments(**options).update(X, {"age": column, "y": Y})


def at_moments(solve: Callable[[sf.Moments], Any]) -> Callable[..., Any]:
    """A solve whose message names parameters of Moments."""
    return lambda **options: solve(moments(YEARS, **options))


def estimator(cls: Any, column: Any, **labels_of_fit: Any) -> Callable[..., Any]:
    return lambda **options: cls(**options).fit(X, concept=column, **labels_of_fit).projection_


def copied(function: Callable[[Any], Any], column: Any) -> Callable[..., Any]:
    """A call whose column the remedy replaces by an encoded one."""
    return lambda encoded=column: function(encoded)


def compared(column: Any) -> Any:
    return evaluation.compare(
        X, task=column, concept=Z, erasers=("LEACE",), heads=("retrained",), n_seeds=1,
        alphas=(1.0,), leakage=(), progress=False,
    )  # fmt: skip


# name -> (call with remedies as keyword arguments, text of its message)
CASES: dict[str, tuple[Callable[..., Any], str]] = {
    "many classes: erase": (lambda **o: sf.erase(X, YEARS, **o), "was read as 60 classes"),
    "many classes: leace": (at_moments(lambda m: sf.leace(m, erase="age")), "as 60 classes"),
    "many classes: LEACE": (estimator(sf.LEACE, YEARS), "as 60 classes"),
    "identifiers: update": (lambda **o: moments(AGE, **o), "more than 1,000"),
    "identifiers: encode_one": (
        copied(lambda column: labels.encode_one(column, N, name="z"), AGE),
        "more than 1,000",
    ),
    **{
        f"{message}: {entry}": (copied(function, column), message)
        for message, column in (("floats, read as numbers", GRADES), ("like a missing", TEXTS))
        for entry, function in (
            ("head", lambda column: evaluation.fit_head(X, column)),
            ("compare", compared),
            ("encode_one", lambda column: labels.encode_one(column, N, name="z")),
        )
    },
    "floats: Folds": (
        lambda **o: sf.Folds(2, **o).update(X, {"z": GRADES}),
        "floats, read as numbers",
    ),
    "floats: LEACE": (estimator(sf.LEACE, GRADES), "floats, read as numbers"),
    "floats: erase": (lambda **o: sf.erase(X, GRADES, **o), "floats, read as numbers"),
    "texts: erase": (lambda **o: sf.erase(X, TEXTS, **o), "looks like a missing value"),
    "no class means": (
        lambda **o: sf.mean_projection(sf.Moments(**o).update(X, {"z": GRADES.clip(1)}), erase="z"),
        "has no class means",
    ),
    "infeasible: splince": (
        lambda **o: sf.splince(
            sf.Moments().update(X, {"z": Z, "y": Z, "w": Y}), erase="z", keep=["y", "w"], **o
        ),
        "cannot keep",
    ),
    "few rows: erase": (lambda **o: sf.erase(X[FEW], Z[FEW], **o), "rows per dimension"),
    "no concept": (lambda **o: sf.LEACE(**o).fit(X, Z), "no concept to erase"),
    "unlabelled rows": (
        lambda **o: sf.oracle(moments(Z), erase="age", keep="y", **{"missing": "raise"} | o)(
            X, {"age": [None, *Z[1:]]}
        ),
        "have no label",
    ),
}


def told(call: Callable[..., Any], *arguments: Any, **options: Any) -> list[str]:
    """Texts of the warnings of a call, and of its error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call(*arguments, **options)
        except sf.SplinceError as error:
            return [*(str(w.message) for w in caught), str(error)]
    return [str(w.message) for w in caught]


REMEDY = re.compile(
    r"(?P<encoded>labels\.encode_one\(column, len\(column\), [^)]*\))|"
    r"(?<![\w.-])(?P<name>[a-z_]+)=(?P<value>\{[^{}.]*\}|'[^']*'|\d[-+.\de]*)?"
)


def remedies(text: str) -> Iterator[tuple[str, Any]]:
    """Parameters that a message names, with values."""
    for match in REMEDY.finditer(text):
        if match["encoded"]:
            yield "encoded", match["encoded"]
        elif match["value"]:
            yield match["name"], ast.literal_eval(match["value"].rstrip("."))
        elif match["name"] in VALUES:
            yield match["name"], VALUES[match["name"]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_each_remedy_works_at_the_call_that_printed_it(case: str) -> None:
    call, message = CASES[case]
    texts = [text for text in told(call) if message in text]
    assert texts
    named = [remedy for text in texts for remedy in remedies(text)]
    assert named
    for name, value in named:
        if name == "encoded":
            column = call.__defaults__[0]  # type: ignore[attr-defined]
            encoded = eval(value.replace("labels.", ""), {"column": column, **vars(labels)})
            assert not set(texts) & set(told(call, encoded)), value
        else:
            found = told(call, **{name: value})
            assert not set(texts) & set(found), (name, found)
            assert not any("takes no" in text for text in found), (name, found)


# -- every message ---------------------------------------------------------------------------------

# Parameters of other libraries, and the word "on" of "based on=".
FOREIGN = {"axis", "enable_metadata_routing", "enable_nested_tensor", "on", "shuffle"}


def parameters_of(modules: Any) -> set[str]:
    """Names of the parameters of the public functions, classes and methods of modules."""
    names: set[str] = set()
    for owner in modules:
        for name in getattr(owner, "__all__", dir(owner)):
            entry = getattr(owner, name)
            callables = [entry, *vars(entry).values()] if inspect.isclass(entry) else [entry]
            for function in callables:
                function = getattr(function, "__func__", function)
                if inspect.isfunction(function) or inspect.isclass(function):
                    with contextlib.suppress(ValueError):  # errors, which have no signature
                        names |= set(inspect.signature(function).parameters)
    return names


def named_in(tree: ast.AST) -> set[str]:
    """Names before "=" in the texts of a module, without docstrings and HTML."""
    owners = (ast.Module, ast.FunctionDef, ast.ClassDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, owners)]
    docstrings = {id(b[0].value) for b in bodies if b and isinstance(b[0], ast.Expr)}
    texts = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if id(node) not in docstrings and not re.search(r"<|=\"|class=|style=", node.value)
    )
    pattern = r"(?<![\w.<'\"-])([a-z][a-z_]+)=(?!=)"
    return {match[1] for text in texts for match in re.finditer(pattern, text)}


def test_every_parameter_that_a_message_names_is_public() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from splince_fast import nn

    known = parameters_of([sf, labels, sources, evaluation, baselines, nn]) | FOREIGN
    root = Path(sf.__file__).parent
    for path in root.rglob("*.py"):
        unknown = named_in(ast.parse(path.read_text(encoding="utf-8"))) - known
        assert not unknown, f"{path.relative_to(root)} names {unknown}"
    assert named_in(ast.parse("f('pass shrinkge=1')")) == {"shrinkge"}  # control
    assert "shrinkge" not in known
