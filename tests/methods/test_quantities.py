"""Integers that are quantities but were read as classes: erasing them takes much of x."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import splince_fast as sf


def rows(d: int, values: int, n: int = 3000) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Rows on which a quantity has a linear effect."""
    rng = np.random.default_rng(0)
    quantity = np.concatenate([np.arange(values), rng.integers(0, values, n - values)])
    return rng.normal(size=(n, d)) + 3 * (quantity / values)[:, None], quantity


def notes_of(fit: Any) -> tuple[sf.Projection, list[str]]:
    """The eraser of a fit and its warnings, which its report states as well."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        eraser = fit()
    assert all(w.category is sf.exceptions.ManyClassesWarning for w in caught)
    assert all(w.filename == __file__ for w in caught)
    assert eraser.report.warnings == tuple(str(w.message) for w in caught)
    return eraser, [str(w.message) for w in caught]


@pytest.mark.parametrize("values", [62, 500])
@pytest.mark.parametrize("method", [sf.leace, sf.sal])
def test_ages_and_identifiers_in_eight_dimensions(method: Any, values: int) -> None:
    x, quantity = rows(8, values)
    moments = sf.Moments().update(x, {"age": quantity})
    sources: list[Any] = [moments] if method is sf.sal else [moments, moments.factored()]
    for source in sources:
        eraser, notes = notes_of(lambda source=source: method(source, erase="age"))
        assert eraser.rank == 8
        assert len(notes) == 1
        assert f"'age' was read as {values} classes" in notes[0]
        assert "8 of 8 dimensions" in notes[0]
        assert "100% of its variance" in notes[0]
        assert "kinds={'age': 'continuous'} or cast it to float" in notes[0]
        assert notes[0] in str(eraser.report)
    # The remedies, and classes that are meant.
    for kinds, column in (
        ({"age": "continuous"}, quantity), ({}, quantity + 0.5), ({"age": "classes"}, quantity),
    ):  # fmt: skip
        other = sf.Moments(kinds=kinds).update(x, {"age": column})
        eraser, notes = notes_of(lambda other=other: method(other, erase="age"))
        assert not notes
        assert eraser.rank == (1 if column.dtype == float or "continuous" in kinds.values() else 8)


def test_half_of_the_rank_or_of_the_variance() -> None:
    """30 classes take 29 dimensions."""
    x, quantity = rows(64, 30)
    x -= 3 * (quantity / 30)[:, None]
    for d, told in ((58, True), (59, False)):
        part = x[:, :d]
        moments = sf.Moments().update(part, {"ids": quantity})
        assert bool(notes_of(lambda m=moments: sf.leace(m, erase="ids"))[1]) == told
    # 29 of 64 dimensions, with a variance that classes carry.
    for size, told in ((1.0, True), (0.1, False)):
        moved = x + size * np.random.default_rng(1).normal(size=(30, 64))[quantity]
        moments = sf.Moments().update(moved, {"ids": quantity})
        eraser, notes = notes_of(lambda m=moments: sf.leace(m, erase="ids"))
        assert eraser.report is not None
        assert (eraser.report.distortion > 0.5) == bool(notes) == told


def test_few_integers_are_classes() -> None:
    for values, told in ((24, False), (25, True)):
        x, quantity = rows(4, values)
        moments = sf.Moments().update(x, {"grade": quantity})
        notes = notes_of(lambda m=moments: sf.leace(m, erase="grade"))[1]
        assert ("was read as" in notes[0]) == told
        assert ("removes all 4 dimensions" in notes[0]) != told


def test_estimator_and_shorthand_warn_as_well() -> None:
    x, quantity = rows(8, 62)
    for fit in (
        lambda: sf.LEACE().fit(x, concept=quantity).projection_,
        lambda: sf.erase(x, quantity)[1],
        lambda: sf.SAL().fit(x, concept=quantity).projection_,
    ):
        with pytest.warns(
            sf.exceptions.ManyClassesWarning, match="as 62 classes, and erasing takes 8 of 8"
        ):
            fit()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sf.LEACE(kinds={"concept": "continuous"}).fit(x, concept=quantity).projection_  # noqa: B018
        sf.MeanProjection().fit(x, concept=quantity).projection_  # noqa: B018
