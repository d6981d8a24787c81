"""Erasure of raw pixels, shown as images (paper, figs. CelebA_individual and CelebA_mean).

Features are pixels, centred but not scaled, so that erased rows can be shown as images. All heads
have the same L2 penalty, :data:`ALPHA`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from splince_fast import Moments
from splince_fast._runtime.extras import require
from splince_fast.evaluation import (
    covariance_ratio,
    fit_head,
    spurious_split,
    tpr_gap,
    worst_group_accuracy,
)
from splince_fast.evaluation.statistics import t_interval
from splince_fast.evaluation.text_table import Table
from splince_fast.experiments._common import (
    Claim,
    Findings,
    RunOptions,
    cell_texts,
    corrected_bounds,
    interval_note,
)
from splince_fast.experiments.dataset import Dataset
from splince_fast.experiments.datasets import load
from splince_fast.experiments.erasers import ERASERS, fit_method
from splince_fast.projection import Projection

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Float = NDArray[np.float64]
LEVELS, ALPHA = (0.5, 0.9), 1e-3
_METRICS = ("accuracy", "worst group", "TPR gap", "kept cov", "distortion", "clipped")


@dataclass(frozen=True, slots=True)
class SplitResult:
    """Results of one split.

    Attributes
    ----------
    values : dict
        Metrics by (eraser, head), in the order of the columns of the printed table.
    train : int array
        Training rows.
    erasers : dict of str to Projection
    shifts : dict of str to dict of str to ndarray of shape (d,)
        Mean of erased minus original training rows, by eraser and by cell of task and concept.
    counts : dict of str to int
        Number of training rows of each cell.
    sizes : tuple of three int
        Numbers of training, validation and test rows.
    """

    values: dict[tuple[str, str], list[float]]
    train: NDArray[np.intp]
    erasers: dict[str, Projection]
    shifts: dict[str, dict[str, Float]]
    counts: dict[str, int]
    sizes: tuple[int, int, int]

    def norms(self, eraser: str) -> dict[str, float]:
        """Return the norm of the mean shift of each cell by an eraser."""
        return {cell: float(np.linalg.norm(v)) for cell, v in self.shifts[eraser].items()}


def evaluate_split(data: Dataset, p: float, seed: int) -> SplitResult:
    """Fit erasers and heads on one split, and compute their metrics."""
    y, z = data.labels["task"], data.labels["concept"]
    split = spurious_split(
        y, z, p=p, sizes=data.sizes, random_state=seed, aligned_class=data.aligned_class
    )
    X = np.asarray(data.X, dtype=np.float64)
    train, test = split.train, split.test
    moments = Moments().update(X[train], {"task": y[train], "concept": z[train]})
    erasers = {e: fit_method(e, moments, erase="concept", keep="task") for e in ERASERS}
    frozen = fit_head(X[train], y[train], alpha=ALPHA, scale=False)
    total_squares = np.sum((X[train] - X[train].mean(axis=0)) ** 2)
    cells = {data.cell(a, b): (y[train] == a) & (z[train] == b) for a in (0, 1) for b in (0, 1)}
    values, shifts = {}, {}
    for name in ("none", *erasers):
        erased = erasers[name](X) if name in erasers else X
        change = erased[train] - X[train]
        shifts[name] = {cell: change[rows].mean(axis=0) for cell, rows in cells.items()}
        ratio = covariance_ratio(erasers[name], moments, "task") if name in erasers else 1.0
        eraser_metrics = [
            ratio,
            float(np.sum(change**2) / total_squares),
            clipped_fraction(erased[train]),
        ]
        retrained = fit_head(erased[train], y[train], alpha=ALPHA, scale=False)
        for head, model in (("retrained", retrained), ("frozen", frozen)):
            y_pred = model.predict(erased[test])
            values[name, head] = [
                float(np.mean(y_pred == y[test])),
                worst_group_accuracy(y[test], y_pred, groups=(y[test], z[test])),
                tpr_gap(y[test], y_pred, concept=z[test]),
                *eraser_metrics,
            ]
    counts = {cell: int(rows.sum()) for cell, rows in cells.items()}
    return SplitResult(values, train, erasers, shifts, counts, split.sizes)


def draw(data: Dataset, result: SplitResult) -> dict[str, Figure]:
    """Draw two figures: one image of each cell with its erased versions, and the mean changes."""
    y, z = data.labels["task"][result.train], data.labels["concept"][result.train]
    rows = [result.train[np.flatnonzero((y == a) & (z == b))[0]] for a in (0, 1) for b in (0, 1)]
    images = np.asarray(data.X, dtype=np.float64)[rows]
    h, w = (int(size) for size in data.arrays["shape"])
    erased = {name: eraser(images) for name, eraser in result.erasers.items()}
    shifts = {name: result.shifts[name] for name in erased}
    return {
        f"{data.name}_individual": draw_images(images, erased, (h, w), list(result.counts)),
        f"{data.name}_mean": draw_means(shifts, result.counts, (h, w)),
    }


def run(options: RunOptions) -> Findings:
    """Run the experiment, and return its findings."""
    data = load("images", options.data)
    n_seeds = options.n_seeds(5)
    tables: list[Table] = []
    values: dict[str, float] = {}
    for p in LEVELS:
        results = [evaluate_split(data, p, seed) for seed in range(n_seeds)]
        rows = []
        for eraser, head in results[0].values:
            columns = np.array([result.values[eraser, head] for result in results])
            intervals = [t_interval(column) for column in columns.T]
            rows.append((f"{eraser}, {head}", *cell_texts(*intervals)))
            values |= {f"{metric}/{eraser}/{head}/{p}": interval.mean
                       for metric, interval in zip(_METRICS, intervals, strict=True)}  # fmt: skip
        tables.append(Table(f"p = {p}", ("eraser, head", *_METRICS), tuple(rows)))
        counts = results[0].counts
        norms = {
            e: {c: float(np.mean([result.norms(e)[c] for result in results])) for c in counts}
            for e in ERASERS
        }
        title = f"p = {p}: norm of the mean of erased - original, by cell of training rows"
        rows = [(e, *cell_texts(*by_cell.values())) for e, by_cell in norms.items()]
        tables.append(Table(title, ("eraser", *counts), tuple(rows)))
        values |= {f"shift/{e}/{c}/{p}": v for e in norms for c, v in norms[e].items()}
    # At the last level, the two smallest cells are those in which task and concept are not aligned.
    order = sorted(counts, key=lambda cell: counts[cell])
    rare, common = order[:2], order[2:]

    def rare_to_common(norm: Mapping[str, float]) -> float:
        return min(norm[cell] for cell in rare) / max(norm[cell] for cell in common)

    test_ratio = float(np.mean([result.sizes[2] / result.sizes[0] for result in results]))
    ratios = [rare_to_common(result.norms("SPLINCE")) for result in results]
    ratio_bounds = corrected_bounds(ratios, test_ratio)
    leace = norms["LEACE"].values()
    best = max(("SAL", "LEACE"), key=lambda e: values[f"accuracy/{e}/retrained/{p}"])
    lead = values[f"accuracy/SPLINCE/retrained/{p}"] - values[f"accuracy/{best}/retrained/{p}"]
    splince, reference = (
        [result.values[e, "retrained"][0] for result in results] for e in ("SPLINCE", best)
    )
    lead_bounds = corrected_bounds(np.subtract(splince, reference), test_ratio)
    claims = [
        Claim(
            f"at p = {p} SPLINCE accentuates the task in images of the rare cells",
            ratio_bounds.above(2.0),
            f"SPLINCE moves them {rare_to_common(norms['SPLINCE']):.1f} times as far as the common "
            f"ones, {ratio_bounds}; for LEACE the largest shift is "
            f"{max(leace) / min(leace):.2f} times the smallest",
        ),
        Claim(
            "on images SPLINCE is no better for a retrained head",
            lead_bounds.below(0.0),
            f"accuracy {lead:+.3f} against {best}, {lead_bounds}",
        ),
    ]
    notes = [interval_note(n_seeds), "clipped: fraction of erased training pixels outside [0, 1]"]
    return Findings(
        "Raw pixels", data, tables, claims, figures=draw(data, results[0]), notes=notes,
        values=values,
    )  # fmt: skip


# -- figures: one symmetric colour scale for all differences -----------------------------------

# Colours from blue to red, white at 0; safe for colour-blind readers.
_DIVERGING = ("#053061", "#4393c3", "#ffffff", "#d6604d", "#67001f")


def clipped_fraction(rows: Float) -> float:
    """Return the fraction of pixels outside [0, 1], which are clipped for display."""
    return float(np.mean((rows < 0) | (rows > 1)))


def draw_images(
    images: Float, erased: Mapping[str, Float], shape: tuple[int, int], names: Sequence[str]
) -> Figure:
    """Draw one row per image: the original, the erased versions, and erased minus original.

    Parameters
    ----------
    images : ndarray of shape (n, h * w)
        Original images, in [0, 1].
    erased : dict of str to ndarray of the same shape
        Erased images by eraser.
    shape : (h, w)
        Height and width of an image.
    names : sequence of str
        Label of each image.
    """
    changes = {name: rows - images for name, rows in erased.items()}
    limit = max(float(np.abs(change).max()) for change in changes.values())
    columns = ["original", *erased, *(f"{name} - original" for name in erased)]
    figure, axes, colours = _grid(len(images), len(columns), limit, names, columns)
    for i in range(len(images)):
        row_images = [images[i], *(rows[i] for rows in erased.values())]
        for ax, image in zip(axes[i], row_images, strict=False):
            ax.imshow(np.clip(image, 0, 1).reshape(shape), cmap="gray", vmin=0, vmax=1)
        for ax, change in zip(axes[i, len(row_images) :], changes.values(), strict=True):
            ax.imshow(change[i].reshape(shape), **colours)
    fraction = max(clipped_fraction(rows) for rows in erased.values())
    _add_colour_bar(
        figure, axes, colours, f"grey: clipped to [0, 1] for display, at most {fraction:.1%}"
    )
    return figure


def draw_means(
    shifts: Mapping[str, Mapping[str, Float]], counts: Mapping[str, int], shape: tuple[int, int]
) -> Figure:
    """Draw the mean of erased minus original as one image per cell (rows) and eraser (columns).

    Parameters
    ----------
    shifts : dict of eraser to dict of cell to ndarray of shape (h * w,)
        Means of erased minus original.
    counts : dict of cell to int
        Number of rows of each cell.
    shape : (h, w)
        Height and width of an image.
    """
    limit = max(float(np.abs(v).max()) for cells in shifts.values() for v in cells.values())
    names = [f"{cell}\nn = {n}" for cell, n in counts.items()]
    figure, axes, colours = _grid(len(counts), len(shifts), limit, names, list(shifts))
    for j, cells in enumerate(shifts.values()):
        for i, cell in enumerate(counts):
            axes[i, j].imshow(cells[cell].reshape(shape), **colours)
    _add_colour_bar(figure, axes, colours, "mean of erased minus original, training rows")
    return figure


def _grid(
    n_rows: int, n_columns: int, limit: float, names: Sequence[str], columns: Sequence[str]
) -> tuple[Figure, NDArray[Any], dict[str, Any]]:
    """Return a figure, a grid of labelled axes, and the `imshow` options for differences.

    The colour scale of differences extends from -`limit` to `limit`.
    """
    require("matplotlib.figure", "demo")
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.35 * n_columns + 1.6, 1.4 * n_rows + 0.7), layout="constrained")
    axes = figure.subplots(n_rows, n_columns, squeeze=False)
    for ax in axes.ravel():
        ax.set_xticks([])
        ax.set_yticks([])
        ax.spines[:].set_visible(False)
    for ax, title in zip(axes[0], columns, strict=True):
        ax.set_title(title.replace(" - ", "\n- "), fontsize=9)
    for ax, name in zip(axes[:, 0], names, strict=True):
        ax.set_ylabel(name, fontsize=8, rotation=0, ha="right", va="center")
    limit = limit or 1.0
    scale = LinearSegmentedColormap.from_list("differences", _DIVERGING)
    return figure, axes, {"cmap": scale, "vmin": -limit, "vmax": limit}


def _add_colour_bar(
    figure: Figure, axes: NDArray[Any], colours: Mapping[str, Any], text: str
) -> None:
    """Add the colour bar of differences, and `text` below the axes."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    scale = ScalarMappable(Normalize(colours["vmin"], colours["vmax"]), colours["cmap"])
    figure.colorbar(scale, ax=axes, shrink=0.6, label="erased - original, one scale", pad=0.01)
    figure.supxlabel(text, fontsize=8)
