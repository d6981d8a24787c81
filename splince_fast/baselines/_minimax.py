"""The convex problem of GroupDRO: objective, gradients, duality gap and the exact solver."""

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

_CURVATURE = 0.15  # p (1 - p) of a typical row
_MAX_FACTORED = 2048  # features above which a Cholesky factor costs more than it saves
_MAX_SHARPNESS = 1e6
# Maximum number of Newton steps; gradient norm that counts as zero; step length of the finite
# differences of the gradient.
_NEWTON_STEPS, _ZERO_GRADIENT, _STEP = 3, 1e-11, 1e-6


class Minimax:
    """Objective max_g L_g(w, b) + alpha / 2 |w|^2.

    L_g is the weighted mean log-loss of cell g plus its margin. The head is packed in one vector:
    weights of shape (K', d), then K' intercepts; K' is 1 for two classes, else the number of
    classes (softmax).
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
        self.in_cell: Float = part.weight / totals[part.cells]  # row weights, sum 1 in each cell
        self.n_cells = len(totals)
        self.margins: Float = margin / np.sqrt(np.bincount(part.cells))
        self.targets: Float = np.eye(n_classes)
        self.tick = tick

    def zeros(self) -> Float:
        """Return the packed head of zeros, which gives every class the same probability."""
        return np.zeros(self.width * (self.rows.shape[1] + 1))

    def unpack(self, packed: Float) -> tuple[Float, Float]:
        """Return weights, (K', d), and intercepts, (K',), of a packed head."""
        split = self.width * self.rows.shape[1]
        return packed[:split].reshape(self.width, -1), packed[split:]

    def log_proba(self, packed: Float, rows: Float) -> Float:
        """Return the (n, K) log probabilities of the classes."""
        coef, intercept = self.unpack(packed)
        scores = rows @ coef.T + intercept
        if self.width == 1:
            scores = np.concatenate([np.zeros_like(scores), scores], axis=1)
        return np.asarray(log_softmax(scores, axis=1))

    def penalty_gradient(self, packed: Float) -> Float:
        """Return the gradient of alpha / 2 |w|^2; zero for the intercepts."""
        split = self.width * self.rows.shape[1]
        return self.alpha * np.concatenate([packed[:split], np.zeros(self.width)])

    def gradient(self, log_proba: Float, codes: Index, rows: Float, weight: Float) -> Float:
        """Return the gradient of the weighted sum of log-losses."""
        errors = (np.exp(log_proba) - self.targets[codes]) * weight[:, None]
        errors = errors[:, 1:] if self.width == 1 else errors
        return np.concatenate([(errors.T @ rows).ravel(), errors.sum(axis=0)])

    def losses(self, log_proba: Float) -> Float:
        """Return L_g of each cell, margins included."""
        row_losses = -log_proba[np.arange(len(self.codes)), self.codes]
        return np.bincount(self.cells, self.in_cell * row_losses) + self.margins

    def smoothed(self, packed: Float, sharpness: float) -> tuple[float, Float]:
        """Return (1 / t) log sum_g exp(t L_g) + alpha / 2 |w|^2, t = `sharpness`, and gradient."""
        self.tick()
        log_proba = self.log_proba(packed, self.rows)
        losses = self.losses(log_proba)
        q = np.exp(log_softmax(sharpness * losses))
        coef, _ = self.unpack(packed)
        value = logsumexp(sharpness * losses) / sharpness + 0.5 * self.alpha * np.sum(coef**2)
        gradient = self.gradient(log_proba, self.codes, self.rows, self.in_cell * q[self.cells])
        return float(value), gradient + self.penalty_gradient(packed)

    def batch(self, packed: Float, index: Index) -> tuple[Float, Float, Index]:
        """Return the mean loss and gradient of each cell in a batch, and the non-empty cells."""
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

        Let q be weights of the cells with q_g >= 0 and sum_g q_g = 1, c_i = q_g in_cell_i for row
        i of cell g, and p_i distributions over the classes with sum_i c_i (e_{y_i} - p_i) = 0,
        the optimality condition of the intercepts. Weak duality, lse(s) >= p . s + H(p), gives

            min >= sum_g q_g margin_g + sum_i c_i H(p_i) - |V|^2 / (2 alpha),
            V = sum_i c_i (e_{y_i} - p_i) x_i^T.

        Predicted probabilities p_i meet the condition up to the accuracy of the solver. A mixture
        of all p_i with one common distribution meets it exactly.
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
        if fraction > 0 and fixed.any():  # else `predicted` equals `target` up to rounding
            proba = (1 - fraction) * proba + fraction * (fixed / fixed.sum())
        errors = weight[:, None] * (self.targets[self.codes] - proba)
        errors = errors[:, 1:] if self.width == 1 else errors
        gradient = errors.T @ self.rows
        bound = q @ self.margins + weight @ entr(proba).sum(axis=1)
        bound -= float(np.sum(gradient**2)) / (2 * self.alpha)
        gap = max(0.0, float(value - bound))
        return float(value), gap, tuple(losses.tolist()), tuple(q.tolist())


class Coordinates:
    """Coordinates v of a head in which the Hessian is near the identity.

    The Hessian of a weighted mean loss with penalty is about c S + alpha I = L L^T, where S is the
    second moment of the rows with equal total weight for each cell and c is a typical p (1 - p).
    Coordinates are L^T w for the weights w of a class and sqrt(c) b for its intercept b. L-BFGS
    needs about a fifth of the iterations in these coordinates.

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
        """Return weights, (d, K'), and intercepts, (K',)."""
        return packed[: -self.width].reshape(self.width, -1).T, packed[-self.width :]

    def _solve(self, columns: Float, trans: Literal["N", "T"]) -> Float:
        """Return L^{-1} columns for `trans` "N", L^{-T} columns for "T"."""
        if self.factor is None:
            return columns / self.scale[:, None]
        return np.asarray(
            scipy.linalg.solve_triangular(
                self.factor, columns, lower=True, trans=trans, check_finite=False
            )
        )

    def of(self, packed: Float) -> Float:
        """Convert a packed head to coordinates v."""
        weights, intercepts = self._split(packed)
        scaled = self.scale[:, None] * weights if self.factor is None else self.factor.T @ weights
        return np.concatenate([scaled.T.ravel(), self.root * intercepts])

    def parameters(self, v: Float) -> Float:
        """Convert coordinates v to a packed head: the inverse of `of`."""
        weights, intercepts = self._split(v)
        return np.concatenate([self._solve(weights, "T").T.ravel(), intercepts / self.root])

    def gradient(self, gradient: Float) -> Float:
        """Convert a gradient with respect to the packed head to the gradient with respect to v."""
        weights, intercepts = self._split(gradient)
        return np.concatenate([self._solve(weights, "N").T.ravel(), intercepts / self.root])


def minimise(problem: Minimax, start: Float | None, tol: float) -> tuple[Float, float]:
    """Minimise smoothed problems of increasing sharpness, each from the minimum of the last.

    Parameters
    ----------
    problem : Minimax
    start : ndarray, optional
        Packed head to start from, such as the solution of a similar problem.
    tol : float
        The sharpness increases until the duality gap is at most `tol`.

    Returns
    -------
    packed : ndarray
        Packed head.
    sharpness : float
        Sharpness of the last problem.
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

    L-BFGS compares objective values, and rounding errors of the values limit v to half of the
    digits of float64.
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
