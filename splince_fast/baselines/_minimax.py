"""The convex problem of GroupDRO: objective, gradients, duality gap and exact solver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import scipy.linalg
from scipy.optimize import minimize
from scipy.sparse.linalg import LinearOperator, cg
from scipy.special import entr, log_softmax, logsumexp

from splince_fast.baselines._inputs import Float, Index
from splince_fast.baselines._linear import CellRows

_CURVATURE = 0.15  # p (1 - p) of a typical row with class probability p
_MAX_FACTORED = 2048  # with more features, a Cholesky factor costs more time than it saves
_MAX_SHARPNESS = 1e6
# For Newton's method: the largest number of steps, the norm below which a gradient counts as zero,
# and the step length of the finite differences of the gradient.
_NEWTON_STEPS, _ZERO_GRADIENT, _DIFFERENCE_STEP = 3, 1e-11, 1e-6


class Minimax:
    """Objective max_g L_g(w, b) + alpha / 2 |w|^2.

    L_g is the weighted mean log-loss of cell g plus the margin of the cell. The head, w and b, is
    packed in one vector: weights w of shape (K', d), then K' intercepts b. K' is 1 for two classes,
    otherwise the number K of classes (softmax).
    """

    def __init__(
        self,
        part: CellRows,
        n_classes: int,
        *,
        alpha: float,
        margin: float = 0.0,
        advance_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.rows, self.codes, self.cells, self.alpha = part.rows, part.codes, part.cells, alpha
        self.n_outputs = 1 if n_classes == 2 else n_classes
        totals = np.bincount(part.cells, part.weight)
        # Row weights that sum to 1 in each cell.
        self.row_weight: Float = part.weight / totals[part.cells]
        self.n_cells = len(totals)
        self.margins: Float = margin / np.sqrt(np.bincount(part.cells))
        self.indicators: Float = np.eye(n_classes)
        self.advance_progress = advance_progress

    def zero_head(self) -> Float:
        """Return the packed head of zeros, which gives every class the same probability."""
        return np.zeros(self.n_outputs * (self.rows.shape[1] + 1))

    def unpack(self, packed: Float) -> tuple[Float, Float]:
        """Return the weights, (K', d), and the intercepts, (K',), of a packed head."""
        n_weights = self.n_outputs * self.rows.shape[1]
        return packed[:n_weights].reshape(self.n_outputs, -1), packed[n_weights:]

    def log_proba(self, packed: Float, rows: Float) -> Float:
        """Return the log probabilities of the classes for each row, shape (n, K)."""
        coef, intercept = self.unpack(packed)
        scores = rows @ coef.T + intercept
        if self.n_outputs == 1:
            scores = np.concatenate([np.zeros_like(scores), scores], axis=1)
        return np.asarray(log_softmax(scores, axis=1))

    def penalty_gradient(self, packed: Float) -> Float:
        """Return the gradient of alpha / 2 |w|^2, which is zero for the intercepts."""
        n_weights = self.n_outputs * self.rows.shape[1]
        return self.alpha * np.concatenate([packed[:n_weights], np.zeros(self.n_outputs)])

    def loss_gradient(self, log_proba: Float, codes: Index, rows: Float, weight: Float) -> Float:
        """Return the gradient of the weighted sum of log-losses with respect to the packed head."""
        errors = (np.exp(log_proba) - self.indicators[codes]) * weight[:, None]
        errors = errors[:, 1:] if self.n_outputs == 1 else errors
        return np.concatenate([(errors.T @ rows).ravel(), errors.sum(axis=0)])

    def cell_losses(self, log_proba: Float) -> Float:
        """Return L_g, which includes the margin, for each cell g."""
        row_losses = -log_proba[np.arange(len(self.codes)), self.codes]
        return np.bincount(self.cells, self.row_weight * row_losses) + self.margins

    def smoothed_objective(self, packed: Float, sharpness: float) -> tuple[float, Float]:
        """Return the smoothed objective and its gradient with respect to the packed head.

        The smoothed objective is (1 / t) log sum_g exp(t L_g) + alpha / 2 |w|^2, t = `sharpness`.
        """
        self.advance_progress()
        log_proba = self.log_proba(packed, self.rows)
        losses = self.cell_losses(log_proba)
        q = np.exp(log_softmax(sharpness * losses))
        coef, _ = self.unpack(packed)
        value = logsumexp(sharpness * losses) / sharpness + 0.5 * self.alpha * np.sum(coef**2)
        weight = self.row_weight * q[self.cells]
        gradient = self.loss_gradient(log_proba, self.codes, self.rows, weight)
        return float(value), gradient + self.penalty_gradient(packed)

    def batch_gradients(self, packed: Float, index: Index) -> tuple[Float, Float, Index]:
        """Return L_g and its gradient for each cell g of a batch, and the cells with rows."""
        self.advance_progress()
        rows, codes, cells = self.rows[index], self.codes[index], self.cells[index]
        log_proba = self.log_proba(packed, rows)
        counts = np.bincount(cells, minlength=self.n_cells)
        weight = 1.0 / counts[cells]
        row_losses = -log_proba[np.arange(len(codes)), codes]
        losses = np.bincount(cells, weight * row_losses, minlength=self.n_cells) + self.margins
        gradients = np.zeros((self.n_cells, packed.size))
        present = np.flatnonzero(counts)
        for cell in present:
            members = cells == cell
            gradients[cell] = self.loss_gradient(
                log_proba[members], codes[members], rows[members], weight[members]
            )
        return losses, gradients, present

    def certificate(
        self, packed: Float, sharpness: float
    ) -> tuple[float, float, tuple[float, ...], tuple[float, ...]]:
        """Return the objective, the duality gap, the cell losses and the dual cell weights.

        The gap is the objective minus a lower bound of its minimum. For the bound, let q_g >= 0 be
        weights of the cells with sum 1, and c_i = q_g row_weight_i for row i of cell g. Let x_i be
        the features of row i, e_i the indicator vector of its class, and p_i any distribution over
        the classes, with entropy H(p_i). The p_i must satisfy the optimality condition of the
        intercepts, sum_i c_i (e_i - p_i) = 0. Weak duality gives

            min >= sum_g q_g margin_g + sum_i c_i H(p_i) - |V|^2 / (2 alpha),
            V = sum_i c_i (e_i - p_i) x_i^T,

        because log sum_k exp(s_k) >= p . s + H(p) for all scores s and distributions p. Predicted
        probabilities satisfy the condition up to the accuracy of the solver. Mixing all p_i with
        one common distribution makes the condition exact.
        """
        log_proba = self.log_proba(packed, self.rows)
        losses = self.cell_losses(log_proba)
        coef, _ = self.unpack(packed)
        value = losses.max() + 0.5 * self.alpha * float(np.sum(coef**2))
        q = np.exp(log_softmax(sharpness * losses))
        weight = self.row_weight * q[self.cells]
        proba = np.exp(log_proba)
        observed = np.bincount(self.codes, weight, proba.shape[1])
        predicted = weight @ proba
        mixing_fraction = float(np.max((predicted - observed) / predicted, initial=0.0))
        common = np.maximum(observed - (1 - mixing_fraction) * predicted, 0.0)
        # Otherwise `proba` satisfies the optimality condition up to rounding.
        if mixing_fraction > 0 and common.any():
            proba = (1 - mixing_fraction) * proba + mixing_fraction * (common / common.sum())
        errors = weight[:, None] * (self.indicators[self.codes] - proba)
        errors = errors[:, 1:] if self.n_outputs == 1 else errors
        gradient = errors.T @ self.rows
        bound = q @ self.margins + weight @ entr(proba).sum(axis=1)
        bound -= float(np.sum(gradient**2)) / (2 * self.alpha)
        gap = max(0.0, float(value - bound))
        return float(value), gap, tuple(losses.tolist()), tuple(q.tolist())


class Coordinates:
    """Coordinates v of a head in which the Hessian of the objective is near the identity.

    The Hessian of a weighted mean log-loss with penalty is about c S + alpha I = L L^T. Here S is
    the second moment of the rows, with equal total weight for each cell, and c is a typical value
    of p (1 - p) for a class probability p. The coordinates are L^T w for the weights w of a class
    and sqrt(c) b for the intercept b. L-BFGS needs about a fifth of the iterations in these
    coordinates.

    Parameters
    ----------
    problem : Minimax
    factored : bool
        Whether L is the Cholesky factor of c S + alpha I (True) or the square root of its
        diagonal (False).
    """

    def __init__(self, problem: Minimax, *, factored: bool) -> None:
        self.n_outputs, d = problem.n_outputs, problem.rows.shape[1]
        weight = (problem.row_weight / problem.n_cells)[:, None]
        self.sqrt_c, self.factor = np.sqrt(_CURVATURE), None
        if factored:
            hessian = _CURVATURE * ((problem.rows * weight).T @ problem.rows)
            hessian[np.diag_indices(d)] += problem.alpha
            self.factor = np.linalg.cholesky(hessian)
        else:
            squares = np.sum(weight * problem.rows**2, axis=0)
            self.scale: Float = np.sqrt(_CURVATURE * squares + problem.alpha)

    def _split(self, packed: Float) -> tuple[Float, Float]:
        """Return the weights, (d, K'), and the intercepts, (K',), of a packed vector."""
        return packed[: -self.n_outputs].reshape(self.n_outputs, -1).T, packed[-self.n_outputs :]

    def _solve(self, columns: Float, trans: Literal["N", "T"]) -> Float:
        """Solve L x = `columns` if `trans` is "N", or L^T x = `columns` if `trans` is "T"."""
        if self.factor is None:
            return columns / self.scale[:, None]
        return np.asarray(
            scipy.linalg.solve_triangular(
                self.factor, columns, lower=True, trans=trans, check_finite=False
            )
        )

    def transform(self, packed: Float) -> Float:
        """Convert a packed head to the coordinates v."""
        weights, intercepts = self._split(packed)
        scaled = self.scale[:, None] * weights if self.factor is None else self.factor.T @ weights
        return np.concatenate([scaled.T.ravel(), self.sqrt_c * intercepts])

    def inverse_transform(self, v: Float) -> Float:
        """Convert the coordinates v to a packed head: the inverse of `transform`."""
        weights, intercepts = self._split(v)
        return np.concatenate([self._solve(weights, "T").T.ravel(), intercepts / self.sqrt_c])

    def transform_gradient(self, gradient: Float) -> Float:
        """Convert a gradient with respect to the packed head to the gradient with respect to v."""
        weights, intercepts = self._split(gradient)
        return np.concatenate([self._solve(weights, "N").T.ravel(), intercepts / self.sqrt_c])


def minimise(problem: Minimax, start: Float | None, tol: float) -> tuple[Float, float]:
    """Minimise smoothed objectives of increasing sharpness, each from the previous minimum.

    Parameters
    ----------
    problem : Minimax
    start : ndarray, optional
        Packed head to start from, such as the solution of a similar problem.
    tol : float
        The sharpness increases until the duality gap is at most `tol`, or the sharpness is 1e6.

    Returns
    -------
    packed : ndarray
        Packed head that minimises the last smoothed objective.
    sharpness : float
        Sharpness of the last smoothed objective.
    """
    d = problem.rows.shape[1]
    coordinates = Coordinates(problem, factored=d <= _MAX_FACTORED)

    def objective(v: Float, sharpness: float) -> tuple[float, Float]:
        value, gradient = problem.smoothed_objective(coordinates.inverse_transform(v), sharpness)
        return value, coordinates.transform_gradient(gradient)

    packed = problem.zero_head() if start is None else start
    sharpness, gap = 1.0, np.inf
    while gap > tol and sharpness < _MAX_SHARPNESS:
        sharpness *= 10.0
        v = minimize(
            objective, coordinates.transform(packed), args=(sharpness,), jac=True,
            method="L-BFGS-B",
            options={"maxiter": 5000, "maxfun": 10_000, "maxcor": 20, "gtol": 1e-11, "ftol": 0},
        ).x  # fmt: skip
        packed = coordinates.inverse_transform(v)
        if sharpness >= 1000.0:
            gap = problem.certificate(packed, sharpness)[1]
    v = _newton(lambda v: objective(v, sharpness)[1], v)
    return coordinates.inverse_transform(v), sharpness


def _newton(gradient: Callable[[Float], Float], v: Float) -> Float:
    """Refine an approximate zero v of a gradient by Newton steps.

    L-BFGS compares values of the objective. Rounding errors of these values limit the accuracy of v
    to half of the digits of float64.
    """
    gradient_at_v = gradient(v)
    for _ in range(_NEWTON_STEPS):
        norm = float(np.linalg.norm(gradient_at_v))
        if norm <= _ZERO_GRADIENT:
            break

        def hessian_product(u: Float, v: Float = v) -> Float:
            step = _DIFFERENCE_STEP / float(np.linalg.norm(u))
            return (gradient(v + step * u) - gradient(v - step * u)) / (2 * step)

        hessian = LinearOperator((v.size, v.size), hessian_product, dtype=np.float64)
        candidate = v + cg(hessian, -gradient_at_v, rtol=1e-2, maxiter=50)[0]
        gradient_at_v = gradient(candidate)
        if not np.linalg.norm(gradient_at_v) < norm:
            break
        v = candidate
    return v
