"""compare beside a plain scikit-learn script of the same work, interleaved, one thread a process.

``python -m benchmarks.evaluation FOLDER [--levels .5 .9] [--seeds 1] [--rounds 2] [--jobs 1]``,
FOLDER with X.npy, y.npy and z.npy. The script does what one writes by hand: split, scale, erase
with this package's closed forms, fit every strength of every eraser with scikit-learn, choose,
freeze, and probe; with ``--jobs`` above 1 it runs its (seed, level) pairs in as many processes.

Two ratios are printed: compare to the script, in time; and, in one process, compare to the fits of
heads and linear probes inside it, in processor time, which is what erasing, moments, splits and
metrics add to them. The largest difference between the two tables of worst groups is printed, too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import splince_fast as sf
from splince_fast import evaluation as ev
from splince_fast.evaluation import _logistic

STRENGTHS = (1.0, 0.1, 0.01, 0.001, 0.0001)


def script(
    X: NDArray[Any], y: NDArray[Any], z: NDArray[Any], seed: int, p: float,
    sizes: tuple[int, int, int], tied: Any,
) -> dict[tuple[int, float, str, str], float]:  # fmt: skip
    """Worst-group accuracy of a seed at a level, by eraser and head, written by hand.

    Parameters
    ----------
    X, y, z : arrays
        Rows, task and concept.
    seed, p : int, float
        Of the split.
    sizes : tuple of int
        Training, validation and test rows.
    tied : object
        As for :func:`splince_fast.evaluation.associated_split`.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits

    results = {}
    with threadpool_limits(1):
        split = ev.associated_split(y, z, p=p, sizes=sizes, seed=seed, tied=tied)
        rows = [X[part].astype(np.float64) for part in (split.train, split.validation)]
        rows.append(X[split.test].astype(np.float64))
        mean, unit = rows[0].mean(axis=0), float(np.sqrt(rows[0].var(axis=0).mean()))
        rows = [(part - mean) / unit for part in rows]
        y_train, y_valid, y_test = y[split.train], y[split.validation], y[split.test]
        z_valid, z_test = z[split.validation], z[split.test]
        moments = sf.Moments().update(rows[0], {"y": y_train, "z": z[split.train]})
        erasers: dict[str, Any] = {
            "none": lambda x: x,
            "SAL": sf.sal(moments, erase="z"),
            "LEACE": sf.leace(moments, erase="z"),
            "SPLINCE": sf.splince(moments, erase="z", keep="y"),
        }
        frozen: Any = None
        for name, eraser in erasers.items():
            train, valid, test = (eraser(part) for part in rows)
            best: Any = None
            for strength in STRENGTHS:
                model = LogisticRegression(
                    C=1 / (strength * len(train)), solver="newton-cholesky", tol=1e-6
                ).fit(train, y_train)
                guess = model.predict(valid)
                worst = ev.worst_group_accuracy(y_valid, guess, groups=(y_valid, z_valid))
                rank = (worst, float(np.mean(guess == y_valid)), strength)
                if best is None or rank > best[0]:
                    best = (rank, model)
            frozen = best[1] if name == "none" else frozen
            for head, model in (("retrained", best[1]), ("frozen", frozen)):
                results[seed, p, name, head] = ev.worst_group_accuracy(
                    y_test, model.predict(test), groups=(y_test, z_test)
                )
            folds = StratifiedKFold(5, shuffle=True, random_state=0).split(test, z_test)
            for fitted, held in folds:
                scaler = StandardScaler().fit(test[fitted])
                probe = LogisticRegression(
                    C=1 / (0.01 * len(fitted)), solver="newton-cholesky", tol=1e-6
                ).fit(scaler.transform(test[fitted]), z_test[fitted])
                probe.score(scaler.transform(test[held]), z_test[held])
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; the default is those of the process.

    Returns
    -------
    int
        0.
    """
    from joblib import Parallel, delayed

    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--levels", type=float, nargs="+", default=[0.5, 0.9])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--sizes", type=int, nargs=3, default=[4000, 600, 1000])
    args = parser.parse_args(argv)
    X, y, z = (np.load(args.folder / f"{name}.npy") for name in ("X", "y", "z"))
    sizes = (args.sizes[0], args.sizes[1], args.sizes[2])
    options: dict[str, Any] = {
        "task": y, "concept": z, "sizes": sizes, "tied": 0, "progress": False
    }  # fmt: skip
    # Imports and compilers of this process and of the workers, which are used again.
    ev.compare(X, association=0.9, n_seeds=args.jobs, n_jobs=args.jobs, **options)
    ratios, overheads = [], []
    for _ in range(args.rounds):
        started = time.perf_counter()
        with _solver_time() as (ours_cpu, fits_cpu):
            result = ev.compare(
                X, association=tuple(args.levels), n_seeds=args.seeds, n_jobs=args.jobs, **options
            )
        ours = time.perf_counter() - started
        started = time.perf_counter()
        known: dict[tuple[int, float, str, str], float] = {}
        for part in Parallel(n_jobs=args.jobs)(
            delayed(script)(X, y, z, seed, p, sizes, 0)
            for seed in range(args.seeds) for p in args.levels
        ):  # fmt: skip
            known |= part
        theirs = time.perf_counter() - started
        gap = max(
            abs(result.values("worst_group", eraser=e, head=h, p=p)[seed] - value)
            for (seed, p, e, h), value in known.items()
        )
        ratios.append(ours / theirs)
        print(
            f"compare {ours:.2f} s, script {theirs:.2f} s, ratio {ratios[-1]:.3f}; largest "
            f"difference in worst group {gap:.4f}"
        )
        if args.jobs == 1:
            overheads.append(ours_cpu[0] / fits_cpu[0])
            print(
                f"  processor time: compare {ours_cpu[0]:.2f} s, its heads and probes alone "
                f"{fits_cpu[0]:.2f} s, ratio {overheads[-1]:.3f}"
            )
    print(f"median ratio to the script {float(np.median(ratios)):.3f}")
    if overheads:
        print(f"median ratio to the fits alone {float(np.median(overheads)):.3f}")
    return 0


@contextmanager
def _solver_time() -> Iterator[tuple[list[float], list[float]]]:
    """Processor seconds of the block, and those of the fits of heads and probes in it."""
    whole, fits = [0.0], [0.0]
    original = _logistic.fit

    def timed(*arguments: Any, **options: Any) -> _logistic.Fits:
        started = time.process_time()
        found = original(*arguments, **options)
        fits[0] += time.process_time() - started
        return found

    _logistic.fit = timed
    started = time.process_time()
    try:
        yield whole, fits
    finally:
        whole[0] = time.process_time() - started
        _logistic.fit = original


if __name__ == "__main__":
    raise SystemExit(main())
