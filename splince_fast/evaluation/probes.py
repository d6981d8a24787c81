"""Leakage: accuracy of probes for the concept on erased held-out rows.

Held-out rows are rows that the eraser was not fitted to. On the rows of the fit, a linear probe is
at chance level by construction, whatever the eraser leaves. Probes are trained and scored by
cross-validation within the held-out rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy.special
import scipy.stats
from numpy.typing import NDArray

from splince_fast._runtime.rows import as_rows, check_values
from splince_fast._runtime.warn import warn
from splince_fast._solve.options import is_integer
from splince_fast.evaluation import logistic
from splince_fast.evaluation.data import class_codes, has_label
from splince_fast.evaluation.erasers import Component, clone_with_seed, named_components
from splince_fast.evaluation.heads import decide
from splince_fast.evaluation.metrics import METRICS
from splince_fast.exceptions import InputError, SplinceWarning
from splince_fast.labels import Columns, encode_one
from splince_fast.labels.positions import check_index
from splince_fast.moments.parameters import check_random_state

Float = NDArray[np.float64]
Codes = NDArray[np.intp]
Fold = tuple[NDArray[np.intp], NDArray[np.intp]]  # numbers of training rows and of scored rows

ALPHA = 0.01  # penalty of the linear probe, on features of unit variance
# A feature whose standard deviation is below this fraction of the largest standard deviation counts
# as constant. A direction whose singular value is below this fraction of the largest is dropped.
_CONSTANT_RTOL = 1e-6
# A feature counts as constant if its standard deviation is at most _ROUNDING_FACTOR * eps times its
# largest absolute value, eps being the machine epsilon of the input dtype.
_ROUNDING_FACTOR = 64
_DEPENDENCE_Z = 4.0  # an AUC this many standard errors below .5 indicates dependent rows


class ProbeTarget(NamedTuple):
    """Class codes (n,), and folds of the rows; `reason` says why `folds` is empty."""

    codes: Codes
    n_classes: int
    folds: Sequence[Fold]
    reason: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Scores of one probe, as means over the folds; NaN where a score is undefined."""

    name: str
    accuracy: float
    auc: float  # for more than two classes, the macro average of the one-vs-rest AUCs
    # 1 - SSE / SST of a quantity, over the scored rows of a fold and summed over label columns. SST
    # is the squared error of predicting the mean of the fold's training rows.
    r2: float
    chance: float  # fraction of the most frequent class; 0 for a quantity

    def scores(self) -> dict[str, float]:
        """Return the scores that are not NaN, by metric name, such as "probe_accuracy"."""
        start = "probe" if self.name == "linear" else self.name
        scores = {"accuracy": self.accuracy, "auc": self.auc, "r2": self.r2,
                  "chance": self.chance}  # fmt: skip
        return {f"{start}_{name}": v for name, v in scores.items() if not math.isnan(v)}


@dataclass(frozen=True, slots=True)
class Leakage:
    """Scores of probes on held-out rows."""

    probes: tuple[Probe, ...]  # empty if leakage could not be measured
    n: int  # number of rows with a label of the concept
    n_classes: int  # number of classes of the concept; 0 for a quantity
    reason: str  # reason why leakage could not be measured
    hint: str = ""  # advice if an AUC is so far below .5 that rows must depend on each other

    def __getitem__(self, name: str) -> Probe:
        for probe in self.probes:
            if probe.name == name:
                return probe
        raise KeyError(name)

    def __str__(self) -> str:
        if self.reason:
            return f"leakage cannot be measured: {self.reason}"
        lines = [f"leakage on {self.n:,} rows (valid only if the eraser was not fitted to them)"]
        for probe in self.probes:
            if self.n_classes:
                text = f"accuracy {probe.accuracy:.3f}, AUC {probe.auc:.3f}"
            else:
                text = f"R2 {probe.r2:.3f}"
            lines.append(f"  {probe.name:<9} {text}, chance {probe.chance:.3f}")
        if self.hint:
            lines.append(f"  {self.hint}")
        return "\n".join(lines)


def check_probes(probes: object, name: str) -> tuple[Component, ...]:
    """Return the probes with their names, which may not be those of other metrics."""
    if probes is None:
        raise InputError(f"{name} is None; pass 'linear', or classifiers")
    components = named_components(probes, ("linear",), "probe")
    for probe in components:
        if f"{probe.name}_accuracy" in METRICS or "[" in probe.name:
            raise InputError(
                f"{name} has a probe named {probe.name!r}, as a metric is; pass another name"
            )
    return components


def leakage(
    X_fresh: object,
    z_fresh: object,
    *,
    probes: object = ("linear",),
    cv: int = 5,
    groups: object = None,
    random_state: int = 0,
) -> Leakage:
    """Score probes for the concept on erased held-out rows, by cross-validation.

    The linear probe is logistic regression on features of unit variance, which minimises mean
    log-loss + .01 / 2 |w|^2; for a quantity, ridge regression with the same penalty.

    Features whose standard deviation is below 1e-6 of the largest standard deviation are left out
    as rounding error. Classifiers are fitted to the principal components of the others. If all
    features are constant up to rounding error, every probe is at chance level.

    R^2 of a quantity compares the probe with the mean of the fold's training rows, the best
    prediction without features. ``r2_score`` of scikit-learn uses the mean of the scored rows, and
    gives no credit to a probe that identifies the person whose rows are scored.

    Parameters
    ----------
    X_fresh : array-like of shape (n, d)
        Erased held-out rows: rows that the eraser was not fitted to.
    z_fresh : column of shape (n,)
        Labels of the concept: classes, or floats for a quantity. Rows without a label are left out.
    probes : sequence or mapping
        "linear", or classifiers of scikit-learn, such as ``MLPClassifier()``; the keys of a mapping
        are their names. They are fitted to features of unit variance. A quantity has only "linear".
    cv : int
        Number of folds. Folds are shuffled and, for classes, stratified.
    groups : column of shape (n,), optional
        Groups of rows that depend on each other, such as versions of one sentence. All rows of a
        group are in one fold; versions of a sentence in different folds would give an AUC far
        below .5, with or without erasure. All rows without a group form one group.
    random_state : int
        Seed of the folds and probes.

    Returns
    -------
    Leakage
        Scores of the probes. If leakage cannot be measured, there are no scores, but a `reason`.

    Warns
    -----
    SplinceWarning
        Without `groups`, an AUC is so far below .5 that rows must depend on each other.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast.evaluation import leakage
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, 400)
    >>> result = leakage(rng.normal(size=(400, 5)) + 2 * z[:, None], z)
    >>> result["linear"].accuracy > 0.9
    True
    """
    components = check_probes(probes, "probes")
    if not is_integer(cv) or cv < 2:
        raise InputError(f"cv is {cv!r}; it must be an integer of at least 2")
    random_state = check_random_state(random_state, bits=32)  # limit of scikit-learn
    check_index(X_fresh, z_fresh, "z_fresh")
    check_index(X_fresh, groups, "groups")
    array = as_rows(X_fresh, name="X_fresh")
    check_values(array, "X_fresh")
    rows = np.asarray(array, dtype=np.float64)
    eps = np.finfo(array.dtype).eps if array.dtype.kind == "f" else 0.0
    constant_tol = _ROUNDING_FACTOR * eps * np.abs(rows).max(axis=0, initial=0.0)
    encoded = encode_one(z_fresh, len(rows), name="z_fresh", of="X_fresh")
    group_codes = None
    if groups is not None:
        group_codes = class_codes(groups, "groups", len(rows), of="X_fresh").codes
    labelled = has_label(encoded)
    if not labelled.all():
        rows = rows[labelled]
        group_codes = None if group_codes is None else group_codes[labelled]
    if isinstance(encoded, Columns):
        if all(probe.spec != "linear" for probe in components):
            raise InputError("a quantity has only the linear probe; pass probes=('linear',)")
        return probe_quantity(
            rows, encoded.values[labelled], cv=cv, groups=group_codes, random_state=random_state,
            constant_tol=constant_tol,
        )  # fmt: skip
    classes, codes = np.unique(encoded.codes[labelled], return_inverse=True)
    target = target_of(codes, len(classes), cv, group_codes, random_state)
    result = probe_classes(
        rows, target, components, random_state=random_state, constant_tol=constant_tol
    )
    if result.hint and group_codes is None:
        warn(result.hint, SplinceWarning)
    return result


def probe_classes(
    rows: Float,
    target: ProbeTarget,
    probes: Sequence[Component],
    *,
    random_state: int = 0,
    constant_tol: Float | float = 0.0,
) -> Leakage:
    """Score probes; a feature of deviation `constant_tol` or less counts as constant."""
    codes, n_classes, _, reason = target
    if reason:
        return Leakage((), len(rows), n_classes, reason)
    counts = np.bincount(codes, minlength=n_classes)
    chance = float(counts.max() / counts.sum())
    constant = _is_constant(rows, constant_tol)
    scaled = _scaled(rows)
    results = []
    for probe in probes:
        if constant:
            scores = _constant_scores(target)
        elif probe.spec == "linear":
            scores = _linear_scores(scaled, target)
        else:
            scores = _classifier_scores(probe.spec, scaled, target, random_state)
        results.append(Probe(probe.name, *_accuracy_and_auc(scores, target), math.nan, chance))
    hint = _dependence_hint([probe.auc for probe in results], counts)
    return Leakage(tuple(results), len(rows), n_classes, "", hint)


def _dependence_hint(aucs: Sequence[float], counts: NDArray[np.intp]) -> str:
    """Return advice if the lowest AUC is too far below .5 for independent rows, else ""."""
    # The standard error of an AUC (Mann-Whitney statistic) of n_1 positive and n_0 negative rows is
    # sqrt((n + 1) / (12 n_1 n_0)), n = n_1 + n_0; that of the smallest class is the largest.
    n, fewest = int(counts.sum()), int(counts.min())
    error = math.sqrt((n + 1) / (12 * fewest * (n - fewest)))
    lowest = min(aucs, default=math.nan)
    if not lowest < 0.5 - _DEPENDENCE_Z * error:
        return ""
    return (
        f"an AUC of {lowest:.2f} is too far below .5 for independent rows: rows that depend on "
        "each other, such as versions of one sentence, are probably in different folds; pass "
        "their groups as groups="
    )


def target_of(
    codes: Codes, n_classes: int, cv: int, groups: Codes | None, random_state: int
) -> ProbeTarget:
    """Return the target of rows that all have a class, with folds or the reason for no folds."""
    from sklearn.model_selection import StratifiedKFold

    counts = np.bincount(codes, minlength=n_classes)
    folds: list[Fold] = []
    reason = ""
    if n_classes < 2:
        text = "1 class" if n_classes else "0 classes"
        reason = f"the held-out rows have {text} of the concept"
    elif groups is None and counts.min() < cv:
        reason = f"a class has {counts.min()} held-out rows, fewer than the {cv} folds"
    elif groups is None:
        splitter = StratifiedKFold(cv, shuffle=True, random_state=random_state)
        folds = list(splitter.split(codes[:, None], codes))
    else:
        if len(np.unique(groups)) >= cv:
            folds = [
                fold for fold in folds_of_groups(codes, groups, cv, random_state)
                if all(len(np.unique(codes[part])) == n_classes for part in fold)
            ]  # fmt: skip
        if not folds:
            reason = "no fold has all classes of the concept in its training and in its test rows"
    return ProbeTarget(codes, n_classes, folds, reason)


def folds_of_groups(codes: Codes, groups: Codes, cv: int, random_state: int) -> list[Fold]:
    """Folds that do not divide groups, stratified by codes; a fold may lack some of the codes."""
    from sklearn.model_selection import StratifiedGroupKFold

    splitter = StratifiedGroupKFold(cv, shuffle=True, random_state=random_state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # warns if a code has fewer than cv rows
        return list(splitter.split(codes[:, None], codes, groups))


def _is_constant(rows: Float, constant_tol: Float | float) -> bool:
    """Whether no feature has a standard deviation above `constant_tol`."""
    # The mean of n equal numbers has a rounding error of up to n eps, and std() of uncentred rows
    # would include this error. Centring twice removes it.
    centred = rows - rows.mean(axis=0)
    return not (centred.std(axis=0) > constant_tol).any()


def _scaled(rows: Float) -> Float:
    """Centre the rows and divide them by one number, so that the mean feature variance is 1."""
    centred = rows - rows.mean(axis=0)
    scale = math.sqrt(float(np.mean(centred**2)))
    return np.asarray(centred / scale if scale > 0 else centred)


def _constant_scores(target: ProbeTarget) -> Float:
    """Scores (n, C) for constant features: log frequencies of the training classes."""
    n_classes = target.n_classes
    scores = np.full((len(target.codes), 1 if n_classes == 2 else n_classes), np.nan)
    for train, held_out in target.folds:
        log_p = np.log(np.bincount(target.codes[train], minlength=n_classes))
        scores[held_out] = log_p[1:] - log_p[:1] if n_classes == 2 else log_p
    return scores


def _linear_scores(rows: Float, target: ProbeTarget) -> Float:
    """Out-of-fold scores (n, C) of the linear probe; (n, 1) for two classes.

    All folds are fitted in one batch on the same unstandardised rows. To this end, the penalty
    |w|^2 on weights of standardised features is written as sum_k s_k^2 u_k^2, where s_k is the
    standard deviation of feature k in a fold and u = w / s. A feature that is constant in a fold
    receives the largest penalty of the fold, which makes its weight negligible.
    """
    weights = np.zeros((len(rows), len(target.folds)))
    for j, (train, _) in enumerate(target.folds):
        weights[train, j] = 1.0 / len(train)
    # E x^2 - (E x)^2 is accurate here, because the rows are centred. For a feature that
    # is constant in a fold, rounding gives a standard deviation of about sqrt(eps) times its
    # absolute value, far below _CONSTANT_RTOL.
    variances = (rows**2).T @ weights - (rows.T @ weights) ** 2
    deviations = np.sqrt(np.maximum(variances, 0.0))
    largest = deviations.max(axis=0)
    varies = deviations > _CONSTANT_RTOL * largest
    used = varies.any(axis=1)
    features = np.ascontiguousarray(rows[:, used])
    penalties = ALPHA * np.where(varies, deviations, largest)[used] ** 2
    fits = logistic.fit(features, target.codes, target.n_classes, penalties, sample_weights=weights)
    scores = np.full((len(rows), fits.weights.shape[1]), np.nan)
    for j, (_, held_out) in enumerate(target.folds):
        scores[held_out] = features[held_out] @ fits.weights[j].T + fits.intercepts[j]
    return scores


def _classifier_scores(spec: object, rows: Float, target: ProbeTarget, random_state: int) -> Float:
    """Out-of-fold scores (n, C) of a classifier of scikit-learn; (n, 1) for two classes."""
    two = target.n_classes == 2
    scores = np.full((len(rows), 1 if two else target.n_classes), np.nan)
    for train, held_out in target.folds:
        X_train, X_test = _standardised(rows, train, held_out)
        # Many classifiers need features of full rank.
        _, singular_values, directions = np.linalg.svd(X_train, full_matrices=False)
        directions = directions[singular_values > _CONSTANT_RTOL * singular_values[0]].T
        X_train, X_test = X_train @ directions, X_test @ directions
        model = clone_with_seed(spec, random_state).fit(X_train, target.codes[train])
        if hasattr(model, "predict_proba"):
            log_p = np.log(np.maximum(model.predict_proba(X_test), np.finfo(np.float64).tiny))
            scores[held_out] = log_p[:, 1:] - log_p[:, :1] if two else log_p
        else:
            scores[held_out] = model.decision_function(X_test).reshape(len(held_out), -1)
    return scores


def _standardised(
    rows: Float, train: NDArray[np.intp], held_out: NDArray[np.intp]
) -> tuple[Float, Float]:
    """Standardise both parts by the training mean and deviation; drop constant features."""
    mean, deviation = rows[train].mean(axis=0), rows[train].std(axis=0)
    varies = deviation > _CONSTANT_RTOL * deviation.max()
    return (
        (rows[train][:, varies] - mean[varies]) / deviation[varies],
        (rows[held_out][:, varies] - mean[varies]) / deviation[varies],
    )


def probe_quantity(
    rows: Float,
    values: Float,
    *,
    cv: int,
    groups: Codes | None = None,
    random_state: int = 0,
    constant_tol: Float | float = 0.0,
) -> Leakage:
    """Score a ridge regression of the values (n, k) of a quantity by out-of-fold R^2."""
    from sklearn.linear_model import Ridge
    from sklearn.model_selection import GroupKFold, KFold

    if len(rows) < 2 * cv or np.ptp(values, axis=0).max(initial=0.0) == 0.0:
        return Leakage((), len(rows), 0, "too few held-out rows, or a constant quantity")
    if groups is not None and len(np.unique(groups)) < cv:
        return Leakage((), len(rows), 0, f"fewer groups than the {cv} folds")
    splitter = KFold if groups is None else GroupKFold
    folds = list(splitter(cv, shuffle=True, random_state=random_state).split(rows, groups=groups))
    constant = _is_constant(rows, constant_tol)
    rounding = _ROUNDING_FACTOR * np.finfo(np.float64).eps * np.abs(values).max()
    fold_scores = []
    for train, held_out in folds:
        deviations = residuals = values[held_out] - values[train].mean(axis=0)
        if np.abs(deviations).max() <= rounding:
            continue  # R^2 = 1 - 0 / 0 is undefined
        if not constant:
            X_train, X_test = _standardised(rows, train, held_out)
            model = Ridge(alpha=ALPHA * len(train)).fit(X_train, values[train])
            residuals = values[held_out] - model.predict(X_test).reshape(len(held_out), -1)
        fold_scores.append(1 - float(np.sum(residuals**2)) / float(np.sum(deviations**2)))
    probe = Probe("linear", math.nan, math.nan, float(np.mean(fold_scores)), 0.0)
    return Leakage((probe,), len(rows), 0, "")


def _accuracy_and_auc(scores: Float, target: ProbeTarget) -> tuple[float, float]:
    """Return the accuracy and AUC of out-of-fold scores (n, C), averaged over the folds."""
    accuracies, aucs = [], []
    for _, held_out in target.folds:
        s, codes = scores[held_out], target.codes[held_out]
        accuracies.append(float(np.mean(decide(s) == codes)))
        if target.n_classes == 2:
            aucs.append(_auc(s[:, 0], codes == 1))
        else:
            p = np.asarray(scipy.special.softmax(s, axis=1))
            aucs.append(
                float(np.mean([_auc(p[:, k], codes == k) for k in range(target.n_classes)]))
            )
    return float(np.mean(accuracies)), float(np.mean(aucs))


def _auc(score: Float, positive: NDArray[np.bool_]) -> float:
    """P(score of a positive > score of a negative) + 1/2 P(equal scores), from ranks."""
    n1 = int(positive.sum())
    n0 = len(positive) - n1
    if not n0 or not n1:
        return math.nan
    ranks = scipy.stats.rankdata(score)
    return float((ranks[positive].sum() - n1 * (n1 + 1) / 2) / (n0 * n1))
