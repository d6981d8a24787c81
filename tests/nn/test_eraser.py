"""nn.eraser, _runtime.torch_rows: numbers, dtypes, autograd, and tensors that torch must erase."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import pickle
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
from splince_fast.exceptions import InputError
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


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*rank 0")
@pytest.mark.parametrize("width", [2, 16, 100])
@pytest.mark.parametrize("rank", [0, 1, 2, 5, 17])
def test_results_are_exact_to_rounding(width: int, rank: int, by_kernel: list[bool]) -> None:
    """Of any shape and strides, by the module and by the kernel of a hook."""
    rank = min(rank, width)
    p, model = projection(width, rank), identity()
    eraser, wide = snn.Eraser(p), snn.Eraser(p, dtype=torch.float64)
    snn.install(model, {"0": p})
    rows = [torch.randn(*n, width) * 3 + 1 for n in ((), (1, 1), (3,), (2, 5), (3000,))]
    rows += [torch.randn(width, 5).T, torch.randn(4, width, 5).mT]
    rows += [torch.randn(6, 2 * width)[::2, ::2]]
    for x in (*rows, *(x.bfloat16() for x in rows[-3:]), rows[2].double()):
        kept, found, by_module = x.clone(), model(x), eraser(x)
        assert (
            (found.shape, found.dtype) == (by_module.shape, by_module.dtype) == (x.shape, x.dtype)
        )
        assert found.data_ptr() != x.data_ptr() != by_module.data_ptr()
        assert torch.equal(x, kept)
        assert torch.equal(found, model(x.contiguous()))
        assert is_erased(found, x, p)
        assert is_erased(by_module, x, p)
        assert not rank or not is_erased(found, x, projection(width, rank, seed=1))
        # A sum of d products, r times over.
        x64 = x.double().numpy()
        by_hand = x64 - (x64 @ p.right - p.bias) @ p.left.T
        assert np.allclose(wide(x.double()), by_hand, rtol=1e-13, atol=1e-14 * width)
    assert by_kernel == [True] * 24
    # Rows of float64 are erased in float64 by rounded factors.
    left, right, neg_bias = (t.double() for t in (eraser.left, eraser.right, eraser.neg_bias))
    rounded = x - (x @ right.T + neg_bias) @ left
    assert torch.allclose(eraser(x), rounded, rtol=1e-13, atol=1e-14 * width)
    for one in (model, eraser, wide):
        assert one(torch.randn(0, width)).shape == (0, width)
    assert by_kernel[24:] == [False]  # no rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [1, 6])
def test_16_bits_are_rounded_once(dtype: torch.dtype, rank: int) -> None:
    """By the module, also under autocast, and by the kernel of a hook."""
    p, hooked = projection(64, rank), identity()
    snn.install(hooked, {"0": p})
    x = (torch.randn(2000, 64, generator=torch.Generator().manual_seed(0)) * 3 + 1).to(dtype)
    for model in (snn.Eraser(p), hooked):
        found, wide = model(x), model(x.float())
        assert found.dtype == dtype
        assert is_erased(found, x, p)
        with torch.autocast("cpu", dtype=dtype):
            assert torch.equal(model(x), found)
            assert torch.equal(model(x.float()), wide)
    # Control: all in 16 bits is wrong.
    left, right, bias = (
        torch.tensor(a).to(dtype) for a in (p.left.T.copy(), p.right.T.copy(), p.bias)
    )
    assert not is_erased(x - (x @ right.T - bias) @ left, x, p)


def test_results_out_of_range_of_float16_are_infinite_as_in_torch(by_kernel: list[bool]) -> None:
    axis = np.eye(4)[:, :1]
    model, x = identity(), torch.full((2, 4), 60000.0).half()
    with snn.install(model, {"0": sf.Projection(-axis, axis, np.zeros(4))}):
        found = model(x)
    assert torch.equal(found[:, 0], torch.full((2,), torch.inf).half())
    assert torch.equal(found[:, 1:], x[:, 1:])
    assert by_kernel == [True]


@pytest.mark.parametrize("rank", [1, 6])  # one by one, and by two products
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_disabled_erasers_return_rows_that_overflow(dtype: torch.dtype, rank: int) -> None:
    x = torch.full((3, 16), torch.finfo(dtype).max, dtype=dtype)
    x[0, 3], x[1, 2] = torch.inf, -torch.inf
    model = identity()
    with snn.install(model, {"0": projection(rank=rank)}) as handle:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        with handle.disabled():
            assert torch.equal(model(x), x)
            assert torch.equal(compiled(x), x)
        assert not torch.equal(model(x), x)


def test_split_products_lose_nothing() -> None:
    """On a GPU, for larger ranks: parts of at most 12 bits."""
    a, b = torch.randn(64, 32), torch.randn(32, 8)
    high = torch_rows._high(a)
    assert torch.equal(high + (a - high), a)
    mantissa = high.view(torch.int32) & 0x7FFFFF
    assert int((mantissa & 0xFFF).max()) == 0  # 12 bits with the hidden one
    total = sum((p.double() @ q.double() for p, q in torch_rows._products(a, b)))
    exactly = a.double() @ b.double()
    size = a.double().abs() @ b.double().abs()
    assert float(((total - exactly).abs() / size).max()) < 2.0**-22


@pytest.mark.parametrize("rank", [1, 4, 8])
def test_tf32_changes_nothing_on_a_gpu(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    x, eraser, found = torch.randn(100, 16, device="cuda"), snn.Eraser(projection(rank=rank)), []
    for allow in (False, True):
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", allow)
        found.append(eraser.cuda()(x))
    assert torch.allclose(*found, atol=1e-5 if rank > 4 else 0.0)


# --- dtypes --------------------------------------------------------------------------------------


def test_factors_keep_their_dtype() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 16), torch.nn.Sequential(snn.Eraser(projection()))
    )
    eraser = model[1][0]
    before = {k: v.clone() for k, v in eraser.state_dict().items()}
    for move in (
        lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double(),
        lambda m: m.bfloat16().float(), lambda m: m.to("cpu", torch.float16), copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
    ):  # fmt: skip
        other = move(copy.deepcopy(model))
        for name, value in other[1][0].state_dict().items():
            assert value.dtype == torch.float32
            assert torch.equal(value, before[name])
    assert model.to(torch.bfloat16)[0].weight.dtype == torch.bfloat16
    meta = copy.deepcopy(eraser).to("meta")
    assert meta.left.dtype == torch.float32
    assert meta(torch.empty(3, 16, device="meta")).shape == (3, 16)
    assert meta.to_empty(device="cpu").left.shape == (1, 16)


@pytest.mark.parametrize("site", [0, 1, 2])  # with parameters, and without
@pytest.mark.parametrize("by_torch", [False, True])  # in memory, and with gradients
def test_an_installed_eraser_takes_the_dtype_of_its_site(site: int, by_torch: bool) -> None:
    parts = torch.nn.Linear(16, 16), torch.nn.Identity(), torch.nn.LayerNorm(16)
    model, p = torch.nn.Sequential(*parts), projection(rank=2)
    # What is left of the erased directions, against the sum of products that makes it.
    for dtype, bound in ((torch.float64, 1e-14), (torch.float32, 1e-5)):
        x = torch.randn(50, 16, dtype=dtype, requires_grad=by_torch)
        with snn.install(model.to(dtype), {str(site): p}):
            found = model[: site + 1](x)
        assert found.dtype == dtype
        left = found.detach().double().numpy() @ p.right - p.bias
        assert np.abs(left).max() < bound
        assert np.abs(left).max() > 0 or dtype == torch.float64


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # of torch.func itself
@pytest.mark.parametrize("rank", [1, 6])
def test_gradients_are_those_of_the_matrix(rank: int) -> None:
    eraser = snn.Eraser(projection(rank=rank), dtype=torch.float64)
    x = torch.randn(3, 2, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(eraser, (x,), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(eraser, (x,))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: snn.Eraser(np.eye(3)), r"sf\.splince"),
        (lambda: snn.Eraser(projection(), dtype=torch.bfloat16), "float32 or"),
        (lambda: snn.Eraser(projection())(torch.randn(3, 15)), "shape"),
        (lambda: snn.Eraser(projection())(torch.randn(())), "shape"),
        (lambda: snn.Eraser(projection())(torch.ones(3, 16, dtype=torch.long)), "floating"),
    ],
)
def test_invalid_arguments_of_eraser_are_errors(call: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        call()


# --- selected rows -------------------------------------------------------------------------------


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


def test_another_axis_is_erased(by_kernel: list[bool]) -> None:
    """Also where the usual axis is as wide."""
    p, x, model = projection(), torch.randn(3, 16, 16), identity()
    with snn.install(model, {"0": p}, feature_dim=1):
        assert is_erased(model(x).movedim(1, -1), x.movedim(1, -1), p)
    assert by_kernel == [True]


# --- tensors whose memory does not show all ------------------------------------------------------


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
        return is_erased(transform(model)(rows), rows, projection())

    return case


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
    "vmap": mapped_by(torch.func.vmap), "functionalize": mapped_by(torch.func.functionalize),
    # A tracer that passes real tensors records the products, and no constant.
    "make_fx": mapped_by(lambda model: make_fx(model)(x())),
    "trace": mapped_by(lambda model: torch.jit.trace(model, x(), check_trace=False)),
    "operations": seen_by(TorchDispatchMode, "__torch_dispatch__"),
    "functions": seen_by(TorchFunctionMode, "__torch_function__"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of torch's own transforms and tangents
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
