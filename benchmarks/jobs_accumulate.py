"""Jobs that accumulate, merge and save moments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import cycle
from operator import methodcaller
from typing import Any

import numpy as np
import scipy.sparse
from scipy.linalg.blas import get_blas_funcs

import splince_fast as sf
from benchmarks import peers
from benchmarks.data import Array, Problem, cached_problem, problem, scratch, split_rows, write_rows
from benchmarks.jobs import FLOOR, OURS, Contenders, Target, below, faster, job, within
from benchmarks.peers import CE, CE64, ONEDAL
from benchmarks.timing import Contender, each, pick

BLOCK = 4096
DTYPES = ("float32", "float64")
_WIDTHS = (768, 2048, 4096)


def block_rows() -> int:
    return pick(BLOCK, 64)


def rows_of(d: int, dtype: str = "float32") -> Problem:
    """Return four blocks of rows (two for d >= 4096), too large for the processor caches."""
    return cached_problem(pick(4 if d < 4096 else 2, 2) * block_rows(), pick(d, 16), dtype)


def accumulate(data: Problem, rows: int = 0, labels: Any = None, **options: Any) -> Contender:
    """Return a contender that calls `Moments.update` with `rows` rows at a time.

    If `rows` is 0, each call gets a block of `block_rows()` rows. The labels are by default the
    concept and the task of `data`, as classes.
    """
    if labels is None:
        labels = data.labels
        options["kinds"] = dict.fromkeys(labels, "classes")
    blocks = split_rows(rows or block_rows(), data.X, **labels)
    return each(blocks, sf.Moments(**options).update, sf.Moments.covariance)


def syrk_into(X: Array, total: Array) -> None:
    """Add X^T X to the lower triangle of `total` by SYRK.

    X is C-ordered, `total` Fortran-ordered.
    """
    get_blas_funcs("syrk", (X,))(1.0, X.T, beta=1.0, c=total, lower=1, overwrite_c=1)


def gemm_into(X: Array, Z: Array, total: Array) -> None:
    """Add X^T Z to `total` by GEMM.

    X and Z are C-ordered, `total` is Fortran-ordered.
    """
    get_blas_funcs("gemm", (X,))(1.0, X.T, Z.T, beta=1.0, c=total, trans_b=1, overwrite_c=1)


def by_blocks(X: Array, work: Callable[[Array], object]) -> Contender:
    """Return a floor that calls `work` on each block of rows, without labels."""
    return each(split_rows(block_rows(), X), lambda rows, _: work(rows))


def syrk(data: Problem) -> Contender:
    """Return a floor that computes X^T X by one SYRK per block, in the dtype of the data."""
    d = data.X.shape[1]
    total = np.zeros((d, d), data.X.dtype, order="F")
    return by_blocks(data.X, lambda rows: syrk_into(rows, total))


def copying(X: Array) -> Contender:
    """Return a floor that copies each block of rows into the same memory."""
    out = np.empty_like(X[: block_rows()])
    return by_blocks(X, lambda rows: np.copyto(out[: len(rows)], rows))


def _rate(dtype: str, d: int) -> Target:
    least = {"float32/768": 0.8, "float64/768": 0.75, "float32/4096": 0.9}
    return faster(FLOOR, least.get(f"{dtype}/{d}", 0.85))


@job("accumulate/{dtype}/{d}", "row", _rate, faster(ONEDAL, 1.2), faster(CE, 2.0),
     faster(CE64, 3.5), dtype=["float32"], d=_WIDTHS)  # fmt: skip
@job("accumulate/{dtype}/{d}", "row", _rate, faster(ONEDAL, 1.2), dtype=["float64"], d=_WIDTHS)
def _accumulate(dtype: str, d: int) -> Contenders:
    data = rows_of(d, dtype)
    contenders = {
        OURS: accumulate(data),
        FLOOR: syrk(data),
        CE: peers.stream_concept_erasure(data, block_rows(), dtype),
        ONEDAL: peers.stream_onedal(data, block_rows()),
    }
    if dtype == "float32":
        contenders[CE64] = peers.stream_concept_erasure(data, block_rows(), "float64")
    return contenders


@job("sampled/1 %/{d}", "row", lambda d, rate: faster("all rows", {768: 10, 2048: 20, 4096: 30}[d]),
     d=_WIDTHS, rate=[0.01])  # fmt: skip
@job("sampled/sums alone/{d}", "row", faster(FLOOR, 0.8), d=_WIDTHS, rate=[1e-6])
def _sampled(d: int, rate: float) -> Contenders:
    """Covariance from a subsample of the rows, compared with all rows.

    The sums of all rows are always accumulated; at a rate near 0, the job measures only them.
    """
    data = rows_of(d)
    exact = methodcaller("cross_covariance", "z")  # Cov(x, z) is exact at every rate
    ours, every = (replace(accumulate(data, subsample=p), answer=exact) for p in (rate, 1.0))
    return {OURS: ours, "all rows": every, FLOOR: copying(data.X)}


@job("wide/dense/100,000", "row")
def _wide() -> Contenders:
    """Variances of rows too wide for a d x d matrix; the floor copies the rows."""
    data = cached_problem(*pick((1024, 100_000), (64, 80)))
    ours = accumulate(data, pick(512, 32), covariance_type="diag")
    return {OURS: Contender(ours.run, len(data.X)), FLOOR: copying(data.X)}


def sparse_rows() -> tuple[Any, Array]:
    """Return CSR rows, as sparse as term counts (31 entries on average), and a binary concept."""
    n, d = pick((37_000, 40_000), (60, 80))
    rng = np.random.default_rng(0)
    X = scipy.sparse.random_array((n, d), density=min(1.0, 31 / d), rng=rng, format="csr")
    return X, np.random.default_rng(0).integers(0, 2, n)


@job("wide/sparse/40,000", "row", below(20e-6))
def _sparse() -> Contenders:
    """Moments of sparse rows; the floor computes two sparse-dense products in SciPy."""
    X, z = sparse_rows()
    n, d = X.shape
    columns, transposed = np.ones((d, 1)), X.T.tocsr()
    ours = Contender(lambda: sf.Moments(covariance_type="diag").update(X, {"z": z}), n)
    return {OURS: ours, FLOOR: Contender(lambda: transposed @ (X @ columns), n)}


@job("stream/one row/{d}", "row", below(25e-6), faster(CE, 5.0), d=[768])
@job("stream/one row/{d}", "row", within("in blocks", 1.5), d=[3072])
def _one_row(d: int) -> Contenders:
    data = problem(block_rows(), pick(d, 16))
    n = pick(256 if d < 1024 else 64, 32)  # the peers would take minutes for all rows
    few = Problem(data.X[:n], data.z[:n], data.y[:n])
    return {
        OURS: accumulate(data, 1),
        "in blocks": accumulate(data),
        CE: peers.stream_concept_erasure(few, 1, "float32"),
        ONEDAL: peers.stream_onedal(few, 1),
    }


@job("stream/64 rows/{dtype}/2048", "row", within("in blocks", 1.5), dtype=DTYPES)
def _small_updates(dtype: str) -> Contenders:
    data = problem(block_rows(), pick(2048, 16), dtype)
    return {OURS: accumulate(data, pick(64, 8)), "in blocks": accumulate(data)}


@job("stream/dtypes alternate/512", "row", within("one kind", 3.0))
def _alternating() -> Contenders:
    """Single rows, alternately float32 and float64, compared with float32 rows only."""
    data = problem(pick(256, 32), pick(512, 16))
    rows = split_rows(1, data.X, **data.labels)
    mixed = [(X.astype(dtype), labels) for (X, labels), dtype in zip(rows, cycle(DTYPES))]
    moments = sf.Moments(kinds=dict.fromkeys(data.labels, "classes"))
    ours = each(mixed, moments.update, sf.Moments.covariance)
    return {OURS: ours, "one kind": accumulate(data, 1)}


@job("stream/100,000 declared classes/512", "row", within("one kind", 3.0), modules=("pandas",))
def _declared() -> Contenders:
    """Single rows labelled by a categorical of many classes, compared with integer labels."""
    pandas: Any = import_module("pandas")
    data = problem(pick(32, 16), pick(512, 8))
    declared = pandas.CategoricalDtype(range(pick(100_000, 100)))
    wide = pandas.Series(data.z).astype(declared)
    plain = accumulate(data, 1, {"z": data.z}, kinds={"z": "classes"})
    return {OURS: accumulate(data, 1, {"z": wide}), "one kind": plain}


@job("labels/1,000 classes/{dtype}/{d}", "row", within("2 classes", 1.25),
     dtype=DTYPES, d=(768, 2048))  # fmt: skip
def _classes(dtype: str, d: int) -> Contenders:
    few = rows_of(d, dtype)
    codes = np.random.default_rng(2).integers(0, pick(1000, 20), len(few.X))
    return {OURS: accumulate(Problem(few.X, codes, few.y)), "2 classes": accumulate(few)}


@job("labels/scatter by 2 classes/{dtype}/768", "row", within("one scatter", 1.15), dtype=DTYPES)
def _by_class(dtype: str) -> Contenders:
    """One scatter matrix for each of two classes, compared with one for all rows."""
    data = rows_of(768, dtype)
    return {OURS: accumulate(data, by="z"), "one scatter": accumulate(data)}


@job("labels/512 columns/{dtype}/512", "row", within(FLOOR, 2.0), dtype=DTYPES)
def _columns(dtype: str) -> Contenders:
    """Continuous labels with many columns.

    The floor computes three products: X^T X in the dtype of the rows, X^T Z and Z^T Z in float64.
    The products with the labels Z are in float64, as in the library: the constraints of erasers
    need this precision.
    """
    data = rows_of(512, dtype)
    n, d = data.X.shape
    Z: Array = np.random.default_rng(3).standard_normal((n, d)).astype(dtype)
    wide, columns = data.X.astype(np.float64), Z.astype(np.float64)
    total = np.zeros((d, d), dtype, order="F")
    cross, squares = np.zeros((2, d, d)).transpose(0, 2, 1)

    def products(rows: Array, more: dict[str, Array]) -> None:
        syrk_into(rows, total)
        gemm_into(more["x"], more["z"], cross)
        syrk_into(more["z"], squares)

    floor = each(split_rows(block_rows(), data.X, x=wide, z=columns), products)
    return {OURS: accumulate(data, labels={"z": Z}), FLOOR: floor}


@job("file/mapped/float32/1024", "row", within(FLOOR, 1.3), larger_of=("bare SYRK", "bare read"),
     sums=[False])  # fmt: skip
@job("file/mapped, sums alone/float32/1024", "row", faster("bare read", 0.8), sums=[True])
def _mapped(sums: bool) -> Contenders:
    """Rows of a memory-mapped file in the page cache.

    The floor is the slower of the read and the product X^T X, since the two can overlap. With
    `sums`, only sums of rows are accumulated, and the reference is the read alone.
    """
    n, d = pick((131_072, 1024), (512, 16))
    path = write_rows(n, d)
    z = np.arange(n) % 2
    buffer = memoryview(bytearray(4 * d * block_rows()))

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    bare = Contender(read, n)
    if sums:
        rows = Problem(np.load(path, mmap_mode="r"), z, z)
        return {OURS: Contender(accumulate(rows, subsample=1e-6).run, n), "bare read": bare}
    source = sf.sources.from_npy(path, {"z": z, "y": z})
    ours = Contender(lambda: sf.Moments.from_blocks(source), n)
    return {OURS: ours, "bare SYRK": syrk(rows_of(d)), "bare read": bare}


@job("file/save moments/2048", "call")
def _save() -> Contenders:
    """Save moments to a file; the floor writes a file of the same size."""
    d = pick(2048, 16)
    moments = cached_problem(2 * d, d, "float64").moments()
    path, plain = scratch() / "moments", scratch() / "plain"
    moments.save(path)
    bare = partial(plain.write_bytes, path.read_bytes())
    return {OURS: Contender(partial(moments.save, path)), FLOOR: Contender(bare)}


@job("merge/a + b/2048", "call")
def _merge() -> Contenders:
    """Add two moments; the floor adds two vectors of d (d + 1) / 2 numbers."""
    d = pick(2048, 16)
    first, second = (problem(2 * d, d, seed=seed).moments() for seed in (0, 1))
    one, other = (np.ones(d * (d + 1) // 2) for _ in range(2))
    return {OURS: Contender(lambda: first + second), FLOOR: Contender(lambda: one + other)}
