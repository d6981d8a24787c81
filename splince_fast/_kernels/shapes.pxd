"""Check of array lengths at the entry points of the compiled kernels.

Typed memoryviews already refuse other dtypes, other layouts and read-only memory.
"""


cdef inline int check_length(Py_ssize_t length, Py_ssize_t expected, str name) except -1:
    """Raise ValueError unless `length`, of an axis of the argument `name`, equals `expected`."""
    if length != expected:
        raise ValueError(f"{name} has an axis of length {length} where {expected} is expected")
    return 0
