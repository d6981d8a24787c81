"""One routine for the whole family: a factor and two spans in, an oblique projection out.

With L the factor of S, D the deviations of the features, Sz and Sy the spans of what is erased and
kept::

    A = L^+ Sz,  B = L^+ Sy,   Qz = orth(A) = A T,  Qy = orth(B) = B U,   Cz = Sz T,  Cy = Sy U
    N = (I - Qy Qy^T) Qz = Un diag(s) Vn^T                  s: sines of the principal angles
    R = (L^+)^T Un,  R -= (L^+)^T Qy (Cy^T R),  K = R^T Cz Vn           (= diag(s) but for rounding)

    left = Cz Rz^-1,     D^-1 Cz = Q Rz                      left is orthonormal in units of D
    right = R K^-T (Rz Vn)^T,     P = I - left right^T
    right -= D^-1 Qc Qc^T D right,   Qc = orth(D^-1 Cy)      Cov(x, y) itself is kept
    right := right K'^-T,            K' = right^T left       Cov(x, z) itself is erased

The last three lines make the guarantees independent of L. The columns of `left` come from Sz, each
to a few roundings of it whatever T; |right| in units of D is |I - P|, so that nothing cancels in
``left right^T``; and the corrections act on Sy and Sz themselves, also on what the factor does not
see of them because it varies below the rounding level of S. Hence |P Sz| and |P Sy - Sy| are a few
roundings of |P| |S.|, for any factor. The first correction of R, in whitened coordinates, squares
what rounding in the triangular solves left, and costs no optimality.

Runs without the GIL; failures are status codes.
"""

import numpy as np

from libc.math cimport INFINITY, copysign, fabs, hypot, sqrt
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy
from scipy.linalg cimport cython_blas, cython_lapack

from splince_fast._kernels.factor cimport (
    STATUS_INFEASIBLE, STATUS_NO_CONVERGENCE, STATUS_OK, STATUS_SINGULAR, Factor, dot, gemm,
    scale_rows, scratch_for, whiten_columns, whiten_transposed
)
from splince_fast._kernels.shapes cimport check_length

cdef double ONE = 1.0
cdef double EPS = 2.220446049250313e-16

# Columns up to which rotations take no more time than LAPACK; how often all are gone through.
cdef enum:
    FEW_COLUMNS = 4
    SWEEPS = 30


cdef int svd_by_rotations(int m, int n, const double* a, double* s, double* u,
                          double* vt) noexcept nogil:
    """Thin singular value decomposition of a (m, n), n <= m, by one-sided Jacobi rotations.

    Pairs of columns are rotated until all are orthogonal; u is zero where s is. The status is
    STATUS_NO_CONVERGENCE where that takes too many sweeps, and where a number is not finite.
    """
    cdef int p, q, one = 1, sweep
    cdef Py_ssize_t i
    cdef double largest = 0.0, product, slope, cosine, sine
    cdef double* x
    cdef double* y
    cdef bint orthogonal = False
    for i in range(<Py_ssize_t>m * n):
        largest = max(largest, fabs(a[i]))
    for i in range(<Py_ssize_t>m * n):  # in these units no square overflows
        u[i] = a[i] / largest if largest > 0.0 else 0.0
    for i in range(n * n):
        vt[i] = 1.0 if i % (n + 1) == 0 else 0.0
    for sweep in range(SWEEPS):
        orthogonal = True
        for q in range(1, n):
            for p in range(q):
                x, y = u + <Py_ssize_t>p * m, u + <Py_ssize_t>q * m
                s[p], s[q], product = dot(x, x, m), dot(y, y, m), dot(x, y, m)
                if fabs(product) <= EPS * sqrt(m * s[p] * s[q]):
                    continue
                orthogonal = False
                slope = (s[q] - s[p]) / (2.0 * product)
                sine = copysign(1.0 / (fabs(slope) + hypot(1.0, slope)), -slope)  # the tangent
                cosine = 1.0 / hypot(1.0, sine)
                sine *= cosine
                cython_blas.drot(&m, x, &one, y, &one, &cosine, &sine)
                cython_blas.drot(&n, vt + p, &n, vt + q, &n, &cosine, &sine)
        if orthogonal:
            break
    for q in range(n):
        y = u + <Py_ssize_t>q * m
        s[q] = sqrt(dot(y, y, m))
        for i in range(m):
            y[i] = y[i] / s[q] if s[q] > 0.0 else 0.0
        s[q] *= largest
        for p in range(q, 0, -1):  # in descending order
            if s[p] <= s[p - 1]:
                break
            s[p], s[p - 1] = s[p - 1], s[p]
            x = u + <Py_ssize_t>(p - 1) * m
            y = u + <Py_ssize_t>p * m
            cython_blas.dswap(&m, x, &one, y, &one)
            cython_blas.dswap(&n, vt + p - 1, &n, vt + p, &n)
    return STATUS_OK if orthogonal else STATUS_NO_CONVERGENCE


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
    # LAPACK also has the last word where rotations come to no end.
    elif mn > 0 and (n > min(m, FEW_COLUMNS) or svd_by_rotations(m, n, a, s, u, vt) != STATUS_OK):
        cython_lapack.dgesdd(b"S", &m, &n, a, &m, s, u, &m, vt, &mn, work, &lwork, iwork, &info)
    return STATUS_NO_CONVERGENCE if info != 0 else STATUS_OK


cdef int triangular(int d, int r, double* a, double* tau, double* work, int lwork) noexcept nogil:
    """Householder decomposition of a (d, r), r <= d: the triangle above, the reflectors below."""
    cdef int info = 0, one = 1
    if r == 1:
        tau[0] = cython_blas.dnrm2(&d, a, &one)
    elif r > 0:
        cython_lapack.dgeqrf(&d, &r, a, &d, tau, work, &lwork, &info)
    return STATUS_NO_CONVERGENCE if info != 0 else STATUS_OK


cdef int orthonormal(int d, int r, double* a, double* tau, double* work, int lwork) noexcept nogil:
    """a := an orthonormal basis of its column space, column by column."""
    cdef int info = triangular(d, r, a, tau, work, lwork), i
    if r == 1:
        for i in range(d):
            a[i] = a[i] / tau[0] if tau[0] > 0.0 else 0.0
    elif r > 0 and info == STATUS_OK:
        cython_lapack.dorgqr(&d, &r, &r, a, &d, tau, work, &lwork, &info)
    return STATUS_NO_CONVERGENCE if info != 0 else STATUS_OK


cdef int basis(int d, int k, const double* span, const double* whitened, double noise,
               double relative, double* sigma, double* q, double* coordinates, double* vt,
               double* work, int lwork, int* iwork, int* rank, double* cut) noexcept nogil:
    """Orthonormal basis q of the column space of `whitened`, and span T with q = whitened T.

    The rank counts singular values above both `noise` (the rounding level of the data) and
    `relative` times the largest.
    """
    cdef int mn = d if d < k else k, status, i
    cdef Py_ssize_t j
    rank[0] = 0
    cut[0] = noise
    if mn == 0:
        return STATUS_OK
    # `coordinates` serves as the copy that the decomposition destroys.
    memcpy(coordinates, whitened, sizeof(double) * <size_t>d * k)
    status = svd(d, k, coordinates, sigma, q, vt, work, lwork, iwork)
    if status != STATUS_OK:
        return status
    cut[0] = max(noise, relative * sigma[0])
    for i in range(mn):
        if sigma[i] > cut[0]:
            rank[0] += 1
    gemm(b"N", b"T", d, rank[0], k, 1.0, <double*>span, d, vt, mn, 0.0, coordinates, d)
    for i in range(rank[0]):
        for j in range(d):
            coordinates[<Py_ssize_t>i * d + j] /= sigma[i]
    return STATUS_OK


cdef void orthogonalise(int d, const double* qy, int ry, double* n, int rz,
                        double* m) noexcept nogil:
    """n -= qy qy^T n; the coefficients stay in m (ry, rz)."""
    gemm(b"T", b"N", ry, rz, d, 1.0, <double*>qy, d, n, d, 0.0, m, ry)
    gemm(b"N", b"N", d, rz, ry, -1.0, <double*>qy, d, m, ry, 1.0, n, d)


cdef int renew(int d, int r, double* left, double* right, double* K, double* inverse, double* spare,
               int* pivots) noexcept nogil:
    """right := right K^-T with K = right^T left, so that right^T left = I."""
    cdef int info = 0, i
    gemm(b"T", b"N", r, r, d, 1.0, right, d, left, d, 0.0, K, r)
    if r == 1:
        inverse[0] = 1.0 / K[0] if K[0] != 0.0 else 0.0
        for i in range(d):
            right[i] *= inverse[0]
        return STATUS_OK if K[0] != 0.0 else STATUS_SINGULAR
    for i in range(r * r):
        inverse[i] = 0.0
    for i in range(r):
        inverse[i * r + i] = 1.0
    cython_lapack.dgesv(&r, &r, K, &r, pivots, inverse, &r, &info)
    if info == 0:
        memcpy(spare, right, sizeof(double) * <size_t>d * r)
        gemm(b"N", b"T", d, r, r, 1.0, spare, d, inverse, r, 0.0, right, d)
    return STATUS_SINGULAR if info != 0 else STATUS_OK


cdef double relative_residual(int d, int r, int k, const double* left, const double* right,
                              const double* coordinates, const double* sigma, bint kept,
                              const double* inverse, double* small, double* moved) noexcept nogil:
    """|(P - I) C diag(sigma)| (kept) or |P C diag(sigma)|, over |C diag(sigma)|, in units of D."""
    cdef Py_ssize_t i, j
    cdef double left_over = 0.0, whole = 0.0, c, e
    gemm(b"T", b"N", r, k, d, 1.0, <double*>right, d, <double*>coordinates, d, 0.0, small, r)
    gemm(b"N", b"N", d, k, r, 1.0, <double*>left, d, small, r, 0.0, moved, d)
    for j in range(k):
        for i in range(d):
            c = coordinates[j * d + i] * inverse[i] * sigma[j]
            e = moved[j * d + i] * inverse[i] * sigma[j]
            if not kept:
                e = c - e
            whole += c * c
            left_over += e * e
    return sqrt(left_over / whole) if whole > 0.0 else 0.0


cdef double spectral_norm(int d, int r, const double* right, const double* scale, double* scaled,
                          double* gram, double* work, int lwork) noexcept nogil:
    """|D right|; what overflows has an infinite norm."""
    cdef int info = 0
    memcpy(scaled, right, sizeof(double) * <size_t>d * r)
    scale_rows(scale, scaled, d, r)
    if r == 1:
        return sqrt(dot(scaled, scaled, d))
    gemm(b"T", b"N", r, r, d, 1.0, scaled, d, scaled, d, 0.0, gram, r)
    cython_lapack.dsyev(b"N", b"L", &r, gram, &r, work, work + r, &lwork, &info)
    return sqrt(max(0.0, work[r - 1]))


def oblique(Factor factor not None, const double[:, ::1] erased not None,
            const double[:, ::1] kept not None, *, double noise, double relative,
            double drop_below, bint may_drop):
    """The oblique projection that erases the rows of one span and keeps those of another.

    Parameters
    ----------
    factor : Factor
    erased, kept : (kz, d), (k - kz, d) float64
        Cross-covariances in units of the variables' standard deviations; read only.
    noise, relative : rounding level of whitened spans; ranks are also relative to the largest
    drop_below : kept directions at an angle with a sine below this are given up
    may_drop : whether directions at the rounding level may be given up, too

    Returns
    -------
    tuple
        The fields of `splince_fast._solve.oblique.Solution`, up to `spread`.
    """
    cdef int d = factor.width, kz = <int>erased.shape[0], ky = <int>kept.shape[0], k = kz + ky
    cdef int mz = min(d, kz), my = min(d, ky)
    cdef int rz = 0, ry = 0, status = STATUS_OK, n_drop, info = 0, i, n_cos = 0, dropped = 0
    cdef double tol_sine = 0.0, distortion = 0.0, distortion_unkept = 0.0, size = 0.0
    cdef double cut_z = noise, cut_y = noise, residual_z = 0.0, residual_y = 0.0
    cdef size_t bytes_z
    check_length(erased.shape[1], d, "erased")
    check_length(kept.shape[1], d, "kept")

    # Scratch of the decompositions, of all shapes that occur below.
    cdef int widest = max(mz, my, 1), tall = max(d, k, 1), squared = widest * widest
    cdef int lwork = 6 * squared + 80 * widest + 68 * tall
    cdef size_t size_work = (
        lwork + 5 * squared + 2 * widest + (2 * k + 3 * mz + 4 * my) * <size_t>d + mz * kz + my * ky
        + scratch_for(factor, max(k, mz + my)) + 1)

    # What is returned, rows of length d and short ones; few arrays, as each takes time.
    rows_a = np.empty((2 * mz + k, d))
    values_a = np.zeros(2 * mz + my + min(mz, my))
    cdef double[:, ::1] rows = rows_a
    cdef double[::1] values = values_a

    if factor.n_noise > factor.admitted:
        factor.prepare_kernel()
    cdef double* work = <double*>malloc(sizeof(double) * (size_work + 9 * widest))
    if work == NULL:
        raise MemoryError("no memory for the decompositions of a solve")
    cdef int* iwork = <int*>(work + size_work)

    # Columns of length d, or small squares, one after another in the pool.
    cdef double* small = work + lwork                       # coefficients of Qz in Qy, and spare,
    cdef double* M = small + squared                        # the same, kept
    cdef double* Y = M + squared                            # and their decompositions
    cdef double* Vn = Y + squared
    cdef double* K = Vn + squared
    cdef double* tau = K + squared
    cdef double* Cz = tau + 2 * widest                      # (d, kz), Sz T
    cdef double* Cy = Cz + <Py_ssize_t>kz * d               # (d, ky), Sy U
    cdef double* Qz = Cy + <Py_ssize_t>ky * d               # (d, mz)
    cdef double* Qy = Qz + <Py_ssize_t>mz * d               # (d, my)
    cdef double* N = Qy + <Py_ssize_t>my * d                # (d, mz), then R (d, mz + my)
    cdef double* R = N
    cdef double* Un = N + <Py_ssize_t>(mz + my) * d         # (d, mz)
    cdef double* spare = Un + <Py_ssize_t>mz * d            # (d, max(mz, my) + ...)
    cdef double* vt_z = spare + <Py_ssize_t>(k + 2 * my) * d
    cdef double* vt_y = vt_z + mz * kz
    cdef double* scratch = vt_y + my * ky
    cdef double* sigma_z = &values[0] if values.shape[0] else NULL
    cdef double* sines = sigma_z + mz
    cdef double* sigma_y = sines + mz
    cdef double* cosines = sigma_y + my
    cdef double* left = &rows[0, 0] if k else NULL
    cdef double* right = left + <Py_ssize_t>mz * d
    cdef double* white = right + <Py_ssize_t>mz * d
    cdef const double* Sz = &erased[0, 0] if kz else NULL
    cdef const double* Sy = &kept[0, 0] if ky else NULL

    with nogil:
        # 1. Bases of what is erased and kept, in whitened coordinates: A, B; Qz, Qy; Cz, Cy.
        memcpy(white, Sz, sizeof(double) * <size_t>d * kz)
        memcpy(white + <Py_ssize_t>kz * d, Sy, sizeof(double) * <size_t>d * ky)
        whiten_columns(factor, white, k, scratch)
        for i in range(mz):
            sines[i] = 1.0
        status = basis(d, kz, Sz, white, noise, relative, sigma_z, Qz, Cz, vt_z, work, lwork, iwork,
                       &rz, &cut_z)
        if status == STATUS_OK:
            status = basis(d, ky, Sy, white + <Py_ssize_t>kz * d, noise, relative, sigma_y, Qy, Cy,
                           vt_y, work, lwork, iwork, &ry, &cut_y)
    cdef int rank_kept = ry

    # 2. Principal angles; kept directions too close to the erased ones are given up or refused.
    if status == STATUS_OK and rz > 0 and ry > 0:
        tol_sine = noise / sigma_z[rz - 1] + noise / sigma_y[ry - 1]
        with nogil:
            while True:
                # The second pass makes the columns of N orthogonal to Qy to their own rounding.
                memcpy(N, Qz, sizeof(double) * <size_t>d * rz)
                orthogonalise(d, Qy, ry, N, rz, M)
                orthogonalise(d, Qy, ry, N, rz, small)
                if dropped == 0:
                    n_cos = min(rz, ry)
                    memcpy(small, M, sizeof(double) * <size_t>ry * rz)
                    status = svd(ry, rz, small, cosines, Y, Vn, work, lwork, iwork)
                    if status != STATUS_OK:
                        break
                status = svd(d, rz, N, sines, Un, Vn, work, lwork, iwork)
                if status != STATUS_OK:
                    break
                n_drop = 0
                for i in range(rz):
                    if (sines[i] <= tol_sine or sines[i] < drop_below) and n_drop < ry:
                        n_drop += 1
                if n_drop == 0:
                    break
                if not may_drop:
                    status = STATUS_INFEASIBLE
                    break
                # Principal vectors of the kept side are the eigenvectors of M M^T = Y diag(c^2)
                # Y^T, in ascending order: rotate the basis and let go of the last n_drop.
                dropped += n_drop
                gemm(b"N", b"T", ry, ry, rz, 1.0, M, ry, M, ry, 0.0, Y, ry)
                cython_lapack.dsyev(b"V", b"L", &ry, Y, &ry, Vn, work, &lwork, &info)
                if info != 0:
                    status = STATUS_NO_CONVERGENCE
                    break
                n_drop = ry - n_drop
                gemm(b"N", b"N", d, n_drop, ry, 1.0, Qy, d, Y, ry, 0.0, spare, d)
                memcpy(Qy, spare, sizeof(double) * <size_t>d * n_drop)
                gemm(b"N", b"N", d, n_drop, ry, 1.0, Cy, d, Y, ry, 0.0, spare, d)
                memcpy(Cy, spare, sizeof(double) * <size_t>d * n_drop)
                ry = n_drop
                if ry == 0:
                    break

    # 3. The factors.
    if status == STATUS_OK and rz > 0:
        with nogil:
            bytes_z = sizeof(double) * <size_t>d * rz
            distortion_unkept = dot(Cz, Cz, <Py_ssize_t>d * rz)
            if ry > 0:
                memcpy(R, Un, bytes_z)
                orthogonalise(d, Qy, ry, R, rz, small)
                memcpy(R + <Py_ssize_t>rz * d, Qy, sizeof(double) * <size_t>d * ry)
                gemm(b"N", b"T", d, rz, rz, 1.0, Cz, d, Vn, rz, 0.0, left, d)
            else:
                for i in range(rz):
                    sines[i] = 1.0
                memcpy(R, Qz, bytes_z)
                memcpy(left, Cz, bytes_z)
            whiten_transposed(factor, R, rz + ry, scratch)
            if ry > 0:
                gemm(b"T", b"N", ry, rz, d, 1.0, Cy, d, R, d, 0.0, small, ry)
                gemm(b"N", b"N", d, rz, ry, -1.0, R + <Py_ssize_t>rz * d, d, small, ry, 1.0, R, d)
            # left = Cz Vn for now: left K^-1 R^T = I - P.
            status = renew(d, rz, left, R, K, small, spare, iwork)
            if status == STATUS_OK:
                gemm(b"N", b"N", d, rz, rz, 1.0, left, d, small, rz, 0.0, spare, d)
                distortion = dot(spare, spare, <Py_ssize_t>d * rz)
                status = balanced(factor, rz, ry, Cz, Cy, Vn, R, left, right, K, tau, spare, small,
                                  work, lwork, iwork)
            if status == STATUS_OK:
                size = spectral_norm(d, rz, right, factor.scale, spare, small, work, lwork - rz)
                residual_z = relative_residual(d, rz, rz, left, right, Cz, sigma_z, False,
                                               factor.inverse, small, spare)
                # Where directions were dropped the others are mixtures: weigh them alike.
                for i in range(my):
                    work[i] = 1.0 if dropped else sigma_y[i]
                residual_y = relative_residual(d, rz, ry, left, right, Cy, work, True,
                                               factor.inverse, small, spare)
    free(work)
    if status != STATUS_OK:
        rz = rz if status == STATUS_INFEASIBLE else 0
    cdef double sine = 1.0, spread = 1.0
    for i in range(rz):
        sine = min(sine, sines[i])
    if rz > 0:
        spread = sigma_z[0] / sigma_z[rz - 1]
    if rank_kept > 0:
        spread = max(spread, sigma_y[0] / sigma_y[rank_kept - 1])
    return (
        status,
        rows_a[:rz if status == STATUS_OK else 0],
        rows_a[mz:mz + (rz if status == STATUS_OK else 0)],
        rows_a[2 * mz:],
        rz,
        rank_kept,
        cut_z,
        cut_y,
        dropped,
        values_a[2 * mz + my:2 * mz + my + n_cos],
        values_a[mz:mz + rz],
        tol_sine,
        distortion,
        distortion_unkept,
        size,
        residual_z,
        residual_y,
        1.0 / sine if sine > 0.0 else INFINITY,
        spread,
    )


cdef int balanced(Factor f, int rz, int ry, double* Cz, double* Cy, double* Vn, double* R,
                  double* left, double* right, double* K, double* tau, double* spare,
                  double* small, double* work, int lwork, int* pivots) noexcept nogil:
    """left, right from R^T (Cz Vn) = I: orthonormal `left`, and both constraints on Sz, Sy."""
    cdef int d = f.width, status, i, j
    cdef size_t bytes_z = sizeof(double) * <size_t>d * rz
    memcpy(spare, Cz, bytes_z)
    scale_rows(f.inverse, spare, d, rz)
    status = triangular(d, rz, spare, tau, work, lwork)
    if status != STATUS_OK:
        return status
    # K := Rz, upper triangular; small := Rz Vn, or Rz where nothing is kept.
    for j in range(rz):
        for i in range(rz):
            K[j * rz + i] = spare[<Py_ssize_t>j * d + i] if i <= j else 0.0
    if rz == 1:
        K[0] = tau[0]
    for i in range(rz):
        if K[i * rz + i] == 0.0:
            return STATUS_SINGULAR
    memcpy(left, Cz, bytes_z)
    cython_blas.dtrsm(b"R", b"U", b"N", b"N", &d, &rz, &ONE, K, &rz, left, &d)
    if ry > 0:
        gemm(b"N", b"T", rz, rz, rz, 1.0, K, rz, Vn, rz, 0.0, small, rz)
    else:
        memcpy(small, K, sizeof(double) * <size_t>rz * rz)
    gemm(b"N", b"T", d, rz, rz, 1.0, R, d, small, rz, 0.0, right, d)
    if ry > 0:
        memcpy(spare, Cy, sizeof(double) * <size_t>d * ry)
        scale_rows(f.inverse, spare, d, ry)
        status = orthonormal(d, ry, spare, tau, work, lwork)
        if status != STATUS_OK:
            return status
        scale_rows(f.scale, right, d, rz)
        orthogonalise(d, spare, ry, right, rz, small)
        scale_rows(f.inverse, right, d, rz)
    return renew(d, rz, left, right, K, small, spare, pivots)
