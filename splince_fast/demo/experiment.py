"""The profession experiment of the paper: erase a stereotype, keep factual gender.

Section "Language modeling" of Holstege, Ravfogel and Wouters (NeurIPS 2025). The last-token states
x of a language model before " he" or " she" encode the stereotype z of a noun and its factual
gender y; z and y are scores of the noun. Erasers r of z are fitted on training nouns. On the
held-out nouns, the log-odds

    log p(he) - log p(she) = r(x) @ (w_he - w_she)

are regressed on [1, z, y], where w_he and w_she are rows of the language-model head. The
coefficients of z and y measure the dependence of the model on the two scores.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from splince_fast._runtime.progress import Progress
from splince_fast.demo.data import ProfessionData
from splince_fast.exceptions import InputError, NotEnoughDataError
from splince_fast.methods import leace, sal, splince
from splince_fast.moments import Moments
from splince_fast.projection import Projection

Float = NDArray[np.float64]
Index = NDArray[np.intp]

TRAIN_FRACTION: Final = 0.7
# Largest allowed absolute difference between the correlation of the two scores and its target.
CORRELATION_TOLERANCE: Final = 1e-3
# Correlation of the two scores over the 320 professions of the paper (Bolukbasi et al. 2016).
PAPER_CORRELATION: Final = 0.26
# Ridge penalty of the probe per row, for features of unit variance. On unerased states, R^2 is
# largest for penalties of 0.1 to 1; on erased states, R^2 does not depend on the penalty.
PROBE_PENALTY: Final = 1.0

ERASERS: Final = ("SAL", "LEACE", "SPLINCE")
METHODS: Final = ("Original", *ERASERS)


@dataclass(frozen=True)
class NounSplit:
    """The prompts of one random split; all nouns of a family are in the same part."""

    train: Index  # prompts of the training families: all, or a subset with a target correlation
    test: Index  # prompts of the held-out families: a subset with uncorrelated scores
    train_correlation: float
    test_correlation: float


@dataclass(frozen=True)
class SplitValues:
    """Measured values of one eraser r in one split, for states x and the scores z and y."""

    stereotype: float  # coefficients of z and y in the regression of the held-out log-odds
    factual: float
    residual: float  # |Cov(r(x), z)| / |Cov(x, z)| on the training rows
    kept: float  # |Cov(r(x), y)| / |Cov(x, y)| on the training rows
    distortion: float  # E|r(x) - x|^2 / E|x - E x|^2 on the training rows
    probe_r2: float
    seconds: float  # to fit the eraser to moments and to apply it to all rows


@dataclass(frozen=True)
class Results:
    """Results of the experiment over all splits."""

    split_values: dict[str, list[SplitValues]]  # by method, one entry per split
    splits: list[NounSplit]
    train_correlation: float | None  # target; None if all training prompts were used
    n_train: int  # number of training families in a split
    n_test: int
    random_state: int

    @property
    def test_ratio(self) -> float:
        """Number of held-out families divided by the number of training families."""
        return self.n_test / self.n_train

    def column(self, method: str, field: str) -> Float:
        """Return the values of one field of :class:`SplitValues`, one per split."""
        return np.array([getattr(values, field) for values in self.split_values[method]])


def run(
    data: ProfessionData,
    *,
    n_splits: int = 20,
    random_state: int = 0,
    train_correlation: float | None = None,
    progress: bool | None = None,
) -> Results:
    """Run the experiment over random splits by family; split i does not depend on `n_splits`."""
    if n_splits < 2:
        raise InputError(f"the number of splits is {n_splits}; intervals need at least 2")
    if random_state < 0:
        raise InputError(f"random_state is {random_state}; it must not be negative")
    splits = [make_split(data, (random_state, i), train_correlation) for i in range(n_splits)]
    split_values: dict[str, list[SplitValues]] = {method: [] for method in METHODS}
    n_rows = sum(len(split.train) for split in splits)
    row_bytes = data.activations[:1].nbytes
    # The first fit loads BLAS and other modules, which the timings should not include.
    fit_eraser("LEACE", accumulate(data, splits[0].train))(data.activations[:1])
    # For matrices of this size the synchronisation of BLAS threads takes longer than the products.
    with (
        threadpool_limits(1, user_api="blas"),
        Progress(n_rows, "training prompts", show=progress) as bar,
    ):
        for split in splits:
            for method, values in evaluate(data, split).items():
                split_values[method].append(values)
            bar.advance(len(split.train), len(split.train) * row_bytes)
    n_families = len(set(data.families))
    n_train = int(TRAIN_FRACTION * n_families)
    return Results(
        split_values, splits, train_correlation, n_train, n_families - n_train, random_state
    )


def accumulate(data: ProfessionData, rows: Index) -> Moments:
    """Accumulate moments of the prompts `rows`, with both scores as continuous variables."""
    nouns = data.noun_index[rows]
    labels = {"stereotype": data.stereotype[nouns], "factual": data.factual[nouns]}
    # A single block is merged at once; otherwise the first timed method would merge buffered rows.
    moments = Moments(block_rows=len(rows), kinds=dict.fromkeys(labels, "continuous"))
    return moments.update(data.activations[rows], labels)


def fit_eraser(name: str, moments: Moments) -> Projection:
    """Erase the stereotype; SPLINCE keeps the factual score."""
    if name == "SPLINCE":
        return splince(moments, erase="stereotype", keep="factual")
    return (sal if name == "SAL" else leace)(moments, erase="stereotype")


def make_split(
    data: ProfessionData, seed: tuple[int, int], train_correlation: float | None = None
) -> NounSplit:
    """Split the families at random; the two scores are uncorrelated over the held-out prompts.

    Over the training prompts they correlate by `train_correlation`; None keeps all these prompts.
    """
    rng = np.random.default_rng(seed)
    names, family = np.unique(data.families, return_inverse=True)
    order = rng.permutation(len(names))
    in_train = np.isin(family, order[: int(TRAIN_FRACTION * len(names))])
    test, test_correlation = drop_to_correlation(data, np.flatnonzero(~in_train), 0.0, rng)
    train, correlation = drop_to_correlation(data, np.flatnonzero(in_train), train_correlation, rng)
    return NounSplit(train, test, correlation, test_correlation)


def drop_to_correlation(
    data: ProfessionData, nouns: Index, target: float | None, rng: np.random.Generator
) -> tuple[Index, float]:
    """Return the prompts of the nouns without those that are dropped, and their correlation.

    Each step drops a random prompt of the noun for which the correlation of the two scores comes
    nearest to the target. None keeps all prompts.
    """
    z, y = data.stereotype[nouns], data.factual[nouns]
    prompts = [rng.permutation(np.flatnonzero(data.noun_index == noun)) for noun in nouns]
    counts = np.array([len(rows) for rows in prompts])
    terms = np.stack([np.ones_like(z), z, y, z * z, y * y, z * y])
    correlation = float(_correlation(terms @ counts))
    while target is not None and not abs(correlation - target) < CORRELATION_TOLERANCE:
        candidates = _correlation((terms @ counts)[:, None] - terms)
        distance = np.where(
            (counts == 0) | np.isnan(candidates), np.inf, np.abs(candidates - target)
        )
        noun = int(np.argmin(distance))
        if not distance[noun] < abs(correlation - target):
            raise NotEnoughDataError(
                f"dropping prompts of {len(nouns)} nouns does not lead to a correlation of "
                f"{target:g} between the two scores, but to {correlation:.2g}: there are too few "
                "nouns, or a score is constant among them"
            )
        counts[noun] -= 1
        correlation = float(candidates[noun])
    rows = [noun_rows[:count] for noun_rows, count in zip(prompts, counts, strict=True)]
    return np.sort(np.concatenate(rows)), correlation


def _correlation(sums: Float) -> Float:
    """Return the correlation of z and y from the sums of 1, z, y, z^2, y^2 and z y; NaN if none."""
    n, z, y, zz, yy, zy = sums
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((n * zy - z * y) / np.sqrt((n * zz - z * z) * (n * yy - y * y)))


def evaluate(data: ProfessionData, split: NounSplit) -> dict[str, SplitValues]:
    """Fit each method to the training prompts, apply it to all, and return measured values."""
    X, train, test = data.activations, split.train, split.test
    moments = accumulate(data, train)
    z, y = data.stereotype[data.noun_index], data.factual[data.noun_index]
    z_train, y_train = z[train] - z[train].mean(), y[train] - y[train].mean()
    X_train = X[train]
    covariance_z, covariance_y = (np.linalg.norm(c @ X_train) for c in (z_train, y_train))
    total_squares = np.sum(np.square(X_train - X_train.mean(axis=0)))
    inverse = np.linalg.pinv(np.stack([np.ones(len(test)), z[test], y[test]], axis=1))
    values_by_method = {}
    for method in METHODS:
        start = time.perf_counter()
        erased = X if method == "Original" else fit_eraser(method, moments)(X)
        seconds = time.perf_counter() - start
        erased_train, erased_test = erased[train], erased[test]
        _, stereotype, factual = inverse @ data.log_odds(erased_test)
        residual = np.linalg.norm(z_train @ erased_train) / covariance_z
        kept = np.linalg.norm(y_train @ erased_train) / covariance_y
        distortion = np.sum(np.square(erased_train - X_train)) / total_squares
        r2 = probe_r2(erased_train, z[train], erased_test, z[test])
        values = (stereotype, factual, residual, kept, distortion, r2, seconds)
        values_by_method[method] = SplitValues(*map(float, values))
    return values_by_method


def probe_r2(train: Float, z_train: Float, test: Float, z_test: Float) -> float:
    """Return the held-out R^2 of a ridge regression of z on standardised features.

    The penalty prevents large weights in erased directions, which hold only rounding errors.
    """
    moments = Moments(block_rows=len(train), kinds={"z": "continuous"})
    moments.update(train, {"z": z_train})
    covariance, cross = moments.covariance(ddof=0), moments.cross_covariance("z", ddof=0)[:, 0]
    scale = np.sqrt(np.diag(covariance))
    scale[scale == 0] = 1.0
    gram = covariance / scale / scale[:, None]
    weights = np.linalg.solve(gram + PROBE_PENALTY * np.eye(len(gram)), cross / scale) / scale
    error = z_test - z_train.mean() - (test - moments.mean) @ weights
    return float(1 - np.sum(error**2) / np.sum((z_test - z_test.mean()) ** 2))
