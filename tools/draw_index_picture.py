"""Draw docs/index.svg, the figure of the first page: python tools/draw_index_picture.py [OUT]"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

import splince_fast as sf

OUT = Path(__file__).resolve().parent.parent / "docs" / "index.svg"
N = 160


def main() -> None:
    """Draw rows of two genders and two professions before and after SPLINCE."""
    rng = np.random.default_rng(0)
    gender = np.arange(N) % 2
    doctor = np.where(rng.random(N) < 0.75, gender, 1 - gender)
    # Features 0 to 3 depend on gender, 4 to 7 on the task; the axes are features 0 and 4.
    features = np.repeat(np.eye(2), 4, axis=1)
    X = np.column_stack([2.2 * gender, 2.2 * doctor]) @ features + 0.6 * rng.normal(size=(N, 8))
    clean, _ = sf.erase(X, gender, keep=doctor)
    style = {"svg.fonttype": "none", "svg.hashsalt": "splince_fast", "font.family": "sans-serif"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(8.0, 3.6), layout="constrained")
        titles = ("Before: a line separates women and men", "After: no line does, the task stays")
        for axes, rows, title in zip(figure.subplots(1, 2), (X, clean), titles, strict=True):
            for group, colour, name in ((0, "#E69F00", "women"), (1, "#0072B2", "men")):
                for task, marker, job in ((0, "o", "nurses"), (1, "^", "doctors")):
                    cell = (gender == group) & (doctor == task)
                    axes.scatter(
                        *rows[cell][:, [0, 4]].T, s=26, c=colour, marker=marker, alpha=0.8,
                        linewidths=0, label=f"{name}, {job}",
                    )  # fmt: skip
            axes.set_title(title, fontsize=13)
            axes.set(xticks=[], yticks=[])
            axes.set_aspect("equal", adjustable="datalim")
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(Path(sys.argv[1]) if sys.argv[1:] else OUT, metadata={"Date": None})


if __name__ == "__main__":
    main()
