"""nn.eraser: numbers, dtypes, autograd, transforms, files."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import splince_fast as sf
from nn.conftest import identity, projection
from splince_fast import nn as snn
from splince_fast.exceptions import InputError


def exact(p: sf.Projection, x: torch.Tensor) -> np.ndarray:
    """r(x) in float64."""
    rows = x.detach().double().numpy().reshape(-1, p.n_features)
    return (rows - (rows @ p.right - p.bias) @ p.left.T).reshape(x.shape)


@pytest.mark.parametrize("rank", [0, 1, 3, 7])
@pytest.mark.parametrize("shape", [(16,), (5, 16), (2, 3, 16), (2, 3, 4, 16), (0, 16)])
def test_the_module_is_the_projection_on_the_last_axis(rank: int, shape: tuple[int, ...]) -> None:
    p = projection(rank=rank)
    x = torch.randn(*shape, dtype=torch.float64)
    found = snn.Eraser(p, dtype=torch.float64)(x)
    assert found.dtype == torch.float64
    # A sum of d products, r times over.
    assert np.allclose(found.numpy(), exact(p, x), rtol=0, atol=1e-13)
    rounded = snn.Eraser(p)
    left, right, neg_bias = (t.double() for t in (rounded.left, rounded.right, rounded.neg_bias))
    assert torch.allclose(rounded(x), x - (x @ right.T + neg_bias) @ left, rtol=0, atol=1e-13)
    single = rounded(x.float())
    assert single.dtype == torch.float32
    assert np.allclose(single.numpy(), exact(p, x.float()), rtol=0, atol=2e-5)


def spacing_differs(
    found: torch.Tensor, reference: np.ndarray, x: torch.Tensor
) -> tuple[float, float]:
    """Share of entries that are not the rounded reference, and the largest distance in spacings.

    Where almost all of x cancels, float32 rounding counts: sums of 64 products are off by some
    8 * 2^-24 |x|, a quarter of a spacing of float16 at 2^-9 |x|; one bit more for several of them.
    """
    rounded = torch.from_numpy(reference).to(found.dtype)
    bits = {torch.bfloat16: 8, torch.float16: 11}[found.dtype]
    size = torch.maximum(rounded.double().abs(), x.double().abs() * 2.0**-8).clamp(min=1e-6)
    steps = (found.double() - rounded.double()).abs() / 2.0 ** (size.log2().floor() + 1 - bits)
    return float((steps > 0).double().mean()), float(steps.max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [1, 6])
def test_16_bits_are_rounded_once(dtype: torch.dtype, rank: int) -> None:
    """By the module, and by the kernel of a hook."""
    p, hooked = projection(64, rank), identity()
    snn.install(hooked, {"0": p})
    x = (torch.randn(2000, 64, generator=torch.Generator().manual_seed(0)) * 3 + 1).to(dtype)
    for model in (snn.Eraser(p), hooked):
        found = model(x)
        share, largest = spacing_differs(found, exact(p, x), x)
        assert found.dtype == dtype
        assert share <= 1e-3
        assert largest <= 1.0
    # Control: all in 16 bits is wrong far more often.
    left, right, bias = (
        torch.tensor(a).to(dtype) for a in (p.left.T.copy(), p.right.T.copy(), p.bias)
    )
    narrow = x - (x @ right.T - bias) @ left
    assert spacing_differs(narrow, exact(p, x), x)[0] > 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_off_inside(dtype: torch.dtype) -> None:
    p = projection(rank=2)
    x = torch.randn(50, 16)
    eraser = snn.Eraser(p)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(eraser(x), snn.Eraser(p)(x))
        plain = eraser(x)
    assert torch.equal(plain, eraser(x))


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


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # of torch.func itself
@pytest.mark.parametrize("rank", [1, 6])
def test_gradients_are_those_of_the_matrix(rank: int) -> None:
    p = projection(rank=rank)
    eraser = snn.Eraser(p, dtype=torch.float64)
    x = torch.randn(3, 2, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(eraser, (x,))
    assert torch.autograd.gradgradcheck(eraser, (x,))
    _, tangent = torch.func.jvp(eraser, (x,), (torch.ones_like(x),))
    assert np.allclose(tangent.detach().numpy(), np.ones((3, 2, 16)) @ p.matrix().T)
    mapped = torch.func.vmap(eraser)(x)
    assert torch.allclose(mapped, eraser(x))


def test_a_composition_is_erased_by_its_bias() -> None:
    both, x = projection(seed=3) @ projection(rank=2), torch.randn(20, 16).double()
    found = snn.Eraser(both, dtype=torch.float64)(x)
    assert np.allclose(found, both(x.numpy()), atol=1e-12)


@pytest.mark.parametrize("rank", [1, 6])  # one by one, and by two products
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_disabled_erasers_return_rows_that_overflow(dtype: torch.dtype, rank: int) -> None:
    x = torch.full((3, 16), torch.finfo(dtype).max, dtype=dtype)
    x[0, 3], x[1, 2] = torch.inf, -torch.inf
    model = torch.nn.Sequential(torch.nn.Identity())
    with snn.install(model, {"0": projection(rank=rank)}) as installed:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        with installed.disabled():
            assert torch.equal(model(x), x)
            assert torch.equal(compiled(x), x)
        assert not torch.equal(model(x), x)


def test_split_products_lose_nothing() -> None:
    """What a GPU computes for larger ranks: parts of at most 12 bits."""
    from splince_fast._runtime.torch_rows import _high, _products

    a, b = torch.randn(64, 32), torch.randn(32, 8)
    high = _high(a)
    assert torch.equal(high + (a - high), a)
    mantissa = high.view(torch.int32) & 0x7FFFFF
    assert int((mantissa & 0xFFF).max()) == 0  # 12 bits with the hidden one
    total = sum((p.double() @ q.double() for p, q in _products(a, b)))
    exactly = a.double() @ b.double()
    size = a.double().abs() @ b.double().abs()
    assert float(((total - exactly).abs() / size).max()) < 2.0**-22


@pytest.mark.parametrize("site", ["0", "1", "2"])  # with parameters, and without
@pytest.mark.parametrize("by_torch", [False, True])  # in memory, and with gradients
def test_an_installed_eraser_takes_the_dtype_of_its_site(site: str, by_torch: bool) -> None:
    linear = torch.nn.Linear(16, 16)
    model = torch.nn.Sequential(linear, torch.nn.Identity(), torch.nn.LayerNorm(16))
    x, p, seen = torch.randn(50, 16), projection(rank=2), []
    # What is left of the erased directions, against the sum of products that makes it.
    bounds = {torch.float64: 1e-14, torch.float32: 1e-5}
    for dtype, bound in bounds.items():
        with torch.set_grad_enabled(by_torch), snn.install(model.to(dtype), {site: p}):
            handle = model.get_submodule(site).register_forward_hook(
                lambda module, args, output: seen.append(output.detach())
            )
            model(x.to(dtype).requires_grad_(by_torch))
            handle.remove()
        found = seen.pop()
        assert found.dtype == dtype
        left = found.double().numpy() @ p.right - p.bias
        assert np.abs(left).max() < bound
        assert np.abs(left).max() > 0 or dtype == torch.float64


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


@pytest.mark.parametrize("rank", [1, 4, 8])
def test_tf32_changes_nothing_on_a_gpu(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    x, eraser, found = torch.randn(100, 16, device="cuda"), snn.Eraser(projection(rank=rank)), []
    for allow in (False, True):
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", allow)
        found.append(eraser.cuda()(x))
    assert torch.allclose(*found, atol=1e-5 if rank > 4 else 0.0)
