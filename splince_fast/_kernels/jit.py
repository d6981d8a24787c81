"""How every Numba kernel is compiled: for the host, cached, without the GIL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` with the one set of options that all kernels share."""
    # Reassociation and contraction let sums use SIMD; NaN and infinity keep their meaning.
    options: dict[str, Any] = {
        "nogil": True,
        "fastmath": {"reassoc", "contract"},
        "error_model": "numpy",
    }
    try:
        compiled: Callable[..., Any] = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no writable place for the cache: compile once in each process
        compiled = numba.njit(**options)(function)
    return compiled


def ask_for(builder: Any, place: Any) -> None:
    """Ask for the cache line of an address before it is needed."""
    pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    types = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
    function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], types)
    # For reading, into the second-level cache, as data.
    builder.call(function, [builder.bitcast(place, pointer), number(0), number(2), number(1)])


def _prefetch(context: Any, rows: Any, i: Any, j: Any) -> Any:
    """Ask for the cache line of rows[i, j], a C-contiguous array, before it is needed."""
    item_pointer: Any = cgutils.get_item_pointer

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0]
        array = context.make_array(kind)(context, builder, args[0])
        ask_for(builder, item_pointer(context, builder, kind, array, args[1:]))
        return context.get_dummy_value()

    return numba.types.void(rows, numba.intp, numba.intp), generate


prefetch: Any = intrinsic(_prefetch)
