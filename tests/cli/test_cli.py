"""The command line: whole jobs on files, and messages on mistakes."""

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
import pyarrow as pa
import pyarrow.parquet as pq
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
Cli = Callable[..., str]
FIT = "fit X.npy --labels labels.csv --erase gender"
KEEP = f"{FIT} --keep job"


@pytest.fixture
def cli(told: Callable[..., str]) -> Cli:
    """Run a command line; return stdout after success and stderr after a mistake."""
    return lambda line, code=0: told(*shlex.split(line), code=code)


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
    arrays = {"X": X, "a": X[:100], "b": X[100:], "gender": gender, "numbers": job, "same": gender}
    for name, array in arrays.items():
        np.save(name, array)
    lines = [f"{'fm'[g]},{j},{a!r}" for g, j, a in zip(gender, job, age.tolist(), strict=True)]
    Path("labels.csv").write_text("\n".join(["gender,job,age", *lines]) + "\n")
    return tmp_path


def labels_of(*names: str) -> dict[str, Any]:
    table = np.genfromtxt("labels.csv", delimiter=",", names=True, dtype=None, encoding="utf-8")
    return {name: table[name] for name in names}


def by_hand(keep: str | None = "job", **kinds: str) -> sf.Projection:
    """The eraser of the files by the Python interface."""
    labels = labels_of("gender", "job", "age")
    moments = sf.Moments(kinds=kinds).update(np.load("X.npy"), labels)
    if keep is None:
        return sf.leace(moments, erase="gender")
    return sf.splince(moments, erase="gender", keep=keep)


@pytest.fixture
def eraser(here: Path) -> sf.Projection:
    found = by_hand()
    found.save("e")
    return found


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
        column = pa.array(list(X), pa.list_(pa.float64()))
        pq.write_table(pa.table({"v": column}), path, row_group_size=100)


# -- fit -----------------------------------------------------------------------------------------


def test_fit_prints_the_report_and_writes_the_eraser(here: Path, cli: Cli) -> None:
    out = cli(f"{KEEP} -o e")
    agree("e", by_hand())
    report = report_of("e")
    words = " ".join(report.explain().split())
    assert words.startswith("'gender' is erased exactly from these rows")
    *summary, last = out.splitlines()
    assert " ".join(" ".join(summary).split()) == words
    assert last.startswith("eraser: e ")
    shown = cli("inspect e")
    assert str(report) in shown
    assert words in " ".join(shown.split())


def test_methods_and_their_options(here: Path, cli: Cli) -> None:
    """Rows in one file and in shards."""
    moments = sf.Moments().update(np.load("X.npy"), labels_of("gender", "job"))
    for options, expected in {
        "--method leace": by_hand(None),
        "--keep age": by_hand("age"),
        "--keep job --kind job=continuous": by_hand(job="continuous"),
        "--keep job --shrinkage .25": sf.splince(
            moments, erase="gender", keep="job", shrinkage=0.25
        ),
        "--method leace --shrinkage oas": sf.leace(moments, erase="gender", shrinkage="oas"),
        "--method Mean-Projection": sf.mean_projection(moments, erase="gender"),
        "--method sal": sf.sal(moments, erase="gender"),
        "--erase job --method leace": sf.leace(moments, erase=["gender", "job"]),
    }.items():
        cli(f"fit a.npy b.npy --labels labels.csv --erase gender {options} -o e --force")
        agree("e", expected)
        assert sf.Projection.load("e").method == expected.method


def test_shrinkage_is_chosen_on_folds(here: Path, cli: Cli) -> None:
    X, gender, group = np.load("X.npy"), np.load("gender.npy"), np.arange(N) // 3
    np.save("group.npy", group)
    line = "fit X.npy --labels gender.npy --erase gender --force -o e"
    source = sf.sources.from_npy("X.npy", {"gender": gender})
    source.files += ("gender.npy",)
    sf.Moments.from_blocks(source, folds=2, checkpoint="folds")
    assert sf.Moments.load("folds").n_rows == N  # of folds, their sum
    assert "holds 'folds', and 'moments' was expected" in cli(f"{line} --checkpoint folds", 2)
    for flags, groups in (
        ("", None),
        ("--checkpoint folds", None),
        ("--labels group.npy --groups group", "group"),
    ):
        cli(f"{line} {flags} --shrinkage cv")
        folds = sf.Folds(2, groups=groups).update(X, {"gender": gender, "group": group})
        expected = sf.leace(folds, erase="gender", shrinkage="cv")
        assert expected.report is not None
        assert report_of("e").shrinkage == expected.report.shrinkage
        agree("e", expected)
    assert not Path("folds").exists()
    cli(f"{line} --shrinkage cv --save-moments m")
    assert sf.Moments.load("m").n_rows == N


def test_options_of_the_moments_reach_them(here: Path, cli: Cli) -> None:
    line = "fit a.npy b.npy --labels labels.csv --erase gender --method leace --checkpoint c"
    source = sf.sources.from_npy(["a.npy", "b.npy"], labels_of("gender"))
    for flags, parameters, again in (
        ("--subsample 0.5", {"subsample": 0.5}, {}),
        ("--subsample auto", {"subsample": "auto"}, {}),
        ("--covariance-type diag", {"covariance_type": "diag"}, {}),
        (
            "--covariance-type diag --passes 2",
            {"covariance_type": "diag"},
            {"refine": source, "passes": 2},
        ),
    ):
        moments = sf.Moments.from_blocks(source, **parameters)
        expected = sf.leace(moments, erase="gender", **again)
        cli(f"{line} --force {flags} -o e")
        assert str(expected.report) in cli("inspect e")
        agree("e", expected)
    assert report_of("e").diagonal.passes == 2
    cli(f"{line} --force --subsample 1 -o e")  # control: all rows, as without the option
    assert (report_of("e").sampling, report_of("e").held_out) == (None, None)


def test_a_warning_takes_one_line_and_is_told_once(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    n = 9000  # three blocks
    np.save("long.npy", np.random.default_rng(0).normal(size=(n, 2)))
    np.save("number.npy", np.arange(n) % 1500)
    np.save("years.npy", np.random.default_rng(0).integers(18, 80, N))
    same = "fit X.npy --labels gender.npy --labels same.npy --erase gender --keep same"
    dropped = "1 of 1 direction(s) of 'same' were dropped"
    for line, text, left, in_report in (
        (f"{same} --on-infeasible drop", dropped, "(up to rounding)", True),
        (f"{same} --max-amplification 1", dropped, "above 1", True),
        (
            "fit long.npy --labels number.npy --erase number --method leace",
            "variable 'number' holds integers, read as classes",
            "--kind number=",
            False,
        ),
        (
            "fit X.npy --labels years.npy --erase years --method leace",
            "'years' was read as 62 classes, and erasing takes 6 of 6 dimensions",
            "--kind years=continuous",
            True,
        ),
    ):
        assert main([*line.split(), "--force", "-o", "e"]) == 0
        out, err = capsys.readouterr()
        assert f"splince-fast: warning: {text}" in err
        assert err.count(text) == 1
        assert left in err
        assert (text in " ".join(out.split())) is in_report
        assert text is not dropped or err.count("\n") == 1


def test_parquet_files_of_embeddings_or_of_labels(here: Path, cli: Cli) -> None:
    from pyarrow import csv

    labels = csv.read_csv("labels.csv")
    pq.write_table(labels, "labels.parquet")
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.load("X.npy").ravel()), WIDTH)
    pq.write_table(labels.append_column("vector", vectors), "all.parquet", row_group_size=70)
    names = "--erase gender --keep job -o"
    cli(f"fit X.npy --labels labels.parquet {names} one")
    cli(f"fit all.parquet --embedding vector {names} two")
    agree("one", by_hand())
    agree("two", by_hand())
    Path("bad.parquet").write_bytes(b"PAR1 or not")
    for line, text in (
        ("all.parquet", "is a table; name its column of vectors with --embedding"),
        ("all.parquet --embedding vector --labels labels.csv", "exclude each other"),
        ("all.parquet X.npy", "different formats"),
        ("X.npy --labels bad.parquet", "cannot be read as Parquet"),
    ):
        assert text in cli(f"fit {line} {names} e", 2)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
def test_a_checkpoint_is_refused_after_a_change_of_rows_or_labels(
    here: Path, cli: Cli, suffix: str
) -> None:
    """The shape of the rows and the names of the files are the same; only their times differ."""
    X, z = np.random.default_rng(0).normal(size=(3 * 4096, 4)), np.arange(3 * 4096) % 2
    np.save("z", z)
    save_rows(f"Y{suffix}", X)
    line = f"fit Y{suffix} --labels z.npy --labels same=z.npy --erase z --keep same"
    line += " -o e --checkpoint c --force"
    assert "cannot keep" in cli(line, 2)  # leaves a complete checkpoint
    assert "cannot keep" in cli(line, 2)  # control: unchanged files are accepted
    X[5000] += 1.0
    save_rows(f"Y{suffix}", X)
    assert "has changed since" in cli(line, 2)
    os.remove("c")
    assert "cannot keep" in cli(line, 2)
    z[5000] = 1 - z[5000]
    np.save("z", z)
    assert "z.npy has changed since" in cli(line, 2)


def test_shards_of_a_folder_whose_names_do_not_sort_by_number_are_refused_with_labels(
    here: Path, cli: Cli
) -> None:
    """By name shard-10 comes before shard-2, so the second label would go to another row."""
    parts = np.split(np.load("X.npy"), [100])
    for folder, names in (("plain", ("2", "10")), ("padded", ("02", "10"))):
        os.mkdir(folder)
        for name, part in zip(names, parts, strict=True):
            np.save(f"{folder}/shard-{name}.npy", part)
    options = "--labels labels.csv --erase gender -o"
    assert "'plain' are sorted by name, which is another" in cli(f"fit plain {options} e", 2)
    cli(f"fit plain/shard-2.npy plain/shard-10.npy {options} e1")
    cli(f"fit padded {options} e2")
    cli("apply e2 plain -o erased")  # without labels the order is no matter
    agree("e1", by_hand(None))
    agree("e2", by_hand(None))


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_a_file_that_was_replaced_since_its_header_was_read_is_refused(
    here: Path, suffix: str
) -> None:
    path, labels = f"Y{suffix}", {"z": [0, 1, 0, 1, 0, 1]}
    save_rows(path, np.ones((6, 2)))
    source = rows.reader_of(path).source([path], None, ["z"], lambda: labels)
    assert len(list(source)) == 1  # control: the same file, read again
    for other in (np.ones((4, 2)), np.ones((6, 2), np.float32)):
        save_rows(path, other)
        with pytest.raises(InputError, match=r"now holds float.* of shape \(.*make a new source"):
            list(source)


def test_a_checkpoint_goes_when_the_eraser_is_written_and_moments_are_saved(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "fit X.npy --labels gender.npy --labels same.npy --erase gender --keep same"
    line += " -o e --checkpoint c --save-moments m --force"
    assert main(line.split()) == 2
    assert "SPLINCE cannot keep 'same' while it erases 'gender'" in capsys.readouterr().err
    assert sf.Moments.load("m").n_rows == N  # also if no eraser exists
    assert Path("c").exists()
    assert not Path("e").exists()
    os.remove("m")
    assert main(f"{line} --on-infeasible drop".split()) == 0
    assert "moments: m\n" in capsys.readouterr().out
    assert not Path("c").exists()
    agree("e", sf.leace(sf.Moments.load("m"), erase="gender"))


@pytest.mark.parametrize("option", ["--output", "--checkpoint", "--save-moments"])
def test_outputs_are_refused_before_anything_is_read(
    here: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """Without the check, an empty path (an unset variable) is an error after the whole pass."""

    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the rows were read")

    monkeypatch.setattr(sf.Moments, "from_blocks", never)
    os.mkdir("folder")
    rest = "" if option == "--output" else "-o e"
    for path in ("''", "folder", "X.npy"):
        assert option in cli(f"{KEEP} --force {rest} {option} {path}", 2)


# -- labels --------------------------------------------------------------------------------------


DIGITS = "7" * 5000


def csv_column(text: str, suffix: str = ".csv", **kinds: str) -> Any:
    """Column v as a list of names with None, or as an array of floats."""
    path = Path(f"file{suffix}")
    path.write_bytes(text.encode(errors="surrogateescape"))
    found = read_label_files([str(path)], ["v"], kinds)["v"]
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
        ("v\tw\n1\t\n\t2\n2\t\n", {"suffix": ".tsv"}, [1, None, 2]),
        ('v\n1\n""\n2\n\n\n', {}, [1, None, 2]),
        ("v,w\n,1\n,2\n", {}, [None, None]),
        ("v,v2,v2\n1,2,3\n", {}, [1]),
        ("v\n", {}, []),
        ("v\n1.5\nNA\n2.25\n", {"v": "classes"}, ["1.5", "NA", "2.25"]),
        ('v\n01\n1\n""\n', {"v": "classes"}, ["01", "1", None]),  # codes of places
        (f"v\n{DIGITS}\n1\n", {"v": "classes"}, [DIGITS, "1"]),
        ("v\n1.5\nNA\n2.25\n", {}, (LabelError, r"numbers and text such as 'NA'.*v=classes")),
        ("v\n1\nunknown\n", {}, (LabelError, "'unknown'")),
        (f"v\n{DIGITS}\n1\n", {}, (LabelError, r"an integer beyond 64 bits.*--kind v=classes")),
        (f"v\n{2**63}\n1\n", {}, (LabelError, r"an integer beyond 64 bits")),
        ("v,w\n1,2\n3\n", {}, (LabelError, "1 fields in line 3, and 2 in its header")),
        ("v,w\n1,2,3\n", {}, (LabelError, "3 fields in line 2")),
        ("v\n1\n\n2\n", {}, (LabelError, r'0 fields in line 3, .* missing label .* ""')),
        ('v\n"1\n', {}, (InputError, "cannot be read")),
        ("w\n1\n", {}, (UnknownVariableError, "the variable 'v'; the variables are 'w'")),
        ("", {}, (UnknownVariableError, "none")),
        ("v,v\n1,2\n", {}, (LabelError, "2 columns 'v'")),
        ("v\nm\udce4dchen\n", {}, (InputError, "UTF-8")),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_csv_files(here: Path, text: str, options: dict[str, str], expected: Any) -> None:
    if isinstance(expected, tuple):
        error: type[SplinceError] = expected[0]
        with pytest.raises(error, match=expected[1]):
            csv_column(text, **options)
    else:
        assert csv_column(text, **options) == expected


def test_npy_files_of_labels(here: Path) -> None:
    """The name of a file may contain "=", which separates NAME and FILE."""
    np.save("p=2.npy", np.array(["x", "y"]))
    assert list(read_label_files(["p=2.npy"], ["p=2"], {})["p=2"]) == ["x", "y"]
    assert list(read_label_files(["v=p=2.npy"], ["v"], {})["v"]) == ["x", "y"]
    np.save("objects.npy", np.array([None, "a"]), allow_pickle=True)
    Path("empty.npy").touch()
    for name, text in (("objects", "not of Python objects"), ("empty", r"empty\.npy")):
        with pytest.raises(InputError, match=text):
            read_label_files([f"{name}.npy"], [name], {})


# -- apply ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", ">f4", "int32", "bool"])
@pytest.mark.parametrize(("order", "n"), [("C", 0), ("C", 1), ("F", N)])
def test_apply_writes_the_erased_rows(
    eraser: sf.Projection, cli: Cli, dtype: str, order: str, n: int
) -> None:
    X = np.asarray(2 * np.load("X.npy")[:n], dtype=dtype, order=order)  # type: ignore[call-overload]
    np.save("in.npy", X)
    assert cli("apply e in.npy -o out.npy") == f"{n} rows: out.npy\n"
    out = np.load("out.npy")
    expected = eraser(X)
    assert out.dtype == expected.dtype
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(np.load("in.npy"), X)


def test_in_place_is_refused_where_twice_is_not_once(here: Path, cli: Cli) -> None:
    X, gender = np.load("X.npy"), np.load("gender.npy")
    labels = {"gender": gender, "job": np.load("numbers.npy")}
    moments = sf.Moments().update(X, labels)
    sal = sf.sal(moments, erase="gender")
    after = sf.Moments().update(sal(X), labels)
    erasers = {
        "oracle": sf.oracle(moments, erase="gender"),
        "partial": sf.leace(moments, erase="gender").scaled(0.5),
        "repaired": sf.repair(after, before=moments, keep="job") @ sal,
        "splince": sf.splince(moments, erase="gender", keep="job"),
        "sal": sal,
    }
    refused = set()
    for name, eraser in erasers.items():
        eraser.save(name)
        np.save("copy.npy", X)
        once = eraser(X, {"gender": gender})
        if np.abs(eraser(once, {"gender": gender}) - once).max() < 1e-9:
            assert cli(f"apply {name} copy.npy --in-place") == f"{N} rows: copy.npy\n"
            np.testing.assert_array_equal(np.load("copy.npy"), once)
            cli(f"apply {name} copy.npy --in-place")
            np.testing.assert_allclose(np.load("copy.npy"), once, atol=1e-13)
        else:
            refused.add(name)
            assert "changes erased rows again" in cli(f"apply {name} copy.npy --in-place", 2)
            np.testing.assert_array_equal(np.load("copy.npy"), X)
    assert {"oracle", "partial"} <= refused < {*erasers}  # control


def test_apply_needs_memory_for_a_piece_only(eraser: sf.Projection, cli: Cli) -> None:
    X = np.ones((1_000_000, WIDTH), np.float16)  # 12 MB, 24 MB in the precision of the work
    np.save("in.npy", X)
    cli("apply e X.npy -o warm.npy")

    def peak(job: Callable[[], Any]) -> int:
        tracemalloc.start()
        job()
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    assert peak(lambda: main(["apply", "e", "in.npy", "-o", "out.npy"])) < 6e6
    assert peak(lambda: eraser(np.load("in.npy"))) > 2e7  # the control holds input and output


def test_apply_may_overwrite_its_own_input_if_forced(eraser: sf.Projection, cli: Cli) -> None:
    expected = eraser(np.load("X.npy"))
    cli("apply e X.npy -o X.npy --force")
    np.testing.assert_array_equal(np.load("X.npy"), expected)
    os.rename("e", "e.npy")
    assert "is an input, too" in cli("apply e.npy X.npy -o ./e.npy --force", 2)
    assert sf.Projection.load("e.npy").rank == eraser.rank


@pytest.mark.parametrize(
    ("failure", "code", "text"),
    [(KeyboardInterrupt(), 130, "interrupted"), (OSError("the disk is full"), 2, "disk is full")],
)
def test_an_interrupted_apply_leaves_no_part_of_a_file(
    eraser: sf.Projection, cli: Cli, monkeypatch: pytest.MonkeyPatch, failure: BaseException,
    code: int, text: str,
) -> None:  # fmt: skip
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
    assert text in cli("apply e X.npy -o out.npy --force", code)
    assert len(seen) == 1
    assert sorted(os.listdir()) == before
    assert Path("out.npy").read_text() == "old"


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system reserves no space")
def test_a_full_disk_is_an_error_before_the_first_row(
    eraser: sf.Projection, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        assert size > np.load("X.npy").nbytes
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = sorted(os.listdir())
    assert "No space left" in cli("apply e X.npy -o out.npy", 2)
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pt"])
def test_other_files_of_arrays_are_read_and_written(
    eraser: sf.Projection, cli: Cli, suffix: str
) -> None:
    """The other arrays of a file are copied; rows are converted as in the fit."""
    X, other = np.load("X.npy").astype(np.float32), np.arange(3)
    save_rows(f"two{suffix}", X, "rows", other=other)
    cli(f"apply e two{suffix} --key rows -o out{suffix}")
    _, arrays, metadata = rows.read_arrays(f"out{suffix}", "rows")
    np.testing.assert_array_equal(np.asarray(arrays["rows"]), eraser(X))
    np.testing.assert_array_equal(np.asarray(arrays["other"]), other)
    assert metadata == ({"by": "me"} if suffix == ".safetensors" else {})
    cli(f"apply e two{suffix} --key rows -o out.npy")
    np.testing.assert_array_equal(np.load("out.npy"), eraser(X))
    np.save("narrow.npy", X)
    for name, file in (("wide", f"two{suffix} --key rows"), ("narrow", "narrow.npy")):
        cli(f"fit {file} --labels labels.csv --erase gender --keep job -o {name}")
    agree("wide", sf.Projection.load("narrow"))


def test_a_format_is_one_entry_of_a_table(
    eraser: sf.Projection, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: str) -> Any:
        return {"": np.loadtxt(path)}, {}

    np.savetxt("X.dat", np.load("X.npy"))
    assert "is or holds no file of rows" in cli("apply e X.dat -o out.npy", 2)
    monkeypatch.setitem(rows.READERS, ".dat", rows.Reader((".npy",), read))
    cli("fit X.dat --labels labels.csv --erase gender --keep job -o t")
    agree("t", eraser)
    cli("apply e X.dat -o out.npy")
    np.testing.assert_array_equal(np.load("out.npy"), eraser(np.loadtxt("X.dat")))
    assert "finished before" in cli("apply e X.dat -o out.npy --resume")
    assert "--in-place is for .npy" in cli("apply e X.dat --in-place", 2)
    assert "only as .npy" in cli("apply e X.dat -o out.dat", 2)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls some tensors prototypes
@pytest.mark.parametrize(
    "kind", ["array", "module", "pickle", "sparse", "csr", "quantized", "nested"]
)
def test_objects_that_are_no_dense_tensors_are_an_error_of_one_line(
    eraser: sf.Projection, cli: Cli, kind: str, torch: Any
) -> None:
    X = torch.from_numpy(np.load("X.npy")).float()
    content = {
        "array": lambda: np.ones((3, WIDTH)),
        "module": lambda: torch.nn.Linear(2, 2),
        "pickle": Path,
        "sparse": X.to_sparse,
        "csr": X.to_sparse_csr,
        "quantized": lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),
        "nested": lambda: torch.nested.nested_tensor([X[:3], X[:5]]),
    }
    torch.save(content[kind](), "x.pt")
    is_tensor = kind not in ("array", "module", "pickle")
    for target in ("y.pt", "y.npy"):
        err = cli(f"apply e x.pt -o {target}", 2)
        assert ("pass a dense" if is_tensor else "save the tensor of rows alone") in err
        assert len(err) < 300
        assert "weights_only" not in err
        assert not Path(target).exists()


def test_single_tensors_brain_floats_and_tokens(
    eraser: sf.Projection, cli: Cli, torch: Any
) -> None:
    from safetensors.torch import load_file, save_file

    X = torch.from_numpy(np.load("X.npy"))
    torch.save(X, "x.pt")
    cli("apply e x.pt -o y.pt")
    assert torch.equal(torch.load("y.pt"), eraser(X))
    X = X.bfloat16().reshape(30, 10, WIDTH)
    save_file({"h": X}, "x.safetensors")
    cli("apply e x.safetensors -o y.safetensors")
    assert torch.equal(load_file("y.safetensors")["h"], eraser(X))
    cli("apply e x.safetensors -o y.npy")
    assert np.load("y.npy").shape == (30, 10, WIDTH)


def test_several_files_and_folders(
    eraser: sf.Projection, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkdir("in")
    for i in range(5):
        np.save(f"in/{i}.npy", np.load("X.npy")[: 10 * i])
    out = cli("apply e in -o out")
    assert out.splitlines() == [f"{10 * i} rows: out/{i}.npy" for i in range(5)]
    for i in range(5):
        np.testing.assert_array_equal(np.load(f"out/{i}.npy"), eraser(np.load(f"in/{i}.npy")))
    before = sorted(os.listdir("out"))
    assert "'out/3.npy' exists" in cli("apply e in/3.npy in/4.npy -o out", 2)
    np.save("in/5.npy", np.ones((3, WIDTH + 1)))
    assert main(["apply", "e", "in", "-o", "out", "--force"]) == 2
    assert "7 columns" in capsys.readouterr().err
    assert sorted(os.listdir("out")) == before


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors", ".pt", ".parquet"])
def test_apply_resumes_after_a_kill(eraser: sf.Projection, cli: Cli, suffix: str) -> None:
    """Whole files of this eraser and these inputs are skipped; all others are written."""
    X = np.load("X.npy")
    os.mkdir("in")
    for i in range(5):
        save_rows(f"in/{i}{suffix}", X[10 * i :])
    line = "apply e in" + " --embedding v" * (suffix == ".parquet")
    cli(f"{line} -o expected")
    cli(f"{line} -o out")
    old = {name: os.stat(f"out/{name}").st_mtime_ns for name in os.listdir("out")}
    os.remove(f"out/1{suffix}")
    Path(f"out/.1{suffix}.123.456.partial").write_bytes(b"killed")
    others = [f".x{suffix}.123.456.partial", f".1{suffix}.x{suffix}.123.456.partial"]
    for name in others:
        Path("out", name).write_bytes(b"of another command")
    assert "exists" in cli(f"{line} -o out", 2)  # control: without --resume

    def skipped(flags: str) -> list[bool]:
        lines = cli(f"{line} -o out {flags}").splitlines()
        return [text.startswith("finished before") for text in lines]

    assert skipped("--resume") == [True, False, True, True, True]
    assert sorted(os.listdir("out")) == sorted([*others, *old])
    for name in old:
        assert Path("out", name).read_bytes() == Path("expected", name).read_bytes()
        assert (os.stat(f"out/{name}").st_mtime_ns == old[name]) == (name != f"1{suffix}")
    # Files of another eraser, of other rows, and older than their input are no whole files.
    sf.leace(sf.Moments().update(X, {"z": np.arange(N) % 2}), erase="z").save("f")
    assert "exists" in cli(line.replace(" e ", " f ") + " -o out --resume", 2)
    save_rows(f"in/2{suffix}", X[20:])
    tail = X[40:].copy()
    tail[-1] += 1
    save_rows(f"in/4{suffix}", tail)
    os.utime(f"in/4{suffix}", ns=(0, 0))
    os.utime(f"out/3{suffix}", ns=(0, 0))
    assert "exists" in cli(f"{line} -o out --resume", 2)
    assert skipped("--resume --force") == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("form", "dtype"),
    [("fixed", "float32"), ("list", "float16"), ("large", "int64"), ("fixed", "int64")],
)
def test_parquet_in_and_out(eraser: sf.Projection, cli: Cli, form: str, dtype: str) -> None:
    """Row groups stay as they are, without empty ones."""
    X = (4 * np.load("X.npy")).astype(dtype)
    value = pa.from_numpy_dtype(X.dtype)
    lists = {
        "fixed": pa.list_(value, WIDTH),
        "list": pa.list_(value),
        "large": pa.large_list(value),
    }
    ids = [f"t{i}" for i in range(N)]
    table = pa.table({"id": ids, "v": pa.array(list(X), lists[form])}, metadata={"by": "me"})
    with pq.ParquetWriter("in.parquet", table.schema) as writer:
        for part in (slice(0), slice(100), slice(100, 100), slice(100, N)):
            writer.write_table(table[part])
    assert pq.ParquetFile("in.parquet").num_row_groups > 2  # control
    assert cli("apply e in.parquet --embedding v -o out.parquet") == f"{N} rows: out.parquet\n"
    found = pq.read_table("out.parquet")
    np.testing.assert_array_equal(np.stack(found["v"].to_numpy()), eraser(X))
    assert found["id"].equals(table["id"])
    assert found.schema.metadata[b"by"] == b"me"
    assert found["v"].type == (pa.list_(pa.float64(), WIDTH) if dtype == "int64" else lists[form])
    assert pq.ParquetFile("out.parquet").num_row_groups == 2
    for flags, text in (
        ("-o o.parquet", "--embedding"),
        ("--embedding w -o o.parquet", "no column 'w'"),
        ("--embedding v -o o.npy", "only as .parquet"),
    ):
        assert text in cli(f"apply e in.parquet {flags}", 2)
    assert not Path("o.parquet").exists()


# -- erasers that need labels --------------------------------------------------------------------


def test_oracle_is_fitted_and_applied_with_labels(here: Path, cli: Cli) -> None:
    X, z, y = (np.load(f"{name}.npy") for name in ("X", "gender", "numbers"))
    fit = "fit X.npy --labels gender.npy --erase gender -o e"
    apply = "apply e X.npy --labels gender.npy -o"
    cli(f"{fit} --labels numbers.npy --keep numbers --method Oracle")
    cli(f"{apply} out.npy")
    moments = sf.Moments().update(X, {"z": z, "y": y})
    expected = sf.oracle(moments, erase="z", keep="y")(X, {"z": z})
    np.testing.assert_allclose(np.load("out.npy"), expected, atol=1e-10)
    assert "needs the labels of 'gender'" in cli("apply e X.npy -o out.npy --force", 2)
    assert "one file at a time" in cli("apply e X.npy a.npy --labels gender.npy -o out", 2)
    assert "ConditionalEraser(oracle" in cli("inspect e")
    Path("numbers.csv").write_text("\n".join(["gender", *map(str, z)]))
    cli("apply e X.npy --labels numbers.csv -o again.npy")
    np.testing.assert_array_equal(np.load("again.npy"), np.load("out.npy"))
    cli(f"{fit} --force")
    assert "needs no labels" in cli(f"{apply} out.npy --force", 2)


def test_tables_hold_the_labels_that_an_eraser_needs(here: Path, cli: Cli) -> None:
    X, z = np.load("X.npy"), np.array(["a", "b"])[np.load("gender.npy")]
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(X.ravel()), WIDTH), "z": z})
    pq.write_table(table, "t.parquet")
    eraser = sf.oracle(sf.Moments().update(X, {"z": z}), erase="z")
    eraser.save("e")
    line = "apply e t.parquet --embedding x -o u.parquet"
    cli(line)
    found = np.stack(pq.read_table("u.parquet")["x"].to_pylist())
    np.testing.assert_allclose(found, eraser(X, {"z": z}), atol=1e-12)
    pq.write_table(table.select(["x"]), "t.parquet")
    assert "no column 'z'" in cli(f"{line} --force", 2)


# -- inspect -------------------------------------------------------------------------------------


def test_inspect_an_eraser(eraser: sf.Projection, cli: Cli) -> None:
    out = cli("inspect e")
    assert str(eraser.report) in out
    assert "Projection(SPLINCE, 6 features, rank 1 removed)" in out
    assert "tensor" not in out
    assert f"format 1, written by splince_fast {sf.__version__}" in out
    found = json.loads(cli("inspect e --json"))
    assert eraser.report is not None
    assert sf.Report.from_dict(found["report"]) == eraser.report
    assert (found["kind"], found["rank"], found["tensors"]["left"]) == ("projection", 1, [6, 1])
    sf.Projection(np.eye(3)[:, :1], np.eye(3)[:, :1], np.zeros(3)).save("custom")
    assert "no report" in cli("inspect custom")


def test_inspect_moments(here: Path, cli: Cli) -> None:
    X = np.load("X.npy")
    labels = {"g": np.arange(N) % 2 == 0, "h": np.arange(N) % 12, "age": X[:, 0]}
    weight = np.full(N, 0.5)
    sf.Moments(joint=[("g", "h")]).update(X, labels, sample_weight=weight).save("m")
    out = cli("inspect m")
    for text in (
        f"Moments({N} rows, 6 features", "weight 150", "9: 25, ...}", "variable 'age': continuous",
        "variable 'g': classes (2) {False: 150, True: 150}", "variable ('g', 'h'): classes (12)",
    ):  # fmt: skip
        assert text in out
    found = json.loads(cli("inspect m --json"))
    variables = {json.dumps(v["name"]): v for v in found["variables"]}
    assert variables['"g"']["classes"] == [[False, 150], [True, 150]]
    assert variables['"age"'] == {"name": "age", "kind": "continuous"}
    assert [[False, 1], 25] in variables['["g", "h"]']["classes"]


# -- mistakes ------------------------------------------------------------------------------------


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


MISTAKES = {
    f"{FIT} -o new": (
        ("--method splince", "SPLINCE needs --keep, the task"),
        ("--method leace --keep job", "LEACE keeps nothing"),
        ("--method mean_projection --shrinkage .1", "MeanProjection takes no --shrinkage"),
        ("--method sal --null-space drop", "SAL takes no --null-space"),
        ("--method sal --covariance-type diag --passes 2", "SAL takes no --passes"),
        ("--kee job", "unrecognized arguments: --kee"),
    ),
    f"{KEEP} -o new": (
        ("--shrinkage some", "invalid"),
        ("--shrinkage 2", "a number in [0, 1]"),
        ("--checkpoint ./new", "is the file of --output, too"),
        ("--save-moments m.npz", "'m.npz' must end in .safetensors"),
        ("--checkpoint labels.csv", "is an input, too"),
        ("--covariance-type tied", "diag"),
        ("--covariance-type diag --shrinkage cv", "pass a number"),
        ("--covariance-type diag --solver eigh", "at 'auto'"),
        ("--covariance-type diag --groups age", "leave groups out"),
        ("--kind job", "must be NAME=classes or"),
        ("--kind age=classes", "the variables are 'gender', 'job'"),
        ("--keep jobs", "'jobs'; the variables are 'gender', 'job', 'age'"),
        ("--shrinkage cv --groups job", "is erased or kept"),
        ("--method inlp", "must be one of"),
        ("--labels x.txt", "labels come from .npy, .csv, .tsv, .parquet"),
        ("--labels absent.csv", "absent.csv"),
        ("--labels y=labels.csv", "NAME=FILE is for .npy files"),
        ("--labels gender.npy", "2 columns 'gender'"),
    ),
    KEEP: (
        ("-o absent/e", "there is no folder for 'absent/e'"),
        ("-o a.npy", "'a.npy' exists"),
        ("", "required: -o/--output"),
    ),
    "fit": (
        ("X.npy --erase g --keep y -o new", "pass --labels FILE"),
        ("X.npy --keep job -o new", "required: --erase"),
        ("absent.npy --erase z -o new", "there is no file 'absent.npy'"),
        ("a.npy --labels labels.csv --erase gender -o new", "has 300 rows but"),
        ("a.npy --labels labels.csv --erase gender -o new.bin", "'new.bin' names another format"),
        ("labels.csv --labels labels.csv --erase gender -o new", "is or holds no file of rows"),
        ("folder --labels labels.csv --erase gender -o new", "is or holds no file of rows"),
        ("X.npy --erase job -o new --labels numbers.npy", "--labels job=FILE for a .npy file"),
    ),
    "apply e": (
        ("X.npy -o gender.npy", "'gender.npy' exists"),
        ("narrow.npy -o out.npy", "3 columns, and 6 are expected"),
        ("gender.npy -o out.npy", "'gender.npy' holds no rows (n, d)"),
        ("integers.npy --in-place", "the result is float64; use -o FILE"),
        ("labels.csv -o out.npy", "is or holds no file of rows"),
        ("broken.npy -o out.npy", "cannot be read as a .npy array"),
        ("broken.npz -o out.npy", "cannot be read as a .npz file"),
        ("two.npz -o out.npy", "name the array of rows with --key"),
        ("two.npz --key z -o out.npy", "no array 'z'; its arrays are 'a'"),
        ("X.npy --key a -o out.npy", "no file holds several"),
        ("X.npy --embedding v -o out.npy", "the files hold arrays"),
        ("long.npy -o out.safetensors", "can be written only as .npy"),
        ("X.npy -o ''", "the path is empty"),
        ("X.npy a.npy -o e", "'e' is a file; several files of rows need a folder"),
        ("X.npy a.npy -o new.npy", "'new.npy' is a file; several files of rows need a folder"),
        ("X.npy --in-place --resume", "--resume is for -o"),
        ("X.npy ./X.npy -o new", "two files have the same name"),
        ("absent.npy -o out.npy", "there is no file 'absent.npy'"),
        ("X.npy -o absent/out.npy", "there is no folder"),
        ("X.npy", "-o/--output --in-place is required"),
        ("X.npy -o out.npy --in-place", "not allowed with"),
    ),
    "apply": (
        ("absent X.npy -o out.npy", "there is no file 'absent'"),
        ("X.npy X.npy -o out.npy", "not a safetensors file"),
        ("moments X.npy -o out.npy", "'moments'"),
    ),
    "inspect": (
        ("X.npy", "not a safetensors file"),
        ("absent", "absent"),
        ("foreign", "'projection' was expected"),
    ),
    "": (("", "required: COMMAND"), ("erase", "invalid choice")),
}  # fmt: skip


@pytest.mark.parametrize("start", MISTAKES)
def test_mistakes_change_no_file(bad_files: None, cli: Cli, start: str) -> None:
    before = {p.name: p.is_file() and p.read_bytes() for p in Path().iterdir()}
    for rest, text in MISTAKES[start]:
        assert text in cli(f"{start} {rest}", 2), rest
        assert {p.name: p.is_file() and p.read_bytes() for p in Path().iterdir()} == before, rest


MESSAGES = {
    "use rank_tol=1e-08 or shrinkage='oas'.": "use --rank-tol 1e-08 or --shrinkage oas.",
    "leave keep= out": "leave --keep out",
    "shrinkage=0.5, or fewer rows": "--shrinkage 0.5, or fewer rows",
    "no file 'data/keep=1/a.npy'": "no file 'data/keep=1/a.npy'",
    "no file 'keep=1'": "no file 'keep=1'",
    "pass metrics= a mapping": "pass metrics= a mapping",  # no option of the command
    "keep is 3; it must be 'oas' or 1": "--keep is 3; it must be 'oas' or 1",
    "n_seeds is 0": "--seeds is 0",
    "p = P(z = rank_tol)": "p = P(z = rank_tol)",
    "pass kinds={'a': 'classes'}": "pass --kind a=classes",
    "Moments(kinds={'task': 'continuous'})": "--kind job=continuous",
    "variable 'task' and variable 'z'": "variable 'job' and variable 'z'",
}


def test_messages_name_the_options_of_the_command() -> None:
    args = argparse.Namespace(
        keep=None, kind=None, rank_tol=None, seeds=None, shrinkage=None, variables={"task": "job"}
    )
    assert {text: _with_flags(text, args) for text in MESSAGES} == MESSAGES


# -- the process ---------------------------------------------------------------------------------


def test_a_real_process(here: Path) -> None:
    command = "import runpy; runpy.run_module('splince_fast', run_name='__main__')"
    fitted = script(command, *KEEP.split(), "-o", "e", flags=("-W", "error"))
    assert fitted.splitlines()[-1].startswith("eraser: e ")
    apply = ["apply", "e", "X.npy", "-o", "out.npy"]
    script(command, *apply, flags=("-W", "error"))
    np.testing.assert_array_equal(np.load("out.npy"), sf.Projection.load("e")(np.load("X.npy")))
    failed = run(command, *apply)
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
    """Ctrl-C during the imports, about a second, prints the same line as a later one."""
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
