"""Square-root factor L of a covariance S = L L^T.

S is scaled to unit diagonal: c = D^-1 S D^-1, with D the standard deviations. A factor is

- triangular, L = D L0, where L0 is the Cholesky factor of c;
- by columns, L^+ = B^T, for B of shape (d, n). If the smallest eigenvalue of c is at the rounding
  level of the data, c = V diag(values) V^T gives B = D^-1 V diag(values)^-1/2, restricted to the
  eigenvectors whose eigenvalues are above the rounding level. These span the support, the others
  the noise space. If S is known only on the column space of B, with B^T S B = I, a solution is
  optimal within this space (Rayleigh-Ritz);
- or diagonal, L = D if S is diagonal, or L = I.

A factor depends on S alone. `admit` returns a second factor, whose support also contains the noise
directions that covary with labels. Constant features, with a standard deviation of at most the
rounding level of the rows, have a row of zeros in L and in L^+.

Failures are status codes. Factors are immutable, and threads may share them.
"""

import numpy as np
import scipy.linalg

from libc.math cimport sqrt
from libc.string cimport memcpy, memset
from scipy.linalg cimport cython_blas, cython_lapack

from splince_fast._kernels.shapes cimport check_length

cdef enum:
    IDENTITY = 0
    DIAGONAL = 1
    CHOLESKY = 2
    EIGH = 3
    SPANNED = 4
    # Up to this number of features, inverting the Cholesky factor is faster than estimating the
    # norm of its inverse.
    SMALL = 64

cdef double ONE = 1.0


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


cdef class Factor:
    """Factor L of S = L L^T, which whitens and unwhitens columns; immutable."""

    @property
    def solver(self):
        return ("none", "diagonal", "cholesky", "eigh", "refined")[self.kind]

    @property
    def inverse_scale(self):  # 1 / standard deviations, (d,); 0 for constant features
        return self.scales[1]

    @property
    def n_null(self):  # number of noise directions that were not admitted
        return self.n_noise - self.admitted

    @property
    def rank(self):  # of S at the rounding level, with admitted directions
        return self.width - self.constants - self.n_null

    @property
    def null_basis(self):
        """Orthonormal basis, (d, n_null), of the null space of S among the features that vary."""
        self.prepare_null_basis()
        return self.null_vectors

    def whiten(self, const double[:, ::1] columns not None):
        """Return L^+ b for each row b of `columns`, (k, d)."""
        return self.apply_to_rows(columns, False)

    def solve(self, const double[:, ::1] columns not None):
        """Return (L^+)^T L^+ b, which is S^-1 b on the support, for each row b of `columns`."""
        self.prepare_null_basis()
        return self.apply_to_rows(columns, True)

    cdef object apply_to_rows(self, const double[:, ::1] columns, bint solve):
        check_length(columns.shape[1], self.width, "columns")
        out = np.array(columns)
        cdef int k = <int>columns.shape[0]
        cdef double[::1] b = out.reshape(-1), scratch = np.empty(self.scratch * k + 1)
        if k:
            with nogil:
                whiten_columns(self, &b[0], k, &scratch[0])
                if solve:
                    whiten_transposed(self, &b[0], k, &scratch[0])
        return out

    def unwhiten(self, const double[:, ::1] columns not None):
        """Return L b for each row b of `columns`; the inverse of `whiten` on the support."""
        check_length(columns.shape[1], self.width, "columns")
        if self.kind == SPANNED:
            raise RuntimeError("solver 'refined' stores no factor of all features")
        b, scale = np.asarray(columns), self.scales[0]
        if self.kind == CHOLESKY and len(b):
            b = scipy.linalg.blas.dtrmm(1.0, self.matrix, b.T, lower=1).T
        elif self.kind == EIGH:
            b = ((b[:, :self.columns] * self.values) @ self.matrix.T) * scale
        return b * scale

    def remember(self, const double[::1, :] scatter not None, double per_weight):
        """Store S = per_weight * scatter, without shrinkage, for `gram`, before any other use."""
        # S takes the free triangle of a Cholesky factor; other factors allocate d^2 numbers.
        cdef Py_ssize_t d = self.width, i, j
        check_length(scatter.shape[0], d, "scatter")
        check_length(scatter.shape[1], d, "scatter")
        self.upper = self.matrix if self.kind == CHOLESKY else np.zeros((d, d), order="F")
        self.diagonal = np.empty(d)
        cdef double[::1, :] upper = self.upper
        cdef double[::1] diagonal = self.diagonal
        with nogil:
            for j in range(d):
                diagonal[j] = per_weight * scatter[j, j] * self.inverse[j] * self.inverse[j]
                for i in range(j + 1, d):
                    upper[j, i] = per_weight * scatter[i, j] * self.inverse[i] * self.inverse[j]

    def gram(self, const double[:, ::1] columns not None):
        """Return b S b^T, (k, k), for b = `columns`, (k, d), and the S that `remember` stored."""
        check_length(columns.shape[1], self.width, "columns")
        if self.upper is None:
            raise RuntimeError("the factor stores no covariance; call `remember` before `gram`")
        b = np.asarray(columns) * self.scales[0]
        if not len(b):
            return np.empty((0, 0))
        product = scipy.linalg.blas.dsymm(1.0, self.upper, b.T, lower=0).T
        return b @ (product + (self.diagonal - np.diagonal(self.upper)) * b).T

    cdef int store(self, matrix) except -1:
        """Store the columns of `matrix`, (d, n), in Fortran order."""
        cdef double[::1, :] view = matrix
        self.matrix, self.columns = matrix, <int>view.shape[1]
        if view.shape[1] > 0:
            self.c = &view[0, 0]
        return 0

    cdef int prepare_null_basis(self) except -1:
        """Compute the null basis on the first call, because many solves do not need it."""
        # The null space of S is D^-1 times that of c, with rows as unlike as the deviations.
        # Householder QR is accurate row by row if large rows come first and columns are pivoted
        # (Cox and Higham 1998).
        cdef double[::1, :] view
        if self.null_vectors is not None:
            return 0
        vectors = np.empty((self.width, 0)) if self.noise is None else self.noise
        if vectors.shape[1]:
            vectors = np.asfortranarray(vectors * self.inverse_scale[:, None])
            order = np.argsort(-np.abs(vectors).max(axis=1), kind="stable")
            vectors[order] = scipy.linalg.qr(vectors[order], mode="economic", pivoting=True)[0]
            view = vectors
        if self.null_vectors is None:  # else, another thread was faster, and its memory is in use
            if vectors.shape[1]:
                self.null_data = &view[0, 0]
            vectors.flags.writeable = False
            self.null_vectors = vectors
        return 0

    def admit(self, const double[:, ::1] spans not None):
        """Return a factor whose support also contains noise directions of `spans`, (k, d)."""
        # Spans (cross-covariances with labels) are accurate to more digits than S, so that they may
        # exceed rounding error in the noise space, which has the basis V_n. The rounding error of
        # T = V_n^T D^-1 spans^T is at most tolerance / sqrt(smallest) from S, and rounding
        # sqrt(smallest) from the rows. A pivoted QR decomposition of T rotates V_n, so that
        # directions above both bounds come first; they join the support with the eigenvalue
        # `tolerance`. Without such directions the factor itself is returned.
        check_length(spans.shape[1], self.width, "spans")
        if self.admitted or self.noise is None or not min(self.noise.shape[1], spans.shape[0]):
            return self
        projections = self.noise.T @ (spans * self.inverse_scale).T
        (reflectors, tau), r, _ = scipy.linalg.qr(projections, mode="raw", pivoting=True,
                                                check_finite=False)
        root = sqrt(self.smallest)
        is_signal = np.abs(np.diagonal(r)) > max(self.rounding * root, self.tolerance / root)
        cdef int a = <int>np.count_nonzero(np.logical_and.accumulate(is_signal))
        if a == 0:
            return self
        noise = scipy.linalg.lapack.dormqr(
            "R", "N", reflectors[:, :len(tau)], tau, self.noise, 64 * self.width)[0]
        added = noise[:, :a] * (self.inverse_scale / sqrt(self.tolerance))[:, None]
        cdef Factor new = Factor.__new__(Factor)
        new.kind, new.width, new.scratch = EIGH, self.width, self.scratch
        new.constants, new.scales = self.constants, self.scales
        new.scale, new.inverse = self.scale, self.inverse
        new.diagonal, new.upper = self.diagonal, self.upper
        new.tolerance, new.variance, new.rounding = self.tolerance, self.variance, self.rounding
        new.n_noise, new.admitted, new.smallest = self.n_noise, a, self.tolerance
        new.noise, new.values = noise[:, a:], np.append(np.full(a, self.tolerance), self.values)
        new.store(np.asfortranarray(np.hstack([added, self.matrix])))
        return new


cdef Factor new_factor(int kind, const double* variances, Py_ssize_t stride,
                       const double[::1] floor, double per_weight, double ridge):
    """Return a factor without `matrix`, for variances per_weight * variances + ridge.

    A feature whose standard deviation is at most `floor` counts as constant.
    """
    cdef Factor f = Factor.__new__(Factor)
    cdef Py_ssize_t d = floor.shape[0], j
    cdef double variance
    scales = np.zeros((2, d))
    cdef double[:, ::1] view = scales
    f.kind, f.width, f.smallest, f.scales = kind, <int>d, 1.0, scales
    f.scale, f.inverse = &view[0, 0], &view[1, 0]
    for j in range(d):
        variance = per_weight * variances[j * stride] + ridge
        f.variance += variance
        if variance > floor[j] * floor[j] and variance > 0.0:
            f.scale[j] = sqrt(variance)
            f.inverse[j] = 1.0 / f.scale[j]
        else:
            f.constants += 1
    return f


cdef void whiten_columns(Factor f, double* b, int k, double* scratch) noexcept nogil:
    """Compute b := L^+ b, in place, for b of shape (d, k); `scratch` has f.scratch k numbers."""
    cdef int d = f.width, n = f.columns, j
    if f.kind >= EIGH:
        gemm(b"T", b"N", n, k, d, 1.0, f.c, d, b, d, 0.0, scratch, n)
        memset(b, 0, sizeof(double) * <size_t>d * k)
        for j in range(k):
            memcpy(b + <Py_ssize_t>j * d, scratch + <Py_ssize_t>j * n, sizeof(double) * n)
        return
    scale_rows(f.inverse, b, d, k)
    if f.kind == CHOLESKY:
        cython_blas.dtrsm(b"L", b"L", b"N", b"N", &d, &k, &ONE, f.c, &d, b, &d)


cdef void whiten_transposed(Factor f, double* b, int k, double* scratch) noexcept nogil:
    """Compute b := (L^+)^T b, as `whiten_columns`; requires `prepare_null_basis`."""
    cdef int d = f.width, n = f.columns, j
    if f.kind < EIGH:
        if f.kind == CHOLESKY:
            cython_blas.dtrsm(b"L", b"L", b"T", b"N", &d, &k, &ONE, f.c, &d, b, &d)
        scale_rows(f.inverse, b, d, k)
        return
    for j in range(k):
        memcpy(scratch + <Py_ssize_t>j * n, b + <Py_ssize_t>j * d, sizeof(double) * n)
    gemm(b"N", b"N", d, k, n, 1.0, f.c, d, scratch, n, 0.0, b, d)
    # Remove the null space of S: b -= N0 N0^T b, with the null basis N0. N0 is accurate row by row,
    # so that the rounding error of each feature is relative to the scale of the feature.
    n = f.n_noise - f.admitted
    if n > 0:
        gemm(b"T", b"N", n, k, d, 1.0, f.null_data, d, b, d, 0.0, scratch, n)
        gemm(b"N", b"N", d, k, n, -1.0, f.null_data, d, scratch, n, 1.0, b, d)


def identity(const double[::1] diagonal not None, double per_weight):
    """Return the factor I; `diagonal`, (d,), is that of the scatter and gives the trace of S."""
    cdef Factor f = new_factor(IDENTITY, &diagonal[0], 1, np.zeros(diagonal.shape[0]), per_weight,
                               0.0)
    f.scales[:], f.constants = 1.0, 0
    return f


def diagonal(const double[::1] variances not None, const double[::1] floor not None):
    """Return the factor of the diagonal matrix of `variances`, (d,); `floor` is as for `dense`."""
    check_length(floor.shape[0], variances.shape[0], "floor")
    return new_factor(DIAGONAL, &variances[0], 1, floor, 1.0, 0.0)


def of_columns(double[:, ::1] columns not None, const double[::1] variances not None,
               const double[::1] floor not None, *, double smallest):
    """Return the factor of S on the column space of B, (d, r), with B^T S B = I.

    `columns` is B^T; the rounding level of whitened spans follows from `smallest`.
    """
    cdef Py_ssize_t d = variances.shape[0], r = columns.shape[0]
    check_length(columns.shape[1], d, "columns")
    check_length(floor.shape[0], d, "floor")
    if r > d:
        raise ValueError(f"columns has {r} rows for {d} features")
    cdef Factor f = new_factor(SPANNED, &variances[0], 1, floor, 1.0, 0.0)
    f.scratch, f.smallest = <int>r, smallest
    f.store(np.asarray(columns).T)
    return f


def dense(const double[::1, :] scatter not None, const double[::1] floor not None, *,
          double per_weight, double ridge, Py_ssize_t max_rank, double tolerance, bint force_eigh,
          bint allow_eigh):
    """Factor S = per_weight * scatter + ridge * I, reading the lower triangle of `scatter`, (d, d).

    A feature with a standard deviation of at most `floor`, (d,), counts as constant. The rank of S
    is at most `max_rank`, and eigenvalues of c up to `tolerance` count as rounding error. S is
    decomposed by eigenvectors if it is rank deficient and `allow_eigh`, or if `force_eigh`. After a
    failure, the `status` is STATUS_NO_CONVERGENCE or STATUS_RANK_DEFICIENT.
    """
    cdef int d = <int>scatter.shape[0], info = 0, n, lwork, liwork
    cdef double[::1] work
    cdef int[::1] iwork
    if d == 0:
        raise ValueError("scatter has shape (0, 0); a factor needs at least one feature")
    check_length(scatter.shape[1], d, "scatter")
    check_length(floor.shape[0], d, "floor")
    cdef Factor f = new_factor(CHOLESKY, &scatter[0, 0], d + 1, floor, per_weight, ridge)
    matrix, f.tolerance = np.empty((d, d), order="F"), tolerance
    f.store(matrix)
    cdef bint rank_limited = max_rank < d - f.constants
    if not (force_eigh or rank_limited):
        # d^2 numbers for a small factor; for others, 3 d and d integers
        work = np.empty(d * d if d <= SMALL else 4 * d)
        with nogil:
            set_unit_diagonal(f, &scatter[0, 0], per_weight)
            cython_lapack.dpotrf(b"L", &d, f.c, &d, &info)
            f.smallest = smallest_eigenvalue(f, &work[0]) if info == 0 else 0.0
        if f.smallest > tolerance:
            return f
    if not allow_eigh:
        f.status = STATUS_RANK_DEFICIENT
        return f
    f.kind, f.scratch, values = EIGH, d, np.empty(d)
    cdef double[::1] eigenvalues = values
    work = np.empty(1 + 71 * d + 2 * <Py_ssize_t>d * d)
    iwork = np.empty(3 + 5 * d, dtype=np.intc)
    lwork, liwork = <int>min(work.shape[0], 2147483647), <int>iwork.shape[0]
    with nogil:
        set_unit_diagonal(f, &scatter[0, 0], per_weight)
        cython_lapack.dsyevd(b"V", b"L", &d, f.c, &d, &eigenvalues[0], &work[0], &lwork, &iwork[0],
                             &liwork, &info)
    if info != 0:
        f.status = STATUS_NO_CONVERGENCE
        return f
    n = np.count_nonzero(values <= tolerance)  # in ascending order
    f.n_noise, f.smallest = n, values[n] if n < d else tolerance
    f.noise, support, f.values = matrix[:, :n], matrix[:, n:], values[n:]
    support *= f.inverse_scale[:, None]
    support /= np.sqrt(f.values)
    f.store(support)
    return f


cdef void set_unit_diagonal(Factor f, const double* scatter, double per_weight) noexcept nogil:
    """Set the lower triangle of c to per_weight * scatter, scaled to unit diagonal."""
    cdef Py_ssize_t d = f.width, i, j
    cdef double w
    for j in range(d):
        w = per_weight * f.inverse[j]
        f.c[j * d + j] = 1.0
        for i in range(j + 1, d):
            f.c[j * d + i] = w * scatter[j * d + i] * f.inverse[i]


cdef double smallest_eigenvalue(Factor f, double* work) noexcept nogil:
    """Return an estimate of the smallest eigenvalue of c, 1 / |c^{-1}|, from its Cholesky factor.

    The pivots do not reveal a rank deficiency: after a small pivot, rounding error increases the
    last one. For up to SMALL features, |c^{-1}| is estimated by |L0^{-1}|_F^2, between |c^{-1}| and
    d |c^{-1}|; for more, LAPACK estimates the 1-norm, which is at least the spectral norm.
    """
    cdef int d = f.width, info = 0, size, one = 1
    cdef double reciprocal = 0.0
    if d > SMALL:
        cython_lapack.dpocon(b"L", &d, f.c, &d, &ONE, &reciprocal, work, <int*>(work + 3 * d),
                             &info)
        return reciprocal
    size = d * d  # an int here: d is at most SMALL
    memset(work, 0, sizeof(double) * size)
    cython_lapack.dlacpy(b"L", &d, &d, f.c, &d, work, &d)
    cython_lapack.dtrtri(b"L", b"N", &d, work, &d, &info)
    return 1.0 / cython_blas.ddot(&size, work, &one, work, &one) if info == 0 else 0.0
