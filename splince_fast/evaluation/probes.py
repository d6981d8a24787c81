"""Leakage: accuracy of probes for the concept, cross-validated within erased held-out rows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import scipy.special
from numpy.typing import NDArray

from splince_fast._runtime.rows import as_rows, check_values
from splince_fast.evaluation import logistic
from splince_fast.evaluation.data import Codes, Float, class_codes, has_label, values_of
from splince_fast.evaluation.erasers import Component, clone_with_seed, named_components
from splince_fast.evaluation.heads import decide, ridge_path
from splince_fast.evaluation.metrics import METRICS
from splince_fast.exceptions import InputError
from splince_fast.labels import Columns, encode_one
from splince_fast.labels.containers import check_index
from splince_fast.moments.parameters import check_random_state

Fold = tuple[NDArray[np.intp], NDArray[np.intp]]  # numbers of training rows and of scored rows

FOLDS = 5  # number of folds of the held-out rows
ALPHA = 0.01  # penalty of the linear probe, on features of unit variance
# A feature whose standard deviation is below this fraction of the largest standard deviation counts
# as constant. A direction whose singular value is below this fraction of the largest is dropped.
_CONSTANT_RTOL = 1e-6
# A feature counts as constant if its standard deviation is at most _ROUNDING_FACTOR * eps times its
# largest absolute value, eps being the machine epsilon of the input dtype.
_ROUNDING_FACTOR = 64


class ProbeTarget(NamedTuple):
    """Labels of a concept, and folds of the rows; `reason` says why `folds` is empty."""

    labels: NDArray[Any]  # class codes (n,), or values (n, k) of a quantity
    n_classes: int  # 0 for a quantity
    folds: Sequence[Fold]
    reason: str

    @property
    def chance(self) -> float:
        """Fraction of the most frequent class; 0 for a quantity."""
        return float(np.bincount(self.labels).max() / len(self.labels)) if self.n_classes else 0.0


@dataclass(frozen=True, slots=True)
class Probe:
    """Scores of one probe, as means over the folds; NaN where a score is undefined."""

    name: str
    accuracy: float
    auc: float  # for more than two classes, the macro average of the one-vs-rest AUCs
    r2: float  # of a quantity, relative to the mean of the fold's training rows
    chance: float  # fraction of the most frequent class; 0 for a quantity

    def scores(self) -> dict[str, float]:
        """Return the scores that are not NaN, by metric name, such as "probe_accuracy"."""
        start = "probe" if self.name == "linear" else self.name
        scores = {name: getattr(self, name) for name in ("accuracy", "auc", "r2", "chance")}
        return {f"{start}_{name}": v for name, v in scores.items() if not math.isnan(v)}


@dataclass(frozen=True, slots=True)
class Leakage:
    """Scores of probes on held-out rows."""

    probes: tuple[Probe, ...]  # empty if leakage could not be measured
    n_classes: int  # number of classes of the concept; 0 for a quantity
    reason: str  # reason why leakage could not be measured

    def __getitem__(self, name: str) -> Probe:
        return {probe.name: probe for probe in self.probes}[name]


def check_probes(probes: object, name: str, quantity: str) -> tuple[Component, ...]:
    """Return the named probes of concepts, one of which is the quantity `quantity` ("": none)."""
    components = named_components(probes, ("linear",), "probe")
    for probe in components:
        if f"{probe.name}_accuracy" in METRICS or "[" in probe.name:
            raise InputError(f"a probe is named {probe.name!r}, as a metric is; pass another name")
    if quantity and components and all(probe.spec != "linear" for probe in components):
        raise InputError(
            f"a quantity, such as {quantity!r}, has only the linear probe; pass "
            f"{name}=('linear',), or divide the quantity into classes, such as its quartiles"
        )
    return components


def leakage(
    X_fresh: object,
    z_fresh: object,
    *,
    probes: object = ("linear",),
    groups: object = None,
    random_state: int = 0,
) -> Leakage:
    """Score probes for the concept on erased held-out rows, by cross-validation.

    The linear probe is logistic regression on features of unit variance, which minimises mean
    log-loss + .01 / 2 |w|^2; for a quantity, ridge regression with the same penalty. Features whose
    standard deviation is below 1e-6 of the largest are left out as rounding error. R^2 of a
    quantity compares the probe with the mean of the fold's training rows.

    Parameters
    ----------
    X_fresh : array-like of shape (n, d)
        Erased held-out rows: rows that the eraser was not fitted to.
    z_fresh : column of shape (n,)
        Labels of the concept: classes, or floats for a quantity. Rows without a label are left out.
    probes : sequence or mapping
        "linear", or classifiers of scikit-learn, such as ``MLPClassifier()``; the keys of a mapping
        are their names. A quantity has only "linear".
    groups : column of shape (n,), optional
        Groups of rows that depend on each other, such as versions of one sentence, which are in one
        of the five folds: in different folds they give an AUC far below .5. All rows without a
        group form one group.
    random_state : int
        Seed of the folds and probes.

    Returns
    -------
    Leakage
        Scores of the probes. If leakage cannot be measured, there are no scores, but a `reason`.

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
    random_state = check_random_state(random_state, bits=32)  # limit of scikit-learn
    check_index(X_fresh, z_fresh, "z_fresh")
    check_index(X_fresh, groups, "groups")
    array = as_rows(X_fresh, name="X_fresh")
    check_values(array, "X_fresh")
    rows = np.asarray(array, dtype=np.float64)
    eps = np.finfo(array.dtype).eps if array.dtype.kind == "f" else 0.0
    constant_tol = _ROUNDING_FACTOR * eps * np.abs(rows).max(axis=0, initial=0.0)
    encoded = encode_one(z_fresh, len(rows), name="z_fresh", of="X_fresh")
    components = check_probes(probes, "probes", "z_fresh" * isinstance(encoded, Columns))
    labelled, group_codes = has_label(encoded), None
    if groups is not None:
        group_codes = class_codes(groups, "groups", len(rows), of="X_fresh").codes[labelled]
    target = target_of(values_of(encoded)[labelled], group_codes, random_state)
    return score_probes(
        rows[labelled], target, components, random_state=random_state, constant_tol=constant_tol
    )


def score_probes(
    rows: Float,
    target: ProbeTarget,
    probes: Sequence[Component],
    *,
    random_state: int = 0,
    constant_tol: Float | float = 0.0,
) -> Leakage:
    """Score probes; a feature of deviation `constant_tol` or less counts as constant."""
    codes, n_classes, folds, reason = target
    if reason:
        return Leakage((), n_classes, reason)
    chance, centred = target.chance, _centred(rows, constant_tol)
    if not n_classes:
        r2 = _ridge_r2(None if centred is None else rows, target)
        scored = Probe("linear", math.nan, math.nan, r2, chance)
        return Leakage((scored,) * any(probe.spec == "linear" for probe in probes), 0, "")
    if centred is None:
        # Every probe predicts the most frequent class of the training rows.
        hits = [np.mean(codes[test] == np.bincount(codes[train]).argmax()) for train, test in folds]
        accuracy = float(np.mean(hits))
        results = [Probe(probe.name, accuracy, 0.5, math.nan, chance) for probe in probes]
        return Leakage(tuple(results), n_classes, "")
    scaled = centred / math.sqrt(float(np.mean(centred**2)))  # the mean feature variance is 1
    results = []
    for probe in probes:
        if probe.spec == "linear":
            scores = _linear_scores(scaled, target)
        else:
            scores = _classifier_scores(probe.spec, scaled, target, random_state)
        results.append(Probe(probe.name, *_accuracy_and_auc(scores, target), math.nan, chance))
    return Leakage(tuple(results), n_classes, "")


def target_of(labels: NDArray[Any], groups: Codes | None, random_state: int) -> ProbeTarget:
    """Return the target of rows that all have a label, with folds or the reason for no folds."""
    codes, n_classes, least = labels, 0, len(labels) // 2
    if labels.ndim == 1:
        classes, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
        n_classes = len(classes)
        least = counts.min(initial=len(labels)) if groups is None else FOLDS
    if n_classes < 2 and not (labels.ndim == 2 and np.ptp(labels, axis=0).any()):
        reason = "the held-out rows have 1 class, or value, of the concept"
    elif least < FOLDS:
        reason = f"a class, or half of a quantity, has {least} held-out rows, below {FOLDS} folds"
    else:
        folds = [
            fold for fold in folds_of(codes, groups, random_state)
            if not n_classes or all(len(np.unique(codes[part])) == n_classes for part in fold)
        ]  # fmt: skip
        reason = "no fold has all classes of the concept in its training and in its test rows"
        if folds:
            return ProbeTarget(codes, n_classes, folds, "")
        if groups is not None and len(np.unique(groups)) < FOLDS:
            reason = f"fewer groups than the {FOLDS} folds"
    return ProbeTarget(codes, n_classes, [], reason)


def folds_of(labels: NDArray[Any], groups: Codes | None, random_state: int) -> list[Fold]:
    """Folds that divide no group, stratified by class codes; none if there are too few groups."""
    from sklearn import model_selection as sk

    if groups is not None and len(np.unique(groups)) < FOLDS:
        return []
    if labels.ndim == 2:
        splitter = sk.KFold if groups is None else sk.GroupKFold
    else:
        splitter = sk.StratifiedKFold if groups is None else sk.StratifiedGroupKFold
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # warns if a class has few rows
        folds = splitter(FOLDS, shuffle=True, random_state=random_state)
        return list(folds.split(labels, labels, groups))


def _centred(rows: Float, constant_tol: Float | float) -> Float | None:
    """Centre the rows; None if no feature has a standard deviation above `constant_tol`."""
    # The mean of n equal numbers has a rounding error of up to n eps, and std() of uncentred rows
    # would include this error. Centring twice removes it.
    centred = rows - rows.mean(axis=0)
    return centred if (centred.std(axis=0) > constant_tol).any() else None


def _linear_scores(rows: Float, target: ProbeTarget) -> list[Float]:
    """Scores (n, C) of the linear probe on the test rows of each fold; (n, 1) for two classes."""
    # All folds are fitted in one batch on the same unstandardised rows: the penalty |w|^2 on
    # weights of standardised features is sum_k s_k^2 u_k^2, with s_k the standard deviation of
    # feature k in a fold and u = w / s. A feature that is constant in a fold gets the largest s.
    weights = np.zeros((len(rows), len(target.folds)))
    for j, (train, _) in enumerate(target.folds):
        weights[train, j] = 1.0 / len(train)
    # E x^2 - (E x)^2 is accurate, as the rows are centred. For a feature that is constant in a
    # fold, rounding gives a deviation of about sqrt(eps) times its value, below _CONSTANT_RTOL.
    variances = (rows**2).T @ weights - (rows.T @ weights) ** 2
    deviations = np.sqrt(np.maximum(variances, 0.0))
    largest = deviations.max(axis=0)
    varies = deviations > _CONSTANT_RTOL * largest
    used = varies.any(axis=1)
    features = np.ascontiguousarray(rows[:, used])
    penalties = ALPHA * np.where(varies, deviations, largest)[used] ** 2
    fits = logistic.fit(
        features, target.labels, target.n_classes, penalties, sample_weights=weights
    )
    return [
        features[held_out] @ fits.weights[j].T + fits.intercepts[j]
        for j, (_, held_out) in enumerate(target.folds)
    ]


def _classifier_scores(
    spec: object, rows: Float, target: ProbeTarget, random_state: int
) -> list[Float]:
    """Scores of a classifier of scikit-learn, as of `_linear_scores`."""
    scores = []
    for train, held_out in target.folds:
        X_train, X_test = _standardised(rows, train, held_out)
        # Many classifiers need features of full rank.
        _, singular_values, directions = np.linalg.svd(X_train, full_matrices=False)
        directions = directions[singular_values > _CONSTANT_RTOL * singular_values[0]].T
        X_train, X_test = X_train @ directions, X_test @ directions
        model = clone_with_seed(spec, random_state).fit(X_train, target.labels[train])
        if hasattr(model, "predict_proba"):
            log_p = np.log(np.maximum(model.predict_proba(X_test), np.finfo(np.float64).tiny))
            scores.append(log_p[:, 1:] - log_p[:, :1] if target.n_classes == 2 else log_p)
        else:
            scores.append(model.decision_function(X_test).reshape(len(held_out), -1))
    return scores


def _standardised(
    rows: Float, train: NDArray[np.intp], held_out: NDArray[np.intp]
) -> tuple[Float, Float]:
    """Standardise both parts by the training mean and deviation; drop constant features."""
    mean, deviation = rows[train].mean(axis=0), rows[train].std(axis=0)
    varies = deviation > _CONSTANT_RTOL * deviation.max()
    first, second = (
        (rows[part] - mean)[:, varies] / deviation[varies] for part in (train, held_out)
    )
    return first, second


def _ridge_r2(rows: Float | None, target: ProbeTarget) -> float:
    """Return the out-of-fold R^2 of a ridge regression of a quantity; no `rows` if constant."""
    values = target.labels
    rounding = _ROUNDING_FACTOR * np.finfo(np.float64).eps * np.abs(values).max()
    fold_scores = []
    for train, held_out in target.folds:
        deviations = residuals = values[held_out] - values[train].mean(axis=0)
        if np.abs(deviations).max() <= rounding:
            continue  # R^2 = 1 - 0 / 0 is undefined
        if rows is not None:
            X_train, X_test = _standardised(rows, train, held_out)
            (head,) = ridge_path(X_train, values[train], (ALPHA,))
            residuals = values[held_out] - (X_test @ head.coef_.T + head.intercept_)
        fold_scores.append(1 - float(np.sum(residuals**2)) / float(np.sum(deviations**2)))
    return float(np.mean(fold_scores))


def _accuracy_and_auc(scores: Sequence[Float], target: ProbeTarget) -> tuple[float, float]:
    """Return the accuracy and the AUC of the scores of each fold, averaged over the folds."""
    from sklearn.metrics import roc_auc_score

    accuracies, aucs = [], []
    for s, (_, held_out) in zip(scores, target.folds, strict=True):
        codes = target.labels[held_out]
        accuracies.append(np.mean(decide(s) == codes))
        p = s[:, 0] if target.n_classes == 2 else scipy.special.softmax(s, axis=1)
        aucs.append(roc_auc_score(codes, p, multi_class="ovr"))
    return float(np.mean(accuracies)), float(np.mean(aucs))
