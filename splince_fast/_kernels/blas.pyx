"""Products of blocks of rows on BLAS, added up, and the table of routines it calls.

Layout is decided here and nowhere else: matrices of the state are Fortran-ordered with only the
lower triangle meaningful, blocks of rows are C-ordered, that is, Fortran-ordered (d, n).
"""

from libc.stdint cimport uintptr_t

from scipy.linalg cimport cython_blas, cython_lapack


def use_scipy_routines() -> None:
    """Point every routine at the BLAS and LAPACK that SciPy was built with."""
    active.dsyrk = <syrk_f64>cython_blas.dsyrk
    active.ssyrk = <syrk_f32>cython_blas.ssyrk
    active.dgemm = <gemm_f64>cython_blas.dgemm
    active.dtrsm = <trsm_f64>cython_blas.dtrsm
    active.dpotrf = <potrf_f64>cython_lapack.dpotrf


def use_routines(dict addresses) -> None:
    """Point every routine at the given addresses (of LP64 Fortran symbols).

    Parameters
    ----------
    addresses : dict of str to int
        Addresses of ``dsyrk``, ``ssyrk``, ``dgemm``, ``dtrsm`` and ``dpotrf``; all are required,
        so that no call ever mixes two libraries.
    """
    cdef Routines table
    table.dsyrk = <syrk_f64><uintptr_t>addresses["dsyrk"]
    table.ssyrk = <syrk_f32><uintptr_t>addresses["ssyrk"]
    table.dgemm = <gemm_f64><uintptr_t>addresses["dgemm"]
    table.dtrsm = <trsm_f64><uintptr_t>addresses["dtrsm"]
    table.dpotrf = <potrf_f64><uintptr_t>addresses["dpotrf"]
    global active
    active = table


def syrk_f64_into(double[:, ::1] rows, double[::1, :] scatter) -> None:
    """scatter := scatter + rows^T rows, in float64, lower triangle.

    Parameters
    ----------
    rows : (m, d) float64, C-contiguous
    scatter : (d, d) float64, Fortran-contiguous, changed in place
    """
    cdef int d = <int>rows.shape[1], m = <int>rows.shape[0]
    cdef double one = 1.0
    if m == 0 or d == 0:
        return
    with nogil:
        active.dsyrk(b"L", b"N", &d, &m, &one, &rows[0, 0], &d, &one, &scatter[0, 0], &d)


def syrk_f32_out(float[:, ::1] rows, float[::1, :] product) -> None:
    """product := rows^T rows, in float32, lower triangle; the rest of `product` is left alone."""
    cdef int d = <int>rows.shape[1], m = <int>rows.shape[0]
    cdef float one = 1.0, zero = 0.0
    if m == 0 or d == 0:
        return
    with nogil:
        active.ssyrk(b"L", b"N", &d, &m, &one, &rows[0, 0], &d, &zero, &product[0, 0], &d)


def gemm_f64_into(double[:, ::1] left, double[:, ::1] right, double[:, ::1] product) -> None:
    """product := product + left^T right, in float64.

    Parameters
    ----------
    left, right : (m, k), (m, d) float64, C-contiguous
    product : (k, d) float64, C-contiguous, changed in place
    """
    cdef int d = <int>right.shape[1], k = <int>left.shape[1], m = <int>left.shape[0]
    cdef double one = 1.0
    if m == 0 or d == 0 or k == 0:
        return
    with nogil:
        active.dgemm(b"N", b"T", &d, &k, &m, &one, &right[0, 0], &d, &left[0, 0], &k, &one,
                     &product[0, 0], &d)


def mirror_lower(double[::1, :] matrix) -> None:
    """Copy the lower triangle onto the upper one, in tiles of 64 columns to spare the cache."""
    cdef Py_ssize_t d = matrix.shape[0], i, j, first, last
    with nogil:
        for first in range(0, d, 64):
            last = min(first + 64, d)
            for i in range(first + 1, d):
                for j in range(first, min(last, i)):
                    matrix[j, i] = matrix[i, j]


use_scipy_routines()
