"""_runtime.torch_rows: rows that the kernel erases, and tensors that torch must erase."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import splince_fast as sf
from nn.conftest import identity, is_erased, projection
from splince_fast import nn as snn
from splince_fast._kernels.row_kernels import PackedFactors
from splince_fast._runtime import torch_rows
from splince_fast.nn import installed


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the kernel erased the rows, for each call of a site."""
    seen: list[bool] = []
    inner = installed.erased_in_memory

    def look(*args: Any) -> Any:
        found = inner(*args)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(installed, "erased_in_memory", look)
    return seen


@pytest.mark.parametrize("width", [2, 16, 100])
@pytest.mark.parametrize("rank", [0, 1, 2, 5, 17])
def test_kernel_results_are_exact_to_rounding(width: int, rank: int, by_kernel: list[bool]) -> None:
    """Of any shape, number of rows and strides; the bits are those of a copy in C order."""
    rank = min(rank, width)
    p, model = projection(width, rank), identity()
    with contextlib.nullcontext() if rank else pytest.warns(sf.exceptions.NothingErasedWarning):
        snn.install(model, {"0": p})
    rows = [torch.randn(*n, width) * 3 + 1 for n in ((), (1, 1), (3,), (2, 5), (3000,))]
    rows += [torch.randn(width, 5).T, torch.randn(4, width, 5).mT]
    rows += [torch.randn(6, 2 * width)[::2, ::2]]
    for x in (*rows, *(x.bfloat16() for x in rows[-3:]), rows[2].double()):
        kept, found = x.clone(), model(x)
        assert (found.shape, found.dtype) == (x.shape, x.dtype)
        assert found.data_ptr() != x.data_ptr()
        assert torch.equal(x, kept)
        assert torch.equal(found, model(x.contiguous()))
        if x.dtype != torch.bfloat16:
            assert is_erased(found.float(), x.float(), p)
            assert not rank or not is_erased(found, x, projection(width, rank, seed=1))
    assert by_kernel == [True] * 24
    assert model(torch.randn(0, width)).shape == (0, width)
    assert by_kernel[24:] == [False]  # no rows


@pytest.mark.parametrize("known", [True, False])  # in memory, and by torch
@pytest.mark.parametrize("rank", [2, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_not_selected_keep_their_bits(
    dtype: torch.dtype,
    rank: int,
    known: bool,
    by_kernel: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_rows, "is_in_torch_dispatch_mode", lambda: not known)
    p, model = projection(rank=rank), identity()
    mask = torch.rand(4, 7, generator=torch.Generator().manual_seed(0)) < 0.5
    x = torch.randn(4, 7, 16).to(dtype)
    x[..., 0][~mask] = torch.nan  # also this one, and it reaches no other row
    for rows in (mask, mask.T.contiguous().T):  # whatever its strides
        with snn.install(model, {"0": p}, tokens=lambda call, rows=rows: rows):
            found = model(x)
        assert torch.equal(found[..., 0].isnan(), ~mask)
        assert torch.equal(found[~mask][:, 1:], x[~mask][:, 1:])
        assert not torch.equal(found[mask], x[mask])
        whole = snn.Eraser(p)(x)
        assert torch.allclose(found[mask].float(), whole[mask].float(), atol=1e-5, rtol=2.0**-7)
    assert by_kernel == [known, known]


def test_a_torch_without_detection_of_modes_erases_all_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a fresh copy of the module; the control is the module itself."""
    factors = PackedFactors(*np.ones((2, 1, 4)), np.zeros(4), np.zeros(1))
    monkeypatch.delattr("torch.utils._python_dispatch.is_in_torch_dispatch_mode")
    copied = importlib.util.module_from_spec(torch_rows.__spec__)
    torch_rows.__spec__.loader.exec_module(copied)
    assert copied.erased_in_memory(factors, torch.ones(2, 4)) is None
    assert torch_rows.erased_in_memory(factors, torch.ones(2, 4)) is not None


def test_another_axis_is_erased(by_kernel: list[bool]) -> None:
    """Also where the usual axis is as wide."""
    p, x, model = projection(), torch.randn(3, 16, 16), identity()
    with snn.install(model, {"0": p}, feature_dim=1):
        assert is_erased(model(x).movedim(1, -1), x.movedim(1, -1), p)
    assert by_kernel == [True]


def test_results_out_of_range_of_float16_are_infinite_as_in_torch(by_kernel: list[bool]) -> None:
    axis = np.eye(4)[:, :1]
    model, x = identity(), torch.full((2, 4), 60000.0).half()
    with snn.install(model, {"0": sf.Projection(-axis, axis, np.zeros(4))}):
        found = model(x)
    assert torch.equal(found[:, 0], torch.full((2,), torch.inf).half())
    assert torch.equal(found[:, 1:], x[:, 1:])
    assert by_kernel == [True]


# --- what memory alone does not show -------------------------------------------------------------


def x() -> torch.Tensor:
    return torch.randn(3, 16)


def negative(model: Any) -> bool:
    rows = torch._neg_view(x())
    return is_erased(model(rows), rows.resolve_neg(), projection())


def subclasses(model: Any) -> bool:
    """A subclass sees the operations on it."""
    seen = []

    class Seen(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            seen.append(getattr(func, "__name__", ""))
            return super().__torch_function__(func, types, args, kwargs or {})

    model(x().as_subclass(Seen))
    return "addr" in seen


def gradients(model: Any) -> bool:
    return bool(model(x().requires_grad_()).requires_grad)


def tangents(model: Any) -> bool:
    rows = x()
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(rows, rows))).tangent
        linear = sf.Projection(projection().left, projection().right, np.zeros(16))
        return tangent is not None and is_erased(tangent, rows, linear)


def mapped_by(transform: Callable[[Any], Any]) -> Callable[[Any], bool]:
    """Whether the function that a transform makes of a model erases rows."""

    def case(model: Any) -> bool:
        rows = x()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return is_erased(transform(model)(rows), rows, projection())

    return case


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "vmap": torch.func.vmap,
    "functionalize": torch.func.functionalize,
    # A tracer that passes real tensors records the products, and no constant.
    "make_fx": lambda model: make_fx(model)(x()),
    "trace": lambda model: torch.jit.trace(model, x(), check_trace=False),
}


def seen_by(mode: Any, method: str) -> Callable[[Any], bool]:
    """Whether a mode that looks at operations sees the products."""

    def case(model: Any) -> bool:
        seen = []

        def look(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

        with type("Look", (mode,), {method: look})():
            model(x())
        return any("addr" in name for name in seen)

    return case


CASES: dict[str, Callable[[Any], bool]] = {
    "negative": negative, "subclasses": subclasses, "gradients": gradients, "tangents": tangents,
    **{name: mapped_by(transform) for name, transform in TRANSFORMS.items()},
    "operations": seen_by(TorchDispatchMode, "__torch_dispatch__"),
    "functions": seen_by(TorchFunctionMode, "__torch_function__"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # of torch's tangents themselves
@pytest.mark.parametrize("case", CASES)
def test_other_tensors_go_through_torch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = identity()
    with snn.install(model, {"0": projection()}):
        model(x())
        assert CASES[case](model)
        # Control: with the kernel, the result is wrong, missing or an error.
        monkeypatch.setattr(torch_rows, "is_plain", lambda x: True)
        with contextlib.suppress(RuntimeError):
            assert not CASES[case](model)


def test_a_tensor_without_its_memory_is_not_read() -> None:
    model, x = identity(), torch.randn(3, 16)
    snn.install(model, {"0": projection()})
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="not allocated"):
        model(x)
