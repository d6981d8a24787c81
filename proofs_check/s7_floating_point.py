"""Section 7: rounding errors of the library, on hard problems and on real activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mpmath  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

import splince_fast as sf
from proofs_check import _library, _reference
from proofs_check._check import Bench, Verdict, check
from proofs_check._families import (
    Sample,
    continuous_sample,
    invertible,
    problem,
    rotation,
    weight_matrix,
)
from proofs_check._library import Fitted
from proofs_check._linalg import Matrix, hstack, inverse, to_float
from proofs_check._reference import Covariances, Eraser
from proofs_check._rounding import UNIT, Rounding, rounding, tolerances, whitened_error

Floats = NDArray[np.float64]


def _mapped(c: Covariances, linear: Matrix) -> Covariances:
    """Return the moments of L x, where L is ``linear``."""
    return Covariances(linear @ c.s @ linear.T, linear @ c.sz, linear @ c.sy, linear @ c.mean)


def _recoded(sample: Sample, bench: Bench) -> Sample:
    """Return the data with recoded labels.

    z and y are mapped by invertible affine maps; y gets one redundant column.
    """
    z = to_float(sample.z) @ to_float(invertible(bench.rng, sample.z.shape[1])) + 7
    y = -3 * to_float(sample.y) + 1
    y = np.hstack([y, 2 * y[:, :1] - 5])
    recoded = continuous_sample(np.zeros((1, 1), int), z, y, sample.family)
    return replace(recoded, x=sample.x)


@check(
    "7.1",
    Verdict.HOLDS,
    mutants={
        "SAL for SPLINCE": {"closed": _reference.sal},
        "LEACE for SPLINCE": {"closed": _reference.leace},
        "SAL taken as equivariant": {"sal_map": lambda bench: invertible(bench.rng, 4)},
        "library: concept and task exchanged": {
            "fitted": lambda s: _library.splince(
                replace(s, z_labels=s.y_labels, y_labels=s.z_labels)
            )
        },
    },
)
def invariances(
    bench: Bench,
    *,
    closed: Eraser = _reference.splince,
    sal_map: Callable[[Bench], Matrix] = lambda bench: rotation(bench.rng, 4),
    fitted: Fitted = _library.splince,
) -> None:
    """Check exactly which changes of labels, features and S leave erasers or constraints unchanged.

    Library: erasers from two codings of the labels agree within the sum of both tolerances.
    """
    for i in bench.repeats(40, 10):
        c = problem(bench.rng, 4, 4, 1 + i % 2, 1)
        p = closed(c)
        coded = replace(
            c,
            sz=c.sz @ invertible(bench.rng, c.sz.shape[1]),
            sy=hstack(-2 * c.sy, 3 * c.sy),
            s=c.s * 7 / 6,
        )
        bench.add_printed(closed(coded) - p)
        linear = invertible(bench.rng, 4)
        bench.add_printed(closed(_mapped(c, linear)) - linear @ p @ inverse(linear))
        other = closed(replace(c, s=weight_matrix(bench.rng, 4, 4)))
        bench.add_printed(hstack(other @ c.sz, other @ c.sy - c.sy))
        linear = sal_map(bench)
        sal_of_mapped = _reference.sal(_mapped(c, linear))
        bench.add_corrected(
            sal_of_mapped - linear @ _reference.sal(c) @ inverse(linear), label="SAL, orthogonal L"
        )
    for sample in bench.samples(6, 2, ("full rank", "multi-output", "one-hot", "n <= d")):
        recoded = _recoded(sample, bench)
        c = sample.covariances
        tolerance = tolerances(sample)[0] + tolerances(recoded)[0]
        gap = whitened_error(c, fitted(sample), _library.splince(recoded))
        bench.add_corrected(gap, tolerance, label=f"library, {sample.family}")


def _hard_sample(rng: np.random.Generator, d: int, kappa: float, gap: float) -> Sample:
    """Draw data with condition number kappa, whose whitened concept and task are nearly parallel.

    The angle between the two whitened spaces is about ``gap``.
    """
    n = 3 * d
    scale = np.geomspace(1, kappa**-0.5, d)
    x = rng.normal(size=(n, d)) * scale @ np.linalg.qr(rng.normal(size=(d, d)))[0]
    direction = rng.normal(size=(d, 2)) / scale[:, None]
    white = x @ np.linalg.qr(x.T @ x)[0]
    z = white @ direction[:, :1] / np.linalg.norm(white @ direction[:, :1]) + 0.1 * rng.normal(
        size=(n, 1)
    )
    y = z + gap * rng.normal(size=(n, 1))
    return Sample("hard", _exact(x), _exact(z), _exact(y), z, y)


def _exact(a: Floats) -> Matrix:
    """Convert float64 numbers to mpf numbers, exactly."""
    out = np.empty(a.shape, dtype=object)
    for index, value in np.ndenumerate(a):
        out[index] = mpmath.mpf(float(value))
    return out


def _library_matrix(sample: Sample) -> Matrix:
    """Return the library's SPLINCE in 60-digit numbers."""
    return _exact(np.asarray(_library.fit("splince", sample).matrix(), dtype=np.float64))


def _without_smallest_eigenvalue(sample: Sample) -> Matrix:
    """Return SPLINCE computed without the smallest eigenvalue of S and its eigenvector."""
    x = to_float(sample.x)
    centred = x - x.mean(0)
    values, vectors = np.linalg.eigh(centred.T @ centred / len(x))
    w = (vectors[:, 1:] / np.sqrt(values[1:])).T
    a, b = (w @ centred.T @ v / len(x) for v in (to_float(sample.z), to_float(sample.y)))
    q = np.linalg.qr(b)[0]
    r = a - q @ (q.T @ a)
    root = vectors[:, 1:] * np.sqrt(values[1:])
    return _exact(np.eye(x.shape[1]) - root @ a @ np.linalg.solve(r.T @ a, r.T) @ w)


@check(
    "7.2",
    Verdict.HOLDS,
    mutants={
        "smallest eigendirection cut off": {"fitted": _without_smallest_eigenvalue},
        "transpose": {"fitted": lambda s: _library_matrix(s).T},
        "single precision": {
            "fitted": lambda s: _exact(
                to_float(_library_matrix(s)).astype(np.float32).astype(np.float64)
            )
        },
    },
)
def high_precision_error(
    bench: Bench, *, fitted: Callable[[Sample], Matrix] = _library_matrix
) -> None:
    """Compare the library with 60-digit arithmetic.

    The error of the 60-digit moments is about 1e-55.
    """
    grid = [(10.0, 1.0), (1e3, 1.0), (1e5, 0.3), (1e7, 0.1), (10.0, 1e-2), (1e4, 1e-3), (10, 1e-4)]
    with mpmath.workdps(60):
        for i in bench.repeats(3, 1):
            for kappa, gap in grid:
                sample = _hard_sample(bench.rng, 6 + 3 * (i % 2), kappa, gap)
                c = sample.covariances
                exact = _reference.splince(c)
                tolerance, *_ = tolerances(sample)
                bench.add_printed(whitened_error(c, fitted(sample), exact), tolerance)


@dataclass(frozen=True, eq=False)
class Real:
    """Shipped activations: moments of the library, and reference values from the rows.

    ``std`` holds the standard deviations of the features. ``sz`` and ``sy`` are Cov(x, z) and
    Cov(x, y) of standardised features and labels. ``root`` is R with R^T R = Cov(x). ``a`` and
    ``b`` are unit vectors along R^{-T} Sz and R^{-T} Sy. ``leace`` is the library's LEACE in
    whitened coordinates. ``bounds`` holds condition numbers and tolerances.
    """

    rows: int
    moments: sf.Moments
    std: Floats
    sz: Floats
    sy: Floats
    root: Floats
    a: Floats
    b: Floats
    leace: Floats
    bounds: Rounding

    def white(self, p: Floats) -> Floats:
        """Return R^{-T} P R^T, the map P in whitened coordinates."""
        return np.asarray(np.linalg.solve(self.root.T, p @ self.root.T))


@cache
def _professions(aligned: bool) -> Real:
    """Load the activations and compute the reference values, cached for all mutants."""
    x, z, y = _library.professions(aligned)
    z, y = z.reshape(-1, 1), y.reshape(-1, 1)
    centred, std = x - x.mean(0, dtype=np.float64), x.std(0, dtype=np.float64)
    q, r = np.linalg.qr(centred / np.sqrt(len(x)))
    standardised = [(v - v.mean(0))[:, 0] / v.std(0) for v in (z, y)]
    sz, sy = (centred.T @ v / len(x) / std for v in standardised)
    a, b = (q.T @ v for v in standardised)
    moments = _library.accumulated([(x, z, y)])
    leace = np.linalg.solve(r.T, _real_leace(moments) @ r.T)
    a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
    return Real(len(x), moments, std, sz, sy, r, a, b, leace, rounding(x, z, y))


def _real_splince(moments: sf.Moments) -> Floats:
    return np.asarray(sf.splince(moments, erase="z", keep="y").matrix(), dtype=np.float64)


def _real_leace(moments: sf.Moments) -> Floats:
    return np.asarray(sf.leace(moments, erase="z").matrix(), dtype=np.float64)


def _diagonal_splince(moments: sf.Moments) -> Floats:
    """Return SPLINCE in float64, with diag(S) in place of S."""
    s = np.diag(np.asarray(moments.covariance(ddof=0)))
    sz, sy = (np.asarray(moments.cross_covariance(name, ddof=0)) for name in "zy")
    gain = (sy.T @ (sz / s[:, None])) / (sy.T @ (sy / s[:, None]))
    direction = (sz - sy * gain) / s[:, None]
    return np.asarray(np.eye(len(s)) - sz @ direction.T / (sz.T @ direction))


@check(
    "7.3",
    Verdict.HOLDS,
    mutants={
        "transpose": {"fitted": lambda m: _real_splince(m).T},
        "LEACE for SPLINCE": {"fitted": _real_leace},
        "diagonal of S for S": {"fitted": _diagonal_splince},
        "task scaled within the tolerance of the whitened figures": {
            "fitted": lambda m: _real_splince(m) * (1 + 1e-10)
        },
        "1 / (1 + rho) for 1 / (1 - rho)": {"inflation": lambda rho: 1 / (1 + rho)},
    },
)
def real_activations(
    bench: Bench,
    *,
    fitted: Callable[[sf.Moments], Any] = _real_splince,
    inflation: Callable[[float], float] = lambda rho: 1 / (1 - rho),
) -> None:
    """Compare the library with reference values computed from the rows of real activations.

    Constraints are checked for standardised features and labels, where tolerances do not depend on
    the condition number. z and y have one column each; eps = 2^-52. The relative residual may be
    8 d eps |P|^2 for a covariance, and 8 d eps |P|^3 for P P - P. The tolerance of a covariance has
    a second term, because the accumulated Sz differs from the Sz of the rows: at most gamma per
    entry, times |P| + 1.

    The other values are whitened by a QR factorisation of the rows. They have the tolerance of 1.1,
    which grows with the condition number.
    """
    for aligned in (False, True):
        real = _professions(aligned)
        p, d = fitted(real.moments), len(real.std)
        scaled = p * real.std / real.std[:, None]
        amplification = float(np.linalg.norm(scaled, 2))
        relative = 8 * d * 2 * UNIT * amplification**2
        accumulated = (1 + amplification) * real.bounds.gamma * np.sqrt(d)
        for residual, cov in ((scaled @ real.sz, real.sz), (scaled @ real.sy - real.sy, real.sy)):
            bench.add_printed(
                np.linalg.norm(residual), relative * np.linalg.norm(cov) + accumulated
            )
        bench.add_printed(np.linalg.norm(scaled @ scaled - scaled), relative * amplification)
        a, b, tolerance = real.a, real.b, real.bounds.splince
        oblique, orthogonal = real.white(p), real.leace
        rho = float(a @ b) ** 2
        e, e_l = np.eye(d) - oblique, np.eye(d) - orthogonal
        span = np.linalg.qr(np.column_stack([a, b]))[0]
        bench.add_corrected(np.linalg.norm(e - (e @ span) @ span.T), tolerance, label="certificate")
        ratio = np.linalg.norm(e) / np.linalg.norm(e_l)
        bench.add_corrected(ratio - np.sqrt(inflation(rho)), 2 * tolerance, label="distortion")
        repair = np.outer(e_l @ b, b - a * (a @ b)) / (1 - rho)
        gap = np.linalg.norm(oblique - orthogonal - repair)
        bench.add_corrected(gap, 3 * tolerance, label="repair of LEACE")
        frozen = oblique.T @ b - orthogonal.T @ b * inflation(rho)
        bench.add_corrected(np.linalg.norm(frozen), 3 * tolerance, label="proportional scores")
        bench.require_quoted(
            f"{real.rows} rows", f"{d} features", f"{rho:.4f}", f"{inflation(rho):.4f}"
        )
