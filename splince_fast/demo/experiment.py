"""The profession experiment of the paper: erase a stereotype, keep factual gender.

Section "Language modeling" of Holstege, Ravfogel and Wouters (NeurIPS 2025). The states x of a
language model that is about to say " he" or " she" after a noun carry the stereotype z of that noun
and its factual gender y. Erasers of z are fitted on some nouns; on the others the log-odds

    log p(he) - log p(she) = r(x) @ (w_he - w_she)

are regressed on [1, z, y]. Two coefficients tell how far the model still goes by each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from splince_fast.demo.professions import ProfessionData
from splince_fast.exceptions import InputError, NotEnoughDataError
from splince_fast.methods import leace, sal, splince
from splince_fast.moments import Moments
from splince_fast.projection import Projection
from splince_fast.sources import Progress

Float = NDArray[np.float64]

TRAIN_SHARE: Final = 0.7
# Largest correlation of the two scores that is left among the held-out prompts.
MAX_CORRELATION: Final = 1e-3
# The probe cuts singular values below this times the largest. Those of the shipped states end
# near 1e-3; the direction that was erased comes back from rounding at 1e-15.
PROBE_CUTOFF: Final = 1e-5

ERASERS: Final[dict[str, Callable[[Moments], Projection]]] = {
    "SAL": lambda moments: sal(moments, erase="stereotype"),
    "LEACE": lambda moments: leace(moments, erase="stereotype"),
    "SPLINCE": lambda moments: splince(moments, erase="stereotype", keep="factual"),
}
METHODS: Final = ("Original", *ERASERS)


@dataclass(frozen=True)
class Split:
    """Rows of one random split by noun.

    Attributes
    ----------
    train : int array
        All prompts of the training nouns.
    held_out : int array
        All prompts of the other nouns.
    test : int array
        Those of `held_out` that are left once the two scores are uncorrelated.
    correlation : float
        What is left of it in `test`.
    """

    train: NDArray[np.intp]
    held_out: NDArray[np.intp]
    test: NDArray[np.intp]
    correlation: float


@dataclass(frozen=True)
class Outcome:
    """What one method gives in one split.

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
        To fit from moments, and to apply to every row.
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
    outcomes : dict of str to list of Outcome
        Per method of :data:`METHODS`, one per split.
    splits : list of Split
    test_ratio : float
        Held-out nouns per training noun.
    n_nouns, n_templates, n_features, seed : int
    model : str
    moments_seconds : float
        To accumulate the moments of all splits.
    seconds : float
        Of everything.
    """

    outcomes: dict[str, list[Outcome]]
    splits: list[Split]
    test_ratio: float
    n_nouns: int
    n_templates: int
    n_features: int
    seed: int
    model: str
    moments_seconds: float
    seconds: float

    def column(self, method: str, field: str) -> Float:
        """Values of one field of :class:`Outcome`, one per split."""
        return np.array([getattr(outcome, field) for outcome in self.outcomes[method]])


def run(
    data: ProfessionData, *, n_splits: int = 20, seed: int = 0, progress: bool = False
) -> Results:
    """Run the experiment.

    Parameters
    ----------
    data : ProfessionData
    n_splits : int
        Random splits by noun; at least 2.
    seed : int
        Not negative. Split i is the same however many there are.
    progress : bool
        Show rows/s and the time left on stderr.

    Raises
    ------
    InputError
        A parameter out of range.
    NotEnoughDataError
        The held-out nouns of a split cannot be made uncorrelated.
    """
    if n_splits < 2:
        raise InputError(f"the number of splits is {n_splits}; intervals need at least 2")
    if seed < 0:
        raise InputError(f"the seed is {seed}; it must not be negative")
    started = time.perf_counter()
    splits = [make_split(data, [seed, i]) for i in range(n_splits)]
    n = len(data.activations)
    outcomes: dict[str, list[Outcome]] = {method: [] for method in METHODS}
    with Progress(n * n_splits, n_splits * data.activations.nbytes, "splits", enabled=progress) as bar:
        clock = time.perf_counter()
        total = accumulate(data, np.arange(n))
        moments_seconds = time.perf_counter() - clock
        for split in splits:
            clock = time.perf_counter()
            moments = total - accumulate(data, split.held_out)
            moments_seconds += time.perf_counter() - clock
            for method in METHODS:
                outcomes[method].append(evaluate(data, split, moments, method))
            bar.advance(n, data.activations.nbytes)
    n_train = train_nouns(len(data.nouns))
    return Results(
        outcomes=outcomes,
        splits=splits,
        test_ratio=(len(data.nouns) - n_train) / n_train,
        n_nouns=len(data.nouns),
        n_templates=len(data.templates),
        n_features=data.activations.shape[1],
        seed=seed,
        model=data.model,
        moments_seconds=moments_seconds,
        seconds=time.perf_counter() - started,
    )


def train_nouns(n_nouns: int) -> int:
    """Nouns in the training part of a split."""
    return int(TRAIN_SHARE * n_nouns)


def accumulate(data: ProfessionData, rows: NDArray[np.intp]) -> Moments:
    """Moments of some prompts, with both scores as continuous variables."""
    nouns = data.noun_index[rows]
    return Moments().update(
        data.activations[rows],
        {"stereotype": data.stereotype[nouns], "factual": data.factual[nouns]},
    )


def make_split(data: ProfessionData, seed: list[int]) -> Split:
    """Split the nouns at random, and thin the held-out prompts until the scores are uncorrelated.

    Raises
    ------
    NotEnoughDataError
        They cannot be.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(data.nouns))
    n_train = train_nouns(len(order))
    held = np.sort(order[n_train:])
    is_held = np.isin(data.noun_index, held)
    z, y = data.stereotype[held], data.factual[held]
    prompts = [rng.permutation(np.flatnonzero(data.noun_index == noun)) for noun in held]
    counts, correlation = uncorrelated_counts(z, y, np.array([len(rows) for rows in prompts]))
    test = np.concatenate([rows[:count] for rows, count in zip(prompts, counts, strict=True)])
    return Split(np.flatnonzero(~is_held), np.flatnonzero(is_held), np.sort(test), correlation)


def uncorrelated_counts(
    z: Float, y: Float, counts: NDArray[np.intp]
) -> tuple[NDArray[np.intp], float]:
    """How many prompts of each noun to use, so that the scores are uncorrelated over prompts.

    One prompt at a time is given up, of the noun that brings the correlation nearest to 0, until
    it is below :data:`MAX_CORRELATION`: this gives up few of them.

    Parameters
    ----------
    z, y : float64 arrays of shape (n_nouns,)
    counts : int array of shape (n_nouns,)
        Prompts that there are.

    Returns
    -------
    counts : int array of shape (n_nouns,)
    correlation : float

    Raises
    ------
    NotEnoughDataError
        A score is constant, or no prompt helps any more.
    """
    kept = counts.copy()
    terms = np.stack([np.ones_like(z), z, y, z * z, y * y, z * y])
    correlation = float(_correlation(terms @ kept))
    while not abs(correlation) < MAX_CORRELATION:
        left = _correlation((terms @ kept)[:, None] - terms)
        left[(kept == 0) | np.isnan(left)] = np.inf
        noun = int(np.argmin(np.abs(left)))
        if not abs(left[noun]) < abs(correlation):
            raise NotEnoughDataError(
                f"the two scores of the {len(z)} held-out nouns cannot be made uncorrelated: "
                f"{correlation:.2g} is left with {kept.sum()} prompts. There are too few nouns, or "
                "a score is constant among them; try another seed or more nouns"
            )
        kept[noun] -= 1
        correlation = float(left[noun])
    return kept, correlation


def _correlation(sums: Float) -> Float:
    """Correlation from sums of 1, z, y, z^2, y^2 and z y; NaN where one of them is constant."""
    n, z, y, zz, yy, zy = sums
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((n * zy - z * y) / np.sqrt((n * zz - z * z) * (n * yy - y * y)))


def evaluate(data: ProfessionData, split: Split, moments: Moments, method: str) -> Outcome:
    """Fit one method on the training moments, apply it to all rows, and measure."""
    X = data.activations
    started = time.perf_counter()
    erased = X if method == "Original" else ERASERS[method](moments)(X)
    seconds = time.perf_counter() - started
    z, y = data.stereotype[data.noun_index], data.factual[data.noun_index]
    train, test = split.train, split.test
    before, after = X[train], erased[train]
    z_train, y_train = z[train] - z[train].mean(), y[train] - y[train].mean()
    stereotype, factual = coefficients(data.log_odds(erased[test]), z[test], y[test])
    return Outcome(
        stereotype=stereotype,
        factual=factual,
        residual=float(np.linalg.norm(z_train @ after) / np.linalg.norm(z_train @ before)),
        kept=float(np.linalg.norm(y_train @ after) / np.linalg.norm(y_train @ before)),
        distortion=float(
            np.sum(np.square(after - before)) / np.sum(np.square(before - before.mean(axis=0)))
        ),
        probe_r2=probe_r2(after, z[train], erased[test], z[test]),
        seconds=seconds,
    )


def coefficients(log_odds: Float, z: Float, y: Float) -> tuple[float, float]:
    """Coefficients of z and y in the least-squares regression of the log-odds on [1, z, y]."""
    design = np.stack([np.ones_like(z), z, y], axis=1)
    solution = np.linalg.lstsq(design, log_odds)[0]
    return float(solution[1]), float(solution[2])


def probe_r2(train: Float, z_train: Float, test: Float, z_test: Float) -> float:
    """Share of the variance of z that a linear probe explains on held-out rows; below 0 if worse
    than their mean.

    Ordinary least squares without a ridge, with an intercept, on features in units of their
    standard deviation; singular values below :data:`PROBE_CUTOFF` times the largest are cut off,
    because what is left of an erased direction is rounding, and rounding still has a pattern.
    """
    mean, scale = train.mean(axis=0), train.std(axis=0)
    scale[scale == 0] = 1.0
    features = (train - mean) / scale
    values, vectors = np.linalg.eigh(features.T @ features)
    used = values > PROBE_CUTOFF**2 * values[-1]
    along = vectors[:, used]
    weights = along @ ((along.T @ (features.T @ (z_train - z_train.mean()))) / values[used])
    error = z_test - z_train.mean() - ((test - mean) / scale) @ weights
    return float(1 - np.sum(error**2) / np.sum((z_test - z_test.mean()) ** 2))
