"""The profession experiment of the paper: erase a stereotype, keep factual gender.

Section "Language modeling" of Holstege, Ravfogel and Wouters (NeurIPS 2025). The last-token states
x of a language model before " he" or " she" carry the stereotype z of a noun and its factual
gender y. Erasers of z are fitted on some nouns; on the others the log-odds

    log p(he) - log p(she) = r(x) @ (w_he - w_she)

are regressed on [1, z, y]. The coefficients measure how much the model depends on each score.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from splince_fast._runtime.progress import Progress
from splince_fast.exceptions import InputError, NotEnoughDataError
from splince_fast.experiments.demo.professions import ProfessionData
from splince_fast.experiments.erasers import ERASERS, fit_method
from splince_fast.moments import Moments

Float = NDArray[np.float64]

TRAIN_FRACTION: Final = 0.7
# Largest distance of a correlation of the two scores from its target.
CORRELATION_TOLERANCE: Final = 1e-3
# Correlation of the scores of Bolukbasi et al. (2016) over 320 professions, which the paper uses.
PAPER_CORRELATION: Final = 0.26
# Ridge penalty of the probe per row, for features of unit variance. R^2 on unerased states is
# largest for 0.1 to 1; on erased states it does not depend on the penalty.
PROBE_PENALTY: Final = 1.0

METHODS: Final = ("Original", *ERASERS)


@dataclass(frozen=True)
class NounSplit:
    """Rows of one random split by family of nouns (nurse, male nurse, female nurse).

    Attributes
    ----------
    train : int array
        Prompts of the training families: all of them, or a subset of a given correlation.
    test : int array
        Prompts of the other families, a subset in which the two scores are uncorrelated.
    train_correlation, test_correlation : float
        Correlation of the two scores over these prompts.
    """

    train: NDArray[np.intp]
    test: NDArray[np.intp]
    train_correlation: float
    test_correlation: float


@dataclass(frozen=True)
class SplitFigures:
    """Figures of one method in one split.

    Attributes
    ----------
    stereotype, factual : float
        Coefficients of the held-out log-odds.
    residual, kept : float
        ``|Cov(r(x), z)| / |Cov(x, z)|`` and ``|Cov(r(x), y)| / |Cov(x, y)|`` on the training rows.
    distortion : float
        ``E|r(x) - x|^2 / E|x - E x|^2`` on the training rows.
    probe_r2 : float
        Of :func:`probe_r2`.
    seconds : float
        Time to fit from moments, and to apply to every row.
    """

    stereotype: float
    factual: float
    residual: float
    kept: float
    distortion: float
    probe_r2: float
    seconds: float


@dataclass(frozen=True)
class Results:
    """The experiment over all splits.

    Attributes
    ----------
    outcomes : dict of str to list of SplitFigures
        Per method of :data:`METHODS`, one per split.
    splits : list of NounSplit
    train_correlation : float or None
        Target; None uses all training prompts.
    n_train, n_test : int
        Training and held-out families of a split.
    random_state : int
    moments_seconds : float
        Mean time to accumulate the moments of a split.
    """

    outcomes: dict[str, list[SplitFigures]]
    splits: list[NounSplit]
    train_correlation: float | None
    n_train: int
    n_test: int
    random_state: int
    moments_seconds: float

    @property
    def test_ratio(self) -> float:
        """Held-out families per training family."""
        return self.n_test / self.n_train

    def column(self, method: str, field: str) -> Float:
        """Values of one field of :class:`SplitFigures`, one per split."""
        return np.array([getattr(outcome, field) for outcome in self.outcomes[method]])


def run(
    data: ProfessionData,
    *,
    n_splits: int = 20,
    random_state: int = 0,
    train_correlation: float | None = None,
    progress: bool | None = None,
) -> Results:
    """Run the experiment.

    Parameters
    ----------
    data : ProfessionData
    n_splits : int
        Random splits by family; at least 2. Split i does not depend on their number.
    random_state : int
        Not negative.
    train_correlation : float, optional
        Drop training prompts until the two scores have this correlation. The default uses all.
    progress : bool, optional
        Show a progress bar on stderr; by default only in a terminal or notebook, after two
        seconds.

    Raises
    ------
    InputError
        A parameter out of range.
    NotEnoughDataError
        No subset of the prompts of a split has the target correlation.
    """
    if n_splits < 2:
        raise InputError(f"the number of splits is {n_splits}; intervals need at least 2")
    if random_state < 0:
        raise InputError(f"random_state is {random_state}; it must not be negative")
    splits = [make_split(data, (random_state, i), train_correlation) for i in range(n_splits)]
    outcomes: dict[str, list[SplitFigures]] = {method: [] for method in METHODS}
    n_rows = sum(len(split.train) for split in splits)
    row_bytes = data.activations[:1].nbytes
    moments_seconds = 0.0
    # Load every BLAS before their threads are limited, and compile before the first timing.
    warm_up = fit_method(
        "LEACE", accumulate(data, splits[0].train), erase="stereotype", keep="factual"
    )
    warm_up(data.activations[:1])
    # NumPy's and SciPy's BLAS have separate threads, which at this size wait for each other longer
    # than they compute.
    with (
        threadpool_limits(1, user_api="blas"),
        Progress(n_rows, "training prompts", show=progress) as bar,
    ):
        for split in splits:
            started = time.perf_counter()
            moments = accumulate(data, split.train)
            moments_seconds += (time.perf_counter() - started) / n_splits
            for method, figures in evaluate(data, split, moments).items():
                outcomes[method].append(figures)
            bar.advance(len(split.train), len(split.train) * row_bytes)
    n_families = len(set(data.families))
    n_train = train_families(n_families)
    return Results(
        outcomes,
        splits,
        train_correlation,
        n_train,
        n_families - n_train,
        random_state,
        moments_seconds,
    )


def train_families(n_families: int) -> int:
    """Families in the training part of a split."""
    return int(TRAIN_FRACTION * n_families)


def accumulate(data: ProfessionData, rows: NDArray[np.intp]) -> Moments:
    """Moments of some prompts, with both scores as continuous variables."""
    nouns = data.noun_index[rows]
    # One block: no merge is pending when a method is timed.
    kinds = {"stereotype": "continuous", "factual": "continuous"}
    return Moments(block_rows=len(rows), kinds=kinds).update(
        data.activations[rows],
        {"stereotype": data.stereotype[nouns], "factual": data.factual[nouns]},
    )


def make_split(
    data: ProfessionData, seed: tuple[int, int], train_correlation: float | None = None
) -> NounSplit:
    """Split the families at random; thin the held-out prompts until the scores are uncorrelated.

    Raises
    ------
    NotEnoughDataError
        No subset of the held-out or the training prompts has the target correlation.
    """
    rng = np.random.default_rng(seed)
    names, family = np.unique(data.families, return_inverse=True)
    order = rng.permutation(len(names))
    in_train = np.isin(family, order[: train_families(len(names))])
    test, test_correlation = thinned(data, np.flatnonzero(~in_train), 0.0, rng)
    train, correlation = thinned(data, np.flatnonzero(in_train), train_correlation, rng)
    return NounSplit(train, test, correlation, test_correlation)


def thinned(
    data: ProfessionData, nouns: NDArray[np.intp], target: float | None, rng: np.random.Generator
) -> tuple[NDArray[np.intp], float]:
    """Choose prompts of some nouns over which the two scores have a given correlation.

    Greedy: drop one prompt at a time, of the noun that brings the correlation nearest to its
    target, until it is within :data:`CORRELATION_TOLERANCE`. A random prompt of the noun is
    dropped.

    Parameters
    ----------
    nouns : int array
    target : float or None
        None keeps every prompt.
    rng : numpy.random.Generator

    Returns
    -------
    rows : int array, sorted
    correlation : float

    Raises
    ------
    NotEnoughDataError
        A score is constant, or dropping no prompt brings the correlation nearer.
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
                f"{len(nouns)} nouns cannot be thinned to a correlation of {target:g} between the "
                f"two scores: {correlation:.2g} is left with {counts.sum()} prompts. There are too "
                "few nouns, or a score is constant among them; try another seed or more nouns"
            )
        counts[noun] -= 1
        correlation = float(candidates[noun])
    rows = [noun_rows[:count] for noun_rows, count in zip(prompts, counts, strict=True)]
    return np.sort(np.concatenate(rows)), correlation


def _correlation(sums: Float) -> Float:
    """Correlation from sums of 1, z, y, z^2, y^2 and z y; NaN where z or y is constant."""
    n, z, y, zz, yy, zy = sums
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((n * zy - z * y) / np.sqrt((n * zz - z * z) * (n * yy - y * y)))


def evaluate(data: ProfessionData, split: NounSplit, moments: Moments) -> dict[str, SplitFigures]:
    """Fit every method on the training moments, apply it to all rows, and measure."""
    X, train, test = data.activations, split.train, split.test
    z, y = data.stereotype[data.noun_index], data.factual[data.noun_index]
    z_train, y_train = z[train] - z[train].mean(), y[train] - y[train].mean()
    before = X[train]
    covariance_z, covariance_y = (np.linalg.norm(c @ before) for c in (z_train, y_train))
    total = np.sum(np.square(before - before.mean(axis=0)))
    found = {}
    for method in METHODS:
        started = time.perf_counter()
        if method == "Original":
            erased = X
        else:
            erased = fit_method(method, moments, erase="stereotype", keep="factual")(X)
        seconds = time.perf_counter() - started
        after, unseen = erased[train], erased[test]
        stereotype, factual = coefficients(data.log_odds(unseen), z[test], y[test])
        found[method] = SplitFigures(
            stereotype=stereotype,
            factual=factual,
            residual=float(np.linalg.norm(z_train @ after) / covariance_z),
            kept=float(np.linalg.norm(y_train @ after) / covariance_y),
            distortion=float(np.sum(np.square(after - before)) / total),
            probe_r2=probe_r2(after, z[train], unseen, z[test]),
            seconds=seconds,
        )
    return found


def coefficients(log_odds: Float, z: Float, y: Float) -> tuple[float, float]:
    """Coefficients of z and y in the least-squares regression of the log-odds on [1, z, y]."""
    design = np.stack([np.ones_like(z), z, y], axis=1)
    solution = np.linalg.lstsq(design, log_odds)[0]
    return float(solution[1]), float(solution[2])


def probe_r2(train: Float, z_train: Float, test: Float, z_test: Float) -> float:
    """R^2 of z on held-out rows by a ridge regression with an intercept.

    Features are divided by their standard deviation on `train`, so that R^2 does not depend on
    their units; the penalty :data:`PROBE_PENALTY` per row keeps the rounding error of an erased
    direction small. R^2 is below 0 where the prediction is worse than the mean of `z_test`.
    """
    moments = Moments(block_rows=len(train), kinds={"z": "continuous"}).update(
        train, {"z": z_train}
    )
    covariance, cross = moments.covariance(ddof=0), moments.cross_covariance("z", ddof=0)[:, 0]
    scale = np.sqrt(np.diag(covariance))
    scale[scale == 0] = 1.0
    gram = covariance / scale / scale[:, None]
    weights = np.linalg.solve(gram + PROBE_PENALTY * np.eye(len(gram)), cross / scale) / scale
    error = z_test - z_train.mean() - (test - moments.mean) @ weights
    return float(1 - np.sum(error**2) / np.sum((z_test - z_test.mean()) ** 2))
