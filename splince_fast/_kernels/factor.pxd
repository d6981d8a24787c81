"""The factor of a covariance, and the linear algebra that its users share."""

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
    LOW_RANK = 3
    SPANNED = 4

cdef double dot(const double* a, const double* b, Py_ssize_t n) noexcept nogil
cdef void gemm(char* ta, char* tb, int m, int n, int k, double alpha, double* a, int lda,
               double* b, int ldb, double beta, double* c, int ldc) noexcept nogil
cdef void scale_rows(const double* weight, double* b, int d, int k) noexcept nogil


cdef class Factor
ctypedef void (*Step)(Factor, double*, int, double*) noexcept nogil


cdef class Factor:
    # L = diag(scale) L0, with L0 triangular in `c`, or V diag(sqrt(values)) on the support.
    cdef readonly int kind
    cdef readonly int width
    cdef readonly int status
    cdef readonly int constants     # features that do not vary
    cdef readonly int n_noise       # directions, of those that vary, that count as rounding noise
    cdef readonly int admitted      # of which the spans made support
    cdef readonly double smallest   # about the smallest eigenvalue of c on its support
    cdef readonly double tolerance  # eigenvalues up to it are noise
    cdef readonly double variance   # trace of S
    cdef public double rounding     # level of whitened spans that is rounding of the rows
    cdef object arrays              # keeps the memory behind the pointers
    cdef readonly object inverse_scale  # (d,): 1 / scale; 0 where constant or left out
    cdef readonly object left_out   # (n,) intp: features that vary and are not whitened
    cdef object kernel              # the null basis, once it was asked for,
    cdef double* kernel_data        # and its numbers
    cdef double* own                # (d,): diagonal of c before factoring, where S is remembered
    cdef double* full               # (d, d): S in units of the scale, upper triangle, likewise
    cdef double* c                  # (d, d): Cholesky factor, or eigenvectors by column
    cdef double* scale              # (d,)
    cdef double* inverse            # (d,)
    cdef double* root               # (d,) 1 / sqrt(eigenvalue); 0 off the support   (eigh only)
    cdef double* extra              # (d, admitted): noise directions made support   (eigh only)
    cdef double* noise              # (d, n_noise): the noise space, the admitted first (eigh only)
    cdef int columns                # of c, (d, columns): Q or B             (low rank, spanned)
    cdef double* half               # (d,): 1 / sqrt(e)                              (low rank)
    cdef double* shrink             # (columns,): 1 / sqrt(1 + s^2) - 1              (low rank)
    cdef int prepare_kernel(self) except -1
    cdef Factor copied(self)
    cdef object applied(self, const double[:, ::1] columns, Step step)


cdef int scratch_for(Factor f, int k) noexcept nogil
cdef void whiten_columns(Factor f, double* b, int k, double* scratch) noexcept nogil
cdef void whiten_transposed(Factor f, double* b, int k, double* scratch) noexcept nogil
