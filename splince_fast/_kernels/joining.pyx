"""Single rows that join those that wait, in one step that no other thread and no signal divides."""

from cpython.dict cimport PyDict_GetItemWithError
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

import numpy as np

cdef extern from *:
    """
    #ifdef __GNUC__
    #define fetch(place) __builtin_prefetch(place)
    #define fetch_to_write(place) __builtin_prefetch(place, 1)
    #else
    #define fetch(place) (void)(place)
    #define fetch_to_write(place) (void)(place)
    #endif
    """
    void fetch(void*) noexcept nogil
    void fetch_to_write(void*) noexcept nogil

# What NumPy's stable layout of an array says, without a call.
cdef extern from "numpy/ndarraytypes.h":
    ctypedef struct PyArrayObject:
        pass
    int PyArray_NDIM(PyArrayObject*) nogil
    Py_ssize_t* PyArray_DIMS(PyArrayObject*) nogil
    Py_ssize_t* PyArray_STRIDES(PyArrayObject*) nogil
    char* PyArray_BYTES(PyArrayObject*) nogil
    void* PyArray_DESCR(PyArrayObject*) nogil

cdef object ndarray = np.ndarray
cdef object float32 = np.dtype(np.float32)
# Variables of which the codes are looked up before anything is written.
cdef enum:
    _MOST_VARIABLES = 16
MOST_VARIABLES = _MOST_VARIABLES


cdef class Codes:
    """The codes of one class-coded variable of rows that wait."""

    cdef object name, variable, memory, dtype
    cdef dict places, known
    cdef Py_ssize_t* at

    def __init__(self, name, variable, Py_ssize_t[::1] codes):
        self.name, self.variable, self.memory = name, variable, codes
        self.places, self.at = variable.places, &codes[0]
        self.known = {}  # codes by labels of the last dtype alone, which tells their type

    cdef Py_ssize_t code_of(self, column) except -2:
        """The code of a single label; -1 for anything but a known class."""
        cdef PyArrayObject* array
        if type(column) is not ndarray:
            return self.variable.declared_code(column, self.name)
        array = <PyArrayObject*>column
        if PyArray_NDIM(array) != 1 or PyArray_DIMS(array)[0] != 1:
            return -1
        if PyArray_DESCR(array) != <void*>self.dtype:
            dtype = column.dtype
            if dtype.kind not in "biuU":
                return -1
            self.dtype, self.known = dtype, {}
        label = column.item()
        found = PyDict_GetItemWithError(self.known, label)
        if found is NULL:
            found = PyDict_GetItemWithError(self.places, (type(label), label))
            if found is NULL:
                return -1
            self.known[label] = <object>found
        return <object>found


cdef class Joining:
    """Where a single row goes that is like those that wait: as wide, and of their variables.

    Parameters
    ----------
    rows : (capacity, d) float32 or float64, C-contiguous
        Those of a buffer, whose `joining` this object is while they wait there.
    variables : sequence of at most MOST_VARIABLES (name, ClassSums, codes)
        `codes`, (capacity,) intp, are those of the rows that wait.
    """

    cdef object rows, dtype
    cdef list variables
    cdef char* at
    cdef Py_ssize_t capacity, width, row_bytes
    cdef bint single

    def __init__(self, rows, variables):
        self.rows, self.dtype = rows, rows.dtype
        self.variables = [Codes(*parts) for parts in variables]
        self.capacity, self.width = rows.shape
        self.single = self.dtype.itemsize == 4
        self.row_bytes = self.width * self.dtype.itemsize
        self.at = PyArray_BYTES(<PyArrayObject*>rows)

    def takes(self, accumulator, lock, X, labels) -> bool:
        """Append a row; False, and nothing has changed, unless all is as it was for the last one.

        That is: X is an array (1, d) of the dtype of those that wait, or of float32 where that is
        float64, of numbers below 1e139; `labels` a dict of the same variables, of arrays (1,) of
        known classes or of columns that declare them; nobody holds the lock; and this object is
        still that of the accumulator's buffer. Room for one more row stays, so that no block is
        complete.

        What can run other code, and so let another thread in, comes before the last of these
        checks; from there on nothing does.
        """
        cdef Py_ssize_t found[_MOST_VARIABLES]
        cdef Py_ssize_t i, j, start, row_bytes, n = len(self.variables)
        cdef PyArrayObject* array
        cdef bint widened
        cdef char* source
        cdef char* target
        cdef Codes codes
        if type(X) is not ndarray:
            return False
        array = <PyArrayObject*>X
        widened = PyArray_DESCR(array) == <void*>float32 and not self.single
        if not widened and PyArray_DESCR(array) != <void*>self.dtype:
            return False
        if labels is None:
            if n:
                return False
        elif type(labels) is not dict or len(<dict>labels) != n:
            return False
        for i in range(n):
            codes = <Codes>self.variables[i]
            column = PyDict_GetItemWithError(labels, codes.name)
            if column is NULL:
                return False
            given = <object>column  # a reference of its own: to read a label may run any code
            found[i] = codes.code_of(given)
            if found[i] < 0:
                return False
        if lock.writer is not None or lock.readers:
            return False
        buffer = accumulator.buffer
        if buffer is None or buffer.joining is not self:
            return False
        start = buffer.filled
        if start >= self.capacity - 1:
            return False
        target = self.at + start * self.row_bytes
        row_bytes = self.row_bytes // 2 if widened else self.row_bytes
        source = PyArray_BYTES(array)
        if PyArray_NDIM(array) != 2 or PyArray_DIMS(array)[0] != 1:
            return False
        if PyArray_DIMS(array)[1] != self.width:
            return False
        if PyArray_STRIDES(array)[1] * self.width != row_bytes:
            return False
        if not widened:
            memcpy(target, source, row_bytes)
        elif <size_t>source % sizeof(float) == 0:  # numbers lie at multiples of their size
            for j in range(self.width):
                (<double*>target)[j] = (<float*>source)[j]
        else:
            return False
        if not usable(target, self.width, self.single):
            return False
        for i in range(n):
            (<Codes>self.variables[i]).at[start] = found[i]
        buffer.filled = start + 1
        # The next row often lies behind this one, and goes to memory that was read a block ago.
        for j in range(0, row_bytes, 64):
            fetch(source + row_bytes + j)
        for j in range(0, self.row_bytes, 64):
            fetch_to_write(target + self.row_bytes + j)
        return True


cdef bint usable(char* row, Py_ssize_t width, bint single) noexcept nogil:
    """Whether every number is finite, and below 2^465 where its square might be too large.

    By the bits of its magnitude, which order as the numbers do: from the limit on, the sum has the
    highest bit. So the loop has no branch and no comparison, and takes four numbers at a time.
    """
    cdef Py_ssize_t j
    cdef uint32_t* narrow = <uint32_t*>row
    cdef uint64_t* wide = <uint64_t*>row
    cdef uint32_t low = 0, top = <uint32_t>1 << 31, beyond = top - (<uint32_t>0xFF << 23)
    cdef uint64_t met = 0, sign = <uint64_t>1 << 63, rest = sign - (<uint64_t>(1023 + 465) << 52)
    if single:
        for j in range(width):
            low |= (narrow[j] & (top - 1)) + beyond
        return low < top
    for j in range(width):
        met |= (wide[j] & (sign - 1)) + rest
    return met < sign
