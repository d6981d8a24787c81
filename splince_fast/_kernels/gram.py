"""Rows to their matrix of products in one pass: threads centre a chunk and multiply the one before.

A general SYRK reads rows that somebody has centred and written. Here a chunk of centred rows goes
straight into the layout from which registers are filled, and stays in cache until it is multiplied.
"""

from __future__ import annotations

import os
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from splince_fast._kernels.accumulate import centre_block, size_of
from splince_fast._kernels.jit import kernel
from splince_fast._kernels.registers import FEATURES, REGISTER, broadcast, items

# Whether the processor has such registers, and adds products to them at one rounding.
WIDE = "+avx512f" in FEATURES or ("+avx2" in FEATURES and "+fma" in FEATURES)
# A tile of sums has this many columns, and up to three registers of rows in each: 24 of 32
# registers, or 12 of 16.
COLUMNS = REGISTER // 8
_HEIGHT = 3
# Rows of a tile are taken from so many bytes of a chunk, which a second-level cache keeps.
_BLOCK = 1 << 19
# Tasks into which the columns of a product are cut: enough to keep threads equally busy.
_TASKS = 24
# Whoever waits looks at a counter so often, some 0.1 ms, and sleeps for as long before each further
# look: the thread that it waits for has lost its processor, perhaps to this one. To yield instead
# can cost a thread its share of time, call by call.
_LOOKS, _NAP = 2000, 50

_INDEX = ir.IntType(64)


def _multiplying(height: int) -> Any:
    """product[j + q, (p + h) lanes + l] = sum_{k < depth} panels[p + h, k, l] x[k, j + q].

    For h < height, l < lanes and q < COLUMNS; column j + q of x is lane (j + q) % lanes of panel
    (j + q) // lanes. What was there before is added unless `first`. `panels` and `product` are
    C-contiguous and of one dtype.
    """

    def multiply(
        typing: Any, panels: Any, p: Any, j: Any, depth: Any, product: Any, first: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            given, into = (items(context, builder, signature.args[k], args[k]) for k in (0, 4))
            _, p, j, depth, _, first = args
            real = context.get_data_type(signature.args[0].dtype)
            size = context.get_abi_sizeof(real)
            lanes = REGISTER // size
            vector = ir.VectorType(real, lanes)
            new_variable: Any = cgutils.alloca_once
            sums = [
                [new_variable(builder, vector) for _ in range(height)] for _ in range(COLUMNS)
            ]  # LLVM keeps them in registers
            for total in (total for column in sums for total in column):
                builder.store(ir.Constant(vector, [0.0] * lanes), total)
            panel, lane = builder.udiv(j, _INDEX(lanes)), builder.urem(j, _INDEX(lanes))
            rows = [builder.add(p, _INDEX(h)) for h in range(height)]
            with cgutils.for_range(builder, depth, intp=_INDEX) as loop:
                k = loop.index
                left = [
                    builder.load(
                        builder.bitcast(given(row, k, _INDEX(0)), vector.as_pointer()), align=size
                    )
                    for row in rows
                ]
                right = given(panel, k, lane)
                for q, column in enumerate(sums):
                    share = broadcast(builder, builder.load(builder.gep(right, [_INDEX(q)])), lanes)
                    for factor, total in zip(left, column, strict=True):
                        term = builder.fmul(share, factor, flags=("contract",))
                        found = builder.fadd(builder.load(total), term, flags=("contract",))
                        builder.store(found, total)
            for q, column in enumerate(sums):
                for row, total in zip(rows, column, strict=True):
                    address = into(builder.add(j, _INDEX(q)), builder.mul(row, _INDEX(lanes)))
                    place = builder.bitcast(address, vector.as_pointer())
                    found = builder.load(total)
                    with builder.if_else(first) as (new, old):
                        with new:
                            builder.store(found, place, align=size)
                        with old:
                            before = builder.load(place, align=size)
                            builder.store(builder.fadd(before, found), place, align=size)
            return context.get_dummy_value()

        index = numba.types.intp
        return numba.types.void(panels, index, index, index, product, numba.boolean), generate

    return intrinsic(multiply)


_multiply_one, _multiply_two, _multiply_three = (_multiplying(h) for h in (1, 2, _HEIGHT))


def _take(typing: Any, counters: Any, i: Any, k: Any) -> Any:
    """counters[i, k] before 1 is added to it, by no other thread meanwhile."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = items(context, builder, signature.args[0], args[0])(*args[1:])
        return builder.atomic_rmw("add", place, _INDEX(1), "acq_rel")

    return numba.types.intp(counters, numba.types.intp, numba.types.intp), generate


def _look(typing: Any, counters: Any, i: Any, k: Any) -> Any:
    """counters[i, k], and with it all that other threads wrote before they added to it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if "+sse2" in FEATURES:  # one look at a time, for the sake of the core's other thread
            types = ir.FunctionType(ir.VoidType(), [])
            pause = builder.module.declare_intrinsic("llvm.x86.sse2.pause", [], types)
            builder.call(pause, [])
        place = items(context, builder, signature.args[0], args[0])(*args[1:])
        return builder.load_atomic(place, "acquire", 8)

    return numba.types.intp(counters, numba.types.intp, numba.types.intp), generate


take: Any = intrinsic(_take)
look: Any = intrinsic(_look)
if os.name == "posix":
    _sleep: Any = numba.types.ExternalFunction("usleep", numba.types.int32(numba.types.uint32))
else:

    @kernel
    def _sleep(microseconds: int) -> int:
        """Nothing: whoever waits looks again."""
        return 0


@kernel
def multiply_columns(
    panels: Any, depth: int, low: int, high: int, first: int, last: int, product: Any, fresh: bool
) -> None:
    """Columns first..last of X^T X, in the panels low..high of rows that reach the diagonal."""
    lanes = panels.shape[2]
    for j in range(first, last, COLUMNS):
        p = max(low, j // lanes)
        left = (high - p) % _HEIGHT
        if p < high and left == 1:
            _multiply_one(panels, p, j, depth, product, fresh)
        elif p < high and left == 2:
            _multiply_two(panels, p, j, depth, product, fresh)
        for at in range(p + left, high, _HEIGHT):
            _multiply_three(panels, at, j, depth, product, fresh)


@kernel
def reduce_chunks(
    rows: Any, index: Any, weight: Any, shift: Any, offset: Any, codes: Any, order: Any, cell: Any,
    values: Any, rotations: Any, part_rows: int, stripe: int, four: Any, panels: Any, peak: Any,
    total: Any, class_sums: Any, products: Any, product: Any, counters: Any,
) -> None:  # fmt: skip
    """What `centre_block` finds in a block, and product = out^T out without `out`.

    Any number of threads make this call at once, with the same arguments, and share its tasks: in
    phase t stripes of chunk t are centred, and columns of the product of chunk t - 1 are taken.
    Each number is the result of the same operations in the same order whoever does them. A task
    that was begun is finished: nobody waits for a thread that has not come.

    Parameters
    ----------
    rows, ..., part_rows, peak, total, class_sums, products
        As in `centre_block`.
    stripe : int
        Columns of a task of centring, a multiple of the lanes of a register.
    four : (4, p lanes) dtype of rows; zeros, overwritten up to column d
    panels : (2, p, k, lanes) dtype of rows, overwritten
        Two chunks of k rows, a multiple of 4; the columns of a panel fill a register.
    product : (p lanes, p lanes) dtype of rows, overwritten; read as Fortran-ordered, its lower
        triangle counts
    counters : (chunks + 1, 16) int64, zeros
        Tasks that were begun, and those that are finished, in cache lines of their own.
    """
    n, d = size_of(rows, index), rows.shape[1]
    work = np.empty(d)  # before the first task: one that fails would never be finished
    height, chunk = panels.shape[1:3]
    chunks = (n + chunk - 1) // chunk
    stripes = (d + stripe - 1) // stripe
    block = max(_HEIGHT, _BLOCK // (chunk * REGISTER) // _HEIGHT * _HEIGHT)
    blocks = (height + block - 1) // block
    share = (d + _TASKS * COLUMNS - 1) // (_TASKS * COLUMNS) * COLUMNS
    shares = (d + share - 1) // share
    for phase in range(chunks + 1):
        centring = stripes if phase < chunks else 0
        tasks = centring + (blocks * shares if phase > 0 else 0)
        task = take(counters, phase, 0)
        while task < tasks:
            if task < centring:
                first = task * stripe
                centre_block(
                    rows, index, weight, shift, offset, codes, order, cell, values, rotations,
                    part_rows, phase * chunk, min(n, (phase + 1) * chunk), first,
                    min(d, first + stripe), four, panels[phase % 2], peak, total, class_sums,
                    products, work,
                )  # fmt: skip
            else:
                low, column = divmod(task - centring, shares)
                depth = min(chunk, (n - (phase - 1) * chunk + 3) // 4 * 4)
                multiply_columns(
                    panels[(phase - 1) % 2], depth, low * block, min(height, (low + 1) * block),
                    column * share, min(d, (column + 1) * share), product, phase == 1,
                )  # fmt: skip
            take(counters, phase, 8)
            task = take(counters, phase, 0)
        looks = 0
        while look(counters, phase, 8) < tasks:
            looks += 1
            if looks > _LOOKS:
                _sleep(_NAP)
