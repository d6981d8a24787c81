"""The library under test, through its public interface only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

import splince_fast as sf
from proofs_check._families import Sample
from proofs_check._linalg import Matrix, rational

Fitted = Callable[[Sample], Matrix]


def accumulated(blocks: Iterable[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]) -> sf.Moments:
    """One pass over blocks (x, z, y). Every use of the library begins here."""
    blocks = iter(blocks)
    first = next(blocks)
    # Floats are numbers, also where a small sample has few and whole values.
    kinds = {k: "continuous" for k, v in zip("zy", first[1:], strict=True) if v.dtype.kind == "f"}
    out = sf.Moments(kinds=kinds)
    for x, z, y in chain([first], blocks):
        out.update(x, {"z": z, "y": y})
    return out


def moments(sample: Sample) -> sf.Moments:
    """One pass over a sample, in two blocks."""
    half = len(sample.x) // 2
    columns = (sample.features, sample.z_labels, sample.y_labels)
    return accumulated(
        (x, z, y)
        for part in (slice(None, half), slice(half, None))
        for x, z, y in [[column[part] for column in columns]]
    )


def fit(method: str, sample: Sample, **options: Any) -> sf.Projection:
    """Eraser of the named method: splince, leace, sal or mean_projection."""
    kept = {"keep": "y"} if method == "splince" else {}
    fitted: sf.Projection = getattr(sf, method)(moments(sample), erase="z", **kept, **options)
    return fitted


def report(sample: Sample) -> sf.Report:
    """The report of the library's SPLINCE."""
    made = fit("splince", sample).report
    if made is None:
        raise ValueError("the eraser carries no report")
    return made


def splince(sample: Sample, **options: Any) -> Matrix:
    """The library's SPLINCE projector, its float64 entries taken as exact numbers."""
    return rational(fit("splince", sample, **options).matrix())


def leace(sample: Sample, **options: Any) -> Matrix:
    """The library's LEACE projector."""
    return rational(fit("leace", sample, **options).matrix())


def sal(sample: Sample) -> Matrix:
    """The library's SAL projector."""
    return rational(fit("sal", sample).matrix())


def mean_projection(sample: Sample) -> Matrix:
    """The library's mean projection."""
    return rational(fit("mean_projection", sample).matrix())


def repaired(sample: Sample, method: str = "leace", **options: Any) -> Matrix:
    """The library's repair of its own eraser's rows, after that eraser: B P."""
    before, eraser = moments(sample), fit(method, sample)
    after = accumulated([(eraser(sample.features), sample.z_labels, sample.y_labels)])
    return rational((sf.repair(after, before=before, keep="y", **options) @ eraser).matrix())


def professions(aligned: bool) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Shipped real activations with the stereotype score (erased) and the factual score (kept).

    Over all nouns the two scores are uncorrelated by design; ``aligned`` leaves out the nouns
    whose scores have opposite signs, which makes them correlate.
    """
    from splince_fast.experiments.demo.professions import load

    data = load()
    z, y = data.stereotype[data.noun_index], data.factual[data.noun_index]
    rows = z * y >= 0 if aligned else np.ones(len(z), dtype=bool)
    return data.activations[rows], z[rows], y[rows]
