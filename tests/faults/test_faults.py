"""Faults from outside: killed processes, full disks, missing rights, no memory, forks, bad calls.

Faults inside an update are injected in ``moments/test_moments.py``, those of a write in
``moments/test_files.py``, those of threads in ``runtime/test_threads.py``; here whole processes
meet the real thing.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from naive_model import FUZZ, Rows, check, state_bytes
from processes import script

import splince_fast as sf
from splince_fast import Moments, Projection, SplinceError, labels, sources
from splince_fast._kernels import row_kernels
from splince_fast._runtime import erase_rows
from splince_fast.report import Report

PACKAGE = Path(sf.__file__).parent
posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals, rights or limits")
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def without_powers() -> None:
    """Take from root what ignores rights (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH); for a child."""
    if os.geteuid() == 0:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        for capability in (1, 2):
            if prctl(24, capability, 0, 0, 0):  # PR_CAPBSET_DROP
                raise OSError(ctypes.get_errno(), "could not drop a capability")


# --- killed processes ----------------------------------------------------------------------------

# One process imports and compiles; its forks, which cost milliseconds, are the ones to die.
KILLED = """
import json, os, signal, sys, time
import numpy as np
from splince_fast import Moments, sources

folder, name, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
X = np.random.default_rng(0).normal(size=(1200, 24)).astype(np.float32)
labels = {"z": np.arange(1200) % 3, "y": X[:, 0].astype(np.float64)}
path = os.path.join(folder, "state")

def accumulate():
    source = sources.from_arrays(X, labels, block_rows=16)  # 75 checkpoints
    Moments.from_blocks(source, checkpoint=path, checkpoint_seconds=0, block_rows=100)

def started():
    child = os.fork()
    if child == 0:
        try:
            accumulate()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return child

def content():
    with open(path, "rb") as file:
        return file.read()

def first_write():
    while not os.path.exists(path):
        time.sleep(1e-4)

Moments(block_rows=2).update(X[:5], {"z": [1] * 5})  # compiles
begin = time.monotonic()
child = started()
first_write()
wrote = time.monotonic()
assert os.waitpid(child, 0)[1] == 0
starting, writing = wrote - begin, time.monotonic() - wrote
truth, rng = content(), np.random.default_rng()
result = {"n_rows": Moments.load(path).n_rows, "equal": 0, "midway": 0, "left": []}
for i in range(times):
    os.unlink(path)
    child = started()
    if i % 4:  # from the first write on: on a busy machine no clock says when that is
        first_write()
    time.sleep(rng.uniform(0, 0.8) * (writing if i % 4 else starting))
    os.kill(child, getattr(signal, name))
    os.waitpid(child, 0)
    if os.path.exists(path):  # whole at any moment, although a write may have been under way
        result["midway"] += 0 < Moments.load(path).n_rows < 1200
    assert os.waitpid(started(), 0)[1] == 0
    result["equal"] += content() == truth
result["left"] = sorted(set(os.path.splitext(f)[1] for f in os.listdir(folder)))
print(json.dumps(result))
"""


@posix
@pytest.mark.parametrize(("name", "times"), [("SIGKILL", 20), ("SIGTERM", 5)])
def test_a_killed_run_resumes_to_the_same_file(tmp_path: Path, name: str, times: int) -> None:
    """Killed at a random moment; a write may leave a hidden ``.partial`` file, never damage."""
    times *= max(FUZZ, 1)
    result = json.loads(
        script(KILLED, str(tmp_path), name, str(times), SPLINCE_FAST_NUM_THREADS="1")
    )
    assert result["n_rows"] == 1200
    assert result["equal"] == times
    assert result["midway"] >= times // 4, "the kills came too early or too late to test anything"
    assert set(result["left"]) <= {"", ".partial"}


def test_a_reader_that_raises_loses_no_block_before_it(tmp_path: Path) -> None:
    """The error arrives as it was raised; the checkpoint holds every block that preceded it."""
    X = np.random.default_rng(0).normal(size=(50, 3))

    class Unreliable(sources.Source):
        broken = True

        def iter_from(self, first_block: int = 0) -> Any:
            for i in range(first_block, 5):
                if i == 3 and self.broken:
                    raise ConnectionError("the store is gone")
                yield sources.Block(X[10 * i : 10 * i + 10])

    source = Unreliable("a remote store", n_rows=50, n_features=3)
    path = tmp_path / "state"
    with pytest.raises(ConnectionError, match="the store is gone"):
        Moments.from_blocks(source, checkpoint=path, checkpoint_seconds=0)
    check(Moments.load(path), Rows.of(X[:30]))
    source.broken = False
    check(Moments.from_blocks(source, checkpoint=path), Rows.of(X))


def test_a_file_that_shrinks_during_a_run_is_an_error_and_can_be_resumed(tmp_path: Path) -> None:
    """Reading a memory map beyond its file would kill the process."""
    X = np.random.default_rng(0).normal(size=(4000, 64))
    file, path = tmp_path / "x.npy", tmp_path / "state"
    np.save(file, X)
    written = file.stat()
    source = sources.from_npy(file, block_rows=100)
    original = source.iter_from

    def shrinking(first_block: int = 0) -> Any:
        for i, block in enumerate(original(first_block)):
            yield block
            if i == 6:
                os.truncate(file, file.stat().st_size // 8)

    source.iter_from = shrinking  # type: ignore[method-assign]
    with pytest.raises(sf.exceptions.InputError, match="became shorter"):
        Moments.from_blocks(source, checkpoint=path, checkpoint_seconds=0)
    done = Moments.load(path).n_rows
    assert 0 < done < 4000
    with pytest.raises(sf.exceptions.InputError, match="truncated"):
        sources.from_npy(file)
    np.save(file, X)
    with pytest.raises(sf.exceptions.FileFormatError, match="has changed since"):
        Moments.from_blocks(sources.from_npy(file, block_rows=100), checkpoint=path)
    os.utime(file, ns=(written.st_atime_ns, written.st_mtime_ns))
    resumed = Moments.from_blocks(sources.from_npy(file, block_rows=100), checkpoint=path)
    assert state_bytes(resumed) == state_bytes(
        Moments.from_blocks(sources.from_npy(file, block_rows=100))
    )


@pytest.mark.parametrize("change", ["another file", "another order", "a file of labels"])
def test_a_checkpoint_of_other_files_is_refused(tmp_path: Path, change: str) -> None:
    """The files have one size, and the changes leave the first and the last block as they were."""
    rng, names = np.random.default_rng(0), [str(tmp_path / f"{name}.npy") for name in "abcde"]
    for name in names:
        np.save(name, rng.normal(size=(50, 2)) + len(name))
    a, b, c, d, other = names
    labels = [str(tmp_path / f"{name}-z.npy") for name in "abcd"]
    for path in labels:
        np.save(path, rng.integers(0, 2, 50))

    def fit(*paths: str) -> Moments:
        source = sources.from_npy(paths, {"z": labels}, block_rows=50)
        return Moments.from_blocks(source, checkpoint=tmp_path / "c")

    first = fit(a, b, c, d)
    assert state_bytes(fit(a, b, c, d)) == state_bytes(first)  # control
    paths, reason = [a, b, c, d], "it was written for other files, or for another order of files"
    if change == "another file":
        paths[1] = other
    elif change == "another order":
        paths[1:3] = c, b
    else:
        np.save(labels[1], 1 - np.load(labels[1]))
        os.utime(labels[1], ns=(0, 0))
        reason = "b-z.npy has changed since"
    with pytest.raises(sf.exceptions.FileFormatError, match=reason):
        fit(*paths)


# --- Ctrl-C --------------------------------------------------------------------------------------


def eraser(d: int = 4) -> tuple[Projection, Any]:
    X = np.random.default_rng(1).normal(size=(90, d))
    return sf.leace(Moments().update(X, {"z": np.arange(90) % 3}), erase="z"), X


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2"])
def test_control_c_while_rows_are_erased(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """The input is untouched, the eraser and its threads go on working."""
    P, wide = eraser()
    X = wide.astype(dtype)
    before, expected = X.copy(), P(X)
    calls: list[int] = []
    original = row_kernels.apply_rows

    def interrupted(*arguments: Any) -> Any:
        row = original(*arguments)
        calls.append(len(calls))
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return row

    with monkeypatch.context() as patch:
        patch.setattr(row_kernels, "apply_rows", interrupted)
        patch.setattr(erase_rows, "_CHUNK_BYTES", 10 * 8 * 4)
        patch.setattr(erase_rows, "_PIECE_BYTES", 10 * 8 * 4)
        with pytest.raises(KeyboardInterrupt):
            P(X)
        assert len(calls) == 2, "it went on although it was interrupted"
    np.testing.assert_array_equal(X, before)
    np.testing.assert_array_equal(P(X), expected)


INTERRUPTED = """
import os, signal, sys, threading, time
import numpy as np
from splince_fast import Moments
X = np.random.default_rng(0).normal(size=(700, 60))
z = np.arange(700) % 5
Moments(block_rows=100).update(X, {"z": z})
rng, interrupted = np.random.default_rng(), 0
for _ in range(int(sys.argv[1])):
    moments, done = Moments(block_rows=100), 0
    try:
        delay = rng.uniform(0.001, 0.03)
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            moments.update(X, {"z": z})
            done += 1
    except KeyboardInterrupt:
        interrupted += 1
    # The update during which the signal came was added as a whole, or not at all.
    assert moments.n_rows in (700 * done, 700 * done + 700), (moments.n_rows, done)
    repeats = moments.n_rows // 700
    assert sum(moments.class_counts("z").values()) == moments.n_rows if repeats else True
    if repeats:
        assert moments.weight == moments.n_rows
        assert np.allclose(moments.covariance(ddof=0), np.cov(X.T, ddof=0), rtol=1e-10, atol=1e-12)
print(interrupted)
"""


@posix
def test_control_c_at_any_moment_of_a_long_accumulation() -> None:
    """Real signals at random moments, not only between two steps."""
    times = 20 * max(FUZZ, 1)
    assert script(INTERRUPTED, str(times)) == f"{times}\n"


# --- memory, disk, rights ------------------------------------------------------------------------

NO_MEMORY = """
import resource, sys
import numpy as np
from splince_fast import Moments
Moments().update(np.ones((3, 2)))  # everything is loaded
with open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30), resource.RLIM_INFINITY))
moments = Moments()
try:
    moments.update(np.ones((2, 20_000), np.float64))
except MemoryError as error:
    print(error)
moments.update(np.ones((2, 3)))
print(moments.n_rows, moments.n_features)
"""


@linux
def test_no_memory_for_the_covariance_says_how_much_and_what_to_do() -> None:
    """A true limit of the address space; the object stays usable."""
    told, after = script(NO_MEMORY).splitlines()
    assert "20000 features" in told
    assert "3.0 GiB" in told
    assert "fewer features" in told
    assert after == "2 3"


FULL_DISK = """
import resource, signal, sys
import numpy as np
from splince_fast import Moments, sources
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
X = np.random.default_rng(0).normal(size=(300, 100))
path = sys.argv[1]
Moments.from_blocks(sources.from_arrays(X[:100], block_rows=50), checkpoint=path + ".small",
                    checkpoint_seconds=0)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
try:
    Moments.from_blocks(sources.from_arrays(X, block_rows=50), checkpoint=path)
except OSError as error:
    print("refused:", error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(Moments.from_blocks(sources.from_arrays(X, block_rows=50), checkpoint=path).n_rows)
"""


@linux
def test_a_checkpoint_that_outgrows_its_disk_stops_the_run_and_leaves_no_part(
    tmp_path: Path,
) -> None:
    told, rows = script(FULL_DISK, str(tmp_path / "state")).splitlines()
    assert told.startswith("refused:")
    assert "state" in told
    assert rows == "300"
    assert sorted(os.listdir(tmp_path)) == ["state", "state.small"]


WITHOUT_RIGHTS = """
import sys
from splince_fast import Moments, Projection
from splince_fast.exceptions import FileFormatError
for act in (lambda: Moments.load(sys.argv[1]), lambda: Projection.load(sys.argv[1])):
    try:
        act()
    except FileFormatError as error:
        print("damaged:", error)
    except PermissionError:
        print("rights")
"""


@linux
def test_a_file_without_the_right_to_read_is_not_called_damaged(tmp_path: Path) -> None:
    """A message that says "damaged: accumulate again" would cost the user a whole run."""
    path = tmp_path / "state"
    Moments().update(np.eye(2)).save(path)
    path.chmod(0)
    assert script(WITHOUT_RIGHTS, str(path), begin=without_powers) == "rights\nrights\n"


READ_ONLY = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
import splince_fast as sf
assert sf.__file__.startswith(sys.argv[1]), sf.__file__
X = np.random.default_rng(0).normal(size=(50, 4))
z = np.arange(50) % 2
clean = sf.leace(sf.Moments().update(X, {"z": z}), erase="z")(X)
print(bool(abs(clean[z == 1].mean(axis=0) - clean[z == 0].mean(axis=0)).max() < 1e-12))
"""


@linux
def test_an_installation_that_nobody_may_write_to_and_no_home(tmp_path: Path) -> None:
    """Numba then has no place for its cache: the kernels are compiled in memory."""
    home = tmp_path / "site"
    shutil.copytree(
        PACKAGE, home / "splince_fast", ignore=shutil.ignore_patterns("__pycache__", "*.c", "data")
    )
    folders = [home, *(p for p in home.rglob("*") if p.is_dir())]
    for path in home.rglob("*"):
        path.chmod(0o555 if path.is_dir() or path.suffix == ".so" else 0o444)
    home.chmod(0o555)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA_", "XDG_"))}
    environment |= {"HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTHONPATH", None)
    try:
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY, str(home)], capture_output=True, text=True,
            timeout=300, check=False, env=environment, cwd="/", preexec_fn=without_powers,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout == "True\n"
        assert not list(home.rglob("*.nbi"))
    finally:
        for path in folders:
            path.chmod(0o755)


# --- processes and threads -----------------------------------------------------------------------

FORKED = """
import multiprocessing, sys, warnings
import numpy as np
from splince_fast import Moments, leace
warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of forks beside threads

rng = np.random.default_rng(0)
X, z = rng.normal(size=(3000, 300)).astype(np.float32), np.arange(3000) % 3

def part(i):
    rows = slice(i * 1000, (i + 1) * 1000)
    return Moments(block_rows=500).update(X[rows], {"z": z[rows]})

def erased(i):
    return leace(part(i), erase="z").rank

if __name__ == "__main__":
    here = [part(i) for i in range(3)]  # threads of ours and of BLAS have run
    with multiprocessing.get_context("fork").Pool(3) as pool:
        there, ranks = pool.map(part, range(3)), pool.map(erased, range(3))
    total = sum(there)
    same = all((a.covariance() == b.covariance()).all() for a, b in zip(here, there))
    print(same, total.n_rows, ranks)
"""


@posix
def test_forked_workers_after_threads_have_run() -> None:
    """A forked pool, whose workers use BLAS and our threads afresh, and pickled states."""
    assert script(FORKED, OPENBLAS_NUM_THREADS="2", SPLINCE_FAST_NUM_THREADS="2") == (
        "True 3000 [2, 2, 2]\n"
    )


CORE = """
import sys
import numpy as np
import splince_fast as sf
rng = np.random.default_rng(0)
X, z, y = rng.normal(size=(2000, 300)), np.arange(2000) % 3, np.arange(2000) % 2
X[:, 0] += z; X[:, 1] += y
moments = sf.Moments().update(X, {"z": z, "y": y})
P = sf.splince(moments, erase="z", keep="y")
after = sf.Moments().update(P(X), {"z": z, "y": y})
size = np.sqrt(np.diag(moments.covariance()).max())
erased = abs(after.cross_covariance("z")).max() / size
kept = abs(after.cross_covariance("y") - moments.cross_covariance("y")).max() / size
assert erased < 1e-12 and kept < 1e-12, (erased, kept)
"""


@pytest.mark.parametrize("threads", ["1", "2"])
def test_any_number_of_blas_threads(threads: str) -> None:
    assert script(CORE + "print('done')", OPENBLAS_NUM_THREADS=threads) == "done\n"


@linux
def test_the_core_needs_no_openmp() -> None:
    """Machines without libgomp are served: nothing of the core loads it."""
    maps = "print([l for l in open('/proc/self/maps') if 'gomp' in l or 'libomp' in l])"
    assert script(CORE + maps) == "[]\n"


# --- bad calls -----------------------------------------------------------------------------------

N, D = 12, 3


def _moments() -> Moments:
    X = np.random.default_rng(0).normal(size=(N, D))
    return Moments().update(X, {"z": np.arange(N) % 2, "y": X[:, 0] + np.arange(N)})


def _report() -> Report:
    report = sf.splince(_moments(), erase="z", keep="y").report
    assert report is not None
    return report


def _projection() -> Projection:
    return Projection(np.ones((D, 1)), np.ones((D, 1)), np.zeros(D))


def _with_option(option: str) -> Callable[[Any], Any]:
    return lambda v: sf.splince(_moments(), erase="z", keep="y", **{option: v})


_X = np.random.default_rng(0).normal(size=(N, D))
# Every argument of every public function; each is given every value below.
CALLS: dict[str, Callable[[Any], Any]] = {
    "Moments(block_rows)": lambda v: Moments(block_rows=v).update(_X),
    "Moments(kinds)": lambda v: Moments(kinds=v).update(_X, {"z": [0, 1] * 6}),
    "Moments(joint)": lambda v: Moments(joint=v).update(_X, {"z": [0, 1] * 6}),
    "update(X) of new moments": lambda v: Moments().update(v),
    "update(X)": lambda v: _moments().update(v),
    "update(labels)": lambda v: _moments().update(_X, v),
    "update(label of a class)": lambda v: _moments().update(_X, {"z": v}),
    "update(label of a number)": lambda v: _moments().update(_X, {"y": v}),
    "update(label of a new name)": lambda v: _moments().update(_X, {"new": v}),
    "update(sample_weight)": lambda v: _moments().update(_X, sample_weight=v),
    "from_blocks(blocks)": lambda v: Moments.from_blocks(v),
    "from_blocks(a block)": lambda v: Moments.from_blocks([(_X, {"z": [0, 1] * 6}), v]),
    "from_blocks(checkpoint_seconds)": lambda v: Moments.from_blocks([_X], checkpoint_seconds=v),
    "moments + other": lambda v: _moments() + v,
    "moments - part": lambda v: _moments() - v,
    "covariance(ddof)": lambda v: _moments().covariance(ddof=v),
    "cross_covariance(ddof)": lambda v: _moments().cross_covariance("z", ddof=v),
    "cross_covariance(name)": lambda v: _moments().cross_covariance(v),
    "classes(name)": lambda v: _moments().classes(v),
    "class_counts(name)": lambda v: _moments().class_counts(v),
    "Moments.load(path)": Moments.load,
    "Projection.load(path)": Projection.load,
    "leace(moments)": lambda v: sf.leace(v, erase="z"),
    "leace(erase)": lambda v: sf.leace(_moments(), erase=v),
    "splince(erase)": lambda v: sf.splince(_moments(), erase=v, keep="y"),
    "splince(keep)": lambda v: sf.splince(_moments(), erase="z", keep=v),
    "sal(erase)": lambda v: sf.sal(_moments(), erase=v),
    "sal(keep)": lambda v: sf.sal(_moments(), erase="z", keep=v),
    "repair(after)": lambda v: sf.repair(v, before=_moments(), keep="y"),
    "repair(before)": lambda v: sf.repair(_moments(), before=v, keep="y"),
    "repair(keep)": lambda v: sf.repair(_moments(), before=_moments(), keep=v),
    "repair(strength)": lambda v: sf.repair(
        _moments(), before=_moments(), keep="y", strength=v
    ),
    "mean_projection(erase)": lambda v: sf.mean_projection(_moments(), erase=v),
    **{
        f"splince({option})": _with_option(option)
        for option in (
            "max_amplification", "on_infeasible", "null_space", "shrinkage", "rank_tol", "solver",
            "strength",
        )
    },
    "Projection(left)": lambda v: Projection(v, np.ones((D, 1)), np.zeros(D)),
    "Projection(right)": lambda v: Projection(np.ones((D, 1)), v, np.zeros(D)),
    "Projection(mean)": lambda v: Projection(np.ones((D, 1)), np.ones((D, 1)), v),
    "projection(X)": lambda v: _projection()(v),
    "projection(out)": lambda v: _projection()(_X, out=v),
    "fold_into(weight)": lambda v: _projection().fold_into(v),
    "fold_into(bias)": lambda v: _projection().fold_into(np.ones((4, D)), v),
    "projection @ other": lambda v: _projection() @ v,
    "other @ projection": lambda v: v @ _projection(),
    "astype(dtype)": lambda v: _projection().astype(v),
    "Report.from_dict(values)": Report.from_dict,
    "from_arrays(X)": lambda v: list(sources.from_arrays(v)),
    "from_arrays(labels)": lambda v: list(sources.from_arrays(_X, v)),
    "from_arrays(sample_weight)": lambda v: list(sources.from_arrays(_X, sample_weight=v)),
    "from_arrays(block_rows)": lambda v: list(sources.from_arrays(_X, block_rows=v)),
    "from_npy(paths)": lambda v: list(sources.from_npy(v)),
    "encode(labels)": lambda v: labels.encode(v, N),
}  # fmt: skip

VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "zero": lambda: 0,
    "negative": lambda: -1,
    "fraction": lambda: 3.5,
    "NaN": lambda: float("nan"),
    "infinity": lambda: float("inf"),
    "huge integer": lambda: 10**30,
    "True": lambda: True,
    "scalar of NumPy": lambda: np.float64(2.0),
    "text": lambda: "abc",
    "bytes": lambda: b"abc",
    "object": object,
    "function": lambda: len,
    "empty list": list,
    "empty dict": dict,
    "set": lambda: {"z"},
    "dict of numbers": lambda: {1: 2},
    "mixed list": lambda: [1, "a"],
    "ragged list": lambda: [[1, 2], [3]],
    "names": lambda: ["z", "nope"],
    "nested names": lambda: [["z"]],
    "tuple of names": lambda: ("z", "y"),
    "tuple with a list": lambda: ("z", []),
    "vector": lambda: np.zeros(3),
    "0-d array": lambda: np.array(1),
    "no rows": lambda: np.zeros((0, D)),
    "no columns": lambda: np.zeros((D, 0)),
    "three axes": lambda: np.zeros((2, 2, 2)),
    "NaN in an array": lambda: np.full((N, D), np.nan),
    "overflowing squares": lambda: np.full((N, D), 1e300),
    "complex": lambda: np.ones((N, D)) + 1j,
    "complex vector": lambda: np.ones(N) + 1j,
    "array of text": lambda: np.array(["a"] * N),
    "array of None": lambda: np.array([None] * N, object),
    "array of dates": lambda: np.zeros(3, "M8[s]"),
    "array of bytes": lambda: np.zeros(3, "V4"),
    "masked array": lambda: np.ma.masked_array([1, 2], [False, True]),
}


def bad_calls(call: str) -> list[str]:
    """Outcomes of a call that are neither a result, nor an error that tells the user what to do."""
    wrong = []
    for name, make in VALUES.items():
        value = make()
        try:
            result = CALLS[call](value)
        except (SplinceError, sf.SplinceWarning):
            continue
        except FileNotFoundError:
            if call.endswith("load(path)"):
                continue
            wrong.append(f"{name}: FileNotFoundError")
        except TypeError as error:
            # Python's own, for an operand or a path that is none.
            if "@" in call or ("PathLike" in str(error) and call.endswith("load(path)")):
                continue
            wrong.append(f"{name}: {error!r}")
        except BaseException as error:
            wrong.append(f"{name}: {error!r}")
        else:
            finite = not isinstance(result, np.ndarray) or np.isfinite(result).all()
            # Erasing is row by row: what is not finite in a row stays so in that row.
            if not finite and not (call == "projection(X)" and name == "NaN in an array"):
                wrong.append(f"{name}: NaN or infinity came out")
    return wrong


@pytest.mark.parametrize("call", CALLS)
def test_no_bad_argument_surfaces_as_an_error_from_inside(call: str) -> None:
    """Not as AssertionError, IndexError or LinAlgError, nor as a warning of NumPy or as NaN."""
    assert bad_calls(call) == []


@pytest.mark.parametrize("call", ["update(X)", "splince(keep)", "projection(X)"])
def test_control_a_bare_error_is_seen(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def assertive(value: Any) -> None:
        assert isinstance(value, np.ndarray), "not an array"

    monkeypatch.setitem(CALLS, call, assertive)
    assert len(bad_calls(call)) > 10


def test_bad_arguments_are_refused_in_optimised_mode_too() -> None:
    """``python -O`` removes every assert; no check of an argument may be one."""
    text = (
        "import sys, warnings\n"
        "warnings.simplefilter('error')\n"
        "import test_faults\n"
        "assert False, 'this is not optimised mode'\n"
        "print({c: w for c in test_faults.CALLS if (w := test_faults.bad_calls(c))})\n"
    )
    here = os.pathsep.join(map(str, (PACKAGE.parent, *Path(__file__).parents[:2])))
    assert script(text, flags=("-O",), PYTHONPATH=here) == "{}\n"


def test_a_checkpoint_of_other_labels_is_refused(tmp_path: Path) -> None:
    """Resuming with another variable would leave two halves of two variables."""
    rng = np.random.default_rng(0)
    X, a, b = rng.normal(size=(400, 3)), rng.integers(0, 2, 400), rng.integers(0, 2, 400)

    def blocks(name: str, z: Any, stop: int) -> Iterator[Any]:
        for start in range(0, 400, 100):
            if start >= stop:
                raise RuntimeError("the reader stops")
            yield X[start : start + 100], {name: z[start : start + 100]}

    checkpoint = tmp_path / "run.moments"
    with pytest.raises(RuntimeError, match="stops"):
        sf.Moments.from_blocks(blocks("a", a, 200), checkpoint=checkpoint, checkpoint_seconds=0)
    with pytest.raises(sf.exceptions.FileFormatError, match=r"'a'.*'b'"):
        sf.Moments.from_blocks(blocks("b", b, 400), checkpoint=checkpoint, checkpoint_seconds=0)
    whole = sf.Moments.from_blocks(blocks("a", a, 400), checkpoint=checkpoint)
    assert whole.n_rows == 400
