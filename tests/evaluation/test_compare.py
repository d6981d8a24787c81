"""compare (`run.py`, `plan.py`, `job.py`): exact resume, equal figures by any jobs, failures."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from comparisons import LEVEL, data, run, script
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.linear_model import LogisticRegression, Ridge, SGDClassifier
from sklearn.metrics import balanced_accuracy_score
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_info

import splince_fast as sf
from splince_fast import evaluation as ev
from splince_fast.evaluation import Comparison
from splince_fast.evaluation.data import fingerprint
from splince_fast.exceptions import (
    FileFormatError,
    InputError,
    LabelError,
    NonFiniteError,
    NotEnoughDataError,
    SplinceWarning,
)

X, y, z = data()


def same(a: Comparison, b: Comparison) -> bool:
    return repr(a.records) == repr(b.records)


def eraser_of(X: Any, labels: Any) -> sf.Projection:
    return sf.leace(sf.Moments().update(X, labels), erase="concept")


# -- what is computed -------------------------------------------------------------------------


def test_heads_and_frozen_heads_are_those_of_a_plain_script() -> None:
    threads = [pool["num_threads"] for pool in threadpool_info()]
    result = run(X, y, z, n_seeds=1, **LEVEL)
    assert [pool["num_threads"] for pool in threadpool_info()] == threads
    twin = script(X, y, z)
    train, validation, test = twin.train, twin.validation, twin.test
    moments = sf.Moments().update(X[train], {"y": y[train], "z": z[train]})
    erasers: dict[str, Any] = {
        "none": np.copy, "SAL": sf.sal(moments, erase="z"),
        "SPLINCE": sf.splince(moments, erase="z", keep="y"),
    }  # fmt: skip
    frozen: Any = None
    for name, eraser in erasers.items():
        erased, held_out, fresh = (eraser(X[rows]) for rows in (train, validation, test))
        ranked = []
        for alpha in (0.1, 0.001):
            model = twin.head(erased, alpha)
            guess = model.predict(twin.scaled(held_out))
            groups = (y[validation], z[validation])
            worst = ev.worst_group_accuracy(y[validation], guess, groups=groups)
            ranked.append(((worst, np.mean(guess == y[validation]), alpha), model))
        best = max(ranked, key=lambda pair: pair[0])[1]
        frozen = best if name == "none" else frozen
        for head, model in (("retrained", best), ("frozen", frozen)):
            guess = model.predict(twin.scaled(fresh))
            expected = {
                "accuracy": np.mean(guess == y[test]),
                "worst_group": ev.worst_group_accuracy(y[test], guess, groups=(y[test], z[test])),
                "tpr_gap": ev.tpr_gap(y[test], guess, concept=z[test]),
                "class_accuracy": balanced_accuracy_score(y[test], guess),
            }
            for metric, value in expected.items():
                assert result.mean(metric, eraser=name, head=head) == pytest.approx(value)
        found = ev.leakage(twin.scaled(fresh), z[test], probes=("linear",))["linear"]
        assert result.mean("probe_accuracy", eraser=name) == pytest.approx(found.accuracy)
        assert result.mean("distortion", eraser=name) == twin.distortion(erased)
        kept = result.mean("kept_covariance", eraser=name)
        assert kept == pytest.approx(twin.kept(erased, y))


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


# -- however it runs --------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_numbers_for_any_number_of_jobs_and_order() -> None:
    options: dict[str, Any] = {"association": (0.5, 0.9), "aligned_class": 1}
    one = run(X, y, z, n_jobs=1, **options)
    assert same(one, run(X, y, z, n_jobs=2, **options))
    assert same(one, run(X, y, z, n_jobs=1, association=(0.9, 0.5), aligned_class=1))
    assert not same(one, run(X, y, z, random_state=1, **options))  # control


def test_a_folder_resumes_exactly_and_recomputes_only_what_a_setting_touches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from splince_fast.evaluation import job

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
    run(X, y, z, run=tmp_path, erasers=("none", "SAL", "LEACE", "SPLINCE", "mean_projection"))
    assert made == [["MeanProjection"], ["MeanProjection"]]
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
    """The rows have 269 MiB."""
    X = np.zeros((1, 2**8), np.float32).repeat(2**18 + 2**13, axis=0)
    first = fingerprint(X, {}, None, None)
    X[-2, -1] = 1.0
    assert fingerprint(X, {}, None, None) != first


# -- what goes wrong --------------------------------------------------------------------------


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
    X, y, z = data(60, 100)
    result = run(X, y, z, n_seeds=1, heads=("unregularised", "retrained"))
    assert all(head == "unregularised" for _, head, _ in result.failures)
    assert "separable" in result.failures[0][2]
    assert result.mean("accuracy", eraser="LEACE", head="retrained") > 0.3


class Failing(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier whose predictions and scores raise."""

    def __init__(self, error: Any = None) -> None:
        self.error = error

    def fit(self, X: Any, y: Any) -> Failing:
        return self

    def predict(self, X: Any) -> Any:
        raise self.error

    decision_function = predict


@pytest.mark.parametrize("error", [KeyError("k"), ZeroDivisionError("z")], ids=repr)
def test_any_exception_of_an_eraser_a_head_a_probe_or_a_metric_is_a_row(error: Exception) -> None:
    def failing(*_: Any) -> Any:
        raise error

    X, y, z = data(300)
    options: dict[str, Any] = {
        "n_seeds": 1,
        "erasers": {"LEACE": "LEACE", "bad": failing},
        "heads": {"retrained": "retrained", "worse": Failing(error)},
        "leakage": {"probe of mine": Failing(error)},
        "metrics": {"own": failing, "good": lambda a, b: np.mean(a == b)},
    }
    result = run(X, y, z, **options)
    reasons = {(e, h): reason for e, h, reason in result.failures}
    assert set(reasons) == {
        ("bad", ""), ("bad", "retrained"), ("bad", "worse"), ("LEACE", "worse"),
        ("LEACE", "retrained"), ("LEACE", ""),
    }  # fmt: skip
    name = type(error).__name__
    assert all(name in reason for reason in reasons.values())
    assert reasons["LEACE", "retrained"].startswith("metric 'own'")
    assert reasons["LEACE", ""].startswith("leakage: ")
    assert result.mean("distortion", eraser="LEACE") > 0
    accuracy = result.mean("accuracy", eraser="LEACE")  # what did not fail is there
    assert result.mean("good", eraser="LEACE") == pytest.approx(accuracy)
    assert "own" not in result.metrics


class Predicting(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A head whose predictions are `form` of those of a linear head."""

    def __init__(self, form: Any = None, model: Any = None) -> None:
        self.form, self.model = form, model

    def fit(self, X: Any, y: Any) -> Predicting:
        self.model_ = clone(self.model or LogisticRegression()).fit(X, y)
        return self

    def predict(self, X: Any) -> Any:
        return self.form(self.model_.predict(X))


def test_predictions_that_are_no_classes_are_a_row() -> None:
    """Codes of any type are classes; a regressor is no head for them."""
    good = {kind.__name__: Predicting(lambda c, kind=kind: c.astype(kind))
            for kind in (int, float, bool)}  # fmt: skip
    bad = {
        r"shape (1,) for 225 rows": lambda c: c[:1],
        r"shape (225, 2) for 225 rows": lambda c: np.eye(2)[c],
        "the head predicts 0.25, which is not a class": lambda c: 0 * c + 0.25,
        "the head predicts nan, which is not a class": lambda c: c * np.nan,
        "the head predicts -1, which is not a class": lambda c: c - 1,
    }
    heads = {**good, "pass a classifier": Ridge(), **{k: Predicting(f) for k, f in bad.items()}}
    result = run(X, y, z, n_seeds=1, erasers=("none",), heads=heads)
    reasons = {head: reason for _, head, reason in result.failures}
    assert reasons.keys() == heads.keys() - good.keys()
    assert all(text in reason for text, reason in reasons.items())
    values = [result.values("worst_group", eraser="none", head=head) for head in good]
    assert values[0] == values[1] == values[2]
    wide = {"ridge": Ridge(), "wide": Predicting(lambda c: np.stack([c, c], axis=1), Ridge())}
    result = run(X, X[:, 1], z, n_seeds=1, erasers=("none",), heads=wide)
    ((_, head, reason),) = result.failures
    assert (head, "shape (225, 2); the task has shape (225, 1)" in reason) == ("wide", True)
    assert result.mean("r2", eraser="none", head="ridge") > 0.9


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
    X, y, _ = data(900)
    z = np.arange(900) % 6
    for test_rows, noted in ((240, True), (0, False)):
        part = np.where(np.arange(900) < test_rows, "test", "train")
        if not test_rows:  # control: 12 cells of over 250 rows each
            X, y, z = np.tile(X, (8, 1)), np.tile(y, 8), np.tile(z, 8)
            X = X + np.random.default_rng(1).normal(size=X.shape)
            part = np.where(np.arange(7200) < 4800, "test", "train")
        result = run(X, y, z, n_seeds=1, test=part, erasers=("none",), heads=("frozen",))
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


def test_a_map_a_file_and_a_source_are_rows(tmp_path: Path, pa: Any, pq: Any) -> None:  # case 13
    X, y, z = data(400)
    options: dict[str, Any] = {"n_seeds": 1, "erasers": ("SPLINCE",), "leakage": ()}
    expected = [r.values for r in run(X, y, z, **options).records]
    path, table = tmp_path / "X.npy", tmp_path / "rows.parquet"
    np.save(path, X)
    pq.write_table(pa.table({"vectors": list(X)}), table)
    for rows, n_jobs in (
        (path, 1), (np.load(path, mmap_mode="r"), 2), (sf.sources.from_parquet(table, "vectors"), 1)
    ):  # fmt: skip
        assert [r.values for r in run(rows, y, z, n_jobs=n_jobs, **options).records] == expected
    with pytest.raises(InputError, match="from_parquet"):
        run(table, y, z, **options)


def test_changes_of_a_copy_on_write_map_reach_every_process(tmp_path: Path) -> None:
    X, y, z = data(600, 300)  # joblib maps arrays above 1 MB
    np.save(tmp_path / "x.npy", X[:, ::-1])
    changed = np.load(tmp_path / "x.npy", mmap_mode="c")
    changed[:] = X
    options: dict[str, Any] = {"n_seeds": 1, "erasers": ("LEACE",), "alphas": (0.1,)}
    expected = run(X, y, z, **options).records
    for form in (changed, np.asarray(changed)[:]):
        assert run(form, y, z, n_jobs=2, **options).records == expected


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


@pytest.mark.parametrize("association", [None, 0.7])
def test_labels_of_any_kind_give_the_same_numbers(
    association: float | None, pd: Any, pl: Any
) -> None:  # case 14
    options: dict[str, Any] = {"n_seeds": 1, "association": association}
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


def test_estimators_get_classes_beside_a_quantity_as_columns_of_a_mapping() -> None:
    X, y, _ = data(900)
    rng = np.random.default_rng(4)
    kind, amount = rng.integers(0, 3, 900), rng.normal(size=900)
    X[:, 2] += kind == 1  # the codes 0, 1, 2 as numbers do not show it
    X[:, 3] += amount
    erasers = {"estimator": sf.LEACE(), "LEACE": "LEACE", "SPLINCE": sf.SPLINCE()}
    result = run(X, y, {"kind": kind, "amount": amount}, n_seeds=1, erasers=erasers)
    assert not result.failures
    for eraser in erasers:
        assert result.mean("residual", eraser=eraser) < 1e-9
        assert result.mean("rank", eraser=eraser) == 3
    assert result.mean("distortion", eraser="estimator") == pytest.approx(
        result.mean("distortion", eraser="LEACE"), rel=1e-9
    )


# -- roles are not names ----------------------------------------------------------------------


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


def test_moments_hold_the_task_beside_a_concept_of_that_name() -> None:
    X, y, z = data(300)
    seen = []

    def mine(X: Any, labels: Any) -> sf.Projection:
        seen.append(list(labels))
        return sf.splince(sf.Moments().update(X, labels), erase="task", keep="kept task")

    result = run(X, y, {"task": z}, n_seeds=1, erasers={"mine": mine, "SPLINCE": "SPLINCE"})
    assert [set(names) for names in seen] == [{"task", "kept task"}]
    for metric in ("kept_covariance", "residual", "distortion"):
        assert result.mean(metric, eraser="mine") == pytest.approx(
            result.mean(metric, eraser="SPLINCE"), abs=1e-12
        )
