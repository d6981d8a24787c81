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

Q and Rz are the QR factors of D^-1 Cz. For any factor L, the last four lines make |P Sz| / |Sz| and
|P Sy - Sy| / |Sy| a few roundings times |P|: `left` has the column space of Sz for any T, and is
orthonormal in units of D, so that |right| equals |I - P|, and ``left right^T`` has no cancellation;
the corrections of `right` use Sy and Sz themselves, with components off the support of L. The
correction of R in whitened coordinates squares the rounding error of the triangular solves.

Failures are status codes.
"""

import numpy as np

from libc.math cimport INFINITY, sqrt
from libc.string cimport memcpy
from scipy.linalg cimport cython_blas, cython_lapack

from splince_fast._kernels.factor cimport (
    STATUS_INFEASIBLE, STATUS_NO_CONVERGENCE, STATUS_OK, STATUS_SINGULAR, Factor, gemm, scale_rows,
    whiten_columns, whiten_transposed
)
from splince_fast._kernels.shapes cimport check_length

cdef double ONE = 1.0


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


cdef struct Work:
    # Memory for LAPACK and for intermediate results.
    double* numbers
    int size
    int* integers
    double* small  # square matrix
    double* spare  # columns of length d


cdef int svd(int m, int n, double* a, double* s, double* u, double* vt, Work* w) noexcept nogil:
    """Compute the thin SVD of a, (m, n); a is overwritten."""
    cdef int mn = m if m < n else n, info = 0, one = 1, i
    if n == 1 and m > 0:
        # A single column, the most frequent case, needs no iteration; dnrm2 avoids overflow.
        s[0] = cython_blas.dnrm2(&m, a, &one)
        vt[0] = 1.0
        for i in range(m):
            u[i] = a[i] / s[0] if s[0] > 0.0 else 0.0
    elif mn > 0:
        cython_lapack.dgesdd(b"S", &m, &n, a, &m, s, u, &m, vt, &mn, w.numbers, &w.size, w.integers,
                             &info)
    return STATUS_NO_CONVERGENCE if info != 0 else STATUS_OK


cdef int orthonormalise(int d, int r, double* a, double* tau, Work* w) noexcept nogil:
    """Replace a, (d, r) with r <= d, by an orthonormal basis of its column space."""
    cdef int info = 0, one = 1, i
    cdef double norm
    if r == 1:  # a reflector would lose entries below the rounding error of the largest one
        norm = cython_blas.dnrm2(&d, a, &one)
        for i in range(d):
            a[i] /= norm
        return STATUS_OK
    cython_lapack.dgeqrf(&d, &r, a, &d, tau, w.numbers, &w.size, &info)
    cython_lapack.dorgqr(&d, &r, &r, a, &d, tau, w.numbers, &w.size, &info)
    return STATUS_NO_CONVERGENCE if info != 0 else STATUS_OK


cdef int span_basis(int d, int k, const double* span, const double* whitened, double relative,
                    double* sigma, double* q, double* coordinates, double* vt, Work* w, int* rank,
                    double* cut) noexcept nogil:
    """Compute q = whitened T, an orthonormal basis, `coordinates` = span T, `rank` and `cut`.

    `rank` counts the singular values above `cut`, which is at least `relative` times the largest.
    """
    cdef int mn = d if d < k else k, status, i
    cdef Py_ssize_t j
    if mn == 0:
        return STATUS_OK
    # `coordinates` holds the copy that the decomposition overwrites.
    memcpy(coordinates, whitened, sizeof(double) * <size_t>d * k)
    status = svd(d, k, coordinates, sigma, q, vt, w)
    if status != STATUS_OK:
        return status
    cut[0] = max(cut[0], relative * sigma[0])
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


cdef int normalise_right(int d, int r, double* left, double* right, double* K,
                         Work* w) noexcept nogil:
    """Compute K = right^T left, K^-1 (in `w.small`), and right := right K^-T."""
    cdef int info = 0, i
    gemm(b"T", b"N", r, r, d, 1.0, right, d, left, d, 0.0, K, r)
    for i in range(r * r):
        w.small[i] = 0.0
    for i in range(r):
        w.small[i * r + i] = 1.0
    cython_lapack.dgesv(&r, &r, K, &r, w.integers, w.small, &r, &info)
    if info != 0:
        return STATUS_SINGULAR
    memcpy(w.spare, right, sizeof(double) * <size_t>d * r)
    gemm(b"N", b"T", d, r, r, 1.0, w.spare, d, w.small, r, 0.0, right, d)
    return STATUS_OK


cdef int scaled_factors(Factor f, int rz, int ry, double* Cz, double* Cy, double* Vn, double* R,
                        double* left, double* right, double* K, double* tau,
                        Work* w) noexcept nogil:
    """Compute the last four lines of equations above; requires R^T (Cz Vn) = I."""
    cdef int d = f.width, status, i, j, info = 0
    cdef size_t bytes_z = sizeof(double) * <size_t>d * rz
    memcpy(w.spare, Cz, bytes_z)
    scale_rows(f.inverse, w.spare, d, rz)
    cython_lapack.dgeqrf(&d, &rz, w.spare, &d, tau, w.numbers, &w.size, &info)
    # K := Rz, upper triangular; small := Rz Vn, or Rz if nothing is kept.
    for j in range(rz):
        for i in range(rz):
            K[j * rz + i] = w.spare[<Py_ssize_t>j * d + i] if i <= j else 0.0
        if K[j * rz + j] == 0.0:
            return STATUS_SINGULAR
    memcpy(left, Cz, bytes_z)
    cython_blas.dtrsm(b"R", b"U", b"N", b"N", &d, &rz, &ONE, K, &rz, left, &d)
    if ry > 0:
        gemm(b"N", b"T", rz, rz, rz, 1.0, K, rz, Vn, rz, 0.0, w.small, rz)
    else:
        memcpy(w.small, K, sizeof(double) * <size_t>rz * rz)
    gemm(b"N", b"T", d, rz, rz, 1.0, R, d, w.small, rz, 0.0, right, d)
    if ry > 0:
        memcpy(w.spare, Cy, sizeof(double) * <size_t>d * ry)
        scale_rows(f.inverse, w.spare, d, ry)
        status = orthonormalise(d, ry, w.spare, tau, w)
        if status != STATUS_OK:
            return status
        scale_rows(f.scale, right, d, rz)
        orthogonalise(d, w.spare, ry, right, rz, w.small)
        scale_rows(f.inverse, right, d, rz)
    return normalise_right(d, rz, left, right, K, w)


cdef double relative_residual(Factor f, int r, int k, const double* left, const double* right,
                              const double* C, const double* sigma, bint kept,
                              Work* w) noexcept nogil:
    """Return |(P - I) C diag(sigma)| / |C diag(sigma)| if `kept`, else with P, in units of D."""
    cdef int d = f.width
    cdef Py_ssize_t i, j
    cdef double residual = 0.0, total = 0.0, c, e
    gemm(b"T", b"N", r, k, d, 1.0, <double*>right, d, <double*>C, d, 0.0, w.small, r)
    gemm(b"N", b"N", d, k, r, 1.0, <double*>left, d, w.small, r, 0.0, w.spare, d)
    for j in range(k):
        for i in range(d):
            c = C[j * d + i] * f.inverse[i] * sigma[j]
            e = w.spare[j * d + i] * f.inverse[i] * sigma[j]
            if not kept:
                e = c - e
            total += c * c
            residual += e * e
    return sqrt(residual / total) if total > 0.0 else 0.0


cdef double spectral_norm(Factor f, int r, const double* right, Work* w) noexcept nogil:
    """Return the spectral norm of D right: infinity if its square overflows, NaN if it has NaN."""
    cdef int d = f.width, info = 0, size = w.size - r
    memcpy(w.spare, right, sizeof(double) * <size_t>d * r)
    scale_rows(f.scale, w.spare, d, r)
    cdef double squares = dot(w.spare, w.spare, <Py_ssize_t>d * r)
    if r == 1 or not squares < INFINITY:
        return sqrt(squares)
    gemm(b"T", b"N", r, r, d, 1.0, w.spare, d, w.spare, d, 0.0, w.small, r)
    cython_lapack.dsyev(b"N", b"L", &r, w.small, &r, w.numbers, w.numbers + r, &size, &info)
    return sqrt(max(0.0, w.numbers[r - 1]))


def oblique(Factor factor not None, const double[:, ::1] erased not None,
            const double[:, ::1] kept not None, *, double noise, double relative,
            double drop_below, bint may_drop):
    """Return the first fields of `splince_fast._solve.oblique.Solution`, up to `spread`.

    Singular values of a whitened span up to `noise`, or up to `relative` times the largest, count
    as zero. Kept directions whose angle to the erased span has a sine below `drop_below` are
    dropped; unless `may_drop`, the status is then STATUS_INFEASIBLE.
    """
    cdef int d = factor.width, kz = <int>erased.shape[0], ky = <int>kept.shape[0], k = kz + ky
    cdef int mz = min(d, kz), my = min(d, ky)
    cdef int rz = 0, ry = 0, status = STATUS_OK, n_drop, info = 0, i, n_cos = 0, dropped = 0
    cdef double tol_sine = 0.0, distortion = 0.0, distortion_leace = 0.0, right_norm = 0.0
    cdef double cut_z = noise, cut_y = noise, residual_z = 0.0, residual_y = 0.0
    cdef double sine = 1.0, spread = 1.0
    check_length(erased.shape[1], d, "erased")
    check_length(kept.shape[1], d, "kept")
    if factor.n_noise > factor.admitted:
        factor.prepare_null_basis()

    # The returned arrays are slices of two allocations, because each allocation takes time.
    rows_a = np.empty((2 * mz + k, d))
    values_a = np.empty(2 * mz + my + min(mz, my))
    cdef double[:, ::1] rows = rows_a
    cdef double[::1] values = values_a

    # Work memory: numbers for LAPACK, which suffice for the largest decomposition below; its
    # integers; small square matrices; columns of length d.
    cdef int widest = max(mz, my, 1), square = widest * widest
    cdef Work w
    w.size = 6 * square + 80 * widest + 68 * max(d, k, 1)
    cdef double[::1] memory = np.empty(
        w.size + 9 * widest + 5 * square + 2 * widest + (2 * k + 3 * mz + 4 * my) * <size_t>d
        + mz * kz + my * ky + factor.scratch * <size_t>max(k, mz + my) + 1)
    w.numbers = &memory[0]
    w.integers = <int*>(w.numbers + w.size)
    w.small = w.numbers + w.size + 9 * widest
    cdef double* M = w.small + square                       # Qy^T Qz
    cdef double* Y = M + square                             # singular vectors of M
    cdef double* Vn = Y + square
    cdef double* K = Vn + square
    cdef double* tau = K + square
    cdef double* Cz = tau + 2 * widest                      # (d, kz), Sz T
    cdef double* Cy = Cz + <Py_ssize_t>kz * d               # (d, ky), Sy U
    cdef double* Qz = Cy + <Py_ssize_t>ky * d               # (d, mz)
    cdef double* Qy = Qz + <Py_ssize_t>mz * d               # (d, my)
    cdef double* N = Qy + <Py_ssize_t>my * d                # (d, mz), then R (d, mz + my)
    cdef double* R = N
    cdef double* Un = N + <Py_ssize_t>(mz + my) * d         # (d, mz)
    w.spare = Un + <Py_ssize_t>mz * d                       # (d, k + 2 my)
    cdef double* vt_z = w.spare + <Py_ssize_t>(k + 2 * my) * d
    cdef double* vt_y = vt_z + mz * kz
    cdef double* scratch = vt_y + my * ky
    # `w.numbers` stands for the address of an empty array: memcpy and offsets of NULL are
    # undefined.
    cdef double* sigma_z = &values[0] if k else w.numbers
    cdef double* sines = sigma_z + mz
    cdef double* sigma_y = sines + mz
    cdef double* cosines = sigma_y + my
    cdef double* left = &rows[0, 0] if k else w.numbers
    cdef double* right = left + <Py_ssize_t>mz * d
    cdef double* whitened = right + <Py_ssize_t>mz * d
    cdef const double* Sz = &erased[0, 0] if kz else w.numbers
    cdef const double* Sy = &kept[0, 0] if ky else w.numbers

    with nogil:
        # 1. Whitened spans A, B; orthonormal bases Qz, Qy; the spans in these bases, Cz, Cy.
        memcpy(whitened, Sz, sizeof(double) * <size_t>d * kz)
        memcpy(whitened + <Py_ssize_t>kz * d, Sy, sizeof(double) * <size_t>d * ky)
        whiten_columns(factor, whitened, k, scratch)
        status = span_basis(d, kz, Sz, whitened, relative, sigma_z, Qz, Cz, vt_z, &w, &rz, &cut_z)
        if status == STATUS_OK:
            status = span_basis(d, ky, Sy, whitened + <Py_ssize_t>kz * d, relative, sigma_y, Qy, Cy,
                                vt_y, &w, &ry, &cut_y)
    cdef int rank_kept = ry

    # 2. Principal angles; kept directions too close to the erased span are dropped or refused.
    if status == STATUS_OK and rz > 0 and ry > 0:
        tol_sine = noise / sigma_z[rz - 1] + noise / sigma_y[ry - 1]
        with nogil:
            while ry > 0:
                # Twice: the errors of the second pass are small relative to short columns of N.
                memcpy(N, Qz, sizeof(double) * <size_t>d * rz)
                orthogonalise(d, Qy, ry, N, rz, M)
                orthogonalise(d, Qy, ry, N, rz, w.small)
                if dropped == 0:
                    n_cos = min(rz, ry)
                    memcpy(w.small, M, sizeof(double) * <size_t>ry * rz)
                    status = svd(ry, rz, w.small, cosines, Y, Vn, &w)
                    if status != STATUS_OK:
                        break
                status = svd(d, rz, N, sines, Un, Vn, &w)
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
                # Rotate the basis to the principal vectors, the eigenvectors of
                # M M^T = Y diag(c^2) Y^T in ascending order of c, and drop the last n_drop.
                gemm(b"N", b"T", ry, ry, rz, 1.0, M, ry, M, ry, 0.0, Y, ry)
                cython_lapack.dsyev(b"V", b"L", &ry, Y, &ry, Vn, w.numbers, &w.size, &info)
                if info != 0:
                    status = STATUS_NO_CONVERGENCE
                    break
                dropped += n_drop
                n_drop = ry - n_drop
                gemm(b"N", b"N", d, n_drop, ry, 1.0, Qy, d, Y, ry, 0.0, w.spare, d)
                memcpy(Qy, w.spare, sizeof(double) * <size_t>d * n_drop)
                gemm(b"N", b"N", d, n_drop, ry, 1.0, Cy, d, Y, ry, 0.0, w.spare, d)
                memcpy(Cy, w.spare, sizeof(double) * <size_t>d * n_drop)
                ry = n_drop

    # 3. The factors.
    if status == STATUS_OK and rz > 0:
        with nogil:
            distortion_leace = dot(Cz, Cz, <Py_ssize_t>d * rz)
            if ry > 0:
                memcpy(R, Un, sizeof(double) * <size_t>d * rz)
                orthogonalise(d, Qy, ry, R, rz, w.small)
                memcpy(R + <Py_ssize_t>rz * d, Qy, sizeof(double) * <size_t>d * ry)
                gemm(b"N", b"T", d, rz, rz, 1.0, Cz, d, Vn, rz, 0.0, left, d)
            else:
                memcpy(R, Qz, sizeof(double) * <size_t>d * rz)
                memcpy(left, Cz, sizeof(double) * <size_t>d * rz)
                for i in range(rz):
                    sines[i] = 1.0
            whiten_transposed(factor, R, rz + ry, scratch)
            if ry > 0:
                gemm(b"T", b"N", ry, rz, d, 1.0, Cy, d, R, d, 0.0, w.small, ry)
                gemm(b"N", b"N", d, rz, ry, -1.0, R + <Py_ssize_t>rz * d, d, w.small, ry, 1.0, R, d)
            # Until the call of `scaled_factors`, left = Cz Vn, with left K^-1 R^T = I - P.
            status = normalise_right(d, rz, left, R, K, &w)
            if status == STATUS_OK:
                gemm(b"N", b"N", d, rz, rz, 1.0, left, d, w.small, rz, 0.0, w.spare, d)
                distortion = dot(w.spare, w.spare, <Py_ssize_t>d * rz)
                status = scaled_factors(factor, rz, ry, Cz, Cy, Vn, R, left, right, K, tau, &w)
            if status == STATUS_OK:
                right_norm = spectral_norm(factor, rz, right, &w)
                residual_z = relative_residual(factor, rz, rz, left, right, Cz, sigma_z, False, &w)
                # If directions were dropped, the basis was rotated, and sigma_y does not belong to
                # its vectors: use equal weights.
                for i in range(my):
                    w.numbers[i] = 1.0 if dropped else sigma_y[i]
                residual_y = relative_residual(factor, rz, ry, left, right, Cy, w.numbers, True, &w)
    if status != STATUS_OK and status != STATUS_INFEASIBLE:
        rz = 0
    for i in range(rz):
        sine = min(sine, sines[i])
    if rz > 0:
        spread = sigma_z[0] / sigma_z[rz - 1]
    if rank_kept > 0:
        spread = max(spread, sigma_y[0] / sigma_y[rank_kept - 1])
    cdef int r = rz if status == STATUS_OK else 0
    return (
        status, rows_a[:r], rows_a[mz:mz + r], rows_a[2 * mz:], rz, rank_kept, cut_z, cut_y,
        dropped, values_a[2 * mz + my:2 * mz + my + n_cos], values_a[mz:mz + rz], distortion,
        distortion_leace, right_norm, residual_z, residual_y,
        1.0 / sine if sine > 0.0 else INFINITY, spread,
    )
