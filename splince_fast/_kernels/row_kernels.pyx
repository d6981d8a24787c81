# cython: binding=False
"""Kernels over rows: wrappers of the C code in `csrc/`, which exists for several instruction sets.

Every function checks its arguments, releases the GIL and calls the C kernel for the selected
instruction set. Wrong shapes, dtypes or layouts, read-only memory and numbers out of range raise
ValueError or TypeError before anything is written. The best instruction set of the processor is
selected at import; ``SPLINCE_FAST_LEVEL=avx512|avx2|baseline`` selects another.
"""

import os

import numpy as np

from cpython.buffer cimport (
    PyBUF_FORMAT, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.math cimport fabs, isfinite, sqrt
from libc.stdint cimport int64_t

ctypedef Py_ssize_t Index

cdef extern from "csrc/kernels.h" nogil:
    int GROUP, TOTAL_ROW, PEAK_ROW, SQUARES_ROW, CLASS_ROWS
    Index NO_MEMORY
    size_t LINE
    ctypedef struct CBlock "Block":
        const void* rows
        Index width, n, variables, classes, part_rows, columns, n_rotations
        const Index* index
        const double* weight
        const double* shift
        const Index* codes
        const Index* order
        const Index* cell
        const double* values
        const double* rotations
        double* sums
    ctypedef struct Phase:
        pass
    ctypedef struct Gram:
        void* panels[2]
        Index n_panels, panel_stride, chunk, stripe
        void* product
        Phase* phases
    ctypedef struct BlockSums:
        const CBlock* block
        double* sums
        double* work
        Index work_stride, task_columns
    ctypedef struct AtomicInt64 "_Atomic(int64_t)":
        pass
    ctypedef struct Matrix:
        char* data
        Index row_stride, column_stride
    ctypedef struct Factors:
        Index rank, width
    ctypedef struct Level:
        const char* name
        int width[2]
        int wide
        void (*centre_columns[2])(const CBlock*, void*, Index, Index, double*) noexcept nogil
        void (*reduce_chunks[2])(const CBlock*, const Gram*, double*) noexcept nogil
        void (*sample_columns[2])(const CBlock*, Index, double*, double*) noexcept nogil
        void (*add_lower[2])(double*, Index, const void*, Index, double, const double*,
                             const double*, Index, Index) noexcept nogil
        void (*sum_block[2])(const BlockSums*, AtomicInt64*) noexcept nogil
        Index (*factors_size)(Index, Index) noexcept nogil
        void (*pack_factors)(Factors*, const double*, const double*, const double*, const double*,
                             double*) noexcept nogil
        Index (*erase[2])(const Factors*, Matrix, Matrix, Index, int, int) noexcept nogil
        int (*squares_finite[2])(Matrix, Index, Index) noexcept nogil
    const Level* supported_level(int k)
    void sort_by_cell(
        const Index* codes, Index variables, Index n, Index n_codes, Index part_rows, Index* order,
        Index* cell, Index* positions)

cdef const Level* level = NULL


def levels():
    """Return the names of the instruction sets that this processor supports, best first."""
    names = []
    while supported_level(len(names)) is not NULL:
        names.append(supported_level(len(names)).name.decode())
    return names


def level_name():
    """Return the name of the selected instruction set."""
    return level.name.decode()


def use_level(name):
    """Select an instruction set of `levels` by name, for tests and reports."""
    global level
    names = levels()
    if name not in names:
        raise ValueError(
            f"instruction set {name!r} is not available on this processor; available: "
            f"{', '.join(names)}"
        )
    level = supported_level(names.index(name))


def register_width(itemsize):
    """Return how many numbers of `itemsize` bytes (4 or 8) a register holds."""
    return level.width[itemsize == 8]


def wide():
    """Return whether `reduce_chunks` computes products of rows faster than BLAS."""
    return level.wide != 0


use_level(os.environ.get("SPLINCE_FAST_LEVEL") or levels()[0])


# --- arguments ------------------------------------------------------------------------------------


cdef int check(bint condition, str text) except -1:
    """Raise ValueError(text) unless the condition holds."""
    if not condition:
        raise ValueError(text)
    return 0


cdef struct Layout:
    Matrix matrix
    Index n, width, itemsize
    char kind  # code of the dtype as in the module struct: e, f or d


cdef Layout layout_of(object array, str name, bint writable, bint contiguous=False) except *:
    """Return the memory layout of an aligned (n, d) array of floats, which the caller keeps alive.

    With `contiguous`, the array must be float32 or float64, and C-contiguous.
    """
    cdef Py_buffer buffer
    cdef Layout layout
    PyObject_GetBuffer(
        array, &buffer, PyBUF_STRIDES | PyBUF_FORMAT | (PyBUF_WRITABLE if writable else 0)
    )
    try:
        if buffer.ndim != 2 or buffer.format[1] != 0 or buffer.format[0] not in b"efd":
            raise ValueError(f"{name} has to be of shape (n, d) and of items 'e', 'f' or 'd'")
        layout.n, layout.width, layout.itemsize = buffer.shape[0], buffer.shape[1], buffer.itemsize
        layout.kind, layout.matrix.data = buffer.format[0], <char*>buffer.buf
        # The stride of an axis of length 1 is arbitrary: use the stride of a contiguous array.
        layout.matrix.row_stride = (
            buffer.strides[0] if layout.n > 1 else layout.width * layout.itemsize)
        layout.matrix.column_stride = buffer.strides[1] if layout.width > 1 else layout.itemsize
    finally:
        PyBuffer_Release(&buffer)
    if layout.n and layout.width and (
        <size_t>layout.matrix.data % layout.itemsize or layout.matrix.row_stride % layout.itemsize
        or layout.matrix.column_stride % layout.itemsize
    ):
        raise ValueError(
            f"{name} is not aligned: its address and its strides have to be multiples of "
            f"{layout.itemsize} bytes"
        )
    if contiguous and (layout.kind == b"e" or (layout.n and layout.width and (
        layout.matrix.column_stride != layout.itemsize
        or layout.matrix.row_stride != layout.width * layout.itemsize
    ))):
        raise ValueError(f"{name} has to be float32 or float64, and C-contiguous")
    return layout


cdef bint all_in_range(const Index* numbers, Index n, Index low, Index high) noexcept:
    """Return whether low <= numbers[i] < high for all i."""
    cdef Index i, smallest = low, largest = high - 1
    for i in range(n):
        smallest = min(smallest, numbers[i])
        largest = max(largest, numbers[i])
    return smallest >= low and largest < high


# --- blocks ---------------------------------------------------------------------------------------


cdef int set_rows(CBlock* block, object rows, const Index[::1] index,
                   const double[::1] weight) except -1:
    """Set the rows, index and weights of `block`; return 0 for float32 rows, 1 for float64 rows."""
    cdef Layout layout = layout_of(rows, "rows", False, True)
    block.rows, block.width, block.n = layout.matrix.data, layout.width, layout.n
    block.index, block.weight = NULL, NULL
    if index is not None:
        block.n = index.shape[0]
        block.index = &index[0] if block.n else NULL
        check(all_in_range(block.index, block.n, 0, layout.n),
              "index has to contain numbers of rows of the array")
    check(block.n > 0 and block.width > 0 and (weight is None or weight.shape[0] == block.n),
          "a block needs at least one row and one feature, and weights of shape (n,) or None")
    if weight is not None:
        block.weight = &weight[0]
    return layout.kind == b"d"


# If the sums of squares of all rows are below this number, `squares_finite` accepts every row.
cdef double LARGEST_SQUARES = 1e297
# Products in float32 lose no precision if, for every column, the largest magnitude is at least the
# first number, and the root of the sum of squares is at most the second.
cdef double LEAST_FLOAT32 = 1e-15, MOST_FLOAT32 = 1e18


cdef class Block:
    """A block of rows with labels, and its sums, as `kernels.h` declares them.

    The arrays are validated once; the block holds references to them. `rows`, (m, d), are float32
    or float64; `index` and `weight` may be None; `n_codes` is the number of class sums. A part of
    `part_rows` rows is centred and summed per class while it is in cache.
    """

    cdef CBlock c
    cdef int dtype
    cdef const Index[::1] index
    cdef const double[::1] weight, shift
    cdef const Index[:, ::1] codes
    cdef const double[:, ::1] values
    cdef readonly Index n
    cdef readonly object rows, cells, sums, total, squares, class_sums, products

    def __cinit__(
        self, rows, const Index[::1] index, const double[::1] weight,
        const double[::1] shift not None, const Index[:, ::1] codes not None, Index n_codes,
        const double[:, ::1] values not None, Index part_rows,
    ):
        cdef CBlock* c = &self.c
        self.dtype = set_rows(c, rows, index, weight)
        check(
            shift.shape[0] == c.width and codes.shape[1] == values.shape[1] == c.n
            and n_codes >= 0 and part_rows > 0,
            "shift has to be of shape (d,), codes of shape (v, n) and values of shape (q, n); "
            "n_codes has to be at least 0, and part_rows above 0",
        )
        self.rows, self.index, self.weight = rows, index, weight
        self.shift, self.codes, self.values = shift, codes, values
        self.cells = np.empty((2, c.n), np.intp)
        cdef Index[:, ::1] cells = self.cells
        c.variables, c.classes, c.part_rows = codes.shape[0], n_codes, part_rows
        c.columns, c.shift, c.order, c.cell = values.shape[0], &shift[0], &cells[0, 0], &cells[1, 0]
        c.codes = &codes[0, 0] if c.variables else NULL
        c.values = &values[0, 0] if c.columns else NULL
        check(all_in_range(c.codes, c.variables * c.n, -1, n_codes),
              "codes have to be at least -1, and below n_codes")
        cdef Index[::1] positions = np.empty(n_codes + 2, np.intp)
        with nogil:
            sort_by_cell(c.codes, c.variables, c.n, n_codes, part_rows, &cells[0, 0], &cells[1, 0],
                         &positions[0])
        self.sums = np.empty((CLASS_ROWS + n_codes + c.columns, c.width))
        cdef double[:, ::1] sums = self.sums
        self.n, c.sums, self.total = c.n, &sums[0, 0], self.sums[TOTAL_ROW]
        self.squares = self.sums[SQUARES_ROW]
        self.class_sums = self.sums[CLASS_ROWS : CLASS_ROWS + n_codes]
        self.products = self.sums[CLASS_ROWS + n_codes :]

    def check_sums(self, const double[::1] sample_squares not None, double weight_sum,
                   double min_weight, double max_weight, double excess):
        """Return whether the sums of `centre_columns` or `reduce_chunks` may be wrong or inexact.

        `sample_squares`, (d,), are those of `sample_columns`. The results are `suspect`: the rows
        may contain NaN, infinity, or numbers whose squares overflow float64; `far`: total^2 exceeds
        `excess` times `weight_sum` times the sum of squares about the mean in a column, so that
        centring by the shift loses precision; and `needs_float64`: products in float32 would
        overflow or underflow.
        """
        cdef const CBlock* c = &self.c
        cdef Index j
        cdef double largest = 0.0, total, peak, magnitude, square, least_deviation
        cdef bint suspect = False, far = False, needs_float64 = False
        check(sample_squares.shape[0] == c.width, "sample_squares has to be of shape (d,)")
        for j in range(c.width):
            total = fabs(c.sums[TOTAL_ROW * c.width + j])
            peak = c.sums[PEAK_ROW * c.width + j]
            magnitude, square = fabs(c.shift[j]) + peak, total * total
            largest += magnitude * magnitude
            suspect |= not isfinite(total)
            if square > excess * weight_sum * sample_squares[j]:
                # The row with the largest |y| deviates from the block mean by at least
                # `least_deviation`, which gives a lower bound of the sum of squares.
                least_deviation = max(0.0, peak - total / weight_sum)
                far |= square > excess * weight_sum * (
                    min_weight * least_deviation * least_deviation)
            needs_float64 |= 0.0 < peak and peak * sqrt(min_weight) < LEAST_FLOAT32
            needs_float64 |= peak * sqrt(max_weight * c.n) > MOST_FLOAT32
        return suspect or not largest < LARGEST_SQUARES, far, needs_float64

    cdef CBlock with_rotations(self, const double[:, ::1] rotations) except *:
        """Return the C struct of the block and `rotations`, an argument of the centring kernels."""
        cdef CBlock c = self.c
        check(rotations.shape[0] > 0 and rotations.shape[1] == 2 and c.part_rows % GROUP == 0,
              "rotations has to be of shape (t, 2), t > 0, and part_rows a multiple of 4")
        c.rotations, c.n_rotations = &rotations[0, 0], rotations.shape[0]
        return c

    cdef Layout layout_like_rows(self, object array, str name, Index n, Index width) except *:
        """Return the layout of a writable array of shape (n, width) with the dtype of the rows."""
        cdef Layout layout = layout_of(array, name, True, True)
        if (layout.kind == b"d") != self.dtype or layout.n != n or layout.width != width:
            raise ValueError(f"{name} has to be of the dtype of rows and of shape ({n}, {width})")
        return layout


def sample_columns(rows, const Index[::1] index, const double[::1] weight, Index stride):
    """Return the mean and the sum of squares about it, (2, d), of every `stride`-th row, weighted.

    For a column that is constant in the sample, both are exact.
    """
    cdef CBlock block
    cdef int dtype = set_rows(&block, rows, index, weight)
    check(stride > 0, "stride has to be at least 1")
    sample = np.empty((2, block.width))
    cdef double[:, ::1] out = sample
    with nogil:
        level.sample_columns[dtype](&block, stride, &out[0, 0], &out[1, 0])
    return sample


def centre_columns(Block block not None, const double[:, ::1] rotations not None, out, Index first,
                   Index last):
    """Compute the sums and the centred rows of a block for columns first..last, in one pass.

    With w_i the weight of row i, c a class code and q a label column, the sums are::

        sum_i w_i y_i       sum_{i: codes[., i] = c} w_i y_i  for every c
        max_i |y_i|         sum_i values[q, i] y_i            for every q

    The rows of `out`, n rounded up to a multiple of 4, are sqrt(w_i) y_i, rotated in pairs: (a, b)
    becomes (a cos t + b sin t, b cos t - a sin t), with cos t and sin t in `rotations`, which leave
    out^T out = sum_i w_i y_i y_i^T as it is. `out` and the total do not depend on the labels. The
    results are bit-identical for every split into column ranges.
    """
    cdef CBlock c = block.with_rotations(rotations)
    cdef Index padded_rows = (c.n + GROUP - 1) // GROUP * GROUP
    cdef Layout layout = block.layout_like_rows(out, "out", padded_rows, c.width)
    check(0 <= first <= last <= c.width, "first and last have to be a range of the columns")
    cdef double[::1] cell_sum = np.empty(c.width)
    with nogil:
        level.centre_columns[block.dtype](&c, layout.matrix.data, first, last, &cell_sum[0])


def reduce_chunks(Block block not None, const double[:, ::1] rotations not None, Index chunk,
                  Index stripe, panels, product, int64_t[:, ::1] counters not None):
    """Compute the sums of `centre_columns` and product = out^T out, chunk by chunk, without `out`.

    Threads that call the function with the same arguments share the tasks; the order of operations
    is fixed, so that the result does not depend on their number. `kernels.h` describes `chunk`,
    `stripe` and the memory: `panels`, (2 p, panel_stride); `product`, (p lanes, p lanes), whose
    lower triangle is valid in Fortran order; `counters`, (chunks + 1, 16), zeros before the call.
    """
    cdef CBlock c = block.with_rotations(rotations)
    cdef Gram memory
    cdef Index lanes = level.width[block.dtype], n_panels = (c.width + lanes - 1) // lanes
    cdef Index panel_stride = layout_of(panels, "panels", True).width
    check(
        chunk >= GROUP and chunk % GROUP == 0 and stripe >= lanes and stripe % lanes == 0
        and panel_stride // lanes >= chunk,
        "chunk has to be a multiple of 4, stripe a multiple of the numbers in a register, and a "
        "row of panels has to contain one register for each row of a chunk",
    )
    check(counters.shape[0] == (c.n + chunk - 1) // chunk + 1 and counters.shape[1] == 16,
          "counters has to be of shape (chunks + 1, 16)")
    memory.n_panels, memory.panel_stride = n_panels, panel_stride
    memory.chunk, memory.stripe = chunk, stripe
    memory.panels[0] = block.layout_like_rows(
        panels, "panels", 2 * n_panels, panel_stride).matrix.data
    memory.panels[1] = <char*>memory.panels[0] + n_panels * panel_stride * (8 if block.dtype else 4)
    memory.product = block.layout_like_rows(
        product, "product", n_panels * lanes, n_panels * lanes).matrix.data
    memory.phases = <Phase*>&counters[0, 0]
    # Allocated before the first task: other threads would wait forever for a task that fails.
    cdef double[::1] cell_sum = np.empty(c.width)
    with nogil:
        level.reduce_chunks[block.dtype](&c, &memory, &cell_sum[0])


def sum_block(
    Block block not None, Index task_columns, double[:, :, ::1] sums not None,
    double[:, :, ::1] work not None, int64_t[::1] counter not None,
):
    """Compute the sums of each part of a block in one pass.

    The sums are those of `centre_columns`, with squares sum_i w_i y_i^2 in place of maxima. Threads
    share the tasks, as in `reduce_chunks`; `counter`, (1,), is zero before the call.
    """
    cdef BlockSums s
    cdef const CBlock* c = &block.c
    cdef Index parts = (c.n + c.part_rows - 1) // c.part_rows
    s.block, s.task_columns, s.work_stride = c, task_columns, work.shape[2]
    check(
        task_columns > 0 and task_columns % 16 == 0 and sums.shape[2] == c.width
        and sums.shape[1] == CLASS_ROWS + c.classes + c.columns
        and sums.shape[0] == work.shape[0] == parts
        and work.shape[1] == 3 and work.shape[2] >= c.width and counter.shape[0] == 1,
        "task_columns has to be a multiple of 16, sums of the shape of the sums of the block for "
        "each part, work of shape (parts, 3, at least d), and counter of shape (1,)",
    )
    s.sums, s.work = &sums[0, 0, 0], &work[0, 0, 0]
    with nogil:
        level.sum_block[block.dtype](&s, <AtomicInt64*>&counter[0])


def reference_is_far(
    const double[:] reference not None, const double[:] deviation not None, double weight,
    const double[:] squares not None, const double[:] added_mean not None,
    const double[:] added_squares not None, double added_weight, double max_distance,
    double roundings,
):
    """Return whether merging rows would move the mean too far from the reference point.

    Too far means more than `max_distance` standard deviations in at least one feature, and more
    than `roundings` times |reference|. The state has the sums `deviation`, sum w (x - reference),
    and `squares`, sum w (x - mean)^2; the added rows have a mean and squares about it.
    """
    cdef Index d = reference.shape[0], j
    cdef double total_weight = weight + added_weight
    cdef double offset, drift, difference, merged_squares
    check(d == deviation.shape[0] == squares.shape[0] == added_mean.shape[0]
          == added_squares.shape[0], "the sums of state and rows have to be of shape (d,)")
    for j in range(d):
        offset = added_mean[j] - reference[j]
        drift = (deviation[j] + added_weight * offset) / total_weight
        difference = offset - deviation[j] / weight
        merged_squares = squares[j] + added_squares[j]
        merged_squares += weight * added_weight / total_weight * difference * difference
        if (fabs(drift) > roundings * fabs(reference[j])
                and drift * drift * total_weight > max_distance * max_distance * merged_squares):
            return True
    return False


def count_classes(const Index[::1] labels not None, const double[::1] weight, Index n_classes):
    """Number the classes of a block in order of first occurrence, and count the rows per class.

    `labels`, (n,), are class codes of the state, -1 for a missing label. Returns the number of the
    class of each row; codes, rows and weight sums of the classes; and the classes of the new state.
    """
    cdef Index n = labels.shape[0], k = max(n_classes, 0), n_present = 0, i, c
    check(weight is None or weight.shape[0] == n, "weight has to be of shape (n,)")
    for i in range(n):
        check(labels[i] >= -1, "labels have to be at least -1")
        k = max(k, labels[i] + 1)
    out_a, weights = np.empty((3, n), np.intp), np.empty(n)
    cdef Index[:, ::1] out = out_a
    cdef double[::1] weight_sums = weights
    cdef Index[::1] class_number = np.full(k, -1, np.intp)
    with nogil:
        for i in range(n):
            c = labels[i]
            if c >= 0 and class_number[c] < 0:
                class_number[c] = n_present
                out[1, n_present], out[2, n_present], weight_sums[n_present] = c, 0, 0.0
                n_present += 1
            out[0, i] = class_number[c] if c >= 0 else -1
            if c >= 0:
                out[2, class_number[c]] += 1
                weight_sums[class_number[c]] += 1.0 if weight is None else weight[i]
    return out_a[0], out_a[1, :n_present], out_a[2, :n_present], weights[:n_present], k


# --- changes of a state --------------------------------------------------------------------------


cdef class Change:
    """A prepared change of a state. What can fail has been done when it is made."""

    cdef int apply(self) except -1:
        raise NotImplementedError


cdef class Addition(Change):
    """sums[rows] += addend, with distinct `rows`, or all rows of `sums` if None."""

    cdef double[:, ::1] sums
    cdef const double[:, ::1] addend
    cdef const Index[::1] rows

    def __init__(self, double[:, ::1] sums not None, const double[:, ::1] addend not None,
                 const Index[::1] rows=None):
        cdef Index m = sums.shape[0] if rows is None else rows.shape[0]
        check(addend.shape[0] == m and addend.shape[1] == sums.shape[1],
              "addend has to be of the shape of the rows that it is added to")
        check(rows is None or m == 0 or all_in_range(&rows[0], m, 0, sums.shape[0]),
              "rows has to contain numbers of rows of sums")
        self.sums, self.addend, self.rows = sums, addend, rows

    cdef int apply(self) except -1:
        cdef Index i, j, row, d = self.sums.shape[1]
        with nogil:
            for i in range(self.addend.shape[0]):
                row = i if self.rows is None else self.rows[i]
                for j in range(d):
                    self.sums[row, j] += self.addend[i, j]
        return 0


cdef class ScatterAddition(Change):
    """scatter += sign * product + sum_k coefficients[k] vectors[k] vectors[k]^T, lower triangle.

    The matrices are Fortran-ordered; `product`, (m, m) with m >= d, is None or of either dtype.
    """

    cdef double[::1, :] scatter
    cdef const double[:, ::1] vectors
    cdef const double[::1] coefficients
    cdef object product
    cdef const void* added
    cdef Index stride
    cdef int dtype
    cdef double sign

    def __init__(self, double[::1, :] scatter not None, product, double sign,
                 const double[:, ::1] vectors not None, const double[::1] coefficients not None):
        cdef Index d = scatter.shape[0]
        cdef Layout layout
        self.added, self.stride, self.dtype = NULL, d, 1
        if product is not None:  # the transpose of a Fortran-ordered array is C-contiguous
            layout = layout_of(product.T, "product", False, True)
            self.added, self.stride = layout.matrix.data, layout.n
            self.dtype = layout.kind == b"d"
        check(
            d > 0 and scatter.shape[1] == vectors.shape[1] == d and self.stride >= d
            and (product is None or layout.width == layout.n)
            and vectors.shape[0] == coefficients.shape[0] == 2,
            "scatter has to be of shape (d, d), product of shape (m, m) with m >= d, vectors of "
            "shape (2, d) and coefficients of shape (2,)",
        )
        self.scatter, self.product, self.sign = scatter, product, sign
        self.vectors, self.coefficients = vectors, coefficients

    cdef int apply(self) except -1:
        cdef Index d = self.scatter.shape[0]
        with nogil:
            level.add_lower[self.dtype](
                &self.scatter[0, 0], d, self.added, self.stride, self.sign, &self.vectors[0, 0],
                &self.coefficients[0], 0, (d + 1) // 2)
        return 0


cdef class Assignment(Change):
    """Set attributes of an object, which must have no setters in Python."""

    cdef readonly object owner
    cdef tuple names, values

    def __init__(self, owner not None, dict attributes not None):
        self.owner, self.names, self.values = owner, tuple(attributes), tuple(attributes.values())

    cdef int apply(self) except -1:
        cdef Index i
        for i in range(len(self.names)):
            setattr(self.owner, self.names[i], self.values[i])
        return 0


cdef class Call(Change):
    """Call a compiled function, which must run no Python code."""

    cdef object function
    cdef tuple arguments

    def __init__(self, function not None, *arguments):
        self.function, self.arguments = function, arguments

    cdef int apply(self) except -1:
        self.function(*self.arguments)
        return 0


def add(list changes not None):
    """Apply prepared changes in order; no Python code runs in between, nor a signal handler.

    If a change fails nevertheless, `broken` is set to True for every owner of an `Assignment` that
    has this attribute.
    """
    for change in changes:
        if not isinstance(change, Change):
            raise TypeError(f"changes has to contain changes, not {type(change).__name__}")
    try:
        for change in changes:
            (<Change>change).apply()
    except BaseException:
        for change in changes:
            if isinstance(change, Assignment) and hasattr(change.owner, "broken"):
                change.owner.broken = True
        raise


# --- erase ---------------------------------------------------------------------------------------


cdef class PackedFactors:
    """The map x -> x - left^T (right (x - mean) - shift), packed for the selected instruction set.

    The arrays, (r, d) and (r,), are copied.
    """

    cdef Factors map
    cdef const Level* kernels
    cdef object memory

    def __cinit__(self, const double[:, ::1] left not None, const double[:, ::1] right not None,
                  const double[::1] mean not None, const double[::1] shift not None):
        cdef Index rank = shift.shape[0], width = mean.shape[0]
        check(left.shape[0] == right.shape[0] == rank
              and left.shape[1] == right.shape[1] == width,
              "left and right have to be of shape (r, d), mean (d,) and shift (r,)")
        self.kernels = level
        self.map.rank, self.map.width = rank, width
        cdef Index numbers_per_line = LINE // sizeof(double)
        cdef double[::1] memory = np.empty(self.kernels.factors_size(rank, width)
                                              + numbers_per_line)
        self.memory = memory
        # The factors begin at a cache line.
        cdef Index skip = -(<size_t>&memory[0] // sizeof(double)) % numbers_per_line
        self.kernels.pack_factors(
            &self.map, &left[0, 0] if rank and width else NULL,
            &right[0, 0] if rank and width else NULL, &mean[0] if width else NULL,
            &shift[0] if rank else NULL, &memory[skip],
        )

    def __reduce__(self):
        raise TypeError("PackedFactors depend on the processor, so that they cannot be pickled; "
                        "pickle left, right, mean and shift instead")


def apply_rows(PackedFactors factors not None, rows, out, Index start, Index stop,
               bint streamed=False):
    """Write out[i] = rows[i] - left^T (right (rows[i] - mean) - shift) for start <= i < stop.

    The result of a row is computed in float64, and does not depend on other rows or the layout.
    `rows` and `out`, (n, d), are the same memory or do not overlap. `kernels.h` describes
    `streamed`. Returns the index of the first row with a number that overflows float16, or -1.
    """
    cdef Layout source = layout_of(rows, "rows", False), target = layout_of(out, "out", True)
    cdef Index row
    check(source.n == target.n and source.kind == target.kind
          and source.width == target.width == factors.map.width,
          "rows and out have to be of one shape (n, d) and dtype, with the features of the factors")
    check(0 <= start <= stop <= source.n, "start and stop have to be a range of the rows")
    source.matrix.data += start * source.matrix.row_stride
    target.matrix.data += start * target.matrix.row_stride
    with nogil:
        row = factors.kernels.erase[source.kind == b"d"](
            &factors.map, source.matrix, target.matrix, stop - start, source.kind == b"e", streamed)
    if row == NO_MEMORY:
        raise MemoryError("no memory to erase rows; nothing was written")
    return start + row if row >= 0 else -1


def squares_finite(rows, Index start, Index stop):
    """Return whether the sum of squares of every row in start..stop is below 1e298.

    If so, the rows hold neither NaN nor infinity nor numbers whose squares overflow.
    """
    cdef Layout layout = layout_of(rows, "rows", False)
    cdef int finite
    check(layout.kind != b"e" and layout.matrix.column_stride == layout.itemsize,
          "rows has to be float32 or float64, and every row contiguous")
    check(0 <= start <= stop <= layout.n, "start and stop have to be a range of the rows")
    layout.matrix.data += start * layout.matrix.row_stride
    with nogil:
        finite = level.squares_finite[layout.kind == b"d"](
            layout.matrix, stop - start, layout.width)
    return finite != 0
