"""Equal class means and covariances at the least change: QLEACE and q-SPLINCE, on arrays.

Class c has the fraction p_c, the covariance S_c and the cross-covariance S_cy with what is kept. Of
the maps r = mu + A_c (x - m_c) with A_c S_c A_c^T the same for all c and sum p_c A_c S_cy = Sy the
one of the least sum p_c tr((A_c - I) S_c (A_c - I)^T) is wanted. With S_c = L_c L_c^T,
B_c = S_c^+ S_cy and F_c = (I + Lam B_c^T) L_c every solution is A_c = R O_c L_c^{-1}, O_c
orthogonal, and

    f(Lam) = tr Sigma - 2 <Lam, Sy>,    Sigma the Bures barycentre of F_c F_c^T

is convex, sum p_c tr S_c - f(Lam) is a lower bound of the cost, and the gradient of f is
2 (sum p_c A_c S_cy - Sy). For orthogonal O_c that are given, the best feasible map is

    Lam = (Sy - R0 Vq) (Vq^T Vq)^{-1},    R = R0 + Lam Vq^T,
    R0 = sum p_c L_c O_c^T,    Vq = sum p_c O_c L_c^{-1} S_cy

(docs/theory.md). Lam = 0 is QLEACE, and the map above from the O_c of QLEACE its repair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import linalg

from splince_fast._solve import tolerances

Float = NDArray[np.float64]

# Stopping rule: gap between cost and bound, relative to the cost; and the rounding of sums of d
# products, relative to the variance.
GAP = 1e-7
_ROUNDING = 64 * tolerances.EPS
# Limits: fixed-point iterations (5 to 13 on data), descent iterations, halvings of a step.
_FIXED_POINT, _DESCENT, _HALVINGS = 40, 200, 30
_MEMORY = 8  # pairs of L-BFGS
# The gap does not close where a determinant is 0: the descent stops if f decreases by less than the
# tolerance over this many steps.
_STALLED = 8
_ARMIJO = 1e-4
# Relative change of the barycentre that ends its own fixed-point iteration.
_BARYCENTRE, _SWEEPS = 1e-8, 200
# eigh(M^T M) squares the condition number: smaller relative singular values have no digits.
_SQUARED = 1e-6
# Eigenvalues of the correlation matrix below the first number, and deviations below the second
# times the root mean square deviation, would lose half the digits when inverted. Such directions
# and features are set to their mean.
_TINY_DIRECTION, _TINY_FEATURE = 1e-8, 1e-6
# Rotations have no feasible map if |R Vq - Sy| / |Sy| exceeds this: rounding is far smaller.
_MISSED = 1e-6
# Newton-Schulz converges quadratically from the first residual |I - O^T O| on; the second ends it.
_NEARLY_ORTHOGONAL, _LAST_STEP = 0.1, 1e-8


@dataclass(frozen=True, slots=True)
class Support:
    """The range of the pooled covariance S_w.

    Attributes
    ----------
    basis : ndarray of shape (d, r) or None
        Orthonormal columns that span it; None for r = d, where it is the identity.
    whitener : ndarray of shape (d, r)
        W with W^T S_w W = I.
    smallest : float
        Least eigenvalue of the unit-diagonal S_w on it.
    tiny : ndarray of shape (d, t)
        Orthonormal columns, orthogonal to `basis`: x varies there by more than rounding, and by too
        little to be read. Erased rows are at the mean there, but for what Cov(x, y) asks.
    """

    basis: Float | None
    whitener: Float
    smallest: float
    tiny: Float

    @property
    def rank(self) -> int:
        """r."""
        return int(self.whitener.shape[1])

    def inside(self, columns: Float) -> Float:
        """U^T C of columns C, (d, k)."""
        return columns if self.basis is None else self.basis.T @ columns

    def restricted(self, matrix: Float) -> Float:
        """U^T M U of a (d, d) matrix M."""
        return matrix if self.basis is None else self.basis.T @ matrix @ self.basis

    def white(self, matrix: Float) -> Float:
        """W^T M W of a (d, d) matrix M."""
        return np.asarray(self.whitener.T @ matrix @ self.whitener)


def support_of(pooled: Float, mean: Float, roundoff: float) -> Support:
    """The range of S_w at its rounding level, in units of the deviations.

    Parameters
    ----------
    pooled : (d, d) float64
        S_w.
    mean : (d,) float64
        Features that vary less than the rounding of their mean are not in it.
    roundoff : float
        Unit roundoff of the products that S_w was summed from.
    """
    width = len(pooled)
    variances = np.diagonal(pooled).copy()
    varies = (variances > (tolerances.CONSTANT * np.abs(mean)) ** 2) & (variances > 0)
    small = varies & (variances < _TINY_FEATURE**2 * variances.mean())
    tiny = np.eye(width)[:, small]
    varies &= ~small
    deviations = np.sqrt(variances[varies])
    d = len(deviations)
    if not d:
        empty = np.zeros((width, 0))
        return Support(empty, empty, 1.0, tiny)
    unit = pooled[np.ix_(varies, varies)] / np.outer(deviations, deviations)
    values, vectors = linalg.eigh(unit, overwrite_a=True, check_finite=False, driver="evd")
    rounding = tolerances.eigenvalue(d, roundoff)
    kept = values > max(rounding, _TINY_DIRECTION)
    weak = (values > rounding) & ~kept
    r = int(kept.sum())
    whitener = np.zeros((width, r))
    whitener[varies] = vectors[:, kept] / np.sqrt(values[kept]) / deviations[:, None]
    basis = None
    if r < width:
        spanned = np.linalg.qr(
            np.hstack([vectors[:, kept], vectors[:, weak]]) * deviations[:, None]
        ).Q
        basis = np.zeros_like(whitener)
        basis[varies] = spanned[:, :r]
        rest = np.zeros((width, int(weak.sum())))
        rest[varies] = spanned[:, r:]
        tiny = np.hstack([tiny, rest])
    return Support(basis, whitener, float(values[kept].min(initial=1.0)), tiny)


@dataclass(frozen=True, slots=True)
class ClassProblem:
    """The class fractions, covariances and cross-covariances of a solve.

    Attributes
    ----------
    fractions : ndarray of shape (k,)
        p_c; they sum to 1.
    covariances : ndarray of shape (k, d, d)
        S_c, shrunk or not.
    crosses : ndarray of shape (k, d, q)
        S_cy, never shrunk.
    kept : ndarray of shape (d, q)
        Sy.
    support : Support
        Of sum p_c S_c.
    """

    fractions: Float
    covariances: Float
    crosses: Float
    kept: Float
    support: Support


class SingularClassError(ArithmeticError):
    """The covariance of a class has no Cholesky factor on the support of the pooled one."""

    def __init__(self, index: int) -> None:
        super().__init__(f"class number {index}")
        self.index = index


@dataclass(frozen=True, slots=True)
class ClassMaps:
    """The maps, or the cause of their absence.

    Attributes
    ----------
    maps : ndarray of shape (k, d, d)
        A_c; the identity off the support.
    cost : float
        sum p_c tr((A_c - I) S_c (A_c - I)^T); infinite where no map was found, and the rest is
        empty: more combinations are kept than x has dimensions, or relations of classes cancel.
    bound : float
        A lower bound of the cost of every feasible map.
    determinants : ndarray of shape (k,)
        |I + Lam^T B_c|: where none is 0 at the minimiser of f, the maps are a global optimum.
    lost : ndarray of shape (q,) or None
        A combination of what is kept that no class relates to x, and x covaries with: no map
        exists, and the rest is empty.
    rank : int
        Combinations of what is kept that some class relates to x.
    """

    maps: Float
    cost: float
    bound: float
    determinants: Float
    lost: Float | None = None
    rank: int = 0

    @property
    def gap(self) -> float:
        """(cost - bound) / cost, never negative; 0 where nothing is changed."""
        return max(0.0, self.cost - self.bound) / self.cost if self.cost > 0 else 0.0


def solve(problem: ClassProblem, *, optimal: bool = True) -> ClassMaps:
    """The maps of the least cost; with ``optimal=False`` the repair of QLEACE, one step of it.

    Parameters
    ----------
    problem : ClassProblem
    optimal : bool
        Whether to iterate.

    Raises
    ------
    SingularClassError
        The covariance of a class is singular on the support.
    """
    support = problem.support
    roots, inverse_crosses = [], []
    for c, (covariance, cross) in enumerate(zip(problem.covariances, problem.crosses, strict=True)):
        try:
            root = linalg.cholesky(support.restricted(covariance), lower=True, check_finite=False)
        except linalg.LinAlgError as error:
            raise SingularClassError(c) from error
        roots.append(root)
        inverse_crosses.append(
            linalg.solve_triangular(root, support.inside(cross), lower=True, check_finite=False)
        )
    used, lost = _combinations(problem, inverse_crosses)
    if lost is not None:
        nothing = np.zeros((0, 0, 0))
        return ClassMaps(nothing, 0.0, 0.0, np.zeros(0), lost)
    kept = problem.kept @ used
    outside = _outside(support, kept)
    if outside is not None:  # part of the range of Sy off the within-class support
        roots_tall = [
            np.vstack([root, np.zeros((outside.shape[1], len(root.T)))]) for root in roots
        ]
        kept_inside = np.vstack([support.inside(kept), outside.T @ kept])
    else:
        roots_tall, kept_inside = roots, support.inside(kept)
    search = Search(
        problem.fractions, roots_tall, [v @ used for v in inverse_crosses], kept_inside,
        float(problem.fractions @ np.trace(problem.covariances, axis1=1, axis2=2)),
    )  # fmt: skip
    point = search.minimise() if optimal else search.start()
    if not np.isfinite(point.cost):
        nothing = np.zeros((0, 0, 0))
        return ClassMaps(nothing, np.inf, 0.0, np.zeros(0), rank=used.shape[1])
    maps = np.empty_like(problem.covariances)
    basis = support.basis
    for c, (root, rotation) in enumerate(zip(roots, point.rotations, strict=True)):
        inside = linalg.solve_triangular(
            root, (point.feasible @ rotation).T, lower=True, trans="T", check_finite=False
        ).T  # fmt: skip
        if basis is None:
            maps[c] = inside
            continue
        wide = basis if outside is None else np.hstack([basis, outside])
        np.matmul(wide @ inside, basis.T, out=maps[c])
        maps[c] -= basis @ basis.T + support.tiny @ support.tiny.T
        maps[c].flat[:: len(maps[c]) + 1] += 1.0
    determinants = search.determinants(point.multiplier)
    return ClassMaps(maps, point.cost, point.bound, determinants, rank=used.shape[1])


def _combinations(
    problem: ClassProblem, inverse_crosses: list[Float]
) -> tuple[Float, Float | None]:
    """Combinations (q, q') of the kept columns that covary with x in some class, orthonormal.

    The second result is a combination that covaries with x between classes only, above rounding:
    no map keeps it. None if there is none.
    """
    q = problem.kept.shape[1]
    if not q:
        return np.zeros((0, 0)), None
    stacked = np.concatenate(
        [p**0.5 * v for p, v in zip(problem.fractions, inverse_crosses, strict=True)]
    )
    _, sizes, axes = np.linalg.svd(np.linalg.qr(stacked).R)
    sizes = np.concatenate([sizes, np.zeros(q - len(sizes))])
    cut = tolerances.noise(len(problem.kept), problem.support.smallest)
    used = sizes > cut
    whitened = _whitened_size(problem, problem.kept @ axes[~used].T)
    if len(whitened) and whitened.max() > cut:
        return np.zeros((q, 0)), np.asarray(axes[~used][int(np.argmax(whitened))])
    return np.ascontiguousarray(axes[used].T), None


def _whitened_size(problem: ClassProblem, columns: Float) -> Float:
    """Norms of columns of a cross-covariance in units of the deviations, off the support too."""
    total = np.linalg.norm(problem.support.whitener.T @ columns, axis=0)
    outside = _outside(problem.support, columns)
    if outside is not None:
        sizes = np.linalg.norm(outside.T @ columns, axis=0)
        unit = np.sqrt(sum(np.trace(s) for s in problem.covariances) or 1.0)
        total = np.maximum(total, sizes / unit)
    return np.asarray(total)


def _outside(support: Support, columns: Float) -> Float | None:
    """Orthonormal basis of the components of columns off the support, above rounding."""
    if support.basis is None or not columns.shape[1]:
        return None
    rest = columns - support.basis @ (support.basis.T @ columns)
    u, sizes, _ = np.linalg.svd(rest, full_matrices=False)
    kept = sizes > _ROUNDING * len(rest) * float(np.linalg.norm(columns))
    if not kept.any():
        return None
    u = u[:, kept]
    u -= support.basis @ (support.basis.T @ u)  # reorthogonalise: small columns lose digits
    return np.linalg.qr(u).Q


@dataclass(slots=True)
class Point:
    """A multiplier Lam with its dual value, and the feasible map that its rotations allow."""

    multiplier: Float  # (d', q)
    rotations: list[Float]  # O_c, (r, r)
    root: Float  # sum p_c F_c O_c^T, a root of the barycentre
    value: float  # f(Lam)
    gradient: Float  # (d', q), of f
    metric: Float  # Vq^T Vq
    feasible: Float  # R of the feasible map
    cost: float
    bound: float


@dataclass(frozen=True, slots=True)
class Search:
    """Minimisation of f over the multipliers Lam."""

    fractions: Float  # (k,)
    roots: Sequence[Float]  # L_c, (d', r), lower triangular; rows of 0 off the support
    crosses: Sequence[Float]  # L_c^{-1} S_cy, (r, q)
    kept: Float  # Sy, (d', q)
    variance: float  # sum p_c tr S_c

    def factors(self, multiplier: Float) -> list[Float]:
        """F_c = L_c + Lam (L_c^{-1} S_cy)^T."""
        if not multiplier.any():
            return list(self.roots)
        return [
            root + multiplier @ cross.T
            for root, cross in zip(self.roots, self.crosses, strict=True)
        ]

    def determinants(self, multiplier: Float) -> Float:
        """|I + Lam^T B_c| per class."""
        values = []
        for root, cross in zip(self.roots, self.crosses, strict=True):
            r = root.shape[1]
            solved = linalg.solve_triangular(root[:r], multiplier[:r], lower=True)
            # B_c^T Lam = (L_c^{-1} S_cy)^T L_c^{-1} Lam; off the support B_c is 0.
            values.append(np.linalg.det(np.eye(cross.shape[1]) + cross.T @ solved))
        return np.abs(np.array(values, np.float64))

    def start(self) -> Point:
        """The starting point Lam = 0, whose map is that of QLEACE."""
        nothing = np.zeros_like(self.kept)
        return self.at(nothing, self.mean_root())

    def mean_root(self) -> Float:
        """sum p_c L_c, the initial value of iterations for a barycentre."""
        return np.asarray(sum(p * root for p, root in zip(self.fractions, self.roots, strict=True)))

    def at(self, multiplier: Float, root: Float) -> Point:
        """The point of a multiplier; `root` is the initial value of the barycentre."""
        factors = self.factors(multiplier)
        if not root.shape[1]:  # no class varies
            return self._point(multiplier, [np.eye(0)] * len(factors), root, exact=True)
        if len(factors) == 2:
            # Two classes have a closed form: only the relative rotation matters.
            turned = rotation(factors[1].T @ factors[0])
            first, second = self.fractions
            root = first * factors[0] + second * factors[1] @ turned.T
            return self._point(multiplier, [np.eye(len(turned)), turned], root, exact=True)
        for _ in range(_SWEEPS):  # fixed-point iteration for the barycentre
            rotations = [rotation(factor.T @ root) for factor in factors]
            root, previous = self._sum(factors, rotations), root
            if _moved(root, previous) <= _BARYCENTRE:
                break
        return self._point(multiplier, rotations, root, exact=False)

    def _sum(self, factors: Sequence[Float], rotations: Sequence[Float]) -> Float:
        """sum p_c F_c O_c^T."""
        return np.asarray(
            sum(
                p * factor @ turned.T
                for p, factor, turned in zip(self.fractions, factors, rotations, strict=True)
            )
        )

    def _vq(self, rotations: Sequence[Float]) -> Float:
        return np.asarray(
            sum(
                p * turned @ cross
                for p, turned, cross in zip(self.fractions, rotations, self.crosses, strict=True)
            )
        )

    def _feasible(
        self, multiplier: Float, rotations: Sequence[Float], root: Float
    ) -> tuple[Float, Float, float, Float, Float]:
        """Lam and R of the best feasible map with these rotations, its cost, Vq^T Vq, gradient.

        The cost is infinite where there is none: R Vq = Sy has no solution.
        """
        vq = self._vq(rotations)
        metric = vq.T @ vq
        rest = self.kept - root @ vq
        step = solve_metric(metric, rest)
        feasible = root + step @ vq.T
        plain = root - multiplier @ vq.T  # sum p_c L_c O_c^T
        cost = self.variance - 2.0 * float(np.vdot(feasible, plain))
        cost += float(np.vdot(feasible, feasible))
        if np.linalg.norm(self.kept - feasible @ vq) > _MISSED * np.linalg.norm(self.kept):
            cost = np.inf
        return multiplier + step, feasible, cost, metric, -2.0 * rest

    def _point(
        self, multiplier: Float, rotations: list[Float], root: Float, *, exact: bool
    ) -> Point:
        """The point; `exact` says that the root is that of the barycentre, to rounding."""
        _, feasible, cost, metric, gradient = self._feasible(multiplier, rotations, root)
        linear = 2.0 * float(np.vdot(multiplier, self.kept))
        value = float(np.vdot(root, root)) - linear
        bound = self.variance - value if exact else self.bound(multiplier, root)
        return Point(multiplier, rotations, root, value, gradient, metric, feasible, cost, bound)

    def bound(self, multiplier: Float, root: Float) -> float:
        """sum p_c tr S_c - a sum p_c tr(S~_c X_c^{-1}) + 2 <Lam, Sy>, a lower bound of the cost.

        X_c = R^{-T} H_c R^{-1}, H_c the positive factor of F_c^T R, is the optimal transport of
        R R^T to S~_c; tr(S~_c X_c^{-1}) = tr H_c, and a = lambda_max(sum p_c X_c).
        """
        traces, factors = 0.0, self.factors(multiplier)
        total = np.zeros((root.shape[1],) * 2)
        for p, factor in zip(self.fractions, factors, strict=True):
            _, sizes, axes = np.linalg.svd(factor.T @ root)
            total += p * (axes.T * sizes) @ axes
            traces += float(p * sizes.sum())
        sigma = root.T @ root
        largest = linalg.eigvalsh(total, sigma, subset_by_index=[len(sigma) - 1, len(sigma) - 1])[0]
        return self.variance - float(largest) * traces + 2.0 * float(np.vdot(multiplier, self.kept))

    def done(self, point: Point) -> bool:
        """Whether cost and bound agree."""
        rounding = GAP * abs(point.cost) + _ROUNDING * self.variance
        return bool(np.isfinite(point.cost)) and point.cost - point.bound <= rounding

    def minimise(self) -> Point:
        """The feasible map of the least cost that is found, and the largest bound."""
        point = self.start()
        if not self.kept.shape[1] or self.done(point):
            return point
        if len(self.roots) > 2:
            point = self._fixed_point(point)
        return self._descend(point)

    def _fixed_point(self, point: Point) -> Point:
        """Undamped iteration of all rotations and Lam; it may cycle, the descent then goes on."""
        multiplier, root, rotations = point.multiplier, point.root, point.rotations
        least = np.inf
        for _ in range(_FIXED_POINT):
            previous = root
            multiplier, root, *_ = self._feasible(multiplier, rotations, root)
            moved = _moved(root, previous)
            if moved <= _BARYCENTRE or (moved > 2 * least):
                break
            least = min(least, moved)
            factors = self.factors(multiplier)
            rotations = [rotation(factor.T @ root) for factor in factors]
            root = self._sum(factors, rotations)
        other = self.at(multiplier, root)
        return _better(other, point) if other.value <= point.value else point

    def _descend(self, point: Point) -> Point:
        """L-BFGS with Armijo's rule; the first step of each pass is that of the fixed point."""
        pairs: list[tuple[Float, Float, float]] = []
        best = point
        values = [point.value]
        for _ in range(_DESCENT):
            if self.done(best) or self._stalled(values, best.cost):
                break
            direction = -_quasi_newton(point, pairs)
            slope = float(np.vdot(direction, point.gradient))
            if slope >= 0:
                if not pairs:
                    break
                pairs.clear()
                continue
            size, new = 1.0, None
            for _ in range(_HALVINGS):
                trial = self.at(point.multiplier + size * direction, point.root)
                rounding = _ROUNDING * abs(trial.value)
                if trial.value <= point.value + _ARMIJO * size * slope + rounding:
                    new = trial
                    break
                best = _better(best, trial)
                size /= 2
            if new is None:
                if not pairs:
                    break
                pairs.clear()
                continue
            moved, change = new.multiplier - point.multiplier, new.gradient - point.gradient
            product = float(np.vdot(moved, change))
            if product > 0:
                pairs.append((moved, change, product))
                del pairs[:-_MEMORY]
            point = new
            best = _better(best, point)
            values.append(point.value)
        return best

    def _stalled(self, values: list[float], cost: float) -> bool:
        recent = values[-_STALLED - 1 :]
        return len(recent) > _STALLED and recent[0] - recent[-1] <= GAP * min(
            abs(cost), self.variance
        )


def _moved(root: Float, previous: Float) -> float:
    """Relative change of a root, which is unique up to rotation: both are aligned with the F_c."""
    return float(np.linalg.norm(root - previous) / np.linalg.norm(root))


def _better(a: Point, b: Point) -> Point:
    """The cheaper feasible map and the larger bound; the multiplier of the larger bound."""
    cheaper, larger = (a if a.cost <= b.cost else b), (a if a.bound >= b.bound else b)
    return Point(
        larger.multiplier, cheaper.rotations, larger.root, larger.value, larger.gradient,
        larger.metric, cheaper.feasible, cheaper.cost, larger.bound,
    )  # fmt: skip


def _quasi_newton(point: Point, pairs: list[tuple[Float, Float, float]]) -> Float:
    """H g by the two loops of L-BFGS, from H0 = (2 Vq^T Vq)^{-1} on the right."""
    direction = point.gradient.copy()
    factors = []
    for moved, change, product in reversed(pairs):
        weight = float(np.vdot(moved, direction)) / product
        direction -= weight * change
        factors.append(weight)
    direction = solve_metric(2.0 * point.metric, direction)
    for (moved, change, product), weight in zip(pairs, reversed(factors), strict=True):
        direction += (weight - float(np.vdot(change, direction)) / product) * moved
    return direction


def solve_metric(metric: Float, columns: Float) -> Float:
    """C (Vq^T Vq)^{-1}, by the pseudo-inverse where the metric is singular."""
    if not len(metric):
        return np.zeros_like(columns)
    return np.asarray(columns @ np.linalg.pinv(metric, hermitian=True))


def rotation(product: Float) -> Float:
    """The orthogonal O of the largest tr(O M): the transposed polar factor of M.

    M (M^T M)^{-1/2} by an eigendecomposition, made orthogonal by Newton-Schulz steps; by an SVD,
    which costs twice as much, where M is ill-conditioned.
    """
    values, vectors = linalg.eigh(product.T @ product, check_finite=False, driver="evd")
    if len(values) and values[0] > _SQUARED**2 * values[-1]:
        factor = (product @ (vectors / np.sqrt(values))) @ vectors.T
        error = _NEARLY_ORTHOGONAL
        while error <= _NEARLY_ORTHOGONAL:
            rest = -(factor.T @ factor)
            rest.flat[:: len(rest) + 1] += 1.0
            factor += factor @ rest / 2
            error, previous = float(np.linalg.norm(rest)), error
            if error <= _LAST_STEP:  # the step leaves 3/4 error^2
                return np.ascontiguousarray(factor.T)
            if error >= previous:
                break
    u, _, vt = linalg.svd(product, check_finite=False)
    return np.asarray((u @ vt).T)
