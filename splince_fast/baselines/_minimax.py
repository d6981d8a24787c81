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
_NEWTON_STEPS, _ZERO_GRADIENT, _STEP = 3, 1e-11, 1e-6


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
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.rows, self.codes, self.cells, self.alpha = part.rows, part.codes, part.cells, alpha
        self.width = 1 if n_classes == 2 else n_classes
        totals = np.bincount(part.cells, part.weight)
        # Row weights that sum to 1 in each cell.
        self.in_cell: Float = part.weight / totals[part.cells]
        self.n_cells = len(totals)
        self.margins: Float = margin / np.sqrt(np.bincount(part.cells))
        self.targets: Float = np.eye(n_classes)
        self.tick = tick

    def zeros(self) -> Float:
        """Return the packed head of zeros, which gives every class the same probability."""
        return np.zeros(self.width * (self.rows.shape[1] + 1))

    def unpack(self, packed: Float) -> tuple[Float, Float]:
        """Return the weights, (K', d), and the intercepts, (K',), of a packed head."""
        split = self.width * self.rows.shape[1]
        return packed[:split].reshape(self.width, -1), packed[split:]

    def log_proba(self, packed: Float, rows: Float) -> Float:
        """Return the log probabilities of the classes for each row, shape (n, K)."""
        coef, intercept = self.unpack(packed)
        scores = rows @ coef.T + intercept
        if self.width == 1:
            scores = np.concatenate([np.zeros_like(scores), scores], axis=1)
        return np.asarray(log_softmax(scores, axis=1))

    def penalty_gradient(self, packed: Float) -> Float:
        """Return the gradient of alpha / 2 |w|^2, which is zero for the intercepts."""
        split = self.width * self.rows.shape[1]
        return self.alpha * np.concatenate([packed[:split], np.zeros(self.width)])

    def gradient(self, log_proba: Float, codes: Index, rows: Float, weight: Float) -> Float:
        """Return the gradient of the weighted sum of log-losses with respect to the packed head."""
        errors = (np.exp(log_proba) - self.targets[codes]) * weight[:, None]
        errors = errors[:, 1:] if self.width == 1 else errors
        return np.concatenate([(errors.T @ rows).ravel(), errors.sum(axis=0)])

    def losses(self, log_proba: Float) -> Float:
        """Return L_g, which includes the margin, for each cell g."""
        row_losses = -log_proba[np.arange(len(self.codes)), self.codes]
        return np.bincount(self.cells, self.in_cell * row_losses) + self.margins

    def smoothed(self, packed: Float, sharpness: float) -> tuple[float, Float]:
        """Return the smoothed objective and its gradient with respect to the packed head.

        The smoothed objective is (1 / t) log sum_g exp(t L_g) + alpha / 2 |w|^2, t = `sharpness`.
        """
        self.tick()
        log_proba = self.log_proba(packed, self.rows)
        losses = self.losses(log_proba)
        q = np.exp(log_softmax(sharpness * losses))
        coef, _ = self.unpack(packed)
        value = logsumexp(sharpness * losses) / sharpness + 0.5 * self.alpha * np.sum(coef**2)
        gradient = self.gradient(log_proba, self.codes, self.rows, self.in_cell * q[self.cells])
        return float(value), gradient + self.penalty_gradient(packed)

    def batch(self, packed: Float, index: Index) -> tuple[Float, Float, Index]:
        """Return L_g and its gradient for each cell g of a batch, and the cells with rows."""
        self.tick()
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
            gradients[cell] = self.gradient(
                log_proba[members], codes[members], rows[members], weight[members]
            )
        return losses, gradients, present

    def certificate(
        self, packed: Float, sharpness: float
    ) -> tuple[float, float, tuple[float, ...], tuple[float, ...]]:
        """Return the objective, the duality gap, the cell losses and the dual cell weights.

        The gap is the objective minus a lower bound of its minimum. For the bound, let q_g >= 0 be
        weights of the cells with sum 1, and c_i = q_g in_cell_i the weight of row i of cell g. Let
        x_i be the features of row i, e_i the indicator vector of its class, and p_i any
        distribution over the classes, with entropy H(p_i). The p_i must satisfy the optimality
        condition of the intercepts, sum_i c_i (e_i - p_i) = 0. Weak duality gives

            min >= sum_g q_g margin_g + sum_i c_i H(p_i) - |V|^2 / (2 alpha),
            V = sum_i c_i (e_i - p_i) x_i^T,

        because log sum_k exp(s_k) >= p . s + H(p) for all scores s and distributions p. Predicted
        probabilities satisfy the condition up to the accuracy of the solver. Mixing all p_i with
        one common distribution makes the condition exact.
        """
        log_proba = self.log_proba(packed, self.rows)
        losses = self.losses(log_proba)
        coef, _ = self.unpack(packed)
        value = losses.max() + 0.5 * self.alpha * float(np.sum(coef**2))
        q = np.exp(log_softmax(sharpness * losses))
        weight = self.in_cell * q[self.cells]
        proba = np.exp(log_proba)
        target = np.bincount(self.codes, weight, proba.shape[1])
        predicted = weight @ proba
        fraction = float(np.max((predicted - target) / predicted, initial=0.0))
        fixed = np.maximum(target - (1 - fraction) * predicted, 0.0)
        # Otherwise `proba` satisfies the optimality condition up to rounding.
        if fraction > 0 and fixed.any():
            proba = (1 - fraction) * proba + fraction * (fixed / fixed.sum())
        errors = weight[:, None] * (self.targets[self.codes] - proba)
        errors = errors[:, 1:] if self.width == 1 else errors
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
        self.width, d = problem.width, problem.rows.shape[1]
        weight = (problem.in_cell / problem.n_cells)[:, None]
        self.root, self.factor = np.sqrt(_CURVATURE), None
        if factored:
            S = _CURVATURE * ((problem.rows * weight).T @ problem.rows)
            S[np.diag_indices(d)] += problem.alpha
            self.factor = np.linalg.cholesky(S)
        else:
            squares = np.sum(weight * problem.rows**2, axis=0)
            self.scale: Float = np.sqrt(_CURVATURE * squares + problem.alpha)

    def _split(self, packed: Float) -> tuple[Float, Float]:
        """Return the weights, (d, K'), and the intercepts, (K',), of a packed vector."""
        return packed[: -self.width].reshape(self.width, -1).T, packed[-self.width :]

    def _solve(self, columns: Float, trans: Literal["N", "T"]) -> Float:
        """Solve L x = `columns` if `trans` is "N", or L^T x = `columns` if `trans` is "T"."""
        if self.factor is None:
            return columns / self.scale[:, None]
        return np.asarray(
            scipy.linalg.solve_triangular(
                self.factor, columns, lower=True, trans=trans, check_finite=False
            )
        )

    def of(self, packed: Float) -> Float:
        """Convert a packed head to the coordinates v."""
        weights, intercepts = self._split(packed)
        scaled = self.scale[:, None] * weights if self.factor is None else self.factor.T @ weights
        return np.concatenate([scaled.T.ravel(), self.root * intercepts])

    def parameters(self, v: Float) -> Float:
        """Convert the coordinates v to a packed head: the inverse of `of`."""
        weights, intercepts = self._split(v)
        return np.concatenate([self._solve(weights, "T").T.ravel(), intercepts / self.root])

    def gradient(self, gradient: Float) -> Float:
        """Convert a gradient with respect to the packed head to the gradient with respect to v."""
        weights, intercepts = self._split(gradient)
        return np.concatenate([self._solve(weights, "N").T.ravel(), intercepts / self.root])


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

    def smoothed(v: Float, sharpness: float) -> tuple[float, Float]:
        value, gradient = problem.smoothed(coordinates.parameters(v), sharpness)
        return value, coordinates.gradient(gradient)

    packed = problem.zeros() if start is None else start
    sharpness, gap = 1.0, np.inf
    while gap > tol and sharpness < _MAX_SHARPNESS:
        sharpness *= 10.0
        v = minimize(
            smoothed, coordinates.of(packed), args=(sharpness,), jac=True, method="L-BFGS-B",
            options={"maxiter": 5000, "maxfun": 10_000, "maxcor": 20, "gtol": 1e-11, "ftol": 0},
        ).x  # fmt: skip
        packed = coordinates.parameters(v)
        if sharpness >= 1000.0:
            gap = problem.certificate(packed, sharpness)[1]
    v = _newton(lambda v: smoothed(v, sharpness)[1], v)
    return coordinates.parameters(v), sharpness


def _newton(gradient: Callable[[Float], Float], v: Float) -> Float:
    """Refine an approximate zero v of a gradient by Newton steps.

    L-BFGS compares values of the objective. Rounding errors of these values limit the accuracy of v
    to half of the digits of float64.
    """
    at_v = gradient(v)
    for _ in range(_NEWTON_STEPS):
        size = float(np.linalg.norm(at_v))
        if size <= _ZERO_GRADIENT:
            break

        def hessian_product(u: Float, v: Float = v) -> Float:
            h = _STEP / float(np.linalg.norm(u))
            return (gradient(v + h * u) - gradient(v - h * u)) / (2 * h)

        hessian = LinearOperator((v.size, v.size), hessian_product, dtype=np.float64)
        candidate = v + cg(hessian, -at_v, rtol=1e-2, maxiter=50)[0]
        at_v = gradient(candidate)
        if not np.linalg.norm(at_v) < size:
            break
        v = candidate
    return v
