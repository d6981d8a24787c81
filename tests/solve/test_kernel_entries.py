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


def dense(scatter: Array, mean: Array, memory: Array, force_eigh: bool = False) -> factor.Factor:
    return factor.dense(
        scatter, mean, memory, per_weight=1.0, ridge=0.0, max_rank=D, tolerance=1e-14,
        constant=1e-14, force_eigh=force_eigh, allow_eigh=True,
    )  # fmt: skip


def made(kind: str) -> factor.Factor:
    ones = np.ones(D)
    if kind == "identity":
        return factor.identity(ones, 1.0)
    if kind == "low_rank":
        return factor.of_columns(
            numbers(2, D), ones, ones, ones.copy(), np.zeros(2), smallest=1.0, constant=1e-14
        )
    if kind == "spanned":
        return factor.of_columns(numbers(2, D), ones, ones, smallest=1.0, constant=1e-14)
    return dense(covariance(), np.zeros(D), np.empty(D * D), kind == "eigh")


def remember(f: factor.Factor, scatter: Array) -> None:
    f.remember(scatter, 1.0)


def solve(f: factor.Factor, erased: Array, kept: Array) -> Any:
    return oblique.oblique(
        f, erased, kept, noise=1e-14, relative=1e-14, drop_below=0.0, may_drop=False
    )


def deficient() -> factor.Factor:
    rows = numbers(3, D)
    return dense(np.asfortranarray(rows.T @ rows), np.zeros(D), np.empty(D * D))


def entries() -> Iterator[Any]:
    columns = {"columns": numbers(K, D)}
    rows_free = frozenset({("columns", 0)})
    for kind in ("identity", "cholesky", "eigh", "low_rank", "spanned"):
        for name in ("whiten", "solve", "unwhiten"):
            if name == "unwhiten" and kind in ("low_rank", "spanned"):
                continue
            yield pytest.param(
                Entry(getattr(made(kind), name), columns, rows_free), id=f"{name}-{kind}"
            )
    remembering = made("cholesky")
    remembering.remember(covariance(), 1.0)
    yield pytest.param(Entry(remembering.gram, columns, rows_free), id="gram")
    for kind in ("identity", "cholesky", "eigh"):
        yield pytest.param(
            Entry(partial(remember, made(kind)), {"scatter": covariance()}), id=f"remember-{kind}"
        )
    yield pytest.param(
        Entry(deficient().admit, {"spans": numbers(K, D)}, frozenset({("spans", 0)})), id="admit"
    )
    yield pytest.param(
        Entry(lambda diagonal: factor.identity(diagonal, 1.0), {"diagonal": np.ones(D)},
              frozenset({("diagonal", 0)})),
        id="identity",
    )  # fmt: skip
    yield pytest.param(
        Entry(
            lambda **a: factor.norm_and_offset(**a, variance=1.0),
            {"left": numbers(K, D), "right": numbers(K, D), "mean": np.ones(D)},
        ),
        id="norm_and_offset",
    )
    figures = {"variances": np.ones(D), "mean": np.ones(D)}
    yield pytest.param(
        Entry(lambda **a: factor.count_weak(**a, min_scale=0.1, mean_fraction=0.0), figures),
        id="count_weak",
    )
    yield pytest.param(
        Entry(
            lambda **a: factor.of_columns(**a, smallest=1.0, constant=1e-14),
            {"columns": numbers(K, D), "diagonal_scale": np.ones(D), "column_scale": np.zeros(K)}
            | figures,
            written=frozenset({"columns", "diagonal_scale", "column_scale"}),
        ),
        id="low_rank",
    )
    yield pytest.param(
        Entry(
            lambda **a: factor.of_columns(**a, smallest=1.0, constant=1e-14),
            {"columns": numbers(D, D)} | figures,
            free=frozenset({("columns", -1)}),
            written=frozenset({"columns"}),
        ),
        id="spanned",
    )
    for force_eigh in (False, True):
        yield pytest.param(
            Entry(
                lambda force_eigh=force_eigh, **a: dense(**a, force_eigh=force_eigh),
                {"scatter": covariance(), "mean": np.zeros(D), "memory": np.empty(D * D)},
                written=frozenset({"memory"}),
            ),
            id=f"dense-{force_eigh}",
        )
    for kind in ("identity", "cholesky", "eigh", "low_rank", "spanned"):
        yield pytest.param(
            Entry(
                partial(solve, made(kind)),
                {"erased": numbers(1, D), "kept": numbers(2, D)[1:]},
                frozenset({("erased", 0), ("kept", 0)}),
            ),
            id=f"oblique-{kind}",
        )
    yield pytest.param(
        Entry(spans.class_span, {"sums": numbers(K, D), "weights": np.ones(K)},
              frozenset({("sums", 1)})),
        id="class_span",
    )  # fmt: skip
    yield pytest.param(
        Entry(spans.largest_correlation, {"rows": numbers(K, D), "variances": np.ones(D)},
              frozenset({("rows", 0)})),
        id="largest_correlation",
    )  # fmt: skip
    columns = {"squares": 9.0 * np.eye(K), "reference": np.zeros(K)}
    yield pytest.param(
        Entry(
            lambda **a: spans.column_deviations(**a, weight=4.0), {"z_sum": np.ones(K)} | columns
        ),
        id="column_deviations",
    )
    yield pytest.param(
        Entry(
            lambda **a: spans.column_span(**a, weight=4.0),
            {"products": numbers(K, D), "z_sum": np.ones(K), "x_sum": np.ones(D)} | columns,
        ),
        id="column_span",
    )
    for dtype, kernel, name in (
        (np.float64, blas.syrk_f64_into, "scatter"),
        (np.float32, blas.syrk_f32_out, "product"),
    ):
        yield pytest.param(
            Entry(
                kernel,
                {
                    "rows": numbers(M, D).astype(dtype),
                    name: np.zeros((D, D), dtype, order="F"),
                },
                frozenset({("rows", 0)}),
                frozenset({name}),
            ),
            id=kernel.__name__,
        )
    yield pytest.param(
        Entry(
            blas.gemm_f64_into,
            {"left": numbers(M, K), "right": numbers(M, D), "product": np.zeros((K, D))},
            written=frozenset({"product"}),
        ),
        id="gemm_f64_into",
    )
    yield pytest.param(
        Entry(blas.mirror_lower, {"matrix": covariance()}, written=frozenset({"matrix"})),
        id="mirror_lower",
    )


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


@pytest.mark.parametrize("entry", entries())
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
    arguments: Any = (np.ones((1, D)), np.ones((0, D)))
    options = {"noise": 1e-14, "relative": 1e-14, "drop_below": 0.0, "may_drop": False}
    for other in (None, object(), np.ones(D)):
        with pytest.raises(TypeError):
            oblique.oblique(other, *arguments, **options)


def test_features_left_out_must_be_features_in_order() -> None:
    for wrong in ([D], [-1], [1, 1], [2, 0], [0.0], [[0]], None):
        options: Any = {"left_out": None if wrong is None else np.array(wrong)}
        for call in (
            partial(
                factor.dense, covariance(), np.zeros(D), np.empty(D * D), per_weight=1.0,
                ridge=0.0, max_rank=D, tolerance=1e-14, constant=1e-14, force_eigh=False,
                allow_eigh=True,
            ),
            partial(
                factor.of_columns, numbers(2, D), np.ones(D), np.ones(D), np.ones(D), np.zeros(2),
                smallest=1.0, constant=1e-14,
            ),
            partial(
                factor.of_columns, numbers(2, D), np.ones(D), np.ones(D), smallest=1.0,
                constant=1e-14,
            ),
        ):  # fmt: skip
            with pytest.raises((ValueError, TypeError)):
                call(**options)


def test_a_covariance_of_no_feature_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one feature"):
        dense(np.empty((0, 0), order="F"), np.empty(0), np.empty(0))


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("sine", [1e-3, 1e-160])
def test_the_norm_of_right_is_infinite_if_its_square_overflows(k: int, sine: float) -> None:
    kept = np.eye(4)[::2][:k].copy()
    erased = kept + sine * np.eye(4)[1::2][:k]
    f = factor.identity(np.ones(4), 1.0)
    result = oblique.oblique(
        f, erased, kept, noise=0.0, relative=1e-14, drop_below=0.0, may_drop=False
    )
    norm = result[14]
    assert norm == (pytest.approx(1e3, rel=1e-6) if sine == 1e-3 else np.inf)
