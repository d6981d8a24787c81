"""BLAS and LAPACK routines by name, as a table that the kernels call through."""

ctypedef void (*syrk_f64)(char*, char*, int*, int*, double*, double*, int*, double*, double*, int*) noexcept nogil
ctypedef void (*syrk_f32)(char*, char*, int*, int*, float*, float*, int*, float*, float*, int*) noexcept nogil
ctypedef void (*gemm_f64)(char*, char*, int*, int*, int*, double*, double*, int*, double*, int*, double*, double*, int*) noexcept nogil
ctypedef void (*trsm_f64)(char*, char*, char*, char*, int*, int*, double*, double*, int*, double*, int*) noexcept nogil
ctypedef void (*potrf_f64)(char*, int*, double*, int*, int*) noexcept nogil

cdef struct Routines:
    syrk_f64 dsyrk
    syrk_f32 ssyrk
    gemm_f64 dgemm
    trsm_f64 dtrsm
    potrf_f64 dpotrf

# The routines in use by every kernel of the package; written only by `use_routines`.
cdef Routines active
