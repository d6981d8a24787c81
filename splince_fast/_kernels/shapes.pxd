"""The check of shapes at the entries of the compiled kernels.

Typed arguments already refuse other dtypes, layouts and read-only memory; lengths are left to them.
"""


cdef inline int check_length(Py_ssize_t length, Py_ssize_t expected, str name) except -1:
    """Raise ValueError unless an axis of the argument `name` has the expected length."""
    if length != expected:
        raise ValueError(f"{name} has an axis of length {length} where {expected} is expected")
    return 0
