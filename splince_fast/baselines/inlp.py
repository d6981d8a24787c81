"""INLP: iterative null-space projection."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sklearn.base import clone, is_regressor
from sklearn.utils.validation import has_fit_parameter

from splince_fast._runtime.progress import Progress
from splince_fast.baselines.iterative import (
    ClassRows,
    ErasureData,
    ErasureRun,
    Float,
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
    validation_share : float in [0, 1)
        Fraction of each class held out for validation if ``fit`` is given no validation rows; with
        0, selection uses the training rows.
    concept_from : {None, "y"}
        With "y", the argument y of ``fit`` is the concept.
    random_state : int, Generator, RandomState or None
        Draws the validation rows.
    progress : bool, optional
        Show a progress bar on stderr; by default only in a terminal or notebook, after two
        seconds.
    max_rank : int, optional
        Largest number of dimensions to remove; by default min(d, 300).
    tol : float
        A probe is at chance level if its accuracy exceeds the fraction of the majority class by
        at most `tol`.
    probe : classifier, optional
        Linear classifier to train instead of the default logistic probe. Each round fits a clone,
        which must have ``coef_`` after ``fit``. The authors of INLP used
        ``LinearSVC(C=0.01, dual=False)`` on the data set Bias in Bios.

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

    max_rank: int | None = None
    tol: float = 0.01
    probe: object = None

    def _check_parameters(self) -> None:
        super()._check_parameters()
        if self.probe is not None:
            is_estimator = hasattr(self.probe, "get_params") and not isinstance(self.probe, type)
            if not is_estimator or is_regressor(self.probe):
                raise InputError(
                    f"probe is {self.probe!r}; it must be a linear classifier, or None"
                )

    def _erase(self, data: ErasureData) -> ErasureRun:
        d = data.train.rows.shape[1]
        limit = min(d, _MAX_RANK if self.max_rank is None else self.max_rank)
        basis: Float = np.empty((d, 0))
        accuracies: list[float] = []
        train, selection = (
            replace(part, rows=part.rows.copy()) for part in (data.train, data.selection)
        )
        stop = f"the largest rank, {limit}, is reached"
        with Progress(label="INLP", show=self.progress) as bar:
            while basis.shape[1] < limit:
                model = self._fit_probe(train)
                bar.advance(len(train), train.rows.nbytes)
                is_correct = model.predict(selection.rows) == selection.codes
                accuracies.append(selection.fraction(is_correct))
                if accuracies[-1] <= selection.majority() + self.tol:
                    stop = "no probe beats the majority on the selection rows"
                    break
                weights = np.atleast_2d(np.asarray(model.coef_, dtype=np.float64))
                if self.probe is None and len(weights) > 1:
                    # Only differences of the scores determine the softmax.
                    weights = weights - weights.mean(axis=0)
                directions = orthonormal_basis(weights.T, basis)[:, : limit - basis.shape[1]]
                if not directions.shape[1]:
                    stop = "a probe gives no new direction"
                    break
                basis = np.concatenate([basis, directions], axis=1)
                for part in (train, selection):
                    part.rows[...] -= (part.rows @ directions) @ directions.T
        return ErasureRun(basis, len(accuracies), stop, accuracies)

    def _fit_probe(self, train: ClassRows) -> Any:
        if self.probe is None:
            return fit_probe(train, self.alpha)
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
