"""Files: whatever is wrong with one, FileFormatError; whatever goes wrong while one is written,
the old file stays whole and nothing else is left behind.
"""

from __future__ import annotations

import errno
import json
import os
import re
import struct
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from naive_model import FUZZ, check, state_bytes, tables
from processes import script

from splince_fast import Moments, Projection, SplinceError
from splince_fast._runtime import files
from splince_fast.exceptions import FileFormatError, InputError

MANY = max(FUZZ, 1)


@pytest.fixture
def moments() -> Moments:
    return some_moments()


def some_moments() -> Moments:
    """Every kind of variable, merged and waiting rows, weights."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(11, 3))
    labels = {
        "z": rng.integers(0, 3, 11),
        "text": [None, *"aabcaébca", "b"],
        "score": rng.normal(size=11),
        "scores": np.where(rng.random((11, 2)) < 0.2, np.nan, rng.normal(size=(11, 2))),
    }
    new = Moments(block_rows=8, joint=[("z", "text")], kinds={"z": "classes"})
    return new.update(X, labels, sample_weight=rng.uniform(0.5, 2, 11))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.moments"


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("files") / "state"
    some_moments().save(file)
    return file.read_bytes()


def parts_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and body of a safetensors file."""
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def joined(header: Any, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


# --- round trip ----------------------------------------------------------------------------------


@given(table=tables(), block_rows=st.sampled_from([None, 1, 3, 8]), more=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_loaded_state_continues_to_the_same_bytes(
    tmp_path: Path, table: Any, block_rows: int | None, more: bool
) -> None:
    path = tmp_path / "state"
    original = table.feed(Moments(block_rows=block_rows))
    original.save(path)
    loaded = Moments.load(path)
    assert state_bytes(loaded) == state_bytes(original)
    if more:
        assert state_bytes(table.feed(loaded)) == state_bytes(table.feed(original))
        check(loaded, table.rows + table.rows)
    assert state_bytes(loaded + loaded) == state_bytes(original + original)


def test_all_parameters_come_back(moments: Moments, path: Path) -> None:
    moments.save(path)
    loaded = Moments.load(path)
    assert state_bytes(loaded) == state_bytes(moments)
    assert loaded.classes(("z", "text")) == moments.classes(("z", "text"))
    with pytest.raises(SplinceError):  # joint= and kinds= are in force again
        loaded.update(np.ones((1, 3)), {"score": [1.0]})


@pytest.mark.filterwarnings("ignore::splince_fast.exceptions.MissingLabelWarning")
def test_names_of_any_script_and_numbers_of_any_size_come_back(path: Path) -> None:
    names: list[Any] = ["", " ", "é", "日本", "\u0000", '"', "\\", "\ud800", "a" * 5000, "null"]
    moments = Moments().update(np.eye(len(names)), {name: names for name in names})
    moments.save(path)
    assert Moments.load(path).classes("日本") == moments.classes("日本")
    integers = [0, -1, 2**63 - 1, -(2**63), 2**64, 10**30]
    state = Moments().update(np.eye(6), {"z": integers, "flag": [True, False] * 3})
    state.save(path)
    loaded = Moments.load(path)
    assert loaded.classes("z") == state.classes("z")
    assert [type(c) for c in loaded.classes("flag")] == [bool, bool]


def test_saving_changes_nothing_and_repeats_itself(moments: Moments, path: Path) -> None:
    """The same state gives the same file, byte for byte."""
    before = state_bytes(moments)
    contents = set()
    for _ in range(8):
        moments.save(path)
        contents.add(path.read_bytes())
    assert state_bytes(moments) == before
    assert len(contents) == 1


def test_files_are_plain_safetensors(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    tensors = safetensors.numpy.load_file(path)
    assert tensors["scatter"].shape == (3, 3)
    np.testing.assert_array_equal(tensors["scatter"], tensors["scatter"].T)


# --- damage --------------------------------------------------------------------------------------


def test_truncated_at_any_length(content: bytes, path: Path) -> None:
    lengths = {*range(0, len(content), max(1, len(content) // (150 * MANY))), len(content) - 1}
    for length in sorted(lengths):
        path.write_bytes(content[:length])
        with pytest.raises(FileFormatError, match=r"truncated|damaged"):
            Moments.load(path)
    for extra in (b"\0", b"x" * 100, content):  # nor may anything follow
        path.write_bytes(content + extra)
        with pytest.raises(FileFormatError):
            Moments.load(path)


def flipped(content: bytes, seed: int, first: int, stop: int, count: int) -> Iterator[bytes]:
    """The file with one byte between two positions changed, again and again."""
    rng = np.random.default_rng(seed)
    for position in rng.integers(first, stop, count * MANY):
        damaged = bytearray(content)
        damaged[position] ^= int(rng.choice([1, 2, 4, 8, 16, 32, 64, 128, 255]))
        yield bytes(damaged)


def test_bytes_flipped_in_the_numbers(content: bytes, path: Path) -> None:
    """A wrong number is as bad as a lost one, so every flip is noticed."""
    first = len(content) - len(parts_of(content)[1])
    for damaged in flipped(content, 1, first, len(content), 200):
        path.write_bytes(damaged)
        with pytest.raises(FileFormatError):
            Moments.load(path)


def test_bytes_flipped_in_the_header(content: bytes, path: Path) -> None:
    """Refused, or without effect."""
    path.write_bytes(content)
    whole = state_bytes(Moments.load(path))
    for damaged in flipped(content, 2, 0, len(content) - len(parts_of(content)[1]), 300):
        path.write_bytes(damaged)
        try:
            loaded = Moments.load(path)
        except FileFormatError:
            continue
        assert state_bytes(loaded) == whole


def test_what_is_no_such_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign"
    foreign = {"weight": np.zeros(3)}
    for metadata in (None, {}, {"format": "pt"}, {"library": "other"}):
        safetensors.numpy.save_file(foreign, path, metadata)
        with pytest.raises(FileFormatError, match="not written by splince_fast"):
            Moments.load(path)
    for other in (b"", b"\0" * 8, b"\xff" * 64, b"PK\x03\x04", b"\x93NUMPY", os.urandom(999)):
        path.write_bytes(other)
        with pytest.raises(FileFormatError):
            Moments.load(path)
    with pytest.raises(FileFormatError, match="is a folder; pass the path of a file"):
        Moments.load(tmp_path)
    np.save(tmp_path / "x.npy", np.ones((3, 2)))
    with pytest.raises(FileFormatError, match=r"x\.npy is not a safetensors file; pass"):
        Moments.load(tmp_path / "x.npy")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Moments.load(tmp_path / "nowhere")


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    eraser = Projection(np.eye(3)[:, :1], np.eye(3)[:, :1], np.zeros(3))
    for folder in ("nowhere", "nowhere/deep"):
        with pytest.raises(FileNotFoundError, match=r"there is no folder for '.*eraser'; make it"):
            eraser.save(tmp_path / folder / "eraser")
    assert not list(tmp_path.iterdir())


def test_a_file_of_another_kind(tmp_path: Path, content: bytes) -> None:
    eraser = Projection(np.eye(3)[:, :1], np.eye(3)[:, :1], np.zeros(3))
    eraser.save(tmp_path / "eraser")
    with pytest.raises(FileFormatError, match=r"'projection'.*'moments'"):
        Moments.load(tmp_path / "eraser")
    (tmp_path / "moments").write_bytes(content)
    with pytest.raises(FileFormatError, match=r"'moments'.*'projection'"):
        Projection.load(tmp_path / "moments")


def with_metadata(content: bytes, path: Path, **changes: str | None) -> Path:
    """The file with other entries of its metadata; None leaves an entry out."""
    header, body = parts_of(content)
    header["__metadata__"] |= changes
    header["__metadata__"] = {k: v for k, v in header["__metadata__"].items() if v is not None}
    path.write_bytes(joined(header, body))
    return path


@pytest.mark.parametrize("version", ["2", "10"])
def test_a_newer_format_asks_for_an_upgrade(content: bytes, path: Path, version: str) -> None:
    with pytest.raises(FileFormatError, match="upgrade"):
        Moments.load(with_metadata(content, path, format_version=version))


@pytest.mark.parametrize(
    ("entry", "texts"),
    [
        ("format_version", [None, "", "one", "-1", "1.0", "²", "0", "9" * 30, "9" * 5000]),
        ("metadata", ["", "{", "[]", "5", "null", '"a"', "{}", "[" * 100_000, "1" * 5000,
                      '{"width": NaN}']),
    ],
)  # fmt: skip
def test_entries_that_cannot_be_read_are_refused(
    content: bytes, path: Path, entry: str, texts: list[str | None]
) -> None:
    for text in texts:
        with pytest.raises(FileFormatError):
            Moments.load(with_metadata(content, path, **{entry: text}))


def resaved(content: bytes, path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """The file as the library writes it, with tensors changed by `change`."""
    metadata = json.loads(parts_of(content)[0]["__metadata__"]["metadata"])
    tensors = safetensors.numpy.load(content)
    change(tensors)
    files.write(path, "moments", 1, tensors, metadata)


def writes_complex_numbers() -> bool:
    """Releases of safetensors before 0.7 neither write nor read them."""
    try:
        safetensors.numpy.save({"a": np.zeros(1, np.complex64)})
    except safetensors.SafetensorError:
        return False
    return True


def last(value: float) -> Callable[[Any], Any]:
    """A float tensor whose last number is another one."""

    def change(array: Any) -> Any:
        changed = array.copy()
        changed.flat[-1] = value
        return changed

    return change


SPOILT: dict[str, Callable[[Any], Any] | None] = {
    "missing": None,
    "NaN": last(np.nan),
    "infinity": last(np.inf),
    "minus infinity": last(-np.inf),
    "shorter": lambda a: a[:-1],
    "longer": lambda a: np.concatenate([a, a[:1]]),
    "one axis more": lambda a: a[None],
    "other axes": lambda a: a.ravel() if a.ndim > 1 else a[:, None],
    "few bits": lambda a: a.astype(np.float16) if a.dtype != np.float16 else a.astype(np.int8),
    "int32": lambda a: a.astype(np.int32),
    "complex": lambda a: a.astype(np.complex64),
    "no numbers": lambda a: np.empty((0, 0)),
}


@pytest.mark.parametrize("fault", SPOILT)
def test_a_tensor_that_is_missing_or_spoilt_is_refused(
    content: bytes, path: Path, fault: str
) -> None:
    if fault == "complex" and not writes_complex_numbers():
        pytest.skip("needs a newer safetensors: no complex numbers")
    change, is_number = SPOILT[fault], fault in ("NaN", "infinity", "minus infinity")
    for name, tensor in safetensors.numpy.load(content).items():
        if is_number and tensor.dtype.kind != "f":
            continue
        if fault == "missing" and name.startswith("staged."):
            continue  # no row, weight or label waits
        if fault == "NaN" and re.fullmatch(r"staged\.\d", name):
            continue  # a missing label

        def apply(tensors: dict[str, Any], name: str = name) -> None:
            tensor = tensors.pop(name)
            if change is not None:
                with warnings.catch_warnings(action="ignore"):
                    tensors[name] = np.ascontiguousarray(change(tensor))

        resaved(content, path, apply)
        with pytest.raises(FileFormatError):
            Moments.load(path)


IMPOSSIBLE: dict[str, list[float]] = {
    "weight": [-1.0, 0.0],
    "scatter": [-1.0],
    "variable.0.rows": [-1, 10**12],
    "variable.0.weights": [-1.0],
    "variable.2.counts": [-1, 10**12],
    "variable.2.weight": [-1.0],
    "variable.2.squares": [-1.0],
    "staged.weight": [0.0, -2.0],
    "staged.rows": [1e200],
    "staged.0": [99, -2],
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_numbers_are_refused(content: bytes, path: Path, name: str) -> None:
    for value in IMPOSSIBLE[name]:

        def spoil(tensors: dict[str, Any], value: float = value) -> None:
            tensors[name] = tensors[name].copy()  # KeyError if there is no such tensor
            tensors[name].flat[0] = value

        resaved(content, path, spoil)
        with pytest.raises(FileFormatError):
            Moments.load(path)


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E5M2", "F4", "F16", "U8", "BOOL", "C64"])
def test_dtypes_that_numpy_may_lack(content: bytes, path: Path, dtype: str) -> None:
    header, body = parts_of(content)
    bits = {"BF16": 16, "F16": 16, "F4": 4, "C64": 64}.get(dtype, 8)
    first, last = header["weight"]["data_offsets"]
    header["weight"] |= {"dtype": dtype, "shape": [(last - first) * 8 // bits]}
    path.write_bytes(joined(header, body))
    with pytest.raises(FileFormatError):
        Moments.load(path)


# --- faults while a file is written --------------------------------------------------------------

NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


def half_written(error: BaseException) -> Callable[..., Any]:
    def write(*arguments: Any, **more: Any) -> None:
        Path(arguments[1]).write_bytes(b"half of it")
        raise error

    return write


def refused(*arguments: Any, **more: Any) -> None:
    raise NO_SPACE


SAFETENSORS_FULL = safetensors.SafetensorError("I/O error: No space left on device (os error 28)")
SAVE = safetensors.numpy, "save_file"
FAULTS: dict[str, tuple[Any, str, Callable[..., Any], type[BaseException]]] = {
    "disk full while writing": (*SAVE, half_written(NO_SPACE), OSError),
    "disk full, as safetensors says it": (*SAVE, half_written(SAFETENSORS_FULL), OSError),
    "interrupted while writing": (*SAVE, half_written(KeyboardInterrupt()), KeyboardInterrupt),
    "disk full while flushing": (os, "fsync", refused, OSError),
    "renaming fails": (os, "replace", refused, OSError),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("exists", [True, False])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str, exists: bool
) -> None:
    path = tmp_path / "state"
    old, new = Moments().update(np.eye(2)), Moments().update(np.ones((3, 2)))
    if exists:
        old.save(path)
    kept, before = path.read_bytes() if exists else b"", state_bytes(new)
    module, name, replacement, error = FAULTS[fault]
    with monkeypatch.context() as patch:
        patch.setattr(module, name, replacement)
        with pytest.raises(error):
            new.save(path)
    assert os.listdir(tmp_path) == (["state"] if exists else [])
    if exists:
        assert path.read_bytes() == kept
    assert state_bytes(new) == before
    new.save(path)  # the next attempt succeeds
    assert state_bytes(Moments.load(path)) == before
    assert os.listdir(tmp_path) == ["state"]


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX links and rights")
def test_links_are_followed_and_rights_are_kept(tmp_path: Path) -> None:
    """A checkpoint must not undo a chmod, nor leave the file behind a link as it was."""
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "state", tmp_path / "link"
    link.symlink_to(target)
    Moments().update(np.eye(2)).save(link)
    assert link.is_symlink()
    target.chmod(0o600)
    Moments().update(np.ones((3, 2))).save(link)
    assert Moments.load(target).n_rows == 3
    assert target.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path / "elsewhere") == ["state"]


@pytest.mark.parametrize("name", ["a" * 245, "ä" * 127])
def test_the_longest_names_can_be_written(tmp_path: Path, name: str) -> None:
    Moments().update(np.eye(2)).save(tmp_path / name)
    assert Moments.load(tmp_path / name).n_rows == 2


@pytest.mark.parametrize("name", ["", ".", "/", "folder"])
def test_what_names_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="is a folder" if name else "is empty"):
        Moments().update(np.eye(2)).save(name)


@contextmanager
def without_rights(folder: Path) -> Iterator[None]:
    """The folder is read-only for the user of the test, root included."""
    root = os.geteuid() == 0
    folder.chmod(0o555)
    try:
        if root:
            os.seteuid(65534)
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX rights")
def test_permission_denied(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir()
    moments = Moments().update(np.eye(2))
    moments.save(folder / "state")
    kept = (folder / "state").read_bytes()
    with without_rights(folder), pytest.raises(OSError, match=r"state|ermission"):
        moments.save(folder / "state")
    assert os.listdir(folder) == ["state"]
    assert (folder / "state").read_bytes() == kept


LIMITED = """
import resource, signal, sys
import numpy as np
from splince_fast import Moments
moments = Moments().update(np.ones((2, 200)))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    moments.save(sys.argv[1])
except OSError as error:
    print("refused:", error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files as Linux does")
def test_a_file_that_outgrows_its_disk(tmp_path: Path) -> None:
    """A true short write, not a simulated one."""
    path = tmp_path / "state"
    Moments().update(np.eye(2)).save(path)
    kept = path.read_bytes()
    assert script(LIMITED, str(path)).startswith("refused:")
    assert os.listdir(tmp_path) == ["state"]
    assert path.read_bytes() == kept


def test_two_threads_that_save_to_one_path(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """The last one wins, with a whole file; neither meets the other's half-written one."""
    first, second = Moments().update(np.eye(2)), Moments().update(np.eye(3))
    original = safetensors.numpy.save_file
    entered: list[bool] = []

    def overtaken(*arguments: Any, **more: Any) -> Any:
        result = original(*arguments, **more)
        if not entered:
            entered.append(True)
            other = threading.Thread(target=second.save, args=(path,))
            other.start()
            other.join()
        return result

    monkeypatch.setattr(safetensors.numpy, "save_file", overtaken)
    first.save(path)
    assert state_bytes(Moments.load(path)) == state_bytes(first)
    assert os.listdir(path.parent) == [path.name]


def test_the_writer_refuses_numbers_that_json_lacks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        files.write(tmp_path / "a", "kind", 1, {}, {"value": float("nan")})
    assert os.listdir(tmp_path) == []
