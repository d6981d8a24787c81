"""What kernels share about the processor: its registers, addresses, cache lines, reads ahead."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.core.registry import cpu_target

from splince_fast._kernels.jit import kernel

FEATURES: str = cpu_target.target_context.codegen().magic_tuple()[2]
REGISTER = 64 if "+avx512f" in FEATURES else 32  # bytes
LINE = 64  # bytes of a cache line

_NUMBER = ir.IntType(32)


def items(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """A function from indices to the address of an item of an array."""
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


def sum_of_lanes(builder: Any, vector: Any, lanes: int) -> Any:
    """The sum of a register's numbers, by halves."""
    while lanes > 1:
        lanes //= 2
        halves = (
            ir.Constant(ir.VectorType(_NUMBER, lanes), list(range(start, start + lanes)))
            for start in (0, lanes)
        )
        vector = builder.fadd(*(builder.shuffle_vector(vector, vector, half) for half in halves))
    return builder.extract_element(vector, _NUMBER(0))


def ask_for(builder: Any, place: Any) -> None:
    """Ask for the cache line of an address before it is needed."""
    pointer, number = ir.IntType(8).as_pointer(), _NUMBER
    types = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
    function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], types)
    # For reading, into the second-level cache, as data.
    builder.call(function, [builder.bitcast(place, pointer), number(0), number(2), number(1)])


@kernel
def aligned(rows: int, columns: int) -> Any:
    """Zeros (rows, columns) in float64 that begin at a cache line."""
    memory = np.zeros(rows * columns + LINE // 8)
    skip = (-memory.ctypes.data) % LINE // 8
    return memory[skip : skip + rows * columns].reshape(rows, columns)
