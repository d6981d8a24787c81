"""INLP: iterative null-space projection."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sklearn.base import clone, is_regressor
from sklearn.utils.validation import has_fit_parameter

from splince_fast._runtime.progress import Progress
from splince_fast.baselines.inputs import (
    ClassRows,
    Float,
    RandomState,
    check_count,
    check_number,
)
from splince_fast.baselines.iterative import (
    ErasureData,
    ErasureRun,
    IterativeEraser,
    fit_probe,
    orthonormal_basis,
)
from splince_fast.exceptions import InputError

_MAX_RANK = 300


@dataclass(kw_only=True, eq=False, repr=False)
class INLP(IterativeEraser):
    """Erase classes by iteratively projecting out the weight vectors of linear probes.

    B is an orthonormal basis of the r removed dimensions. Each round trains a probe on
    (I - B B^T)(x - mean). If the accuracy of the probe on the validation rows is at most the
    fraction of the majority class plus `tol`, the fit ends. Otherwise an orthonormal basis of the k
    weight vectors of the probe is appended to B. The map is x -> mean + (I - B B^T)(x - mean). A
    round costs one fit of a probe, O(r d k) operations to extend B, and one pass over the rows. The
    covariance of the erased rows with the concept is not zero: see ``report_.residual``.

    Parameters
    ----------
    alpha : float
        L2 penalty of the default probe, which minimises mean log-loss + alpha / 2 |w|^2.
    max_rank : int, optional
        Largest number of dimensions to remove; by default min(d, 300).
    tol : float
        A probe is at chance level if its accuracy exceeds the fraction of the majority class by
        at most `tol`.
    by_task : bool
        Train each probe on the rows of one class of y, drawn at random. A class of y is no longer
        drawn after a probe on its rows is at chance level, or if its rows allow no probe. The fit
        ends when no class is left.
    probe : classifier, optional
        Linear classifier to train instead of the default logistic probe. Each round fits a clone,
        which must have ``coef_`` after ``fit``. The authors of INLP used
        ``LinearSVC(C=0.01, dual=False)`` on the data set Bias in Bios.
    validation_share : float in [0, 1)
        Fraction of each class held out for validation if ``fit`` is given no validation rows; with
        0, selection uses the training rows.
    concept_from : {None, "y"}
        With "y", the argument y of ``fit`` is the concept.
    random_state : int, Generator, RandomState or None
        Draws the validation rows and the order of the task classes.
    progress : bool, optional
        Show a progress bar on stderr; by default only in a terminal or notebook, after two
        seconds.

    Attributes
    ----------
    projection_ : Projection
        Fitted map.
    report_ : ErasureReport
        Rank, reason for the stop, probe accuracies, residual, distortion.
    classes_ : ndarray
        Classes of the concept.
    n_features_in_, feature_names_in_
        Number and names of the features of X.

    References
    ----------
    S. Ravfogel, Y. Elazar, H. Gonen, M. Twiton, Y. Goldberg, "Null it out: guarding protected
    attributes by iterative nullspace projection", ACL 2020.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast.baselines import INLP
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, size=600)
    >>> X = rng.normal(size=(600, 5)) + np.outer(z, [2, 0, 0, 0, 0])
    >>> eraser = INLP(random_state=0).fit(X, concept=z)
    >>> eraser.projection_.rank, eraser.report_.residual < 0.2
    (1, True)
    """

    alpha: float = 1e-4
    max_rank: int | None = None
    tol: float = 0.01
    by_task: bool = False
    probe: object = None
    validation_share: float = 0.2
    concept_from: str | None = None
    random_state: RandomState = None
    progress: bool | None = None

    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_number(self.alpha, "alpha", 0.0)
        check_number(self.tol, "tol", 0.0, strict=False)
        if self.max_rank is not None:
            check_count(self.max_rank, "max_rank")
        if self.probe is not None:
            is_estimator = hasattr(self.probe, "get_params") and not isinstance(self.probe, type)
            if not is_estimator or is_regressor(self.probe):
                raise InputError(
                    f"probe is {self.probe!r}; it must be a linear classifier, or None"
                )
        if self.by_task and self.concept_from == "y":
            raise InputError("by_task needs a task as y, and concept_from='y' makes y the concept")

    def _erase(self, data: ErasureData) -> ErasureRun:
        d = data.train.rows.shape[1]
        limit = min(d, _MAX_RANK) if self.max_rank is None else min(d, int(self.max_rank))
        basis: Float = np.empty((d, 0))
        accuracies: list[float] = []
        train, selection = (
            replace(part, rows=part.rows.copy()) for part in (data.train, data.selection)
        )
        # Task classes to draw from. A task class that gives no directions is deleted for good,
        # because later rounds only remove further directions.
        tasks = [-1] if train.task is None else list(np.unique(train.task[train.task >= 0]))
        n_tasks, reasons = len(tasks), Counter[str]()
        with Progress(label="INLP", show=self.progress) as bar:
            while tasks:
                task_index = 0 if train.task is None else int(data.rng.integers(len(tasks)))
                drawn, scored = (_of_task(part, tasks[task_index]) for part in (train, selection))
                directions = self._directions(drawn, scored, basis, accuracies)
                bar.advance(len(drawn), drawn.rows.nbytes)
                if isinstance(directions, str):
                    reasons[directions] += 1
                    del tasks[task_index]
                    continue
                directions = directions[:, : limit - basis.shape[1]]
                basis = np.concatenate([basis, directions], axis=1)
                for part in (train, selection):
                    part.rows[...] -= (part.rows @ directions) @ directions.T
                if basis.shape[1] == limit:
                    stop = f"the largest rank, {limit}, is reached"
                    break
            else:
                stop = _stop_reason(reasons, n_tasks)
        return ErasureRun(basis, len(accuracies), stop, accuracies)

    def _directions(
        self, train: ClassRows, selection: ClassRows, basis: Float, accuracies: list[float]
    ) -> Float | str:
        """Return directions of a probe that extend `basis`, orthonormal, or the reason for none."""
        if len(np.unique(train.codes)) < 2:
            return "the training rows hold a single class of the concept"
        if not len(selection):
            return "there are no selection rows to evaluate a probe"
        model = fit_probe(train, self.alpha) if self.probe is None else self._fit_user_probe(train)
        accuracies.append(selection.fraction(model.predict(selection.rows) == selection.codes))
        if accuracies[-1] <= selection.majority() + self.tol:
            return "no probe beats the majority on the selection rows"
        weights = np.atleast_2d(np.asarray(model.coef_, dtype=np.float64))
        if self.probe is None and len(weights) > 1:
            # Only differences of the scores determine the softmax, so their mean is removed.
            weights = weights - weights.mean(axis=0)
        directions = orthonormal_basis(weights.T, basis)
        return directions if directions.shape[1] else "a probe gives no new direction"

    def _fit_user_probe(self, train: ClassRows) -> Any:
        model = clone(self.probe)
        if "random_state" in model.get_params() and model.get_params()["random_state"] is None:
            model.set_params(random_state=0)
        options = {} if (train.weight == 1.0).all() else {"sample_weight": train.weight}
        if options and not has_fit_parameter(model, "sample_weight"):
            raise InputError(
                f"the probe {type(model).__name__} takes no sample_weight in fit; pass another "
                "probe, or no weights"
            )
        model.fit(train.rows, train.codes, **options)
        if not hasattr(model, "coef_"):
            raise InputError(
                f"the probe {type(model).__name__} has no coef_ after fit; INLP needs a linear one"
            )
        return model


def _stop_reason(reasons: Counter[str], n_tasks: int) -> str:
    """Return the text of `ErasureReport.stop`, with the number of task classes per reason."""
    if not n_tasks:
        return "no training row has a label of the task"
    if n_tasks == 1:
        return next(iter(reasons))
    return "; ".join(f"{text} ({n} of {n_tasks} task classes)" for text, n in reasons.items())


def _of_task(part: ClassRows, code: int) -> ClassRows:
    """Return the rows of one task class; all rows without a task."""
    return part if part.task is None else part.take(part.task == code)
