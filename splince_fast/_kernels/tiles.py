"""What Numba's loops cannot say: products in registers, stores past the caches, reads far ahead."""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

FEATURES: str = cpu_target.target_context.codegen().magic_tuple()[2]
REGISTER = 64 if "+avx512f" in FEATURES else 32  # bytes
LANES = REGISTER // 8
# A tile of sums fills 16 of 32 registers, or 8 of 16.
ROWS, COLUMNS = LANES, 2 * LANES
_LINE = 64  # bytes of a cache line

_INDEX, _NUMBER = ir.IntType(64), ir.IntType(32)
_VECTOR = ir.VectorType(ir.DoubleType(), LANES)


def items(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """A function from indices to the address of an item of a C-contiguous array."""
    array = context.make_array(kind)(context, builder, value)
    item_pointer: Any = cgutils.get_item_pointer
    return lambda *index: item_pointer(context, builder, kind, array, index)


def broadcast(builder: Any, number: Any, lanes: int) -> Any:
    """A register that holds one number in every lane."""
    kind = ir.VectorType(number.type, lanes)
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, number, _NUMBER(0))
    lane = ir.Constant(ir.VectorType(_NUMBER, lanes), [0] * lanes)
    return builder.shuffle_vector(first, nothing, lane)


def _adding_product(height: int, width: int) -> Any:
    """e[m + p, j + q] = c[k + p, j + q] + sum_t a[i + p, t] b[first + t, q], t < depth.

    The tile has p < height, q < width. a and b are float64, c and e of one dtype, float32 or
    float64, and may be the same; all are C-contiguous. The sum is float64, and is added before it
    is rounded to the dtype of e; it is the same for a tile of any size.
    """

    def add(
        typing: Any, a: Any, i: Any, b: Any, first: Any, depth: Any, c: Any, k: Any, e: Any,
        m: Any, j: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            left, right, given, into = (
                items(context, builder, signature.args[q], args[q]) for q in (0, 2, 5, 7)
            )
            _, i, _, first, depth, _, k, _, m, j = args
            new_variable: Any = cgutils.alloca_once
            rows = [builder.add(i, _INDEX(p)) for p in range(height)]
            halves = range(0, width, LANES)
            sums = [
                [new_variable(builder, _VECTOR) for _ in halves] for _ in rows
            ]  # LLVM keeps them in registers
            for total in (total for row in sums for total in row):
                builder.store(ir.Constant(_VECTOR, [0.0] * LANES), total)
            with cgutils.for_range(builder, depth, intp=_INDEX) as loop:
                t = builder.add(first, loop.index)
                factors = [
                    builder.load(
                        builder.bitcast(right(t, _INDEX(q)), _VECTOR.as_pointer()), align=8
                    )
                    for q in halves
                ]
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
                    builder.bitcast(
                        item(builder.add(row, _INDEX(p)), builder.add(j, _INDEX(q))),
                        kind.as_pointer(),
                    )
                    for p in range(height)
                    for q in halves
                ]
                for item, row in ((given, k), (into, m))
            )
            found = []
            # No store before the last load: it would wait for one to an address 4096 k away.
            for place, total in zip(sources, (total for row in sums for total in row), strict=True):
                before = builder.load(place, align=size)
                wide = before if kind == _VECTOR else builder.fpext(before, _VECTOR)
                found.append(builder.fadd(wide, builder.load(total)))
            for place, value in zip(targets, found, strict=True):
                narrow = value if kind == _VECTOR else builder.fptrunc(value, kind)
                builder.store(narrow, place, align=size)
            return context.get_dummy_value()

        index = numba.types.intp
        return numba.types.void(a, index, b, index, index, c, index, e, index, index), generate

    return intrinsic(add)


def _stream(typing: Any, source: Any, target: Any) -> Any:
    """target = source, both flat, contiguous and of one dtype, written past the caches.

    An ordinary store first reads the line that it writes to. `settle` has to follow.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given, into = (items(context, builder, signature.args[k], args[k]) for k in (0, 1))
        array = context.make_array(signature.args[0])(context, builder, args[0])
        total = builder.extract_value(array.shape, 0)
        real = context.get_data_type(signature.args[0].dtype)
        size = context.get_abi_sizeof(real)
        # Ordinary stores up to the first whole line, and from the end of the last one.
        line = ir.VectorType(real, _LINE // size)
        before = builder.sub(_INDEX(0), builder.ptrtoint(into(_INDEX(0)), _INDEX))
        head = builder.udiv(builder.and_(before, _INDEX(_LINE - 1)), _INDEX(size))
        head = builder.select(builder.icmp_signed("<", head, total), head, total)
        rest = builder.and_(builder.sub(total, head), _INDEX(_LINE // size - 1))
        end = builder.sub(total, rest)
        hint = builder.module.add_metadata([_NUMBER(1)])

        def copy(first: Any, last: Any, step: int, kind: Any) -> Any:
            with cgutils.for_range_slice(
                builder, first, last, _INDEX(step), intp=_INDEX, inc=True
            ) as (j, _):
                source, target = (
                    builder.bitcast(item(j), kind.as_pointer()) for item in (given, into)
                )
                found = builder.load(source, align=size)
                if kind == line:
                    stored = builder.store(found, target, align=_LINE)
                    stored.set_metadata("nontemporal", hint)
                else:
                    builder.store(found, target, align=size)

        copy(_INDEX(0), head, 1, real)
        copy(head, end, _LINE // size, line)
        copy(end, total, 1, real)
        return context.get_dummy_value()

    return numba.types.void(source, target), generate


def _settle(typing: Any) -> Any:
    """What was streamed is in memory before anything that is stored later."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if "+sse2" in FEATURES:
            types = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse.sfence", [], types), [])
        return context.get_dummy_value()

    return numba.types.void(), generate


def _sum_of_lanes(builder: Any, vector: Any, lanes: int) -> Any:
    """The sum of a register's numbers, by halves."""
    while lanes > 1:
        lanes //= 2
        halves = (
            ir.Constant(ir.VectorType(_NUMBER, lanes), list(range(start, start + lanes)))
            for start in (0, lanes)
        )
        vector = builder.fadd(*(builder.shuffle_vector(vector, vector, half) for half in halves))
    return builder.extract_element(vector, _NUMBER(0))


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
        real, byte = context.get_data_type(signature.args[0].dtype), ir.IntType(8).as_pointer()
        size = context.get_abi_sizeof(real)
        hint = ir.FunctionType(ir.VoidType(), [byte, _NUMBER, _NUMBER, _NUMBER])
        ask = builder.module.declare_intrinsic("llvm.prefetch", [byte], hint)
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
                    place = builder.bitcast(row(i, start), byte)
                    builder.call(ask, [place, _NUMBER(0), _NUMBER(2), _NUMBER(1)])
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
            return [_sum_of_lanes(builder, builder.load(v), lanes) for v in leverages]

        fuse, line = ("contract",), _LINE // size
        middle = builder.sub(last, builder.and_(builder.sub(last, first), _INDEX(line - 1)))
        parts = add(first, middle, line, LANES), add(middle, last, 1, 1)
        return context.make_tuple(builder, signature.return_type, map(builder.fadd, *parts))

    tuple_of: Any = numba.types.UniTuple
    index, four = numba.types.intp, tuple_of(numba.types.float64, 4)
    places = tuple_of(index, 4)
    return four(rows, places, places, index, index, origin, scale, sums, squares, four), generate


add_product = _adding_product(ROWS, COLUMNS)
add_narrow_product = _adding_product(ROWS, LANES)
add_row_product = _adding_product(1, COLUMNS)
add_four: Any = intrinsic(_add_four)
stream: Any = intrinsic(_stream)
settle: Any = intrinsic(_settle)
