"""The convex problem of GroupDRO: values, gradients, and a certified lower bound."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy.linalg
from scipy.special import entr, log_softmax, logsumexp

from splince_fast.baselines._rows import Float, Index

_CURVATURE = 0.15  # p (1 - p) of a typical row
_DENSE = 2048  # features above which the coordinates are scaled, not rotated: a factor takes longer


class Minimax:
    """max_g L_g(w, b) + alpha / 2 |w|^2 with L_g the weighted mean log-loss of cell g.

    Parameters are one vector: the (K', d) weights, then the K' intercepts, K' = 1 for two
    classes, the number of classes otherwise (softmax).
    """

    def __init__(
        self,
        rows: Float,
        codes: Index,
        cells: Index,
        weight: Float,
        n_classes: int,
        alpha: float,
        margin: float,
        tick: Callable[[], None],
    ) -> None:
        self.rows, self.codes, self.cells, self.alpha = rows, codes, cells, alpha
        self.width = 1 if n_classes == 2 else n_classes
        totals = np.bincount(cells, weight)
        self.in_cell: Float = weight / totals[cells]  # sums to 1 within a cell
        self.n_cells = len(totals)
        self.margins: Float = margin / np.sqrt(np.bincount(cells))
        self.targets: Float = np.eye(n_classes)
        self.tick = tick

    def zeros(self) -> Float:
        """The start: nothing is predicted."""
        return np.zeros(self.width * (self.rows.shape[1] + 1))

    def unpack(self, packed: Float) -> tuple[Float, Float]:
        """Weights (K', d) and intercepts (K',)."""
        split = self.width * self.rows.shape[1]
        return packed[:split].reshape(self.width, -1), packed[split:]

    def log_chances(self, packed: Float, rows: Float) -> Float:
        """(n, K) logarithms of the class probabilities."""
        coef, intercept = self.unpack(packed)
        scores = rows @ coef.T + intercept
        if self.width == 1:
            scores = np.concatenate([np.zeros_like(scores), scores], axis=1)
        return np.asarray(log_softmax(scores, axis=1))

    def penalty_slope(self, packed: Float) -> Float:
        """Gradient of alpha / 2 |w|^2, zero for the intercepts."""
        split = self.width * self.rows.shape[1]
        return self.alpha * np.concatenate([packed[:split], np.zeros(self.width)])

    def slope(self, log_chances: Float, codes: Index, rows: Float, weight: Float) -> Float:
        """Gradient of the weighted sum of log-losses."""
        errors = (np.exp(log_chances) - self.targets[codes]) * weight[:, None]
        errors = errors[:, 1:] if self.width == 1 else errors
        return np.concatenate([(errors.T @ rows).ravel(), errors.sum(axis=0)])

    def losses(self, log_chances: Float) -> Float:
        """L_g of each cell, margins included."""
        each = -log_chances[np.arange(len(self.codes)), self.codes]
        return np.bincount(self.cells, self.in_cell * each) + self.margins

    def smoothed(self, packed: Float, sharpness: float) -> tuple[float, Float]:
        """(1 / t) log sum_g exp(t L_g) + penalty, and its gradient."""
        self.tick()
        log_chances = self.log_chances(packed, self.rows)
        losses = self.losses(log_chances)
        q = np.exp(log_softmax(sharpness * losses))
        coef, _ = self.unpack(packed)
        value = logsumexp(sharpness * losses) / sharpness + 0.5 * self.alpha * np.sum(coef**2)
        slope = self.slope(log_chances, self.codes, self.rows, self.in_cell * q[self.cells])
        return float(value), slope + self.penalty_slope(packed)

    def batch(self, packed: Float, index: Index) -> tuple[Float, Float, Index]:
        """Mean loss and gradient of each cell in a batch of rows, and the cells present."""
        self.tick()
        rows, codes, cells = self.rows[index], self.codes[index], self.cells[index]
        log_chances = self.log_chances(packed, rows)
        counts = np.bincount(cells, minlength=self.n_cells)
        share = 1.0 / counts[cells]
        each = -log_chances[np.arange(len(codes)), codes]
        losses = np.bincount(cells, share * each, minlength=self.n_cells) + self.margins
        slopes = np.zeros((self.n_cells, packed.size))
        present = np.flatnonzero(counts)
        for cell in present:
            here = cells == cell
            slopes[cell] = self.slope(log_chances[here], codes[here], rows[here], share[here])
        return losses, slopes, present

    def certificate(
        self, packed: Float, sharpness: float
    ) -> tuple[float, float, tuple[float, ...], tuple[float, ...]]:
        """Objective, duality gap, loss and dual weight of each cell.

        With q in the simplex, c_i = q_g in_cell_i, and distributions p_i over the classes with
        sum_i c_i (e_{y_i} - p_i) = 0 (the intercepts are free), weak duality gives

            min >= sum_g q_g margin_g + sum_i c_i H(p_i) - |V|^2 / (2 alpha),
            V = sum_i c_i (e_{y_i} - p_i) x_i^T,

        from lse(s) >= p . s + H(p). The p_i of the head meet the constraint to the solver's
        accuracy only; mixing them with one fixed distribution meets it exactly.
        """
        log_chances = self.log_chances(packed, self.rows)
        losses = self.losses(log_chances)
        coef, _ = self.unpack(packed)
        value = losses.max() + 0.5 * self.alpha * float(np.sum(coef**2))
        q = np.exp(log_softmax(sharpness * losses))
        weight = self.in_cell * q[self.cells]
        chances = np.exp(log_chances)
        wanted = np.bincount(self.codes, weight, chances.shape[1])
        found = weight @ chances
        share = float(np.max((found - wanted) / found, initial=0.0))
        fixed = np.maximum(wanted - (1 - share) * found, 0.0)
        if share > 0 and fixed.any():  # else the two differ by a rounding, and nothing is to mix
            chances = (1 - share) * chances + share * (fixed / fixed.sum())
        errors = weight[:, None] * (self.targets[self.codes] - chances)
        errors = errors[:, 1:] if self.width == 1 else errors
        slope = errors.T @ self.rows
        bound = q @ self.margins + weight @ entr(chances).sum(axis=1)
        bound -= float(np.sum(slope**2)) / (2 * self.alpha)
        gap = max(0.0, float(value - bound))
        return float(value), gap, tuple(losses.tolist()), tuple(q.tolist())


class Coordinates:
    """Coordinates v of the parameters in which the Hessian is near the identity.

    With S the second moment of the rows, every cell weighing alike, and c a typical p (1 - p), the
    Hessian of a weighted mean loss with its penalty is about c S + alpha I = L L^T: v = L^T w
    for the weights of a class, sqrt(c) b for its intercept. L-BFGS takes a fifth of the steps.
    """

    def __init__(self, game: Minimax) -> None:
        self.width, d = game.width, game.rows.shape[1]
        weight = (game.in_cell / game.n_cells)[:, None]
        self.root, self.factor = np.sqrt(_CURVATURE), None
        if d > _DENSE:
            squares = np.sum(weight * game.rows**2, axis=0)
            self.scale: Float = np.sqrt(_CURVATURE * squares + game.alpha)
        else:
            S = _CURVATURE * ((game.rows * weight).T @ game.rows)
            S[np.diag_indices(d)] += game.alpha
            self.factor = np.linalg.cholesky(S)

    def _split(self, packed: Float) -> tuple[Float, Float]:
        """(d, K') weights and the intercepts."""
        return packed[: -self.width].reshape(self.width, -1).T, packed[-self.width :]

    def _solved(self, columns: Float, transposed: bool) -> Float:
        """L^{-1} columns, or L^{-T} columns."""
        if self.factor is None:
            return columns / self.scale[:, None]
        return np.asarray(
            scipy.linalg.solve_triangular(
                self.factor,
                columns,
                lower=True,
                trans="T" if transposed else "N",
                check_finite=False,
            )
        )

    def of(self, packed: Float) -> Float:
        """v of the parameters."""
        weights, intercepts = self._split(packed)
        scaled = self.scale[:, None] * weights if self.factor is None else self.factor.T @ weights
        return np.concatenate([scaled.T.ravel(), self.root * intercepts])

    def parameters(self, v: Float) -> Float:
        """The inverse of `of`."""
        weights, intercepts = self._split(v)
        return np.concatenate([self._solved(weights, True).T.ravel(), intercepts / self.root])

    def slope(self, slope: Float) -> Float:
        """A gradient by the parameters as one by v."""
        weights, intercepts = self._split(slope)
        return np.concatenate([self._solved(weights, False).T.ravel(), intercepts / self.root])
