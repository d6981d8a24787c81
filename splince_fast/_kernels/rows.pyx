"""Erasing a few rows in memory that others own: for one token less than a microsecond."""

from libc.stdlib cimport free, malloc

cdef enum:
    MOST = 16
    LANES = 16  # partial sums of a dot product, so that it runs in vectors

MOST_DIRECTIONS = MOST


cdef class FewRows:
    """The map x - left^T (right x - bias) with factors of its own, in one piece of memory.

    Parameters
    ----------
    neg_bias : (r,) float32, r at most MOST_DIRECTIONS
        Minus the bias.
    right, left : (r, d) float32
    """

    cdef float* factors
    cdef Py_ssize_t rank, d

    def __cinit__(self, const float[::1] neg_bias, const float[:, ::1] right,
                  const float[:, ::1] left):
        cdef Py_ssize_t k, j, r = right.shape[0], d = right.shape[1]
        if r > MOST or neg_bias.shape[0] != r or left.shape[0] != r or left.shape[1] != d:
            raise ValueError("factors of too many directions, or of different shapes")
        self.factors = <float*>malloc((r * (2 * d + 1) + 1) * sizeof(float))
        if self.factors == NULL:
            raise MemoryError("no memory for the factors of an eraser")
        self.rank, self.d = r, d
        for k in range(r):
            self.factors[k] = neg_bias[k]
            for j in range(d):
                self.factors[r + k * d + j] = right[k, j]
                self.factors[r + (r + k) * d + j] = left[k, j]

    def __dealloc__(self):
        free(self.factors)

    def erase(self, size_t source, size_t target, Py_ssize_t n, size_t chosen):
        """Write n erased rows. Nothing is checked: addresses come from contiguous tensors.

        Parameters
        ----------
        source, target : addresses of (n, d) float32
            Both may be the same.
        n : int
        chosen : address of n bytes, or 0
            Rows whose byte is 0 are copied.
        """
        cdef Py_ssize_t i, j, k, lane, block, d = self.d, rank = self.rank
        cdef const float* right = self.factors + rank
        cdef const float* left = right + rank * d
        cdef const float* vector
        cdef const unsigned char* mask = <const unsigned char*>chosen
        cdef const float* x
        cdef float* y
        cdef float[MOST] coefficients
        cdef float[LANES] sums
        cdef float coefficient
        for i in range(n):
            x = <const float*>source + i * d
            y = <float*>target + i * d
            if source != target:
                for j in range(d):
                    y[j] = x[j]
            if mask != NULL and not mask[i]:
                continue
            for k in range(rank):
                vector = right + k * d
                for lane in range(LANES):
                    sums[lane] = 0.0
                for block in range(d // LANES):
                    for lane in range(LANES):
                        sums[lane] += x[block * LANES + lane] * vector[block * LANES + lane]
                for j in range(d - d % LANES, d):
                    sums[0] += x[j] * vector[j]
                coefficients[k] = self.factors[k]
                for lane in range(LANES):
                    coefficients[k] += sums[lane]
            for k in range(rank):
                vector = left + k * d
                coefficient = coefficients[k]
                for j in range(d):
                    y[j] -= coefficient * vector[j]
