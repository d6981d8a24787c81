"""Pictures of erased images: one symmetric colour scale for all differences, zero white."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.extras import require

Float = NDArray[np.float64]


def clipped(rows: Float) -> float:
    """Share of the pixels outside [0, 1], which a display has to clip."""
    return float(np.mean((rows < 0) | (rows > 1)))


def individual(
    images: Float, erased: Mapping[str, Float], shape: tuple[int, int], names: Sequence[str]
) -> Any:
    """Some images as they are, erased, and the differences; a column per eraser.

    Parameters
    ----------
    images : ndarray of shape (n, h * w)
        In [0, 1].
    erased : dict of str to ndarray of the same shape
    shape : (h, w)
    names : sequence of str
        One per image.
    """
    moved = {name: rows - images for name, rows in erased.items()}
    limit = max(float(np.abs(rows).max()) for rows in moved.values())
    columns = ["original", *erased, *(f"{name} - original" for name in erased)]
    figure, axes, colours = _grid(len(images), len(columns), limit, names, columns)
    for i in range(len(images)):
        shown = [images[i], *(rows[i] for rows in erased.values())]
        for ax, row in zip(axes[i], shown, strict=False):
            ax.imshow(np.clip(row, 0, 1).reshape(shape), cmap="gray", vmin=0, vmax=1)
        for ax, rows in zip(axes[i, len(shown) :], moved.values(), strict=True):
            ax.imshow(rows[i].reshape(shape), **colours)
    share = max(clipped(rows) for rows in erased.values())
    _finish(figure, axes, colours, f"grey: clipped to [0, 1] for display, at most {share:.1%}")
    return figure


def means(
    shifts: Mapping[str, Mapping[str, Float]], counts: Mapping[str, int], shape: tuple[int, int]
) -> Any:
    """Mean difference by cell (rows) and eraser (columns).

    Parameters
    ----------
    shifts : dict of eraser to dict of cell to ndarray of shape (h * w,)
    counts : dict of cell to int
    shape : (h, w)
    """
    limit = max(float(np.abs(v).max()) for cells in shifts.values() for v in cells.values())
    names = [f"{cell}\nn = {n}" for cell, n in counts.items()]
    figure, axes, colours = _grid(len(counts), len(shifts), limit, names, list(shifts))
    for j, cells in enumerate(shifts.values()):
        for i, cell in enumerate(counts):
            axes[i, j].imshow(cells[cell].reshape(shape), **colours)
    _finish(figure, axes, colours, "mean of erased minus original, training rows")
    return figure


def _grid(
    n_rows: int, n_columns: int, limit: float, names: Sequence[str], columns: Sequence[str]
) -> tuple[Any, Any, dict[str, Any]]:
    """Axes without ticks, titled; and the one colour scale of all differences."""
    require("matplotlib.figure", "demo")
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
    return figure, axes, {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}


def _finish(figure: Any, axes: Any, colours: Mapping[str, Any], text: str) -> None:
    """A colour bar of the differences, and a line below."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    scale = ScalarMappable(Normalize(colours["vmin"], colours["vmax"]), colours["cmap"])
    figure.colorbar(scale, ax=axes, shrink=0.6, label="erased - original, one scale", pad=0.01)
    figure.supxlabel(text, fontsize=8)
