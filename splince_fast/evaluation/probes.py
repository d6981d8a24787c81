"""Leakage: how well probes find the concept in erased rows held out from the eraser's fit.

A linear probe trained on the eraser's own training rows is at chance by construction, so that
figure says nothing. Probes here are trained and scored, by cross-validation, within fresh rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.special
import scipy.stats
from numpy.typing import NDArray

from splince_fast._runtime.arrays import as_rows
from splince_fast._solve.options import is_integer
from splince_fast.evaluation import _logistic
from splince_fast.evaluation._cells import coded
from splince_fast.exceptions import InputError, SplinceWarning
from splince_fast.labels import Columns, encode_one

Float = NDArray[np.float64]
Fold = tuple[NDArray[np.intp], NDArray[np.intp]]
Target = tuple[NDArray[np.intp], Sequence[Fold]]  # codes of the rows, and the folds for them

PROBES = ("linear", "quadratic", "mlp", "boosting")
ALPHA = 0.01  # of the linear probe, on features of unit variance
_FLOOR = 1e-6  # of the largest deviation or singular value: below it is rounding residue
_COMPONENTS = 64  # leading ones, of the quadratic probe and of boosting
_SHRINKAGE = 0.1  # of class covariances of the quadratic probe, towards that of all rows
_TRIES = 20  # draws per permutation, where some allow no folds
_FAR_BELOW = 4.0  # standard errors


@dataclass(frozen=True, slots=True)
class Probe:
    """Scores of one kind of probe.

    Attributes
    ----------
    name : str
    accuracy, auc : float
        Means over the folds; AUC one-vs-rest and macro-averaged for more than two classes,
        never folded at .5. NaN for a quantity.
    r2 : float
        Mean R^2 on the folds held out, for a quantity; it may be negative. NaN for classes.
    chance : float
        Share of the most frequent class; 0 for a quantity.
    permuted : float
        Mean figure of the same probe on permuted labels; NaN without permutations.
    p_value : float
        (1 + permutations at least as good) / (1 + permutations); NaN without permutations.
    excess : float
        Accuracy (or R^2) above the larger of `chance` and `permuted`.
    """

    name: str
    accuracy: float
    auc: float
    r2: float
    chance: float
    permuted: float
    p_value: float
    excess: float

    def figures(self) -> dict[str, float]:
        """Figures that are not NaN, by their name in a comparison, such as "probe_accuracy".

        Returns
        -------
        dict of str to float
            Accuracy and AUC, or R^2, and chance.
        """
        start = "probe" if self.name == "linear" else self.name
        figures = {"accuracy": self.accuracy, "auc": self.auc, "r2": self.r2,
                   "chance": self.chance}  # fmt: skip
        return {f"{start}_{name}": v for name, v in figures.items() if not math.isnan(v)}


@dataclass(frozen=True, slots=True)
class Leakage:
    """Probes on fresh rows.

    Attributes
    ----------
    probes : tuple of Probe
        Empty where leakage could not be measured.
    n : int
        Rows that were probed.
    n_classes : int
        0 for a quantity.
    reason : str
        Why it could not be measured; empty otherwise.
    hint : str
        Advice where an AUC is further below .5 than independent rows make likely; empty otherwise.
    """

    probes: tuple[Probe, ...]
    n: int
    n_classes: int
    reason: str
    hint: str = ""

    def __getitem__(self, name: str) -> Probe:
        for probe in self.probes:
            if probe.name == name:
                return probe
        raise KeyError(name)

    def __str__(self) -> str:
        if self.reason:
            return f"leakage not measurable: {self.reason}"
        lines = [f"leakage on {self.n:,} rows (a fair figure needs rows held out from the eraser)"]
        for probe in self.probes:
            if self.n_classes:
                text = f"accuracy {probe.accuracy:.3f}, AUC {probe.auc:.3f}"
            else:
                text = f"R2 {probe.r2:.3f}"
            text += f", chance {probe.chance:.3f}"
            if not math.isnan(probe.permuted):
                text += f", permuted {probe.permuted:.3f} (p = {probe.p_value:.3g})"
            lines.append(f"  {probe.name:<9} {text}")
        if self.hint:
            lines.append(f"  {self.hint}")
        return "\n".join(lines)


def leakage(
    X_fresh: Any,
    z_fresh: Any,
    *,
    probes: Sequence[str] = PROBES,
    cv: int = 5,
    n_permutations: int = 0,
    groups: Any = None,
    random_state: int = 0,
) -> Leakage:
    """Probe erased rows for the concept; they should be held out from the fit of the eraser.

    The linear probe is logistic with mean log-loss + .01 / 2 |w|^2 on features of unit variance
    (ridge for a quantity); "quadratic" is the discriminant of normal distributions with a
    covariance per class, .9 S_c + .1 S, on the leading 64 principal components; "mlp" is
    scikit-learn's ``MLPClassifier((128,), early_stopping=True)`` and "boosting" its histogram
    gradient boosting on the same components.
    Features and directions below 1e-6 of the largest are rounding residue and left out.

    Parameters
    ----------
    X_fresh : array-like of shape (n, d)
        Erased rows that were not used to fit the eraser.
    z_fresh : column of shape (n,)
        The concept: classes, or a quantity in floats. Rows without it are left out.
    probes : sequence of {"linear", "quadratic", "mlp", "boosting"}
        Which probes.
    cv : int
        Folds, stratified and shuffled.
    n_permutations : int
        Repetitions of each probe on permuted labels, each with folds stratified on them.
    groups : column of shape (n,), optional
        Rows of one group stay in one fold: twins of a sentence in different folds give an AUC
        far below .5 even where nothing was erased. Groups in which the concept is constant
        exchange their labels as wholes in a permutation; in the others rows do so within the
        group. Rows without a group are one group.
    random_state : int
        Of folds, permutations and probes.

    Returns
    -------
    Leakage
        With a `reason` and no probes where the rows allow no measurement.

    Raises
    ------
    InputError
        A parameter out of range.

    Warns
    -----
    SplinceWarning
        Without `groups` an AUC is so far below .5 that rows must depend on each other.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast.evaluation import leakage
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, 400)
    >>> found = leakage(rng.normal(size=(400, 5)) + 2 * z[:, None], z, probes=("linear",))
    >>> found["linear"].accuracy > 0.9
    True
    """
    for name in probes:
        if name not in PROBES:
            raise InputError(f"there is no probe {name!r}; choose from {PROBES}")
    if not is_integer(cv) or cv < 2:
        raise InputError(f"cv is {cv!r}; it must be an integer of at least 2")
    if not is_integer(n_permutations) or n_permutations < 0:
        raise InputError(f"n_permutations is {n_permutations!r}; it must be a non-negative integer")
    rows = np.asarray(as_rows(X_fresh, name="X_fresh"), dtype=np.float64)
    encoded = encode_one(z_fresh, len(rows), name="z_fresh")
    members = None if groups is None else coded(groups, "groups", len(rows)).codes
    if isinstance(encoded, Columns):
        return probe_quantity(
            rows, encoded.values, encoded.present, list(probes), cv, n_permutations, members,
            random_state,
        )  # fmt: skip
    inside = encoded.codes >= 0
    names, codes = np.unique(encoded.codes[inside], return_inverse=True)
    codes = codes.astype(np.intp)
    members = None if members is None else members[inside]
    folds, reason = folds_of(codes, len(names), cv, members, random_state)
    permuted: list[Target] = []
    if not reason:
        permuted = _permuted_targets(codes, len(names), cv, members, n_permutations, random_state)
    found = probe_codes(
        rows[inside], codes, len(names), list(probes), permuted, folds, reason, random_state
    )
    if found.hint and members is None:
        warnings.warn(found.hint, SplinceWarning, stacklevel=2)
    return found


def _permuted_targets(
    codes: NDArray[np.intp],
    n_classes: int,
    cv: int,
    groups: NDArray[np.intp] | None,
    count: int,
    random_state: int,
) -> list[Target]:
    """Permuted codes, and folds by the rule for the true ones: the same function of the labels.

    A permutation that allows no folds is drawn again, which keeps the others exchangeable with
    the true labels: these allow folds, too.
    """
    rng = np.random.default_rng(random_state)
    targets: list[Target] = []
    for _ in range(_TRIES * count):
        if len(targets) == count:
            break
        target = codes[permutation_within(codes, groups, rng)]
        folds, reason = folds_of(target, n_classes, cv, groups, random_state)
        if not reason:
            targets.append((target, folds))
    if len(targets) < count:
        raise InputError(
            f"only {len(targets)} of {_TRIES * count} permutations of the labels allow folds with "
            "all classes: the groups are too few for a permutation test; pass n_permutations=0"
        )
    return targets


def permutation_within(
    values: NDArray[Any], groups: NDArray[np.intp] | None, rng: np.random.Generator
) -> NDArray[np.intp]:
    """Rows whose labels the rows take in a permutation that is exchangeable given the groups.

    Parameters
    ----------
    values : (n,) or (n, k)
        Labels: they tell in which groups the concept is constant.
    groups : (n,), optional
        Without it all rows are permuted.
    rng : Generator
        Drawn from.
    """
    n = len(values)
    if groups is None:
        return rng.permutation(n)
    _, member, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    order = np.argsort(member, kind="stable")
    taken = np.empty(n, dtype=np.intp)
    taken[order] = np.lexsort((rng.random(n), member))
    first = order[np.cumsum(sizes) - sizes]
    differs = (values != values[first[member]]).reshape(n, -1).any(axis=1)
    whole = np.flatnonzero(np.bincount(member, differs, len(sizes)) == 0)
    source = np.arange(len(sizes))
    source[whole] = rng.permutation(whole)
    constant = np.isin(member, whole)
    taken[constant] = first[source[member[constant]]]
    return taken


def probe_codes(
    rows: Float,
    codes: NDArray[np.intp],
    n_classes: int,
    probes: Sequence[str],
    permuted: Sequence[Target],
    folds: Sequence[Fold],
    reason: str,
    random_state: int,
) -> Leakage:
    """Do as `leakage` for rows that all have a class; folds and reason are of `folds_of`."""
    if reason:
        return Leakage((), len(rows), n_classes, reason)
    counts = np.bincount(codes, minlength=n_classes)
    targets = [(codes, folds), *permuted]
    prepared = _scaled(rows)
    found = []
    for name in probes:
        if name == "linear":
            scores = _linear_scores(prepared, targets, n_classes)
        else:
            scores = [_sklearn_scores(name, prepared, t, f, random_state) for t, f in targets]
        figures = [
            figures_of(s, t, f, n_classes) for s, (t, f) in zip(scores, targets, strict=True)
        ]
        accuracy, auc = figures[0]
        others = [figure[0] for figure in figures[1:]]
        chance = float(counts.max() / counts.sum())
        mean, p = against(accuracy, others)
        excess = accuracy - max(chance, -math.inf if math.isnan(mean) else mean)
        found.append(Probe(name, accuracy, auc, math.nan, chance, mean, p, excess))
    hint = _hint([probe.auc for probe in found], counts)
    return Leakage(tuple(found), len(rows), n_classes, "", hint)


def _hint(areas: Sequence[float], counts: NDArray[np.intp]) -> str:
    """Advice where the lowest AUC is far below .5, by the standard error of independent rows.

    That of the Mann-Whitney statistic under no difference is sqrt((n + 1) / (12 n_1 n_0)); the
    smallest class has the largest.
    """
    n, fewest = int(counts.sum()), int(counts.min())
    error = math.sqrt((n + 1) / (12 * fewest * (n - fewest)))
    lowest = min(areas, default=math.nan)
    if not lowest < 0.5 - _FAR_BELOW * error:
        return ""
    return (
        f"an AUC of {lowest:.2f} is too far below .5 for independent rows: rows that belong "
        "together, such as twins of a sentence, lie in different folds; keep them together with "
        "groups="
    )


def folds_of(
    codes: NDArray[np.intp],
    n_classes: int,
    cv: int,
    groups: NDArray[np.intp] | None,
    random_state: int,
) -> tuple[list[Fold], str]:
    """Folds of rows that all have a class, or the reason why there are none."""
    counts = np.bincount(codes, minlength=n_classes)
    if n_classes < 2:
        return [], f"the fresh rows hold {'1 class' if n_classes else '0 classes'} of the concept"
    if counts.min() < cv and groups is None:
        return [], f"a class has {counts.min()} fresh rows, fewer than the {cv} folds"
    folds = _stratified(codes, cv, groups, random_state)
    none = "no fold has all classes of the concept in its training and in its test rows"
    return folds, "" if folds else none


def _stratified(
    codes: NDArray[np.intp], cv: int, groups: NDArray[np.intp] | None, random_state: int
) -> list[Fold]:
    """Stratified folds, whole groups together; those that lack a class are left out."""
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    if groups is None:
        splitter = StratifiedKFold(cv, shuffle=True, random_state=random_state)
        return list(splitter.split(codes[:, None], codes))
    if len(np.unique(groups)) < cv:
        return []
    splitter = StratifiedGroupKFold(cv, shuffle=True, random_state=random_state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # classes smaller than cv: looked at below
        folds = list(splitter.split(codes[:, None], codes, groups))
    whole = len(np.unique(codes))
    return [f for f in folds if all(len(np.unique(codes[part])) == whole for part in f)]


def _scaled(rows: Float) -> Float:
    """Rows centred and over one number, so that tolerances have a meaning."""
    centred = rows - rows.mean(axis=0)
    unit = math.sqrt(float(np.mean(centred**2)))
    return np.asarray(centred / unit if unit > 0 else centred)


def _linear_scores(rows: Float, targets: Sequence[Target], n_classes: int) -> list[Float]:
    """Scores (n, C) of every row by the probe of the folds that did not see it, per target.

    Standardising by the deviations s of a fold and penalising |w|^2 is penalising s_k^2 u_k^2 for
    weights u = w / s of the features as they are; so all folds and targets are one batch. A
    feature that is rounding residue in a fold has the penalty of the largest one there, under
    which it has no weight.
    """
    n = len(rows)
    parts = [(t, fold) for t, (_, folds) in enumerate(targets) for fold in folds]
    weights = np.zeros((n, len(parts)))
    for j, (_, (train, _)) in enumerate(parts):
        weights[train, j] = 1.0 / len(train)
    # The rows are centred: the difference of squares loses no more than a few bits, and a feature
    # that is constant in a fold comes out at sqrt(eps) of its size, far below _FLOOR.
    variances = (rows**2).T @ weights - (rows.T @ weights) ** 2
    deviations = np.sqrt(np.maximum(variances, 0.0))
    largest = deviations.max(axis=0)
    varied = deviations > _FLOOR * largest
    some = varied.any(axis=1)
    kept = np.ascontiguousarray(rows[:, some])
    penalties = ALPHA * np.where(varied, deviations, largest)[some] ** 2
    codes = np.stack([targets[t][0] for t, _ in parts], axis=1)
    fits = _logistic.fit(kept, codes, n_classes, penalties, sample_weights=weights)
    results = [np.full((n, fits.weights.shape[1]), np.nan) for _ in targets]
    for j, (t, (_, held_out)) in enumerate(parts):
        results[t][held_out] = kept[held_out] @ fits.weights[j].T + fits.intercepts[j]
    return results


def _sklearn_scores(
    name: str, rows: Float, target: NDArray[np.intp], folds: Sequence[Fold], random_state: int
) -> Float:
    """Scores of a non-linear probe, on the directions above the rounding residue."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier

    classes = int(target.max()) + 1
    scores = np.full((len(rows), 1 if classes == 2 else classes), np.nan)
    for train, held_out in folds:
        fitted, new = _standardised(rows, train, held_out)
        _, sizes, axes = np.linalg.svd(fitted, full_matrices=False)
        axes = axes[sizes > _FLOOR * sizes[0]]
        if name != "mlp":
            axes, sizes = axes[:_COMPONENTS], sizes[:_COMPONENTS]
        if name == "quadratic":
            white = axes.T * (len(train) ** 0.5 / sizes[: len(axes)])
            logs = _gaussian_scores(fitted @ white, target[train], new @ white, classes)
            scores[held_out] = logs[:, 1:] - logs[:, :1] if classes == 2 else logs
            continue
        if name == "boosting":
            model: Any = HistGradientBoostingClassifier(random_state=random_state)
        else:
            model = MLPClassifier((128,), early_stopping=True, random_state=random_state)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # early stopping decides
            model.fit(fitted @ axes.T, target[train])
        p = model.predict_proba(new @ axes.T)
        tiny = np.finfo(np.float64).tiny
        logs = np.log(np.maximum(p, tiny))
        scores[held_out] = logs[:, 1:] - logs[:, :1] if classes == 2 else logs
    return scores


def _standardised(
    rows: Float, train: NDArray[np.intp], held_out: NDArray[np.intp]
) -> tuple[Float, Float]:
    """Training and held-out rows by the deviations of the training rows, residue left out."""
    mean, deviation = rows[train].mean(axis=0), rows[train].std(axis=0)
    varied = deviation > _FLOOR * deviation.max()
    return (
        (rows[train][:, varied] - mean[varied]) / deviation[varied],
        (rows[held_out][:, varied] - mean[varied]) / deviation[varied],
    )


def _gaussian_scores(fitted: Float, target: NDArray[np.intp], new: Float, classes: int) -> Float:
    """(n, C) log p_c N(x; m_c, S_c) of white rows, with S_c shrunk towards the identity."""
    scores = np.empty((len(new), classes))
    for c in range(classes):
        rows = fitted[target == c]
        centred = rows - rows.mean(axis=0)
        covariance = (1.0 - _SHRINKAGE) * centred.T @ centred / len(rows)
        covariance.flat[:: len(covariance) + 1] += _SHRINKAGE
        root = np.linalg.cholesky(covariance)
        distance = np.sum(np.linalg.solve(root, (new - rows.mean(axis=0)).T) ** 2, axis=0)
        scores[:, c] = np.log(len(rows) / len(fitted)) - distance / 2
        scores[:, c] -= np.log(np.diagonal(root)).sum()
    return scores


def probe_quantity(
    rows: Float,
    values: Float,
    present: NDArray[np.bool_] | None,
    probes: Sequence[str],
    cv: int,
    n_permutations: int,
    groups: NDArray[np.intp] | None,
    random_state: int,
) -> Leakage:
    """Do as `leakage` for the columns (n, k) of a quantity: ridge probes, R^2 held out."""
    from sklearn.linear_model import Ridge
    from sklearn.model_selection import GroupKFold, KFold

    if present is not None:
        rows, values = rows[present], values[present]
        groups = None if groups is None else groups[present]
    if "linear" not in probes:
        raise InputError("a quantity has the linear probe alone; pass probes=('linear',)")
    if len(rows) < 2 * cv or np.ptp(values, axis=0).max(initial=0.0) == 0.0:
        return Leakage((), len(rows), 0, "too few fresh rows, or a constant quantity")
    splitter = (
        KFold(cv, shuffle=True, random_state=random_state)
        if groups is None
        else GroupKFold(cv, shuffle=True, random_state=random_state)
    )
    folds = list(splitter.split(rows, groups=groups))
    rng = np.random.default_rng(random_state)
    targets = [
        values,
        *(values[permutation_within(values, groups, rng)] for _ in range(n_permutations)),
    ]
    scores = []
    for target in targets:
        shares = []
        for train, held_out in folds:
            fitted, new = _standardised(rows, train, held_out)
            model = Ridge(alpha=ALPHA * len(train)).fit(fitted, target[train])
            rest = target[held_out] - model.predict(new).reshape(len(held_out), -1)
            whole = target[held_out] - target[train].mean(axis=0)
            shares.append(1 - float(np.sum(rest**2)) / float(np.sum(whole**2)))
        scores.append(float(np.mean(shares)))
    permuted, p = against(scores[0], scores[1:])
    excess = scores[0] - max(0.0, -math.inf if math.isnan(permuted) else permuted)
    probe = Probe("linear", math.nan, math.nan, scores[0], 0.0, permuted, p, excess)
    return Leakage((probe,), len(rows), 0, "")


def figures_of(
    scores: Float, target: NDArray[np.intp], folds: Sequence[Fold], n_classes: int
) -> tuple[float, float]:
    """Accuracy and AUC, means over folds."""
    accuracies, areas = [], []
    for _, held_out in folds:
        s, t = scores[held_out], target[held_out]
        y_pred = (s[:, 0] > 0).astype(np.intp) if n_classes == 2 else s.argmax(axis=1)
        accuracies.append(float(np.mean(y_pred == t)))
        if n_classes == 2:
            areas.append(_auc(s[:, 0], t == 1))
        else:
            p = np.asarray(scipy.special.softmax(s, axis=1))
            areas.append(float(np.mean([_auc(p[:, k], t == k) for k in range(n_classes)])))
    return float(np.mean(accuracies)), float(np.mean(areas))


def _auc(score: Float, positive: NDArray[np.bool_]) -> float:
    """P(score of a positive > score of a negative) + 1/2 P(equal), by ranks."""
    n1 = int(positive.sum())
    n0 = len(positive) - n1
    if not n0 or not n1:
        return math.nan
    ranks = scipy.stats.rankdata(score)
    return float((ranks[positive].sum() - n1 * (n1 + 1) / 2) / (n0 * n1))


def against(figure: float, others: list[float]) -> tuple[float, float]:
    """Mean of the permuted figures, and the permutation p value."""
    if not others:
        return math.nan, math.nan
    beaten = sum(other >= figure for other in others)
    return float(np.mean(others)), (1 + beaten) / (1 + len(others))
