"""What Numba's loops cannot say: products in registers, stores past the caches, reads far ahead."""

from __future__ import annotations

from functools import partial
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from splince_fast._kernels.registers import (
    FEATURES,
    LINE,
    REGISTER,
    ask_for,
    broadcast,
    items,
    sum_of_lanes,
)

LANES = REGISTER // 8  # numbers of float64 in a register
# A tile of sums fills 16 of 32 registers, or 8 of 16.
ROWS, COLUMNS = LANES, 2 * LANES
STREAMED = 16  # bytes that are stored past the caches at once

_INDEX, _NUMBER = ir.IntType(64), ir.IntType(32)
_VECTOR = ir.VectorType(ir.DoubleType(), LANES)


def _vector(builder: Any, place: Any, kind: Any, align: int) -> Any:
    """The numbers from an address on, as many as a register of float64 has, in float64."""
    found = builder.load(builder.bitcast(place, kind.as_pointer()), align=align)
    return found if kind == _VECTOR else builder.fpext(found, _VECTOR)


def _adding_product(height: int, width: int, *, streaming: bool = False) -> Any:
    """e[m + p, j + q] = c[k + p, j + q] + sum_t a[i + p, t] b[first + t, q], t < depth.

    The tile has p < height, q < width. a and b are float64, c and e of one dtype, float32 or
    float64, and may be the same; all are C-contiguous. The sum is float64, and is added before it
    is rounded to the dtype of e; it is the same for a tile of any size.

    Where `streaming`, items start..stop of source are written to target beside the sums, as
    `stream` writes them: ROWS numbers a step, so stop - start is at most ROWS depth.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left, right, given, into = (
            items(context, builder, signature.args[q], args[q]) for q in (0, 2, 5, 7)
        )
        _, i, _, first, depth, _, k, _, m, j = args[:10]
        new_variable: Any = cgutils.alloca_once
        rows = [builder.add(i, _INDEX(p)) for p in range(height)]
        halves = range(0, width, LANES)
        sums = [
            [new_variable(builder, _VECTOR) for _ in halves] for _ in rows
        ]  # LLVM keeps them in registers
        for total in (total for row in sums for total in row):
            builder.store(ir.Constant(_VECTOR, [0.0] * LANES), total)
        with cgutils.for_range(builder, depth, intp=_INDEX) as loop:
            if streaming:
                done = builder.mul(loop.index, _INDEX(ROWS))
                _stream_line(context, builder, signature.args[10:], args[10:], done)
            t = builder.add(first, loop.index)
            factors = [_vector(builder, right(t, _INDEX(q)), _VECTOR, 8) for q in halves]
            for row, totals in zip(rows, sums, strict=True):
                share = broadcast(builder, builder.load(left(row, loop.index)), LANES)
                for total, factor in zip(totals, factors, strict=True):
                    product = builder.fmul(share, factor, flags=("contract",))
                    found = builder.fadd(builder.load(total), product, flags=("contract",))
                    builder.store(found, total)
        real = context.get_data_type(signature.args[5].dtype)
        kind, size = ir.VectorType(real, LANES), context.get_abi_sizeof(real)
        sources, targets = (
            [
                item(builder.add(row, _INDEX(p)), builder.add(j, _INDEX(q)))
                for p in range(height)
                for q in halves
            ]
            for item, row in ((given, k), (into, m))
        )
        found = []
        # No store before the last load: it would wait for one to an address 4096 k away.
        for place, total in zip(sources, (total for row in sums for total in row), strict=True):
            found.append(builder.fadd(_vector(builder, place, kind, size), builder.load(total)))
        for place, value in zip(targets, found, strict=True):
            narrow = value if kind == _VECTOR else builder.fptrunc(value, kind)
            builder.store(narrow, builder.bitcast(place, kind.as_pointer()), align=size)
        return context.get_dummy_value()

    def add(
        typing: Any, a: Any, i: Any, b: Any, first: Any, depth: Any, c: Any, k: Any, e: Any,
        m: Any, j: Any,
    ) -> Any:  # fmt: skip
        return void(a, index, b, index, index, c, index, e, index, index), generate

    def add_and_stream(
        typing: Any, a: Any, i: Any, b: Any, first: Any, depth: Any, c: Any, k: Any, e: Any,
        m: Any, j: Any, source: Any, start: Any, stop: Any, target: Any,
    ) -> Any:  # fmt: skip
        return void(
            a, index, b, index, index, c, index, e, index, index, source, index, index, target
        ), generate

    void, index = numba.types.void, numba.types.intp
    return intrinsic(add_and_stream if streaming else add)


def _stream_line(context: Any, builder: Any, kinds: Any, args: Any, done: Any) -> None:
    """One line of `stream`, whose kinds and args these are, `done` items after its start.

    Nothing is written within a line, or behind the stop.
    """
    given, into = (items(context, builder, kinds[k], args[k]) for k in (0, 3))
    real = context.get_data_type(kinds[0].dtype)
    size = context.get_abi_sizeof(real)
    line = ir.VectorType(real, LINE // size)
    j = builder.add(args[1], done)
    begins = builder.icmp_signed("==", builder.and_(done, _INDEX(LINE // size - 1)), _INDEX(0))
    with builder.if_then(builder.and_(begins, builder.icmp_signed("<", j, args[2]))):
        source, target = (builder.bitcast(f(j), line.as_pointer()) for f in (given, into))
        stored = builder.store(builder.load(source, align=size), target, align=LINE)
        stored.set_metadata("nontemporal", builder.module.add_metadata([_NUMBER(1)]))


def _centre_row(
    typing: Any, x: Any, i: Any, mean: Any, first: Any, depth: Any, e: Any
) -> Any:  # fmt: skip
    """e[i, q] = x[i, first + q] - mean[first + q], q < depth, a multiple of LANES.

    x is float32 or float64, the rest is float64; all are C-contiguous.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given, middle, into = (
            items(context, builder, signature.args[q], args[q]) for q in (0, 2, 5)
        )
        _, i, _, first, depth, _ = args
        real = context.get_data_type(signature.args[0].dtype)
        kind, size = ir.VectorType(real, LANES), context.get_abi_sizeof(real)
        with cgutils.for_range_slice(
            builder, _INDEX(0), depth, _INDEX(LANES), intp=_INDEX, inc=True
        ) as (q, _):
            column = builder.add(first, q)
            x = _vector(builder, given(i, column), kind, size)
            found = builder.fsub(x, _vector(builder, middle(column), _VECTOR, 8))
            builder.store(found, builder.bitcast(into(i, q), _VECTOR.as_pointer()), align=8)
        return context.get_dummy_value()

    index = numba.types.intp
    return numba.types.void(x, index, mean, index, index, e), generate


def _erase_row(
    typing: Any, x: Any, i: Any, left: Any, coefficient: Any, e: Any, k: Any, following: Any,
    ahead: Any, mean: Any, right: Any, width: Any, streamed: Any,
) -> Any:  # fmt: skip
    """e[k, j] = x[i, j] + coefficient left[j]; gives sum_j (x[following, j] - mean[j]) right[j].

    j < width, a multiple of COLUMNS. x and e are float32 or float64 and may be the same, the rest
    is float64; all are C-contiguous. Memory works on the stores, and on row `ahead` of x, while the
    sum is computed. Where it is streamed, e[k] begins at a multiple of STREAMED bytes, and
    `settle` has to follow.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, factor, into, centre, weight = (
            items(context, builder, signature.args[q], args[q]) for q in (0, 2, 4, 8, 9)
        )
        _, i, _, coefficient, _, k, following, ahead, _, _, width, streamed = args
        real = context.get_data_type(signature.args[0].dtype)
        kind, size = ir.VectorType(real, LANES), context.get_abi_sizeof(real)
        hint = builder.module.add_metadata([_NUMBER(1)])
        vector = partial(_vector, builder)
        share = broadcast(builder, coefficient, LANES)
        new_variable: Any = cgutils.alloca_once
        sums = [new_variable(builder, _VECTOR) for _ in range(0, COLUMNS, LANES)]
        for total in sums:
            builder.store(ir.Constant(_VECTOR, [0.0] * LANES), total)
        with cgutils.for_range_slice(
            builder, _INDEX(0), width, _INDEX(COLUMNS), intp=_INDEX, inc=True
        ) as (j, _):
            columns = [builder.add(j, _INDEX(q)) for q in range(0, COLUMNS, LANES)]
            ask_for(builder, source(ahead, j))
            results = []
            for column, total in zip(columns, sums, strict=True):
                apart = builder.fsub(
                    vector(source(following, column), kind, size),
                    vector(centre(column), _VECTOR, 8),
                )
                product = builder.fmul(apart, vector(weight(column), _VECTOR, 8), ("contract",))
                builder.store(builder.fadd(builder.load(total), product, ("contract",)), total)
                taken = builder.fmul(share, vector(factor(column), _VECTOR, 8), ("contract",))
                found = builder.fadd(vector(source(i, column), kind, size), taken, ("contract",))
                narrow = found if kind == _VECTOR else builder.fptrunc(found, kind)
                results.append((narrow, builder.bitcast(into(k, column), kind.as_pointer())))
            with builder.if_else(streamed) as (past, through):
                with past:
                    for narrow, place in results:
                        stored = builder.store(narrow, place, align=STREAMED)
                        stored.set_metadata("nontemporal", hint)
                with through:
                    for narrow, place in results:
                        builder.store(narrow, place, align=size)
        whole, *others = (builder.load(total) for total in sums)
        for other in others:
            whole = builder.fadd(whole, other)
        return sum_of_lanes(builder, whole, LANES)

    index, real = numba.types.intp, numba.types.float64
    return real(
        x, index, left, real, e, index, index, index, mean, right, index, numba.types.boolean
    ), generate


def _ask_for_tile(typing: Any, rows: Any, i: Any, j: Any) -> Any:
    """Ask for the cache lines of rows[i + p, j + q], p < ROWS, q < COLUMNS, before they are needed.

    Rows are C-contiguous; some of these may lie behind the last one.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        item = items(context, builder, signature.args[0], args[0])
        step = LINE // context.get_abi_sizeof(context.get_data_type(signature.args[0].dtype))
        for p in range(ROWS):
            for q in range(0, COLUMNS, step):
                place = (builder.add(args[k], _INDEX(r)) for k, r in ((1, p), (2, q)))
                ask_for(builder, item(*place))
        return context.get_dummy_value()

    return numba.types.void(rows, numba.types.intp, numba.types.intp), generate


def _move_tile(typing: Any, source: Any, i: Any, j: Any, target: Any) -> Any:
    """target[i + p, j + q] = source[i + p, j + q], p, q < LANES.

    Columns of source are contiguous, and rows of target; both are of one dtype.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given, into = (items(context, builder, signature.args[k], args[k]) for k in (0, 3))
        _, i, j, _ = args
        real = context.get_data_type(signature.args[0].dtype)
        kind, size = ir.VectorType(real, LANES), context.get_abi_sizeof(real)
        places = [_INDEX(p) for p in range(LANES)]
        vectors = [
            builder.load(
                builder.bitcast(given(i, builder.add(j, q)), kind.as_pointer()), align=size
            )
            for q in places
        ]
        # Blocks of s x s off the diagonal change places, s = 1, 2, 4, ...
        step = 1
        while step < LANES:
            for p in range(LANES):
                if not p & step:
                    pair = vectors[p], vectors[p + step]
                    # Lanes of the second register count from LANES on.
                    kept = [q if not q & step else LANES + q - step for q in range(LANES)]
                    for k, lanes in ((p, kept), (p + step, [q + step for q in kept])):
                        chosen = ir.Constant(ir.VectorType(_NUMBER, LANES), lanes)
                        vectors[k] = builder.shuffle_vector(*pair, chosen)
            step *= 2
        for p, vector in zip(places, vectors, strict=True):
            place = builder.bitcast(into(builder.add(i, p), j), kind.as_pointer())
            builder.store(vector, place, align=size)
        return context.get_dummy_value()

    index = numba.types.intp
    return numba.types.void(source, index, index, target), generate


def _move_row(typing: Any, source: Any, i: Any, target: Any) -> Any:
    """target[i] = source[i]; rows of both are contiguous, and of one dtype."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given, into = (items(context, builder, signature.args[k], args[k]) for k in (0, 2))
        shape = context.make_array(signature.args[0])(context, builder, args[0]).shape
        size = context.get_abi_sizeof(context.get_data_type(signature.args[0].dtype))
        copy: Any = cgutils.raw_memcpy
        places = (item(args[1], _INDEX(0)) for item in (into, given))
        copy(builder, *places, builder.extract_value(shape, 1), size)
        return context.get_dummy_value()

    return numba.types.void(source, numba.types.intp, target), generate


def _stream(typing: Any, source: Any, start: Any, stop: Any, target: Any) -> Any:
    """target[start:stop] = source[start:stop], written past the caches.

    Both are 1-D, C-contiguous and of one dtype. start and stop of target are at the beginning of
    cache lines. An ordinary store first reads the line that it writes to. `settle` has to follow.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        step = LINE // context.get_abi_sizeof(context.get_data_type(signature.args[0].dtype))
        with cgutils.for_range_slice(
            builder, _INDEX(0), builder.sub(args[2], args[1]), _INDEX(step), intp=_INDEX, inc=True
        ) as (j, _):
            _stream_line(context, builder, signature.args, args, j)
        return context.get_dummy_value()

    index = numba.types.intp
    return numba.types.void(source, index, index, target), generate


def _settle(typing: Any) -> Any:
    """What was streamed is in memory before anything that is stored later."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if "+sse2" in FEATURES:
            types = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse.sfence", [], types), [])
        return context.get_dummy_value()

    return numba.types.void(), generate


def _add_four(
    typing: Any, rows: Any, at: Any, ahead: Any, first: Any, last: Any, origin: Any, scale: Any,
    sums: Any, squares: Any, weights: Any,
) -> Any:  # fmt: skip
    """Add four rows to sums and squares; gives the share of these columns in their leverages.

    With y_p = rows[at[p]] - origin, for the columns first..last::

        sums += sum_p weights[p] y_p,    squares += sum_p weights[p] y_p^2,    sum_j scale[j] y_pj^2

    Rows are float32 or float64, all other numbers float64; arrays are C-contiguous. The rows
    `ahead` are asked for a cache line at a time, beside the sums: more at once wait for each other.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row, *columns = (
            items(context, builder, signature.args[k], args[k]) for k in (0, 5, 6, 7, 8)
        )
        own, later, shares = (
            [builder.extract_value(args[k], p) for p in range(4)] for k in (1, 2, 9)
        )
        first, last = args[3:5]
        real = context.get_data_type(signature.args[0].dtype)
        size = context.get_abi_sizeof(real)
        new_variable: Any = cgutils.alloca_once_value

        def add(begin: Any, end: Any, step: int, lanes: int) -> list[Any]:
            kind = ir.VectorType(real, lanes)
            wide = ir.VectorType(ir.DoubleType(), lanes)
            factors = [broadcast(builder, share, lanes) for share in shares]
            leverages = [new_variable(builder, ir.Constant(wide, [0.0] * lanes)) for _ in own]

            def fused(total: Any, a: Any, b: Any) -> Any:
                return builder.fadd(total, builder.fmul(a, b, flags=fuse), flags=fuse)

            with cgutils.for_range_slice(
                builder, begin, end, _INDEX(step), intp=_INDEX, inc=True
            ) as (start, _):
                for i in later if step > 1 else ():
                    ask_for(builder, row(i, start))
                for offset in range(0, step, lanes):
                    j = builder.add(start, _INDEX(offset))
                    places = [builder.bitcast(item(j), wide.as_pointer()) for item in columns]
                    centre, scale, total, square = (builder.load(p, align=8) for p in places)
                    for i, factor, leverage in zip(own, factors, leverages, strict=True):
                        x = builder.load(builder.bitcast(row(i, j), kind.as_pointer()), align=size)
                        y = builder.fsub(x if kind == wide else builder.fpext(x, wide), centre)
                        y_y = builder.fmul(y, y)
                        total, square = fused(total, factor, y), fused(square, factor, y_y)
                        builder.store(fused(builder.load(leverage), scale, y_y), leverage)
                    builder.store(total, places[2], align=8)
                    builder.store(square, places[3], align=8)
            return [sum_of_lanes(builder, builder.load(v), lanes) for v in leverages]

        fuse, line = ("contract",), LINE // size
        middle = builder.sub(last, builder.and_(builder.sub(last, first), _INDEX(line - 1)))
        parts = add(first, middle, line, LANES), add(middle, last, 1, 1)
        return context.make_tuple(builder, signature.return_type, map(builder.fadd, *parts))

    tuple_of: Any = numba.types.UniTuple
    index, four = numba.types.intp, tuple_of(numba.types.float64, 4)
    places = tuple_of(index, 4)
    return four(rows, places, places, index, index, origin, scale, sums, squares, four), generate


add_product = _adding_product(ROWS, COLUMNS)
add_product_and_stream = _adding_product(ROWS, COLUMNS, streaming=True)
add_narrow_product_and_stream = _adding_product(ROWS, LANES, streaming=True)
add_row_product = _adding_product(1, COLUMNS)
ask_for_tile: Any = intrinsic(_ask_for_tile)
add_four: Any = intrinsic(_add_four)
centre_row: Any = intrinsic(_centre_row)
erase_row: Any = intrinsic(_erase_row)
move_row: Any = intrinsic(_move_row)
move_tile: Any = intrinsic(_move_tile)
stream: Any = intrinsic(_stream)
settle: Any = intrinsic(_settle)
