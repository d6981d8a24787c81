"""One map per class to equal means and covariances, with the least change: QLEACE and q-SPLINCE.

Class c has the mean m_c, the fraction p_c of the weight, the covariance S_c and the
cross-covariance S_cy with the kept label columns y; mu = E x and Sy = Cov(x, y) over all rows. The
map r = mu + A_c (x - m_c) is feasible if A_c S_c A_c^T is the same for all c and
sum p_c A_c S_cy = Sy. The cost of a map is sum p_c tr((A_c - I) S_c (A_c - I)^T); :func:`solve`
minimises the cost.

With S_c = L_c L_c^T, every feasible map is A_c = R O_c L_c^{-1}, where the O_c are orthogonal and
R R^T is the common covariance of the classes after erasure. Lam is the Lagrange multiplier of the
constraint with Sy. With B_c = S_c^+ S_cy and F_c = (I + Lam B_c^T) L_c, the function

    f(Lam) = tr Sigma - 2 <Lam, Sy>,    Sigma the Bures barycentre of F_c F_c^T

is convex. Its gradient is 2 (sum p_c A_c S_cy - Sy), and sum p_c tr S_c - f(Lam) is a lower bound
of the cost of every feasible map. For fixed rotations O_c, the feasible map of the least cost is

    Lam = (Sy - R0 Vq) (Vq^T Vq)^{-1},    R = R0 + Lam Vq^T,
    R0 = sum p_c L_c O_c^T,    Vq = sum p_c O_c L_c^{-1} S_cy

(docs/theory.md). Lam = 0 gives QLEACE. The formula for fixed rotations, with the O_c of QLEACE,
gives QLEACE followed by the repair of Cov(x, y).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import linalg

from splince_fast._solve import tolerances

Float = NDArray[np.float64]

# The search stops if the gap between cost and lower bound is at most this fraction of the cost.
GAP = 1e-7
# Relative rounding error of f and of the cost. d times this value is the relative rounding error of
# columns from which the projection to the range of the covariances was subtracted.
_ROUNDING = 64 * tolerances.EPS
# Maximum numbers of fixed-point iterations (data need 5 to 13), of descent steps, and of halvings
# of the step length.
_FIXED_POINT, _DESCENT, _HALVINGS = 40, 200, 30
_MEMORY = 8  # number of correction pairs kept by L-BFGS
# The gap need not close if det(I + Lam^T B_c) is 0 for a class. The descent therefore also stops if
# f decreases by less than GAP, relative to the cost, over this number of steps.
_STALLED = 8
_ARMIJO = 1e-4  # minimum decrease of f by Armijo's rule, relative to step length times slope
# Tolerance (relative change of the root) and maximum number of iterations of the fixed-point solver
# for the barycentre.
_BARYCENTRE, _BARYCENTRE_STEPS = 1e-8, 200
# eigh(M^T M) squares the condition number of M. An SVD of M is used instead if the smallest
# singular value of M is below this fraction of the largest.
_ILL_CONDITIONED = 1e-6
# Whitening loses half of the digits in directions with an eigenvalue of the correlation matrix
# below the first value, and in features with a standard deviation below the second value times the
# root mean square standard deviation. Erasure sets the rows to their mean in these directions.
_TINY_DIRECTION, _TINY_FEATURE = 1e-8, 1e-6
# A map violates the constraint R Vq = Sy if |R Vq - Sy| / |Sy| exceeds this value, which is far
# above rounding error.
_INFEASIBLE = 1e-6
# Newton-Schulz steps make O orthogonal if |I - O^T O| is at most the first value. They converge
# quadratically: the step is the last if |I - O^T O| before the step is at most the second value.
_NEARLY_ORTHOGONAL, _LAST_STEP = 0.1, 1e-8


@dataclass(frozen=True, slots=True)
class Support:
    """Range of the pooled within-class covariance S_w, (d, d).

    Attributes
    ----------
    basis : ndarray of shape (d, r) or None
        Orthonormal basis U of the range, as columns; None for U = I, if r = d.
    whitener : ndarray of shape (d, r)
        W with W^T S_w W = I.
    smallest : float
        Smallest eigenvalue of S_w scaled to unit diagonal, on the range.
    tiny : ndarray of shape (d, t)
        Orthonormal directions, orthogonal to `basis`, whose variance exceeds rounding error but is
        too small to whiten. Erasure sets the rows to their mean in these directions, except for
        the part that Cov(x, y) requires.
    """

    basis: Float | None
    whitener: Float
    smallest: float
    tiny: Float

    @property
    def rank(self) -> int:
        """Rank r of S_w."""
        return int(self.whitener.shape[1])

    def inside(self, columns: Float) -> Float:
        """Return the coordinates U^T C, (r, k), of `columns` C, (d, k), in the basis U."""
        return columns if self.basis is None else self.basis.T @ columns

    def restricted(self, matrix: Float) -> Float:
        """Return `matrix` M, (d, d), in the basis U of the range: U^T M U, (r, r)."""
        return matrix if self.basis is None else self.basis.T @ matrix @ self.basis

    def white(self, matrix: Float) -> Float:
        """Return `matrix` M, (d, d), whitened by S_w: W^T M W, (r, r)."""
        return np.asarray(self.whitener.T @ matrix @ self.whitener)


def support_of(pooled: Float, mean: Float, roundoff: float) -> Support:
    """Return the range of S_w: the directions whose variance exceeds the rounding error of S_w.

    Parameters
    ----------
    pooled : (d, d) float64
        S_w.
    mean : (d,) float64
        Mean of x. Features with a standard deviation below the rounding error of their mean are
        left out.
    roundoff : float
        Unit roundoff of the products that were summed to S_w.
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
    correlations = pooled[np.ix_(varies, varies)] / np.outer(deviations, deviations)
    values, vectors = linalg.eigh(correlations, overwrite_a=True, check_finite=False, driver="evd")
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
        weak_directions = np.zeros((width, int(weak.sum())))
        weak_directions[varies] = spanned[:, r:]
        tiny = np.hstack([tiny, weak_directions])
    return Support(basis, whitener, float(values[kept].min(initial=1.0)), tiny)


@dataclass(frozen=True, slots=True)
class ClassProblem:
    """Input of :func:`solve`: class fractions, covariances and cross-covariances.

    Attributes
    ----------
    fractions : ndarray of shape (k,)
        Fraction p_c of the weight of each class; the fractions sum to 1.
    covariances : ndarray of shape (k, d, d)
        Class covariances S_c, shrunk or not.
    crosses : ndarray of shape (k, d, q)
        Cross-covariances S_cy of each class, never shrunk.
    kept : ndarray of shape (d, q)
        Sy = Cov(x, y) over all rows.
    support : Support
        Range of sum p_c S_c.
    """

    fractions: Float
    covariances: Float
    crosses: Float
    kept: Float
    support: Support


class SingularClassError(ArithmeticError):
    """The covariance of class number `index` is singular on the range of the pooled covariance."""

    def __init__(self, index: int) -> None:
        super().__init__(f"class number {index}")
        self.index = index


@dataclass(frozen=True, slots=True)
class ClassMaps:
    """Maps of the classes, or the reason why no map exists.

    Attributes
    ----------
    maps : ndarray of shape (k, d, d)
        A_c, which is the identity in directions in which x does not vary within classes. Empty if
        `lost_combination` is not None or the cost is infinite.
    cost : float
        sum p_c tr((A_c - I) S_c (A_c - I)^T). Infinite if the search found no feasible map, because
        more combinations of label columns are kept than x has dimensions, or because the
        cross-covariances of the classes cancel.
    bound : float
        Lower bound of the cost of every feasible map.
    determinants : ndarray of shape (k,)
        |det(I + Lam^T B_c)| of each class. If none is 0 at the minimiser Lam of f, the maps are a
        global optimum.
    lost_combination : ndarray of shape (q,) or None
        Coefficients of a combination of the kept label columns that covaries with x over all rows
        but within no class, if there is one: then no map is feasible. None otherwise.
    rank : int
        Number of independent combinations of the kept label columns that covary with x within some
        class.
    """

    maps: Float
    cost: float
    bound: float
    determinants: Float
    lost_combination: Float | None = None
    rank: int = 0

    @property
    def gap(self) -> float:
        """Relative gap (cost - bound) / cost, at least 0; 0 if the cost is 0."""
        return max(0.0, self.cost - self.bound) / self.cost if self.cost > 0 else 0.0


def solve(problem: ClassProblem, *, optimal: bool = True) -> ClassMaps:
    """Return the class maps of the least cost, or those of QLEACE with repair (``optimal=False``).

    Parameters
    ----------
    problem : ClassProblem
        Class fractions, covariances and cross-covariances.
    optimal : bool
        Minimise the cost by iteration. Otherwise, return the feasible map of the least cost for the
        rotations of QLEACE: QLEACE followed by the repair of Cov(x, y).

    Raises
    ------
    SingularClassError
        The covariance of a class is singular on the range of the pooled covariance.
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
    used, lost_combination = _combinations(problem, inverse_crosses)
    if lost_combination is not None:
        empty = np.zeros((0, 0, 0))
        return ClassMaps(empty, 0.0, 0.0, np.zeros(0), lost_combination)
    kept = problem.kept @ used
    off_range = _off_range(support, kept)
    if off_range is not None:  # Sy has components off the range of S_w
        roots_tall = [
            np.vstack([root, np.zeros((off_range.shape[1], len(root.T)))]) for root in roots
        ]
        kept_inside = np.vstack([support.inside(kept), off_range.T @ kept])
    else:
        roots_tall, kept_inside = roots, support.inside(kept)
    search = Search(
        problem.fractions, roots_tall, [v @ used for v in inverse_crosses], kept_inside,
        float(problem.fractions @ np.trace(problem.covariances, axis1=1, axis2=2)),
    )  # fmt: skip
    point = search.minimise() if optimal else search.start()
    if not np.isfinite(point.cost):
        empty = np.zeros((0, 0, 0))
        return ClassMaps(empty, np.inf, 0.0, np.zeros(0), rank=used.shape[1])
    maps = np.empty_like(problem.covariances)
    basis = support.basis
    for c, (root, rotation) in enumerate(zip(roots, point.rotations, strict=True)):
        inside = linalg.solve_triangular(
            root, (point.feasible_root @ rotation).T, lower=True, trans="T", check_finite=False
        ).T  # fmt: skip
        if basis is None:
            maps[c] = inside
            continue
        combined_basis = basis if off_range is None else np.hstack([basis, off_range])
        np.matmul(combined_basis @ inside, basis.T, out=maps[c])
        maps[c] -= basis @ basis.T + support.tiny @ support.tiny.T
        maps[c].flat[:: len(maps[c]) + 1] += 1.0
    determinants = search.determinants(point.multiplier)
    return ClassMaps(maps, point.cost, point.bound, determinants, rank=used.shape[1])


def _combinations(
    problem: ClassProblem, inverse_crosses: list[Float]
) -> tuple[Float, Float | None]:
    """Return the combinations of kept label columns that covary with x within some class.

    The combinations are orthonormal columns, (q, q'). The second result is a combination, (q,),
    that covaries with x over all rows but within no class; no map keeps such a combination. None
    if there is no such combination.
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
    """Return the norms, (k,), of the whitened columns of a cross-covariance, (d, k).

    If larger, the norm of the component off the range of S_w, divided by sqrt(sum tr S_c), replaces
    the norm of the whitened column.
    """
    total = np.linalg.norm(problem.support.whitener.T @ columns, axis=0)
    off_range = _off_range(problem.support, columns)
    if off_range is not None:
        sizes = np.linalg.norm(off_range.T @ columns, axis=0)
        deviation = np.sqrt(sum(np.trace(s) for s in problem.covariances) or 1.0)
        total = np.maximum(total, sizes / deviation)
    return np.asarray(total)


def _off_range(support: Support, columns: Float) -> Float | None:
    """Return an orthonormal basis of the components of `columns` off the range of S_w.

    The result is None if the components are rounding error.
    """
    if support.basis is None or not columns.shape[1]:
        return None
    components = columns - support.basis @ (support.basis.T @ columns)
    u, sizes, _ = np.linalg.svd(components, full_matrices=False)
    kept = sizes > _ROUNDING * len(components) * float(np.linalg.norm(columns))
    if not kept.any():
        return None
    u = u[:, kept]
    u -= support.basis @ (support.basis.T @ u)  # again, because small components lose digits
    return np.linalg.qr(u).Q


@dataclass(slots=True)
class Point:
    """A multiplier Lam, its value f(Lam), and the best feasible map for its rotations O_c."""

    multiplier: Float  # Lam, (d', q); `Search` defines d'
    rotations: list[Float]  # O_c, (r, r)
    barycentre_root: Float  # sum p_c F_c O_c^T = R with R R^T the barycentre
    value: float  # f(Lam)
    gradient: Float  # gradient of f, (d', q)
    metric: Float  # Vq^T Vq
    feasible_root: Float  # R of the feasible map
    cost: float  # cost of the feasible map
    bound: float  # lower bound of the cost of every feasible map


@dataclass(frozen=True, slots=True)
class Search:
    """Minimisation of f over the multipliers Lam.

    Vectors of length d' hold the r coordinates in the range of S_w, then those in the directions of
    Sy off the range.
    """

    fractions: Float  # (k,)
    roots: Sequence[Float]  # L_c, (d', r): lower triangular, zero rows off the range of S_w
    crosses: Sequence[Float]  # L_c^{-1} S_cy, (r, q)
    kept: Float  # Sy, (d', q)
    variance: float  # sum p_c tr S_c

    def factors(self, multiplier: Float) -> list[Float]:
        """Return the factor F_c = L_c + Lam (L_c^{-1} S_cy)^T of each class."""
        if not multiplier.any():
            return list(self.roots)
        return [
            root + multiplier @ cross.T
            for root, cross in zip(self.roots, self.crosses, strict=True)
        ]

    def determinants(self, multiplier: Float) -> Float:
        """Return |det(I + Lam^T B_c)| of each class, for the multiplier Lam."""
        values = []
        for root, cross in zip(self.roots, self.crosses, strict=True):
            r = root.shape[1]
            solved = linalg.solve_triangular(root[:r], multiplier[:r], lower=True)
            # B_c^T Lam = (L_c^{-1} S_cy)^T L_c^{-1} Lam; B_c is 0 off the range of S_w.
            values.append(np.linalg.det(np.eye(cross.shape[1]) + cross.T @ solved))
        return np.abs(np.array(values, np.float64))

    def start(self) -> Point:
        """Return the starting point: multipliers Lam = 0, at which the maps are those of QLEACE."""
        return self.at(np.zeros_like(self.kept), self.mean_root())

    def mean_root(self) -> Float:
        """Return sum p_c L_c, the initial root in the iteration for a barycentre."""
        return np.asarray(sum(p * root for p, root in zip(self.fractions, self.roots, strict=True)))

    def at(self, multiplier: Float, root: Float) -> Point:
        """Return the point at a multiplier; `root` is the initial root of its barycentre."""
        factors = self.factors(multiplier)
        if not root.shape[1]:  # x does not vary within classes
            return self._point(multiplier, [np.eye(0)] * len(factors), root, exact=True)
        if len(factors) == 2:
            # For two classes, only the relative rotation matters, which has a closed form.
            relative = rotation(factors[1].T @ factors[0])
            first, second = self.fractions
            root = first * factors[0] + second * factors[1] @ relative.T
            return self._point(multiplier, [np.eye(len(relative)), relative], root, exact=True)
        for _ in range(_BARYCENTRE_STEPS):
            rotations = [rotation(factor.T @ root) for factor in factors]
            root, previous = self._sum(factors, rotations), root
            if _relative_change(root, previous) <= _BARYCENTRE:
                break
        return self._point(multiplier, rotations, root, exact=False)

    def _sum(self, factors: Sequence[Float], rotations: Sequence[Float]) -> Float:
        """Return the mean of the rotated factors, sum p_c F_c O_c^T."""
        return np.asarray(
            sum(
                p * factor @ rotation.T
                for p, factor, rotation in zip(self.fractions, factors, rotations, strict=True)
            )
        )

    def _vq(self, rotations: Sequence[Float]) -> Float:
        """Return Vq = sum p_c O_c L_c^{-1} S_cy for rotations O_c."""
        return np.asarray(
            sum(
                p * rotation @ cross
                for p, rotation, cross in zip(self.fractions, rotations, self.crosses, strict=True)
            )
        )

    def _feasible(
        self, multiplier: Float, rotations: Sequence[Float], root: Float
    ) -> tuple[Float, Float, float, Float, Float]:
        """Return Lam, R, cost, Vq^T Vq and the gradient of f, for `rotations`.

        Lam, R and the cost are those of the feasible map of the least cost for the rotations. The
        cost is infinite if no R satisfies R Vq = Sy.
        """
        vq = self._vq(rotations)
        metric = vq.T @ vq
        residual = self.kept - root @ vq
        step = solve_metric(metric, residual)
        feasible_root = root + step @ vq.T
        r0 = root - multiplier @ vq.T  # sum p_c L_c O_c^T
        cost = self.variance - 2.0 * float(np.vdot(feasible_root, r0))
        cost += float(np.vdot(feasible_root, feasible_root))
        if np.linalg.norm(self.kept - feasible_root @ vq) > _INFEASIBLE * np.linalg.norm(self.kept):
            cost = np.inf
        return multiplier + step, feasible_root, cost, metric, -2.0 * residual

    def _point(
        self, multiplier: Float, rotations: list[Float], root: Float, *, exact: bool
    ) -> Point:
        """Return the point for a multiplier, its rotations and the root of its barycentre.

        `exact` says that the root is exact up to rounding, so that f(Lam) gives the lower bound.
        """
        _, feasible_root, cost, metric, gradient = self._feasible(multiplier, rotations, root)
        linear = 2.0 * float(np.vdot(multiplier, self.kept))
        value = float(np.vdot(root, root)) - linear
        bound = self.variance - value if exact else self.bound(multiplier, root)
        return Point(
            multiplier, rotations, root, value, gradient, metric, feasible_root, cost, bound
        )

    def bound(self, multiplier: Float, root: Float) -> float:
        """Return a lower bound of the cost of every feasible map, for any Lam and root R.

        The bound is sum p_c tr S_c - a sum p_c tr H_c + 2 <Lam, Sy>, where H_c is the positive
        polar factor of F_c^T R. The matrix X_c = R^{-T} H_c R^{-1} is the optimal transport of
        R R^T to F_c F_c^T, tr(F_c F_c^T X_c^{-1}) = tr H_c, and a = lambda_max(sum p_c X_c).
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

    def is_optimal(self, point: Point) -> bool:
        """Whether the cost equals the bound, up to the tolerance."""
        rounding = GAP * abs(point.cost) + _ROUNDING * self.variance
        return bool(np.isfinite(point.cost)) and point.cost - point.bound <= rounding

    def minimise(self) -> Point:
        """Return a point with the cheapest map and the largest lower bound of the search."""
        point = self.start()
        if not self.kept.shape[1] or self.is_optimal(point):
            return point
        if len(self.roots) > 2:
            point = self._fixed_point(point)
        return self._descend(point)

    def _fixed_point(self, point: Point) -> Point:
        """Merge `point` with the last iterate of a fixed-point iteration, if f is not larger there.

        The iteration updates Lam and the rotations in turn, until the root R changes little or its
        change grows.
        """
        multiplier, root, rotations = point.multiplier, point.barycentre_root, point.rotations
        smallest_change = np.inf
        for _ in range(_FIXED_POINT):
            previous = root
            multiplier, root, *_ = self._feasible(multiplier, rotations, root)
            change = _relative_change(root, previous)
            if change <= _BARYCENTRE or (change > 2 * smallest_change):
                break
            smallest_change = min(smallest_change, change)
            factors = self.factors(multiplier)
            rotations = [rotation(factor.T @ root) for factor in factors]
            root = self._sum(factors, rotations)
        other = self.at(multiplier, root)
        return _merge(other, point) if other.value <= point.value else point

    def _descend(self, point: Point) -> Point:
        """Minimise f by L-BFGS with Armijo's rule; the first step equals that of `_fixed_point`."""
        pairs: list[tuple[Float, Float, float]] = []
        best = point
        values = [point.value]
        for _ in range(_DESCENT):
            if self.is_optimal(best) or self._has_stalled(values, best.cost):
                break
            direction = -_quasi_newton(point, pairs)
            slope = float(np.vdot(direction, point.gradient))
            if slope >= 0:
                if not pairs:
                    break
                pairs.clear()
                continue
            step_length, new = 1.0, None
            for _ in range(_HALVINGS):
                trial = self.at(point.multiplier + step_length * direction, point.barycentre_root)
                rounding = _ROUNDING * abs(trial.value)
                if trial.value <= point.value + _ARMIJO * step_length * slope + rounding:
                    new = trial
                    break
                best = _merge(best, trial)
                step_length /= 2
            if new is None:
                if not pairs:
                    break
                pairs.clear()
                continue
            step, change = new.multiplier - point.multiplier, new.gradient - point.gradient
            product = float(np.vdot(step, change))
            if product > 0:
                pairs.append((step, change, product))
                del pairs[:-_MEMORY]
            point = new
            best = _merge(best, point)
            values.append(point.value)
        return best

    def _has_stalled(self, values: list[float], cost: float) -> bool:
        """Whether f decreased by at most the tolerance over the last `_STALLED` steps."""
        recent = values[-_STALLED - 1 :]
        return len(recent) > _STALLED and recent[0] - recent[-1] <= GAP * min(
            abs(cost), self.variance
        )


def _relative_change(root: Float, previous: Float) -> float:
    """Return the relative change of a barycentre's root, |root - previous| / |root|.

    A root R is unique up to rotation. Both roots must be sums of rotated factors, p_c F_c O_c^T,
    so that their difference is a change of the barycentre and not a rotation.
    """
    return float(np.linalg.norm(root - previous) / np.linalg.norm(root))


def _merge(a: Point, b: Point) -> Point:
    """Merge two points: the cheaper feasible map, and the larger bound with its multiplier."""
    cheaper, larger = (a if a.cost <= b.cost else b), (a if a.bound >= b.bound else b)
    return Point(
        larger.multiplier, cheaper.rotations, larger.barycentre_root, larger.value, larger.gradient,
        larger.metric, cheaper.feasible_root, cheaper.cost, larger.bound,
    )  # fmt: skip


def _quasi_newton(point: Point, pairs: list[tuple[Float, Float, float]]) -> Float:
    """Return the L-BFGS step for the gradient g; without `pairs`, it is g (2 Vq^T Vq)^{-1}."""
    direction = point.gradient.copy()
    factors = []
    for step, change, product in reversed(pairs):
        weight = float(np.vdot(step, direction)) / product
        direction -= weight * change
        factors.append(weight)
    direction = solve_metric(2.0 * point.metric, direction)
    for (step, change, product), weight in zip(pairs, reversed(factors), strict=True):
        direction += (weight - float(np.vdot(change, direction)) / product) * step
    return direction


def solve_metric(metric: Float, columns: Float) -> Float:
    """Return C M^+ for `columns` C, where M = Vq^T Vq is the `metric`."""
    if not len(metric):
        return np.zeros_like(columns)
    return np.asarray(columns @ np.linalg.pinv(metric, hermitian=True))


def rotation(product: Float) -> Float:
    """Return the orthogonal O that maximises tr(O M): the transposed polar factor of M.

    The polar factor M (M^T M)^{-1/2} comes from an eigendecomposition, and Newton-Schulz steps make
    it orthogonal. An SVD, which costs twice as much, is used if M is ill-conditioned.
    """
    values, vectors = linalg.eigh(product.T @ product, check_finite=False, driver="evd")
    if len(values) and values[0] > _ILL_CONDITIONED**2 * values[-1]:
        factor = (product @ (vectors / np.sqrt(values))) @ vectors.T
        error = _NEARLY_ORTHOGONAL
        while error <= _NEARLY_ORTHOGONAL:
            residual = -(factor.T @ factor)
            residual.flat[:: len(residual) + 1] += 1.0
            factor += factor @ residual / 2
            error, previous = float(np.linalg.norm(residual)), error
            if error <= _LAST_STEP:  # the step reduces `error` to 3/4 error^2
                return np.ascontiguousarray(factor.T)
            if error >= previous:
                break
    u, _, vt = linalg.svd(product, check_finite=False)
    return np.asarray((u @ vt).T)
