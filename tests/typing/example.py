"""The public API as another project sees it: for strict type checkers, never run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import splince_fast as sf
from splince_fast import evaluation, sources


def fitted(X: NDArray[np.float32], z: NDArray[np.int64], y: NDArray[np.int64]) -> sf.Projection:
    """Moments, a method, and a report."""
    moments: sf.Moments = sf.Moments()
    moments.update(X, {"z": z, "y": y})
    eraser: sf.Projection = sf.splince(moments + sf.Moments(), erase="z", keep="y")
    report: sf.Report | None = eraser.report
    if report is not None:
        distortion: float | None = report.distortion
        print(distortion, [variable.residual for variable in report.variables])
    return eraser


def from_file(path: Path) -> sf.Projection:
    """A source, read once."""
    source: sources.Source = sources.from_parquet(path, "embedding", labels=["z"])
    return sf.leace(sf.Moments.from_blocks(source), erase="z", shrinkage="oas")


def by_class(parts: dict[str, sf.Moments], y: NDArray[np.int64], z: NDArray[np.int64]) -> float:
    """Mappings whose keys are class names of one type."""
    sf.quadratic(parts, erase="z")
    return evaluation.group_accuracy(y, y, groups=z).worst.accuracy


def misspelt() -> object:
    """Names that a package lacks are reported, and this comment is needed."""
    return evaluation.comapre  # type: ignore[attr-defined]


def refused(moments: sf.Moments) -> str:
    """Errors are one family."""
    try:
        sf.sal(moments, erase="z")
    except sf.SplinceError as error:
        return str(error)
    return ""


def compared(X: NDArray[np.float32], z: NDArray[np.int64], y: NDArray[np.int64]) -> float:
    """A comparison and one of its means."""
    result: evaluation.Comparison = evaluation.compare(X, task=y, concept=z, n_seeds=2)
    return result.mean("probe_accuracy", eraser="LEACE")


def pipeline(X: NDArray[np.float32], z: NDArray[np.int64]) -> sf.LEACE:
    """An estimator."""
    return sf.LEACE().fit(X, concept=z)
