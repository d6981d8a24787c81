# cython: binding=False
"""Passes over rows: C kernels (`csrc/`), compiled for several instruction sets, behind checks.

Every function checks the shapes of its arrays, releases the GIL and calls the kernel of the
instruction set in use. The best one that the processor supports is chosen at import;
``SPLINCE_FAST_LEVEL=avx512|avx2|baseline`` names another.
"""

import os

from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS, PyBUF_F_CONTIGUOUS, PyBUF_FORMAT, PyBUF_STRIDES, PyBUF_WRITABLE,
    PyBuffer_Release, PyObject_GetBuffer,
)
from libc.math cimport fabs, isfinite, sqrt
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc

ctypedef Py_ssize_t Index

ctypedef fused Real:
    float
    double

cdef extern from "csrc/kernels.h" nogil:
    int GROUP, MOST_CELLS
    ctypedef struct Block:
        const void* rows
        Index width, n
        const Index* index
        const double* weight
        const double* shift
        const double* offset
        const Index* codes
        const Index* order
        const Index* cell
        Index variables, classes, part_rows
        const double* values
        Index columns
        const double* rotations
        Index turns
        double* peak
        double* total
        double* class_sums
        double* products
    ctypedef struct Phase:
        pass
    ctypedef struct Gram:
        void* panels[2]
        Index height, step, chunk, stripe
        void* product
        Phase* phases
    ctypedef struct MomentsKernels:
        void (*centre_columns[2])(
            const Block*, void* out, Index first, Index last, double* held) noexcept nogil
        void (*reduce_chunks[2])(const Block*, const Gram*, double* held) noexcept nogil
        void (*sample_columns[2])(
            const Block*, Index stride, double* shift, double* spread) noexcept nogil
        void (*add_lower[2])(
            double* scatter, Index width, const void* product, Index apart, double sign,
            const double* vectors, const double* coefficients, Index first,
            Index last) noexcept nogil
    void c_sort_by_cell "sort_by_cell"(
        const Index* codes, Index variables, Index n, Index n_codes, Index part_rows, Index* order,
        Index* cell, Index* place)
    ctypedef struct Matrix:
        char* data
        Index down, across
    ctypedef struct Factors:
        Index rank, width
    ctypedef struct Erasing:
        const Factors* map
        Matrix rows, out
        Index n
        int halves, streamed
    ctypedef struct EraseKernels:
        Index (*size)(Index rank, Index width) noexcept nogil
        void (*pack)(Factors* map, const double* left, const double* right, const double* mean,
                     const double* shift, double* memory) noexcept nogil
        Index (*erase[2])(const Erasing* task) noexcept nogil
        int (*squares_finite[2])(Matrix rows, Index n, Index width) noexcept nogil
    Index NO_MEMORY
    size_t LINE
    ctypedef struct Sweep:
        const void* rows
        const Index* index
        const double* weight
        const double* shift
        const double* inverse
        const Index* codes
        const Index* order
        const Index* cell
        const double* values
        double* sums
        double* leverage
        double* near
        Index n, d, pitch, variables, columns, n_sums, segment, width, stripe
    ctypedef struct AtomicInt64 "_Atomic(int64_t)":
        pass
    ctypedef struct SweepKernels:
        void (*run[2])(const Sweep*, AtomicInt64*) noexcept nogil
    ctypedef struct Level:
        const char* name
        int width[2]
        int wide
        MomentsKernels moments
        EraseKernels erase
        SweepKernels sweep
    const Level* supported_level(int k)

cdef const Level* level = NULL


def levels():
    """Names of the instruction sets that this processor supports, best first."""
    names = []
    while supported_level(len(names)) is not NULL:
        names.append(supported_level(len(names)).name.decode())
    return names


def level_name():
    """Name of the instruction set in use."""
    return level.name.decode()


def use_level(name):
    """Select an instruction set by name, for tests and reports.

    Raises
    ------
    ValueError
        This processor, or this build, has none of that name.
    """
    global level
    found = levels()
    if name not in found:
        raise ValueError(
            f"instruction set {name!r} is not available on this processor; available: "
            f"{', '.join(found)}"
        )
    level = supported_level(found.index(name))


def register_width(itemsize):
    """Numbers of float32 (itemsize 4) or float64 (8) in a register."""
    return level.width[itemsize == 8]


def wide():
    """Whether products of rows are accumulated here rather than by BLAS."""
    return level.wide != 0


use_level(os.environ.get("SPLINCE_FAST_LEVEL") or levels()[0])


# --- arrays ---------------------------------------------------------------------------------------


cdef struct Array:
    void* at
    char kind  # as PEP 3118 names numbers; n for those of NumPy's intp
    int ndim
    Index shape[2]


# The kind of int64.
cdef char INT64 = b"n" if sizeof(Index) == 8 else b"q"


cdef Array array_of(
    object given, str name, bint written, int order=PyBUF_C_CONTIGUOUS
) except *:
    """Address, numbers and shape of a contiguous array, which the caller keeps alive."""
    cdef Array array
    cdef Py_buffer view
    cdef int k
    PyObject_GetBuffer(given, &view, order | PyBUF_FORMAT | (PyBUF_WRITABLE if written else 0))
    try:
        if view.ndim not in (1, 2):
            raise ValueError(f"{name} has {view.ndim} dimensions")
        array.at, array.ndim, array.shape[1] = view.buf, view.ndim, 0
        # A byte order or an alignment that is not the processor's comes before the letter.
        array.kind = view.format[0] if view.format[1] == 0 else 0
        if array.kind in b"ilq" and view.itemsize == sizeof(Index):
            array.kind = b"n"
        for k in range(view.ndim):
            array.shape[k] = view.shape[k]
    finally:
        PyBuffer_Release(&view)
    return array


cdef void* vector(object given, str name, char kind, Index size, bint written) except? NULL:
    """Address of the numbers of an array of shape (size,), checked."""
    cdef Array array = array_of(given, name, written)
    if array.kind != kind:
        raise TypeError(f"{name} is of another dtype")
    if array.ndim != 1 or array.shape[0] != size:
        raise ValueError(f"{name} has to be of shape ({size},)")
    return array.at


cdef void* matrix(
    object given, str name, char kind, Index rows, Index columns, bint written
) except? NULL:
    """Address of the numbers of an array of shape (rows, columns), checked."""
    cdef Array array = array_of(given, name, written)
    if array.kind != kind:
        raise TypeError(f"{name} is of another dtype")
    if array.ndim != 2 or array.shape[0] != rows or array.shape[1] != columns:
        raise ValueError(f"{name} has to be of shape ({rows}, {columns})")
    return array.at


cdef Index rows_in(object given, str name) except -1:
    """Rows of a matrix that may have any number of them."""
    cdef Array array = array_of(given, name, False)
    if array.ndim != 2:
        raise ValueError(f"{name} has to be a matrix")
    return array.shape[0]


cdef bint within(const Index* numbers, Index n, Index low, Index high) noexcept:
    """Whether low <= numbers[i] < high for all i."""
    cdef Index i, smallest = low, largest = high - 1
    for i in range(n):
        smallest = min(smallest, numbers[i])
        largest = max(largest, numbers[i])
    return smallest >= low and largest < high


# --- moments --------------------------------------------------------------------------------------


cdef int take_rows(Block* block, object rows, object index, object weight) except -1:
    """Fill in the rows of a block; returns 0 for float32 and 1 for float64."""
    cdef Array array = array_of(rows, "rows", False)
    if array.kind not in b"fd":
        raise TypeError("rows are neither float32 nor float64")
    if array.ndim != 2:
        raise ValueError("rows have to be a matrix")
    block.rows, block.n, block.width = array.at, array.shape[0], array.shape[1]
    block.index, block.weight = NULL, NULL
    if len(index):
        block.n = len(index)
        block.index = <const Index*>vector(index, "index", b"n", block.n, False)
        if not within(block.index, block.n, 0, array.shape[0]):
            raise ValueError("index names a row that does not exist")
    else:
        vector(index, "index", b"n", 0, False)
    if len(weight):
        block.weight = <const double*>vector(weight, "weight", b"d", block.n, False)
    else:
        vector(weight, "weight", b"d", 0, False)
    return array.kind == b"d"


cdef int take_block(
    Block* block, object rows, object index, object weight, object shift, object offset,
    object codes, object order, object cell, object values, object rotations, Index part_rows,
    object peak, object total, object class_sums, object products,
) except -1:
    """Fill in a block and its sums; returns 0 for float32 and 1 for float64."""
    cdef int dtype = take_rows(block, rows, index, weight)
    cdef Index d = block.width, n = block.n
    if part_rows < GROUP or part_rows % GROUP:
        raise ValueError(f"part_rows has to be a positive multiple of {GROUP}")
    block.part_rows = part_rows
    block.shift = <const double*>vector(shift, "shift", b"d", d, False)
    block.offset = <const double*>vector(offset, "offset", b"d", d, False)
    block.variables = rows_in(codes, "codes")
    block.codes = <const Index*>matrix(codes, "codes", b"n", block.variables, n, False)
    block.order = <const Index*>vector(order, "order", b"n", n, False)
    block.cell = <const Index*>vector(cell, "cell", b"n", n, False)
    block.columns = rows_in(values, "values")
    block.values = <const double*>matrix(values, "values", b"d", block.columns, n, False)
    block.turns = rows_in(rotations, "rotations")
    if block.turns == 0:
        raise ValueError("rotations have no rows")
    block.rotations = <const double*>matrix(
        rotations, "rotations", b"d", block.turns, 2, False)
    block.peak = <double*>vector(peak, "peak", b"d", d, True)
    block.total = <double*>vector(total, "total", b"d", d, True)
    block.classes = rows_in(class_sums, "class_sums")
    block.class_sums = <double*>matrix(class_sums, "class_sums", b"d", block.classes, d, True)
    block.products = <double*>matrix(products, "products", b"d", block.columns, d, True)
    if not (
        within(block.order, n, 0, n)
        and within(block.codes, block.variables * n, -1, block.classes)
    ):
        raise ValueError("order or codes name a row or a class sum that does not exist")
    return dtype


cdef Index in_groups(Index rows) noexcept:
    """Rows rounded up to whole groups."""
    return (rows + GROUP - 1) // GROUP * GROUP


cdef void* memory_for(Index numbers, size_t size) except NULL:
    """Memory for some numbers, at least one, which is to be freed."""
    cdef void* memory = malloc(max(1, numbers) * size)
    if memory is NULL:
        raise MemoryError(f"no memory for {numbers} numbers")
    return memory


def sort_by_cell(codes, Index n_codes, Index part_rows, order, cell):
    """Order the rows of each part so that those with equal codes, a cell, are neighbours.

    One stable counting sort of the cells where they are few, O(v n + parts cells), else one per
    variable, O(v (n + parts n_codes)).

    Parameters
    ----------
    codes : (v, n) intp, -1 <= codes < n_codes
    part_rows : int
        Rows of a part; the last one may have fewer.
    order, cell : (n,) intp, overwritten; cells are numbered from 0 in the new order
    """
    cdef Array of = array_of(codes, "codes", False)
    cdef Index v = of.shape[0], n = of.shape[1]
    cdef const Index* given = <const Index*>matrix(codes, "codes", b"n", v, n, False)
    cdef Index* to_order = <Index*>vector(order, "order", b"n", n, True)
    cdef Index* to_cell = <Index*>vector(cell, "cell", b"n", n, True)
    if n_codes < 0 or part_rows < 1:
        raise ValueError("n_codes or part_rows is too small")
    if not within(given, v * n, -1, n_codes):
        raise ValueError(f"codes have to be from -1 to {n_codes - 1}")
    cdef Index* place = <Index*>memory_for(max(MOST_CELLS, n_codes + 1) + 1, sizeof(Index))
    with nogil:
        c_sort_by_cell(given, v, n, n_codes, part_rows, to_order, to_cell, place)
    free(place)


def sample_columns(rows, index, weight, Index stride, shift, spread):
    """Mean of every `stride`-th row, and its weighted sum of squares about it, in one pass.

    A column that is constant there gets exactly its value, and a spread of exactly 0.

    Parameters
    ----------
    rows : (m, d) float32 or float64, C-contiguous
    index : (n,) intp
        The n >= 1 rows of the block among them, in its order; or empty for all, n = m.
    weight : (n,) float64 > 0, or empty for unit weights
    shift, spread : (d,) float64, overwritten
    """
    cdef Block block
    cdef int dtype = take_rows(&block, rows, index, weight)
    cdef double* to_shift = <double*>vector(shift, "shift", b"d", block.width, True)
    cdef double* to_spread = <double*>vector(spread, "spread", b"d", block.width, True)
    if block.n < 1 or stride < 1:
        raise ValueError("a sample needs a row, and a stride of at least 1")
    with nogil:
        level.moments.sample_columns[dtype](&block, stride, to_shift, to_spread)


def centre_columns(
    rows, index, weight, shift, offset, codes, order, cell, values, rotations, Index part_rows,
    peak, total, class_sums, products, out, Index first, Index last,
):
    """Reduce a block in the columns first..last, and centre it there, in one sweep over memory.

    With y_i = x_i - shift and offset = shift - reference::

        total         = sum_i w_i y_i                  class_sums[c] = sum_{i: codes[., i] = c}
        products[q]   = sum_i values[q, i] (y_i + offset)              w_i (y_i + offset)

    The rows of `out` are sqrt(w_i) y_i, rotated pairwise: (a, b) becomes
    (a cos t + b sin t, b cos t - a sin t), with an angle of its own for each pair. That leaves
    out^T out = sum_i w_i y_i y_i^T as it is. Labels have no influence on `out` and `total`. The
    bits are those of a contiguous copy of the block, and depend on no stripe.

    Parameters
    ----------
    rows : (m, d) float32 or float64, C-contiguous
    index : (n,) intp
        The n rows of the block among them, in its order; or empty for all, n = m.
    weight : (n,) float64 > 0, or empty for unit weights
    shift, offset : (d,) float64
    codes : (v, n) intp, rows of class_sums to add each row to; -1 for none
    order, cell : (n,) intp
        As `sort_by_cell` gives them for these parts.
    values : (q, n) float64, already multiplied by the weights
    rotations : (t, 2) float64, cosines and sines
    part_rows : int, a multiple of 4
        So many rows stay in cache between their centring and their sums per class.
    peak, total, class_sums, products : (d,), (d,), (c, d), (q, d) float64, overwritten;
        peak = max_i |y_i|
    out : (n rounded up to a multiple of 4, d), dtype of the rows; overwritten
    """
    cdef Block block
    cdef int dtype = take_block(
        &block, rows, index, weight, shift, offset, codes, order, cell, values, rotations,
        part_rows, peak, total, class_sums, products)
    cdef void* to = matrix(
        out, "out", b"d" if dtype else b"f", in_groups(block.n), block.width, True)
    if not 0 <= first <= last <= block.width:
        raise ValueError("first and last are no range of columns")
    cdef double* held = <double*>memory_for(block.width, sizeof(double))
    with nogil:
        level.moments.centre_columns[dtype](&block, to, first, last, held)
    free(held)


def reduce_chunks(
    rows, index, weight, shift, offset, codes, order, cell, values, rotations, Index part_rows,
    peak, total, class_sums, products, Index chunk, Index stripe, panels, product, counters,
):
    """Do as `centre_columns`, and take product = out^T out without `out`, chunk by chunk.

    Any number of threads make this call at once, with the same arguments, and share its tasks.
    Each number is the result of the same operations in the same order whoever does them. A task
    that was begun is finished: nobody waits for a thread that has not come.

    Parameters
    ----------
    rows, ..., products
        As in `centre_columns`.
    chunk : int
        Rows that are multiplied at once, a multiple of 4.
    stripe : int
        Columns of a task of centring, a multiple of the numbers of a register.
    panels : (2 p, step) dtype of rows, overwritten
        Two chunks, in panels of the columns of a register; step >= chunk times these columns.
    product : (p lanes, p lanes) dtype of rows, overwritten; read as Fortran-ordered, its lower
        triangle counts
    counters : (chunks + 1, 16) int64, zeros
        Tasks that were begun, and those that are finished, in cache lines of their own.
    """
    cdef Block block
    cdef Gram memory
    cdef int dtype = take_block(
        &block, rows, index, weight, shift, offset, codes, order, cell, values, rotations,
        part_rows, peak, total, class_sums, products)
    cdef char kind = b"d" if dtype else b"f"
    cdef Index lanes = level.width[dtype]
    if chunk < GROUP or chunk % GROUP:
        raise ValueError(f"chunk has to be a positive multiple of {GROUP}")
    if stripe < lanes or stripe % lanes:
        raise ValueError(f"stripe has to be a positive multiple of {lanes}")
    cdef Array shape = array_of(panels, "panels", True)
    memory.height, memory.step = (block.width + lanes - 1) // lanes, shape.shape[1]
    memory.chunk, memory.stripe = chunk, stripe
    memory.panels[0] = matrix(panels, "panels", kind, 2 * memory.height, memory.step, True)
    if memory.step // lanes < chunk:
        raise ValueError("panels: a row has to hold a chunk")
    memory.panels[1] = <char*>memory.panels[0] + (
        memory.height * memory.step * (8 if dtype else 4))
    memory.product = matrix(
        product, "product", kind, memory.height * lanes, memory.height * lanes, True)
    memory.phases = <Phase*>matrix(
        counters, "counters", INT64, (block.n + chunk - 1) // chunk + 1, 16, True)
    # Before the first task: one that fails would never be finished.
    cdef double* held = <double*>memory_for(block.width, sizeof(double))
    with nogil:
        level.moments.reduce_chunks[dtype](&block, &memory, held)
    free(held)


def add_lower(scatter, product, double sign, vectors, coefficients, Index first, Index last):
    """scatter += sign * product + sum_k coefficients[k] vectors[k] vectors[k]^T, lower triangle.

    For column t of first..last its mirror d - 1 - t is done too, so that equal ranges of
    0..(d + 1) // 2 are equal work.

    Parameters
    ----------
    scatter : (d, d) float64, Fortran-ordered, changed in place
    product : (at least d, as many) float32 or float64, Fortran-ordered, or (0, 0) for none
    vectors, coefficients : (2, d), (2,) float64
    """
    cdef Array to = array_of(scatter, "scatter", True, PyBUF_F_CONTIGUOUS)
    cdef Array added = array_of(product, "product", False, PyBUF_F_CONTIGUOUS)
    cdef Index d = to.shape[0]
    if to.kind != b"d" or added.kind not in b"fd":
        raise TypeError("scatter or product is of another dtype")
    if to.ndim != 2 or to.shape[1] != d:
        raise ValueError("scatter has to be square")
    if added.ndim != 2 or added.shape[0] != added.shape[1] or 0 < added.shape[0] < d:
        raise ValueError("product has to be square, and of the size of the scatter at least")
    cdef const void* given = added.at if added.shape[0] else NULL
    cdef const double* u = <const double*>matrix(vectors, "vectors", b"d", 2, d, False)
    cdef const double* by = <const double*>vector(coefficients, "coefficients", b"d", 2, False)
    if not 0 <= first <= last <= (d + 1) // 2:
        raise ValueError("first and last are no range of columns")
    with nogil:
        level.moments.add_lower[added.kind == b"d"](
            <double*>to.at, d, given, added.shape[0], sign, u, by, first, last)


# What `judge_sweep` may find, as bits.
cdef enum:
    C_SUSPECT = 1  # NaN, infinity, or squares that may leave the range of float64
    C_FAR = 2  # the shift is too far from the mean: subtracting costs digits
    C_NEEDS_FLOAT64 = 4  # float32 products would overflow or underflow
SUSPECT, FAR, NEEDS_FLOAT64 = C_SUSPECT, C_FAR, C_NEEDS_FLOAT64

# Below this no row's sum of squares can reach what the check of values refuses.
cdef double LARGEST_SQUARES = 1e297
# Least deviation, and greatest root of a sum of squares, that float32 holds to full precision.
cdef double LEAST_FLOAT32 = 1e-15, MOST_FLOAT32 = 1e18


def judge_sweep(
    shift, spread, peak, total, double whole, double lightest, double heaviest, Index n,
    double excess,
):
    """Say, as bits, what a sweep over a block about `shift` has met.

    Parameters
    ----------
    shift, spread, peak, total : (d,) float64
        As `sample_columns` and `centre_columns` leave them.
    whole, lightest, heaviest : float
        Sum, least and greatest of the weights of the n rows.
    excess : float
        total^2 may be at most this times `whole` times a lower bound of the sum of squares.
    """
    cdef Index d = len(shift), j
    cdef const double* about = <const double*>vector(shift, "shift", b"d", d, False)
    cdef const double* least = <const double*>vector(spread, "spread", b"d", d, False)
    cdef const double* most = <const double*>vector(peak, "peak", b"d", d, False)
    cdef const double* sums = <const double*>vector(total, "total", b"d", d, False)
    cdef int found = 0
    cdef double largest = 0.0, size, square, tip
    with nogil:
        for j in range(d):
            size = fabs(about[j]) + most[j]
            largest += size * size
            if not isfinite(sums[j]):
                found |= C_SUSPECT
            square = sums[j] * sums[j]
            if square > excess * whole * least[j]:
                # The row of the peak alone has that much about the block's mean.
                tip = max(0.0, most[j] - fabs(sums[j]) / whole)
                if square > excess * whole * (lightest * tip * tip):
                    found |= C_FAR
            if 0.0 < most[j] and most[j] * sqrt(lightest) < LEAST_FLOAT32:
                found |= C_NEEDS_FLOAT64
            if most[j] * sqrt(heaviest * n) > MOST_FLOAT32:
                found |= C_NEEDS_FLOAT64
    if not largest < LARGEST_SQUARES:
        found |= C_SUSPECT
    return found


def reference_is_far(
    reference, deviation, double weight, squares, shift, spread, double sampled, double whole,
    double far, double roundings,
):
    """Whether the mean, after a block, would lie `far` deviations from the reference point.

    Parameters
    ----------
    reference, deviation, squares : (d,) float64; weight : float
        Of the state: sum w (x - reference), and sum w (x - mean)^2.
    shift, spread : (d,) float64
        Mean of a sample of the block of weight `sampled`, and its squares about that mean.
    whole : float
        Weight of the block.
    roundings : float
        A distance of this times |reference| is rounding.
    """
    cdef Index d = len(reference), j
    cdef const double* now = <const double*>vector(reference, "reference", b"d", d, False)
    cdef const double* past = <const double*>vector(deviation, "deviation", b"d", d, False)
    cdef const double* own = <const double*>vector(squares, "squares", b"d", d, False)
    cdef const double* mean = <const double*>vector(shift, "shift", b"d", d, False)
    cdef const double* about = <const double*>vector(spread, "spread", b"d", d, False)
    cdef double together = weight + whole, ahead, drift, gap, spread_of_all
    cdef bint found = False
    with nogil:
        for j in range(d):
            ahead = mean[j] - now[j]
            drift = (past[j] + whole * ahead) / together
            if fabs(drift) <= roundings * fabs(now[j]):
                continue
            gap = ahead - past[j] / weight
            spread_of_all = own[j] + about[j] * (whole / sampled)
            spread_of_all = spread_of_all + weight * whole / together * gap * gap
            if drift * drift * together > far * far * spread_of_all:
                found = True
                break
    return found


def count_classes(labels, weight, Index known, codes, present, rows, weights):
    """Number the classes that occur by their first row, and count the rows of each.

    The numbers depend on the rows alone, and not on the order in which the state met the classes.

    Parameters
    ----------
    labels : (n,) intp >= -1
    weight : (n,) float64, or empty for unit weights
    known : int
        Classes that the state has.
    codes : (n,) intp, overwritten
        Number of each row's class, -1 for a missing label.
    present, rows, weights : (n,) intp, intp, float64
        Overwritten up to the number of classes that occur: the class, its rows, their weight.

    Returns
    -------
    int
        Number of classes that occur.
    int
        Number of classes that the state will have.
    """
    cdef Index n = len(labels), k = max(known, 0), number = 0, i, c
    cdef const Index* label = <const Index*>vector(labels, "labels", b"n", n, False)
    cdef const double* w = <const double*>vector(
        weight, "weight", b"d", n if len(weight) else 0, False)
    cdef bint weighted = len(weight) > 0
    cdef Index* code = <Index*>vector(codes, "codes", b"n", n, True)
    cdef Index* found = <Index*>vector(present, "present", b"n", n, True)
    cdef Index* count = <Index*>vector(rows, "rows", b"n", n, True)
    cdef double* total = <double*>vector(weights, "weights", b"d", n, True)
    for i in range(n):
        if label[i] < -1:
            raise ValueError("a label is below -1")
        k = max(k, label[i] + 1)
    cdef Index* place = <Index*>memory_for(k, sizeof(Index))
    with nogil:
        for c in range(k):
            place[c] = -1
        for i in range(n):
            c = label[i]
            if c >= 0 and place[c] < 0:
                place[c] = number
                found[number], count[number], total[number] = c, 0, 0.0
                number += 1
            code[i] = place[c] if c >= 0 else -1
            if c >= 0:
                count[place[c]] += 1
                total[place[c]] += w[i] if weighted else 1.0
    free(place)
    return number, k


def add_classes(rows, weights, sums, where, more_rows, more_weights, added):
    """Add counts, weights and sums of the classes `where`, which names each at most once.

    Nothing is added where an argument is wrong, and no memory is needed.

    Parameters
    ----------
    rows, weights, sums : (k,) int64, (k,) float64, (k, d) float64, changed in place
    where, more_rows, more_weights, added : (c,) intp, (c,) intp, (c,) float64, (c, d) float64
    """
    cdef Index c = len(where), k = len(rows), d, i, j
    cdef Array of = array_of(sums, "sums", True)
    d = of.shape[1]
    cdef int64_t* count = <int64_t*>vector(rows, "rows", INT64, k, True)
    cdef double* total = <double*>vector(weights, "weights", b"d", k, True)
    cdef double* to = <double*>matrix(sums, "sums", b"d", k, d, True)
    cdef const Index* at = <const Index*>vector(where, "where", b"n", c, False)
    cdef const Index* n = <const Index*>vector(more_rows, "more_rows", b"n", c, False)
    cdef const double* w = <const double*>vector(more_weights, "more_weights", b"d", c, False)
    cdef const double* x = <const double*>matrix(added, "added", b"d", c, d, False)
    for i in range(c):
        if not 0 <= at[i] < k:
            raise ValueError("a class is not among those that are known")
    with nogil:
        for i in range(c):
            count[at[i]] += n[i]
            total[at[i]] += w[i]
            for j in range(d):
                to[at[i] * d + j] += x[i * d + j]


# --- erase ---------------------------------------------------------------------------------------


cdef class PackedFactors:
    """The map x - left^T (right (x - mean) - shift), as the instruction set in use reads it.

    Parameters
    ----------
    left, right : (r, d) float64, C-contiguous
    mean : (d,) float64
    shift : (r,) float64
        Copied, as all of them are.

    Raises
    ------
    ValueError
        Other shapes or dtypes.
    """

    cdef Factors map
    cdef const EraseKernels* kernels
    cdef void* memory

    def __cinit__(self, const double[:, ::1] left, const double[:, ::1] right,
                  const double[::1] mean, const double[::1] shift):
        cdef Index rank = shift.shape[0], width = mean.shape[0]
        if (left.shape[0] != rank or left.shape[1] != width or right.shape[0] != rank
                or right.shape[1] != width):
            raise ValueError(
                f"left {left.shape[0], left.shape[1]}, right {right.shape[0], right.shape[1]}, "
                f"mean {width,} and shift {rank,} do not fit together"
            )
        self.kernels = &level.erase
        self.map.rank, self.map.width = rank, width
        self.memory = malloc(self.kernels.size(rank, width) * sizeof(double) + LINE)
        if self.memory is NULL:
            raise MemoryError("no memory for the factors of an eraser")
        # The factors begin at a cache line.
        cdef size_t skip = (LINE - <size_t>self.memory % LINE) % LINE
        self.kernels.pack(
            &self.map, &left[0, 0] if rank and width else NULL,
            &right[0, 0] if rank and width else NULL, &mean[0] if width else NULL,
            &shift[0] if rank else NULL, <double*>(<char*>self.memory + skip),
        )

    def __dealloc__(self):
        free(self.memory)

    def __reduce__(self):
        raise TypeError("packed factors belong to one processor; pack them again")


cdef struct View:
    Py_buffer buffer
    Matrix matrix
    Index n, width
    char kind  # of the numbers: e, f or d, as in the module struct


cdef int look(object array, View* view, str name, bint written) except -1:
    """The memory of an aligned (n, d) array of float16, float32 or float64.

    Raises
    ------
    TypeError, ValueError
        It is none, or is read-only where it is written; nothing is held then.
    """
    PyObject_GetBuffer(
        array, &view.buffer, PyBUF_STRIDES | PyBUF_FORMAT | (PyBUF_WRITABLE if written else 0)
    )
    cdef Py_buffer* buffer = &view.buffer
    cdef Index size = buffer.itemsize
    cdef char kind = buffer.format[0] if buffer.format is not NULL else b"B"
    if (buffer.ndim != 2 or buffer.format is NULL or buffer.format[1] != 0
            or not (kind == b"e" or kind == b"f" or kind == b"d")):
        shown = buffer.format.decode() if buffer.format is not NULL else "B"
        axes = buffer.ndim
        PyBuffer_Release(buffer)
        raise ValueError(
            f"{name} has {axes} axes and items {shown!r}; it must be (n, d) and 'e', 'f' or 'd'"
        )
    view.n, view.width = buffer.shape[0], buffer.shape[1]
    view.kind = kind
    view.matrix.data = <char*>buffer.buf
    view.matrix.down, view.matrix.across = buffer.strides[0], buffer.strides[1]
    # Strides of axes that are not stepped along may be anything.
    if view.n <= 1:
        view.matrix.down = view.width * size
    if view.width <= 1:
        view.matrix.across = size
    if view.n and view.width and (
        <size_t>buffer.buf % size or view.matrix.down % size or view.matrix.across % size
    ):
        PyBuffer_Release(buffer)
        raise ValueError(f"{name} is not aligned to its items")
    return 0


def apply_rows(PackedFactors factors not None, rows, out, Index start, Index stop,
               bint streamed=False):
    """out[i] = rows[i] - left^T (right (rows[i] - mean) - shift), start <= i < stop, in float64.

    Every row goes the same way, whatever its neighbours and its layout.

    Parameters
    ----------
    factors : PackedFactors
    rows, out : (n, d) float16, float32 or float64
        Of one dtype, aligned, of any strides; the same memory, or memory that does not overlap.
    start, stop : int
    streamed : bool
        Write past the caches, where rows lie in one piece and are not in `out` already.

    Returns
    -------
    int
        The first row with a finite number that is none in float16, or -1.

    Raises
    ------
    ValueError, TypeError
        Arrays of other shapes, dtypes or alignment, `out` that is read-only, rows that are not
        there. Nothing is written.
    MemoryError
        Nothing is written.
    """
    cdef View source, target
    cdef Erasing task
    cdef Index row
    look(rows, &source, "rows", False)
    try:
        look(out, &target, "out", True)
        try:
            if (source.n != target.n or source.kind != target.kind
                    or source.width != factors.map.width or target.width != factors.map.width):
                raise ValueError(
                    f"rows {source.n, source.width} of {chr(source.kind)!r} and out "
                    f"{target.n, target.width} of {chr(target.kind)!r} must have one shape and "
                    f"dtype, and {factors.map.width} columns"
                )
            if not 0 <= start <= stop <= source.n:
                raise ValueError(f"rows {start} to {stop} of {source.n}")
            task.map = &factors.map
            task.rows, task.out = source.matrix, target.matrix
            task.rows.data += start * task.rows.down
            task.out.data += start * task.out.down
            task.n = stop - start
            task.halves, task.streamed = source.kind == b"e", streamed
            with nogil:
                row = factors.kernels.erase[source.kind == b"d"](&task)
        finally:
            PyBuffer_Release(&target.buffer)
    finally:
        PyBuffer_Release(&source.buffer)
    if row == NO_MEMORY:
        raise MemoryError("no memory to erase rows; nothing was written")
    return start + row if row >= 0 else -1


def squares_finite(rows, Index start, Index stop):
    """Whether the sum of squares of each row start..stop is below 1e298.

    If so, the row holds neither NaN nor infinity nor numbers whose squares overflow.

    Parameters
    ----------
    rows : (n, d) float32 or float64
        Aligned; the numbers of a row lie in one piece.
    start, stop : int

    Raises
    ------
    ValueError, TypeError
        Another array, or rows that are not there.
    """
    cdef View view
    cdef int finite
    cdef const EraseKernels* kernels = &level.erase
    look(rows, &view, "rows", False)
    try:
        if view.kind == b"e" or view.matrix.across != view.buffer.itemsize:
            raise ValueError("rows must be float32 or float64, each in one piece")
        if not 0 <= start <= stop <= view.n:
            raise ValueError(f"rows {start} to {stop} of {view.n}")
        view.matrix.data += start * view.matrix.down
        with nogil:
            finite = kernels.squares_finite[view.kind == b"d"](
                view.matrix, stop - start, view.width
            )
    finally:
        PyBuffer_Release(&view.buffer)
    return finite != 0


# --- sweep ---------------------------------------------------------------------------------------


def sweep_block(
    const Real[:, ::1] rows, const Index[::1] index, const double[::1] weight,
    const double[::1] shift, const double[::1] inverse, const Index[:, ::1] codes,
    const Index[::1] order, const Index[::1] cell, const double[:, ::1] values,
    Index segment, Index width, Index stripe, double[:, :, ::1] sums,
    double[:, :, ::1] near, double[:, ::1] leverage, int64_t[::1] counter,
):
    """Reduce a block in segments of rows that have sums of their own, in one pass.

    Of the rows i of segment g, with y_i = x_i - shift and k classes::

        sums[g, 0]         = sum_i w_i y_i
        sums[g, 1]         = sum_i w_i y_i^2
        sums[g, 2 + c]     = sum_{i: codes[., i] = c} w_i y_i
        sums[g, 2 + k + q] = sum_i values[q, i] y_i
        leverage[s, i]     = sum_{j in stripe s} inverse_j y_ij^2

    Any number of threads make this call at once with the same arguments, and share its tasks. Each
    number is the result of the same operations in the same order, whatever their number.

    Parameters
    ----------
    rows : (m, d) float32 or float64
    index : (n,) intp
        The n rows of the block among `rows`, in its order; or empty for all, n = m.
    weight : (n,) float64 > 0, or empty for unit weights
    shift, inverse : (d,) float64
    codes : (v, n) intp below k; -1 for none
    order, cell : (n,) intp
        As `sort_by_cell` gives them for parts of `segment` rows.
    values : (q, n) float64, multiplied by the weights
    segment, width, stripe : int
        Rows of a segment; columns of a task, a multiple of `stripe`, that of 64 bytes.
    sums : (segments, 2 + k + q, d) float64, overwritten
    near : (segments, 4, at least d) float64, overwritten; fastest where rows are cache lines
    leverage : (d / stripe rounded up, n) float64, overwritten
    counter : (1,) int64, 0

    Raises
    ------
    ValueError
        The shapes contradict each other.
    """
    cdef Sweep s
    s.n, s.d = codes.shape[1], rows.shape[1]
    s.variables, s.columns, s.n_sums = codes.shape[0], values.shape[0], sums.shape[1]
    s.segment, s.width, s.stripe, s.pitch = segment, width, stripe, near.shape[2]
    if not (
        s.n > 0 and s.d > 0 and segment > 0 and stripe > 0 and stripe % 16 == 0
        and width > 0 and width % stripe == 0
        and (index.shape[0] == s.n or (index.shape[0] == 0 and rows.shape[0] == s.n))
        and weight.shape[0] in (0, s.n)
        and shift.shape[0] == inverse.shape[0] == sums.shape[2] == s.d
        and near.shape[1] == 4 and near.shape[2] >= s.d
        and order.shape[0] == cell.shape[0] == values.shape[1] == leverage.shape[1] == s.n
        and sums.shape[0] == near.shape[0] == (s.n + segment - 1) // segment
        and s.n_sums >= 2 + s.columns and leverage.shape[0] == (s.d + stripe - 1) // stripe
        and counter.shape[0] == 1
    ):
        raise ValueError("the shapes of rows, labels, sums and leverages contradict each other")
    s.rows, s.shift, s.inverse = &rows[0, 0], &shift[0], &inverse[0]
    s.index = &index[0] if index.shape[0] else NULL
    s.weight = &weight[0] if weight.shape[0] else NULL
    s.codes = &codes[0, 0] if s.variables else NULL
    s.values = &values[0, 0] if s.columns else NULL
    s.order, s.cell = &order[0], &cell[0]
    s.sums, s.near, s.leverage = &sums[0, 0, 0], &near[0, 0, 0], &leverage[0, 0]
    if not (
        within(s.order, s.n, 0, s.n) and within(s.index, index.shape[0], 0, rows.shape[0])
        and within(s.codes, s.variables * s.n, -1, s.n_sums - s.columns - 2)
    ):
        raise ValueError("index, order or codes name a row or a sum that does not exist")
    cdef int kind = 0 if Real is float else 1
    with nogil:
        level.sweep.run[kind](&s, <AtomicInt64*>&counter[0])
