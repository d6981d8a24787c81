"""Where the time goes: the share of every stage of accumulating, solving, applying and fitting.

The library's own functions are timed from outside while a job runs, on the thread that runs it;
time is that of the stage alone, without the stages inside it. Every number is a median over
repeats, the whole is the sum of its stages, and what no stage accounts for is the "rest". Beside it
stand the time without timers, and the floor: what the job is held against, on the same data.

SciPy's BLAS is used unless SPLINCE_FAST_BLAS=auto.

    python -m benchmarks.profiles [--smoke] [--json PATH]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from typing import Any

import numpy as np

import splince_fast as sf
from benchmarks import _machine, _model, _peers, _tables
from benchmarks._data import Problem, problem
from benchmarks._profile import Profile, Stage, profile
from benchmarks._sizes import pick, smoke, use_smoke
from benchmarks._timing import Contender

STAGES = {
    "labels": "`labels.encode`: labels to class codes",
    "sort": "`blocks.sort_by_cell`: the order that makes rows of equal classes neighbours",
    "sample": "`blocks.sample_columns`: a shift close to the mean",
    "centre": "`blocks.centre_block`: centring a block, with the sums of its classes",
    "product": "SYRK of a centred block",
    "add": "`blocks.add_lower`: adding the block to the state",
    "kernel": "the compiled kernel: `solve.oblique_factors`, `rows.apply_rows`",
    "threads": "handing work to the other threads, and waiting for them",
    "spans": "covariances of x with the labels, as columns to erase and to keep",
    "validation": "scikit-learn's `validate_data`",
    "accumulate": "`Moments` behind its door: feeding and merging the rows",
    "solve": "`splince` around its kernel",
}


def _stage(label: str, module: str, name: str) -> Stage:
    """A stage of the library: a function of a module, or a method as ``Class.method``."""
    owner: Any = import_module(f"splince_fast.{module}")
    *inside, name = name.split(".")
    for part in inside:
        owner = getattr(owner, part)
    return Stage(label, owner, name)


def profiles() -> Iterator[Profile]:
    """Every job, one after the other."""
    yield from _accumulating()
    yield from _solving()
    yield from _applying()
    yield from _fitting()


def _accumulating() -> Iterator[Profile]:
    """One more block for moments that have seen some, with a binary concept and a binary task."""
    stages = [
        _stage("labels", "moments", "encode"),
        _stage("sort", "_kernels.blocks", "sort_by_cell"),
        _stage("sample", "_kernels.blocks", "sample_columns"),
        _stage("centre", "_kernels.blocks", "centre_block"),
        _stage("product", "_kernels.blas", "syrk_f32_out"),
        _stage("product", "_kernels.blas", "syrk_f64_into"),
        _stage("add", "_kernels.blocks", "add_lower"),
        _stage("threads", "_threads", "split"),
    ]
    block = pick(_model.BLOCK, 64)
    for dtype in ("float32", "float64"):
        for d in pick([768, 2048, 4096], [16]):
            data = problem(block, d, dtype)
            moments = sf.Moments(block_rows=block)

            def update(moments: sf.Moments = moments, data: Problem = data) -> None:
                moments.update(data.X, data.labels)

            yield profile(
                "accumulate", f"{dtype}, d = {d}, a block of {block}", Contender(update), stages,
                "bare SYRK", _peers.accumulate_syrk(data, block),
            )  # fmt: skip


def _solving() -> Iterator[Profile]:
    stages = [
        _stage("spans", "methods", "span_of"),
        _stage("kernel", "_kernels.solve", "oblique_factors"),
    ]
    for d in pick([32, 2048, 4096], [16]):
        moments = problem(max(2 * d, 2000), d, "float64").moments()
        yield profile(
            "solve", f"d = {d}", _model.splince_of(moments), stages,
            "bare POTRF", _model.bare_potrf(np.asfortranarray(moments.covariance())),
        )  # fmt: skip


def _applying() -> Iterator[Profile]:
    stages = [
        _stage("kernel", "_kernels.rows", "apply_rows"),
        _stage("threads", "_threads", "split"),
    ]
    n, d = pick((50_000, 768), (200, 16))
    for rank in (1, 16):
        ours, copy = _model.apply_and_copy(n, d, rank)
        what = f"rank {rank}, float32, n = {n:,}, d = {d}"
        yield profile("apply", what, ours, stages, "np.copyto", copy)


def _fitting() -> Iterator[Profile]:
    """What the estimator costs where the data are small."""
    stages = [
        _stage("validation", "estimators", "validate_data"),
        _stage("labels", "moments", "encode"),
        _stage("accumulate", "_accumulator", "Accumulator.feed"),
        _stage("accumulate", "_accumulator", "Accumulator.flush"),
        _stage("kernel", "_kernels.solve", "oblique_factors"),
        _stage("solve", "estimators", "splince"),
    ]
    for n, d in pick([(200, 16), (2000, 128)], [(100, 8)]):
        data = problem(n, d)

        def functions(data: Problem = data) -> None:
            sf.splince(sf.Moments().update(data.X, data.labels), erase="z", keep="y")

        def estimator(data: Problem = data) -> None:
            sf.SPLINCE().fit(data.X, data.y, concept=data.z)

        yield profile(
            "fit an estimator", f"SPLINCE, float32, n = {n}, d = {d}", Contender(estimator),
            stages, "functions alone", Contender(functions),
        )  # fmt: skip


def tables(found: list[Profile]) -> Iterator[tuple[str, str]]:
    """A heading and a table for each group: shares by stage, which sum to the whole."""
    for group in dict.fromkeys(one.group for one in found):
        members = [one for one in found if one.group == group]
        labels = [label for label, _ in members[0].stages]
        body = [
            [
                one.what,
                _tables.seconds(one.seconds),
                *(f"{one.shares[label]:.1%}" for label in labels),
                _tables.seconds(one.untimed),
                _tables.seconds(one.floor_seconds),
            ]
            for one in members
        ]
        header = ["what", "whole", *labels, "without timers", members[0].floor]
        yield group, _tables.markdown(header, body)


def legend(found: list[Profile]) -> Iterator[str]:
    """What the stages are, in the order in which they occur."""
    for label in dict.fromkeys(label for one in found for label, _ in one.stages):
        if label in STAGES:
            yield f"{label}: {STAGES[label]}"


def measure() -> dict[str, Any]:
    """Run everything, print the tables; returns machine and profiles."""
    _machine.equal_threads()
    found = []
    for one in profiles():
        print(f"  {one.group}, {one.what}: {_tables.seconds(one.seconds)}", file=sys.stderr)
        found.append(one)
    machine = _machine.describe()
    print("\n".join(_machine.lines(machine)))
    for group, table in tables(found):
        print(f"\n{group[0].upper()}{group[1:]}\n\n{table}")
    print("\n" + "\n".join(legend(found)))
    if smoke():
        print("\nSmoke sizes: everything ran, but the numbers mean nothing.")
    entries = [{**asdict(one), "shares": one.shares} for one in found]
    return {"machine": machine, "smoke": smoke(), "profiles": entries}


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="benchmarks.profiles", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--json", metavar="PATH", help="write the results there")
    given = parser.parse_args(arguments)
    if given.smoke:
        use_smoke()
    os.environ.setdefault("SPLINCE_FAST_BLAS", "scipy")  # before the first product, which decides
    results = measure()
    _tables.write_json(given.json, {"command": _machine.command(parser.prog, arguments), **results})


if __name__ == "__main__":
    main()
