"""Declarations of the factor of a covariance, and of the linear algebra that other modules use."""

cpdef enum:
    STATUS_OK = 0
    STATUS_INFEASIBLE = 1
    STATUS_NO_CONVERGENCE = 2
    STATUS_SINGULAR = 3
    STATUS_RANK_DEFICIENT = 4

cdef enum:
    IDENTITY = 0
    CHOLESKY = 1
    EIGH = 2
    DIAGONAL = 3
    SPANNED = 4

cdef double dot(const double* a, const double* b, Py_ssize_t n) noexcept nogil
cdef void gemm(char* ta, char* tb, int m, int n, int k, double alpha, double* a, int lda,
               double* b, int ldb, double beta, double* c, int ldc) noexcept nogil
cdef void scale_rows(const double* weight, double* b, int d, int k) noexcept nogil


cdef class Factor
ctypedef void (*Step)(Factor, double*, int, double*) noexcept nogil


cdef class Factor:
    # L = diag(scale) L0, with L0 triangular in `c`, or V diag(sqrt(values)) on the support.
    cdef readonly int kind          # IDENTITY, CHOLESKY, EIGH, DIAGONAL or SPANNED
    cdef readonly int width         # number of features, d
    cdef readonly int status        # STATUS_OK, or why the factorisation failed
    cdef readonly int constants     # number of constant features
    cdef readonly int n_noise       # dimension of the noise space: eigenvalues below `tolerance`
    cdef readonly int admitted      # number of noise directions that were added to the support
    cdef readonly double smallest   # approximate smallest eigenvalue of c on the support
    cdef readonly double tolerance  # eigenvalues up to this value are rounding error
    cdef readonly double variance   # trace of S
    cdef public double rounding     # rounding level of whitened spans due to the dtype of the rows
    cdef object arrays              # references that keep the memory behind the pointers alive
    cdef readonly object inverse_scale  # (d,): 1 / scale; 0 for constant features
    cdef object null_vectors        # null basis, (d, n_null); None until `prepare_null_basis`
    cdef double* null_data          # memory of the null basis
    cdef double* diagonal           # (d,): diagonal of the scaled S; set by `remember`
    cdef double* upper              # (d, d): upper triangle of the scaled S; set by `remember`
    cdef double* c                  # (d, d): Cholesky factor, or eigenvectors by column
    cdef double* scale              # (d,): standard deviations; 1 for constant features
    cdef double* inverse            # (d,): memory of inverse_scale
    cdef double* inverse_root       # (d,): 1 / sqrt(eigenvalue); 0 off the support (eigh only)
    cdef int columns                # number of columns of B, in c (spanned)
    cdef int prepare_null_basis(self) except -1
    cdef object apply_to_rows(self, const double[:, ::1] columns, Step step)


cdef int scratch_for(Factor f, int k) noexcept nogil
cdef void whiten_columns(Factor f, double* b, int k, double* scratch) noexcept nogil
cdef void whiten_transposed(Factor f, double* b, int k, double* scratch) noexcept nogil
