"""Projection: its matrix, rows of any dtype and layout, composition, folding, files, tensors.

Results lie within the rounding bound of `erasers.bound`.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from erasers import DTYPES, LAYOUTS, bound, draw_eraser, exact, layer_dtype, result_dtype, rows_like
from hypothesis import given
from hypothesis import strategies as st
from naive_model import laid_out
from numpy.typing import NDArray
from problems import EPS, Float, draw_data, report

import splince_fast as sf
from splince_fast._runtime import erase_rows, files
from splince_fast.exceptions import FileFormatError, InputError

# --- what it is ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-33, 1e-16, 1e-8, 1e8, 1e120])
def test_the_rank_does_not_depend_on_units(scale: float) -> None:
    """Embeddings hold features of size 1e-33; in float64 units any feature may."""
    units = np.where(np.isin(np.arange(9), [1, 4]), scale, 1.0)[:, None]
    for rank in (1, 2, 4):
        plain = draw_eraser(rank, d=9)
        scaled = sf.Projection(plain.left * units, plain.right / units, plain.mean)
        assert scaled.rank == (scaled @ scaled).rank == rank
        assert f"rank {rank} removed" in repr(scaled)
    left, right = np.array([[1 / scale], [0.0], [0.0]]), np.array([[0.0], [scale], [0.0]])
    assert sf.Projection(left, right, np.zeros(3)).rank == 1  # no feature is in both factors
    assert sf.Projection(np.zeros((3, 2)), np.ones((3, 2)), np.zeros(3)).rank == 0


@pytest.mark.parametrize(("gap", "rank"), [(1e-6, 2), (1e-10, 2), (1e-13, 2), (1e-17, 1)])
def test_directions_count_down_to_rounding(gap: float, rank: int) -> None:
    """I - P = u u^T + (u + gap v) v^T has the singular values 2^(1/2) and gap / 2^(1/2)."""
    u, v = np.linalg.qr(np.random.default_rng(0).normal(size=(6, 2)))[0].T
    left, right = np.stack([u, u + gap * v], 1), np.stack([u, v], 1)
    assert sf.Projection(left, right, u).rank == rank
    units = np.geomspace(1e-9, 1e9, 6)[:, None]
    if gap != 1e-13:  # what is near the rounding level depends on the balancing
        assert sf.Projection(left * units, right / units, u).rank == rank


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("rank", [1, 2])
def test_it_neither_keeps_nor_freezes_the_arrays_it_is_made_of(order: Any, rank: int) -> None:
    rng = np.random.default_rng(0)
    given = [np.array(rng.normal(size=(6, rank)), order=order) for _ in "lr"]
    eraser = sf.Projection(*given, mean := rng.normal(size=6))
    matrix, offset = eraser.matrix(), eraser.offset.copy()
    for array in (*given, mean):
        array[...] = 99.0
    np.testing.assert_array_equal(eraser.matrix(), matrix)
    np.testing.assert_array_equal(eraser.mean @ eraser.right @ eraser.left.T, offset)
    for held in (eraser.left, eraser.right, eraser.mean, eraser.offset):
        with pytest.raises(ValueError, match="read-only"):
            held[...] = 0.0
    with pytest.raises(AttributeError):
        eraser.mean = np.zeros(6)  # type: ignore[misc]


# --- refusals ------------------------------------------------------------------------------------


def applied(rows: Any, **options: Any) -> Callable[[], Any]:
    return lambda: draw_eraser()(rows, **options)


def made(*parts: Any) -> Callable[[], Any]:
    return lambda: sf.Projection(*parts)


ROWS, COLUMN, READ_ONLY = rows_like("float64", 4, 7), np.ones((3, 1)), np.broadcast_to(0.0, (4, 7))
STACK = rows_like("float64", 15, 7).reshape(3, 5, 7)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "left of one axis": (made(np.ones(3), COLUMN, np.ones(3)), "must be 2-D"),
    "factors of unlike rank": (made(COLUMN, np.ones((3, 2)), np.ones(3)), "do not fit together"),
    "a long mean": (made(COLUMN, COLUMN, np.ones(4)), "do not fit together"),
    "a mean of two axes": (made(COLUMN, COLUMN, COLUMN), "must be 2-D"),
    "NaN in a factor": (made(COLUMN, np.full((3, 1), np.nan), np.ones(3)), "must be finite"),
    "an infinite mean": (made(COLUMN, COLUMN, np.array([0, np.inf, 0])), "must be finite"),
    "out of another dtype": (applied(ROWS, out=np.zeros((4, 7), "f4")), "float32"),
    "out of another shape": (applied(ROWS, out=np.zeros((5, 7))), r"\(5, 7\)"),
    "a list as out": (applied(ROWS, out=np.zeros((4, 7)).tolist()), "list"),
    "out that is read-only": (applied(ROWS, out=READ_ONLY), "read-only"),
    "rows in place that are read-only": (applied(READ_ONLY, out=READ_ONLY), "read-only"),
    "few columns": (applied(np.zeros((4, 6))), "6 columns.*7"),
    "many columns": (applied(np.zeros((4, 8))), "8 columns.*7"),
    "a row": (applied(np.zeros(7)), r"X\[None, :\]"),
    "few columns of a stack": (applied(np.zeros((2, 4, 6))), "6 columns.*7"),
    "no columns": (applied(np.zeros((4, 0))), "no columns"),
    "a short mask": (applied(STACK, mask=np.ones(4, bool)), r"shape \(4,\).*\(3, 5\)"),
    "a mask of halves": (applied(STACK, mask=np.full((3, 5), 0.5)), "1 and 0"),
    "a mask of twos": (applied(STACK, mask=np.full((3, 5), 2)), "1 and 0"),
    "a ragged mask": (applied(STACK, mask=[[1], [1, 0]]), "cannot be read"),
    "a narrow weight": (lambda: draw_eraser().fold_into(np.ones((4, 6))), "weight has shape"),
    "a weight of one axis": (lambda: draw_eraser().fold_into(np.ones(7)), "weight (must|has 1)"),
    "a short bias": (lambda: draw_eraser().fold_into(np.ones((4, 7)), np.ones(3)), "bias has"),
    "a bias of two axes": (
        lambda: draw_eraser().fold_into(np.ones((4, 7)), np.ones((4, 1))), "bias has shape"
    ),
    "a composition of two widths": (lambda: draw_eraser(d=7) @ draw_eraser(d=6), r"7 features.*6"),
    **{f"alpha = {alpha!r}": (lambda alpha=alpha: draw_eraser().scaled(alpha), "alpha is")
       for alpha in (-0.1, 1.5, np.nan, np.inf, True, "0.5", None, 1j)},
    **{f"factors of {dtype}": (lambda dtype=dtype: draw_eraser().astype(dtype), "float32 or")
       for dtype in (np.float16, np.int64, "complex64", "nonsense", None)},
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    call, text = REFUSED[case]
    with pytest.raises(InputError, match=text):
        call()


# --- applying it ---------------------------------------------------------------------------------


TABLE, LINE = rows_like("float64", 8, 7), np.arange(20.0)
SHARED: dict[str, tuple[NDArray[Any], NDArray[Any], str]] = {
    "a row further": (TABLE[:7], TABLE[1:], "overlaps"),
    "columns reversed": (TABLE[:7], TABLE[:7, ::-1], "overlaps"),
    "rows reversed": (TABLE[:7], TABLE[6::-1], "overlaps"),
    "transposed": (TABLE[:7], TABLE[:7].T, "overlaps"),
    "windows of a line": (
        TABLE[:5],
        np.lib.stride_tricks.sliding_window_view(LINE, 7, writeable=True)[:5],
        "share",
    ),
    "a repeated row": (TABLE[:5], np.lib.stride_tricks.as_strided(LINE, (5, 7), (0, 8)), "share"),
}


@pytest.mark.parametrize("case", SHARED)
def test_out_that_shares_memory_is_refused_and_unchanged(case: str) -> None:
    rows, out, text = SHARED[case]
    before = TABLE.copy(), LINE.copy()
    for X in (rows, out) if text == "share" else (rows,):
        with pytest.raises(InputError, match=text):
            draw_eraser()(X, out=out)
    np.testing.assert_array_equal(TABLE, before[0])
    np.testing.assert_array_equal(LINE, before[1])
    halves = np.concatenate([TABLE, 0 * TABLE], axis=1)  # control: they share no memory
    draw_eraser()(halves[:, :7], out=halves[:, 7:])
    np.testing.assert_array_equal(halves[:, 7:], draw_eraser()(TABLE))


@pytest.mark.parametrize("rank", [1, 3])
def test_rows_with_nan_spoil_no_other_row(rank: int) -> None:
    """A mask that leaves them out keeps their bits."""
    eraser, x = draw_eraser(rank), rows_like("float64", 6, 7)
    bad, others = x.copy(), np.arange(6) != 2
    bad[2, 3] = np.nan
    found = eraser(bad)
    assert np.isnan(found[2]).any()
    np.testing.assert_array_equal(found[others], eraser(x)[others])
    masked = eraser(bad, mask=others.astype(np.float32))
    np.testing.assert_array_equal(masked, np.where(others[:, None], found, bad))


def test_memmap_to_memmap_and_in_place(tmp_path: Path) -> None:
    eraser, x = draw_eraser(2), rows_like("float16", 300, 7)
    for name in "xy":
        np.save(tmp_path / f"{name}.npy", x)
    source, target, both = (
        np.load(tmp_path / f"{name}.npy", mmap_mode=mode)
        for name, mode in (("x", "r"), ("y", "r+"), ("x", "r+"))
    )
    for rows, out in ((source, target), (both, both)):
        assert eraser(rows, out=out, progress=True) is out
        out.flush()
    for name in "xy":
        np.testing.assert_array_equal(np.load(tmp_path / f"{name}.npy"), eraser(x))
    with pytest.raises(InputError, match=r"r\+"):
        eraser(source, out=source)


@pytest.mark.parametrize(("dtype", "rank"), [("float64", 1), ("float32", 4), ("float16", 2)])
@pytest.mark.parametrize("layout", ["C", "F"])
def test_in_place_needs_memory_for_a_block_only(dtype: str, rank: int, layout: str) -> None:
    eraser = draw_eraser(rank, d=64)
    x = laid_out(np.ones((80_000, 64), dtype), layout)
    eraser(x[:5].copy())  # compiles
    tracemalloc.start()
    try:
        eraser(x, out=x)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 << 20 < x.nbytes / 3


# --- leading axes and masks ----------------------------------------------------------------------


def stack_of(dtype: str, layout: str) -> NDArray[Any]:
    """(3, 5, 7) numbers in a layout whose leading axes merge (C) or do not."""
    x = rows_like(dtype, 15, 7).reshape(3, 5, 7)
    if layout == "tokens first":
        return np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1)
    if layout == "padded":
        wide = np.zeros((3, 8, 7), x.dtype)
        wide[:, :5] = x
        return wide[:, :5]
    return x if layout == "C" else np.asfortranarray(x)


def chunks_of(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erase_rows, "_CHUNK_BYTES", 4 * piece)
    monkeypatch.setattr(erase_rows, "_PIECE_BYTES", piece)


@pytest.mark.parametrize("layout", ["C", "tokens first", "padded", "F"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "<f2", ">f2", "int64"])
@pytest.mark.parametrize("piece", [0, 1, 4 * 7 * 2])  # bytes: less than a row, or some rows
def test_leading_axes_and_masks(
    dtype: str, layout: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of rows beyond one chunk."""
    if piece:
        chunks_of(piece, monkeypatch)
    eraser = draw_eraser(2)
    x = stack_of(dtype, layout)
    expected = eraser(np.array(x, order="C").reshape(15, 7)).reshape(x.shape)
    np.testing.assert_array_equal(eraser(x), expected)
    mask = np.random.default_rng(0).random((3, 5)) < 0.5
    partly = np.where(mask[..., None], expected, x)
    np.testing.assert_array_equal(eraser(x, mask=mask), partly)
    np.testing.assert_array_equal(eraser(x, mask=mask.astype(np.int64)), partly)
    out = np.empty_like(x, dtype=expected.dtype)
    assert eraser(x, mask=mask, out=out) is out
    np.testing.assert_array_equal(out, partly)
    assert eraser(x[:, :0], mask=mask[:, :0]).shape == (3, 0, 7)
    if x.dtype == expected.dtype:
        eraser(x, mask=mask, out=x)
        np.testing.assert_array_equal(x, partly)


@pytest.mark.parametrize("piece", [1, 4 * 7 * 2])
@pytest.mark.parametrize("dtype", ["<f2", ">f2"])
def test_a_row_that_halves_cannot_hold_has_its_number_among_all_chunks(
    dtype: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks_of(piece, monkeypatch)
    eraser = sf.Projection(3 * np.eye(7)[:, :1], np.eye(7)[:, :1], np.zeros(7))  # x_0 to -2 x_0
    x, last = stack_of(dtype, "padded"), np.arange(15).reshape(3, 5) > 12
    x[2, 3] = 60000
    for mask in (None, last):
        with pytest.raises(InputError, match=r"row 13 .*float16"):
            eraser(x, mask=mask)
    assert np.isfinite(eraser(x.astype(np.float32))).all()  # control


# --- threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_the_number_of_threads_changes_no_bit(
    rank: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    eraser = draw_eraser(rank, d=33)
    x = rows_like(dtype, 30_011, 33)
    results = []
    for threads in ("1", "2", "3", "7", ""):
        monkeypatch.setenv("SPLINCE_FAST_NUM_THREADS", threads)
        results.append(eraser(x).tobytes())
    assert len(set(results)) == 1
    # Nor does the place of a row among others.
    pieces = [eraser(x[a:b]) for a, b in ((0, 1), (1, 6), (6, 17_001), (17_001, 30_011))]
    assert np.concatenate(pieces).tobytes() == results[0]


# --- folding, composing, rounding ----------------------------------------------------------------


def test_a_layer_that_leaves_its_range_is_an_error_and_no_infinity() -> None:
    axis = np.array([[1.0], [0.0]])
    doubling = sf.Projection(-axis, axis, np.array([1.0, 0.0]))
    weight = np.array([[6e4, 1.0]], np.float16)
    with pytest.raises(InputError, match=r"folded weight holds 1.2e\+05.*float16"):
        doubling.fold_into(weight)
    assert doubling.fold_into(weight.astype("f4"))[0][0, 0] == 120000
    far = sf.Projection(axis, axis, np.array([9e4, 0.0]))
    with pytest.raises(InputError, match="folded bias holds 9e"):
        far.fold_into(np.ones((1, 2), np.float16))


def test_rounded_factors_leave_the_mean_in_place() -> None:
    eraser = draw_eraser(2, mean=1e4)
    narrow, mean = eraser.astype(np.float32), eraser.mean[None, :]
    for name in ("left", "right"):
        rounded = getattr(eraser, name).astype(np.float32).astype(np.float64)
        np.testing.assert_array_equal(getattr(narrow, name), rounded)
    for dtype in ("float64", "d", float):
        np.testing.assert_array_equal(eraser.astype(dtype).matrix(), eraser.matrix())
    size = np.abs(eraser.left) @ (np.abs(eraser.right).T @ np.abs(eraser.mean))
    for candidate in (eraser, narrow):
        assert (np.abs(candidate(mean) - mean) <= 20 * EPS * (size + np.abs(mean))).all()


def test_a_composition_of_other_means_keeps_its_shift_as_float32() -> None:
    """Factors are rounded; the means, a hundred deviations apart, stay in place."""
    first, second = draw_eraser(seed=1), draw_eraser(rank=2, seed=2)
    far = sf.Projection(second.left, second.right, second.mean + 100.0)
    both = far @ first
    x = np.random.default_rng(3).normal(size=(50, 7))
    expected = far(first(x))
    np.testing.assert_allclose(both(x), expected, atol=1e-10)
    narrow = both.astype(np.float32)
    # Each factor is rounded by 2^-24 of its entries; coefficients are of the size of the shift.
    size = np.abs(both.left) @ np.abs(both.bias)
    assert np.abs(narrow(x) - expected).max() <= 2.0**-20 * size.max()
    without = sf.Projection(narrow.left, narrow.right, both.mean)
    assert np.abs(without(x) - expected).max() > 1.0  # control


# --- partial erasers -----------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0, 0.3, np.float32(0.5), 1])
def test_a_partial_eraser_makes_a_fraction_of_the_change(alpha: float) -> None:
    whole = draw_eraser(2, mean=3.0) @ draw_eraser(1, seed=1)  # with a shift
    part, x, first = whole.scaled(alpha), rows_like("float64", 50, 7), draw_eraser(1, seed=2)
    a, weight = float(alpha), rows_like("float64", 2, 7)
    size = 1 + np.linalg.norm(whole.left, 2) * np.linalg.norm(whole.right, 2)
    close = 64 * EPS * size * (np.abs(x).max() + np.abs(whole.mean).max())
    np.testing.assert_allclose(part(x), x + a * (whole(x) - x), rtol=0, atol=close)
    expected = (1 - a) * np.eye(7) + a * whole.matrix()
    np.testing.assert_allclose(part.matrix(), expected, atol=64 * EPS * size)
    folded, bias = part.fold_into(weight, np.ones(2))
    atol = 8 * close * np.abs(weight).sum()
    np.testing.assert_allclose(x @ folded.T + bias, part(x) @ weight.T + 1, rtol=0, atol=atol)
    np.testing.assert_allclose((part @ first)(x), part(first(x)), rtol=0, atol=8 * close)
    assert part.rank == (whole.rank if a else 0)
    assert part.report is None
    assert not part.left.flags.writeable


def test_a_probe_reads_the_concept_behind_a_partial_eraser() -> None:
    """The class means approach each other, and R^2 of the best linear predictor does not move."""
    data = draw_data(0, n=500, d=6, kz=2)
    eraser, z = sf.leace(data.moments(), erase="z"), data.z
    gaps, r2s = [], []
    for x in (data.x, eraser.scaled(0.9)(data.x), eraser(data.x)):
        gaps.append(np.linalg.norm(x[z == 1].mean(axis=0) - x[z == 0].mean(axis=0)))
        design = np.column_stack([np.ones(len(x)), x])
        r2s.append(1 - np.var(z - design @ np.linalg.lstsq(design, z, rcond=None)[0]) / np.var(z))
    assert gaps[1] == pytest.approx(0.1 * gaps[0], rel=1e-9)
    assert r2s[1] == pytest.approx(r2s[0], rel=1e-6)
    assert r2s[0] > 0.01 > r2s[2]


def test_the_report_of_a_partial_eraser() -> None:
    eraser = fitted()
    parts = eraser, eraser.scaled(1), eraser.scaled(0.4), eraser.scaled(0.5).scaled(0.5)
    whole, same, part, again = map(report, parts)
    assert (whole.alpha, part.alpha, again.alpha) == (1.0, 0.4, 0.25)
    assert same == whole
    erased, kept = part.variables
    assert part.rho is erased.expected is None
    assert part.sensitivity == pytest.approx(0.4 * whole.sensitivity)
    assert kept.residual <= kept.bound
    assert "linear probe" in str(part)
    assert again.variables[0].residual == pytest.approx(0.75, abs=1e-9)


# --- files and copies ----------------------------------------------------------------------------


def fitted() -> sf.Projection:
    return sf.splince(draw_data(0).moments(), erase="z", keep="y")


@pytest.mark.parametrize(
    ("name", "edit"),
    [("left", lambda a: a.T), ("left", np.ravel), ("mean", lambda a: a[None]),
     ("mean", lambda a: a.astype(np.int64)), ("left", lambda a: None)],
    ids=["transposed", "flat", "vector as matrix", "integers", "missing"],
)  # fmt: skip
def test_tensors_of_another_form_are_refused(name: str, edit: Any, tmp_path: Path) -> None:
    path = tmp_path / "e.safetensors"
    fitted().save(path)
    tensors, metadata = files.read(path, "projection", 1)
    for spoilt in (tensors, tensors | {name: edit(tensors[name])}):
        held = {key: np.array(array) for key, array in spoilt.items() if array is not None}
        files.write(path, "projection", 1, held, metadata)
        if spoilt is tensors:  # control
            assert sf.Projection.load(path).rank == 2
    with pytest.raises(FileFormatError, match=r"e\.safetensors"):
        sf.Projection.load(path)


# --- torch ---------------------------------------------------------------------------------------


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed: pip install torch")


FLOATS = ["float64", "float32", "float16", "bfloat16"]


def tensor_and_bound(torch: Any, dtype: str, eraser: sf.Projection) -> tuple[Any, Float, Float]:
    """Rows as a tensor, the exact result, and how far the result may lie from it."""
    X = torch.from_numpy(rows_like("float64", 12, eraser.n_features)).to(getattr(torch, dtype))
    wide = X.detach().double().numpy()
    expected = exact(eraser, wide).astype(np.float64)
    ulp = torch.finfo(X.dtype).eps
    return X, expected, bound(eraser, wide, wide) + 0.51 * ulp * np.abs(expected)


def in_layout(torch: Any, X: Any, layout: str) -> Any:
    """The same rows in another layout, or as sequences of four tokens."""
    if layout == "transposed":
        return X.T.contiguous().T
    if layout == "strided":
        wide = torch.zeros((24, 21), dtype=X.dtype)
        wide[::2, ::3] = X
        return wide[::2, ::3]
    if layout == "tokens first":
        return X.reshape(3, 4, 7).transpose(0, 1).contiguous().transpose(0, 1)
    return X.reshape(3, 4, 7) if layout == "sequences" else X


@pytest.mark.parametrize(
    "layout", ["contiguous", "transposed", "strided", "sequences", "tokens first"]
)
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("dtype", FLOATS)
def test_tensors_in_tensors_out(torch: Any, dtype: str, rank: int, layout: str) -> None:
    eraser = draw_eraser(rank)
    plain, expected, allowed = tensor_and_bound(torch, dtype, eraser)
    X = in_layout(torch, plain, layout)
    before, found, out = X.clone(), eraser(X), torch.zeros_like(X)
    assert isinstance(found, torch.Tensor)
    assert (found.dtype, found.device, found.shape) == (X.dtype, X.device, X.shape)
    assert torch.equal(X, before)
    assert not found.requires_grad
    assert (np.abs(found.reshape(12, 7).double().numpy() - expected) <= allowed).all()
    assert torch.equal(found.reshape(12, 7), eraser(plain))
    assert eraser(X, out=out) is out
    assert torch.equal(out, found)
    assert eraser(X[:0]).shape == (0, *X.shape[1:])
    mask = (torch.arange(12) % 3 > 0).reshape(X.shape[:-1])
    partly = torch.where(mask[..., None], found, X)
    assert torch.equal(eraser(X, mask=mask), partly)
    assert eraser(X, mask=mask.numpy(), out=out) is out
    assert torch.equal(out, partly)
    recorded = X.clone().requires_grad_()
    erased = eraser(recorded, mask=mask)
    error = (erased.detach() - partly).reshape(12, 7).double().numpy()
    assert (np.abs(error) <= 3 * allowed).all()  # two roundings of the recorded result
    erased.sum().backward()
    assert torch.equal(recorded.grad[~mask], torch.ones_like(recorded.grad[~mask]))
    eraser(X, mask=mask, out=X)
    assert torch.equal(X, partly)


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_flow_and_out_records_none(torch: Any, dtype: str) -> None:
    """`out` is written where nothing is recorded; otherwise it is an error, as in torch itself."""
    eraser = draw_eraser(2)
    X, expected, allowed = tensor_and_bound(torch, dtype, eraser)
    out, ulp = torch.zeros_like(X), torch.finfo(X.dtype).eps
    with pytest.raises(InputError, match="out"):
        eraser(X, out=torch.zeros_like(X).requires_grad_())
    X.requires_grad_()
    found = eraser(X)
    assert found.requires_grad
    assert found.dtype == X.dtype
    assert (np.abs(found.detach().double().numpy() - expected) <= 2 * allowed).all()
    G = torch.linspace(-1, 1, X.numel(), dtype=torch.float64).reshape(X.shape)
    (found.double() * G).sum().backward()
    gradient = G.numpy() @ eraser.matrix()
    np.testing.assert_allclose(X.grad.double().numpy(), gradient, rtol=4 * ulp, atol=8 * ulp)
    with torch.no_grad():
        assert eraser(X, out=out) is out
    assert (np.abs(out.double().numpy() - expected) <= allowed).all()
    with pytest.raises(InputError, match="out"):
        eraser(X, out=out)


def test_tensors_that_do_not_fit(torch: Any) -> None:
    eraser, X = draw_eraser(), torch.zeros((3, 7))
    sparse, nowhere, eighths = X.to_sparse(), X.to("meta"), X.to(torch.float8_e4m3fn)
    shapes = [torch.zeros(shape) for shape in ((3, 6), (7,), (2, 3, 6))]
    cases: list[tuple[Any, Any, str]] = [
        *((rows, None, r"\(\.\.\., 7\) is expected") for rows in shapes),
        *((rows, None, r"sparse|meta|float8") for rows in (sparse, nowhere, eighths)),
        *((X, out, "out is") for out in (X.double(), X[:2], X.numpy())),
        (X.numpy(), X, "out is"),
        (X.to(torch.complex64), None, "complex"),
        (X[:2], X[1:], "overlaps"),
        (X, torch.zeros(7).expand(3, 7), "share memory"),
    ]
    for rows, out, text in cases:
        with pytest.raises(InputError, match=text):
            eraser(rows, out=out)


@pytest.mark.parametrize("dtype", [*FLOATS, "int64", "uint8", "int8", "bool"])
def test_folding_into_a_torch_layer(torch: Any, dtype: str) -> None:
    """Integers become floats: 2.9 is not cut to 2."""
    eraser = draw_eraser(2)
    numbers = (torch.arange(28).reshape(4, 7) % 5).to(getattr(torch, dtype))
    weight = torch.nn.Parameter(numbers, requires_grad=dtype in FLOATS)
    wide = [t.detach().double().numpy() for t in (weight, weight[:, 0])]
    found, exactly = eraser.fold_into(weight, weight[:, 0]), eraser.fold_into(*wide)
    if dtype not in FLOATS:
        out = torch.empty((4, 7), dtype=torch.float64)
        expected = eraser(numbers.numpy())
        np.testing.assert_array_equal(eraser(numbers, out=out), expected, strict=True)
    result = {"int64": "float64"}.get(dtype, dtype if dtype in FLOATS else "float32")
    for part, expected in zip(found, exactly, strict=True):
        assert part.dtype == getattr(torch, result)
        ulp = torch.finfo(part.dtype).eps
        np.testing.assert_allclose(part.double().numpy(), expected, rtol=ulp, atol=1e-7 * ulp)
    with pytest.raises(InputError, match="folded"):
        sf.Projection(1e5 * np.eye(7), np.eye(7), np.ones(7)).fold_into(torch.eye(7).half())


def test_a_negated_view_and_directions_that_are_tensors(torch: Any) -> None:
    """The view shares the memory of other numbers."""
    data, directions = draw_data(0), np.eye(8)[:, :2]
    rows, z, y = map(torch.from_numpy, (-data.x, data.z, data.y))
    negated = torch.complex(rows, rows).conj().imag
    assert negated.is_neg()
    moments = sf.Moments().update(negated, {"z": z, "y": y})
    eraser = sf.splince(moments, erase="z", keep=torch.from_numpy(directions))
    expected = sf.splince(data.moments(), erase="z", keep=directions)
    np.testing.assert_array_equal(eraser.matrix(), expected.matrix())
    np.testing.assert_array_equal(eraser(negated).numpy(), expected(data.x))
    assert torch.is_tensor(sf.erase(negated, z, y)[0])


def test_bfloat16_overflows_as_float32_does() -> None:
    """Between the largest numbers of both: without a NumPy warning, which is an error here."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    eraser = sf.Projection(np.array([[-0.999], [0.0]]), np.array([[1.0], [0.0]]), np.zeros(2))
    found = eraser(np.full((2, 2), 2.0**127, ml_dtypes.bfloat16))
    assert np.isinf(found.astype(np.float32)).tolist() == [[True, False]] * 2


# --- its matrix, its fixed points, rows of any kind ----------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_orientation_of_the_matrix_and_the_offset(rank: int) -> None:
    eraser = draw_eraser(rank)
    P = eraser.matrix()
    assert np.linalg.norm(P - P.T) > 0.1
    x = rows_like("float64", 9, 7)
    np.testing.assert_allclose(eraser(x), x @ P.T + eraser.offset, atol=1e-11)
    np.testing.assert_allclose(P, np.eye(7) - eraser.left @ eraser.right.T, atol=1e-14)
    np.testing.assert_allclose(eraser.offset, eraser.mean - P @ eraser.mean, atol=1e-12)
    # Controls: the transpose, the mean as additive constant, no constant.
    for wrong in (x @ P + eraser.offset, x @ P.T + eraser.mean, x @ P.T):
        assert np.abs(eraser(x) - wrong).max() > 0.1
    mean = eraser.mean[None, :]
    np.testing.assert_allclose(eraser(mean), mean, atol=1e-13)
    np.testing.assert_allclose(eraser(eraser(x)), eraser(x), atol=1e-11)
    assert (eraser.rank, eraser.n_features, eraser.method) == (rank, 7, "custom")
    assert eraser.report is None
    assert repr(eraser) == f"Projection(custom, 7 features, rank {rank} removed)"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_every_dtype_and_layout(rank: int, dtype: str, layout: str) -> None:
    eraser = draw_eraser(rank)
    x = rows_like(dtype, 13, 7, layout)
    before = x.tobytes()
    found = eraser(x)
    assert type(found) is np.ndarray
    assert found.dtype == result_dtype(dtype)
    assert x.tobytes() == before
    # Beyond float64 there are no more digits than the float64 inside has.
    error = np.abs((found.astype(np.longdouble) - exact(eraser, x)).astype(np.float64))
    assert (error <= bound(eraser, x, found)).all()
    assert (eraser(x[:0]).shape, eraser(x[:0]).dtype) == ((0, 7), found.dtype)
    np.testing.assert_array_equal(eraser(x[5:6]), found[5:6])
    if layout not in ("read-only", "broadcast"):
        out = laid_out(np.zeros_like(found), layout)
        assert eraser(x, out=out) is out
        np.testing.assert_array_equal(out, found)
        if x.dtype == found.dtype:
            assert eraser(x, out=x) is x
            np.testing.assert_array_equal(x, found)


@pytest.mark.parametrize("mutant", ["float32 coefficients", "no mean", "transpose"])
def test_control_the_error_bound_tells_wrong_arithmetic(mutant: str) -> None:
    eraser = draw_eraser(2, mean=1e3)
    x = (rows_like("float64", 50, 7) + eraser.mean).astype(np.float32)
    if mutant == "float32 coefficients":
        left, right, mean = (a.astype(np.float32) for a in (eraser.left, eraser.right, eraser.mean))
        wrong = x - (x @ right - mean @ right) @ left.T
    elif mutant == "no mean":
        wrong = (x - (x @ eraser.right) @ eraser.left.T).astype(np.float32)
    else:
        wrong = (x - ((x - eraser.mean) @ eraser.left) @ eraser.right.T).astype(np.float32)
    error = np.abs((wrong.astype(np.longdouble) - exact(eraser, x)).astype(np.float64))
    assert (error > bound(eraser, x, wrong)).any()


@pytest.mark.parametrize("size", [1e6, 1e9, 1e12])
@pytest.mark.parametrize("rank", [1, 3])
def test_a_feature_of_large_mean_costs_the_others_no_digit(rank: int, size: float) -> None:
    """A time stamp or an id among the features; also in a composition."""
    rng = np.random.default_rng(0)
    d = 6
    x = rng.normal(size=(50, d))
    x[:, 0] = size + rng.integers(-3, 4, size=50)
    left, right = rng.normal(size=(2, d, rank))
    eraser = sf.Projection(left, right @ np.linalg.inv(left.T @ right), x.mean(axis=0))
    nothing = sf.Projection(np.zeros((d, 1)), np.zeros((d, 1)), eraser.mean)
    expected = exact(eraser, x).astype(np.float64)
    allowed = bound(eraser, x, x)
    for e in (eraser, eraser @ nothing):
        assert (np.abs(e(x) - expected) <= allowed).all()
    # The control: the mean taken off after the product, as bias.
    late = x - (x @ eraser.right - eraser.mean @ eraser.right) @ eraser.left.T
    assert (np.abs(late - expected) > 4 * allowed)[:, 1:].any()


@given(seed=st.integers(0, 2**20), ranks=st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_composition_is_one_after_the_other(seed: int, ranks: tuple[int, int]) -> None:
    first, second = (draw_eraser(r, seed=seed + i) for i, r in enumerate(ranks))
    both = second @ first
    x = rows_like("float64", 9, 7, seed=seed)
    size = np.linalg.norm(first.matrix()) * np.linalg.norm(second.matrix()) * 100
    np.testing.assert_allclose(both(x), second(first(x)), atol=1e3 * EPS * size)
    np.testing.assert_allclose(
        both.matrix(), second.matrix() @ first.matrix(), atol=1e3 * EPS * size
    )
    np.testing.assert_allclose(x @ both.matrix().T + both.offset, both(x), atol=1e3 * EPS * size)
    assert both.method == "custom @ custom"


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "int8"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_folding_into_the_next_layer(dtype: str, with_bias: bool) -> None:
    eraser = draw_eraser(2)
    rng = np.random.default_rng(2)
    weight = (8 * rng.normal(size=(4, 7))).astype(dtype)
    bias = (8 * rng.normal(size=4)).astype(dtype) if with_bias else None
    before = weight.copy()
    folded, shift = eraser.fold_into(weight, bias)
    assert folded.dtype == shift.dtype == layer_dtype(dtype)
    assert (folded.shape, shift.shape) == ((4, 7), (4,))
    np.testing.assert_array_equal(weight, before)
    x = rows_like("float64", 6, 7)
    wide = weight.astype(np.float64)
    expected = eraser(x) @ wide.T + (0.0 if bias is None else bias.astype(np.float64))
    # The layer is rounded once to its dtype.
    own = float(np.finfo(folded.dtype).eps)
    size = np.abs(x) @ np.abs(folded.astype(np.float64)).T + np.abs(shift.astype(np.float64))
    found = x @ folded.astype(np.float64).T + shift.astype(np.float64)
    assert (np.abs(found - expected) <= 2 * own * size + 1e-11).all()
    wrong = x @ (wide @ eraser.matrix().T).T
    assert np.abs(found - wrong).max() > 1
