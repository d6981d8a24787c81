"""GroupDRO of the last layer: the smallest worst mean loss over cells."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from scipy.optimize import minimize
from scipy.sparse.linalg import LinearOperator, cg
from sklearn.exceptions import ConvergenceWarning

from splince_fast._runtime.progress import Progress
from splince_fast.baselines._linear import BalancedClassifier, Task
from splince_fast.baselines._minimax import Coordinates, Minimax
from splince_fast.baselines._options import candidates, check_count, check_number
from splince_fast.baselines._rows import Float
from splince_fast.exceptions import InputError

_SHARPEST = 1e6
# Newton steps at most, a gradient that needs none, and the step of a difference of gradients.
_STEPS, _FLAT, _DIFFERENCE = 3, 1e-11, 1e-6


@dataclass(frozen=True, slots=True)
class MinimaxReport:
    """How near a GroupDRO head is to the optimum.

    Attributes
    ----------
    alpha : float
        The one that was used.
    loss : float
        Objective: worst mean loss of a cell (margins included) + alpha / 2 |w|^2.
    gap : float
        Objective minus a value of the dual problem at a feasible point, so that the optimum is
        between `loss - gap` and `loss`, whatever the solver did.
    cell_losses, cell_weights : tuple of float
        Mean loss of each cell of ``cells_``, and its weight in the dual problem.
    """

    alpha: float
    loss: float
    gap: float
    cell_losses: tuple[float, ...]
    cell_weights: tuple[float, ...]


class GroupDRO(BalancedClassifier):
    """Group distributionally robust logistic head: min_w max_g L_g(w) + alpha / 2 |w|^2.

    L_g is the mean log-loss of cell g = (class, group), plus ``margin / sqrt(n_g)``. The
    intercept is free. The problem is convex. ``solver="exact"`` minimises
    (1 / t) log sum_g exp(t L_g) + alpha / 2 |w|^2 by L-BFGS for t = 10, 100, 1000 and on until
    the duality gap is at most `tol`. ``solver="sgd"`` is the original's online algorithm: rows are
    drawn from all cells alike, cell weights q grow by exp(eta L_g(batch)), the gradient is that
    of sum_g q_g L_g(batch); the epoch with the best worst cell on the validation rows is kept.

    Parameters
    ----------
    alpha : float or sequence of float
        Of the penalty; of several the one is chosen with the best (worst cell, accuracy) on the
        validation rows, the largest of equals.
    solver : {"exact", "sgd"}
    margin : float
        C of the group adjustment C / sqrt(n_g).
    tol : float
        Largest duality gap; the exact solver warns where it cannot be reached.
    eta, step_size : float
        Of the "sgd" solver: for cell weights and coefficients.
    batch_size, max_epochs, patience : int
        Of the "sgd" solver; it stops after `patience` epochs without a better one.
    validation_share : float in [0, 1)
        Share of each cell to set aside where ``fit`` is given no validation rows and they are
        needed (several alphas, or "sgd"); 0 selects on the training rows.
    groups_from : {None, "y"}
        "y": there are no groups; the cells are the classes.
    random_state : int, Generator, RandomState or None
        For the batches and the validation rows.
    progress : bool, optional
        Show a progress bar on stderr; by default only in a terminal or notebook, after two
        seconds.

    Attributes
    ----------
    coef_, intercept_ : ndarray of shape (1 or n_classes, n_features) and (1 or n_classes,)
    classes_ : ndarray
    cells_ : list of tuple
        The cells (class, group).
    report_ : MinimaxReport
        Objective, duality gap, loss and weight of each cell.
    n_features_in_, feature_names_in_
        Of X.

    References
    ----------
    S. Sagawa, P. W. Koh, T. Hashimoto, P. Liang, "Distributionally robust neural networks for
    group shifts", ICLR 2020.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast.baselines import GroupDRO
    >>> rng = np.random.default_rng(0)
    >>> y = rng.integers(0, 2, size=600)
    >>> z = np.where(rng.random(600) < 0.9, y, 1 - y)
    >>> X = rng.normal(size=(600, 3)) + np.outer(z, [2, 0, 0]) + np.outer(y, [0, 1, 0])
    >>> head = GroupDRO(alpha=0.01, random_state=0).fit(X, y, groups=z)
    >>> head.report_.gap < 1e-3
    True
    """

    report_: MinimaxReport

    def __init__(
        self,
        *,
        alpha: float | Sequence[float] = (0.1, 0.01, 0.001),
        solver: str = "exact",
        margin: float = 0.0,
        tol: float = 1e-3,
        eta: float = 0.1,
        step_size: float = 0.05,
        batch_size: int = 128,
        max_epochs: int = 100,
        patience: int = 20,
        validation_share: float = 0.2,
        groups_from: str | None = None,
        random_state: Any = None,
        progress: bool | None = None,
    ) -> None:
        self.alpha = alpha
        self.solver = solver
        self.margin = margin
        self.tol = tol
        self.eta = eta
        self.step_size = step_size
        self.batch_size = batch_size
        self.max_epochs = max_epochs
        self.patience = patience
        self.validation_share = validation_share
        self.groups_from = groups_from
        self.random_state = random_state
        self.progress = progress

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        groups: Any = None,
        sample_weight: Any = None,
        validation: Any = None,
    ) -> Self:
        """Fit, forgetting what was seen before.

        Parameters
        ----------
        X : array-like or frame of shape (n_samples, n_features)
            Copied to float64.
        y : array-like of shape (n_samples,)
            The task, two or more classes.
        groups : array-like of shape (n_samples,), tuple of these, mapping or frame
            The groups of which the worst counts; several cross.
        sample_weight : array-like of shape (n_samples,), optional
            Non-negative frequencies, within the mean loss of a cell.
        validation : array-like of bool, shape (n_samples,), or tuple (X, y, groups), optional
            True for the rows that choose, or further rows that do; they train nothing.

        Returns
        -------
        object
            The estimator itself; as it was if this raises, KeyboardInterrupt included.

        Raises
        ------
        InputError, NonFiniteError, LabelError, NotEnoughDataError
            The data, labels or parameters cannot be used; a cell has no training row.

        Warns
        -----
        ConvergenceWarning
            The duality gap of the exact solver is above `tol`.
        """
        return self._fit(X, y, groups, sample_weight, validation)

    def _check_parameters(self) -> None:
        self._check_common()
        if self.solver not in ("exact", "sgd"):
            raise InputError(f"solver is {self.solver!r}; it must be 'exact' or 'sgd'")
        for name in ("tol", "eta", "step_size"):
            check_number(getattr(self, name), name, 0.0)
        check_number(self.margin, "margin", 0.0, strict=False)
        for name in ("batch_size", "max_epochs", "patience"):
            check_count(getattr(self, name), name)
        self._strengths()

    def _strengths(self) -> list[Any]:
        """Strengths to choose from, the largest first."""
        return sorted(candidates(self.alpha, "alpha"), reverse=True)

    def _selects(self) -> bool:
        return len(self._strengths()) > 1 or self.solver == "sgd"

    def _fit_cells(self, task: Task) -> None:
        # The intercept is free, so centring changes nothing but the condition of the problem.
        train = task.train
        mean = np.average(train.rows, axis=0, weights=train.weight)
        train.rows -= mean
        if task.n_validation:
            task.selection.rows -= mean
        best: tuple[float, float] | None = None
        with Progress(label="GroupDRO", show=self.progress) as bar:
            start: Float | None = None
            for alpha in self._strengths():
                game = Minimax(
                    train.rows, train.codes, train.cells, train.weight, len(self.classes_),
                    alpha, self.margin,
                    lambda: bar.advance(len(train), train.rows.nbytes),
                )  # fmt: skip
                if self.solver == "exact":
                    start, report = self._exact(game, alpha, start)
                else:
                    start, report = self._online(game, alpha, task)
                coef, intercept = game.unpack(start)
                score = self._worst_and_mean(task.selection, coef, intercept)
                if best is None or score > best:
                    best, self.report_ = score, report
                    self.coef_, self.intercept_ = coef, intercept - coef @ mean
        if self.solver == "exact" and self.report_.gap > self.tol:
            warnings.warn(
                f"the duality gap is {self.report_.gap:.1e}, above tol = {self.tol:g}: the head is "
                "that far from the optimum at most; a larger alpha makes the problem easier",
                ConvergenceWarning,
                stacklevel=4,
            )

    def _exact(
        self, game: Minimax, alpha: float, start: Float | None
    ) -> tuple[Float, MinimaxReport]:
        """Smoothed problems of growing sharpness, each started at the last."""
        sharpness, found, report = 1.0, game.zeros() if start is None else start, None
        coordinates = Coordinates(game)

        def smoothed(v: Float, sharpness: float) -> tuple[float, Float]:
            value, slope = game.smoothed(coordinates.parameters(v), sharpness)
            return value, coordinates.slope(slope)

        while report is None or (report.gap > self.tol and sharpness < _SHARPEST):
            sharpness *= 10.0
            v = minimize(
                smoothed, coordinates.of(found), args=(sharpness,), jac=True, method="L-BFGS-B",
                options={"maxiter": 5000, "maxfun": 10_000, "maxcor": 20, "gtol": 1e-11, "ftol": 0},
            ).x  # fmt: skip
            found = coordinates.parameters(v)
            if sharpness >= 1000.0:
                report = MinimaxReport(alpha, *game.certificate(found, sharpness))
        found = coordinates.parameters(_root(lambda v: smoothed(v, sharpness)[1], v))
        report = MinimaxReport(alpha, *game.certificate(found, sharpness))
        return found, report

    def _online(self, game: Minimax, alpha: float, task: Task) -> tuple[Float, MinimaxReport]:
        """Stochastic steps; the epoch of the best worst cell is restored."""
        rng, n_cells = task.rng, len(self.cells_)
        found, q = game.zeros(), np.full(n_cells, 1.0 / n_cells)
        members = [np.flatnonzero(task.train.cells == cell) for cell in range(n_cells)]
        ends = [np.cumsum(task.train.weight[rows]) for rows in members]
        best, kept, idle = (-1.0, -1.0), found, 0
        for _ in range(self.max_epochs):
            for _ in range(max(1, len(task.train) // self.batch_size)):
                drawn = np.bincount(rng.integers(n_cells, size=self.batch_size), minlength=n_cells)
                index = np.concatenate(
                    [
                        rows[np.searchsorted(end, rng.random(size) * end[-1], side="right")]
                        for rows, end, size in zip(members, ends, drawn, strict=True)
                    ]
                )
                losses, slopes, present = game.batch(found, index)
                q[present] *= np.exp(self.eta * losses[present])
                q /= q.sum()
                found = found - self.step_size * (q @ slopes + game.penalty_slope(found))
            score = self._worst_and_mean(task.selection, *game.unpack(found))
            idle += 1
            if score > best:
                best, kept, idle = score, found, 0
            if idle == self.patience:
                break
        return kept, MinimaxReport(alpha, *game.certificate(kept, 1000.0))


def _root(slope: Callable[[Float], Float], v: Float) -> Float:
    """Newton steps to where a gradient vanishes, from a point nearby.

    A search by values ends where they have no more digits, at the root of the digits of v.
    """
    found = slope(v)
    for _ in range(_STEPS):
        size = float(np.linalg.norm(found))
        if size <= _FLAT:
            break

        def curvature(u: Float, v: Float = v) -> Float:
            h = _DIFFERENCE / float(np.linalg.norm(u))
            return (slope(v + h * u) - slope(v - h * u)) / (2 * h)

        hessian = LinearOperator((v.size, v.size), curvature, dtype=np.float64)
        there = v + cg(hessian, -found, rtol=1e-2, maxiter=50)[0]
        found = slope(there)
        if not np.linalg.norm(found) < size:
            break
        v = there
    return v
