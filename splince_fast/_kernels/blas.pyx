"""Matrix products of blocks of rows, computed by SciPy's BLAS.

A symmetric (d, d) matrix is Fortran-ordered, and only its lower triangle is valid. A block of rows,
(n, d), is C-ordered, so that BLAS sees a Fortran-ordered (d, n) matrix.
"""

from scipy.linalg cimport cython_blas

from splince_fast._kernels.shapes cimport check_length


def syrk_f64_into(const double[:, ::1] rows not None, double[::1, :] scatter not None) -> None:
    """Add rows^T rows, for rows of shape (m, d), to the lower triangle of `scatter`, in float64."""
    cdef int d = <int>rows.shape[1], m = <int>rows.shape[0]
    cdef double one = 1.0
    check_length(scatter.shape[0], d, "scatter")
    check_length(scatter.shape[1], d, "scatter")
    if m == 0 or d == 0:
        return
    with nogil:
        cython_blas.dsyrk(b"L", b"N", &d, &m, &one, <double*>&rows[0, 0], &d, &one, &scatter[0, 0],
                          &d)


def syrk_f32_out(const float[:, ::1] rows not None, float[::1, :] product not None) -> None:
    """Write the lower triangle of rows^T rows to `product`, in float32."""
    cdef int d = <int>rows.shape[1], m = <int>rows.shape[0]
    cdef float one = 1.0, zero = 0.0
    check_length(product.shape[0], d, "product")
    check_length(product.shape[1], d, "product")
    if m == 0 or d == 0:
        return
    with nogil:
        cython_blas.ssyrk(b"L", b"N", &d, &m, &one, <float*>&rows[0, 0], &d, &zero, &product[0, 0],
                          &d)


def gemm_f64_into(const double[:, ::1] left not None, const double[:, ::1] right not None,
                  double[:, ::1] product not None) -> None:
    """Add left^T right, for shapes (m, k) and (m, d), to `product`, (k, d), in float64."""
    cdef int d = <int>right.shape[1], k = <int>left.shape[1], m = <int>left.shape[0]
    cdef double one = 1.0
    check_length(right.shape[0], m, "right")
    check_length(product.shape[0], k, "product")
    check_length(product.shape[1], d, "product")
    if m == 0 or d == 0 or k == 0:
        return
    with nogil:
        cython_blas.dgemm(b"N", b"T", &d, &k, &m, &one, <double*>&right[0, 0], &d,
                     <double*>&left[0, 0], &k, &one, &product[0, 0], &d)


def mirror_lower(double[::1, :] matrix not None) -> None:
    """Copy the lower triangle of `matrix` to its upper triangle, in tiles that stay in cache."""
    cdef Py_ssize_t d = matrix.shape[0], i, j, first, last
    check_length(matrix.shape[1], d, "matrix")
    with nogil:
        for first in range(0, d, 64):
            last = min(first + 64, d)
            for i in range(first + 1, d):
                for j in range(first, min(last, i)):
                    matrix[j, i] = matrix[i, j]
