"""The oblique projection that erases one span and keeps another, from a factor of S.

A span is a cross-covariance of x with labels. Let L be the factor of S, D the diagonal matrix of
the standard deviations, and Sz and Sy the erased and the kept span, with columns of length d::

    A = L^+ Sz,  B = L^+ Sy,   Qz = orth(A) = A T,  Qy = orth(B) = B U,   Cz = Sz T,  Cy = Sy U
    N = (I - Qy Qy^T) Qz = Un diag(s) Vn^T                  s: sines of the principal angles
    R = (L^+)^T Un,  R -= (L^+)^T Qy (Cy^T R),  K = R^T Cz Vn           (= diag(s) but for rounding)

    left = Cz Rz^-1,     D^-1 Cz = Q Rz                      left is orthonormal in units of D
    right = R K^-T (Rz Vn)^T,     P = I - left right^T
    right -= D^-1 Qc Qc^T D right,   Qc = orth(D^-1 Cy)      Cov(x, y) itself is kept
    right := right K'^-T,            K' = right^T left       Cov(x, z) itself is erased

Q and Rz are the QR factors of D^-1 Cz. The last four lines make the constraints hold independently
of the accuracy of L. For any T, `left` has the same column space as Sz, up to a few roundings. As
`left` is orthonormal in units of D, |right| in the same units equals |I - P|, and
``left right^T`` has no cancellation. The corrections of `right` use Sy and Sz themselves, including
components off the support of L, where the variance is below the rounding level of S. Hence, for any
factor, |P Sz| / |Sz| and |P Sy - Sy| / |Sy| are a few roundings times |P|. The correction of R in
whitened coordinates squares the rounding error of the triangular solves, and R stays optimal.

All functions run without the GIL; failures are status codes.
"""

import numpy as np

from libc.math cimport INFINITY, sqrt
from libc.string cimport memcpy
from scipy.linalg cimport cython_blas, cython_lapack

from splince_fast._kernels.factor cimport (
    STATUS_INFEASIBLE, STATUS_NO_CONVERGENCE, STATUS_OK, STATUS_SINGULAR, Factor, dot, gemm,
    scale_rows, scratch_for, whiten_columns, whiten_transposed
)
from splince_fast._kernels.shapes cimport check_length

cdef double ONE = 1.0


cdef int svd(int m, int n, double* a, double* s, double* u, double* vt, double* work, int lwork,
             int* iwork) noexcept nogil:
    """Compute the thin SVD of a, (m, n); a is overwritten."""
    cdef int mn = m if m < n else n, info = 0, one = 1, i
    if n == 1 and m > 0:
        # A single column, the most frequent case, needs no iteration; dnrm2 avoids overflow.
        s[0] = cython_blas.dnrm2(&m, a, &one)
        vt[0] = 1.0
        for i in range(m):
            u[i] = a[i] / s[0] if s[0] > 0.0 else 0.0
    elif mn > 0:
        cython_lapack.dgesdd(b"S", &m, &n, a, &m, s, u, &m, vt, &mn, work, &lwork, iwork, &info)
    return STATUS_NO_CONVERGENCE if info != 0 else STATUS_OK


cdef int orthonormalise(int d, int r, double* a, double* tau, double* work,
                        int lwork) noexcept nogil:
    """Replace a, (d, r) with r <= d, by an orthonormal basis of its column space."""
    cdef int info = 0, one = 1, i
    cdef double norm
    if r == 1:  # a reflector would lose entries below the rounding error of the largest one
        norm = cython_blas.dnrm2(&d, a, &one)
        for i in range(d):
            a[i] /= norm
        return STATUS_OK
    cython_lapack.dgeqrf(&d, &r, a, &d, tau, work, &lwork, &info)
    cython_lapack.dorgqr(&d, &r, &r, a, &d, tau, work, &lwork, &info)
    return STATUS_NO_CONVERGENCE if info != 0 else STATUS_OK


cdef int span_basis(int d, int k, const double* span, const double* whitened, double noise,
                    double relative, double* sigma, double* q, double* coordinates, double* vt,
                    double* work, int lwork, int* iwork, int* rank,
                    double* cut) noexcept nogil:
    """Compute q = whitened T, an orthonormal basis of the columns, and `coordinates` = span T.

    `rank` is the number of singular values of `whitened` above `cut`. `cut` is the maximum of
    `noise`, the rounding level of the data, and `relative` times the largest singular value.
    """
    cdef int mn = d if d < k else k, status, i
    cdef Py_ssize_t j
    rank[0] = 0
    cut[0] = noise
    if mn == 0:
        return STATUS_OK
    # `coordinates` holds the copy that the decomposition overwrites.
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
    """Make n orthogonal to qy: compute m = qy^T n, (ry, rz), and n -= qy m."""
    gemm(b"T", b"N", ry, rz, d, 1.0, <double*>qy, d, n, d, 0.0, m, ry)
    gemm(b"N", b"N", d, rz, ry, -1.0, <double*>qy, d, m, ry, 1.0, n, d)


cdef int normalise_right(int d, int r, double* left, double* right, double* K, double* inverse,
                         double* spare, int* pivots) noexcept nogil:
    """Compute right := right K^-T with K = right^T left, so that right^T left = I."""
    cdef int info = 0, i
    gemm(b"T", b"N", r, r, d, 1.0, right, d, left, d, 0.0, K, r)
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
                              const double* inverse_scale, double* small,
                              double* removed) noexcept nogil:
    """Return the relative residual of a constraint, for features scaled to unit standard deviation.

    With C = `coordinates`, the residual is |(P - I) C diag(sigma)| / |C diag(sigma)| if `kept`,
    else |P C diag(sigma)| / |C diag(sigma)|.
    """
    cdef Py_ssize_t i, j
    cdef double residual = 0.0, total = 0.0, c, e
    gemm(b"T", b"N", r, k, d, 1.0, <double*>right, d, <double*>coordinates, d, 0.0, small, r)
    gemm(b"N", b"N", d, k, r, 1.0, <double*>left, d, small, r, 0.0, removed, d)
    for j in range(k):
        for i in range(d):
            c = coordinates[j * d + i] * inverse_scale[i] * sigma[j]
            e = removed[j * d + i] * inverse_scale[i] * sigma[j]
            if not kept:
                e = c - e
            total += c * c
            residual += e * e
    return sqrt(residual / total) if total > 0.0 else 0.0


cdef double spectral_norm(int d, int r, const double* right, const double* scale, double* scaled,
                          double* gram, double* work, int lwork) noexcept nogil:
    """Return the spectral norm |D right|, where D is the diagonal matrix of `scale`.

    If the squares overflow float64, the result is infinity; if a number is NaN, it is NaN.
    """
    cdef int info = 0
    memcpy(scaled, right, sizeof(double) * <size_t>d * r)
    scale_rows(scale, scaled, d, r)
    cdef double squares = dot(scaled, scaled, <Py_ssize_t>d * r)
    if r == 1 or not squares < INFINITY:
        return sqrt(squares)
    gemm(b"T", b"N", r, r, d, 1.0, scaled, d, scaled, d, 0.0, gram, r)
    cython_lapack.dsyev(b"N", b"L", &r, gram, &r, work, work + r, &lwork, &info)
    return sqrt(max(0.0, work[r - 1]))


def oblique(Factor factor not None, const double[:, ::1] erased not None,
            const double[:, ::1] kept not None, *, double noise, double relative,
            double drop_below, bint may_drop):
    """Compute the oblique projection that erases one span and keeps another.

    Parameters
    ----------
    factor : Factor
        Factor of S.
    erased, kept : (kz, d), (k - kz, d) float64
        Spans: covariances of x with label columns of unit standard deviation.
    noise : float
        Rounding level of whitened spans.
    relative : float
        Singular values of a whitened span below this fraction of the largest are ignored.
    drop_below : float
        Kept directions are dropped if the sine of the angle to the erased span is below this value.
    may_drop : bool
        Whether kept directions may be dropped. If not, the status is STATUS_INFEASIBLE where a
        direction would be dropped.

    Returns
    -------
    tuple
        Fields of `splince_fast._solve.oblique.Solution`, in order, up to and including `spread`.
    """
    cdef int d = factor.width, kz = <int>erased.shape[0], ky = <int>kept.shape[0], k = kz + ky
    cdef int mz = min(d, kz), my = min(d, ky)
    cdef int rz = 0, ry = 0, status = STATUS_OK, n_drop, info = 0, i, n_cos = 0, dropped = 0
    cdef double tol_sine = 0.0, distortion = 0.0, distortion_leace = 0.0, right_norm = 0.0
    cdef double cut_z = noise, cut_y = noise, residual_z = 0.0, residual_y = 0.0
    cdef size_t bytes_z
    check_length(erased.shape[1], d, "erased")
    check_length(kept.shape[1], d, "kept")

    # Size of the scratch memory, which suffices for the largest decomposition below.
    cdef int widest = max(mz, my, 1), longest = max(d, k, 1), square_size = widest * widest
    cdef int lwork = 6 * square_size + 80 * widest + 68 * longest
    cdef size_t work_size = (
        lwork + 5 * square_size + 2 * widest + (2 * k + 3 * mz + 4 * my) * <size_t>d
        + mz * kz + my * ky
        + scratch_for(factor, max(k, mz + my)) + 1)

    # The returned arrays are slices of two allocations, because each allocation takes time.
    rows_a = np.empty((2 * mz + k, d))
    values_a = np.zeros(2 * mz + my + min(mz, my))
    cdef double[:, ::1] rows = rows_a
    cdef double[::1] values = values_a

    if factor.n_noise > factor.admitted:
        factor.prepare_null_basis()
    cdef double[::1] memory = np.empty(work_size + 9 * widest)
    cdef double* work = &memory[0]
    cdef int* iwork = <int*>(work + work_size)

    # Consecutive parts of the scratch memory: small square matrices, then columns of length d.
    cdef double* small = work + lwork                       # work memory for a square matrix
    cdef double* M = small + square_size                    # Qy^T Qz
    cdef double* Y = M + square_size                        # singular vectors of M
    cdef double* Vn = Y + square_size
    cdef double* K = Vn + square_size
    cdef double* tau = K + square_size
    cdef double* Cz = tau + 2 * widest                      # (d, kz), Sz T
    cdef double* Cy = Cz + <Py_ssize_t>kz * d               # (d, ky), Sy U
    cdef double* Qz = Cy + <Py_ssize_t>ky * d               # (d, mz)
    cdef double* Qy = Qz + <Py_ssize_t>mz * d               # (d, my)
    cdef double* N = Qy + <Py_ssize_t>my * d                # (d, mz), then R (d, mz + my)
    cdef double* R = N
    cdef double* Un = N + <Py_ssize_t>(mz + my) * d         # (d, mz)
    cdef double* spare = Un + <Py_ssize_t>mz * d            # (d, k + 2 my), work memory
    cdef double* vt_z = spare + <Py_ssize_t>(k + 2 * my) * d
    cdef double* vt_y = vt_z + mz * kz
    cdef double* scratch = vt_y + my * ky
    # `work` stands for the address of an empty array: memcpy and offsets of NULL are undefined.
    cdef double* sigma_z = &values[0] if values.shape[0] else work
    cdef double* sines = sigma_z + mz
    cdef double* sigma_y = sines + mz
    cdef double* cosines = sigma_y + my
    cdef double* left = &rows[0, 0] if k else work
    cdef double* right = left + <Py_ssize_t>mz * d
    cdef double* whitened = right + <Py_ssize_t>mz * d
    cdef const double* Sz = &erased[0, 0] if kz else work
    cdef const double* Sy = &kept[0, 0] if ky else work

    with nogil:
        # 1. Whitened spans A, B; orthonormal bases Qz, Qy; the spans in these bases, Cz, Cy.
        memcpy(whitened, Sz, sizeof(double) * <size_t>d * kz)
        memcpy(whitened + <Py_ssize_t>kz * d, Sy, sizeof(double) * <size_t>d * ky)
        whiten_columns(factor, whitened, k, scratch)
        for i in range(mz):
            sines[i] = 1.0
        status = span_basis(d, kz, Sz, whitened, noise, relative, sigma_z, Qz, Cz, vt_z, work,
                            lwork, iwork, &rz, &cut_z)
        if status == STATUS_OK:
            status = span_basis(d, ky, Sy, whitened + <Py_ssize_t>kz * d, noise, relative, sigma_y,
                                Qy, Cy, vt_y, work, lwork, iwork, &ry, &cut_y)
    cdef int rank_kept = ry

    # 2. Principal angles; kept directions too close to the erased span are dropped or refused.
    if status == STATUS_OK and rz > 0 and ry > 0:
        tol_sine = noise / sigma_z[rz - 1] + noise / sigma_y[ry - 1]
        with nogil:
            while True:
                # Orthogonalise twice: the rounding errors of the second pass are small relative to
                # the columns of N themselves, even if these are short.
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
                # The principal vectors of the kept span are the eigenvectors of
                # M M^T = Y diag(c^2) Y^T, in ascending order of the cosines c. Rotate the basis and
                # drop the last n_drop vectors, which are closest to the erased span.
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
            distortion_leace = dot(Cz, Cz, <Py_ssize_t>d * rz)
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
            # Until the call of `scaled_factors`, left = Cz Vn, with left K^-1 R^T = I - P.
            status = normalise_right(d, rz, left, R, K, small, spare, iwork)
            if status == STATUS_OK:
                gemm(b"N", b"N", d, rz, rz, 1.0, left, d, small, rz, 0.0, spare, d)
                distortion = dot(spare, spare, <Py_ssize_t>d * rz)
                status = scaled_factors(factor, rz, ry, Cz, Cy, Vn, R, left, right, K, tau, spare,
                                        small, work, lwork, iwork)
            if status == STATUS_OK:
                right_norm = spectral_norm(d, rz, right, factor.scale, spare, small, work,
                                           lwork - rz)
                residual_z = relative_residual(d, rz, rz, left, right, Cz, sigma_z, False,
                                               factor.inverse, small, spare)
                # If directions were dropped, the basis was rotated, and sigma_y does not belong to
                # its vectors: use equal weights.
                for i in range(my):
                    work[i] = 1.0 if dropped else sigma_y[i]
                residual_y = relative_residual(d, rz, ry, left, right, Cy, work, True,
                                               factor.inverse, small, spare)
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
        distortion,
        distortion_leace,
        right_norm,
        residual_z,
        residual_y,
        1.0 / sine if sine > 0.0 else INFINITY,
        spread,
    )


cdef int scaled_factors(Factor f, int rz, int ry, double* Cz, double* Cy, double* Vn, double* R,
                        double* left, double* right, double* K, double* tau, double* spare,
                        double* small, double* work, int lwork, int* pivots) noexcept nogil:
    """Compute `left`, for which D^-1 `left` is orthonormal, and `right`; requires R^T (Cz Vn) = I.

    These are the last four lines of equations in the module docstring.
    """
    cdef int d = f.width, status, i, j, info = 0
    cdef size_t bytes_z = sizeof(double) * <size_t>d * rz
    memcpy(spare, Cz, bytes_z)
    scale_rows(f.inverse, spare, d, rz)
    cython_lapack.dgeqrf(&d, &rz, spare, &d, tau, work, &lwork, &info)
    # K := Rz, upper triangular; small := Rz Vn, or Rz if nothing is kept.
    for j in range(rz):
        for i in range(rz):
            K[j * rz + i] = spare[<Py_ssize_t>j * d + i] if i <= j else 0.0
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
        status = orthonormalise(d, ry, spare, tau, work, lwork)
        if status != STATUS_OK:
            return status
        scale_rows(f.scale, right, d, rz)
        orthogonalise(d, spare, ry, right, rz, small)
        scale_rows(f.inverse, right, d, rz)
    return normalise_right(d, rz, left, right, K, small, spare, pivots)
