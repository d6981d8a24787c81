"""Tests: all checks, the library on random data against exact arithmetic, and the harness."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import splince_fast as sf
from proofs_check import _library, _reference, report
from proofs_check._check import (
    FAR,
    REGISTRY,
    Bench,
    Check,
    Outcome,
    Verdict,
    largest_ratio,
    run_check,
    survives,
)
from proofs_check._families import Sample, class_sample, continuous_sample, is_nondegenerate
from proofs_check._linalg import (
    equal,
    eye,
    inverse,
    is_zero,
    null_basis,
    oblique,
    pinv,
    projector,
    rank,
    rational,
    solve,
    to_float,
    zeros,
)
from proofs_check._quadrature import CURVATURE, SOFTPLUS, gaussian_mean
from proofs_check._rounding import tolerances, whitened_error
from proofs_check.report import main

CHECKS = report.checks()
DOCUMENT = report.FINDINGS.read_text(encoding="utf-8")
STATEMENTS = report.statements(DOCUMENT)


@pytest.mark.parametrize(
    "item",
    [
        pytest.param(item, id=item.key, marks=[pytest.mark.paper] if item.paper else [])
        for item in CHECKS
    ],
)
def test_verdict_is_reproduced_and_every_mutant_caught(
    item: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    accumulated = _library.accumulated

    def counted(blocks: Any, **options: Any) -> sf.Moments:
        calls.append(blocks)
        return accumulated(blocks, **options)

    monkeypatch.setattr(_library, "accumulated", counted)
    outcome = run_check(item, quick=True)
    assert outcome.problems == ()
    assert outcome.verdict is item.expected
    assert set(outcome.caught) == set(item.mutants)
    assert item.paper == (not calls), "the mark `paper` says that the library is not called"
    text = re.sub(r"\s+", " ", STATEMENTS[item.key].text)
    assert [figure for figure in outcome.figures if figure not in text] == []


# The library on data that hypothesis draws; hypothesis shrinks failing examples.


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Draw integer data with continuous or class labels; many are (nearly) rank-deficient."""
    d = draw(st.integers(2, 5))
    n = draw(st.integers(d, 3 * d + 3))
    entry = st.integers(-4, 4)
    x = np.array(draw(st.lists(st.lists(entry, min_size=d, max_size=d), min_size=n, max_size=n)))
    if draw(st.booleans()):
        labels = st.lists(st.integers(0, 2), min_size=n, max_size=n)
        return class_sample(x, np.array(draw(labels)), np.array(draw(labels)), "drawn classes")
    columns = st.lists(st.lists(entry, min_size=2, max_size=2), min_size=n, max_size=n)
    z, y = np.array(draw(columns)), np.array(draw(columns))
    return continuous_sample(x, z[:, : draw(st.integers(1, 2))], y[:, :1], "drawn columns")


@given(samples())
@settings(deadline=None, max_examples=150)
def test_library_equals_the_exact_eraser_on_drawn_data(sample: Sample) -> None:
    c = sample.covariances
    if not is_nondegenerate(c):
        return
    splince, leace, _, cond = tolerances(sample)
    computed, exact = _library.splince(sample), _reference.splince(c)
    assert whitened_error(c, computed, exact) <= splince
    assert whitened_error(c, _library.leace(sample), _reference.leace(c)) <= leace
    # Off the support of x, P must be the identity; the whitened error is always 0 there.
    assert np.linalg.norm(to_float(computed - exact)) <= splince * np.sqrt(cond)


def test_library_sees_a_rank_deficiency_that_small_pivots_hide() -> None:
    # Four rows in four dimensions: S has rank 3. The third pivot of a Cholesky factorisation is
    # small, so the rounding error in the last pivot is far above d times the unit roundoff.
    x = np.array([[1, 1, -1, 3], [1, 4, -2, 2], [5, 0, -4, -5], [-2, 0, 2, 2]])
    z = x @ np.array([[1], [0], [2], [0]]) + np.array([[1], [0], [0], [-2]])
    y = x @ np.array([[1], [1], [0], [0]]) + np.array([[0], [2], [1], [0]])
    sample = continuous_sample(x, z, y, "four rows")
    tolerance, _, _, cond = tolerances(sample)
    gap = to_float(_library.splince(sample) - _reference.splince(sample.covariances))
    assert np.linalg.norm(gap) <= tolerance * np.sqrt(cond)
    assert _library.report(sample).rank_covariance == 3


# Tests that the harness reports failures.


def _toy(expected: Verdict = Verdict.HOLDS, **changes: object) -> Check:
    """Return a check of 2 + 2 = 4 that catches its mutant."""

    def run(bench: Bench, *, total: int = 4, unused: int = 0) -> None:
        bench.add_printed(rational([[2 + 2 - total]]))

    fields = {
        "key": "0.0",
        "expected": expected,
        "paper": True,
        "run": run,
        "mutants": {"five": {"total": 5}},
    }
    return Check(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_true_statement_is_reproduced() -> None:
    outcome = run_check(_toy())
    assert outcome.reproduced
    assert outcome.caught == ("five",)


def test_a_surviving_mutant_fails_the_check() -> None:
    outcome = run_check(_toy(mutants={"five": {"total": 5}, "idle": {"unused": 1}}))
    assert outcome.verdict is Verdict.HOLDS
    assert outcome.problems == ("mutant survived: idle",)


def test_a_check_without_mutants_fails() -> None:
    assert not run_check(_toy(mutants={})).reproduced


@pytest.mark.parametrize("wrong", [Verdict.FALSE, Verdict.CONDITIONAL])
def test_another_verdict_than_the_evidence_fails(wrong: Verdict) -> None:
    assert not run_check(_toy(expected=wrong, mutants={})).reproduced


def test_an_exception_fails_the_check_and_is_named() -> None:
    def run(bench: Bench) -> None:
        raise ZeroDivisionError("nothing left")

    outcome = run_check(_toy(run=run, mutants={"any": {}}))
    assert outcome.problems == ("ZeroDivisionError: nothing left",)
    assert not outcome.ran


def _verdict(*reports: tuple[str, float, str | None]) -> Verdict | None:
    bench = Bench(np.random.default_rng(0), quick=True)
    for kind, residual, violates in reports:
        if kind == "corrected":
            bench.add_corrected(residual, 1.0)
        else:
            bench.add_printed(residual, 1.0, violates=violates, deployed=kind == "deployed")
    return bench.verdict()


@pytest.mark.parametrize(
    ("reports", "verdict"),
    [
        ([("printed", 0.5, None)], Verdict.HOLDS),
        ([("printed", 0.5, None), ("corrected", 2.0, None)], None),
        ([("printed", 2 * FAR, None), ("corrected", 0.5, None)], Verdict.FALSE),
        ([("printed", 2.0, None)], None),  # neither within tolerance nor above FAR
        ([("printed", 0.5, None), ("printed", 2 * FAR, "c")], Verdict.CONDITIONAL),
        ([("printed", 0.5, None), ("printed", 0.5, "c")], None),  # holds without the condition
        ([("printed", 2 * FAR, "c")], None),  # no case meets all conditions
        ([("printed", 2 * FAR, None), ("printed", 2 * FAR, "c")], None),
        ([("printed", float("nan"), None)], Verdict.FALSE),
        ([("corrected", 0.5, None)], None),  # the printed statement was not examined
        ([("printed", 0.5, None), ("deployed", 2 * FAR, None)], Verdict.DEPLOYED),
        ([("deployed", 2 * FAR, None)], None),  # the printed reading was not examined
        ([("printed", 0.5, None), ("deployed", 0.5, None)], None),  # true in both readings
        ([("printed", 2 * FAR, None), ("deployed", 2 * FAR, None)], None),  # false in both
    ],
)
def test_the_verdict_follows_from_the_evidence(
    reports: list[tuple[str, float, str | None]], verdict: Verdict | None
) -> None:
    assert _verdict(*reports) is verdict


def test_excess_compares_exactly_where_the_tolerance_is_zero() -> None:
    assert largest_ratio(rational([["1/3"]]) - rational([["1/3"]]), 0.0) == 0
    assert largest_ratio(rational([["1/1000000000000000000000"]]), 0.0) == np.inf
    assert largest_ratio(np.array([0.5, -3.0]), 2.0) == 1.5


def test_every_check_is_documented_and_has_mutants() -> None:
    assert len(CHECKS) == len(REGISTRY) >= 30
    for item in CHECKS:
        assert len(item.mutants) >= 2
        assert item.run.__doc__


# Number of mutants of every check, so that none is removed unnoticed.
MUTANTS = {
    "1.1": 10, "1.2": 5, "1.3": 4, "1.4": 3, "1.5": 3, "1.6": 4, "1.7": 8, "1.8": 4,
    "2.1": 3, "2.2": 3, "2.3": 2, "2.4": 2, "2.5": 2, "2.6": 3,
    "3.1": 4, "3.2": 4, "3.3": 3, "3.4": 6, "3.5": 2, "3.6": 2,
    "4.1": 3, "4.2": 6, "4.3": 6, "4.4": 4, "5.1": 2, "5.2": 3, "5.3": 6, "5.4": 3,
    "6.1": 4, "6.2": 3, "6.3": 3, "6.4": 4, "6.5": 3, "7.1": 4, "7.2": 3, "7.3": 5,
    "8.1": 8, "8.2": 6, "8.3": 3, "8.4": 4, "8.5": 3, "8.6": 4, "8.7": 3, "8.8": 4,
    "8.10": 8,
}  # fmt: skip


def test_no_mutant_is_taken_out() -> None:
    assert {item.key: len(item.mutants) for item in CHECKS} == MUTANTS
    assert set(REGISTRY["1.1"].mutants) == {
        "transpose of P", "I for S", "C_zz for G", "plus for minus in R",
        "library without whitening", "library output transposed", "library returns LEACE",
        "library in single precision", "library: SAL for LEACE", "library: LEACE for SAL",
    }  # fmt: skip


def _formulas(item: Check) -> dict[str, Any]:
    """Return the library functions that a check examines, by argument name."""
    parameters = inspect.signature(item.run).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.name.startswith("fitted")}
    return {name: default for name, default in defaults.items() if callable(default)}


# Statements on kernels and retrained heads, which do not depend on the scale of P.
SCALE_FREE = ("2.6", "3.1", "3.2", "3.3", "3.4", "8.6")
ERASERS_EXAMINED = [
    (item, name) for item in CHECKS for name in _formulas(item) if item.key not in SCALE_FREE
]


@pytest.mark.parametrize(
    ("item", "name"), ERASERS_EXAMINED, ids=[f"{i.key}-{n}" for i, n in ERASERS_EXAMINED]
)
def test_an_error_of_a_millionth_is_noticed(item: Check, name: str) -> None:
    """Guards against checks of squared residuals, in which an error of 1e-6 would be 1e-12."""
    formula = _formulas(item)[name]

    def wrong(*args: Any, **options: Any) -> Any:
        value = formula(*args, **options)
        return value * (Fraction(1000001, 1000000) if value.dtype == object else 1 + 1e-6)

    mutant = replace(item, mutants={"a millionth": {name: wrong}})
    assert not survives(mutant, "a millionth", seed=0)


@pytest.mark.parametrize("item", CHECKS, ids=[item.key for item in CHECKS])
def test_a_mutant_that_is_the_true_formula_fails_the_check(item: Check) -> None:
    parameters = inspect.signature(item.run).parameters
    name, wrong = next(iter(item.mutants.items()))
    true = {argument: parameters[argument].default for argument in wrong}
    outcome = run_check(replace(item, mutants={name: true}), quick=True)
    assert outcome.verdict is item.expected
    assert outcome.problems == (f"mutant survived: {name}",)


# Controls of every check: cases that violate a condition, so that the statement must fail.
DEPLOYED = "the deployed reading"
CONTROLS = {
    "1.4": {"M definite", "S of full rank"},
    "1.5": {"S of full rank"},
    "2.5": {"M maps the support into itself"},
    "3.4": {
        "classes that are not separable after erasure",
        "n > d, or a range that maps supp(x) into itself",
        "n > d, or an intercept outside the norm",
    },
    "3.5": {"an intercept, or b = 0"},
    "3.6": {"kernel equal to colsp(Sz)"},
    "4.2": {DEPLOYED},
    "4.3": {"head shrunk below 2 (1 - rho) / (2 - rho)"},
    "5.2": {"S = I (last line of the proof)", "P_z beta different from 0"},
    "5.3": {DEPLOYED},
    "6.1": {"P_A^T P_A different from P_B^T P_B"},
    "6.2": {"whitened features"},
    "8.6": {"Ty^T T^+ Sy of full rank"},
    "8.7": {"a probability of missing labels that depends on z alone"},
}


def _with_controls(item: Check, seen: set[str], *, disabled: str = "") -> Check:
    """Return a check that records its controls in `seen`.

    The residual of the control `disabled` is replaced by 0.
    """

    def run(bench: Bench, **formulas: Any) -> None:
        add_printed = bench.add_printed

        def watched(
            residual: object,
            tolerance: float = 0.0,
            *,
            violates: str | None = None,
            deployed: bool = False,
        ) -> None:
            control = DEPLOYED if deployed else violates
            if control is not None:
                seen.add(control)
            residual = 0 if control == disabled else residual
            add_printed(residual, tolerance, violates=violates, deployed=deployed)

        bench.add_printed = watched  # type: ignore[method-assign]
        item.run(bench, **formulas)

    return replace(item, run=run, mutants={})


@pytest.mark.parametrize("item", CHECKS, ids=[item.key for item in CHECKS])
def test_a_control_that_is_disabled_is_noticed(item: Check) -> None:
    seen: set[str] = set()
    assert run_check(_with_controls(item, seen), quick=True).verdict is item.expected
    assert seen == CONTROLS.get(item.key, set())  # no control is missing
    assert bool(seen) == (item.expected in (Verdict.CONDITIONAL, Verdict.DEPLOYED))
    for control in seen:
        outcome = run_check(_with_controls(item, set(), disabled=control), quick=True)
        assert outcome.verdict is None
        assert not outcome.reproduced


# Exact arithmetic and quadrature: tests by mathematical identities.


@given(st.lists(st.lists(st.integers(-3, 3), min_size=3, max_size=3), min_size=1, max_size=5))
@settings(deadline=None, max_examples=60)
def test_exact_linear_algebra_satisfies_its_definitions(rows: list[list[int]]) -> None:
    a = rational(rows)
    g = pinv(a)
    assert equal(a @ g @ a, a)
    assert equal(g @ a @ g, g)
    assert equal((a @ g).T, a @ g)
    assert equal((g @ a).T, g @ a)
    kernel = null_basis(a)
    assert is_zero(a @ kernel)
    assert kernel.shape[1] == a.shape[1] - rank(a)
    assert equal(projector(a), a @ g)
    assert equal(a @ solve(a, a), a)


def test_singular_and_inconsistent_systems_are_refused() -> None:
    with pytest.raises(ValueError, match="singular"):
        inverse(rational([[1, 2], [2, 4]]))
    with pytest.raises(ValueError, match="no solution"):
        solve(rational([[1], [1]]), rational([[1], [2]]))
    with pytest.raises(ValueError, match="singular"):
        oblique(rational([[1], [0]]), rational([[1], [0]]))


def test_infeasible_reference_problem_is_refused() -> None:
    c = _reference.Covariances(eye(2), rational([[1], [0]]), rational([[2], [0]]), zeros(2, 1))
    with pytest.raises(ValueError, match="singular"):
        _reference.splince(c)


@pytest.mark.parametrize("v", [0.05, 1.0, 30.0])
@pytest.mark.parametrize("a", [0.0, -3.0])
def test_quadrature_agrees_with_identities_within_its_bound(a: float, v: float) -> None:
    # E softplus(s) - E softplus(-s) = E s = a, and the mean curvature is even in a
    up, up_error = gaussian_mean(SOFTPLUS, a, v)
    down, down_error = gaussian_mean(SOFTPLUS, -a, v)
    assert abs(up - down - a) <= up_error + down_error
    assert up_error < 1e-25
    assert gaussian_mean(CURVATURE, a, v)[0] == pytest.approx(
        float(gaussian_mean(CURVATURE, -a, v)[0]), rel=1e-14
    )
    # Heat equation: the derivative of E softplus in v is half the mean curvature. The error of the
    # central difference is below h^2 / 6 times the third derivative.
    h = 1e-4 * v
    slope = (gaussian_mean(SOFTPLUS, a, v + h)[0] - gaussian_mean(SOFTPLUS, a, v - h)[0]) / (2 * h)
    assert abs(slope - gaussian_mean(CURVATURE, a, v)[0] / 2) < 1e-7


# The command line and the findings document.


def test_command_line_prints_verdicts_and_returns_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "2.4", "6"]) == 0
    text = capsys.readouterr().out
    assert "6 of 6 verdicts reproduced" in text
    assert "false as stated" in text


def test_command_line_fails_where_a_verdict_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REGISTRY, "2.3", _toy(key="2.3", expected=Verdict.FALSE))
    assert main(["--quick", "2.3"]) == 1
    assert "NOT REPRODUCED" in capsys.readouterr().out

    def fail(bench: Bench) -> None:
        raise ImportError("cannot import name 'splince'")

    monkeypatch.setitem(REGISTRY, "2.3", _toy(key="2.3", run=fail))
    assert main(["--quick", "2.3"]) == 1
    out = capsys.readouterr().out
    assert "COULD NOT RUN" in out
    assert "NOT REPRODUCED" not in out


def test_json_gives_evidence_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--json", "2.3"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["reproduced"] is True
    (row,) = report["checks"]
    assert row["verdict"] == "false as stated"
    assert row["caught"] == row["mutants"]
    assert row["title"] == "W~ is the covariance of x~"
    assert "misprint" in row["text"]


def test_quick_runs_the_statements_that_call_the_library(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def recorded(item: Check, **options: object) -> Outcome:
        seen.append(item.key)
        return Outcome(item, item.expected, 0.0, 0, (), (), 0.0)

    monkeypatch.setattr(report, "run_check", recorded)
    assert main(["--quick"]) == 0
    assert seen == [item.key for item in CHECKS if not item.paper]
    seen.clear()
    assert main([]) == 0
    assert seen == [item.key for item in CHECKS]
    seen.clear()
    assert main(["--quick", "5"]) == 0
    assert seen == ["5.1", "5.2", "5.3", "5.4"]


def test_unknown_number_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["9.9"])
    assert "no statement is numbered 9.9" in capsys.readouterr().err


def test_the_same_seed_gives_the_same_evidence() -> None:
    first, second = (run_check(REGISTRY["4.2"], seed=3, quick=True) for _ in range(2))
    assert (first.worst_ratio, first.cases, first.figures) == (
        second.worst_ratio,
        second.cases,
        second.figures,
    )


# FINDINGS.md and the registry.


def test_findings_and_registry_have_the_same_statements_and_verdicts() -> None:
    assert list(STATEMENTS) == [item.key for item in CHECKS]
    assert {k: s.verdict for k, s in STATEMENTS.items()} == {c.key: c.expected for c in CHECKS}
    headings = re.findall(r"^### (\S+)", DOCUMENT, flags=re.MULTILINE)
    assert headings == list(STATEMENTS), "an entry that the report cannot read"
    assert all(len(s.text) > 80 for s in STATEMENTS.values())


def test_the_table_of_verdicts_is_that_of_the_registry() -> None:
    rows = re.findall(r"^\| (\d\.\d+) \| (.+) \| ([^|]+) \| (\w+) \|$", DOCUMENT, re.MULTILINE)
    expected = []
    for item in CHECKS:
        title = STATEMENTS[item.key].title.replace("|", r"\|")
        kind = "paper" if item.paper else "library"
        expected.append((item.key, title, str(item.expected), kind))
    assert rows == expected


def test_every_section_is_a_file_and_defines_its_symbols_first() -> None:
    sections = re.findall(r"^## (\d)\. .+\n\n(.+)", DOCUMENT, flags=re.MULTILINE)
    assert [number for number, _ in sections] == list(
        dict.fromkeys(name[1] for name in report.MODULES)
    )
    assert [line for _, line in sections if not line.startswith("Symbols: ")] == []
    for item in CHECKS:
        assert item.run.__module__.startswith(f"proofs_check.s{item.key[0]}_")


def test_numbers_that_the_text_refers_to_exist() -> None:
    numbers = re.findall(r"(?<![\d.])[1-8]\.\d\d?(?!\d)", DOCUMENT)
    assert set(numbers) <= set(STATEMENTS)
