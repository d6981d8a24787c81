"""INLP: iterative null-space projection, one probe after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from splince_fast._runtime.progress import Progress
from splince_fast.baselines._erasing import (
    IterativeEraser,
    Outcome,
    Problem,
    orthonormal,
    probe,
    squares_of,
)
from splince_fast.baselines._options import check_count, check_number
from splince_fast.baselines._rows import Float, Part, class_codes, seen_classes
from splince_fast.exceptions import InputError

_MOST = 300


class INLP(IterativeEraser):
    """Erase classes by projecting off the weights of linear probes until none reads them.

    With B the orthonormal basis so far, a probe is trained on (I - B B^T)(x - mean). If its
    accuracy on the validation rows is at most that of the majority class plus `tol`, the run
    ends; else an orthonormal basis of its weight rows joins B. The map is
    x -> mean + (I - B B^T)(x - mean). A round costs O(r d k) for B and one sweep over the rows
    beside its probe. No guarantee comes with it: ``report_.residual`` says what is left.

    Parameters
    ----------
    alpha : float
        Of the default probe, logistic: mean log-loss + alpha / 2 |w|^2.
    max_rank : int, optional
        Most dimensions to remove; min(d, 300) if left out.
    tol : float
        Margin over the majority share below which a probe counts as having read nothing.
    by_task : bool
        Each probe sees the rows of one class of y, drawn at random among those in which the
        concept is still readable.
    probe : classifier, optional
        Another linear probe, with ``coef_`` after ``fit``; cloned each round, such as
        ``LinearSVC(C=0.01, dual=False)``, which the original used on Bias in Bios.
    validation_share : float in [0, 1)
        Share of each class to set aside where ``fit`` is given no validation rows; 0 selects on
        the training rows.
    concept_from : {None, "y"}
        "y": what is passed as y is the concept.
    random_state : int, Generator, RandomState or None
        For the validation rows and the order of task classes.
    progress : bool, optional
        Show a progress bar on stderr; by default only in a terminal or notebook, after two
        seconds.

    Attributes
    ----------
    projection_ : Projection
        The fitted map; saves, composes and folds as any other.
    report_ : ErasureReport
        Rank, reason of the stop, probe accuracies, residual, distortion.
    classes_ : ndarray
        Classes of the concept.
    n_features_in_, feature_names_in_
        Of X.

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

    def __init__(
        self,
        *,
        alpha: float = 1e-4,
        max_rank: int | None = None,
        tol: float = 0.01,
        by_task: bool = False,
        probe: Any = None,
        validation_share: float = 0.2,
        concept_from: str | None = None,
        random_state: Any = None,
        progress: bool | None = None,
    ) -> None:
        self.alpha = alpha
        self.max_rank = max_rank
        self.tol = tol
        self.by_task = by_task
        self.probe = probe
        self.validation_share = validation_share
        self.concept_from = concept_from
        self.random_state = random_state
        self.progress = progress

    def _check_parameters(self) -> None:
        self._check_common()
        check_number(self.alpha, "alpha", 0.0)
        check_number(self.tol, "tol", 0.0, strict=False)
        if self.max_rank is not None:
            check_count(self.max_rank, "max_rank")
        if self.by_task and self.concept_from == "y":
            raise InputError("by_task needs a task as y, and concept_from='y' makes y the concept")

    def _reads_task(self) -> bool:
        return self.by_task

    def _task_codes(self, y: Any, n: int) -> NDArray[np.intp] | None:
        if not self.by_task:
            return None
        if y is None:
            self._refuse_missing_y("by_task draws one of its classes per round")
        return seen_classes(class_codes(y, n, "task"), "task")[1]

    def _erase(self, problem: Problem) -> Outcome:
        d = problem.train.rows.shape[1]
        limit = min(d, _MOST) if self.max_rank is None else min(d, int(self.max_rank))
        basis: Float = np.empty((d, 0))
        accuracies: list[float] = []
        removed = 0.0
        # Classes of the task in which a probe may still find something. What is removed later
        # adds nothing to a class that was closed, so it stays closed.
        tasks = [-1] if problem.task is None else np.unique(problem.task[problem.task >= 0])
        tasks = list(tasks)
        stop = "no probe beats the majority on the rows of selection"
        with Progress(label="INLP", show=self.progress) as bar:
            while tasks:
                at = 0 if problem.task is None else int(problem.rng.integers(len(tasks)))
                train, selection = _parts(problem, tasks[at])
                found = self._directions(train, selection, basis, accuracies)
                bar.advance(len(train), train.rows.nbytes)
                if found is None:
                    del tasks[at]
                    continue
                found = found[:, : limit - basis.shape[1]]
                basis = np.concatenate([basis, found], axis=1)
                removed += squares_of(problem.train, _deflate(problem.train, found))
                if problem.n_validation:
                    _deflate(problem.selection, found)
                if basis.shape[1] == limit:
                    stop = f"the largest rank, {limit}, is reached"
                    break
        return Outcome(basis, len(accuracies), stop, accuracies, removed)

    def _directions(
        self, train: Part, selection: Part, basis: Float, accuracies: list[float]
    ) -> Float | None:
        """New orthonormal directions of one probe, or None where it reads nothing."""
        if len(np.unique(train.codes)) < 2 or not len(selection):
            return None
        model = probe(train, self.alpha) if self.probe is None else self._own_probe(train)
        hit = model.predict(selection.rows) == selection.codes
        accuracies.append(selection.share(hit))
        if accuracies[-1] <= selection.majority() + self.tol:
            return None
        weights = np.atleast_2d(np.asarray(model.coef_, dtype=np.float64))
        if self.probe is None and len(weights) > 1:
            weights = weights - weights.mean(axis=0)  # softmax sees differences only
        found = orthonormal(weights.T, basis)
        return found if found.shape[1] else None

    def _own_probe(self, train: Part) -> Any:
        """The user's probe, fitted; weights are passed on where rows differ in theirs."""
        model = clone(self.probe)
        if "random_state" in model.get_params() and model.get_params()["random_state"] is None:
            model.set_params(random_state=0)
        given = {} if (train.weight == 1.0).all() else {"sample_weight": train.weight}
        model.fit(train.rows, train.codes, **given)
        if not hasattr(model, "coef_"):
            raise InputError(
                f"the probe {type(model).__name__} has no coef_ after fit; INLP needs a linear one"
            )
        return model


def _parts(problem: Problem, task: int) -> tuple[Part, Part]:
    """Training rows and rows of selection, of one class of the task if there is one."""
    if problem.task is None:
        return problem.train, problem.selection
    assert problem.selection_task is not None
    return (
        problem.train.take(problem.task == task),
        problem.selection.take(problem.selection_task == task),
    )


def _deflate(part: Part, found: Float) -> Float:
    """Remove directions from the rows in place; returns their (n, r) coordinates."""
    coordinates = part.rows @ found
    part.rows[...] -= coordinates @ found.T
    return np.asarray(coordinates)
