"""Declarations of the factor of a covariance, and of the linear algebra that other modules use."""

cpdef enum:
    STATUS_OK = 0
    STATUS_INFEASIBLE = 1
    STATUS_NO_CONVERGENCE = 2
    STATUS_SINGULAR = 3
    STATUS_RANK_DEFICIENT = 4

cdef void gemm(char* ta, char* tb, int m, int n, int k, double alpha, double* a, int lda,
               double* b, int ldb, double beta, double* c, int ldc) noexcept nogil
cdef void scale_rows(const double* weight, double* b, int d, int k) noexcept nogil


cdef class Factor:
    cdef int kind                   # IDENTITY, DIAGONAL, CHOLESKY, EIGH or SPANNED
    cdef readonly int width         # number of features, d
    cdef readonly int status        # STATUS_OK, or why the factorisation failed
    cdef readonly int constants     # number of constant features
    cdef readonly int n_noise       # number of eigenvalues of c that count as rounding error
    cdef readonly int admitted      # number of noise directions that were added to the support
    cdef readonly double smallest   # approximate smallest eigenvalue of c on the support
    cdef readonly double tolerance  # eigenvalues up to this value count as rounding error
    cdef readonly double variance   # trace of S
    cdef public double rounding     # rounding level of whitened spans due to the dtype of the rows
    cdef object scales              # (2, d): standard deviations, 0 for constants; inverse_scale
    cdef double* scale              # memory of the standard deviations
    cdef double* inverse            # memory of the inverses
    cdef object matrix              # (d, n): L0 in the lower triangle (Cholesky), or B
    cdef double* c                  # memory of `matrix`
    cdef int columns                # n
    cdef int scratch                # memory for whitening one column, in numbers
    cdef object values              # (n,): eigenvalues of the columns of B (eigh)
    cdef object noise               # (d, n_null): eigenvectors of c off the support
    cdef object null_vectors        # (d, n_null): null basis; None until `prepare_null_basis`
    cdef double* null_data          # memory of the null basis
    cdef object diagonal            # (d,): diagonal of the scaled S; set by `remember`
    cdef object upper               # (d, d): strict upper triangle of the scaled S; likewise
    cdef int store(self, matrix) except -1
    cdef int prepare_null_basis(self) except -1
    cdef object apply_to_rows(self, const double[:, ::1] columns, bint solve)


cdef void whiten_columns(Factor f, double* b, int k, double* scratch) noexcept nogil
cdef void whiten_transposed(Factor f, double* b, int k, double* scratch) noexcept nogil
