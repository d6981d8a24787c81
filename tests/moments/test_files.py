"""Files: a damaged one is a FileFormatError, and a write that fails leaves the old one whole."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from entangled import normal
from naive_model import FUZZ, flushed, state_bytes

from splince_fast import Moments, Projection
from splince_fast._runtime import files
from splince_fast.exceptions import FileFormatError, InputError

MANY = max(FUZZ, 1)


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


def of_form(**parameters: Any) -> Moments:
    rng = np.random.default_rng(0)
    return flushed(
        Moments(**parameters).update(rng.normal(size=(50, 3)), {"t": rng.integers(0, 3, 50)})
    )


def after_a_removal() -> Moments:
    far = Moments().update(1e10 + np.random.default_rng(1).normal(size=(40, 3)))
    return of_form() + far - far


MOMENTS: dict[str, Callable[[], Moments]] = {
    "full": some_moments,
    "variances": lambda: of_form(covariance_type="diag"),
    "sample": lambda: of_form(subsample=0.5),
    "classes": lambda: of_form(by="t"),
    "after a removal": after_a_removal,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.moments"


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    file, found = tmp_path_factory.mktemp("files") / "state", {}
    for name, make in MOMENTS.items():
        make().save(file)
        found[name] = file.read_bytes()
    return found


@pytest.fixture(scope="module")
def content(contents: dict[str, bytes]) -> bytes:
    return contents["full"]


def parts_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and body of a safetensors file."""
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def joined(header: Any, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


# --- round trip ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::splince_fast.exceptions.MissingLabelWarning")
def test_names_of_any_script_and_numbers_of_any_size_come_back(path: Path) -> None:
    names: list[Any] = ["", " ", "é", "日本", "\u0000", '"', "\\", "\ud800", "a" * 5000, "null"]
    numbers = [0, -1, 2**63 - 1, -(2**63), 2**64, 10**30, *range(1, 5)]
    labels = {name: names for name in names} | {"numbers": numbers, "flags": [True, False] * 5}
    moments = Moments().update(np.eye(len(names)), labels)
    moments.save(path)
    for variable in labels:
        assert repr(Moments.load(path).classes(variable)) == repr(moments.classes(variable))


def test_files_are_plain_safetensors(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    tensors = safetensors.numpy.load_file(path)
    assert tensors["scatter"].shape == (3, 3)
    np.testing.assert_array_equal(tensors["scatter"], tensors["scatter"].T)


def test_a_pickle_is_half_a_state_and_may_be_read_only() -> None:
    d = 200
    given = normal(300, d), {"z": np.arange(300) % 3, "y": normal(300, 2, seed=1)}
    moments, buffers = flushed(Moments(block_rows=64).update(*given)), list[pickle.PickleBuffer]()
    assert len(pickle.dumps(moments, protocol=5)) < 4 * d * d + 64 * 1024
    text = pickle.dumps(moments, protocol=5, buffer_callback=buffers.append)
    frozen = [bytes(buffer.raw()) for buffer in buffers]
    assert frozen
    twin = pickle.loads(text, buffers=frozen)
    assert state_bytes(twin) == state_bytes(moments)
    assert state_bytes(twin.update(*given)) == state_bytes(moments.update(*given))


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


FOREIGN: dict[str, tuple[bytes, str]] = {
    **{
        f"metadata {metadata}": (
            safetensors.numpy.save({"weight": np.zeros(3)}, metadata), "not written by splince_fast"
        )
        for metadata in (None, {}, {"format": "pt"}, {"library": "other"})
    },
    **{
        str(content): (content, ".")
        for content in (b"", b"\0" * 8, b"\xff" * 64, b"PK\x03\x04", os.urandom(999))
    },
    "an array": (b"\x93NUMPY" + bytes(200), r"foreign is not a safetensors file; pass"),
}  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN)
def test_what_is_no_such_file(tmp_path: Path, case: str) -> None:
    (tmp_path / "foreign").write_bytes(FOREIGN[case][0])
    with pytest.raises(FileFormatError, match=FOREIGN[case][1]):
        Moments.load(tmp_path / "foreign")


def test_paths_without_a_file_and_files_of_another_kind(tmp_path: Path, content: bytes) -> None:
    eraser = Projection(np.eye(3)[:, :1], np.eye(3)[:, :1], np.zeros(3))
    for folder in ("nowhere", "nowhere/deep"):
        with pytest.raises(FileNotFoundError, match=r"there is no folder for '.*eraser'; make it"):
            eraser.save(tmp_path / folder / "eraser")
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileFormatError, match="is a folder; pass the path of a file"):
        Moments.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Moments.load(tmp_path / "nowhere")
    eraser.save(tmp_path / "eraser")
    with pytest.raises(FileFormatError, match=r"'projection'.*'moments'"):
        Moments.load(tmp_path / "eraser")
    (tmp_path / "moments").write_bytes(content)
    with pytest.raises(FileFormatError, match=r"'moments'.*'projection'"):
        Projection.load(tmp_path / "moments")


@pytest.mark.parametrize(
    ("entry", "texts", "remedy"),
    [
        ("format_version", ["2", "10"], "upgrade"),
        ("format_version", [None, "", "one", "-1", "1.0", "²", "0", "9" * 30, "9" * 5000], "."),
        ("metadata", ["", "{", "[]", "5", "null", '"a"', "{}", "[" * 100_000, "1" * 5000,
                      '{"width": NaN}'], "."),
    ],
)  # fmt: skip
def test_entries_that_cannot_be_read_are_refused(
    content: bytes, path: Path, entry: str, texts: list[str | None], remedy: str
) -> None:
    header, body = parts_of(content)
    for text in texts:  # None leaves the entry out
        entries = {k: v for k, v in header["__metadata__"].items() if k != entry}
        changed = entries if text is None else entries | {entry: text}
        path.write_bytes(joined(header | {"__metadata__": changed}, body))
        with pytest.raises(FileFormatError, match=remedy):
            Moments.load(path)


Change = Callable[[dict[str, Any], dict[str, Any]], object]  # of tensors and metadata


def resaved(content: bytes, path: Path, change: Change) -> Path:
    """The file as the library writes it, with tensors and metadata changed by `change`."""
    metadata = json.loads(parts_of(content)[0]["__metadata__"]["metadata"])
    tensors = safetensors.numpy.load(content)
    change(tensors, metadata)
    files.write(path, "moments", 1, tensors, metadata)
    return path


def with_number(array: Any, place: int, value: float) -> Any:
    changed = array.copy()
    changed.flat[place] = value
    return changed


SPOILT: dict[str, Callable[[Any], Any] | None] = {
    "missing": None,
    "NaN": lambda a: with_number(a, -1, np.nan),
    "infinity": lambda a: with_number(a, -1, np.inf),
    "minus infinity": lambda a: with_number(a, -1, -np.inf),
    "shorter": lambda a: a[:-1],
    "longer": lambda a: np.concatenate([a, a[:1]]),
    "one axis more": lambda a: a[None],
    "other axes": lambda a: a.ravel() if a.ndim > 1 else a[:, None],
    "few bits": lambda a: a.astype(np.float16) if a.dtype != np.float16 else a.astype(np.int8),
    "int32": lambda a: a.astype(np.int32),
    "no numbers": lambda a: np.empty((0, 0)),
}
# Faults that leave a valid file: no row, weight or label waits, and no removal lost digits.
HARMLESS = {"missing": r"staged\..*|lost", "NaN": r"staged\.\d"}


@pytest.mark.parametrize("state", MOMENTS)
@pytest.mark.parametrize("fault", SPOILT)
def test_a_tensor_that_is_missing_or_spoilt_is_refused(
    contents: dict[str, bytes], path: Path, fault: str, state: str
) -> None:
    change = SPOILT[fault]

    def spoil(tensors: dict[str, Any], _: Any) -> None:
        tensor = tensors.pop(name)
        if change is not None:
            with warnings.catch_warnings(action="ignore"):
                tensors[name] = np.ascontiguousarray(change(tensor))

    for name, tensor in safetensors.numpy.load(contents[state]).items():
        if fault in ("NaN", "infinity", "minus infinity") and tensor.dtype.kind != "f":
            continue
        if not re.fullmatch(HARMLESS.get(fault, "-"), name):
            with pytest.raises(FileFormatError):
                Moments.load(resaved(contents[state], path, spoil))


IMPOSSIBLE: dict[tuple[str, str], list[float]] = {
    ("full", "weight"): [-1.0, 0.0],
    ("full", "scatter"): [-1.0],
    ("full", "variable.0.rows"): [-1, 10**12],
    ("full", "variable.0.weights"): [-1.0],
    ("full", "variable.2.counts"): [-1, 10**12],
    ("full", "variable.2.weight"): [-1.0],
    ("full", "variable.2.squares"): [-1.0],
    ("full", "staged.weight"): [0.0, -2.0],
    ("full", "staged.rows"): [1e200],
    ("full", "staged.0"): [99, -2],
    ("variances", "variances"): [-1.0],
    ("sample", "variances"): [-1.0],
    ("sample", "weights.squares"): [-1.0],
    ("after a removal", "lost"): [-1.0],
}
# State, changes of the metadata, and text.
CONTRADICTING: dict[str, tuple[str, dict[str, Any], str]] = {
    "a part without content": ("classes", {"part.1": {}}, "."),
    "a class twice": ("classes", {"classes": [0, 1, 0]}, "."),
    "a part without a label": ("classes", {"unlabelled": True}, "."),
    "names of other columns": ("full", {"feature_names": ["a", "b"]}, "2 names of 3 features"),
}


@pytest.mark.parametrize("case", [*IMPOSSIBLE, *CONTRADICTING], ids=str)
def test_impossible_numbers_and_contradicting_metadata_are_refused(
    contents: dict[str, bytes], path: Path, case: Any
) -> None:
    def set_number(value: float) -> Change:
        return lambda tensors, _: tensors.update({case[1]: with_number(tensors[case[1]], 0, value)})

    if case in IMPOSSIBLE:
        state, text, changes = case[0], ".", [set_number(value) for value in IMPOSSIBLE[case]]
    else:
        state, changed, text = CONTRADICTING[case]
        changes = [lambda _, metadata: metadata.update(changed)]
    Moments.load(resaved(contents[state], path, lambda *_: None))  # control
    for change in changes:
        with pytest.raises(FileFormatError, match=text):
            Moments.load(resaved(contents[state], path, change))


def test_parts_of_a_file_have_the_parameters_of_the_whole(
    contents: dict[str, bytes], path: Path
) -> None:
    other = {"block_rows": 7, "kinds": {"t": "continuous"}}
    resaved(contents["classes"], path, lambda _, metadata: metadata["part.1"].update(other))
    more = np.ones((2, 3)), {"t": [0, 1]}
    assert state_bytes(Moments.load(path).update(*more)) == state_bytes(
        of_form(by="t").update(*more)
    )


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


def test_long_names_that_begin_alike_share_one_temporary_file(tmp_path: Path) -> None:
    """It is listed once: the command deletes the files of the list."""
    targets = [tmp_path / f"{'x' * 210}{end}" for end in "ab"]
    left = tmp_path / f"{files._partial_prefix(targets[0])}1.2.partial"
    left.touch()
    assert files.partial_files(targets) == [left]


@pytest.mark.parametrize("name", ["", ".", "/", "folder"])
def test_what_names_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="is a folder" if name else "is empty"):
        Moments().update(np.eye(2)).save(name)


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
