"""The command line: whole jobs on files, and what it says of mistakes."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray
from processes import run, script

import splince_fast as sf
from splince_fast._runtime import files
from splince_fast.cli import main, rows
from splince_fast.cli.commands import _with_flags
from splince_fast.cli.labels import read_label_files
from splince_fast.exceptions import InputError, LabelError, SplinceError, UnknownVariableError
from splince_fast.labels import ClassCodes

N, WIDTH = 300, 6
Told = Callable[..., str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with embeddings (whole and in shards) and labels in every format."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    gender = rng.integers(0, 2, size=N)
    job = np.where(rng.random(N) < 0.8, gender, 1 - gender)
    age = rng.normal(size=N)
    X = rng.normal(size=(N, WIDTH)) + np.outer(gender, np.eye(WIDTH)[0])
    X += np.outer(job, np.eye(WIDTH)[1]) + np.outer(age, np.eye(WIDTH)[2])
    np.save("X.npy", X)
    np.save("a.npy", X[:100])
    np.save("b.npy", X[100:])
    np.save("gender.npy", gender)
    np.save("numbers.npy", job)
    lines = [f"{'fm'[g]},{j},{a!r}" for g, j, a in zip(gender, job, age.tolist(), strict=True)]
    Path("labels.csv").write_text("\n".join(["gender,job,age", *lines]) + "\n")
    return tmp_path


def by_hand(keep: str | None = "job", **kinds: str) -> sf.Projection:
    """The eraser of the files by the Python interface."""
    table = np.genfromtxt("labels.csv", delimiter=",", names=True, dtype=None, encoding="utf-8")
    moments = sf.Moments(kinds=kinds).update(
        np.load("X.npy"), {name: table[name] for name in ("gender", "job", "age")}
    )
    if keep is None:
        return sf.leace(moments, erase="gender")
    return sf.splince(moments, erase="gender", keep=keep)


def report_of(path: str) -> sf.Report:
    report = sf.Projection.load(path).report
    assert report is not None
    return report


def agree(path: str, other: sf.Projection) -> None:
    """The same eraser up to the rounding of another order of rows."""
    np.testing.assert_allclose(sf.Projection.load(path).matrix(), other.matrix(), atol=1e-12)


def save_rows(path: str, X: NDArray[Any], name: str = "X", **others: NDArray[Any]) -> None:
    """Write rows and other arrays in the format of the suffix."""
    suffix, arrays = Path(path).suffix, {name: X, **others}
    if suffix == ".npy":
        np.save(path, X)
    elif suffix == ".npz":
        np.savez(path, **arrays)  # type: ignore[arg-type]
    elif suffix == ".safetensors":
        safetensors.numpy.save_file(arrays, path, {"by": "me"})
    elif suffix == ".pt":
        torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
        torch.save({key: torch.from_numpy(array) for key, array in arrays.items()}, path)
    else:
        pa = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        column = pa.array(list(X), pa.list_(pa.float64()))
        parquet.write_table(pa.table({"v": column}), path, row_group_size=100)


FIT = "fit X.npy --labels labels.csv --erase gender"
KEEP = f"{FIT} --keep job"


# -- fit -----------------------------------------------------------------------------------------


def test_fit_prints_the_report_and_writes_the_eraser(here: Path, told: Told) -> None:
    options = ["--labels", "labels.csv", "--erase", "gender", "--keep", "job", "-o", "e"]
    out = told("fit", "X.npy", *options)
    agree("e", by_hand())
    report = report_of("e")
    words = " ".join(report.explain().split())
    assert words.startswith("'gender' is erased exactly from these rows")
    assert "SPLINCE was fitted to 300 rows with 6 features" in words
    *summary, last = out.splitlines()
    assert " ".join(" ".join(summary).split()) == words
    assert str(report) not in out
    assert last.startswith("eraser: e ")
    shown = told("inspect", "e")
    assert str(report) in shown
    assert words in " ".join(shown.split())


def test_a_table_without_a_column_of_vectors_names_those_that_fit(
    here: Path, told: Told, pa: Any, pq: Any
) -> None:
    X = np.load("X.npy")
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(X.ravel()), WIDTH)
    columns = {"age": X[:, 0], "a": list(X), "b": fixed}
    pq.write_table(pa.table(columns), "t.parquet")
    pq.write_table(pa.table({"age": X[:, 0]}), "none.parquet")
    advice = "name its column of vectors with --embedding"
    start = ["fit", "t.parquet", "--erase", "age", "-o", "e"]
    assert f"{advice}; its columns of lists are 'a', 'b'\n" in told(*start, code=2)
    start[1] = "none.parquet"
    assert f"{advice}; it has none: make one" in told(*start, code=2)


def test_integers_that_may_be_quantities_warn(
    here: Path, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save("years.npy", np.random.default_rng(0).integers(18, 80, N))
    start = ["fit", "X.npy", "--labels", "years.npy", "--erase", "years", "--method", "leace"]
    assert main([*start, "-o", "e"]) == 0
    out, err = capsys.readouterr()
    for text in (out, err):
        assert "'years' was read as 62 classes, and erasing takes 6 of 6 dimensions" in text
    assert "--kind years=continuous" in err
    told(*start, "--kind", "years=continuous", "-o", "one")
    assert sf.Projection.load("one").rank == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--method", "leace"], lambda: by_hand(None)),
        (["--keep", "age"], lambda: by_hand("age")),
        (["--keep", "job", "--kind", "job=continuous"], lambda: by_hand(job="continuous")),
    ],
)
def test_shards_and_methods(
    here: Path, told: Told, options: list[str], expected: Callable[[], sf.Projection]
) -> None:
    labels = ["--labels", "labels.csv", "--erase", "gender"]
    told("fit", "a.npy", "b.npy", *labels, *options, "-o", "e")
    agree("e", expected())


def test_every_option_reaches_its_method(here: Path, told: Told) -> None:
    start = ["fit", "X.npy", "--labels", "labels.csv", "--erase", "gender"]
    told(*start, "--keep", "job", "--shrinkage", "0.25", "-o", "shrunk")
    assert report_of("shrunk").shrinkage == 0.25
    told(*start, "--method", "leace", "--shrinkage", "oas", "-o", "oas")
    assert 0 < report_of("oas").shrinkage < 1
    told(*start, "--method", "Mean-Projection", "-o", "mean")
    told(*start, "--method", "sal", "-o", "sal")
    assert sf.Projection.load("mean").method == "MeanProjection"
    agree("mean", sf.Projection.load("sal"))
    told(*start, "--erase", "job", "--method", "leace", "-o", "both")
    assert sf.Projection.load("both").rank == 2


def test_shrinkage_is_chosen_on_folds(here: Path, told: Told) -> None:
    X, gender, group = np.load("X.npy"), np.load("gender.npy"), np.arange(N) // 3
    np.save("group.npy", group)
    start = ["fit", "X.npy", "--labels", "gender.npy", "--erase", "gender", "--force", "-o", "e"]
    source = sf.sources.from_npy("X.npy", {"gender": gender})
    source.files += ("gender.npy",)
    sf.Moments.from_blocks(source, folds=2, checkpoint="folds")
    assert sf.Moments.load("folds").n_rows == N  # of folds, their sum
    err = told(*start, "--checkpoint", "folds", code=2)
    assert "holds 'folds', and 'moments' was expected" in err
    for flags, groups in (
        ([], None),
        (["--checkpoint", "folds"], None),
        (["--labels", "group.npy", "--groups", "group"], "group"),
    ):
        assert "held-out rows" in told(*start, "--shrinkage", "cv", *flags)
        folds = sf.Folds(2, groups=groups).update(X, {"gender": gender, "group": group})
        best = sf.leace(folds, erase="gender", shrinkage="cv")
        agree("e", best)
        assert best.report is not None
        assert report_of("e").held_out.distortion == pytest.approx(
            best.report.held_out.distortion, rel=1e-9
        )


def test_rows_sampled_and_read_again(here: Path, told: Told) -> None:
    start = ["fit", "a.npy", "b.npy", "--labels", "labels.csv", "--erase", "gender", "--method"]
    start += ["leace", "--checkpoint", "c", "--force"]
    gender = np.genfromtxt("labels.csv", delimiter=",", names=True, dtype=None, encoding="utf-8")
    source = sf.sources.from_npy(["a.npy", "b.npy"], {"gender": gender["gender"]})
    for flags, parameters, again in (
        (["--subsample", "0.5"], {"subsample": 0.5}, {}),
        (["--subsample", "auto"], {"subsample": "auto"}, {}),
        (["--covariance-type", "diag"], {"covariance_type": "diag"}, {}),
        (
            ["--covariance-type", "diag", "--passes", "2"],
            {"covariance_type": "diag"},
            {"refine": source, "passes": 2},
        ),
    ):
        moments = sf.Moments.from_blocks(source, **parameters)
        expected = sf.leace(moments, erase="gender", **again).report
        assert expected is not None
        told(*start, *flags, "-o", "e")
        assert str(expected) in told("inspect", "e")
        agree("e", sf.leace(moments, erase="gender", **again))
    assert expected.diagonal.passes == 2
    # Control: all rows, as without the flag.
    told(*start, "--subsample", "1", "-o", "e")
    report = report_of("e")
    assert (report.sampling, report.held_out) == (None, None)


@pytest.mark.parametrize(
    ("options", "left"),
    [(["--on-infeasible", "drop"], "(up to rounding)"), (["--max-amplification", "1"], "above 1")],
)
def test_what_is_given_up_is_a_warning_of_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], options: list[str], left: str
) -> None:
    np.save("same.npy", np.load("gender.npy"))
    labels = ["--labels", "gender.npy", "--labels", "same.npy", "--erase", "gender"]
    assert main(["fit", "X.npy", *labels, "--keep", "same", *options, "-o", "e"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("splince-fast: warning: 1 of 1 direction(s) of 'same' were dropped")
    assert left in err
    assert err.count("\n") == 1
    assert "dropped" in out


def test_a_warning_of_every_block_is_told_once(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    n = 9000  # three blocks
    np.save("long.npy", np.random.default_rng(0).normal(size=(n, 2)))
    np.save("number.npy", np.arange(n) % 1500)
    options = ["--labels", "number.npy", "--erase", "number", "--method", "leace", "-o", "e"]
    assert main(["fit", "long.npy", *options]) == 0
    err = capsys.readouterr().err
    assert err.count("variable 'number' holds integers, read as classes") == 1
    assert err.startswith("splince-fast: warning: ")


def test_parquet_files_of_embeddings_or_of_labels(here: Path, told: Told, pa: Any) -> None:
    from pyarrow import csv, parquet

    labels = csv.read_csv("labels.csv")
    parquet.write_table(labels, "labels.parquet")
    flat = pa.array(np.load("X.npy").ravel())
    vectors = pa.FixedSizeListArray.from_arrays(flat, WIDTH)
    parquet.write_table(labels.append_column("vector", vectors), "all.parquet", row_group_size=70)
    names = ["--erase", "gender", "--keep", "job"]
    told("fit", "X.npy", "--labels", "labels.parquet", *names, "-o", "one")
    told("fit", "all.parquet", "--embedding", "vector", *names, "-o", "two")
    agree("one", by_hand())
    agree("two", by_hand())
    err = told("fit", "all.parquet", *names, "-o", "e", code=2)
    assert "'all.parquet' is a table; name its column of vectors with --embedding" in err
    more = ["--embedding", "vector", "--labels", "labels.csv"]
    err = told("fit", "all.parquet", *more, *names, "-o", "e", code=2)
    assert "--labels and --embedding exclude each other" in err
    Path("labels.parquet").write_bytes(b"PAR1 or not")
    err = told("fit", "X.npy", "--labels", "labels.parquet", *names, "-o", "e", code=2)
    assert "cannot be read as Parquet" in err


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
def test_a_checkpoint_is_refused_after_a_change_of_rows_in_the_middle(
    tmp_path: Path, told: Told, suffix: str
) -> None:
    """The shape of the rows and the names of the files are the same; only their times differ."""
    X, z = np.random.default_rng(0).normal(size=(3 * 4096, 4)), np.arange(3 * 4096) % 2
    rows, labels, checkpoint = (str(tmp_path / n) for n in ("X" + suffix, "z.npy", "c"))
    np.save(labels, z)
    same = f"same={labels}"
    argv = ["fit", rows, "--labels", labels, "--labels", same, "--erase", "z", "--keep", "same"]
    argv += ["-o", str(tmp_path / "e"), "--checkpoint", checkpoint, "--force"]
    save_rows(rows, X)
    assert "cannot keep" in told(*argv, code=2)  # leaves a complete checkpoint
    assert "cannot keep" in told(*argv, code=2)  # control: unchanged files are accepted
    X[5000] += 1.0
    save_rows(rows, X)
    assert "has changed since" in told(*argv, code=2)
    os.remove(checkpoint)
    assert "cannot keep" in told(*argv, code=2)
    z[5000] = 1 - z[5000]
    np.save(labels, z)
    assert "z.npy has changed since" in told(*argv, code=2)


def test_shards_of_a_folder_whose_names_do_not_sort_by_number_are_refused_with_labels(
    here: Path, told: Told
) -> None:
    """By name shard-10 comes before shard-2, so the second label would go to another row."""
    X, names = np.load("X.npy"), ["shard-2.npy", "shard-10.npy"]
    for folder, padded in (("plain", names), ("padded", ["shard-02.npy", "shard-10.npy"])):
        os.mkdir(folder)
        for name, part in zip(padded, np.split(X, [100]), strict=True):
            np.save(os.path.join(folder, name), part)
    options = ["--labels", "labels.csv", "--erase", "gender", "-o"]
    err = told("fit", "plain", *options, "e", code=2)
    assert "'shard-10.npy' comes before 'shard-2.npy' in the folder 'plain'" in err
    told("fit", *(f"plain/{name}" for name in names), *options, "e1")
    told("fit", "padded", *options, "e2")
    told("apply", "e2", "plain", "-o", "erased")  # without labels the order is no matter
    agree("e1", by_hand(None))
    agree("e2", by_hand(None))


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_a_file_that_was_replaced_since_its_header_was_read_is_refused(
    tmp_path: Path, suffix: str
) -> None:
    path = str(tmp_path / ("X" + suffix))
    save_rows(path, np.ones((6, 2)))
    labels = {"z": [0, 1, 0, 1, 0, 1]}
    source = rows.reader_of(path).source([path], None, ["z"], lambda: labels)
    assert len(list(source)) == 1  # control: the same file, read again
    for other in (np.ones((4, 2)), np.ones((6, 2), np.float32)):
        save_rows(path, other)
        with pytest.raises(
            sf.exceptions.InputError, match=r"now holds float.* of shape \(.*make a new source"
        ):
            list(source)


def test_a_checkpoint_goes_when_the_eraser_is_written_and_moments_are_saved(
    here: Path, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    start = ["fit", "X.npy", "--labels", "gender.npy", "--labels", "same=gender.npy"]
    start += ["--erase", "gender", "--keep", "same", "-o", "e", "--checkpoint", "c"]
    start += ["--save-moments", "m", "--force"]
    assert main(start) == 2
    assert "SPLINCE cannot keep 'same' while it erases 'gender'" in capsys.readouterr().err
    assert sf.Moments.load("m").n_rows == N  # also if no eraser exists
    assert Path("c").exists()
    assert not Path("e").exists()
    os.remove("m")
    assert main([*start, "--on-infeasible", "drop"]) == 0
    out, err = capsys.readouterr()
    assert "moments: m\n" in out
    assert "'same'" in err
    assert not Path("c").exists()
    assert sf.Moments.load("m").n_rows == N
    agree("e", sf.leace(sf.Moments.load("m"), erase="gender"))


@pytest.mark.parametrize("option", ["--output", "--checkpoint", "--save-moments"])
def test_what_cannot_be_written_is_refused_before_anything_is_read(
    here: Path, told: Told, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """An unset variable cost the whole pass, and the result was lost."""

    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the rows were read")

    monkeypatch.setattr(sf.Moments, "from_blocks", never)
    os.mkdir("folder")
    rest = [] if option == "--output" else ["-o", "e"]
    for path in ("", "folder", "X.npy"):
        argv = [*KEEP.split(), "--force", *rest, option, path]
        assert option in told(*argv, code=2)


def test_a_read_only_file_is_refused_before_the_work(
    here: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("e").write_text("old")
    access = os.access  # root may write to any file
    monkeypatch.setattr(os, "access", lambda path, mode: path != "e" and access(path, mode))
    argv = [*KEEP.split(), "-o", "e", "--force"]
    assert "'e' is read-only" in told(*argv, code=2)
    assert Path("e").read_text() == "old"


# -- labels --------------------------------------------------------------------------------------


DIGITS = "7" * 5000


def csv_column(text: str, name: str = "v", suffix: str = ".csv", **kinds: str) -> Any:
    """A column as a list of names with None, or as an array of floats."""
    path = Path(f"file{suffix}")
    path.write_bytes(text.encode(errors="surrogateescape"))
    found = read_label_files([str(path)], [name], kinds)[name]
    if isinstance(found, ClassCodes):
        return [None if code < 0 else found.classes[code] for code in found.codes]
    return found if found.dtype == np.float64 else found.tolist()


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["1", "-2", "+3"], [1, -2, 3]),
        (["1", "", "0"], [1, None, 0]),
        (["man", '""', '"a ""b"", c"', " woman "], ["man", None, 'a "b", c', "woman"]),
        (["007", "7"], [7, 7]),
        (["True", "False"], ["True", "False"]),
        (["1_000", "x"], ["1_000", "x"]),
        (["١", "a"], ["١", "a"]),
        (["inf", "-inf"], ["inf", "-inf"]),
        (["1", "2.5"], np.array([1, 2.5])),
        ([".5", "-1.", "2e-3", "1E3"], np.array([0.5, -1, 0.002, 1000])),
        (["0.5", "", "nan", "NaN"], np.array([0.5, np.nan, np.nan, np.nan])),
    ],
)
def test_csv_columns(here: Path, cells: list[str], expected: Any) -> None:
    """Classes are a list, and numbers an array."""
    for header, row, end in (("v,w", "{},0", "\r\n"), ("w,v", "0,{}", "\n")):
        found = csv_column(end.join([header, *map(row.format, cells)]) + end)
        assert [type(value) for value in found] == [type(value) for value in expected]
        np.testing.assert_array_equal(found, expected)
        assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("\ufeffv,w\n1,2\n", {}, [1]),  # a byte-order mark
        ("w\tv\na,b\tc\n", {"suffix": ".tsv"}, ["c"]),
        ('v\n1\n""\n2\n\n\n', {}, [1, None, 2]),
        ("v,w\n,1\n,2\n", {}, [None, None]),
        ("v,v2,v2\n1,2,3\n", {}, [1]),
        ("v\n", {}, []),
        ("v\n1.5\nNA\n2.25\n", {"v": "classes"}, ["1.5", "NA", "2.25"]),
        ('v\n01\n1\n""\n', {"v": "classes"}, ["01", "1", None]),  # codes of places
        (f"v\n{DIGITS}\n1\n", {"v": "classes"}, [DIGITS, "1"]),
    ],
    ids=lambda value: str(value)[:20],
)
def test_csv_files(here: Path, text: str, options: dict[str, str], expected: list[Any]) -> None:
    assert csv_column(text, **options) == expected


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("v\n1.5\nNA\n2.25\n", LabelError, r"numbers and text such as 'NA'.*--kind v=classes"),
        ("v\n1\nunknown\n", LabelError, "'unknown'"),
        (f"v\n{DIGITS}\n1\n", LabelError, r"an integer of 5000 digits.*--kind v=classes"),
        ("v,w\n1,2\n3\n", LabelError, "1 fields in line 3, and 2 in its header"),
        ("v,w\n1,2,3\n", LabelError, "3 fields in line 2"),
        ("v\n1\n\n2\n", LabelError, r'empty line 3 .* missing label is ""'),
        ("v,w\n1,2\n\n3,4\n", LabelError, "empty line 3 .*delimiters"),
        ('v\n"1\n', InputError, "cannot be read"),
        ("w\n1\n", UnknownVariableError, "has the variable 'v'; the variables are 'w'"),
        ("", UnknownVariableError, "none"),
        ("v,v\n1,2\n", LabelError, "2 columns 'v'"),
        ("v\nm\udce4dchen\n", InputError, "UTF-8"),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_csv_that_cannot_be_read(
    here: Path, text: str, error: type[SplinceError], message: str
) -> None:
    with pytest.raises(error, match=message):
        csv_column(text)


@pytest.mark.parametrize(
    ("name", "message"), [("objects", "not of Python objects"), ("empty", r"empty\.npy")]
)
def test_npy_files_of_labels_that_are_none(here: Path, name: str, message: str) -> None:
    np.save("objects.npy", np.array([None, "a"]), allow_pickle=True)
    Path("empty.npy").touch()
    with pytest.raises(InputError, match=message):
        read_label_files([f"{name}.npy"], [name], {})


def test_a_file_name_may_hold_the_sign_of_names(here: Path) -> None:
    np.save("p=2.npy", np.array(["x", "y"]))
    assert list(read_label_files(["p=2.npy"], ["p=2"], {})["p=2"]) == ["x", "y"]
    assert list(read_label_files(["v=p=2.npy"], ["v"], {})["v"]) == ["x", "y"]


# -- apply ---------------------------------------------------------------------------------------


@pytest.fixture
def eraser(here: Path) -> sf.Projection:
    found = by_hand()
    found.save("e")
    return found


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", ">f4", "int32", "bool"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("n", [0, 1, N])
def test_apply_writes_what_the_eraser_gives(
    eraser: sf.Projection, told: Told, dtype: str, order: str, n: int
) -> None:
    X = np.asarray(2 * np.load("X.npy")[:n], dtype=dtype, order=order)  # type: ignore[call-overload]
    np.save("in.npy", X)
    assert told("apply", "e", "in.npy", "-o", "out.npy") == f"{n} rows: out.npy\n"
    out = np.load("out.npy")
    expected = eraser(X)
    assert out.dtype == expected.dtype
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(np.load("in.npy"), X)


def test_apply_in_place_twice_is_once(eraser: sf.Projection, told: Told) -> None:
    expected = eraser(np.load("X.npy"))
    assert told("apply", "e", "X.npy", "--in-place") == f"{N} rows: X.npy\n"
    np.testing.assert_array_equal(np.load("X.npy"), expected)
    told("apply", "e", "X.npy", "--in-place")
    np.testing.assert_allclose(np.load("X.npy"), expected, atol=1e-13)


def test_in_place_is_refused_where_twice_is_not_once(here: Path, told: Told) -> None:
    X, gender = np.load("X.npy"), np.load("gender.npy")
    labels = {"gender": gender, "job": np.load("numbers.npy")}
    moments = sf.Moments().update(X, labels)
    leace = sf.leace(moments, erase="gender")
    after = sf.Moments().update(sf.sal(moments, erase="gender")(X), labels)
    repaired = sf.repair(after, before=moments, keep="job") @ sf.sal(moments, erase="gender")
    erasers = {
        "oracle": sf.oracle(moments, erase="gender"),
        "partial": leace.scaled(0.5),
        "repaired": repaired,
        "leace": leace,
        "splince": sf.splince(moments, erase="gender", keep="job"),
        "sal": sf.sal(moments, erase="gender"),
    }
    for name, eraser in erasers.items():
        eraser.save(name)
        np.save("copy.npy", X)
        once = eraser(X, {"gender": gender})
        twice = eraser(once, {"gender": gender})
        argv = ["apply", name, "copy.npy", "--in-place"]
        if np.abs(twice - once).max() < 1e-9:
            told(*argv)
            np.testing.assert_array_equal(np.load("copy.npy"), once)
        else:
            extra = ["--labels", "gender.npy"] if name == "oracle" else []
            assert "changes erased rows again" in told(*argv, *extra, code=2)
            np.testing.assert_array_equal(np.load("copy.npy"), X)
    repeated = erasers["oracle"](erasers["oracle"](X, {"gender": gender}), {"gender": gender})
    gap = [
        rows[gender == 1].mean(axis=0) - rows[gender == 0].mean(axis=0) for rows in (X, repeated)
    ]
    np.testing.assert_allclose(gap[1], -gap[0])  # control: the concept would be back


def test_apply_needs_memory_for_a_piece_only(eraser: sf.Projection, told: Told) -> None:
    X = np.ones((1_000_000, WIDTH), np.float16)  # 12 MB, 24 MB in the precision of the work
    np.save("in.npy", X)
    told("apply", "e", "X.npy", "-o", "warm.npy")

    def peak(job: Callable[[], Any]) -> int:
        tracemalloc.start()
        job()
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    assert peak(lambda: main(["apply", "e", "in.npy", "-o", "out.npy"])) < 6e6
    assert peak(lambda: eraser(np.load("in.npy"))) > 2e7  # the control holds input and output


@pytest.fixture
def bad_files(eraser: sf.Projection) -> None:
    """Files that no command takes, beside those of `here`."""
    os.mkdir("folder")
    np.save("narrow.npy", np.ones((4, 3)))
    np.save("integers.npy", np.ones((4, WIDTH), int))
    np.save("long.npy", np.ones((4, WIDTH), np.longdouble))
    np.savez("two.npz", a=np.ones((4, WIDTH)), b=np.ones(3))
    sf.Moments().update(np.eye(WIDTH), {"z": [0, 1] * (WIDTH // 2)}).save("moments")
    files.write("foreign", "something", 1, {"a": np.zeros(2)}, {})
    for name in ("broken.npy", "broken.npz"):
        Path(name).write_bytes(b"nothing")


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (f"{FIT} --method splince -o new", "SPLINCE needs --keep, the task"),
        (f"{FIT} --method leace --keep job -o new", "LEACE keeps nothing"),
        (f"{FIT} --method mean_projection --shrinkage .1 -o new", "it applies to splince, leace"),
        (f"{KEEP} --shrinkage some -o new", "invalid"),
        (f"{KEEP} --shrinkage 2 -o new", "a number in [0, 1]"),
        (f"{KEEP} --rank-tol 1 -o new", "a number in [0, 1)"),
        (f"{FIT} --method sal --null-space drop -o new", "it applies to splince, leace"),
        (f"{KEEP} -o new --checkpoint ./new", "is the file of --output, too"),
        (f"{KEEP} -o new --save-moments ./new", "is the file of --output, too"),
        (f"{KEEP} -o new --checkpoint labels.csv", "is an input, too"),
        (f"{KEEP} --max-amplification 0.5 -o new", "of at least 1"),
        (f"{KEEP} --subsample 2 -o new", "above 0 and at most 1"),
        (f"{KEEP} --subsample 0.01 -o new", "24 are needed; pass at least"),
        (f"{KEEP} --covariance-type tied -o new", "diag"),
        (f"{KEEP} --covariance-type diag --subsample auto -o new", "exclude each other"),
        (f"{KEEP} --covariance-type diag --shrinkage cv -o new", "pass a number"),
        (f"{KEEP} --covariance-type diag --solver eigh -o new", "at 'auto'"),
        (f"{KEEP} --covariance-type diag --groups age -o new", "leave --groups out"),
        (f"{KEEP} --passes 2 -o new", "need --covariance-type"),
        (f"{FIT} --method sal --covariance-type diag --passes 2 -o new", "splince, leace"),
        (f"{KEEP} --kind job -o new", "must be NAME=classes or"),
        (f"{KEEP} --kind age=classes -o new", "the variables are 'gender', 'job'"),
        (f"{KEEP}s -o new", "'jobs'; the variables are 'gender', 'job', 'age'"),
        (f"{KEEP} -o absent/e", "there is no folder for 'absent/e'"),
        (f"{KEEP} -o a.npy", "'a.npy' exists"),
        (f"{KEEP} -o new --save-moments a.npy", "'a.npy' exists"),
        (f"{KEEP} -o new.npy", "ends in .safetensors"),
        (f"{KEEP} -o new --save-moments m.npz", "ends in .safetensors"),
        (f"{KEEP} --checkpoint absent/c -o new", "there is no folder"),
        ("fit X.npy --erase g --keep y -o new", "pass --labels FILE"),
        ("fit absent.npy --labels labels.csv --erase gender --keep job -o new", "absent.npy"),
        ("fit absent.npy --erase z -o new", "there is no file 'absent.npy'"),
        ("fit a.npy --labels labels.csv --erase gender --keep job -o new", "has 300 rows but"),
        (
            "fit labels.csv --labels labels.csv --erase gender --keep job -o new",
            "'labels.csv' has no known format",
        ),
        ("fit folder --labels labels.csv --erase gender --keep job -o new", "has no file of rows"),
        ("fit X.npy --erase gender --keep job", "required: -o/--output"),
        ("fit X.npy --keep job -o new", "required: --erase"),
        (f"{KEEP} --method inlp -o new", "must be one of"),
        (f"{KEEP} --labels x.txt -o new", "not 'x.txt'"),
        (f"{KEEP} --labels absent.csv -o new", "absent.csv"),
        (f"{KEEP} --labels y=labels.csv -o new", "pass FILE alone"),
        (f"{KEEP} --labels gender.npy -o new", "2 columns 'gender'"),
        ("", "required: COMMAND"),
        ("erase", "invalid choice"),
        (f"{FIT} --kee job -o new", "unrecognized arguments: --kee"),
        ("apply e X.npy -o gender.npy", "'gender.npy' exists"),
        ("apply e narrow.npy -o out.npy", "3 columns, and 6 are expected"),
        ("apply e narrow.npy --in-place", "3 columns, and 6 are expected"),
        ("apply e gender.npy -o out.npy", "'gender.npy' has shape (300,)"),
        ("apply e integers.npy --in-place", "the result is float64; use -o FILE"),
        ("apply e labels.csv -o out.npy", "has no known format"),
        ("apply e broken.npy -o out.npy", "cannot be read as a .npy array"),
        ("apply e broken.npz -o out.npy", "cannot be read as a .npz file"),
        ("apply e two.npz -o out.npy", "name the array of rows with --key"),
        ("apply e two.npz --key z -o out.npy", "no array 'z'; its arrays are 'a'"),
        ("apply e X.npy --key a -o out.npy", "no file holds several"),
        ("apply e X.npy --embedding v -o out.npy", "the files hold arrays"),
        ("apply e long.npy -o out.safetensors", "can be written only as .npy"),
        ("fit X.npy --key a --erase z -o out", "no file holds several"),
        ("apply e X.npy -o out.txt", "can be written only as .npy"),
        ("apply e X.npy -o ''", "--output is empty"),
        ("apply e X.npy a.npy -o ''", "--output is empty"),
        ("apply e X.npy a.npy -o e", "is a file; several files need a folder"),
        ("apply e X.npy a.npy -o new.npy", "a folder, such as 'new'"),
        ("apply e X.npy ./X.npy -o new", "two files have the same name"),
        ("apply e X.npy --in-place --resume", "--resume is for -o"),
        ("apply e two.npz --in-place", "--in-place is for .npy"),
        ("apply X.npy e -o out.npy", "pass the eraser first"),
        ("apply e absent.npy -o out.npy", "there is no file 'absent.npy'"),
        ("apply absent X.npy -o out.npy", "there is no file 'absent'"),
        ("apply X.npy X.npy -o out.npy", "not a safetensors file"),
        ("apply moments X.npy -o out.npy", "'moments' holds moments; pass the"),
        ("apply e X.npy -o absent/out.npy", "there is no folder"),
        ("apply e X.npy", "-o/--output --in-place is required"),
        ("apply e X.npy -o out.npy --in-place", "not allowed with"),
        (
            "fit X.npy --erase job -o new --labels numbers.npy",
            "name that of a .npy file by --labels job=F",
        ),
        ("inspect X.npy", "not a safetensors file"),
        ("inspect absent", "absent"),
        ("inspect foreign", "'projection' was expected"),
    ],
)
def test_mistakes_change_no_file(bad_files: None, told: Told, command: str, text: str) -> None:
    before = {p.name: p.is_file() and p.read_bytes() for p in Path().iterdir()}
    assert text in told(*shlex.split(command), code=2)
    assert {p.name: p.is_file() and p.read_bytes() for p in Path().iterdir()} == before


def test_apply_may_overwrite_its_own_input_if_forced(eraser: sf.Projection, told: Told) -> None:
    expected = eraser(np.load("X.npy"))
    told("apply", "e", "X.npy", "-o", "X.npy", "--force")
    np.testing.assert_array_equal(np.load("X.npy"), expected)
    os.rename("e", "e.npy")
    argv = ["apply", "e.npy", "X.npy", "-o", "./e.npy", "--force"]
    assert "is an input, too" in told(*argv, code=2)
    assert sf.Projection.load("e.npy").rank == eraser.rank


@pytest.mark.parametrize(
    ("failure", "code", "text"),
    [(KeyboardInterrupt(), 130, "interrupted"), (OSError("the disk is full"), 2, "disk is full")],
)
def test_an_interrupted_apply_leaves_no_part_of_a_file(
    eraser: sf.Projection,
    told: Told,
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    code: int,
    text: str,
) -> None:
    Path("out.npy").write_text("old")
    before = sorted(os.listdir())
    real = sf.Projection.__call__
    seen: list[str] = []

    def fail(self: sf.Projection, X: NDArray[Any], labels: Any = None, **options: Any) -> Any:
        if not len(X):
            return real(self, X, labels, **options)
        seen.extend(name for name in os.listdir() if name.endswith(".partial"))
        raise failure

    monkeypatch.setattr(sf.Projection, "__call__", fail)
    argv = ["apply", "e", "X.npy", "-o", "out.npy", "--force"]
    assert text in told(*argv, code=code)
    assert len(seen) == 1
    assert sorted(os.listdir()) == before
    assert Path("out.npy").read_text() == "old"


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system reserves no space")
def test_a_full_disk_is_an_error_before_the_first_row(
    eraser: sf.Projection, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        assert size > np.load("X.npy").nbytes
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = sorted(os.listdir())
    assert "No space left" in told("apply", "e", "X.npy", "-o", "out.npy", code=2)
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pt"])
def test_other_files_of_arrays_are_read_and_written(
    eraser: sf.Projection, told: Told, suffix: str
) -> None:
    """The other arrays of a file are copied; rows are converted as in the fit."""
    X, other = np.load("X.npy").astype(np.float32), np.arange(3)
    save_rows(f"two{suffix}", X, "rows", other=other)
    told("apply", "e", f"two{suffix}", "--key", "rows", "-o", f"out{suffix}")
    found = rows.read_arrays(f"out{suffix}", "rows")
    np.testing.assert_array_equal(np.asarray(found.X), eraser(X))
    np.testing.assert_array_equal(np.asarray(found.others["other"]), other)
    assert found.metadata == ({"by": "me"} if suffix == ".safetensors" else {})
    told("apply", "e", f"two{suffix}", "--key", "rows", "-o", "out.npy")
    np.testing.assert_array_equal(np.load("out.npy"), eraser(X))
    labels = ["--labels", "labels.csv", "--erase", "gender", "--keep", "job"]
    told("fit", f"two{suffix}", "--key", "rows", *labels, "-o", "wide")
    np.save("narrow.npy", X)
    told("fit", "narrow.npy", *labels, "-o", "narrow")
    agree("wide", sf.Projection.load("narrow"))


def test_a_format_is_one_entry_of_a_table(
    eraser: sf.Projection, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: str) -> Any:
        return {"": np.loadtxt(path)}, {}

    def source(
        paths: list[str], name: None, variables: list[str], labels: object
    ) -> sf.sources.Source:
        columns = read_label_files(["labels.csv"], variables, {})
        return sf.sources.from_arrays(np.loadtxt(paths[0]), columns)

    np.savetxt("X.txt", np.load("X.npy"))
    assert "has no known format" in told("apply", "e", "X.txt", "-o", "out.npy", code=2)
    monkeypatch.setitem(rows.READERS, ".txt", rows.Reader((".npy",), read))
    told("fit", "X.txt", "--labels", "labels.csv", "--erase", "gender", "--keep", "job", "-o", "t")
    agree("t", eraser)
    told("apply", "e", "X.txt", "-o", "out.npy")
    np.testing.assert_array_equal(np.load("out.npy"), eraser(np.loadtxt("X.txt")))
    assert "finished before" in told("apply", "e", "X.txt", "-o", "out.npy", "--resume")
    table = rows.Reader((".npy",), read, option=None, labels_in_columns=True, source=source)
    monkeypatch.setitem(rows.READERS, ".txt", table)  # whose labels are columns
    told("fit", "X.txt", "--erase", "gender", "--keep", "job", "-o", "t", "--force")
    agree("t", eraser)
    assert "exclude each other" in told(
        "fit", "X.txt", "--labels", "labels.csv", "--erase", "gender", "-o", "u", code=2
    )
    assert "--in-place is for .npy" in told("apply", "e", "X.txt", "--in-place", code=2)
    assert "only as .npy" in told("apply", "e", "X.txt", "-o", "out.txt", code=2)


@pytest.mark.parametrize("content", ["array", "module", "pickle"])
def test_a_file_of_other_objects_than_tensors_is_an_error_of_one_sentence(
    eraser: sf.Projection, told: Told, content: str, torch: Any
) -> None:
    values = {"array": np.ones((3, WIDTH)), "module": torch.nn.Linear(2, 2), "pickle": Path()}
    torch.save(values[content], "x.pt")
    err = told("apply", "e", "x.pt", "-o", "y.pt", code=2)
    assert "save the tensor of rows alone" in err
    assert len(err) < 300
    assert "weights_only" not in err
    assert "\x1b" not in err


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls these tensors prototypes
@pytest.mark.parametrize("kind", ["sparse", "csr", "quantized", "nested"])
def test_tensors_that_are_not_dense_are_an_error_of_one_line(
    eraser: sf.Projection, capsys: pytest.CaptureFixture[str], kind: str, torch: Any
) -> None:
    X = torch.from_numpy(np.load("X.npy")).float()
    tensor = {
        "sparse": X.to_sparse,
        "csr": X.to_sparse_csr,
        "quantized": lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),
        "nested": lambda: torch.nested.nested_tensor([X[:3], X[:5]]),
    }[kind]()
    torch.save(tensor, "x.pt")
    for target in ("y.pt", "y.npy"):
        assert main(["apply", "e", "x.pt", "-o", target]) == 2
        assert "pass a dense tensor" in capsys.readouterr().err
        assert not Path(target).exists()
    z = np.arange(len(X)) % 2
    conditional = sf.oracle(sf.Moments().update(X, {"z": z}), erase="z")
    with pytest.raises(sf.exceptions.InputError, match="pass a dense one"):
        conditional(tensor, {"z": z})


def test_single_tensors_brain_floats_and_tokens(
    eraser: sf.Projection, told: Told, torch: Any
) -> None:
    from safetensors.torch import load_file, save_file

    X = torch.from_numpy(np.load("X.npy"))
    torch.save(X, "x.pt")
    told("apply", "e", "x.pt", "-o", "y.pt")
    assert torch.equal(torch.load("y.pt"), eraser(X))
    X = X.bfloat16().reshape(30, 10, WIDTH)
    save_file({"h": X}, "x.safetensors")
    told("apply", "e", "x.safetensors", "-o", "y.safetensors")
    assert torch.equal(load_file("y.safetensors")["h"], eraser(X))
    told("apply", "e", "x.safetensors", "-o", "y.npy")
    assert np.load("y.npy").shape == (30, 10, WIDTH)


def test_several_files_and_folders(
    eraser: sf.Projection, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkdir("in")
    for i in range(5):
        np.save(f"in/{i}.npy", np.load("X.npy")[: 10 * i])
    out = told("apply", "e", "in", "-o", "out")
    assert out.splitlines() == [f"{10 * i} rows: out/{i}.npy" for i in range(5)]
    for i in range(5):
        np.testing.assert_array_equal(np.load(f"out/{i}.npy"), eraser(np.load(f"in/{i}.npy")))
    before = sorted(os.listdir("out"))
    argv = ["apply", "e", "in/3.npy", "in/4.npy", "-o", "out"]
    assert "'out/3.npy' exists" in told(*argv, code=2)
    np.save("in/5.npy", np.ones((3, WIDTH + 1)))
    assert main(["apply", "e", "in", "-o", "out", "--force"]) == 2
    assert "7 columns" in capsys.readouterr().err
    assert sorted(os.listdir("out")) == before


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors", ".pt", ".parquet"])
def test_apply_resumes_after_a_kill(eraser: sf.Projection, told: Told, suffix: str) -> None:
    """Whole files of this eraser and these inputs are skipped; all others are written."""
    X = np.load("X.npy")
    os.mkdir("in")
    for i in range(5):
        save_rows(f"in/{i}{suffix}", X[10 * i :])
    argv = ["apply", "e", "in", *(["--embedding", "v"] if suffix == ".parquet" else [])]
    told(*argv, "-o", "expected")
    told(*argv, "-o", "out")
    old = {name: os.stat(f"out/{name}").st_mtime_ns for name in os.listdir("out")}
    os.remove(f"out/1{suffix}")
    Path(f"out/.1{suffix}.123.456.partial").write_bytes(b"killed")
    others = [f".x{suffix}.123.456.partial", f".1{suffix}.x{suffix}.123.456.partial"]
    for name in others:
        Path("out", name).write_bytes(b"of another command")
    assert "exists" in told(*argv, "-o", "out", code=2)  # control: without --resume
    out = told(*argv, "-o", "out", "--resume").splitlines()
    assert [line.startswith("finished before") for line in out] == [True, False, True, True, True]
    assert sorted(os.listdir("out")) == sorted([*others, *old])
    for name in old:
        assert Path("out", name).read_bytes() == Path("expected", name).read_bytes()
        assert (os.stat(f"out/{name}").st_mtime_ns == old[name]) == (name != f"1{suffix}")
    # Files of another eraser, of other rows, and older than their input are no whole files.
    sf.leace(sf.Moments().update(X, {"z": np.arange(N) % 2}), erase="z").save("f")
    assert "exists" in told("apply", "f", *argv[2:], "-o", "out", "--resume", code=2)
    save_rows(f"in/2{suffix}", X[20:])
    os.utime(f"out/3{suffix}", ns=(0, 0))
    assert "exists" in told(*argv, "-o", "out", "--resume", code=2)
    out = told(*argv, "-o", "out", "--resume", "--force").splitlines()
    assert [line.startswith("finished before") for line in out] == [True, True, False, False, True]


@pytest.mark.parametrize("form", ["fixed", "list", "large"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
def test_parquet_in_and_out(
    eraser: sf.Projection, told: Told, form: str, dtype: str, pa: Any
) -> None:
    from pyarrow import parquet

    X = (4 * np.load("X.npy")).astype(dtype)
    value = pa.from_numpy_dtype(X.dtype)
    lists = {
        "fixed": pa.list_(value, WIDTH),
        "list": pa.list_(value),
        "large": pa.large_list(value),
    }
    ids = [f"t{i}" for i in range(N)]
    table = pa.table({"id": ids, "v": pa.array(list(X), lists[form])}, metadata={"by": "me"})
    parquet.write_table(table, "in.parquet", row_group_size=70)
    command = ["apply", "e", "in.parquet", "--embedding"]
    assert f"{N} rows" in told(*command, "v", "-o", "out.parquet")
    found = parquet.read_table("out.parquet")
    np.testing.assert_array_equal(np.stack(found["v"].to_numpy()), eraser(X))
    assert found["id"].equals(table["id"])
    assert found.schema.metadata[b"by"] == b"me"
    assert found["v"].type == (pa.list_(pa.float64(), WIDTH) if dtype == "int64" else lists[form])
    with parquet.ParquetFile("out.parquet") as file:
        assert file.num_row_groups == 5
    assert "--embedding" in told(*command[:3], "-o", "o.parquet", code=2)
    assert "no column 'w'" in told(*command, "w", "-o", "o.parquet", code=2)
    assert "only as .parquet" in told(*command, "v", "-o", "o.npy", code=2)
    assert not Path("o.parquet").exists()


def test_an_empty_row_group_before_integers_is_left_out(
    eraser: sf.Projection, told: Told, pa: Any, pq: Any
) -> None:
    X = (10 * np.load("X.npy")).astype(np.int32)
    table = pa.table({"v": pa.array(list(X), pa.list_(pa.int32()))})
    with pq.ParquetWriter("groups.parquet", table.schema) as writer:
        for part in (table.slice(0, 0), table.slice(0, 100), table.slice(100, 0), table.slice(100)):
            writer.write_table(part)
    assert pq.ParquetFile("groups.parquet").metadata.num_row_groups > 2  # control
    out = told("apply", "e", "groups.parquet", "--embedding", "v", "-o", "out.parquet")
    assert out == f"{N} rows: out.parquet\n"
    found = np.array(pq.read_table("out.parquet")["v"].to_pylist())
    np.testing.assert_array_equal(found, eraser(X))


# -- inspect -------------------------------------------------------------------------------------


def test_inspect_an_eraser(eraser: sf.Projection, told: Told) -> None:
    out = told("inspect", "e")
    assert str(eraser.report) in out
    assert "Projection(SPLINCE, 6 features, rank 1 removed)" in out
    assert "tensor" not in out
    assert f"format 1, written by splince_fast {sf.__version__}" in out
    sf.Projection(np.eye(3)[:, :1], np.eye(3)[:, :1], np.zeros(3)).save("custom")
    assert "no report" in told("inspect", "custom")


def test_inspect_as_json(eraser: sf.Projection, told: Told) -> None:
    found = json.loads(told("inspect", "e", "--json"))
    assert eraser.report is not None
    assert sf.Report.from_dict(found["report"]) == eraser.report
    assert (found["kind"], found["rank"], found["tensors"]["left"]) == ("projection", 1, [6, 1])
    labels = {"g": np.arange(N) % 2 == 0, "h": np.arange(N) % 3, "age": np.load("X.npy")[:, 0]}
    sf.Moments(joint=[("g", "h")]).update(np.load("X.npy"), labels).save("m")
    found = json.loads(told("inspect", "m", "--json"))
    variables = {json.dumps(v["name"]): v for v in found["variables"]}
    assert variables['"g"']["classes"] == [[False, 150], [True, 150]]
    assert variables['"age"'] == {"name": "age", "kind": "continuous"}
    assert [[False, 0], 50] in variables['["g", "h"]']["classes"]
    assert "variable ('g', 'h'): classes (6)" in told("inspect", "m")


def test_inspect_moments(here: Path, told: Told) -> None:
    X = np.load("X.npy")
    labels = {"g": np.load("gender.npy"), "many": np.arange(N) % 12, "age": X[:, 0]}
    sf.Moments().update(X, labels, sample_weight=np.full(N, 0.5)).save("m")
    out = told("inspect", "m")
    women = int(np.count_nonzero(labels["g"] == 0))
    assert f"Moments({N} rows, 6 features" in out
    assert "weight 150" in out
    assert f"variable 'g': classes (2) {{0: {women}, 1: {N - women}}}" in out
    assert "9: 25, ...}" in out
    assert "variable 'age': continuous" in out


# -- the process ---------------------------------------------------------------------------------


def test_a_real_process(here: Path) -> None:
    command = "import runpy; runpy.run_module('splince_fast', run_name='__main__')"
    fitted = script(command, *shlex.split(KEEP), "-o", "e", flags=("-W", "error"))
    assert fitted.splitlines()[-1].startswith("eraser: e ")
    assert fitted.startswith("'gender' is erased exactly")
    script(command, "apply", "e", "X.npy", "-o", "out.npy", flags=("-W", "error"))
    np.testing.assert_array_equal(np.load("out.npy"), sf.Projection.load("e")(np.load("X.npy")))
    failed = run(command, "apply", "e", "X.npy", "-o", "out.npy")
    assert (failed.returncode, failed.stderr) == (
        2,
        "splince-fast: error: 'out.npy' exists; name another file, or overwrite it with --force\n",
    )


def test_a_reader_that_has_gone_and_a_terminal_without_letters(here: Path) -> None:
    """A closed pipe ends it in silence; names that the terminal lacks are escaped."""
    sf.Moments().update(np.load("X.npy"), {"z": ["é", "ü", "n"] * 100}).save("m")
    source = str(Path(sf.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": source, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "splince_fast", "inspect", "m"]
    shown = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert rb"'\xe9': 100" in shown.stdout
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        command, env=environment, stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (process.returncode, process.stderr) == (141, b"")


def test_control_c_while_it_imports(here: Path) -> None:
    """The first second goes into imports; what they raise is told like a later Ctrl-C."""
    text = (
        "import sys, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from splince_fast.cli import main\n"
        "assert 'numpy' not in sys.modules\n"
        "class Stop:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'splince_fast.projection': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Stop())\n"
        "sys.exit(main(['apply', 'e', 'X.npy', '-o', 'out.npy']))\n"
    )
    done = run(text)
    assert (done.returncode, done.stderr) == (130, "splince-fast: interrupted\n")


def test_help_loads_neither_the_demonstration_nor_heavy_libraries(here: Path) -> None:
    out = script(
        "import sys; from splince_fast.cli import main; assert main(['--version']) == 0; "
        "assert main(['demo', '--help']) == 0; "
        "print(sorted({'matplotlib', 'sklearn', 'torch', 'pandas', 'pyarrow', "
        "'splince_fast.demo.experiment'} & set(sys.modules)))"
    )
    assert out.startswith(f"splince-fast {sf.__version__}\n")
    assert "--no-figure" in out
    assert out.endswith("[]\n")


# --- erasers that need labels --------------------------------------------------------------------


def test_oracle_is_fitted_and_applied_with_labels(here: Path, told: Told) -> None:
    X, z, y = (np.load(f"{name}.npy") for name in ("X", "gender", "numbers"))
    np.save("z.npy", z)
    np.save("y.npy", y)
    fit = ["fit", "X.npy", "--labels", "z.npy", "--erase", "z", "-o", "e"]
    apply = ["apply", "e", "X.npy", "--labels", "z.npy", "-o"]
    told(*fit, "--labels", "y.npy", "--keep", "y", "--method", "Oracle")
    told(*apply, "out.npy")
    moments = sf.Moments().update(X, {"z": z, "y": y})
    expected = sf.oracle(moments, erase="z", keep="y")(X, {"z": z})
    np.testing.assert_allclose(np.load("out.npy"), expected, atol=1e-10)
    unlabelled = ["apply", "e", "X.npy", "-o", "out.npy", "--force"]
    assert "needs the labels of 'z'" in told(*unlabelled, code=2)
    assert "the same name" in told("apply", "e", "X.npy", *apply[2:], ".", code=2)
    assert "ConditionalEraser(oracle" in told("inspect", "e")
    told(*fit, "--force")
    assert "needs no labels" in told(*apply, "out.npy", "--force", code=2)


def test_tables_hold_the_labels_that_an_eraser_needs(
    here: Path, told: Told, pa: Any, pq: Any
) -> None:
    X, z = np.load("X.npy"), np.array(["a", "b"])[np.load("gender.npy")]
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(X.ravel()), WIDTH), "z": z})
    pq.write_table(table, "t.parquet")
    eraser = sf.oracle(sf.Moments().update(X, {"z": z}), erase="z")
    eraser.save("e")
    command = ["apply", "e", "t.parquet", "--embedding", "x", "-o", "u.parquet"]
    told(*command)
    found = np.stack(pq.read_table("u.parquet")["x"].to_pylist())
    np.testing.assert_allclose(found, eraser(X, {"z": z}), atol=1e-12)
    pq.write_table(table.select(["x"]), "t.parquet")
    assert "no column 'z'" in told(*command, "--force", code=2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("use rank_tol=1e-08 or shrinkage='oas'.", "use --rank-tol 1e-08 or --shrinkage oas."),
        ("leave keep= out", "leave --keep out"),
        ("shrinkage=0.5, or fewer rows", "--shrinkage 0.5, or fewer rows"),
        ("no file 'data/keep=1/a.npy'", "no file 'data/keep=1/a.npy'"),
        ("no file 'keep=1'", "no file 'keep=1'"),
        ("pass refine= a source", "pass refine= a source"),  # no flag of the command
        ("keep is 3; it must be None, 'oas' or 1", "--keep is 3; it must be 'oas' or 1"),
        ("n_seeds is 0", "--seeds is 0"),
        ("pass rank_tol, too, or leave keep out", "pass --rank-tol, too, or leave --keep out"),
        ("what it must keep is 'rank_tol'", "what it must keep is 'rank_tol'"),
        ("pass keep=None", "leave --keep out"),
        ("p = P(z = rank_tol)", "p = P(z = rank_tol)"),
        ("repair them, e.g. X = X[np.isfinite(X).all(axis=1)]. Or", "repair them. Or"),
        (
            "pass kinds={'a': 'classes'} (on the command line: --kind a=classes); kinds={...: "
            "'continuous'}",
            "pass --kind a=classes; --kind NAME=continuous",
        ),
        ("it must be 'sal', or a function of moments", "it must be 'sal'"),
        ("labels['z'] has 3 rows", "column 'z' of the labels has 3 rows"),
        ("variable 'task' and variable 'z'", "variable 'job' and variable 'z'"),
    ],
)
def test_messages_name_the_flags_of_the_command(text: str, expected: str) -> None:
    args = argparse.Namespace(
        keep=None, kind=None, rank_tol=None, seeds=None, shrinkage=None, variables={"task": "job"}
    )
    assert _with_flags(text, args) == expected
