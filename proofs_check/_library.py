"""Calls of the library under test, through its public interface only."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

import splince_fast as sf
from proofs_check._families import Sample
from proofs_check._linalg import Matrix, eye, hstack, rational, zeros

Fitted = Callable[[Sample], Matrix]


def accumulated(
    blocks: Iterable[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]], **options: Any
) -> sf.Moments:
    """Return the moments of blocks (x, z, y)."""
    blocks = iter(blocks)
    first = next(blocks)
    # Declare float labels continuous; the library would take few distinct integers for classes.
    kinds = {k: "continuous" for k, v in zip("zy", first[1:], strict=True) if v.dtype.kind == "f"}
    out = sf.Moments(kinds=kinds, **options)
    for x, z, y in chain([first], blocks):
        out.update(x, {"z": z, "y": y})
    return out


def moments(sample: Sample) -> sf.Moments:
    """Return the moments of a sample, accumulated in two blocks."""
    half = len(sample.x) // 2
    columns = (sample.features, sample.z_labels, sample.y_labels)
    return accumulated(
        (x, z, y)
        for part in (slice(None, half), slice(half, None))
        for x, z, y in [[column[part] for column in columns]]
    )


def fit(method: str, sample: Sample, **options: Any) -> sf.Projection:
    """Fit an eraser; the method is splince, leace, sal or mean_projection."""
    keep = {"keep": "y"} if method == "splince" else {}
    fitted: sf.Projection = getattr(sf, method)(moments(sample), erase="z", **keep, **options)
    return fitted


def report(sample: Sample) -> sf.Report:
    """Return the library's report on SPLINCE."""
    result = fit("splince", sample).report
    if result is None:
        raise ValueError("the eraser carries no report")
    return result


def splince(sample: Sample, **options: Any) -> Matrix:
    """Return the library's SPLINCE projector; its float64 entries are converted to fractions."""
    return rational(fit("splince", sample, **options).matrix())


def leace(sample: Sample, **options: Any) -> Matrix:
    """Return the library's LEACE projector in fractions."""
    return rational(fit("leace", sample, **options).matrix())


def sal(sample: Sample) -> Matrix:
    """Return the library's SAL projector in fractions."""
    return rational(fit("sal", sample).matrix())


def mean_projection(sample: Sample) -> Matrix:
    """Return the library's mean projection in fractions."""
    return rational(fit("mean_projection", sample).matrix())


def repaired(sample: Sample, method: str = "leace", **options: Any) -> Matrix:
    """Return B P, where P is the library's eraser and B its repair, fitted to erased rows."""
    before, eraser = moments(sample), fit(method, sample)
    after = accumulated([(eraser(sample.features), sample.z_labels, sample.y_labels)])
    return rational((sf.repair(after, before=before, keep="y", **options) @ eraser).matrix())


def with_labels(sample: Sample, keep: str | None = "y", **options: Any) -> Matrix:
    """Return E of the library's oracle eraser.

    The eraser is r(x, z) = x - E (w - mean w) with w = (x, one-hot z).
    """
    by_class = accumulated([(sample.features, sample.z_labels, sample.y_labels)], by="z")
    eraser = sf.oracle(by_class, erase="z", keep=keep, missing="raise", **options)
    (shift,) = eraser.shifts
    first = [int(np.argmax(sample.z_labels == name)) for name in shift.classes or ()]
    order = [int(np.argmax(sample.z[i])) for i in first]
    b, table = rational(eraser.after.matrix()), zeros(len(order), sample.x.shape[1])
    table[order] = rational(shift.matrix)
    return hstack(eye(len(b)) - b, b @ table.T)


def quadratic(sample: Sample, keep: str | None = "y", **options: Any) -> NDArray[np.float64]:
    """Return the maps of the library's quadratic eraser, by sorted class."""
    x, z, y = sample.features, sample.z_labels[:, 0].astype(int), sample.y_labels
    parts = {int(c): accumulated([(x[z == c], z[z == c], y[z == c])]) for c in np.unique(z)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sf.exceptions.UnseenRowsWarning)
        eraser = sf.quadratic(parts, erase="z", keep=keep, **options)
    return np.array(eraser.maps)


def professions(aligned: bool) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return shipped activations, stereotype scores (to erase) and factual scores (to keep).

    Each row is an activation at a profession noun. The two scores are uncorrelated over all nouns.
    With ``aligned``, nouns whose scores have opposite signs are left out; the scores then
    correlate.
    """
    from splince_fast.demo.data import load

    data = load()
    z, y = data.stereotype[data.noun_index], data.factual[data.noun_index]
    rows = z * y >= 0 if aligned else np.ones(len(z), dtype=bool)
    return data.activations[rows], z[rows], y[rows]


def certified(
    x: NDArray[Any],
    z: NDArray[Any],
    *,
    by: str | None = "z",
    y: NDArray[Any] | None = None,
    delta: float = 0.05,
) -> tuple[NDArray[Any], float]:
    """Return the library's LEACE matrix for a two-class concept, and its certificate."""
    eraser = sf.leace(accumulated([(x, z, z if y is None else y)], by=by), erase="z")
    if eraser.report is None:
        raise ValueError("the eraser carries no report")
    return eraser.matrix(), eraser.report.certificate(delta)["z"]
