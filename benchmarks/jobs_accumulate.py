"""Jobs that reduce rows and labels to moments."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

import splince_fast as sf
from benchmarks import peers, reference
from benchmarks.data import Problem, cached, problem, write_rows
from benchmarks.jobs import FLOOR, NUMPY, OURS, Job, Ways, faster, scratch, within
from benchmarks.peers import CE, CE64, ONEDAL, Absent, absent
from benchmarks.timing import Contender, pick

BLOCK = 4096


def block_rows() -> int:
    return pick(BLOCK, 64)


def rows_of(d: int, dtype: str, classes: int = 2) -> Problem:
    """Four blocks, two where rows are wide: more than the caches hold."""
    return cached(pick(4 if d < 4096 else 2, 2) * block_rows(), pick(d, 16), dtype, classes)


def accumulate(data: Problem, update_rows: int, labels: Any = None, **options: Any) -> Contender:
    """`Moments.update`, so many rows at a time; by default with a concept and a task of classes."""
    options.setdefault("kinds", dict.fromkeys(data.labels, "classes") if labels is None else None)
    moments = sf.Moments(**options)
    given = data.labels if labels is None else labels
    cuts = [slice(i, i + update_rows) for i in range(0, len(data.X), update_rows)]
    blocks = [(data.X[cut], {name: value[cut] for name, value in given.items()}) for cut in cuts]

    def run() -> sf.Moments:
        for X, values in blocks:
            moments.update(X, values)
        return moments

    return Contender(run, units=len(data.X), answer=sf.Moments.covariance)


def syrk(data: Problem, update_rows: int) -> Contender:
    """The floor: a symmetric product per block in the dtype of the data, nothing else."""
    d = data.X.shape[1]
    total = np.zeros((d, d), data.X.dtype, order="F")
    blocks = data.blocks(update_rows)

    def run() -> NDArray[Any]:
        for block in blocks:
            reference.syrk_into(block.X, total)
        return total

    return Contender(run, units=len(data.X))


def _accumulate() -> Iterator[Job]:
    least = {"float32/768": 0.8, "float64/768": 0.75, "float32/4096": 0.9}
    for dtype in ("float32", "float64"):
        for d in (768, 2048, 4096):
            case = f"{dtype}/{d}"
            targets = [faster(FLOOR, least.get(case, 0.85)), faster(ONEDAL, 1.2)]
            if dtype == "float32":
                targets += [faster(CE, 2.0), faster(CE64, 3.5)]
            build = partial(_accumulate_ways, d, dtype)
            yield Job("accumulate", case, "row", build, tuple(targets))


def _accumulate_ways(d: int, dtype: str) -> Ways:
    data, block = rows_of(d, dtype), block_rows()
    ways: dict[str, Contender | Absent] = {
        OURS: accumulate(data, block),
        FLOOR: syrk(data, block),
        CE: peers.stream_concept_erasure(data, block, dtype),
        ONEDAL: peers.stream_onedal(data, block),
    }
    if dtype == "float32":
        ways[CE64] = peers.stream_concept_erasure(data, block, "float64")
    return ways


def _sampled() -> Iterator[Job]:
    """The covariance from a sample of the rows; and next to none of them, beside a bare copy."""
    for d, times in ((768, 10.0), (2048, 20.0), (4096, 30.0)):
        build = partial(_sampled_ways, d, 0.01)
        yield Job("sampled", f"1 %/{d}", "row", build, (faster("all rows", times),))
        build = partial(_sampled_ways, d, 1e-6)
        yield Job("sampled", f"sums alone/{d}", "row", build, (faster(FLOOR, 0.8),))


def _sampled_ways(d: int, rate: float) -> Ways:
    data, block = rows_of(d, "float32"), block_rows()
    out = np.empty_like(data.X[:block])

    def copy() -> NDArray[Any]:
        for start in range(0, len(data.X), block):
            np.copyto(out, data.X[start : start + block])
        return out

    def sums(moments: sf.Moments) -> NDArray[Any]:
        return moments.cross_covariance("z")

    n = len(data.X)
    return {
        OURS: Contender(accumulate(data, block, scatter=rate).run, units=n, answer=sums),
        "all rows": Contender(accumulate(data, block).run, units=n, answer=sums),
        FLOOR: Contender(copy, units=n),
    }


def _wide() -> Iterator[Job]:
    """Rows wider than a covariance in memory: variances and a sketch; sparse rows as they are."""
    for rank in (0, 64):
        yield Job("wide", f"dense/rank {rank}/16,384", "row", partial(_wide_ways, rank))
    for rank in (0, 64):
        build = partial(_sparse_ways, rank)
        yield Job("wide", f"sparse/rank {rank}/40,000", "row", build)


def _wide_ways(rank: int) -> Ways:
    """Dense rows; the floor reads them, or multiplies by the columns of the sketch and back."""
    n, d = pick((4096, 16_384), (64, 80))
    data = problem(n, d, "float32")
    signs = np.ones((d, rank), np.float32)
    block = pick(512, 32)
    out = np.empty_like(data.X[:block])

    def floor() -> NDArray[Any]:
        for start in range(0, n, block):
            rows = data.X[start : start + block]
            np.copyto(out, rows)
            if rank:
                rows.T @ (rows @ signs)
        return out

    ours = accumulate(data, block, rank=rank).run
    return {OURS: Contender(ours, units=n), FLOOR: Contender(floor, units=n)}


def _sparse_ways(rank: int) -> Ways:
    """Rows of 31 entries each, as a document has terms; the floor is two products of SciPy."""
    import scipy.sparse

    n, d = pick((37_000, 40_000), (60, 80))
    rng = np.random.default_rng(0)
    X: Any = scipy.sparse.random_array((n, d), density=min(1.0, 31 / d), rng=rng, format="csr")
    z = rng.integers(0, 2, n)
    columns = np.ones((d, max(1, rank)))
    turned = X.T.tocsr()

    def run() -> sf.Moments:
        return sf.Moments(rank=rank).update(X, {"z": z})

    return {
        OURS: Contender(run, units=n),
        FLOOR: Contender(lambda: turned @ (X @ columns), units=n),
    }


def _covariance() -> Iterator[Job]:
    """A new covariance matrix of rows in memory, without labels."""
    for dtype in ("float32", "float64"):
        for d in (768, 2048):
            yield Job("covariance", f"{dtype}/{d}", "row", partial(_covariance_ways, d, dtype))


def _covariance_ways(d: int, dtype: str) -> Ways:
    data = rows_of(d, dtype)
    return {
        OURS: Contender(
            lambda: sf.Moments().update(data.X).covariance(), units=len(data.X), answer=np.asarray
        ),
        FLOOR: syrk(data, len(data.X)),
        NUMPY: peers.covariance_numpy(data),
        "torch": peers.covariance_torch(data),
    }


def _streams() -> Iterator[Job]:
    """The same rows in other portions."""
    blocks = within("in blocks", 1.5)
    for d, few in ((768, 256), (3072, 64)):
        build = partial(_stream_ways, d, "float32", 1, few)
        yield Job("stream", f"one row/{d}", "row", build, (blocks, faster(CE, 50.0)))
    for dtype in ("float32", "float64"):
        build = partial(_stream_ways, 2048, dtype, pick(64, 8), 0)
        yield Job("stream", f"64 rows/{dtype}/2048", "row", build, (blocks,))
    one = (within("one kind", 3.0),)
    yield Job("stream", "dtypes alternate/512", "row", _alternating_ways, one)
    yield Job("stream", "100,000 declared classes/512", "row", _declared_ways, one)


def _stream_ways(d: int, dtype: str, update_rows: int, few: int) -> Ways:
    data = problem(block_rows(), pick(d, 16), dtype)
    ways: dict[str, Contender | Absent] = {
        OURS: accumulate(data, update_rows),
        "in blocks": accumulate(data, block_rows()),
    }
    if few:  # rows; all of them would take minutes
        ways[CE] = peers.stream_concept_erasure(data, update_rows, dtype, only=pick(few, 32))
        ways[ONEDAL] = peers.stream_onedal(data, update_rows, only=pick(few, 32))
    return ways


def _alternating_ways() -> Ways:
    """Single rows, of float32 and float64 alternately; and all of them of float32."""
    data = problem(pick(256, 32), pick(512, 16))
    moments = sf.Moments(kinds=dict.fromkeys(data.labels, "classes"))
    rows = [b.X.astype((np.float32, np.float64)[i % 2]) for i, b in enumerate(data.blocks(1))]
    labels = [b.labels for b in data.blocks(1)]

    def run() -> sf.Moments:
        for X, values in zip(rows, labels, strict=True):
            moments.update(X, values)
        return moments

    ours = Contender(run, units=len(rows), answer=sf.Moments.covariance)
    return {OURS: ours, "one kind": accumulate(data, 1)}


def _declared_ways() -> Ways:
    """Single rows with a categorical that declares many classes; and with integer codes."""
    data = problem(pick(32, 16), pick(512, 8))
    plain = accumulate(data, 1, {"z": data.z}, kinds={"z": "classes"})
    if missing := absent("pandas"):
        return {OURS: missing, "one kind": plain}
    pandas: Any = import_module("pandas")
    declared = pandas.CategoricalDtype(range(pick(100_000, 100)))
    wide = pandas.Series(data.z).astype(declared)
    return {OURS: accumulate(data, 1, {"z": wide}), "one kind": plain}


def _labels() -> Iterator[Job]:
    """What labels cost."""
    for dtype in ("float32", "float64"):
        for d in (768, 2048):
            build = partial(_class_ways, d, dtype)
            yield Job("labels", f"1,000 classes/{dtype}/{d}", "row", build,
                      (within("2 classes", 1.25),))  # fmt: skip
    yield Job("labels", "28 classes/float32/768", "row", _many_classes)
    for dtype in ("float32", "float64"):
        build = partial(_column_ways, dtype)
        yield Job("labels", f"512 columns/{dtype}/512", "row", build, (within(FLOOR, 2.0),))


def _class_ways(d: int, dtype: str) -> Ways:
    few = rows_of(d, dtype)
    codes = np.random.default_rng(2).integers(0, pick(1000, 20), len(few.X))
    many = Problem(few.X, codes, few.y)
    block = block_rows()
    return {OURS: accumulate(many, block), "2 classes": accumulate(few, block)}


def _many_classes() -> Ways:
    data, block = rows_of(768, "float32", pick(28, 4)), block_rows()
    return {
        OURS: accumulate(data, block),
        CE: peers.stream_concept_erasure(data, block, "float32"),
        CE64: peers.stream_concept_erasure(data, block, "float64"),
    }


def _column_ways(dtype: str) -> Ways:
    """Continuous labels in many columns; the floor is a symmetric and a general product."""
    data = rows_of(512, dtype)
    n, d = data.X.shape
    Z: NDArray[Any] = np.random.default_rng(3).standard_normal((n, d)).astype(dtype)
    block = block_rows()
    symmetric = syrk(data, block)
    product = np.zeros((d, d), dtype, order="F")

    def floor() -> NDArray[Any]:
        for start in range(0, n, block):
            reference.gemm_into(data.X[start : start + block], Z[start : start + block], product)
        symmetric.run()
        return product

    return {OURS: accumulate(data, block, {"z": Z}), FLOOR: Contender(floor, units=n)}


def layout(X: NDArray[Any], form: str) -> NDArray[Any]:
    """The same rows in another layout or dtype."""
    if form == "Fortran":
        return np.asfortranarray(X)
    if form == "strided":
        return np.repeat(X, 2, axis=1)[:, ::2]
    return X.astype(form)


def _layouts() -> Iterator[Job]:
    for form in ("Fortran", "strided", "float16"):
        yield Job("layout", f"{form}/1024", "row", partial(_layout_ways, form))


def _layout_ways(form: str) -> Ways:
    data, block = rows_of(1024, "float32"), block_rows()
    other = Problem(layout(data.X, form), data.z, data.y)
    same = Problem(np.ascontiguousarray(other.X, np.float32), data.z, data.y)
    return {OURS: accumulate(other, block), "C order, float32": accumulate(same, block)}


# --- files ----------------------------------------------------------------------------------------


def _files() -> Iterator[Job]:
    yield Job("file", "mapped/float32/1024", "row", _mapped_ways, (within(FLOOR, 1.3),),
              larger_of=("bare SYRK", "bare read"))  # fmt: skip
    yield Job("file", "save moments/2048", "call", _save_ways)
    yield Job("merge", "a + b/2048", "call", _merge_ways)


def _mapped_ways() -> Ways:
    """Rows on disk, in the page cache; reading and multiplying can go on at the same time."""
    n, d = pick((131_072, 1024), (512, 16))
    path = write_rows(scratch() / "mapped.npy", n, d)
    source = sf.sources.from_npy(path, {name: np.arange(n) % 2 for name in ("z", "y")})
    buffer = memoryview(bytearray(4 * d * block_rows()))

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    return {
        OURS: Contender(lambda: sf.Moments.from_blocks(source), units=n),
        "bare SYRK": syrk(rows_of(1024, "float32"), block_rows()),
        "bare read": Contender(read, units=n),
    }


def _save_ways() -> Ways:
    """A file of moments; the floor writes as many bytes."""
    d = pick(2048, 16)
    moments = cached(2 * d, d, "float64").moments()
    path, plain = scratch() / "moments", scratch() / "plain"
    moments.save(path)
    content = path.read_bytes()
    return {
        OURS: Contender(lambda: moments.save(path)),
        FLOOR: Contender(lambda: plain.write_bytes(content)),
    }


def _merge_ways() -> Ways:
    """A new state from two; the floor adds the triangles of two covariances."""
    d = pick(2048, 16)
    first, second = (problem(2 * d, d, seed=seed).moments() for seed in (0, 1))
    packed = [np.ones(d * (d + 1) // 2) for _ in range(2)]
    return {
        OURS: Contender(lambda: first + second),
        FLOOR: Contender(lambda: packed[0] + packed[1]),
    }


GROUPS = (_accumulate, _sampled, _wide, _covariance, _streams, _labels, _layouts, _files)
