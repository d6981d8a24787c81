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

from reproduction.data import Dataset
from reproduction.findings import (
    Claim,
    Findings,
    Options,
    above,
    below,
    cell,
    interval,
    interval_note,
    number,
    table,
)
from splince_fast import Moments, Projection, leace, sal, splince
from splince_fast.evaluation import (
    fit_head,
    spurious_split,
    tpr_gap,
    worst_group_accuracy,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Float = NDArray[np.float64]
LEVELS, ALPHA = (0.5, 0.9), 1e-3
METRICS = ("accuracy", "worst group", "TPR gap", "kept cov", "distortion", "clipped")


@dataclass(frozen=True, slots=True)
class SplitResult:
    """Results of one split."""

    values: dict[tuple[str, str], list[float]]  # METRICS by eraser and head
    train: NDArray[np.intp]
    erasers: dict[str, Projection]
    shifts: dict[str, dict[str, Float]]  # mean of erased - original rows, by eraser and by cell
    counts: dict[str, int]  # training rows by cell
    ratio: float  # test rows per training row

    def norms(self, eraser: str) -> dict[str, float]:
        """Return the norm of the mean shift of each cell by an eraser."""
        return {cell: float(np.linalg.norm(v)) for cell, v in self.shifts[eraser].items()}

    def rare_to_common(self) -> float:
        """Return the smaller shift by SPLINCE in the rare cells over the larger in the common."""
        norms = self.norms("SPLINCE")
        # The two smallest cells are those in which task and concept are not aligned.
        order = sorted(self.counts, key=lambda name: self.counts[name])
        return min(norms[name] for name in order[:2]) / max(norms[name] for name in order[2:])


def evaluate_split(data: Dataset, p: float, seed: int) -> SplitResult:
    """Fit erasers and heads on one split, and compute their metrics."""
    y, z = data.labels["task"], data.labels["concept"]
    split = spurious_split(
        y, z, p=p, sizes=data.sizes, random_state=seed, aligned_class=data.aligned_class
    )
    X = np.asarray(data.X, dtype=np.float64)
    train, test = split.train, split.test
    moments = Moments().update(X[train], {"task": y[train], "concept": z[train]})
    erasers = {
        "SAL": sal(moments, erase="concept"),
        "LEACE": leace(moments, erase="concept"),
        "SPLINCE": splince(moments, erase="concept", keep="task"),
    }
    frozen = fit_head(X[train], y[train], alpha=ALPHA, scale=False)
    task = y[train] - y[train].mean()
    total_squares = np.sum((X[train] - X[train].mean(axis=0)) ** 2)
    cells = {data.cell(a, b): (y[train] == a) & (z[train] == b) for a in (0, 1) for b in (0, 1)}
    values, shifts = {}, {}
    for name in ("none", *erasers):
        erased = erasers[name](X) if name in erasers else X
        change = erased[train] - X[train]
        shifts[name] = {cell: change[rows].mean(axis=0) for cell, rows in cells.items()}
        eraser_metrics = [
            float(np.sum((task @ erased[train]) ** 2) / np.sum((task @ X[train]) ** 2)),
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
    return SplitResult(values, train, erasers, shifts, counts, len(test) / len(train))


def run(options: Options, data: Dataset) -> Findings:
    """Run the experiment, and return its findings."""
    n_seeds = options.n_seeds(5)
    tables: list[str] = []
    values: dict[str, float] = {}
    for p in LEVELS:
        results = [evaluate_split(data, p, seed) for seed in range(n_seeds)]
        rows = {}
        for eraser, head in results[0].values:
            columns = np.array([result.values[eraser, head] for result in results]).T
            rows[f"{eraser}, {head}"] = [cell(column) for column in columns]
            means = zip(METRICS, columns.mean(axis=1), strict=True)
            values |= {f"{metric}/{eraser}/{head}/{p}": float(mean) for metric, mean in means}
        tables.append(table(f"p = {p}", ("eraser, head", *METRICS), rows))
        norms = {
            e: {c: float(np.mean([r.norms(e)[c] for r in results])) for c in results[0].counts}
            for e in results[0].erasers
        }
        title = f"p = {p}: norm of the mean of erased - original, by cell of training rows"
        rows = {e: [number(norm) for norm in of_cell.values()] for e, of_cell in norms.items()}
        tables.append(table(title, ("eraser", *results[0].counts), rows))
        values |= {f"shift/{e}/{c}/{p}": v for e in norms for c, v in norms[e].items()}
    ratio = float(np.mean([result.ratio for result in results]))
    shifts = [result.rare_to_common() for result in results]
    best = max(("SAL", "LEACE"), key=lambda e: values[f"accuracy/{e}/retrained/{p}"])
    lead = [r.values["SPLINCE", "retrained"][0] - r.values[best, "retrained"][0] for r in results]
    leace_norms = norms["LEACE"].values()
    claims = [
        Claim(
            f"at p = {p} SPLINCE accentuates the task in images of the rare cells",
            f"SPLINCE moves them {np.mean(shifts):.1f} times as far as the common ones, "
            f"{interval(shifts, ratio)}; for LEACE the largest shift is "
            f"{max(leace_norms) / min(leace_norms):.2f} times the smallest",
            [above(shifts, 2.0, ratio)],
        ),
        Claim(
            "on images SPLINCE is no better for a retrained head",
            f"accuracy {np.mean(lead):+.3f} against {best}, {interval(lead, ratio)}",
            [below(lead, 0.0, ratio)],
        ),
    ]
    notes = [interval_note(n_seeds), "clipped: fraction of erased training pixels outside [0, 1]"]
    first = results[0]
    figures = {
        f"{data.name}_individual": lambda: _individual(data, first),
        f"{data.name}_mean": lambda: draw_means(
            {e: first.shifts[e] for e in first.erasers}, first.counts, _shape(data)
        ),
    }
    return Findings([data], tables, claims, notes, figures, values)


def clipped_fraction(rows: Float) -> float:
    """Return the fraction of pixels outside [0, 1], which are clipped for display."""
    return float(np.mean((rows < 0) | (rows > 1)))


# -- figures: one symmetric colour scale for all differences -----------------------------------

# Colours from blue to red, white at 0; safe for colour-blind readers.
_DIVERGING = ("#053061", "#4393c3", "#ffffff", "#d6604d", "#67001f")


def _shape(data: Dataset) -> tuple[int, int]:
    height, width = (int(size) for size in data.arrays["shape"])
    return height, width


def _individual(data: Dataset, result: SplitResult) -> Figure:
    """Draw one training image of each cell with its erased versions."""
    y, z = data.labels["task"][result.train], data.labels["concept"][result.train]
    rows = [result.train[np.flatnonzero((y == a) & (z == b))[0]] for a in (0, 1) for b in (0, 1)]
    images = np.asarray(data.X, dtype=np.float64)[rows]
    erased = {name: eraser(images) for name, eraser in result.erasers.items()}
    return draw_images(images, erased, _shape(data), list(result.counts))


def draw_images(
    images: Float, erased: Mapping[str, Float], shape: tuple[int, int], names: Sequence[str]
) -> Figure:
    """Draw one row per image: the original, the erased versions, and erased minus original."""
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
    """Draw the mean of erased minus original as one image per cell (rows) and eraser (columns)."""
    limit = max(float(np.abs(v).max()) for cells in shifts.values() for v in cells.values())
    names = [f"{cell}\nn = {n}" for cell, n in counts.items()]
    figure, axes, colours = _grid(len(counts), len(shifts), limit, names, list(shifts))
    for j, cells in enumerate(shifts.values()):
        for i, name in enumerate(counts):
            axes[i, j].imshow(cells[name].reshape(shape), **colours)
    _add_colour_bar(figure, axes, colours, "mean of erased minus original, training rows")
    return figure


def _grid(
    n_rows: int, n_columns: int, limit: float, names: Sequence[str], columns: Sequence[str]
) -> tuple[Figure, NDArray[Any], dict[str, Any]]:
    """Return a figure, a grid of labelled axes, and the `imshow` options for differences."""
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
