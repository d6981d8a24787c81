"""One routine for the whole family: moments in, the two factors of an oblique projection out.

With S the covariance of x, Sz and Sy its cross-covariances with what is erased and kept, and L any
square-root factor of S (L = I where nothing is whitened)::

    A = L^+ Sz,  B = L^+ Sy,   Qz = orth(A) = A T,  Qy = orth(B) = B U
    N = (I - Qy Qy^T) Qz = Un diag(s) Vn^T           s: sines of the principal angles
    R = (L^+)^T Un,   left0 = Sz T Vn,   K = R^T left0 (= diag(s) but for rounding)
    left = left0 K^-1,  right = R,   P = I - left right^T

Two choices make the guarantees independent of the conditioning of S. The columns of `left` come
from Sz itself rather than from L Qz, and K is formed from the final factors, so that
``left right^T Sz = Sz`` holds to a few roundings of |left||right| for any factor L, exact or not.
And one step of iterative refinement, ``R -= (L^+)^T Qy (Sy U)^T R``, squares what rounding in the
triangular solves left of ``right^T Sy = 0``.

S is scaled to unit diagonal before it is factored, by Cholesky, or by an eigendecomposition where
its smallest eigenvalue falls to the rounding level of the data. Everything runs without the GIL on buffers of the
caller; failures are status codes. Above 400 lines: the factor and what is solved with it share buffers.
"""

import numpy as np

from libc.math cimport fabs, sqrt
from libc.stdlib cimport qsort
from libc.string cimport memcpy, memset
from scipy.linalg cimport cython_blas, cython_lapack

from splince_fast._kernels cimport blas

OK = 0
INFEASIBLE = 1
NO_CONVERGENCE = 2
SINGULAR = 3
RANK_DEFICIENT = 4

cdef enum:
    _OK = 0
    _INFEASIBLE = 1
    _NO_CONVERGENCE = 2
    _SINGULAR = 3

cdef enum:
    _IDENTITY = 0
    _CHOLESKY = 1
    _EIGH = 2

cdef double EPS = 2.220446049250313e-16
# A feature whose deviation is within so many roundings of its mean is constant but for rounding.
cdef double CONSTANT_ROUNDINGS = 64.0
# Up to this width inverting the factor is cheaper than estimating the norm of its inverse.
cdef enum:
    SMALL = 64

cdef double ONE = 1.0
cdef double ZERO = 0.0
cdef double MINUS_ONE = -1.0


cdef struct Sized:
    double size
    int row


cdef struct Factor:
    # L = diag(scale) L0 with L0 triangular, or V diag(sqrt(values)) on the support.
    int kind
    int d
    double* c            # (d, d): Cholesky factor, or eigenvectors by column
    double* scale        # (d,)
    double* inverse      # (d,) 1 / scale; 0 where the feature is constant
    double* root         # (d,) 1 / sqrt(eigenvalue); 0 off the support      (eigh only)
    double* null_basis   # (d, n_null): orthonormal basis of the kernel of S (eigh only)
    int n_null
    double smallest      # about the smallest eigenvalue of c on its support
    double* work         # (d, width): scratch for one whitening, and
    double* spare        # as much again                              (eigh only)
    Sized* order         # (d,): scratch of a sort                    (eigh only)


cdef void gemm(char* ta, char* tb, int m, int n, int k, double alpha, double* a, int lda,
               double* b, int ldb, double beta, double* c, int ldc) noexcept nogil:
    """c := alpha op(a) op(b) + beta c."""
    if m > 0 and n > 0:
        if k > 0:
            blas.active.dgemm(ta, tb, &m, &n, &k, &alpha, a, &lda, b, &ldb, &beta, c, &ldc)
        elif beta == 0.0:
            memset(c, 0, sizeof(double) * <size_t>ldc * n)


cdef int equilibrate(const double* scatter, const double* mean, double per_weight, double ridge,
                     Factor* f) noexcept nogil:
    """c := unit-diagonal (per_weight * scatter + ridge I), lower triangle; number of constants."""
    cdef Py_ssize_t d = f.d, i, j
    cdef double variance, floor, w
    cdef const double* s
    cdef double* c
    cdef int constants = 0
    for j in range(d):
        variance = per_weight * scatter[j * d + j] + ridge
        floor = CONSTANT_ROUNDINGS * EPS * fabs(mean[j])
        if variance > floor * floor and variance > 0.0:
            f.scale[j] = sqrt(variance)
            f.inverse[j] = 1.0 / f.scale[j]
        else:
            f.scale[j] = 1.0
            f.inverse[j] = 0.0
            constants += 1
    for j in range(d):
        w = per_weight * f.inverse[j]
        s = scatter + j * d
        c = f.c + j * d
        c[j] = 1.0
        for i in range(j + 1, d):
            c[i] = w * s[i] * f.inverse[i]
    return constants


cdef double sum_of_squares(const double* a, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    cdef double total = 0.0
    for i in range(n):
        total += a[i] * a[i]
    return total


cdef double inverse_size(const Factor* f, double* work, int* iwork) noexcept nogil:
    """1 / |c^{-1}|, about the smallest eigenvalue of c, from its Cholesky factor.

    Pivots alone do not show a rank deficiency that follows a small pivot: rounding lifts the last
    one. Small factors are inverted, |c^{-1}| <= |L^{-1}|_F^2 <= d |c^{-1}|; for others LAPACK
    estimates the 1-norm, which is at least the spectral norm.
    """
    cdef int d = f.d, info = 0
    cdef Py_ssize_t j
    cdef double total = 0.0, reciprocal = 0.0
    if d > SMALL:
        cython_lapack.dpocon(b"L", &d, f.c, &d, &ONE, &reciprocal, work, iwork, &info)
        return reciprocal
    memcpy(work, f.c, sizeof(double) * <size_t>d * d)
    cython_lapack.dtrtri(b"L", b"N", &d, work, &d, &info)
    if info != 0:
        return 0.0
    for j in range(d):
        total += sum_of_squares(work + j * d + j, d - j)
    return 1.0 / total


cdef void scale_rows(const double* weight, double* b, int d, int k) noexcept nogil:
    """b := diag(weight) b."""
    cdef Py_ssize_t i, j
    for j in range(k):
        for i in range(d):
            b[j * d + i] *= weight[i]


cdef int larger_first(const void* a, const void* b) noexcept nogil:
    cdef double x = (<const Sized*>a).size, y = (<const Sized*>b).size
    return (x < y) - (x > y)


cdef int orthonormal_kernel(Factor* f, const double* off, double* work, int lwork, int* iwork) noexcept nogil:
    """null_basis := an orthonormal basis of the columns of D^-1 V_off, V_off (d, n_null) in `off`.

    c = D^-1 S D^-1, so the kernel of S is D^-1 times that of c. Where features differ in units by
    many orders of magnitude so do the rows of that product; a Householder decomposition is accurate
    row by row if the large rows come first and columns are pivoted (Cox and Higham 1998).
    """
    cdef int d = f.d, n = f.n_null, info = 0, i
    cdef Py_ssize_t j
    cdef Sized* order = f.order
    cdef double* graded = work
    cdef double* tau = work + <Py_ssize_t>d * n
    for i in range(d):
        order[i].row = i
        order[i].size = 0.0
        for j in range(n):
            order[i].size = max(order[i].size, fabs(off[j * d + i] * f.inverse[i]))
    qsort(order, d, sizeof(Sized), &larger_first)
    for j in range(n):
        iwork[j] = 0
        for i in range(d):
            graded[j * d + i] = off[j * d + order[i].row] * f.inverse[order[i].row]
    work = tau + n
    lwork -= d * n + n
    cython_lapack.dgeqp3(&d, &n, graded, &d, iwork, tau, work, &lwork, &info)
    if info == 0:
        cython_lapack.dorgqr(&d, &n, &n, graded, &d, tau, work, &lwork, &info)
    if info == 0:
        for j in range(n):
            for i in range(d):
                f.null_basis[j * d + order[i].row] = graded[j * d + i]
    return _NO_CONVERGENCE if info != 0 else _OK


cdef int eigendecompose(Factor* f, const double* span_z, int kz, const double* span_y, int ky,
                        double tolerance, double* traces, double* work, int lwork, int* iwork,
                        int liwork) noexcept nogil:
    """Eigenvectors into c, reciprocal roots into `root`, the kernel of S into `null_basis`.

    Eigenvalues up to `tolerance` are noise, but what varies so little can still carry a trace: the
    cross-covariances are known to more digits than S. Directions of the noise space in which they
    stand out from what its own inaccuracy explains, tolerance / sqrt(smallest eigenvalue above),
    count as support with the eigenvalue `tolerance`.
    """
    cdef int d = f.d, k = kz + ky, info = 0, n_off = 0, admitted = 0, i, m
    cdef double* tau = work
    cython_lapack.dsyevd(b"V", b"L", &d, f.c, &d, f.root, work, &lwork, iwork, &liwork, &info)
    if info != 0:
        return _NO_CONVERGENCE
    while n_off < d and f.root[n_off] <= tolerance:
        n_off += 1
    f.smallest = f.root[n_off] if n_off < d else tolerance
    if n_off > 0 and k > 0:
        # traces := V_off^T D^-1 [span_z, span_y], then its pivoted QR rotates V_off.
        memcpy(f.work, span_z, sizeof(double) * <size_t>d * kz)
        memcpy(f.work + <Py_ssize_t>d * kz, span_y, sizeof(double) * <size_t>d * ky)
        scale_rows(f.inverse, f.work, d, k)
        gemm(b"T", b"N", n_off, k, d, 1.0, f.c, d, f.work, d, 0.0, traces, n_off)
        m = n_off if n_off < k else k
        for i in range(k):
            iwork[i] = 0
        work += m
        lwork -= m
        cython_lapack.dgeqp3(&n_off, &k, traces, &n_off, iwork, tau, work, &lwork, &info)
        if info != 0:
            return _NO_CONVERGENCE
        while (admitted < m and fabs(traces[<Py_ssize_t>admitted * n_off + admitted])
                > tolerance / sqrt(f.smallest)):
            admitted += 1
        if admitted > 0:
            cython_lapack.dormqr(b"R", b"N", &d, &n_off, &m, traces, &n_off, tau, f.c, &d, work,
                                 &lwork, &info)
            if info != 0:
                return _NO_CONVERGENCE
            f.smallest = tolerance
            for i in range(admitted):
                f.root[i] = tolerance
    for i in range(d):
        f.root[i] = 1.0 / sqrt(f.root[i]) if i < admitted or i >= n_off else 0.0
    f.n_null = n_off - admitted
    if f.n_null > 0:
        return orthonormal_kernel(f, f.c + <Py_ssize_t>admitted * d, work, lwork, iwork)
    return _OK


cdef void whiten(const Factor* f, double* b, int k) noexcept nogil:
    """b := L^+ b, in place, for columns b (d, k) in the range of S."""
    cdef int d = f.d
    if f.kind == _IDENTITY or k == 0:
        return
    scale_rows(f.inverse, b, d, k)
    if f.kind == _CHOLESKY:
        blas.active.dtrsm(b"L", b"L", b"N", b"N", &d, &k, &ONE, f.c, &d, b, &d)
    else:
        memcpy(f.work, b, sizeof(double) * <size_t>d * k)
        gemm(b"T", b"N", d, k, d, 1.0, f.c, d, f.work, d, 0.0, b, d)
        scale_rows(f.root, b, d, k)


cdef void whiten_transposed(const Factor* f, double* b, int k) noexcept nogil:
    """b := (L^+)^T b, in place, for b of shape (d, k)."""
    cdef int d = f.d
    if f.kind == _IDENTITY or k == 0:
        return
    if f.kind == _CHOLESKY:
        blas.active.dtrsm(b"L", b"L", b"T", b"N", &d, &k, &ONE, f.c, &d, b, &d)
        scale_rows(f.inverse, b, d, k)
        return
    scale_rows(f.root, b, d, k)
    memcpy(f.work, b, sizeof(double) * <size_t>d * k)
    gemm(b"N", b"N", d, k, d, 1.0, f.c, d, f.work, d, 0.0, b, d)
    scale_rows(f.inverse, b, d, k)
    if f.n_null > 0:
        leave_kernel_alone(f, b, k)


cdef void leave_kernel_alone(const Factor* f, double* b, int k) noexcept nogil:
    """Make b orthogonal to the kernel of S, without a change on its range.

    b -= N0 N0^T b changes nothing on the range but for rounding, which features of very different
    units amplify. One step of refinement restores V^T diag(scale) b = `work`, what b has to be there.
    """
    cdef int d = f.d
    cdef Py_ssize_t i, j
    gemm(b"T", b"N", f.n_null, k, d, 1.0, f.null_basis, d, b, d, 0.0, f.spare, f.n_null)
    gemm(b"N", b"N", d, k, f.n_null, -1.0, f.null_basis, d, f.spare, f.n_null, 1.0, b, d)
    memcpy(f.spare, b, sizeof(double) * <size_t>d * k)
    scale_rows(f.scale, f.spare, d, k)
    gemm(b"T", b"N", d, k, d, -1.0, f.c, d, f.spare, d, 1.0, f.work, d)
    for j in range(k):
        for i in range(d):
            if f.root[i] == 0.0:
                f.work[j * d + i] = 0.0
    gemm(b"N", b"N", d, k, d, 1.0, f.c, d, f.work, d, 0.0, f.spare, d)
    scale_rows(f.inverse, f.spare, d, k)
    for i in range(<Py_ssize_t>d * k):
        b[i] += f.spare[i]


cdef int svd(int m, int n, double* a, double* s, double* u, double* vt, double* work, int lwork,
             int* iwork) noexcept nogil:
    """Thin singular value decomposition of a (m, n), which is destroyed."""
    cdef int mn = m if m < n else n, info = 0, one = 1, i
    if n == 1 and m > 0:
        # A single column, the common case, needs no iteration; dnrm2 guards against overflow.
        s[0] = cython_blas.dnrm2(&m, a, &one)
        vt[0] = 1.0
        for i in range(m):
            u[i] = a[i] / s[0] if s[0] > 0.0 else 0.0
    elif mn > 0:
        cython_lapack.dgesdd(b"S", &m, &n, a, &m, s, u, &m, vt, &mn, work, &lwork, iwork, &info)
    return _NO_CONVERGENCE if info != 0 else _OK


cdef int basis(const Factor* f, const double* span, int k, double noise, double relative,
               double* whitened, double* sigma, double* q, double* coordinates, double* vt,
               double* work, int lwork, int* iwork, int* rank) noexcept nogil:
    """Orthonormal basis q of colsp(L^+ span), and span T with q = (L^+ span) T.

    The rank counts singular values above both `noise` (the rounding level of the data) and
    `relative` times the largest.
    """
    cdef int d = f.d, mn = d if d < k else k, status, i
    cdef Py_ssize_t j
    cdef double cut
    rank[0] = 0
    if mn == 0:
        return _OK
    memcpy(whitened, span, sizeof(double) * <size_t>d * k)
    whiten(f, whitened, k)
    # `coordinates` serves as the copy that the decomposition destroys.
    memcpy(coordinates, whitened, sizeof(double) * <size_t>d * k)
    status = svd(d, k, coordinates, sigma, q, vt, work, lwork, iwork)
    if status != _OK:
        return status
    cut = relative * sigma[0]
    if noise > cut:
        cut = noise
    for i in range(mn):
        if sigma[i] > cut:
            rank[0] += 1
    gemm(b"N", b"T", d, rank[0], k, 1.0, <double*>span, d, vt, mn, 0.0, coordinates, d)
    for i in range(rank[0]):
        for j in range(d):
            coordinates[<Py_ssize_t>i * d + j] /= sigma[i]
    return _OK


cdef void orthogonalise(int d, const double* qy, int ry, double* n, int rz, double* m) noexcept nogil:
    """n -= qy qy^T n; the coefficients stay in m (ry, rz)."""
    gemm(b"T", b"N", ry, rz, d, 1.0, <double*>qy, d, n, d, 0.0, m, ry)
    gemm(b"N", b"N", d, rz, ry, -1.0, <double*>qy, d, m, ry, 1.0, n, d)


def class_span(double[:, ::1] sums, double[::1] weights):
    """Cross-covariances with all class indicators but the most frequent one's, as (k', d) rows.

    In units of the indicators' standard deviations sqrt(p (1 - p)). The indicators sum to one, so
    the others span the same space; classes without weight add nothing.

    Parameters
    ----------
    sums : (k, d) float64, sums of w (x - reference) per class
    weights : (k,) float64
    """
    cdef Py_ssize_t k = sums.shape[0], d = sums.shape[1], c, j, present = 0, largest = 0, row = 0
    cdef double weight = 0.0, share, factor
    for c in range(k):
        weight += weights[c]
        if weights[c] > 0.0:
            present += 1
        if weights[c] > weights[largest]:
            largest = c
    if present < 2:
        return np.zeros((0, d))
    span_a = np.empty((present - 1, d))
    total_a = np.zeros(d)
    cdef double[:, ::1] span = span_a
    cdef double[::1] total = total_a
    with nogil:
        for c in range(k):
            for j in range(d):
                total[j] += sums[c, j]
        for c in range(k):
            if c == largest or weights[c] <= 0.0:
                continue
            share = weights[c] / weight
            factor = 1.0 / (weight * sqrt(share * (1.0 - share)))
            for j in range(d):
                span[row, j] = factor * (sums[c, j] - share * total[j])
            row += 1
    return span_a


def column_deviations(double[::1] z_sum, double[:, ::1] squares, double[::1] reference,
                      double weight):
    """(k,) standard deviations of the columns of a continuous variable, 0 where constant.

    A column that varies by no more than a few roundings of its size is constant. Parameters are
    those of `column_span`.
    """
    cdef Py_ssize_t k = z_sum.shape[0], c
    cdef double mean, variance, floor
    deviations_a = np.zeros(k)
    cdef double[::1] deviations = deviations_a
    for c in range(k):
        mean = z_sum[c] / weight
        variance = squares[c, c] / weight - mean * mean
        floor = CONSTANT_ROUNDINGS * EPS * (fabs(reference[c]) + sqrt(squares[c, c] / weight))
        if variance > floor * floor:
            deviations[c] = sqrt(variance)
    return deviations_a


def column_span(double[:, ::1] products, double[::1] z_sum, double[::1] x_sum,
                double[:, ::1] squares, double[::1] reference, double weight):
    """Cross-covariances with the columns of a continuous variable, as (k', d) rows.

    In units of the columns' standard deviations; constant columns are left out.

    Parameters
    ----------
    products : (k, d) float64, sums of w (z - reference) (x - reference of x)
    z_sum, x_sum : (k,), (d,) float64, sums of w (z - reference) and w (x - reference of x)
    squares : (k, k) float64, sums of w (z - reference) (z - reference)^T
    reference : (k,) float64
    weight : float, positive
    """
    cdef Py_ssize_t k = products.shape[0], d = products.shape[1], c, j, row = 0
    cdef double share, factor
    cdef double[::1] deviations = column_deviations(z_sum, squares, reference, weight)
    for c in range(k):
        row += deviations[c] > 0.0
    span_a = np.empty((row, d))
    cdef double[:, ::1] span = span_a
    row = 0
    with nogil:
        for c in range(k):
            if deviations[c] == 0.0:
                continue
            share = z_sum[c] / weight
            factor = 1.0 / (weight * deviations[c])
            for j in range(d):
                span[row, j] = factor * (products[c, j] - share * x_sum[j])
            row += 1
    return span_a


def oblique_factors(
    double[::1, :] scatter,
    double[::1] mean,
    double[::1, :] span_z,
    double[::1, :] span_y,
    double[::1] workspace,
    *,
    bint whitened,
    bint force_eigh,
    bint allow_eigh,
    double per_weight,
    double ridge,
    Py_ssize_t max_rank,
    double eigen_tolerance,
    double rank_tolerance,
    double drop_below,
    bint may_drop,
):
    """Factors of the oblique projection that erases span_z and keeps span_y.

    Parameters
    ----------
    scatter : (d, d) float64, Fortran order, lower triangle; read only
    mean : (d,) float64
        Mean of x: a feature that varies by no more than rounding of its mean counts as constant.
    span_z, span_y : (d, kz), (d, ky) float64, Fortran order
        Cross-covariances in units of the variables' standard deviations; read only.
    workspace : (at least d * d) float64 where whitened, (at least 1) elsewhere; overwritten
    whitened : L from S (LEACE, SPLINCE) or L = I (SAL)
    force_eigh, allow_eigh : use the eigendecomposition whatever the pivots; where they ask for it
    per_weight, ridge : S = per_weight * scatter + ridge * I
    max_rank : what the rank of S cannot exceed, for the number of rows it is made of
    eigen_tolerance : smallest eigenvalue of the unit-diagonal S that counts as support
    rank_tolerance : relative tolerance for ranks; 0 for the rounding level alone
    drop_below : kept directions at an angle with a sine below this are given up
    may_drop : whether directions at the rounding level may be given up, too

    Returns
    -------
    dict with `status` and, where it is OK, left and right as (r, d) C-ordered arrays (the
    transposes of the factors), and the figures that the report is made of.
    """
    cdef int d = <int>scatter.shape[0], kz = <int>span_z.shape[1], ky = <int>span_y.shape[1]
    cdef int mz = min(d, kz), my = min(d, ky), k = kz + ky
    cdef int rz = 0, ry = 0, status = _OK, constants = 0, n_drop, info = 0, i, j, n_cos = 0
    cdef int dropped = 0
    cdef double noise, tol_sine = 0.0, distortion, distortion_unkept
    cdef Py_ssize_t size

    # Scratch of the singular value decompositions, of all shapes that occur below.
    cdef int widest = max(mz, my, 1), tall = max(d, kz, ky, 1)
    cdef int lwork = 6 * widest * widest + 80 * widest + 68 * tall
    work_a = np.empty(lwork)
    iwork_a = np.empty(8 * widest, dtype=np.intc)
    cdef double[::1] work = work_a
    cdef int[::1] iwork = iwork_a

    scale_a, inverse_a = np.empty(d), np.empty(d)
    cdef double[::1] scale = scale_a, inverse = inverse_a
    cdef double[::1] root, eigen_work, scratch, order, condition_work
    cdef double[::1, :] null_basis
    cdef int[::1] eigen_iwork, condition_iwork
    cdef bint deficient, short

    white_a, coordinates_a = np.empty((k, d)), np.empty((k, d))
    basis_a = np.empty((2 * (mz + my), d))
    factors_a = np.empty((2 * mz, d))
    sigma_z_a, sigma_y_a = np.zeros(mz), np.zeros(my)
    small_a = np.empty((4, widest * widest))
    vt_a = np.empty(mz * kz + my * ky)
    sines_a, cosines_a = np.ones(mz), np.zeros(min(mz, my))
    ipiv_a = np.empty(max(mz, 1), dtype=np.intc)
    cdef double[:, ::1] white = white_a, coordinates = coordinates_a, bases = basis_a
    cdef double[:, ::1] factors = factors_a, small = small_a
    cdef double[::1] sigma_z = sigma_z_a, sigma_y = sigma_y_a, vt = vt_a
    cdef double[::1] sines = sines_a, cosines = cosines_a
    cdef int[::1] ipiv = ipiv_a
    # Columns of length d, one variable after another in each pool.
    cdef double* q_z = &bases[0, 0] if mz else NULL
    cdef double* both = q_z + <Py_ssize_t>mz * d
    cdef double* q_y = both + <Py_ssize_t>(mz + my) * d
    cdef double* coord_z = &coordinates[0, 0] if k else NULL
    cdef double* coord_y = coord_z + <Py_ssize_t>kz * d
    cdef double* left = &factors[0, 0] if mz else NULL
    cdef double* unkept = left + <Py_ssize_t>mz * d

    cdef Factor f
    f.kind = _IDENTITY
    f.d = d
    f.scale = &scale[0]
    f.inverse = &inverse[0]
    f.c = &workspace[0]
    f.root = NULL
    f.null_basis = NULL
    f.work = NULL
    f.spare = NULL
    f.order = NULL
    f.n_null = 0
    f.smallest = 1.0

    # 1. The factor L of S.
    if whitened:
        f.kind = _CHOLESKY
        condition_work = np.empty(d * d if d <= SMALL else 3 * d)
        condition_iwork = np.empty(d, dtype=np.intc)
        with nogil:
            constants = equilibrate(&scatter[0, 0], &mean[0], per_weight, ridge, &f)
            short = max_rank < d - constants
            if not (force_eigh or short):
                blas.active.dpotrf(b"L", &d, f.c, &d, &info)
                if info == 0:
                    f.smallest = inverse_size(&f, &condition_work[0], &condition_iwork[0])
                else:
                    f.smallest = 0.0
        deficient = short or f.smallest <= eigen_tolerance
        if force_eigh or deficient:
            if deficient and not allow_eigh:
                return {"status": RANK_DEFICIENT}
            f.kind = _EIGH
            root = np.empty(d)
            null_basis = np.empty((d, d), order="F")
            eigen_work = np.empty(1 + 71 * d + 2 * <Py_ssize_t>d * d + 64 * k)
            eigen_iwork = np.empty(max(3 + 5 * d, k), dtype=np.intc)
            scratch = np.empty(3 * <Py_ssize_t>d * max(k, mz + my, 1))
            order = np.empty(2 * d)  # a double and an integer each, padded
            f.order = <Sized*>&order[0]
            f.root = &root[0]
            f.null_basis = &null_basis[0, 0]
            f.work = &scratch[0]
            f.spare = f.work + <Py_ssize_t>d * max(k, mz + my, 1)
            with nogil:
                equilibrate(&scatter[0, 0], &mean[0], per_weight, ridge, &f)
                status = eigendecompose(
                    &f, &span_z[0, 0] if kz else NULL, kz, &span_y[0, 0] if ky else NULL, ky,
                    eigen_tolerance, f.spare + <Py_ssize_t>d * max(k, mz + my, 1), &eigen_work[0],
                    <int>min(eigen_work.shape[0], 2147483647), &eigen_iwork[0],
                    <int>eigen_iwork.shape[0])
        if status != _OK:
            return {"status": status}

    # 2. Rounding level of the whitened cross-covariances: a few roundings of the sums behind
    #    them, amplified by at most the inverse of the factor.
    cdef double variance = 0.0
    for i in range(d):
        variance += per_weight * scatter[i, i] + ridge
    noise = 16.0 * EPS * (sqrt(d / f.smallest) if whitened else sqrt(variance))

    # 3. Bases of what is erased and kept, in whitened coordinates.
    cdef double relative = max(rank_tolerance, 16.0 * sqrt(<double>d) * EPS)
    if kz > 0:
        with nogil:
            status = basis(&f, &span_z[0, 0], kz, noise, relative, &white[0, 0], &sigma_z[0],
                           q_z, coord_z, &vt[0], &work[0], lwork, &iwork[0], &rz)
    if status == _OK and ky > 0:
        with nogil:
            status = basis(&f, &span_y[0, 0], ky, noise, relative, &white[kz, 0], &sigma_y[0],
                           q_y, coord_y, &vt[mz * kz], &work[0], lwork, &iwork[0], &ry)
    if status != _OK:
        return {"status": status}
    cdef int rank_kept = ry

    # 4. Principal angles; kept directions too close to the erased ones are given up or refused.
    if rz > 0 and ry > 0:
        tol_sine = noise / sigma_z[rz - 1] + noise / sigma_y[ry - 1]
        with nogil:
            while True:
                # small[0] holds the coefficients, small[1:4] the decompositions of them.
                memcpy(both, q_z, sizeof(double) * <size_t>d * rz)
                orthogonalise(d, q_y, ry, both, rz, &small[0, 0])
                memcpy(&small[1, 0], &small[0, 0], sizeof(double) * <size_t>ry * rz)
                orthogonalise(d, q_y, ry, both, rz, &small[0, 0])
                if dropped == 0:
                    n_cos = min(rz, ry)
                    memcpy(&small[0, 0], &small[1, 0], sizeof(double) * <size_t>ry * rz)
                    status = svd(ry, rz, &small[0, 0], &cosines[0], &small[2, 0], &small[3, 0],
                                 &work[0], lwork, &iwork[0])
                    if status != _OK:
                        break
                # `left` is free until the end: it takes Un.
                status = svd(d, rz, both, &sines[0], left, &small[3, 0], &work[0],
                             lwork, &iwork[0])
                if status != _OK:
                    break
                n_drop = 0
                for i in range(rz):
                    if (sines[i] <= tol_sine or sines[i] < drop_below) and n_drop < ry:
                        n_drop += 1
                if n_drop == 0:
                    break
                if not may_drop:
                    status = _INFEASIBLE
                    break
                # Principal vectors of the kept side are the eigenvectors of M M^T = Y diag(c^2) Y^T,
                # in ascending order: rotate the basis and let go of the last n_drop.
                dropped += n_drop
                gemm(b"N", b"T", ry, ry, rz, 1.0, &small[1, 0], ry, &small[1, 0], ry, 0.0,
                     &small[0, 0], ry)
                cython_lapack.dsyev(b"V", b"L", &ry, &small[0, 0], &ry, &small[2, 0], &work[0],
                                    &lwork, &info)
                if info != 0:
                    status = _NO_CONVERGENCE
                    break
                n_drop = ry - n_drop
                gemm(b"N", b"N", d, n_drop, ry, 1.0, q_y, d, &small[0, 0], ry, 0.0,
                     both, d)
                memcpy(q_y, both, sizeof(double) * <size_t>d * n_drop)
                gemm(b"N", b"N", d, n_drop, ry, 1.0, coord_y, d, &small[0, 0], ry, 0.0,
                     both, d)
                memcpy(coord_y, both, sizeof(double) * <size_t>d * n_drop)
                ry = n_drop
                if ry == 0:
                    break
        if status == _INFEASIBLE:
            return {"status": status, "cosines": cosines_a[:n_cos], "sines": sines_a[:rz],
                    "rank_z": rz, "rank_y": rank_kept, "tolerance_sine": tol_sine}
        if status != _OK:
            return {"status": status}

    # 5. The factors.
    distortion = distortion_unkept = 0.0
    if rz > 0:
        with nogil:
            size = <Py_ssize_t>d * rz
            distortion_unkept = sum_of_squares(coord_z, size)
            if ry > 0:
                memcpy(both, left, sizeof(double) * size)
                orthogonalise(d, q_y, ry, both, rz, &small[0, 0])
                memcpy(both + <Py_ssize_t>rz * d, q_y, sizeof(double) * <size_t>d * ry)
                gemm(b"N", b"T", d, rz, rz, 1.0, coord_z, d, &small[3, 0], rz, 0.0,
                     unkept, d)
            else:
                for i in range(rz):
                    sines[i] = 1.0
                memcpy(both, q_z, sizeof(double) * size)
                memcpy(unkept, coord_z, sizeof(double) * size)
            whiten_transposed(&f, both, rz + ry)
            if ry > 0:
                gemm(b"T", b"N", ry, rz, d, 1.0, coord_y, d, both, d, 0.0,
                     &small[0, 0], ry)
                gemm(b"N", b"N", d, rz, ry, -1.0, both + <Py_ssize_t>rz * d, d, &small[0, 0], ry, 1.0,
                     both, d)
            gemm(b"T", b"N", rz, rz, d, 1.0, both, d, unkept, d, 0.0, &small[0, 0],
                 rz)
            for i in range(rz * rz):
                small[1, i] = 0.0
            for i in range(rz):
                small[1, i * rz + i] = 1.0
            cython_lapack.dgesv(&rz, &rz, &small[0, 0], &rz, &ipiv[0], &small[1, 0], &rz, &info)
            if info == 0:
                gemm(b"N", b"N", d, rz, rz, 1.0, unkept, d, &small[1, 0], rz, 0.0,
                     left, d)
                distortion = sum_of_squares(left, size)
        if info != 0:
            return {"status": _SINGULAR}

    return {
        "status": _OK,
        "left": factors_a[:rz].copy(),
        "right": basis_a[mz:mz + rz].copy(),
        "whitened_z": white_a[:kz],
        "whitened_y": white_a[kz:],
        "sigma_z": sigma_z_a,
        "sigma_y": sigma_y_a,
        "rank_z": rz,
        "rank_y": rank_kept,
        "dropped": dropped,
        "cosines": cosines_a[:n_cos],
        "sines": sines_a[:rz],
        "distortion": distortion,
        "distortion_unkept": distortion_unkept,
        "solver": ("none", "cholesky", "eigh")[f.kind],
        "smallest_eigenvalue": f.smallest,
        "noise": noise,
        "variance": variance,
        "inverse_scale": inverse_a,
        "constants": constants,
        "null_basis": np.asarray(null_basis)[:, :f.n_null] if f.n_null else None,
    }
