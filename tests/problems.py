"""Problems with a concept and a task, their conditioning, and any of the methods by name.

Tolerances: two float64 computations of E differ by at most the sum of their errors. With kappa the
condition of S in the units at hand, s the sine of the smallest principal angle, q the condition of
the whitened cross-covariances and d the width, each of them errs by 8 d eps (kappa + q) / s where
it is backward stable, and by 8 d eps (kappa + q^2) / s^2 where it forms Gram matrices.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from hypothesis import settings
from naive_model import FUZZ
from numpy.typing import NDArray

import splince_fast as sf

Float = NDArray[np.float64]
EPS = float(np.finfo(np.float64).eps)
many = settings(max_examples=30 * max(FUZZ, 1))
METHODS = ["splince", "leace", "sal", "sal that keeps", "mean_projection"]


def ignored(category: str, text: str = "") -> pytest.MarkDecorator:
    """Mark that ignores the warnings of a class of the package whose text starts with `text`."""
    return pytest.mark.filterwarnings(f"ignore:{text}:splince_fast.exceptions.{category}")


# For data whose condition numbers or units exceed the digits of float32.
sensitive = ignored("PrecisionWarning", "the eraser is sensitive")


def told(call: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, list[Any]]:
    """The result of a call, and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call(*arguments, **options)
    return result, [entry.message for entry in caught]


@dataclass
class Data:
    """Rows with a concept of kz classes and a task of ky columns."""

    x: Float
    z: NDArray[np.int64]
    y: Float

    def moments(self, dtype: Any = np.float64) -> sf.Moments:
        return sf.Moments().update(self.x.astype(dtype), {"z": self.z, "y": self.y})

    def covariances(self) -> tuple[Float, Float, Float]:
        """S, Sz, Sy by two passes, each class an indicator column."""
        centred = self.x - self.x.mean(axis=0)
        hot = np.eye(self.z.max() + 1)[self.z]
        return tuple(  # type: ignore[return-value]
            centred.T @ (labels - labels.mean(axis=0)) / len(centred)
            for labels in (self.x, hot, self.y)
        )


def draw_data(
    seed: int, n: int = 400, d: int = 8, kz: int = 3, ky: int = 2, kappa: float = 100.0,
    mean: float = 3.0,
) -> Data:  # fmt: skip
    rng = np.random.default_rng(seed)
    latent = rng.normal(size=(n, d))
    z = np.argmax(latent[:, :kz] + rng.normal(size=(n, kz)), axis=1)
    z[:kz] = np.arange(kz)
    y = latent @ rng.normal(size=(d, ky)) + z[:, None] + rng.normal(size=(n, ky))
    basis = [np.linalg.qr(rng.normal(size=(d, d)))[0] for _ in range(2)]
    x = latent @ (basis[0] * np.geomspace(1, kappa**-0.5, d)) @ basis[1]
    return Data(x + mean * rng.normal(size=d) * x.std(), z, y)


def conditions(s: Float, sz: Float, sy: Float) -> tuple[float, float, float]:
    """kappa, q and s of the problem on the support of x."""
    values, vectors = np.linalg.eigh(s)
    kept = values > len(s) * 8 * EPS * values[-1]
    root = vectors[:, kept] / np.sqrt(values[kept])
    bases, q = [], 1.0
    for span in (sz, sy):
        u, sizes, _ = np.linalg.svd(root.T @ span, full_matrices=False)
        # One-hot columns are redundant: their last singular value is rounding.
        real = sizes > 1e-9 * sizes[0]
        q = max(q, float(sizes[0] / sizes[real][-1]))
        bases.append(u[:, real])
    cosine = np.linalg.svd(bases[0].T @ bases[1], compute_uv=False).max(initial=0.0)
    return float(values[-1] / values[kept][0]), q, float(np.sqrt(1 - min(cosine, 1.0) ** 2))


def erase(method: str, moments: sf.Moments, z: Any = "z", y: Any = "y", **options: Any) -> Any:
    """Any of the methods by name, with what it erases and, where it can, keeps."""
    if method == "splince":
        return sf.splince(moments, erase=z, keep=y, **options)
    if method == "sal that keeps":
        return sf.sal(moments, erase=z, keep=y, **options)
    plain = {"leace": sf.leace, "sal": sf.sal, "mean_projection": sf.mean_projection}
    return plain[method](moments, erase=z, **options)


def report(eraser: sf.Projection) -> sf.Report:
    assert eraser.report is not None
    return eraser.report


def within_bounds(figures: Any) -> bool:
    """Whether every residual of a report is at most its rounding bound."""
    return all(v.residual <= v.bound for v in figures.variables)


def moved(clean: Float, x: Float) -> float:
    """E|P x - x|^2 over the variance of x, from the rows."""
    return float(((clean - x) ** 2).sum() / ((x - x.mean(axis=0)) ** 2).sum())


def covariance(x: NDArray[Any], labels: Any) -> Float:
    """Cov(x, v) of columns, or of the indicators of all classes."""
    labels = np.asarray(labels)
    columns = labels if labels.dtype.kind == "f" else indicators(labels)
    columns = columns.reshape(len(x), -1)
    return np.asarray((x - x.mean(axis=0)).T @ (columns - columns.mean(axis=0)) / len(x))


def slack(data: Data, s: Float | None = None) -> float:
    """Relative error of E from the rounding of the covariances of n rows.

    Each covariance errs by gamma = 4 sqrt(n + d) eps (1 + |mean| / std) of its deviations (random
    roundings), whitening multiplies that by kappa, and the projection by q / s^2; d for norms.
    """
    given_s, sz, sy = data.covariances()
    kappa, q, sine = conditions(given_s if s is None else s, sz, sy)
    n, d = data.x.shape
    offset = float(np.max(np.abs(data.x.mean(axis=0)) / data.x.std(axis=0)))
    return 4 * (n + d) ** 0.5 * EPS * (1 + offset) * d * kappa * q / sine**2


def indicators(labels: NDArray[Any]) -> Float:
    return (labels[:, None] == np.unique(labels)).astype(np.float64)


def cross(x: NDArray[Any], columns: NDArray[Any]) -> NDArray[np.longdouble]:
    """Cov(x, v) by two passes in extended precision."""
    wide, v = x.astype(np.longdouble), columns.astype(np.longdouble)
    return np.asarray((wide - wide.mean(axis=0)).T @ (v - v.mean(axis=0)) / len(x))


def removed(eraser: sf.Projection, span: NDArray[np.longdouble]) -> NDArray[np.longdouble]:
    """(I - P) span in extended precision."""
    left, right = eraser.left.astype(np.longdouble), eraser.right.astype(np.longdouble)
    return np.asarray(left @ (right.T @ span))


def residual(
    x: NDArray[Any], columns: Float, eraser: sf.Projection, kept: bool = False
) -> tuple[float, float]:
    """The part of Cov(x, v) that is left, or lost if it is kept, and what rounding explains of it.

    Features are in units of their deviations. With |P| in these units and k columns of labels the
    bound is 8 d k eps |P|^2: d for the lengths of the sums, 8 for the handful of steps, whatever
    the condition number. Cross-covariances are sums over n rows and carry sqrt(n) roundings of the
    deviations, at most 8 sqrt(n) eps |P| over their own size; this part is added.
    """
    deviations = np.asarray(x.astype(np.longdouble).std(axis=0), np.float64)
    units = np.where(deviations > 0, deviations, 1.0)
    scaled = (eraser.left / units[:, None]) @ (eraser.right * units[:, None]).T
    size = max(1.0, float(np.linalg.norm(scaled, 2)))
    span = cross(x, columns)
    lost = removed(eraser, span)
    found, whole = (
        float(np.linalg.norm(np.asarray(part / units[:, None], np.float64)))
        for part in (lost if kept else span - lost, span)
    )
    sums = len(x) ** 0.5 * float(np.linalg.norm(columns.std(axis=0))) * size / whole
    return found / whole, 8 * EPS * (x.shape[1] * columns.shape[1] * size**2 + sums)


def assert_constraints(x: NDArray[Any], z: Float, y: Float | None, eraser: sf.Projection) -> None:
    """Cov(P x, z) = 0 and Cov(P x, y) = Cov(x, y), to rounding, of columns z and y."""
    found, bound = residual(x, z, eraser)
    assert found <= bound
    if y is not None:
        found, bound = residual(x, y, eraser, kept=True)
        assert found <= bound


def change(eraser: sf.Projection) -> Float:
    return np.eye(eraser.n_features) - eraser.matrix()


def assert_same(found: Float, expected: Float, bound: float) -> None:
    assert np.linalg.norm(found - expected) <= bound * np.linalg.norm(expected)


def two_labels(rng: np.random.Generator, x: Float) -> dict[str, Any]:
    z = (x[:, 0] + rng.normal(size=len(x)) > 0).astype(int)
    y = (x[:, 1] + 0.5 * z + rng.normal(size=len(x)) > 0).astype(int)
    return {"z": z, "y": y}


def assert_erased_in_mean(clean: Float, z: NDArray[np.int64]) -> None:
    means = np.array([clean[z == c].mean(axis=0) for c in np.unique(z)])
    assert np.ptp(means, axis=0).max() < 1e-11


def least_change(s: Float, span: Float, target: Float, weight: Float) -> Float:
    """argmin tr(M E S E^T) subject to E span = target for M = `weight`: all entries as unknowns.

    Neither whitening nor a pseudo-inverse of S, which may be singular: a particular solution plus
    the null space of the constraints, as the least squares of one linear system.
    """
    start = np.linalg.lstsq(span.T, target.T, rcond=1e-9)[0].T
    free = scipy.linalg.null_space(span.T, rcond=1e-9)
    # E = start + Y free^T; the gradient M (start S + Y free^T S) free vanishes.
    hessian = np.kron(free.T @ s @ free, weight)
    gradient = (weight @ start @ s @ free).T
    y = np.linalg.lstsq(hessian, -gradient.reshape(-1), rcond=1e-12)[0].reshape(gradient.shape)
    return np.asarray(start + y.T @ free.T)
