"""L2-penalised logistic regression: several problems on the same rows in one batch.

Problem j of J minimises the objective, over weights u (d, C) and an unpenalised intercept b (C,),

    sum_i w_ij loss(y_ij, x_i^T u + b) + 1/2 sum_k penalty_kj |u_k|^2,

where i counts the n rows, k the d features, and w_ij are the sample weights. The loss is the
log-loss of a sigmoid (two classes, C = 1) or of a softmax (C classes). An iteration takes two
matrix products with the rows for all problems.

The solver is L-BFGS (J. Nocedal, Mathematics of Computation 35, 1980). Its preconditioner is the
approximate Hessian ``c S + penalty`` with S = Cov(x). The number c replaces the curvatures
p (1 - p) of the rows, p the predicted probability, by their mean, per problem and class. One
eigendecomposition of S serves all penalties and all values of c. A fit takes 8 to 40 iterations.
LogisticRegression of scikit-learn ("lbfgs", warm-started) takes 2.9 times as long in the benchmark
"evaluation/compare".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.linalg
import scipy.special
from numpy.typing import NDArray

Float = NDArray[np.float64]

_MEMORY = 10  # number of past pairs (step, change of the gradient) that L-BFGS uses
_CURVATURE_UPDATES = (2, 4, 8, 16, 32, 64)  # iterations at which c is updated
# Above this number of features, the preconditioner is diagonal, because the eigendecomposition
# would take too long.
_MAX_DENSE_FEATURES = 1536
_ARMIJO = 1e-4  # required decrease of the objective, as a fraction of step size * |slope|


@dataclass(frozen=True, slots=True)
class Fits:
    """Solutions of J problems."""

    weights: Float  # (J, C, d)
    intercepts: Float  # (J, C)
    converged: NDArray[np.bool_]  # (J,)


def fit(
    rows: Float,
    y: NDArray[np.intp],
    n_classes: int,
    penalties: Float,
    *,
    sample_weights: Float | None = None,
    tol: float | None = None,
    max_iter: int = 400,
) -> Fits:
    """Solve J problems, as defined in the docstring of the module."""
    # `rows` (n, d) are roughly centred and of unit mean variance. `penalties` is (d, J), or (J,).
    # `sample_weights` (n, J) have column sums 1. `tol` bounds the absolute gradient entries.
    n, d = rows.shape
    penalties = np.asarray(penalties, dtype=np.float64)
    J = penalties.shape[-1]
    width = 1 if n_classes == 2 else n_classes
    if tol is None:
        tol = 1e-7 if d * width <= 2000 else 1e-5
    batch = _Batch(
        rows,
        (y[:, None, None] == (1 if width == 1 else np.arange(width))).astype(np.float64),
        np.broadcast_to(penalties, (d, J)),
        np.full((n, 1), 1.0 / n) if sample_weights is None else sample_weights,
    )
    u = np.zeros((d + 1, J, width))
    converged = np.zeros(J, dtype=bool)
    active = np.arange(J)
    for iteration in range(max_iter + 1):
        solved = np.abs(batch.gradient).max(axis=(0, 2)) <= tol
        if solved.any() or iteration == max_iter:
            u[:, active] = batch.u
            converged[active] = solved
            if iteration == max_iter or solved.all():
                break
            active = active[~solved]
            batch.keep(~solved)
        if iteration in _CURVATURE_UPDATES:
            batch.update_curvature()
        batch.step()
    weights = np.ascontiguousarray(u[:d].transpose(1, 2, 0))
    return Fits(weights, u[d].copy(), converged)


class _Batch:
    """Problems that are not solved yet, with the point of each."""

    rows: Float  # (n, d)
    target: Float  # (n, 1, C) indicators of the classes
    penalty: Float  # (d, J)
    weight: Float  # (n, J), or (n, 1) for equal weights
    u: Float  # (d + 1, J, C); the last row holds the intercepts
    scores: Float  # (n, J, C)
    p: Float  # (n, J, C) probabilities
    value: Float  # (J,) objective values
    gradient: Float  # (d + 1, J, C)
    curvature: Float  # (J, C)
    history: list[tuple[Float, Float, Float]]  # (s, g, 1 / s^T g): step, change of the gradient

    # The approximate Hessian is D (c V diag(l) V^T + ridge I) D for weights, and c for intercepts.
    # V diag(l) V^T is the eigendecomposition of D^{-1} S D^{-1}. D has the diagonal `scale`, whose
    # square is the penalty of a feature over the mean penalty, averaged over problems. `ridge` (J,)
    # is the mean of penalty / D^2 over features, and `curvature` is c.

    def __init__(self, rows: Float, target: Float, penalty: Float, weight: Float) -> None:
        self.rows, self.target, self.penalty, self.weight = rows, target, penalty, weight
        mean = np.maximum(penalty.mean(axis=0), np.finfo(np.float64).tiny)
        scale = np.sqrt(np.mean(penalty / mean, axis=1))
        self.scale = scale if scale.all() else np.ones(len(scale))
        self.ridge = np.mean(penalty / self.scale[:, None] ** 2, axis=0)
        self.vectors: Float | None = None
        if rows.shape[1] > _MAX_DENSE_FEATURES:
            self.eigenvalues = np.mean(rows**2, axis=0) / self.scale**2
        else:
            S = rows.T @ rows / len(rows) / self.scale / self.scale[:, None]
            values, self.vectors = scipy.linalg.eigh(
                (S + S.T) / 2, driver="evd", check_finite=False
            )
            self.eigenvalues = np.maximum(values, 0.0)
        # Start at weights 0, and intercepts that predict the class fractions.
        p = np.clip(np.sum(weight[:, :, None] * target, axis=0), 1e-12, 1 - 1e-12)
        u = np.zeros((rows.shape[1] + 1, penalty.shape[1], target.shape[2]))
        u[-1] = np.log(p / (1 - p)) if target.shape[2] == 1 else np.log(p)
        scores = np.broadcast_to(u[-1], (len(rows), *u[-1].shape))
        self._move(u, scores, *self._evaluate(u, scores))
        self.update_curvature()
        self.history = []

    def keep(self, kept: NDArray[np.bool_]) -> None:
        """Drop the other problems."""
        self.value, self.ridge, self.curvature = (
            array[kept] for array in (self.value, self.ridge, self.curvature)
        )
        self.penalty, self.u, self.scores, self.p, self.gradient = (
            array[:, kept] for array in (self.penalty, self.u, self.scores, self.p, self.gradient)
        )
        if self.weight.shape[1] > 1:
            self.weight = self.weight[:, kept]
        self.history = [(s[:, kept], g[:, kept], r[kept]) for s, g, r in self.history]

    def _evaluate(self, u: Float, scores: Float) -> tuple[Float, Float]:
        """Return the objective values (J,) and the predicted probabilities (n, J, C)."""
        if self.target.shape[2] == 1:
            p = scipy.special.expit(scores)
            losses = np.logaddexp(0.0, scores[:, :, 0]) - self.target[:, :, 0] * scores[:, :, 0]
        else:
            largest = scores.max(axis=2, keepdims=True)
            p = np.exp(scores - largest)
            total = p.sum(axis=2, keepdims=True)
            p /= total
            losses = (np.log(total) + largest)[:, :, 0] - np.sum(scores * self.target, axis=2)
        ridge = 0.5 * np.sum(self.penalty[:, :, None] * u[:-1] ** 2, axis=(0, 2))
        return np.asarray(np.sum(self.weight * losses, axis=0) + ridge), p

    def _move(self, u: Float, scores: Float, value: Float, p: Float) -> None:
        """Set the point and its gradient."""
        self.u, self.scores, self.value, self.p = u, scores, value, p
        residual = self.weight[:, :, None] * (p - self.target)
        flat = self.rows.T @ residual.reshape(len(self.rows), -1)
        self.gradient = np.empty_like(u)
        self.gradient[:-1] = flat.reshape(u[:-1].shape) + self.penalty[:, :, None] * u[:-1]
        self.gradient[-1] = residual.sum(axis=0)

    def update_curvature(self) -> None:
        """Set c to the mean of p (1 - p), and entries below 1e-3 of the largest to that bound."""
        c = np.sum(self.weight[:, :, None] * self.p * (1 - self.p), axis=0)
        self.curvature = np.maximum(c, 1e-3 * c.max())

    def step(self) -> None:
        """Move by the first step size of 1, 1/2, ... that meets Armijo's rule."""
        direction, u, scores, gradient = self._direction(), self.u, self.scores, self.gradient
        product = self.rows @ direction[:-1].reshape(len(direction) - 1, -1)
        score_change = product.reshape(len(self.rows), *direction.shape[1:]) + direction[-1]
        slope = np.sum(direction * gradient, axis=(0, 2))
        slack = 4 * np.finfo(np.float64).eps * np.abs(self.value)
        size = np.ones(len(slope))
        for _ in range(40):
            point = u + size[:, None] * direction, scores + size[:, None] * score_change
            value, p = self._evaluate(*point)
            too_long = value > self.value + _ARMIJO * size * slope + slack
            if not too_long.any():
                break
            size = np.where(too_long, size / 2, size)
        self._move(*point, value, p)
        s, g = self.u - u, self.gradient - gradient
        product = np.sum(s * g, axis=(0, 2))
        usable = product > 0
        r = np.where(usable, 1.0 / np.where(usable, product, 1.0), 0.0)
        self.history = [*self.history, (s, g, r)][-_MEMORY:]

    def _solve(self, q: Float) -> Float:
        """Return the inverse of the approximate Hessian times q, (d + 1, J, C)."""
        d = len(q) - 1
        floor = 1e-10 * max(float(self.eigenvalues.max()), np.finfo(np.float64).tiny)
        values = self.curvature * (self.eigenvalues[:, None, None] + floor) + self.ridge[:, None]
        w = q[:-1] / self.scale[:, None, None]
        if self.vectors is None:
            w = w / values
        else:
            w = (self.vectors.T @ w.reshape(d, -1)).reshape(w.shape) / values
            w = (self.vectors @ w.reshape(d, -1)).reshape(w.shape)
        out = np.empty_like(q)
        out[:-1] = w / self.scale[:, None, None]
        out[-1] = q[-1] / self.curvature
        if out.shape[2] > 1:
            # Adding one vector to the weights of all classes changes no probability. In this
            # direction only the penalty has curvature, and the approximate Hessian is far too
            # large. The gradient has no component in this direction; remove that of the step.
            out -= out.mean(axis=2, keepdims=True)
        return out

    def _direction(self) -> Float:
        """Return the descent direction of L-BFGS for each problem, by the two-loop recursion."""
        q = self.gradient
        weights = []
        for s, g, r in reversed(self.history):
            weights.append(r * np.sum(s * q, axis=(0, 2)))
            q = q - weights[-1][:, None] * g
        direction = self._solve(q)
        if self.history:  # scale by the last step (Nocedal and Wright, equation 7.20)
            _, g, r = self.history[-1]
            size = r * np.sum(g * self._solve(g), axis=(0, 2))
            direction = direction / np.where(size > 0, size, 1.0)[:, None]
        for (s, g, r), a in zip(self.history, reversed(weights), strict=True):
            b = r * np.sum(g * direction, axis=(0, 2))
            direction = direction + (a - b)[:, None] * s
        return -direction
