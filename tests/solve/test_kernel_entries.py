"""The entries of the compiled kernels refuse arguments that do not fit before they touch memory.

Each argument is passed in turn one shorter and one longer on every axis that the kernel does not
leave free, of another dtype, strided, as None, and read-only where the kernel writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from splince_fast._kernels import blas, factor, oblique, spans

Array = NDArray[Any]
D, K, M = 5, 3, 7


class Entry(NamedTuple):
    """A kernel, arguments that fit, the axes it leaves free, and the argument it writes to."""

    call: Callable[..., Any]
    arguments: dict[str, Array]
    free: tuple[str, ...]  # "name axis"
    written: str


def entry(call: Callable[..., Any], *free: str, written: str = "", **arguments: Array) -> Entry:
    return Entry(call, arguments, free, written)


def numbers(*shape: int, dtype: Any = np.float64, order: Any = "C") -> Array:
    return np.asarray(np.random.default_rng(0).normal(size=shape), dtype, order)


def scatter(n: int = 40) -> Array:
    rows = numbers(n, D)
    return np.asfortranarray(rows.T @ rows)


dense = partial(
    factor.dense, per_weight=1.0, ridge=0.0, max_rank=D, tolerance=1e-14, force_eigh=False,
    allow_eigh=True,
)  # fmt: skip
of_columns = partial(factor.of_columns, smallest=1.0)
solve = partial(oblique.oblique, noise=1e-14, relative=1e-14, drop_below=0.0, may_drop=False)
MADE = {
    "identity": factor.identity(np.ones(D), 1.0),
    "diagonal": factor.diagonal(np.ones(D), np.zeros(D)),
    "cholesky": dense(scatter(), np.zeros(D)),
    "eigh": dense(scatter(), np.zeros(D), force_eigh=True),
    "deficient": dense(scatter(3), np.zeros(D)),
    "spanned": of_columns(numbers(2, D), np.ones(D), np.zeros(D)),
}
for made in MADE.values():
    made.remember(scatter(), 1.0)

ENTRIES = {
    **{
        f"{name}-{kind}": entry(getattr(made, name), "columns 0", columns=numbers(K, D))
        for kind, made in MADE.items()
        for name in ("whiten", "solve", "unwhiten", "gram")
        if (name, kind) != ("unwhiten", "spanned")
    },
    **{
        f"oblique-{kind}": entry(
            partial(solve, made), "erased 0", "kept 0", erased=numbers(1, D), kept=numbers(2, D)[1:]
        )
        for kind, made in MADE.items()
    },
    "dense": entry(dense, scatter=scatter(), floor=np.zeros(D)),
    "dense-eigh": entry(partial(dense, force_eigh=True), scatter=scatter(), floor=np.zeros(D)),
    "remember": entry(partial(MADE["eigh"].remember, per_weight=1.0), scatter=scatter()),
    "admit": entry(MADE["deficient"].admit, "spans 0", spans=numbers(K, D)),
    "identity": entry(
        partial(factor.identity, per_weight=1.0), "diagonal 0", diagonal=np.ones(D)
    ),
    "diagonal": entry(factor.diagonal, variances=np.ones(D), floor=np.zeros(D)),
    "spanned": entry(
        of_columns, "fewer columns", written="columns", columns=numbers(D, D),
        variances=np.ones(D), floor=np.zeros(D),
    ),
    "class_span": entry(spans.class_span, "sums 1", sums=numbers(K, D), weights=np.ones(K)),
    "largest_correlation": entry(
        spans.largest_correlation, "span 0", span=numbers(K, D), variances=np.ones(D)
    ),
    "syrk_f64_into": entry(
        blas.syrk_f64_into, "rows 0", written="scatter", rows=numbers(M, D),
        scatter=np.zeros((D, D), order="F"),
    ),
    "syrk_f32_out": entry(
        blas.syrk_f32_out, "rows 0", written="product", rows=numbers(M, D, dtype=np.float32),
        product=np.zeros((D, D), np.float32, order="F"),
    ),
    "gemm_f64_into": entry(
        blas.gemm_f64_into, written="product", left=numbers(M, K), right=numbers(M, D),
        product=np.zeros((K, D)),
    ),
    "mirror_lower": entry(blas.mirror_lower, written="matrix", matrix=scatter()),
}  # fmt: skip


def resized(array: Array, axis: int, by: int) -> Array:
    shape = list(array.shape)
    shape[axis] += by
    order: Any = "F" if array.ndim == 2 and array.flags.f_contiguous else "C"
    new = np.ones(shape, array.dtype, order=order)
    assert new.shape != array.shape
    return new


def misfits(entry: Entry) -> Iterator[tuple[str, str, Any]]:
    """Name of the argument, what is wrong with it, and the argument."""
    for name, array in entry.arguments.items():
        for axis in range(array.ndim):
            if f"{name} {axis}" in entry.free:
                continue
            # A factor of few columns may have fewer.
            if f"fewer {name}" not in entry.free or axis == 1:
                yield name, f"axis {axis} too short", resized(array, axis, -1)
            yield name, f"axis {axis} too long", resized(array, axis, 1)
        other = np.float64 if array.dtype == np.float32 else np.float32
        yield name, "another floating dtype", array.astype(other)
        yield name, "integers", array.astype(np.int64)
        wide = np.ones((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
        yield name, "strided", wide[..., ::2]
        if array.ndim == 2:
            flipped: Any = "C" if array.flags.f_contiguous else "F"
            if min(array.shape) > 1:
                yield name, "the other order", np.array(array, order=flipped)
            yield name, "one axis", array.ravel(order="K")
        else:
            yield name, "two axes", array[None]
        yield name, "None", None
        if name == entry.written:
            fixed = array.copy(order="K")
            fixed.flags.writeable = False
            yield name, "read-only", fixed


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_an_argument_that_does_not_fit_raises(entry: Entry) -> None:
    entry.call(**fresh(entry))  # fits
    count = 0
    for name, fault, wrong in misfits(entry):
        arguments = fresh(entry) | {name: wrong}
        try:
            entry.call(**arguments)
        except (ValueError, TypeError):
            pass
        else:
            pytest.fail(f"{name}, {fault}: accepted")
        count += 1
    assert count >= 4 * len(entry.arguments)


def fresh(entry: Entry) -> dict[str, Array]:
    """Copies of the arguments, as kernels write to some and keep others."""
    return {name: array.copy(order="K") for name, array in entry.arguments.items()}


def test_a_factor_of_another_kind_of_object_is_refused() -> None:
    for other in (None, object(), np.ones(D)):
        with pytest.raises(TypeError):
            solve(other, np.ones((1, D)), np.ones((0, D)))


def test_a_covariance_of_no_feature_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one feature"):
        dense(np.empty((0, 0), order="F"), np.empty(0))


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("sine", [1e-3, 1e-160])
def test_the_norm_of_right_is_infinite_if_its_square_overflows(k: int, sine: float) -> None:
    kept = np.eye(4)[::2][:k].copy()
    erased = kept + sine * np.eye(4)[1::2][:k]
    f = factor.identity(np.ones(4), 1.0)
    norm = solve(f, erased, kept, noise=0.0)[13]
    assert norm == (pytest.approx(1e3, rel=1e-6) if sine == 1e-3 else np.inf)
