"""Figure of the profession experiment: coefficients, and the geometry of the erasers.

An eraser E x + P (x - E x) of the score z that keeps the score y changes the states x only in the
plane spanned by Cov(x, z) and Cov(x, y). P maps this plane to itself, and is the identity on the
part of x - E x that is uncorrelated with the best linear predictions of both scores from x. A
drawing of the plane thus shows the complete map.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import numpy as np

from splince_fast._runtime.arguments import require
from splince_fast.demo.data import ProfessionData
from splince_fast.demo.experiment import METHODS, Float, Results, accumulate, fit_eraser
from splince_fast.demo.table import odds_factor
from splince_fast.methods import leace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

# Colours of Okabe and Ito, safe for colour-blind readers.
_STEREOTYPE: Final = "#D55E00"
_FACTUAL: Final = "#0072B2"
_GENDERS: Final = (
    (-1.0, "#CC79A7", "female"),
    (0.0, "#999999", "neither"),
    (1.0, "#56B4E9", "male"),
)


class Plane:
    """The plane spanned by Cov(x, z) and Cov(x, y), in which erasers change the states."""

    z: Float  # (n,), scores of the prompts
    y: Float
    states: Float  # (n, 2), part of x - E x in the plane, in an orthonormal basis of the plane
    # (n, 2), the same points in coordinates with unit covariance; the first axis is Cov(x, z).
    whitened: Float
    erased: dict[str, Float]  # `states` after erasure by "SPLINCE" and by "LEACE"
    cosine: float  # of the angle between Cov(x, z) and Cov(x, y) after whitening

    def __init__(self, data: ProfessionData, results: Results) -> None:
        rows = results.splits[0].train
        moments = accumulate(data, rows)
        self.z, self.y = (s[data.noun_index[rows]] for s in (data.stereotype, data.factual))
        centred = data.activations[rows] - moments.mean
        # For one score, LEACE subtracts left right^T (x - E x). right^T x is proportional to the
        # best linear prediction of the score from x, and left to Cov(x, score). Predictions with
        # unit variance have the covariances left * scale with x.
        erasers = [leace(moments, erase=name) for name in ("stereotype", "factual")]
        covariances = np.concatenate([eraser.left for eraser in erasers], axis=1)
        predictions = centred @ np.concatenate([eraser.right for eraser in erasers], axis=1)
        scale = predictions.std(axis=0)
        predictions, covariances = predictions / scale, covariances * scale
        scores = np.stack([self.z, self.y], axis=1)
        signs = np.sign(np.sum(predictions * (scores - scores.mean(axis=0)), axis=0))
        predictions, covariances = predictions * signs, covariances * signs
        self.cosine = float(np.mean(predictions[:, 0] * predictions[:, 1]))
        # Gram-Schmidt turns the two predictions, which have unit variance, into coordinates with
        # unit covariance.
        cholesky = np.array([[1.0, self.cosine], [0.0, np.sqrt(1 - self.cosine**2)]])
        self.whitened = predictions @ np.linalg.inv(cholesky)
        whitened_covariances = covariances @ np.linalg.inv(cholesky)
        basis, triangle = np.linalg.qr(covariances)
        basis = basis * np.sign(np.diag(triangle))  # both covariances point along their axes
        self.states = self.whitened @ (basis.T @ whitened_covariances).T
        self.erased = {}
        for method in ("SPLINCE", "LEACE"):
            eraser = fit_eraser(method, moments)
            removed = basis.T @ eraser.left @ (eraser.right.T @ basis)
            self.erased[method] = self.states - self.states @ removed.T

    def covariance(self, points: Float, score: Float) -> Float:
        """Return the covariance of points in the plane with the standardised score, (2,)."""
        standardised = (score - score.mean()) / score.std()
        return np.asarray(standardised @ points / len(points))


def draw(data: ProfessionData, runs: list[Results], path: str | os.PathLike[str]) -> None:
    """Write a PNG file with the coefficients of all runs and the geometry of the last run."""
    figure = require("matplotlib.figure", "demo").Figure(figsize=(12.5, 6.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.15), wspace=0.04)
    axes = np.ravel(left.subplots(len(runs), 1, sharex=True))
    for ax, results in zip(axes, runs, strict=True):
        _coefficients(ax, results)
    axes[-1].set_xlabel("factor on the odds of he to she per unit of score, exp(β)")
    left.suptitle(f"Dependence of he or she on the two scores,\n{data.model}", fontsize=11)
    _legend(left, axes[0])
    _geometry(right, Plane(data, runs[-1]))
    figure.savefig(path, dpi=150, format="png")


def _legend(subfigure: SubFigure, ax: Axes) -> None:
    """Add the legend of `ax` below all axes of `subfigure`."""
    handles, labels = ax.get_legend_handles_labels()
    subfigure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9
    )


def _coefficients(ax: Axes, results: Results) -> None:
    """Draw the coefficients of both scores with their intervals, one row per method."""
    for field, colour, marker, offset in (
        ("stereotype", _STEREOTYPE, "s", -0.14),
        ("factual", _FACTUAL, "o", 0.14),
    ):
        factors = [odds_factor(results, method, field) for method in METHODS]
        means = np.array([value.mean for value in factors])
        limits = np.array([(value.low, value.high) for value in factors]).T
        ax.errorbar(
            means, np.arange(len(factors)) + offset, xerr=np.abs(limits - means), fmt=marker,
            color=colour, capsize=3, label=f"{field} score, 95 % interval",
        )  # fmt: skip
    ax.axvline(1, color="0.4", linewidth=1, linestyle=":", zorder=0)
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(require("matplotlib.ticker", "demo").LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.xaxis.set_minor_formatter(lambda value, _: "")
    ax.set_yticks(range(len(METHODS)), METHODS)
    ax.set_ylim(len(METHODS) - 0.5, -0.5)
    ax.grid(axis="x", color="0.92")
    ax.set_axisbelow(True)
    correlation = float(np.mean([split.train_correlation for split in results.splits]))
    ax.set_title(f"fitted on prompts whose two scores correlate by {correlation:.2f}", fontsize=10)


def _geometry(subfigure: SubFigure, plane: Plane) -> None:
    """Draw the plane before erasure, whitened, after SPLINCE and after LEACE, as in the paper."""
    subfigure.suptitle(
        "The plane of Cov(x, z) and Cov(x, y), z the stereotype, y the factual score:\n"
        "LEACE and SPLINCE act in it only",
        fontsize=11,
    )
    views = (
        ("(a) states", plane.states),
        (f"(b) whitened; cosine {plane.cosine:.2f}", plane.whitened),
        ("(c) after SPLINCE", plane.erased["SPLINCE"]),
        ("(d) after LEACE", plane.erased["LEACE"]),
    )
    axes = np.ravel(subfigure.subplots(2, 2))
    for ax, (title, points) in zip(axes, views, strict=True):
        before = plane.whitened if points is plane.whitened else plane.states
        limit = 1.05 * float(np.abs(before).max())
        for value, colour, label in _GENDERS:
            rows = points[plane.y == value]
            ax.scatter(*rows.T, s=6, color=colour, alpha=0.5, linewidths=0, zorder=4)
            ax.scatter([], [], s=30, color=colour, label=label)  # large marker for the legend
        _arrows(ax, plane, before, points, limit)
        ax.set(xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal")
        ax.set_title(title, fontsize=10)
        ax.tick_params(labelsize=8)
    _legend(subfigure, axes[0])


def _arrows(ax: Axes, plane: Plane, before: Float, points: Float, limit: float) -> None:
    """Draw the covariances with both scores as arrows; dashed as before erasure, where changed."""
    scores = (
        (plane.z, _STEREOTYPE, r"$\Sigma_{xz}$"),
        (plane.y, _FACTUAL, r"$\Sigma_{xy}$"),
    )
    longest = max(float(np.linalg.norm(plane.covariance(before, score))) for score, _, _ in scores)
    for score, colour, label in scores:
        unerased, erased = (
            0.75 * limit / longest * plane.covariance(p, score) for p in (before, points)
        )
        is_zero = np.linalg.norm(erased) < 1e-6 * limit
        if is_zero or np.linalg.norm(erased - unerased) > 1e-6 * limit:
            ax.plot(
                *zip((0, 0), unerased, strict=True), color=colour, linestyle="--", linewidth=1.2
            )
        if is_zero:
            ax.plot(0, 0, marker="o", color=colour, zorder=6)
            position = 0.6 * unerased - np.array([0.0, 0.12 * limit])
        else:
            # Erased points lie on one line, along the arrow: draw the arrow below the points.
            ax.quiver(
                0, 0, *erased, color=colour, width=0.016, angles="xy", scale_units="xy", scale=1,
                zorder=5 if points is before else 3,
            )  # fmt: skip
            position = erased * (1 + 0.13 * limit / np.linalg.norm(erased))
        ax.annotate(
            f"{label} = 0" if is_zero else label, position, color=colour, fontsize=12, zorder=7,
            ha="center", va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
        )  # fmt: skip
