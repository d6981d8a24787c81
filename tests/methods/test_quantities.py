"""Integers that are quantities but were read as classes: erasing them takes much of x."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from problems import told

import splince_fast as sf
from splince_fast.exceptions import ManyClassesWarning


def rows(d: int, values: int, n: int = 3000) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Rows on which a quantity has a linear effect."""
    rng = np.random.default_rng(0)
    quantity = np.concatenate([np.arange(values), rng.integers(0, values, n - values)])
    return rng.normal(size=(n, d)) + 3 * (quantity / values)[:, None], quantity


def notes_of(method: Any, moments: Any, erase: str) -> tuple[sf.Projection, list[str]]:
    """The eraser of a method and its warnings, which its report states as well."""
    eraser, caught = told(method, moments, erase=erase)
    assert all(isinstance(entry, ManyClassesWarning) for entry in caught)
    assert eraser.report.warnings == tuple(map(str, caught))
    return eraser, list(map(str, caught))


@pytest.mark.parametrize("values", [62, 500])
@pytest.mark.parametrize("method", [sf.leace, sf.sal])
def test_ages_and_identifiers_in_eight_dimensions(method: Any, values: int) -> None:
    x, quantity = rows(8, values)
    moments = sf.Moments().update(x, {"age": quantity})
    sources: list[Any] = [moments] if method is sf.sal else [moments, moments.factored()]
    for source in sources:
        eraser, (note,) = notes_of(method, source, "age")
        assert eraser.rank == 8
        for part in (
            f"'age' was read as {values} classes", "8 of 8 dimensions", "100% of its variance",
            "kinds={'age': 'continuous'} or cast it to float",
        ):  # fmt: skip
            assert part in note
        assert note in str(eraser.report)
    # The remedies, and classes that are meant.
    for kinds, column, rank in (
        ({"age": "continuous"}, quantity, 1), ({}, quantity + 0.5, 1),
        ({"age": "classes"}, quantity, 8),
    ):  # fmt: skip
        eraser, notes = notes_of(method, sf.Moments(kinds=kinds).update(x, {"age": column}), "age")
        assert (eraser.rank, notes) == (rank, [])


def test_half_of_the_rank_or_of_the_variance() -> None:
    """30 classes take 29 dimensions."""
    x, quantity = rows(64, 30)
    x -= 3 * (quantity / 30)[:, None]
    for d, told_of in ((58, True), (59, False)):
        moments = sf.Moments().update(x[:, :d], {"ids": quantity})
        assert bool(notes_of(sf.leace, moments, "ids")[1]) == told_of
    # 29 of 64 dimensions, with a variance that classes carry.
    for size, told_of in ((1.0, True), (0.1, False)):
        moved = x + size * np.random.default_rng(1).normal(size=(30, 64))[quantity]
        eraser, notes = notes_of(sf.leace, sf.Moments().update(moved, {"ids": quantity}), "ids")
        assert eraser.report is not None
        assert (eraser.report.distortion > 0.5) == bool(notes) == told_of
    for values, told_of in ((24, False), (25, True)):  # few integers are classes
        x, quantity = rows(4, values)
        notes = notes_of(sf.leace, sf.Moments().update(x, {"grade": quantity}), "grade")[1]
        assert ("was read as" in notes[0]) == told_of
        assert ("removes all 4 dimensions" in notes[0]) != told_of


def test_estimator_and_shorthand_warn_as_well() -> None:
    x, quantity = rows(8, 62)
    for fit in (
        lambda: sf.LEACE().fit(x, concept=quantity).projection_,
        lambda: sf.erase(x, quantity)[1],
        lambda: sf.SAL().fit(x, concept=quantity).projection_,
    ):
        with pytest.warns(
            ManyClassesWarning, match="as 62 classes, and erasing takes 8 of 8"
        ) as seen:
            fit()
        assert seen[0].filename == __file__
    # Warnings are errors.
    sf.LEACE(kinds={"concept": "continuous"}).fit(x, concept=quantity).projection_  # noqa: B018
    sf.MeanProjection().fit(x, concept=quantity).projection_  # noqa: B018
