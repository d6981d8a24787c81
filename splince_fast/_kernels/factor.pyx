"""Square-root factor L of a covariance S = L L^T.

S is scaled to unit diagonal: c = D^-1 S D^-1, where D is the diagonal matrix of the standard
deviations. The factor is ``L = D L0``, where L0 is the Cholesky factor of c. If the smallest
eigenvalue of c is at the rounding level of the data, the eigendecomposition c = V diag(values) V^T
is used instead, and L0 is V diag(sqrt(values)), restricted to the eigenvectors whose eigenvalues
are above the rounding level. These eigenvectors span the support; the others span the noise space.
A factor depends on S alone. `admit` returns a second factor, whose support also contains the noise
directions that covary with labels.

Two more kinds of factor store no d x d matrix. The first is for a diagonal S: L0 = I. The second is
for S known only on the column space of B, with B^T S B = I: ``L^+ = B^T``, and a solution is optimal
within this space (Rayleigh-Ritz).

Constant features, with a standard deviation of at most the rounding level of the rows, have a row of
zeros in L^+.

All functions run without the GIL; failures are status codes. Factors are immutable, and threads may
share them.
"""

import numpy as np
import scipy.linalg

from libc.math cimport fabs, sqrt
from libc.string cimport memcpy, memset
from scipy.linalg cimport cython_blas, cython_lapack

from splince_fast._kernels.shapes cimport check_length

# Up to this number of features, inverting the Cholesky factor is faster than estimating the norm of
# its inverse.
cdef enum:
    SMALL = 64

cdef double ONE = 1.0
cdef double ZERO = 0.0


cdef double dot(const double* a, const double* b, Py_ssize_t n) noexcept nogil:
    """Return a^T b, computed as four independent sums, which the processor overlaps."""
    cdef Py_ssize_t i
    cdef double s = 0.0, t = 0.0, u = 0.0, v = 0.0
    for i in range(n // 4):
        s += a[4 * i] * b[4 * i]
        t += a[4 * i + 1] * b[4 * i + 1]
        u += a[4 * i + 2] * b[4 * i + 2]
        v += a[4 * i + 3] * b[4 * i + 3]
    for i in range(n // 4 * 4, n):
        s += a[i] * b[i]
    return (s + t) + (u + v)


cdef void gemm(char* ta, char* tb, int m, int n, int k, double alpha, double* a, int lda,
               double* b, int ldb, double beta, double* c, int ldc) noexcept nogil:
    """Compute c := alpha op(a) op(b) + beta c; `ta` and `tb` select op(x) = x or x^T."""
    if m > 0 and n > 0 and k > 0:
        cython_blas.dgemm(ta, tb, &m, &n, &k, &alpha, a, &lda, b, &ldb, &beta, c, &ldc)
    elif m > 0 and n > 0 and beta == 0.0:
        memset(c, 0, sizeof(double) * <size_t>ldc * n)


cdef void scale_rows(const double* weight, double* b, int d, int k) noexcept nogil:
    """Compute b := diag(weight) b, in place, for b of shape (d, k)."""
    cdef Py_ssize_t i, j
    for j in range(k):
        for i in range(d):
            b[j * d + i] *= weight[i]


cdef void set_scale(Factor f, const double* variances, Py_ssize_t stride, const double* floor,
                    double per_weight, double ridge) noexcept nogil:
    """Set `scale` to the standard deviations and `inverse` to their inverses.

    The variance of feature j is per_weight * variances[j * stride] + ridge. A feature whose standard
    deviation is at most `floor` counts as constant, and gets the values 1 and 0.
    """
    cdef Py_ssize_t j
    cdef double variance
    cdef bint varies
    for j in range(f.width):
        variance = per_weight * variances[j * stride] + ridge
        f.variance += variance
        varies = variance > floor[j] * floor[j] and variance > 0.0
        f.scale[j] = sqrt(variance) if varies else 1.0
        f.inverse[j] = 1.0 / f.scale[j] if varies else 0.0
        f.constants += not varies


cdef void set_unit_diagonal(Factor f, const double* scatter, double per_weight) noexcept nogil:
    """Set the lower triangle of c to per_weight * scatter, scaled to unit diagonal."""
    cdef Py_ssize_t d = f.width, i, j
    cdef double w
    for j in range(d):
        w = per_weight * f.inverse[j]
        f.c[j * d + j] = 1.0
        for i in range(j + 1, d):
            f.c[j * d + i] = w * scatter[j * d + i] * f.inverse[i]


cdef double estimate_smallest_eigenvalue(Factor f, double* work) noexcept nogil:
    """Return an estimate of the smallest eigenvalue of c, 1 / |c^{-1}|, from its Cholesky factor.

    The pivots alone do not reveal a rank deficiency: after a small pivot, rounding error increases
    the last pivot. For up to SMALL features, the factor L0 is inverted, and |c^{-1}| is estimated
    by |L0^{-1}|_F^2, which lies between |c^{-1}| and d |c^{-1}|. For more features, LAPACK
    estimates the 1-norm of c^{-1}, which is at least the spectral norm.
    """
    cdef int d = f.width, info = 0
    cdef Py_ssize_t j
    cdef double total = 0.0, reciprocal = 0.0
    if d > SMALL:
        cython_lapack.dpocon(b"L", &d, f.c, &d, &ONE, &reciprocal, work,
                             <int*>(work + 3 * d), &info)
        return reciprocal
    memcpy(work, f.c, sizeof(double) * <size_t>d * d)
    cython_lapack.dtrtri(b"L", b"N", &d, work, &d, &info)
    if info != 0:
        return 0.0
    for j in range(d):
        total += dot(work + j * d + j, work + j * d + j, d - j)
    return 1.0 / total


cdef class Factor:
    """Factor L of S = L L^T, which whitens and unwhitens columns; immutable.

    Attributes
    ----------
    width : int
        Number of features, d.
    solver : {"none", "cholesky", "eigh", "diagonal", "refined"}
        Kind of the factor.
    rank : int
        Rank of S at the rounding level, including admitted directions.
    constants : int
        Number of constant features.
    n_noise : int
        Dimension of the noise space: number of eigenvalues of the unit-diagonal S that count as
        rounding error.
    admitted : int
        Number of noise directions that :meth:`admit` added to the support.
    smallest : float
        Approximate smallest eigenvalue of the unit-diagonal S on the support.
    tolerance : float
        Eigenvalues up to this value count as rounding error.
    variance : float
        Trace of S.
    inverse_scale : (d,) float64
        1 / standard deviation of each feature; 0 for constant features.
    """

    @property
    def solver(self):
        return ("none", "cholesky", "eigh", "diagonal", "refined")[self.kind]

    @property
    def rank(self):
        return self.width - self.constants - self.n_null

    @property
    def n_null(self):
        """Number of noise directions that were not admitted to the support."""
        return self.n_noise - self.admitted

    @property
    def null_basis(self):
        """Orthonormal basis, (d, n_null), of the null space of S among the features that vary."""
        self.prepare_null_basis()
        return self.null_vectors

    cdef object apply_to_rows(self, const double[:, ::1] columns, Step step):
        """Return a copy of `columns`, (k, d), with `step` applied to every row."""
        check_length(columns.shape[1], self.width, "columns")
        out = np.array(columns)
        cdef double[:, ::1] b = out
        cdef int k = <int>b.shape[0]
        cdef double[::1] scratch
        if k:
            scratch = np.empty(max(1, scratch_for(self, k)))
            with nogil:
                step(self, &b[0, 0], k, &scratch[0])
        return out

    def whiten(self, const double[:, ::1] columns not None):
        """Return L^+ b for each row b of `columns`, (k, d)."""
        return self.apply_to_rows(columns, whiten_columns)

    def solve(self, const double[:, ::1] columns not None):
        """Return (L^+)^T L^+ b, which is S^-1 b on the support, for each row b of `columns`."""
        self.prepare_null_basis()
        return self.apply_to_rows(columns, solve_columns)

    def unwhiten(self, const double[:, ::1] columns not None):
        """Return L b for each row b of `columns`; the inverse of `whiten` on the support."""
        if self.kind > EIGH:
            raise RuntimeError(f"solver {self.solver!r} cannot unwhiten: it stores no factor of "
                               "all features")
        return self.apply_to_rows(columns, unwhiten_columns)

    def remember(self, const double[::1, :] scatter not None, double per_weight):
        """Store S = per_weight * scatter, without shrinkage, for `gram`.

        This method changes the factor, so that it must be called before any other use. A Cholesky
        factor leaves a triangle free, which holds S; other factors allocate d^2 numbers.
        """
        cdef Py_ssize_t d = self.width, i, j
        cdef double[::1] diagonal, memory
        check_length(scatter.shape[0], d, "scatter")
        check_length(scatter.shape[1], d, "scatter")
        diagonal_a = np.empty(d)
        diagonal = diagonal_a
        self.diagonal, self.upper = &diagonal[0], self.c
        self.arrays = (self.arrays, diagonal_a)
        if self.kind != CHOLESKY:
            memory = np.empty(d * d)
            self.upper = &memory[0]
            self.arrays = (self.arrays, np.asarray(memory))
        with nogil:
            for j in range(d):
                diagonal[j] = per_weight * scatter[j, j] * self.inverse[j] * self.inverse[j]
                for i in range(j + 1, d):
                    self.upper[i * d + j] = (
                        per_weight * scatter[i, j] * self.inverse[i] * self.inverse[j])
                if self.kind != CHOLESKY:
                    self.upper[j * d + j] = 0.0

    def gram(self, const double[:, ::1] columns not None):
        """Return b S b^T, (k, k), for b = `columns`, (k, d), and the S that `remember` stored."""
        cdef int d = self.width, k = <int>columns.shape[0]
        cdef Py_ssize_t i, j
        check_length(columns.shape[1], d, "columns")
        scaled = np.array(columns)
        product = np.empty((k, d))
        result = np.empty((k, k))
        cdef double[:, ::1] b = scaled, sb = product, g = result
        if self.upper == NULL:
            raise RuntimeError("the factor stores no covariance; call `remember` before `gram`")
        if k == 0:
            return result
        with nogil:
            scale_rows(self.scale, &b[0, 0], d, k)
            cython_blas.dsymm(b"L", b"U", &d, &k, &ONE, self.upper, &d, &b[0, 0], &d, &ZERO,
                              &sb[0, 0], &d)
            for j in range(k):
                for i in range(d):
                    sb[j, i] += (self.diagonal[i] - self.upper[i * d + i]) * b[j, i]
            gemm(b"T", b"N", k, k, d, 1.0, &b[0, 0], d, &sb[0, 0], d, 0.0, &g[0, 0], k)
        return result

    cdef int prepare_null_basis(self) except -1:
        """Compute the null basis on the first call, because many solves do not need it.

        As c = D^-1 S D^-1, the null space of S is D^-1 times the null space of c. If the standard
        deviations differ by many orders of magnitude, the rows of a basis differ likewise. A
        Householder QR decomposition is accurate row by row if large rows come first and columns are
        pivoted (Cox and Higham 1998).
        """
        cdef Py_ssize_t d = self.width, n = self.n_noise - self.admitted
        cdef double[::1, :] basis
        if self.null_vectors is not None:
            return 0
        vectors = np.empty((d, n), order="F")
        if n > 0:
            basis = vectors
            memcpy(&basis[0, 0], self.c + self.admitted * d, sizeof(double) * <size_t>(d * n))
            vectors *= self.inverse_scale[:, None]
            order = np.argsort(-np.abs(vectors).max(axis=1), kind="stable")
            vectors[order] = scipy.linalg.qr(vectors[order], mode="economic", pivoting=True)[0]
            self.null_data = &basis[0, 0]
        vectors.flags.writeable = False
        self.null_vectors = vectors
        return 0

    def admit(self, const double[:, ::1] spans not None):
        """Return a factor whose support also contains noise directions of `spans`, (k, d).

        Eigenvalues up to `tolerance` count as rounding error. Spans (cross-covariances with labels)
        are accurate to more digits than S, so that they may exceed rounding error in the noise
        space, which has the basis V_n. The rounding error of T = V_n^T D^-1 spans^T is at most
        tolerance / sqrt(smallest) from S, and rounding sqrt(smallest) from the rows. A pivoted QR
        decomposition of T rotates V_n, so that directions above both bounds come first. These
        directions are added to the support with the eigenvalue `tolerance`. Without such directions
        the factor itself is returned.
        """
        cdef int d = self.width, k = <int>spans.shape[0], n = self.n_noise, m = min(n, k)
        cdef int lwork = 64 * (n + k + d) + 3 * k + 1, info = 0, admitted = 0
        cdef Factor new
        cdef double[::1] projections, scaled, work, tau, vectors, inverse_root
        cdef int[::1] pivots
        check_length(spans.shape[1], d, "spans")
        if m == 0:
            return self
        projections, scaled = np.empty(n * k), np.array(spans).reshape(-1)
        work, tau, pivots = np.empty(lwork), np.empty(m), np.zeros(k, dtype=np.intc)
        with nogil:
            scale_rows(self.inverse, &scaled[0], d, k)
            gemm(b"T", b"N", n, k, d, 1.0, self.c, d, &scaled[0], d, 0.0, &projections[0], n)
            cython_lapack.dgeqp3(&n, &k, &projections[0], &n, &pivots[0], &tau[0], &work[0], &lwork,
                                 &info)
            while (admitted < m and fabs(projections[<Py_ssize_t>admitted * n + admitted])
                    > max(self.rounding * sqrt(self.smallest),
                          self.tolerance / sqrt(self.smallest))):
                admitted += 1
        if admitted == 0:
            return self
        new = Factor.__new__(Factor)
        new.kind, new.width, new.constants, new.n_noise = EIGH, d, self.constants, n
        new.tolerance, new.variance, new.rounding = self.tolerance, self.variance, self.rounding
        new.scale, new.inverse, new.inverse_scale = self.scale, self.inverse, self.inverse_scale
        new.diagonal, new.upper = self.diagonal, self.upper
        vectors = np.array(<double[:<Py_ssize_t>d * d]>self.c)
        inverse_root = np.array(<double[:d]>self.inverse_root)
        cython_lapack.dormqr(b"R", b"N", &d, &n, &m, &projections[0], &n, &tau[0], &vectors[0], &d,
                             &work[0], &lwork, &info)
        inverse_root[:admitted] = 1.0 / sqrt(self.tolerance)
        new.admitted, new.smallest = admitted, self.tolerance
        new.arrays = (self, np.asarray(vectors), np.asarray(inverse_root))
        new.c, new.inverse_root = &vectors[0], &inverse_root[0]
        return new


cdef int scratch_for(Factor f, int k) noexcept nogil:
    """Return the size, in numbers, of the scratch memory for whitening k columns."""
    return (3 * f.width if f.kind == EIGH else f.columns) * k


cdef void whiten_columns(Factor f, double* b, int k, double* scratch) noexcept nogil:
    """Compute b := L^+ b, in place, for b of shape (d, k)."""
    cdef int d = f.width, n, j
    if f.kind == IDENTITY or k == 0:
        return
    if f.kind == SPANNED:
        n = f.columns
        gemm(b"T", b"N", n, k, d, 1.0, f.c, d, b, d, 0.0, scratch, n)
        memset(b, 0, sizeof(double) * <size_t>d * k)
        for j in range(k):
            memcpy(b + <Py_ssize_t>j * d, scratch + <Py_ssize_t>j * n, sizeof(double) * n)
        return
    scale_rows(f.inverse, b, d, k)
    if f.kind == DIAGONAL:
        return
    if f.kind == CHOLESKY:
        cython_blas.dtrsm(b"L", b"L", b"N", b"N", &d, &k, &ONE, f.c, &d, b, &d)
        return
    memcpy(scratch, b, sizeof(double) * <size_t>d * k)
    gemm(b"T", b"N", d, k, d, 1.0, f.c, d, scratch, d, 0.0, b, d)
    scale_on_support(f, b, k)


cdef void scale_on_support(Factor f, double* b, int k) noexcept nogil:
    """Divide coordinates b by the square roots of the eigenvalues; set b to 0 off the support."""
    cdef Py_ssize_t d = f.width, i, j
    for j in range(k):
        for i in range(d):
            b[j * d + i] = b[j * d + i] * f.inverse_root[i] if f.inverse_root[i] > 0.0 else 0.0


cdef void whiten_transposed(Factor f, double* b, int k, double* scratch) noexcept nogil:
    """Compute b := (L^+)^T b, in place, for b of shape (d, k); requires `prepare_null_basis`."""
    cdef int d = f.width, n = f.columns, j
    if f.kind == IDENTITY or k == 0:
        return
    if f.kind == SPANNED:
        for j in range(k):
            memcpy(scratch + <Py_ssize_t>j * n, b + <Py_ssize_t>j * d, sizeof(double) * n)
        gemm(b"N", b"N", d, k, n, 1.0, f.c, d, scratch, n, 0.0, b, d)
        return
    if f.kind == DIAGONAL:
        scale_rows(f.inverse, b, d, k)
        return
    if f.kind == CHOLESKY:
        cython_blas.dtrsm(b"L", b"L", b"T", b"N", &d, &k, &ONE, f.c, &d, b, &d)
        scale_rows(f.inverse, b, d, k)
        return
    scale_on_support(f, b, k)
    memcpy(scratch, b, sizeof(double) * <size_t>d * k)
    gemm(b"N", b"N", d, k, d, 1.0, f.c, d, scratch, d, 0.0, b, d)
    scale_rows(f.inverse, b, d, k)
    if f.n_noise > f.admitted:
        project_out_null_space(f, b, k, scratch)


cdef void project_out_null_space(Factor f, double* b, int k, double* scratch) noexcept nogil:
    """Remove the null space of S from b: b -= N0 N0^T b, where N0 is the null basis.

    The rounding error of each feature is relative to the scale of the feature, because N0 is
    accurate row by row. `scratch` has n_null k numbers.
    """
    cdef int d = f.width, n_null = f.n_noise - f.admitted
    gemm(b"T", b"N", n_null, k, d, 1.0, f.null_data, d, b, d, 0.0, scratch, n_null)
    gemm(b"N", b"N", d, k, n_null, -1.0, f.null_data, d, scratch, n_null, 1.0, b, d)


cdef void solve_columns(Factor f, double* b, int k, double* scratch) noexcept nogil:
    whiten_columns(f, b, k, scratch)
    whiten_transposed(f, b, k, scratch)


cdef void unwhiten_columns(Factor f, double* b, int k, double* scratch) noexcept nogil:
    cdef Py_ssize_t d = f.width, i, j
    if f.kind == IDENTITY:
        return
    if f.kind == CHOLESKY:
        cython_blas.dtrmm(b"L", b"L", b"N", b"N", &f.width, &k, &ONE, f.c, &f.width, b, &f.width)
    else:
        for j in range(k):
            for i in range(d):
                scratch[j * d + i] = (
                    b[j * d + i] / f.inverse_root[i] if f.inverse_root[i] > 0.0 else 0.0)
        gemm(b"N", b"N", f.width, k, f.width, 1.0, f.c, f.width, scratch, f.width, 0.0, b, f.width)
    for j in range(k):
        for i in range(d):
            b[j * d + i] = b[j * d + i] * f.scale[i] if f.inverse[i] > 0.0 else 0.0


def norm_and_offset(const double[:, ::1] left not None, const double[:, ::1] right not None,
              const double[::1] mean not None, double variance):
    """Return |left^T right|_F and |mean|^2 / variance, in O(d r^2) time.

    Parameters
    ----------
    left, right : (r, d) float64
    mean : (d,) float64
    variance : float, positive
    """
    cdef Py_ssize_t d = left.shape[1], r = left.shape[0], i, j, k
    cdef double total = 0.0, offset = 0.0, largest, deviation = sqrt(variance), product
    cdef double[:, ::1] scaled
    check_length(right.shape[0], r, "right")
    check_length(right.shape[1], d, "right")
    check_length(mean.shape[0], d, "mean")
    scaled_a = np.empty((2 * r, d))
    scaled = scaled_a
    with nogil:
        for j in range(d):
            offset += (mean[j] / deviation) * (mean[j] / deviation)
        for i in range(r):  # scale rows of left to maximum 1, so that no square overflows
            largest = 0.0
            for j in range(d):
                largest = max(largest, fabs(left[i, j]))
            for j in range(d):
                scaled[i, j] = left[i, j] / largest if largest > 0.0 else 0.0
                scaled[r + i, j] = right[i, j] * largest
        for i in range(r):
            for k in range(i + 1):
                product = dot(&scaled[i, 0], &scaled[k, 0], d)
                product *= dot(&scaled[r + i, 0], &scaled[r + k, 0], d)
                total += product if i == k else 2.0 * product
    return sqrt(max(total, 0.0)), offset


cdef Factor new_factor(int kind, int d, double[::1] memory):
    """Return an empty factor of the kind `kind`, which stores c in `memory`."""
    cdef Factor f = Factor.__new__(Factor)
    vectors = np.empty((2, d))
    cdef double[:, ::1] v = vectors
    f.kind, f.width, f.smallest = kind, d, 1.0
    f.c, f.scale, f.inverse = &memory[0], &v[0, 0], &v[1, 0]
    f.inverse_scale = vectors[1]
    f.arrays = (vectors, memory)
    return f


def identity(const double[::1] diagonal not None, double per_weight):
    """Return the factor I, for methods that do not whiten.

    `diagonal`, (d,), is the diagonal of the scatter matrix, which gives the total variance.
    """
    cdef int d = <int>diagonal.shape[0], j
    cdef Factor f = new_factor(IDENTITY, d, np.empty(1))
    for j in range(d):
        f.scale[j] = f.inverse[j] = 1.0
        f.variance += per_weight * diagonal[j]
    return f


def diagonal(const double[::1] variances not None, const double[::1] floor not None):
    """Return the factor of the diagonal matrix of `variances`, (d,); `floor` is as for `dense`."""
    cdef int d = <int>variances.shape[0]
    check_length(floor.shape[0], d, "floor")
    cdef Factor f = new_factor(DIAGONAL, d, np.empty(1))
    set_scale(f, &variances[0], 1, &floor[0], 1.0, 0.0)
    return f


def of_columns(double[:, ::1] columns not None, const double[::1] variances not None,
               const double[::1] floor not None, *, double smallest):
    """Return the factor of S on the column space of a matrix B with B^T S B = I.

    Parameters
    ----------
    columns : (r, d) float64
        B^T, with r <= d. The factor takes ownership of its memory.
    variances : (d,) float64
        Variances of the features.
    floor : (d,) float64
        As for `dense`.
    smallest : float
        Approximate smallest eigenvalue of the unit-diagonal S. It determines the rounding level of
        whitened spans.
    """
    cdef int d = <int>variances.shape[0], r = <int>columns.shape[0]
    check_length(columns.shape[1], d, "columns")
    check_length(floor.shape[0], d, "floor")
    if r > d:
        raise ValueError(f"columns has {r} rows for {d} features")
    flat = np.asarray(columns).reshape(-1)
    cdef Factor f = new_factor(SPANNED, d, flat if r else np.empty(1))
    f.columns, f.smallest = r, smallest
    set_scale(f, &variances[0], 1, &floor[0], 1.0, 0.0)
    return f


def dense(
    const double[::1, :] scatter not None,
    const double[::1] floor not None,
    *,
    double per_weight,
    double ridge,
    Py_ssize_t max_rank,
    double tolerance,
    bint force_eigh,
    bint allow_eigh,
):
    """Factor S = per_weight * scatter + ridge * I.

    Parameters
    ----------
    scatter : (d, d) float64, Fortran order
        Scatter matrix, of which the lower triangle is read.
    floor : (d,) float64, non-negative
        A feature with a standard deviation of at most this value counts as constant.
    per_weight, ridge : float
        Coefficients of S.
    max_rank : int
        Upper bound of the rank of S, which follows from the number of rows.
    tolerance : float
        Eigenvalues of the unit-diagonal S up to this value count as rounding error.
    force_eigh : bool
        Always use the eigendecomposition.
    allow_eigh : bool
        Use the eigendecomposition if S is rank deficient.

    Returns
    -------
    Factor
        The factor. After a failure its `status` is STATUS_NO_CONVERGENCE or
        STATUS_RANK_DEFICIENT.
    """
    cdef int d = <int>scatter.shape[0], info = 0, n = 0, i, lwork, liwork
    cdef bint rank_limited, deficient
    cdef double[::1] work, inverse_root
    cdef int[::1] iwork
    if d == 0:
        raise ValueError("scatter has shape (0, 0); a factor needs at least one feature")
    check_length(scatter.shape[1], d, "scatter")
    check_length(floor.shape[0], d, "floor")
    cdef Factor f = new_factor(CHOLESKY, d, np.empty(<Py_ssize_t>d * d))
    f.tolerance = tolerance
    set_scale(f, &scatter[0, 0], d + 1, &floor[0], per_weight, ridge)
    # `estimate_smallest_eigenvalue` needs d^2 numbers to invert a small factor. For others LAPACK
    # needs 3 d and d integers.
    work = np.empty(d * d if d <= SMALL else 4 * d)
    rank_limited = max_rank < d - f.constants
    with nogil:
        set_unit_diagonal(f, &scatter[0, 0], per_weight)
        if not (force_eigh or rank_limited):
            cython_lapack.dpotrf(b"L", &d, f.c, &d, &info)
            f.smallest = estimate_smallest_eigenvalue(f, &work[0]) if info == 0 else 0.0
    deficient = rank_limited or f.smallest <= tolerance
    if not (force_eigh or deficient):
        return f
    if deficient and not allow_eigh:
        f.status = STATUS_RANK_DEFICIENT
        return f
    f.kind = EIGH
    inverse_root_a = np.empty(d)
    inverse_root = inverse_root_a
    work = np.empty(1 + 71 * d + 2 * <Py_ssize_t>d * d)
    iwork = np.empty(3 + 5 * d, dtype=np.intc)
    lwork, liwork = <int>min(work.shape[0], 2147483647), <int>iwork.shape[0]
    with nogil:
        set_unit_diagonal(f, &scatter[0, 0], per_weight)
        # `inverse_root` first contains the eigenvalues.
        cython_lapack.dsyevd(b"V", b"L", &d, f.c, &d, &inverse_root[0], &work[0], &lwork, &iwork[0],
                             &liwork, &info)
        if info == 0:
            while n < d and inverse_root[n] <= tolerance:
                n += 1
            f.smallest = inverse_root[n] if n < d else tolerance
            for i in range(d):
                inverse_root[i] = 0.0 if i < n else 1.0 / sqrt(inverse_root[i])
    if info != 0:
        f.status = STATUS_NO_CONVERGENCE
    f.n_noise, f.inverse_root = n, &inverse_root[0]
    f.arrays = (f.arrays, inverse_root_a)
    return f
