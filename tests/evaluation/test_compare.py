"""compare (`run.py`, `plan.py`, `job.py`): exact resume, equal figures by any jobs, failures."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from comparisons import LEVEL, data, run, script
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.linear_model import LogisticRegression, Ridge, SGDClassifier
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_info

import splince_fast as sf
from splince_fast import evaluation as ev
from splince_fast.evaluation import Comparison
from splince_fast.evaluation.data import BLOCK, fingerprint
from splince_fast.exceptions import (
    FileFormatError,
    InputError,
    LabelError,
    NonFiniteError,
    NotEnoughDataError,
    SplinceWarning,
)
from splince_fast.sources.base import Block, StreamSource

X, y, z = data()


def same(a: Comparison, b: Comparison) -> bool:
    return repr(a.records) == repr(b.records)


def eraser_of(X: Any, labels: Any) -> sf.Projection:
    return sf.leace(sf.Moments().update(X, labels), erase="concept")


def test_figures_and_the_choice_of_alpha_are_those_of_a_plain_script() -> None:
    threads = [pool["num_threads"] for pool in threadpool_info()]
    result = run(X, y, z, n_seeds=1, **LEVEL)
    assert [pool["num_threads"] for pool in threadpool_info()] == threads
    twin = script(X, y, z)
    moments = sf.Moments().update(X[twin.train], {"y": y[twin.train], "z": z[twin.train]})
    erasers: dict[str, Any] = {
        "none": np.copy,
        "SAL": sf.sal(moments, erase="z"),
        "SPLINCE": sf.splince(moments, erase="z", keep="y"),
    }
    frozen: Any = None
    for name, eraser in erasers.items():
        erased, held_out, fresh = (
            eraser(X[rows]) for rows in (twin.train, twin.validation, twin.test)
        )
        ranked = []
        for alpha in (0.1, 0.001):
            model = twin.head(erased, alpha)
            scores = twin.scores(model, held_out, twin.validation)
            ranked.append(((scores["worst_group"], scores["accuracy"], alpha), model))
        best = max(ranked, key=lambda pair: pair[0])[1]
        frozen = best if name == "none" else frozen
        twin.assert_figures(result, name, erased, fresh, {"retrained": best, "frozen": frozen})


def test_unregularised_heads_agree_as_theorem_2_says() -> None:
    result = run(X, y, z, heads=("unregularised",), association=(0.8,), aligned_class=1)
    values = [result.values("accuracy", eraser=e) for e in ("SAL", "LEACE", "SPLINCE")]
    assert values[0] == values[1] == values[2]
    assert values[0] != result.values("accuracy", eraser="none")


def test_every_random_state_of_a_pipeline_is_that_of_the_seed() -> None:
    X, y, z = data(300)
    model = make_pipeline(StandardScaler(), SGDClassifier(max_iter=2, tol=None))
    options: dict[str, Any] = {"erasers": ("none",), "leakage": (), "n_seeds": 4}
    first, second = (run(X, y, z, heads={"sgd": model}, **options).records for _ in range(2))
    assert first == second


@pytest.mark.slow
def test_the_same_numbers_for_any_number_of_jobs_and_order() -> None:
    options: dict[str, Any] = {
        "association": (0.5, 0.9),
        "aligned_class": 1,
        "erasers": ("none", "SAL", "SPLINCE", "oracle", "quadratic"),
    }
    one = run(X, y, z, n_jobs=1, **options)
    assert same(one, run(X, y, z, n_jobs=2, **options))
    assert same(one, run(X, y, z, n_jobs=1, **(options | {"association": (0.9, 0.5)})))
    assert not same(one, run(X, y, z, random_state=1, **options))  # control


def test_a_folder_resumes_exactly_and_recomputes_only_what_a_setting_touches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from splince_fast.evaluation import job

    X, y, z = data(400)
    whole = run(X, y, z)
    assert same(whole, run(X, y, z, run=tmp_path))
    file = tmp_path / "cells.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    made: list[list[str]] = []
    original = job.Job.run

    def watched(self: Any, erasers: Any) -> Any:
        made.append([e.name for e in erasers])
        return original(self, erasers)

    monkeypatch.setattr(job.Job, "run", watched)
    rng = np.random.default_rng(0)
    for cut in rng.integers(1, len(b"".join(lines)), 20):  # case 18: 20 of 20
        file.write_bytes(b"".join(lines)[: int(cut)])
        assert same(whole, run(X, y, z, run=tmp_path))
        assert file.read_bytes().count(b"\n") == len(lines)
    made.clear()
    assert same(whole, run(X, y, z, run=tmp_path))
    assert made == []
    erasers = ("none", "SAL", "LEACE", "SPLINCE", "mean_projection", "oracle", "quadratic")
    assert same(*(run(X, y, z, run=tmp_path, erasers=erasers) for _ in range(2)))
    assert made == [["MeanProjection", "oracle", "quadratic"]] * 2
    made.clear()
    other = run(X, y, z, run=tmp_path, alphas=(0.1,))
    assert len(made) == 2
    assert same(other, run(X, y, z, alphas=(0.1,)))


def test_other_data_in_the_same_folder_and_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.npy").touch()
    with pytest.raises(InputError, match=r"x\.npy' is a file; pass a folder"):
        run(X, y, z, run=tmp_path / "x.npy")
    run(X, y, z, n_seeds=1, run=tmp_path)
    for other in ((X + 1, y, z), (X, 1 - y, z), (X, y, {"other name": z})):
        with pytest.raises(InputError, match="other data"):
            run(*other, n_seeds=1, run=tmp_path)
    file = tmp_path / "cells.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], "{", *lines[2:]]) + "\n")
    with pytest.raises(FileFormatError, match="is damaged"):
        run(X, y, z, n_seeds=1, run=tmp_path)


def test_the_fingerprint_reads_every_row() -> None:
    X = np.zeros((3 * BLOCK - 5, 2), np.float32)
    first = fingerprint(X, {}, None, None)
    X[-2, -1] = 1.0
    assert fingerprint(X, {}, None, None) != first


def test_an_infeasible_eraser_is_a_row_and_the_rest_goes_on() -> None:  # case 6
    dropped = {"none": "none", "dropped": sf.SPLINCE(on_infeasible="drop")}
    erasers = {**dropped, "SPLINCE": "SPLINCE", "LEACE": "LEACE"}
    result = run(X, y, y.copy(), n_seeds=1, erasers=erasers)
    failed = [(eraser, head) for eraser, head, _ in result.failures]
    assert failed == [("SPLINCE", head) for head in ("", "retrained", "frozen")]
    assert "span" in result.failures[0][2]
    assert str(result).count("! SPLINCE") == 1  # the heads fail for the same reason
    for eraser in ("LEACE", "dropped"):
        assert result.mean("kept_covariance", eraser=eraser) < 1e-12
    assert any(note.startswith("dropped: ") for note in result.notes)


def test_separable_rows_refuse_the_unregularised_head_in_a_row() -> None:  # cases 5, 11
    heads = ("unregularised", "retrained")
    result = run(*data(60, 100), n_seeds=1, erasers=("LEACE",), heads=heads)
    ((_, head, reason),) = result.failures
    assert (head, "separable" in reason) == ("unregularised", True)


class Failing(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier whose predictions and scores raise."""

    def fit(self, X: Any, y: Any) -> Failing:
        return self

    def predict(self, X: Any) -> Any:
        raise ZeroDivisionError

    decision_function = predict


class Predicting(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A head whose predictions are `form` of those of a linear head."""

    def __init__(self, form: Any = None, model: Any = None) -> None:
        self.form, self.model = form, model

    def fit(self, X: Any, y: Any) -> Predicting:
        self.model_ = clone(self.model or LogisticRegression()).fit(X, y)
        return self

    def predict(self, X: Any) -> Any:
        return self.form(self.model_.predict(X))


class Narrow(StandardScaler):  # type: ignore[misc]
    def transform(self, X: Any, copy: Any = None) -> Any:
        return super().transform(X, copy)[:, :3]


def raising(*_: Any) -> Any:
    raise KeyError("k")


BAD_ERASERS: dict[str, tuple[Any, str]] = {
    "raising": (raising, "KeyError"),
    "rows": (lambda X, labels: X, "returned ndarray; it must return a map of rows"),
    "narrow": (lambda X, labels: lambda rows: rows[:, :3], "shape (585, 3) for (585, 6)"),
    "NaN": (lambda X, labels: lambda rows: rows * np.nan, "the erased rows contains NaN"),
    "transformer": (Narrow(), "shape (585, 3) for (585, 6)"),
    "classifier": (LogisticRegression(), "transform"),
}
BAD_HEADS: dict[str, tuple[Any, str]] = {
    "raising": (Failing(), "ZeroDivisionError"),
    "regressor": (Ridge(), "pass a classifier"),
    "one row": (Predicting(lambda c: c[:1]), "shape (1,) for 225 rows"),
    "columns": (Predicting(lambda c: np.eye(2)[c]), "shape (225, 2) for 225 rows"),
    **{
        f"{value}": (
            Predicting(lambda c, value=value: np.where(c, c, value)),
            f"the head predicts {value}, which is not a class",
        )
        for value in (0.25, np.nan, -1)
    },
}


def test_erasers_and_heads_that_fail_are_rows_with_a_reason() -> None:
    """Codes of any type are classes."""
    good = {kind.__name__: Predicting(lambda c, kind=kind: c.astype(kind))
            for kind in (int, float, bool)}  # fmt: skip
    erasers = {"none": "none"} | {name: eraser for name, (eraser, _) in BAD_ERASERS.items()}
    heads = good | {name: head for name, (head, _) in BAD_HEADS.items()}
    result = run(X, y, z, n_seeds=1, erasers=erasers, heads=heads)
    reasons = {(eraser, head): reason for eraser, head, reason in result.failures}
    of_erasers = {(eraser, head) for eraser in BAD_ERASERS for head in ("", *heads)}
    assert reasons.keys() == of_erasers | {("none", head) for head in BAD_HEADS}
    assert all(text in reasons[name, ""] for name, (_, text) in BAD_ERASERS.items())
    assert all(text in reasons["none", name] for name, (_, text) in BAD_HEADS.items())
    values = [result.values("worst_group", eraser="none", head=head) for head in good]
    assert values[0] == values[1] == values[2]
    wide = {"ridge": Ridge(), "wide": Predicting(lambda c: np.stack([c, c], axis=1), Ridge())}
    result = run(X, X[:, 1], z, n_seeds=1, erasers=("none",), heads=wide)
    ((_, head, reason),) = result.failures
    assert (head, "shape (225, 2); the task has shape (225, 1)" in reason) == ("wide", True)
    assert result.mean("r2", eraser="none", head="ridge") > 0.9


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        (raising, "metric 'own': KeyError"),
        (ev.Metric(lambda y_true, y_pred: np.inf, lower_is_better=True), "'own': the value is inf"),
    ],
)
def test_a_probe_or_a_metric_that_fails_leaves_the_other_figures(metric: Any, text: str) -> None:
    metrics = {"own": metric, "good": lambda a, b: np.mean(a == b)}
    probes = {"probe of mine": Failing()}
    result = run(*data(300), n_seeds=1, erasers=("LEACE",), leakage=probes, metrics=metrics)
    reasons = {head: reason for _, head, reason in result.failures}
    assert reasons.keys() == {"", "retrained", "frozen"}
    assert reasons[""].startswith("leakage: ")
    assert "ZeroDivisionError" in reasons[""]
    assert text in reasons["retrained"]
    assert result.mean("distortion", eraser="LEACE") > 0
    accuracy = result.mean("accuracy", eraser="LEACE")
    assert result.mean("good", eraser="LEACE") == pytest.approx(accuracy)
    assert "own" not in result.metrics


def test_equal_rows_have_no_distortion_and_heads_at_the_majority() -> None:
    _, y, z = data(400)
    with pytest.warns(SplinceWarning, match="test rows of a split equal training rows"):
        result = run(np.full((400, 3), 0.5), y, z, erasers=("none", "LEACE"), heads=("retrained",))
    assert not result.failures
    assert np.isnan(result.mean("distortion", eraser="LEACE"))
    assert result.mean("accuracy", eraser="none") == result.mean("accuracy", eraser="LEACE")


def test_ctrl_c_is_no_row() -> None:
    def stopped(*_: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(*data(300), n_seeds=1, erasers={"stopped": stopped})


HALF = np.where(np.arange(900) < 10, np.nan, 0.5)  # a quantity of one value
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"association": 1.2}, InputError, "probability"),
    ({"association": ()}, InputError, "empty"),
    ({"association": np.array(0.9)}, InputError, "association p is array"),
    ({"association": 0.9, "concept": X[:, 0]}, InputError, "one of them is a quantity"),
    ({"association": 0.9, "sizes": (5000, 1, 100)}, NotEnoughDataError, "cell"),
    ({"alphas": np.array(0.1)}, InputError, "alpha is array"),
    ({"alphas": (0.0,)}, InputError, "alpha 0"),
    ({"erasers": ("LACE",)}, InputError, "no eraser 'LACE'"),
    ({"erasers": (eraser_of, eraser_of)}, InputError, "two erasers"),
    ({"erasers": ()}, InputError, "erasers= is empty"),
    ({"erasers": {"": "LEACE"}}, InputError, "is reserved"),
    ({"erasers": {"alphas": "LEACE"}}, InputError, "is reserved"),
    ({"heads": ("tuned",)}, InputError, "no head 'tuned'"),
    ({"heads": {"": "frozen"}}, InputError, "is reserved"),
    ({"heads": {"alphas": "frozen"}}, InputError, "is reserved"),
    ({"leakage": ("svm",)}, InputError, "no probe"),
    ({"leakage": {"class": GaussianNB()}}, InputError, "as a metric is"),
    ({"leakage": {"probe": GaussianNB()}}, InputError, "as a metric is"),
    ({"leakage": {"a[b]": GaussianNB()}}, InputError, "as a metric is"),
    ({"n_seeds": 0}, InputError, "n_seeds"),
    ({"n_seeds": 2, "test": y == 0}, InputError, "n_seeds"),
    ({"n_seeds": 1, "test": y > 2}, NotEnoughDataError, " 0 test rows"),
    ({"n_jobs": 0}, InputError, "n_jobs"),
    ({"sizes": (1, 1, 1)}, InputError, "association"),
    ({"aligned_class": 1}, InputError, "aligned_class"),
    ({"metrics": ["f1"]}, InputError, "metrics"),
    ({"metrics": {"mine": ev.Metric(None)}}, InputError, "pass a function"),
    ({"metrics": {"mine": ev.Metric(max, "yes")}}, InputError, "lower_is_better="),  # type: ignore[arg-type]
    *(
        ({"metrics": {name: max}}, InputError, "custom metric is named")
        for name in ("rank", "accuracy", "probe_accuracy[z]", 3)
    ),
    ({"test": ["sometimes"] * 900, "n_seeds": 1}, LabelError, "sometimes"),
    ({"task": HALF}, LabelError, "the task has one value in all of its rows"),
    ({"concept": {"a": HALF}}, LabelError, "the concept 'a' has one value in all of its rows"),
    ({"task": 0 * z}, LabelError, "task has 1 class"),
    ({"concept": 0 * z}, LabelError, "'concept' has 1 class"),
    ({"concept": {}}, InputError, "at least one column"),
    ({"concept": {1: z, "1": z}}, InputError, "names that differ as text"),
    ({"X": np.where(np.arange(900)[:, None] == 7, np.nan, X)}, NonFiniteError, "7"),
]


@pytest.mark.parametrize(("change", "error", "match"), REFUSED)
def test_invalid_arguments_are_refused_before_anything_runs(
    change: dict[str, Any], error: type[Exception], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # case 7
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something ran")

    monkeypatch.setattr(sf.Moments, "update", never)
    arguments: dict[str, Any] = {"X": X, "task": y, "concept": z, "n_seeds": 2, "progress": False}
    with pytest.raises(error, match=match):
        ev.compare(**(arguments | change))


def test_a_quantity_has_the_linear_probe_alone() -> None:
    concept = {"kind": z, "amount": X[:, 0] + X[:, 1]}
    with pytest.raises(InputError, match=r"'amount', has only the linear probe; pass leakage=\('l"):
        run(X, y, concept, leakage=GaussianNB())
    probes = {"linear": "linear", "bayes": GaussianNB()}
    with pytest.warns(SplinceWarning, match="only the linear probe, not bayes"):
        result = run(X, y, concept, leakage=probes, n_seeds=1, erasers=("none",))
    probed = {key for key in result.metrics if "]" in key and not key.startswith("selection")}
    assert probed == {
        f"{probe}_{figure}[kind]"
        for probe in ("probe", "bayes") for figure in ("accuracy", "auc", "chance")
    } | {"probe_r2[amount]", "probe_chance[amount]"}  # fmt: skip
    run(X, y, concept, leakage=(), n_seeds=1, erasers=("none",))  # none is no wrong one
    columns = np.stack([np.full(900, 0.5), X[:, 0]], axis=1)  # of a task one may be constant
    assert not run(X, columns, z, erasers=("LEACE",), n_seeds=1).failures


def test_a_frame_of_concepts_is_a_mapping_of_its_columns() -> None:
    X, y, z = data(300)
    columns = {"gender": z, "race": np.arange(300) % 2}
    frames = (columns, pd.DataFrame(columns), pl.DataFrame(columns))
    found = [run(X, y, concept, n_seeds=1, erasers=("LEACE",)) for concept in frames]
    assert found[0].context.concepts == ("gender", "race")
    assert [r.table("accuracy") for r in found[1:]] == [found[0].table("accuracy")] * 2


def test_folds_replace_small_validation_cells() -> None:  # cases 4, 10
    X, y, z = data(200)
    z[y == 1] = 1
    z[np.flatnonzero(y == 1)[:9]] = 0
    result = run(X, y, z, n_seeds=1)
    assert any("5-fold" in note for note in result.notes)
    large = run(*data(3000), n_seeds=1)
    assert not any("-fold" in note for note in large.notes)  # control


def test_classes_unseen_in_training_count_as_errors() -> None:  # case 8
    X, y, z = data(300)
    part = np.array(["train"] * 200 + ["test"] * 100)
    y, z = y.copy(), z.copy()
    y[295:], z[290:] = 7, 3
    result = run(X, y, z, n_seeds=1, test=part, alphas=(0.1,))
    for text in ("5 test rows have a class of the task", "10 test rows have a class of 'concept'"):
        assert any(f"{text} that no training row has" in note for note in result.notes)
    assert not result.failures
    assert result.mean("worst_group", eraser="none") == 0.0


def test_a_worst_group_that_chance_lowers_is_noted() -> None:
    """The bound on the bias of the minimum: a simulation of exact cells stays below it."""
    for n, n_test, noted in ((900, 240, True), (7200, 4800, False)):  # control: cells of 400 rows
        X, y, _ = data(n)
        part = np.where(np.arange(n) < n_test, "test", "train")
        options: dict[str, Any] = {"test": part, "erasers": ("none",), "heads": ("frozen",)}
        result = run(X, y, np.arange(n) % 6, n_seeds=1, **options)
        notes = [note for note in result.notes if note.startswith("the worst group is the lowest")]
        assert len(notes) == noted
        if noted:
            match = re.search(
                r"of (\d+) cells, the smallest of (\d+) test rows: .* (\.\d+|0\.\d+),", notes[0]
            )
            assert match is not None
            k, n, bound = int(match[1]), int(match[2]), float(match[3])
            minima = np.random.default_rng(0).binomial(n, 0.5, (4000, k)).min(axis=1) / n
            assert 0.5 * bound < 0.5 - minima.mean() < bound


def test_rows_that_occur_twice_are_counted() -> None:  # case 12
    X, y, z = data(300)
    with pytest.warns(SplinceWarning, match="test rows of a split equal training rows"):
        run(np.r_[X, X], np.r_[y, y], np.r_[z, z], n_seeds=1)
    groups = np.tile(np.arange(300), 2)  # control: kept together they share no side; no warning
    run(np.r_[X, X], np.r_[y, y], np.r_[z, z], n_seeds=1, groups=groups)


def test_a_map_a_file_and_a_source_are_rows(tmp_path: Path) -> None:  # case 13
    """Changes of a map that is copied on write reach every process."""
    X, y, z = data(600, 300)  # joblib maps arrays above 1 MB
    options: dict[str, Any] = {"n_seeds": 1, "erasers": ("LEACE",), "alphas": (0.1,), "leakage": ()}
    expected = run(X, y, z, **options).records
    path, table = tmp_path / "X.npy", tmp_path / "rows.parquet"
    np.save(path, X)
    np.save(tmp_path / "other.npy", X[:, ::-1])
    pq.write_table(pa.table({"vectors": list(X)}), table)
    changed = np.load(tmp_path / "other.npy", mmap_mode="c")
    changed[:] = X
    for rows, n_jobs in (
        (path, 1),
        (np.load(path, mmap_mode="r"), 2),
        (sf.sources.from_parquet(table, "vectors"), 1),
        (changed, 2),
        (np.asarray(changed)[:], 2),
    ):
        assert run(rows, y, z, n_jobs=n_jobs, **options).records == expected
    with pytest.raises(InputError, match="from_parquet"):
        run(table, y, z, **options)
    shuffled = StreamSource("loader", [X], Block, shuffled=True, per_item=True)
    with pytest.raises(InputError, match="shuffle=False"):  # the labels would be of other rows
        run(shuffled, y, z, **options)


def test_a_large_map_is_not_copied_whole(tmp_path: Path) -> None:  # case 13
    """The peak is that of the rows of one job in float64, and of the solver's scores."""
    rng = np.random.default_rng(0)
    n, d, sizes = 60_000, 64, (3000, 600, 1000)
    X = np.lib.format.open_memmap(tmp_path / "X.npy", "w+", np.float32, (n, d))
    y, z = rng.integers(0, 2, n), rng.integers(0, 2, n)
    X[:] = rng.normal(size=(n, d))
    X.flush()
    tracemalloc.start()
    run(tmp_path / "X.npy", y, z, association=(0.8,), sizes=sizes, n_seeds=1, alphas=(0.1,))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    labels = 12 * n * 8
    assert peak < 4 * sum(sizes) * d * 8 + labels + (1 << 24)
    assert peak < X.nbytes * 2


def test_labels_of_any_kind_give_the_same_numbers() -> None:  # case 14
    options: dict[str, Any] = {"n_seeds": 1, "association": 0.7, "erasers": ("SPLINCE",)}
    expected = [list(r.values.values()) for r in run(X, y, z, **options).records]
    names, declared = np.array(["a", "b"]), ["a", "b", "neither"]  # no row has the last class
    for task, concept in (
        (y.astype(bool), pd.Series(names[z], dtype="category")),
        (pl.Series(names[y]), z.tolist()),
        (pd.Categorical(names[y], declared), pd.Categorical(names[z], declared)),
    ):
        found = run(X, task, concept, **options)
        assert [list(r.values.values()) for r in found.records] == expected


@pytest.mark.parametrize("n", [900, 40])  # 40: folds of the training rows choose the alpha
def test_classes_as_a_task_go_with_a_quantity_as_concept(n: int) -> None:
    X, y, _ = data(n)
    concept = X[:, 0] + 0.1 * np.random.default_rng(1).normal(size=n)
    heads = {"retrained": "retrained", "frozen": "frozen", "plain": LogisticRegression()}
    result = run(X, y, concept, n_seeds=3, heads=heads, alphas=(100.0, 0.01))
    assert not result.failures
    assert any("5-fold" in note for note in result.notes) == (n == 40)
    assert result.mean("residual", eraser="LEACE") < 1e-9
    assert "worst_group" not in result.metrics
    if n == 900:
        for head in heads:
            assert result.mean("accuracy", eraser="LEACE", head=head) > 0.6
        # The alpha is chosen by accuracy, which 100 would leave at chance
        chosen = {r.alpha for r in result.records if r.head == "retrained"}
        assert chosen == {0.01}


def test_names_of_erasers_heads_concepts_and_metrics_change_no_figure() -> None:
    options: dict[str, Any] = {"association": 0.9, "aligned_class": 1, "alphas": (0.1, 0.001)}
    plain = run(X, y, z, **options)
    erasers = {"advice": "LEACE", "SPLINCE": "SAL", "LEACE": "SPLINCE", "task": "none"}
    heads = {"advice": "retrained", "retrained": "frozen"}
    found = run(X, y, {"task": z}, erasers=erasers, heads=heads, **options)
    assert not found.failures
    for name, role in erasers.items():
        for head, head_role in heads.items():
            for metric in plain.metrics:
                assert found.mean(metric, eraser=name, head=head) == pytest.approx(
                    plain.mean(metric, eraser=role, head=head_role), abs=1e-12
                ), (name, head, metric)
    assert len(found.to_frame()) == len(plain.to_frame())
    text = str(found)
    assert "advice: head refitted after erasing" in text
    assert "retrained: head of the unerased rows" in text
    assert found.context.eraser_as("SPLINCE") == "LEACE"
