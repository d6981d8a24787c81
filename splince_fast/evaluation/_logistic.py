"""Several L2-penalised logistic fits on the same rows at once, erased or not.

Each problem j minimises, over weights u (d, C) and a free intercept b (C),

    sum_i w_ij loss(y_i, A_j(x_i)) + 1/2 sum_k penalty_kj |u_k|^2,   A(x) = (P x)^T u + b,

with loss the log-loss of a sigmoid (two classes, C = 1) or a softmax (C classes) and P = I or an
eraser. The problems share the rows, so the two products with them that an iteration needs are
matrix products, not matrix-vector ones; P enters by its low-rank factors, and no erased copy of
the rows is made: (P x)^T u = x^T (P^T u).

The method is L-BFGS (J. Nocedal, Mathematics of Computation 35, 1980) in the metric of
``c P S P^T + penalty``, S = Cov(x): the Hessian with every p (1 - p) replaced by one number c. Once
the fits have taken shape c is set to the mean of p (1 - p) of each. About 8 to 40 iterations reach
what Newton's method reaches, at a d x d factorisation per penalty where Newton's takes one pass of
n d^2 operations per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.linalg
import scipy.special
from numpy.typing import NDArray

Float = NDArray[np.float64]

_MEMORY = 10  # pairs of L-BFGS
_REFRESH = 6  # iteration after which c is measured
_DENSE = 2048  # features above which the metric is diagonal: a factorisation would take longer
_ARMIJO = 1e-4


@dataclass(frozen=True, slots=True)
class Fits:
    """The minimisers: ``weights`` (J, C, d) act on erased rows, ``intercepts`` is (J, C)."""

    weights: Float
    intercepts: Float
    converged: NDArray[np.bool_]
    separable: NDArray[np.bool_]
    iterations: int


def fit(
    rows: Float,
    y: NDArray[np.intp],
    n_classes: int,
    penalties: Float,
    *,
    sample_weights: Float | None = None,
    factors: tuple[Float, Float] | None = None,
    gram: Float | None = None,
    metric: NDArray[np.intp] | None = None,
    tol: float = 1e-7,
    max_iter: int = 400,
) -> Fits:
    """Minimise the J problems.

    Parameters
    ----------
    rows : (n, d), roughly centred and of unit mean variance
    y : (n,) or (n, J) class codes in 0 .. n_classes - 1
    penalties : (d, J), or (J,) where all features share one
    sample_weights : (n, J), each column adding up to 1; 1 / n by default
    factors : (r, d) and (r, d): P = I - left^T right
    gram : (d, d), rows^T rows / n; computed where absent
    metric : (J,): problems with the same number share a metric (that of their mean penalty)
    tol : largest gradient entry of a solution
    """
    n, d = rows.shape
    penalties = np.asarray(penalties, dtype=np.float64)
    n_problems = penalties.shape[-1]
    width = 1 if n_classes == 2 else n_classes
    flat = penalties.ndim == 1
    penalty = np.broadcast_to(penalties, (d, n_problems)) if flat else penalties
    if metric is None:
        metric = np.arange(n_problems)
    problem = _Problem(rows, y, width, penalty, sample_weights, factors)
    metrics = _Metrics(problem, gram, metric, (1.0 / n_classes) * (1.0 - 1.0 / n_classes))
    u = np.zeros((d + 1, n_problems, width))
    converged = np.zeros(n_problems, dtype=bool)
    separable = np.zeros(n_problems, dtype=bool)
    active = np.arange(n_problems)
    now = _Point.at(problem, u, np.zeros((n, n_problems, width)))
    history: list[tuple[Float, Float, Float]] = []
    iteration = 0
    for iteration in range(max_iter + 1):
        done = np.abs(now.gradient).max(axis=(0, 2)) <= tol
        free = problem.penalty.max(axis=0) == 0.0
        apart = np.zeros_like(done)
        if free.any():
            apart = free & problem.separated(now.scores)
        leaving = done | apart
        if leaving.any() or iteration == max_iter:
            u[:, active] = now.u
            converged[active] = done & ~apart
            separable[active] = apart
            stay = ~leaving
            if iteration == max_iter or not stay.any():
                break
            active = active[stay]
            problem, now = problem.subset(stay), now.subset(stay)
            metrics = metrics.subset(stay)
            history = [(s[:, stay], g[:, stay], r[stay]) for s, g, r in history]
        if iteration == _REFRESH:
            metrics = metrics.measured(problem.curvature(now.scores))
        direction = _direction(now.gradient, history, metrics)
        slope = np.sum(direction * now.gradient, axis=(0, 2))
        moved = problem.score(direction)
        step = problem.step(now, direction, moved, slope)
        following = _Point.at(
            problem, now.u + step[:, None] * direction, now.scores + step[:, None] * moved
        )
        s, g = following.u - now.u, following.gradient - now.gradient
        product = np.sum(s * g, axis=(0, 2))
        usable = product > 0
        history.append((s, g, np.where(usable, 1.0 / np.where(usable, product, 1.0), 0.0)))
        history = history[-_MEMORY:]
        now = following
    weights = np.ascontiguousarray(u[:d].transpose(1, 2, 0))
    return Fits(weights, u[d].copy(), converged, separable, iteration)


@dataclass(frozen=True, slots=True)
class _Point:
    """Parameters (d + 1, J, C), the intercepts last, with their scores, value and gradient."""

    u: Float
    scores: Float
    value: Float
    gradient: Float

    @classmethod
    def at(cls, problem: _Problem, u: Float, scores: Float) -> _Point:
        return cls(u, scores, problem.value(u, scores), problem.gradient(u, scores))

    def subset(self, stay: NDArray[np.bool_]) -> _Point:
        return _Point(
            self.u[:, stay], self.scores[:, stay], self.value[stay], self.gradient[:, stay]
        )


class _Problem:
    """Value, gradient and step length of all problems; scores are (n, J, C)."""

    def __init__(
        self,
        rows: Float,
        y: NDArray[np.intp],
        width: int,
        penalty: Float,
        sample_weights: Float | None,
        factors: tuple[Float, Float] | None,
    ) -> None:
        self.rows, self.y, self.width, self.penalty = rows, y, width, penalty
        self.sample_weights, self.factors = sample_weights, factors
        n = len(rows)
        weights = np.full((n, 1), 1.0 / n) if sample_weights is None else sample_weights
        self.weight = weights
        codes = y[:, None] if y.ndim == 1 else y
        if width == 1:
            self.target: Float = codes[:, :, None].astype(np.float64)
        else:
            self.target = (codes[:, :, None] == np.arange(width)).astype(np.float64)

    def subset(self, stay: NDArray[np.bool_]) -> _Problem:
        weights = None if self.sample_weights is None else self.sample_weights[:, stay]
        y = self.y if self.y.ndim == 1 else self.y[:, stay]
        return _Problem(self.rows, y, self.width, self.penalty[:, stay], weights, self.factors)

    def score(self, u: Float) -> Float:
        """(n, J, C): erased rows times weights, plus intercepts."""
        flat = u[:-1].reshape(len(u) - 1, -1)
        if self.factors is not None:
            left, right = self.factors
            flat = flat - right.T @ (left @ flat)
        product = self.rows @ flat
        return np.asarray(product.reshape(len(self.rows), *u.shape[1:]) + u[-1])

    def losses(self, scores: Float) -> Float:
        """(n, J): the loss of every row."""
        if self.width == 1:
            z = scores[:, :, 0]
            return np.asarray(np.logaddexp(0.0, z) - self.target[:, :, 0] * z)
        total = scipy.special.logsumexp(scores, axis=2)
        return np.asarray(total - np.sum(scores * self.target, axis=2))

    def value(self, u: Float, scores: Float) -> Float:
        ridge = 0.5 * np.sum(self.penalty[:, :, None] * u[:-1] ** 2, axis=(0, 2))
        return np.asarray(np.sum(self.weight * self.losses(scores), axis=0) + ridge)

    def probabilities(self, scores: Float) -> Float:
        if self.width == 1:
            return np.asarray(scipy.special.expit(scores))
        return np.asarray(scipy.special.softmax(scores, axis=2))

    def gradient(self, u: Float, scores: Float) -> Float:
        residual = self.weight[:, :, None] * (self.probabilities(scores) - self.target)
        flat = self.rows.T @ residual.reshape(len(self.rows), -1)
        if self.factors is not None:
            left, right = self.factors
            flat = flat - left.T @ (right @ flat)
        out = np.empty_like(u)
        out[:-1] = flat.reshape(u[:-1].shape) + self.penalty[:, :, None] * u[:-1]
        out[-1] = residual.sum(axis=0)
        return out

    def curvature(self, scores: Float) -> Float:
        """(J,): mean of p (1 - p)."""
        p = self.probabilities(scores)
        return np.asarray(np.sum(self.weight * np.mean(p * (1 - p), axis=2), axis=0))

    def separated(self, scores: Float) -> NDArray[np.bool_]:
        """(J,): every row of positive weight is on its side: without a penalty no minimiser."""
        if self.width == 1:
            right = (scores > 0) == (self.target > 0)
            right = right[:, :, 0] & (scores[:, :, 0] != 0)
        else:
            own = np.sum(scores * self.target, axis=2)
            rest = np.where(self.target > 0, -np.inf, scores).max(axis=2)
            right = own > rest
        return np.asarray((right | (self.weight == 0)).all(axis=0))

    def step(self, now: _Point, direction: Float, moved: Float, slope: Float) -> Float:
        """(J,): the largest of 1, 1/2, 1/4, ... that lowers the value enough (Armijo's rule)."""
        size = np.ones(len(slope))
        slack = 4 * np.finfo(np.float64).eps * np.abs(now.value)
        for _ in range(40):
            u = now.u + size[:, None] * direction
            value = self.value(u, now.scores + size[:, None] * moved)
            short = value > now.value + _ARMIJO * size * slope + slack
            if not short.any():
                break
            size = np.where(short, size / 2, size)
        return size


class _Metrics:
    """Solves with c P S P^T + penalty for groups of problems, and with c for the intercepts."""

    def __init__(
        self,
        problem: _Problem,
        gram: Float | None,
        group: NDArray[np.intp],
        curvature: float | Float,
        base: Float | None = None,
    ) -> None:
        self.group = group
        self.curvature = np.broadcast_to(np.asarray(curvature, dtype=np.float64), len(group))
        d = problem.rows.shape[1]
        if base is None:
            base = _erased_gram(problem, gram, dense=d <= _DENSE)
        self.base = base
        self._problem = problem
        self._solvers: dict[int, Any] = {}
        for g in np.unique(group).tolist():
            of = group == g
            c = float(self.curvature[of].mean())
            penalty = problem.penalty[:, of].mean(axis=1)
            if base.ndim == 1:
                self._solvers[g] = c * base + penalty + _floor(base)
                continue
            matrix = c * base
            matrix[np.diag_indices(d)] += penalty + _floor(np.diag(base))
            self._solvers[g] = scipy.linalg.cho_factor(
                matrix, lower=True, overwrite_a=True, check_finite=False
            )

    def subset(self, stay: NDArray[np.bool_]) -> _Metrics:
        new = object.__new__(_Metrics)
        new.group, new.curvature = self.group[stay], self.curvature[stay]
        new.base, new._solvers = self.base, self._solvers
        new._problem = self._problem.subset(stay)
        return new

    def measured(self, curvature: Float) -> _Metrics:
        """The same metric with measured curvatures."""
        least = 1e-3 * float(self.curvature.mean())
        return _Metrics(self._problem, None, self.group, np.maximum(curvature, least), self.base)

    def solve(self, q: Float) -> Float:
        out = np.empty_like(q)
        for g in np.unique(self.group).tolist():
            of = self.group == g
            part = q[:-1, of].reshape(len(q) - 1, -1)
            solver = self._solvers[g]
            if isinstance(solver, tuple):
                solved = scipy.linalg.cho_solve(solver, part, check_finite=False)
            else:
                solved = part / solver[:, None]
            out[:-1, of] = solved.reshape(len(q) - 1, int(of.sum()), -1)
        out[-1] = q[-1] / self.curvature[:, None]
        return out


def _floor(diagonal: Float) -> float:
    """What keeps the metric positive definite where nothing is penalised."""
    return 1e-10 * max(float(np.mean(diagonal)), 1e-300)


def _erased_gram(problem: _Problem, gram: Float | None, *, dense: bool) -> Float:
    """P S P^T, or the diagonal of S."""
    rows = problem.rows
    if not dense:
        return np.asarray(np.mean(rows**2, axis=0) if gram is None else np.diag(gram))
    S = rows.T @ rows / len(rows) if gram is None else gram
    if problem.factors is None:
        return S
    left, right = problem.factors
    half = S - left.T @ (right @ S)
    whole: Float = half - (half @ right.T) @ left
    return (whole + whole.T) / 2


def _direction(
    gradient: Float, history: list[tuple[Float, Float, Float]], metrics: _Metrics
) -> Float:
    """The two-loop recursion, one scalar per problem."""
    q = gradient
    weights = []
    for s, g, r in reversed(history):
        a = r * np.sum(s * q, axis=(0, 2))
        weights.append(a)
        q = q - a[:, None] * g
    direction = metrics.solve(q)
    for (s, g, r), a in zip(history, reversed(weights), strict=True):
        b = r * np.sum(g * direction, axis=(0, 2))
        direction = direction + (a - b)[:, None] * s
    return -direction
