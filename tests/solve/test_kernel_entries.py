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
    """A kernel, arguments that fit, the axes it leaves free, and the arguments it writes to."""

    call: Callable[..., Any]
    arguments: dict[str, Array]
    free: frozenset[tuple[str, int]] = frozenset()
    written: frozenset[str] = frozenset()


def numbers(*shape: int, order: Any = "C") -> Array:
    return np.asarray(np.random.default_rng(0).normal(size=shape), order=order)


def covariance() -> Array:
    rows = numbers(40, D)
    return np.asfortranarray(rows.T @ rows)


def dense(scatter: Array, floor: Array, **options: Any) -> factor.Factor:
    settings = {"per_weight": 1.0, "ridge": 0.0, "max_rank": D, "tolerance": 1e-14,
                "force_eigh": False, "allow_eigh": True}  # fmt: skip
    return factor.dense(scatter, floor, **(settings | options))


of_columns = partial(factor.of_columns, smallest=1.0)
solve = partial(oblique.oblique, noise=1e-14, relative=1e-14, drop_below=0.0, may_drop=False)


def made(kind: str) -> factor.Factor:
    ones = np.ones(D)
    if kind == "identity":
        return factor.identity(ones, 1.0)
    if kind == "diagonal":
        return factor.diagonal(ones, np.zeros(D))
    if kind == "spanned":
        return of_columns(numbers(2, D), ones, np.zeros(D))
    return dense(covariance(), np.zeros(D), force_eigh=kind == "eigh")


def remember(f: factor.Factor, scatter: Array) -> None:
    f.remember(scatter, 1.0)


def deficient() -> factor.Factor:
    rows = numbers(3, D)
    return dense(np.asfortranarray(rows.T @ rows), np.zeros(D))


def remembering() -> factor.Factor:
    f = made("cholesky")
    remember(f, covariance())
    return f


KINDS = ("identity", "cholesky", "eigh", "diagonal", "spanned")
COLUMNS = {"columns": numbers(K, D)}
FIGURES = {"variances": np.ones(D), "floor": np.zeros(D)}
SQUARES = {"squares": 9.0 * np.eye(K), "reference": np.zeros(K)}
FACTORED = {"scatter": covariance(), "floor": np.zeros(D)}


def free(*axes: tuple[str, int]) -> frozenset[tuple[str, int]]:
    return frozenset(axes)


ENTRIES = {
    **{
        f"{name}-{kind}": Entry(getattr(made(kind), name), COLUMNS, free(("columns", 0)))
        for kind in KINDS
        for name in ("whiten", "solve", "unwhiten")
        if name != "unwhiten" or kind not in ("diagonal", "spanned")
    },
    **{
        f"remember-{kind}": Entry(partial(remember, made(kind)), {"scatter": covariance()})
        for kind in ("identity", "cholesky", "eigh")
    },
    **{
        f"oblique-{kind}": Entry(
            partial(solve, made(kind)),
            {"erased": numbers(1, D), "kept": numbers(2, D)[1:]},
            free(("erased", 0), ("kept", 0)),
        )
        for kind in KINDS
    },
    **{
        f"dense-{force}": Entry(partial(dense, force_eigh=force), FACTORED)
        for force in (False, True)
    },
    "gram": Entry(remembering().gram, COLUMNS, free(("columns", 0))),
    "admit": Entry(deficient().admit, {"spans": numbers(K, D)}, free(("spans", 0))),
    "identity": Entry(
        partial(factor.identity, per_weight=1.0), {"diagonal": np.ones(D)}, free(("diagonal", 0))
    ),
    "norm_and_offset": Entry(
        partial(factor.norm_and_offset, variance=1.0),
        {"left": numbers(K, D), "right": numbers(K, D), "mean": np.ones(D)},
    ),
    "diagonal": Entry(factor.diagonal, FIGURES),
    "spanned": Entry(
        of_columns,
        {"columns": numbers(D, D)} | FIGURES,
        free(("columns", -1)),
        frozenset({"columns"}),
    ),
    "class_span": Entry(
        spans.class_span, {"sums": numbers(K, D), "weights": np.ones(K)}, free(("sums", 1))
    ),
    "largest_correlation": Entry(
        spans.largest_correlation,
        {"rows": numbers(K, D), "variances": np.ones(D)},
        free(("rows", 0)),
    ),
    "column_deviations": Entry(
        partial(spans.column_deviations, weight=4.0), {"z_sum": np.ones(K)} | SQUARES
    ),
    "column_span": Entry(
        partial(spans.column_span, weight=4.0),
        {"products": numbers(K, D), "z_sum": np.ones(K), "x_sum": np.ones(D)} | SQUARES,
    ),
    "syrk_f64_into": Entry(
        blas.syrk_f64_into,
        {"rows": numbers(M, D), "scatter": np.zeros((D, D), order="F")},
        free(("rows", 0)),
        frozenset({"scatter"}),
    ),
    "syrk_f32_out": Entry(
        blas.syrk_f32_out,
        {
            "rows": numbers(M, D).astype(np.float32),
            "product": np.zeros((D, D), np.float32, order="F"),
        },
        free(("rows", 0)),
        frozenset({"product"}),
    ),
    "gemm_f64_into": Entry(
        blas.gemm_f64_into,
        {"left": numbers(M, K), "right": numbers(M, D), "product": np.zeros((K, D))},
        written=frozenset({"product"}),
    ),
    "mirror_lower": Entry(
        blas.mirror_lower, {"matrix": covariance()}, written=frozenset({"matrix"})
    ),
}


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
            if (name, axis) in entry.free:
                continue
            # Memory may be larger, and a factor of few columns may have fewer.
            if (name, -1) not in entry.free or axis == 1:
                yield name, f"axis {axis} too short", resized(array, axis, -1)
            if name != "memory":
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
        if name in entry.written:
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
