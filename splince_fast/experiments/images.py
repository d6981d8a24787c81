"""Raw pixels: what each eraser changes in an image (paper, figs. CelebA_individual, CelebA_mean).

Features are pixels, only centred, so that a map can be looked at; a single alpha.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast import Moments, leace, sal, splince
from splince_fast.evaluation import (
    covariance_ratio,
    fit_head,
    spurious_split,
    tpr_gap,
    worst_group_accuracy,
)
from splince_fast.evaluation._tables import Table
from splince_fast.experiments import _common, _pictures
from splince_fast.experiments._common import Claim, Findings, Options, over_seeds, texts
from splince_fast.experiments.dataset import Dataset
from splince_fast.experiments.datasets import load
from splince_fast.projection import Projection

Float = NDArray[np.float64]
LEVELS, ALPHA = (0.5, 0.9), 1e-3
_FIGURES = ("accuracy", "worst group", "TPR gap", "kept cov", "distortion", "clipped")


def _erasers(moments: Moments) -> dict[str, Projection | None]:
    """The maps; None is no map."""
    return {
        "none": None,
        "SAL": sal(moments, erase="concept"),
        "LEACE": leace(moments, erase="concept"),
        "SPLINCE": splince(moments, erase="concept", keep="task"),
    }


def _one(data: Dataset, p: float, seed: int) -> tuple[dict[tuple[str, str], list[float]], Any]:
    """Figures by (eraser, head) of one split, and what the pictures need."""
    y, z = data.labels["task"], data.labels["concept"]
    split = spurious_split(
        y, z, p=p, sizes=data.sizes, random_state=seed, aligned_class=data.aligned_class
    )
    X = np.asarray(data.X, dtype=np.float64)
    train, test = split.train, split.test
    moments = Moments().update(X[train], {"task": y[train], "concept": z[train]})
    frozen = fit_head(X[train], y[train], alpha=ALPHA, scale=False)
    total = np.sum((X[train] - X[train].mean(axis=0)) ** 2)
    cells = {data.cell(a, b): (y[train] == a) & (z[train] == b) for a in (0, 1) for b in (0, 1)}
    found, shifts, maps = {}, {}, _erasers(moments)
    for name, eraser in maps.items():
        clean = X if eraser is None else eraser(X)
        moved = clean[train] - X[train]
        shifts[name] = {cell: moved[rows].mean(axis=0) for cell, rows in cells.items()}
        kept = 1.0 if eraser is None else covariance_ratio(eraser, moments, "task")
        of_map = [kept, float(np.sum(moved**2) / total), _pictures.clipped(clean[train])]
        retrained = fit_head(clean[train], y[train], alpha=ALPHA, scale=False)
        for head, model in (("retrained", retrained), ("frozen", frozen)):
            decided = model.predict(clean[test])
            found[name, head] = [
                float(np.mean(decided == y[test])),
                worst_group_accuracy(y[test], decided, groups=(y[test], z[test])),
                tpr_gap(y[test], decided, concept=z[test]),
                *of_map,
            ]
    counts = {cell: int(rows.sum()) for cell, rows in cells.items()}
    return found, (split, maps, shifts, counts)


def _draw(data: Dataset, made: Any) -> dict[str, Any]:
    """The figures of one split: an image of each cell, and the mean differences."""
    split, maps, shifts, counts = made
    y, z = data.labels["task"][split.train], data.labels["concept"][split.train]
    chosen = [split.train[np.flatnonzero((y == a) & (z == b))[0]] for a in (0, 1) for b in (0, 1)]
    images = np.asarray(data.X, dtype=np.float64)[chosen]
    h, w = (int(size) for size in data.arrays["shape"])
    erasers = {name: eraser for name, eraser in maps.items() if eraser is not None}
    erased = {name: eraser(images) for name, eraser in erasers.items()}
    return {
        f"{data.name}_individual": _pictures.individual(images, erased, (h, w), list(counts)),
        f"{data.name}_mean": _pictures.means({n: shifts[n] for n in erasers}, counts, (h, w)),
    }


def run(options: Options) -> Findings:
    """Run the experiment."""
    data = load("images", options.data)
    seeds = range(options.n_seeds(5))
    tables: list[Table] = []
    values: dict[str, float] = {}
    claims: list[Claim] = []
    for p in LEVELS:
        runs = [_one(data, p, seed) for seed in seeds]
        rows = []
        for key in runs[0][0]:
            columns = np.array([found[key] for found, _ in runs])
            intervals = [over_seeds(column) for column in columns.T]
            rows.append((", ".join(key), *texts(*intervals)))
            values |= {f"{f}/{key[0]}/{key[1]}/{p}": i.mean
                       for f, i in zip(_FIGURES, intervals, strict=True)}  # fmt: skip
        tables.append(Table(f"p = {p}", ("eraser, head", *_FIGURES), tuple(rows)))
        names = list(runs[0][1][2]["none"])
        norms = {
            e: [np.mean([np.linalg.norm(made[2][e][cell]) for _, made in runs]) for cell in names]
            for e in ("SAL", "LEACE", "SPLINCE")
        }
        title = f"p = {p}: norm of the mean of erased - original, by cell of training rows"
        tables.append(
            Table(title, ("eraser", *names), tuple((e, *texts(*v)) for e, v in norms.items()))
        )
        values |= {f"shift/{e}/{c}/{p}": v for e in norms
                   for c, v in zip(names, norms[e], strict=True)}  # fmt: skip
    figures = _draw(data, runs[0][1])
    # The last level: rare are the cells in which task and concept go against their tie.
    size = dict(zip(names, norms["SPLINCE"], strict=True))
    order = sorted(names, key=lambda cell: runs[0][1][3][cell])
    rare, common = order[:2], order[2:]
    ratio = min(size[c] for c in rare) / max(size[c] for c in common)
    overlap = data.sizes[2] / data.sizes[0] if data.sizes is not None else 0.0
    by_run = [{c: float(np.linalg.norm(made[2]["SPLINCE"][c])) for c in names} for _, made in runs]
    ratios = _common.limits(
        [min(s[c] for c in rare) / max(s[c] for c in common) for s in by_run], overlap
    )
    even = max(norms["LEACE"]) / min(norms["LEACE"])
    best = max(("SAL", "LEACE"), key=lambda e: values[f"accuracy/{e}/retrained/{p}"])
    lead = values[f"accuracy/SPLINCE/retrained/{p}"] - values[f"accuracy/{best}/retrained/{p}"]
    gains = [found["SPLINCE", "retrained"][0] - found[best, "retrained"][0] for found, _ in runs]
    gained = _common.limits(gains, overlap)
    claims = [
        Claim(
            f"at p = {p} SPLINCE accentuates the task in images of the rare cells",
            _common.decided(*ratios, 2.0),
            f"it moves them {ratio:.1f} times as far as the common ones, "
            f"{_common.in_words(*ratios)}; LEACE's range is {even:.2f}",
        ),
        Claim(
            "on images SPLINCE is no better for a retrained head",
            _common.reverse(_common.decided(*gained)),
            f"accuracy {lead:+.3f} against {best}, {_common.in_words(*gained)}",
        ),
    ]
    notes = [f"± is half a 95 % interval over {len(seeds)} resamplings" if len(seeds) > 1 else
             "one seed", "clipped: share of erased training pixels outside [0, 1]"]  # fmt: skip
    return Findings("Raw pixels", data, tables, claims, [], figures, notes, values)
