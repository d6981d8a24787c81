"""GroupDRO: a linear head with the smallest worst-cell loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import log_softmax
from sklearn.exceptions import ConvergenceWarning

from splince_fast._runtime.progress import Progress
from splince_fast._runtime.warn import warn
from splince_fast.baselines._inputs import (
    Float,
    RandomState,
    Validation,
    candidate_values,
    check_count,
    check_number,
)
from splince_fast.baselines._linear import BalancedClassifier, CellData
from splince_fast.baselines._minimax import Minimax, minimise
from splince_fast.exceptions import InputError

# SGD has diverged if a coefficient exceeds this value, whose square is near the float64 limit.
_DIVERGED = 1e150


@dataclass(frozen=True, slots=True)
class MinimaxReport:
    """Objective and duality gap of a GroupDRO head.

    Attributes
    ----------
    alpha : float
        L2 penalty of the head.
    loss : float
        Objective: the largest mean loss of a cell, including the margin, plus alpha / 2 |w|^2.
    gap : float
        Objective minus the dual objective at a feasible point. The optimum is between
        `loss - gap` and `loss`.
    cell_losses, cell_weights : tuple of float
        Mean loss, including the margin, and dual weight of each cell, in the order of ``cells_``.
    """

    alpha: float
    loss: float
    gap: float
    cell_losses: tuple[float, ...]
    cell_weights: tuple[float, ...]


class GroupDRO(BalancedClassifier):
    """Group distributionally robust logistic head: min_w max_g L_g(w) + alpha / 2 |w|^2.

    L_g is the mean log-loss of cell g = (class, group), plus ``margin / sqrt(n_g)`` for the n_g
    training rows of the cell. The intercept is not penalised. The problem is convex.

    ``solver="exact"`` minimises (1 / t) log sum_g exp(t L_g) + alpha / 2 |w|^2 by L-BFGS for
    t = 10, 100, 1000, ..., at most 10^6, until the duality gap is at most `tol`.

    ``solver="sgd"`` is the online algorithm of Sagawa et al. Each row of a batch is drawn from a
    random cell. In each step, the weight q_g of a cell is multiplied by exp(eta L_g(batch)), and a
    gradient step is taken on sum_g q_g L_g(batch) + alpha / 2 |w|^2, where the q_g are normalised
    to sum 1. The result is the head after the epoch with the highest worst-cell accuracy on the
    validation rows.

    Parameters
    ----------
    alpha : float or sequence of float
        L2 penalty. From a sequence, the value with the highest worst-cell accuracy on the
        validation rows is selected (ties: by accuracy, then the larger alpha).
    solver : {"exact", "sgd"}
    margin : float
        Constant of the group adjustment, ``margin / sqrt(n_g)``.
    tol : float
        Largest allowed duality gap of the exact solver; a larger final gap gives a warning.
    eta, step_size : float
        Step sizes of the "sgd" solver for the cell weights and for the coefficients.
    batch_size, max_epochs, patience : int
        Rows per step and largest number of epochs of the "sgd" solver. The solver stops after
        `patience` successive epochs without a higher accuracy on the validation rows (of the worst
        cell, then of all rows).
    validation_share : float in [0, 1)
        Fraction of each cell held out for validation if ``fit`` is given no validation rows and
        needs them (several alphas, or "sgd"); with 0, selection uses the training rows.
    groups_from : {None, "y"}
        With "y", `fit` takes no groups, and the cells are the classes of y.
    random_state : int, Generator, RandomState or None
        Draws the batches and the validation rows.
    progress : bool, optional
        Show a progress bar on stderr; by default only in a terminal or notebook, after two
        seconds.

    Attributes
    ----------
    coef_, intercept_ : ndarray of shape (1 or n_classes, n_features) and (1 or n_classes,)
    classes_ : ndarray
    cells_ : list of tuple
        Cells (class, group).
    report_ : MinimaxReport
        Objective, duality gap, loss and weight of each cell.
    n_features_in_, feature_names_in_
        Number and names of the features of X.

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
        random_state: RandomState = None,
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
        X: object,
        y: object = None,
        *,
        groups: object = None,
        sample_weight: ArrayLike | None = None,
        validation: Validation = None,
    ) -> Self:
        """Fit the classifier, and discard any earlier fit.

        Parameters
        ----------
        X : array-like or frame of shape (n_samples, n_features)
            Copied to float64.
        y : array-like of shape (n_samples,)
            Labels of the task, two or more classes.
        groups : array-like of shape (n_samples,), tuple of these, mapping or frame
            Groups, which form the cells together with y. With several columns, a group is a
            combination of values, one from each column.
        sample_weight : array-like of shape (n_samples,), optional
            Non-negative weights of the rows in the mean loss of a cell.
        validation : array-like of bool, shape (n_samples,), or tuple (X, y, groups), optional
            Mask of the validation rows, or separate validation rows. Separate rows have weight 1.
            alpha and the epoch are selected on these rows; no head is fitted to them.

        Returns
        -------
        object
            The estimator itself; unchanged after an error or KeyboardInterrupt.

        Raises
        ------
        InputError, NonFiniteError, LabelError, NotEnoughDataError
            The rows, labels or parameters are invalid, a cell has no training row, or the steps of
            "sgd" diverge.

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
        self._alphas()

    def _alphas(self) -> list[float]:
        """Return the candidate values of alpha, largest first."""
        return sorted(candidate_values(self.alpha, "alpha"), reverse=True)

    def _needs_validation_rows(self) -> bool:
        return len(self._alphas()) > 1 or self.solver == "sgd"

    def _fit_cells(self, data: CellData) -> None:
        # Centring improves the condition number. The optimum stays the same, because the intercept
        # is not penalised.
        train = data.train
        mean = np.average(train.rows, axis=0, weights=train.weight)
        for rows in {id(part): part.rows for part in (train, data.selection)}.values():
            rows -= mean
        best_score: tuple[float, float] | None = None
        with Progress(label="GroupDRO", show=self.progress) as bar:
            packed: Float | None = None
            for alpha in self._alphas():
                problem = Minimax(
                    train, len(self.classes_), alpha=alpha, margin=self.margin,
                    advance_progress=lambda: bar.advance(len(train), train.rows.nbytes),
                )  # fmt: skip
                if self.solver == "exact":
                    packed, sharpness = minimise(problem, packed, self.tol)
                else:
                    packed, sharpness = self._fit_sgd(problem, data), 1000.0
                coef, intercept = problem.unpack(packed)
                score = self._accuracies(data.selection, coef, intercept)
                if best_score is None or score > best_score:
                    best_score = score
                    self.report_ = MinimaxReport(alpha, *problem.certificate(packed, sharpness))
                    self.coef_, self.intercept_ = coef, intercept - coef @ mean
        if self.solver == "exact" and self.report_.gap > self.tol:
            warn(
                f"the duality gap is {self.report_.gap:.1e}, above tol = {self.tol:g}: the head is "
                "that far from the optimum at most; a larger alpha makes the problem easier",
                ConvergenceWarning,
            )

    def _fit_sgd(self, problem: Minimax, data: CellData) -> Float:
        """Run the "sgd" solver; return the packed head of the epoch with the best accuracies.

        Heads are compared by the worst-cell accuracy on the validation rows, then by the accuracy.
        """
        rng, train, n_cells = data.rng, data.train, len(self.cells_)
        packed, log_q = problem.zero_head(), np.full(n_cells, -np.log(n_cells))
        members = [np.flatnonzero(train.cells == cell) for cell in range(n_cells)]
        cumulative = [np.cumsum(train.weight[rows]) for rows in members]
        best_score, best, no_improvement_count = (-1.0, -1.0), packed, 0
        for _ in range(self.max_epochs):
            for _ in range(max(1, len(train) // self.batch_size)):
                counts = np.bincount(rng.integers(n_cells, size=self.batch_size), minlength=n_cells)
                index = np.concatenate(
                    [
                        rows[np.searchsorted(sums, rng.random(n) * sums[-1], side="right")]
                        for rows, sums, n in zip(members, cumulative, counts, strict=True)
                    ]
                )
                losses, gradients, present = problem.batch_gradients(packed, index)
                log_q[present] += self.eta * losses[present]
                log_q = log_softmax(log_q)
                step = np.exp(log_q) @ gradients + problem.penalty_gradient(packed)
                packed = packed - self.step_size * step
                if not np.abs(packed).max() < _DIVERGED:
                    raise InputError(
                        f"the steps of solver='sgd' diverge at alpha = {problem.alpha:g}: pass a "
                        f"step_size below {self.step_size:g}, a smaller alpha, or solver='exact'"
                    )
            score = self._accuracies(data.selection, *problem.unpack(packed))
            no_improvement_count += 1
            if score > best_score:
                best_score, best, no_improvement_count = score, packed, 0
            if no_improvement_count == self.patience:
                break
        return best
