"""Faults from outside: killed processes, full disks, missing rights, memory, forks, bad calls."""

from __future__ import annotations

import copy
import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from naive_model import FUZZ, failing, state_bytes
from processes import script

import splince_fast as sf
from splince_fast import Moments, Projection, SplinceError, labels, sources
from splince_fast._kernels import row_kernels
from splince_fast._runtime import erase_rows
from splince_fast.report import Report

EPS = float(np.finfo(np.float64).eps)
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

# One process imports; its forks, which cost milliseconds, are the ones to die.
KILLED = """
import json, os, signal, sys, time
import numpy as np
from splince_fast import Moments, sources

path, number, times = sys.argv[1], getattr(signal, sys.argv[2]), int(sys.argv[3])
X = np.random.default_rng(0).normal(size=(1200, 24)).astype(np.float32)
labels = {"z": np.arange(1200) % 3, "y": X[:, 0].astype(np.float64)}

def run():
    source = sources.from_arrays(X, labels, block_rows=30)  # 40 checkpoints
    Moments.from_blocks(source, checkpoint=path, checkpoint_seconds=0, block_rows=100)

def started():
    child = os.fork()
    if not child:
        run()
        os._exit(0)
    return child

def finish():
    run()
    with open(path, "rb") as file:
        return file.read()

finish()  # everything is loaded
os.unlink(path)
begin, truth, rng = time.monotonic(), finish(), np.random.default_rng()
whole = time.monotonic() - begin
result = {"n_rows": Moments.load(path).n_rows, "equal": 0, "midway": 0}
for i in range(times):
    os.unlink(path)
    child = started()
    while i % 4 and not os.path.exists(path):  # on a busy machine no clock says when that is
        time.sleep(1e-4)
    time.sleep(rng.uniform(0, 0.8) * whole)
    os.kill(child, number)
    os.waitpid(child, 0)
    if os.path.exists(path):  # whole at any moment, although a write may have been under way
        result["midway"] += 0 < Moments.load(path).n_rows < 1200
    result["equal"] += finish() == truth
result["left"] = sorted({os.path.splitext(name)[1] for name in os.listdir(os.path.dirname(path))})
print(json.dumps(result))
"""


@posix
@pytest.mark.parametrize(("name", "times"), [("SIGKILL", 12), ("SIGTERM", 4)])
def test_a_killed_run_resumes_to_the_same_file(tmp_path: Path, name: str, times: int) -> None:
    """Killed at a random moment; a write may leave a hidden ``.partial`` file, never damage."""
    times *= max(FUZZ, 1)
    result = json.loads(
        script(KILLED, str(tmp_path / "state"), name, str(times), SPLINCE_FAST_NUM_THREADS="1")
    )
    assert result["n_rows"] == 1200
    assert result["equal"] == times
    assert result["midway"] >= times // 4, "the kills came too early or too late to test anything"
    assert set(result["left"]) <= {"", ".partial"}


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
    os.utime(file, ns=(written.st_atime_ns, written.st_mtime_ns))
    resumed = Moments.from_blocks(sources.from_npy(file, block_rows=100), checkpoint=path)
    assert state_bytes(resumed) == state_bytes(
        Moments.from_blocks(sources.from_npy(file, block_rows=100))
    )


OTHER = "it was written for other files, or for another order of files"


@pytest.mark.parametrize(
    ("names", "reason"),
    [("aecd", OTHER), ("acbd", OTHER), ("abcd", "b-z.npy has changed since")],
    ids=["another file", "another order", "a file of labels"],
)
def test_a_checkpoint_of_other_files_is_refused(tmp_path: Path, names: str, reason: str) -> None:
    """The files have one size, and the changes leave the first and the last block as they were."""
    rng, labels = np.random.default_rng(0), [str(tmp_path / f"{name}-z.npy") for name in "abcd"]
    for name in "abcde":
        np.save(tmp_path / f"{name}.npy", rng.normal(size=(50, 2)))
    for path in labels:
        np.save(path, rng.integers(0, 2, 50))

    def fit(names: str) -> Moments:
        paths = [str(tmp_path / f"{name}.npy") for name in names]
        source = sources.from_npy(paths, {"z": labels}, block_rows=50)
        return Moments.from_blocks(source, checkpoint=tmp_path / "c")

    first = fit("abcd")
    assert state_bytes(fit("abcd")) == state_bytes(first)  # control
    if names == "abcd":
        np.save(labels[1], 1 - np.load(labels[1]))
        os.utime(labels[1], ns=(0, 0))
    with pytest.raises(sf.exceptions.FileFormatError, match=reason):
        fit(names)


# --- Ctrl-C --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2"])
def test_control_c_while_rows_are_erased(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """The input is untouched, the eraser and its threads go on working."""
    X = np.random.default_rng(1).normal(size=(90, 4)).astype(dtype)
    P = sf.leace(Moments().update(X, {"z": np.arange(90) % 3}), erase="z")
    before, expected = X.copy(), P(X)
    with monkeypatch.context() as patch:
        patch.setattr(row_kernels, "apply_rows", erase := failing(row_kernels.apply_rows, 1))
        patch.setattr(erase_rows, "_CHUNK_BYTES", 10 * 8 * 4)
        patch.setattr(erase_rows, "_PIECE_BYTES", 10 * 8 * 4)
        with pytest.raises(KeyboardInterrupt):
            P(X)
        assert next(erase.calls) == 2, "it went on although it was interrupted"
    np.testing.assert_array_equal(X, before)
    np.testing.assert_array_equal(P(X), expected)


INTERRUPTED = """
import os, signal, sys, threading, time
import numpy as np
from splince_fast import Moments
X, rng, interrupted = np.random.default_rng(0).normal(size=(700, 60)), np.random.default_rng(), 0
labels, handler = {"z": np.arange(700) % 5}, signal.getsignal(signal.SIGINT)
Moments(block_rows=100).update(X, labels)
for i in range(int(sys.argv[1])):
    # Blocks that are reduced at once, or rows that wait for a read.
    moments, n, done = Moments(block_rows=100), 700 if i % 2 else 7, 0
    part = {"z": labels["z"][:n]}
    try:
        delay = rng.uniform(0.001, 0.03 if i % 2 else 0.01)
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            moments.update(X[:n], part)
            done += 1
            if not i % 2:
                moments.mean, moments.weight, moments.cross_covariance("z"), moments.covariance()
    except KeyboardInterrupt:
        interrupted += 1
    assert signal.getsignal(signal.SIGINT) is handler
    # The update during which the signal came was added as a whole, or not at all.
    assert moments.n_rows in (n * done, n * done + n), (moments.n_rows, done)
    if moments.n_rows:
        assert sum(moments.class_counts("z").values()) == moments.n_rows == moments.weight
        expected = np.cov(X[:n].T, ddof=0)
        assert np.allclose(moments.covariance(ddof=0), expected, rtol=1e-10, atol=1e-12)
    other = threading.Thread(target=moments.update, args=(X, labels))  # no lock is left
    other.start()
    other.join(20)
    assert not other.is_alive()
print(interrupted)
"""


@posix
def test_control_c_at_any_moment_of_a_long_accumulation() -> None:
    """Real signals at random moments, not only between two steps; of updates and of reads."""
    times = 80 * max(FUZZ, 1)
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
X, path = np.random.default_rng(0).normal(size=(300, 100)), sys.argv[1]
def run(rows=X, name=path):
    return Moments.from_blocks(sources.from_arrays(rows, block_rows=50), checkpoint=name)
run(X[:100], path + ".small")
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
for act in (run, lambda: Moments().update(np.ones((2, 200))).save(path + ".small")):
    try:
        act()
    except OSError as error:
        print("refused:", error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(run().n_rows, Moments.load(path + ".small").n_rows)
"""


@linux
def test_a_checkpoint_that_outgrows_its_disk_stops_the_run_and_leaves_no_part(
    tmp_path: Path,
) -> None:
    """A true short write, not a simulated one; a file that is replaced stays whole."""
    *told, rows = script(FULL_DISK, str(tmp_path / "state")).splitlines()
    assert [line.startswith("refused:") and "state" in line for line in told] == [True, True]
    assert rows == "300 100"
    assert sorted(os.listdir(tmp_path)) == ["state", "state.small"]


WITHOUT_RIGHTS = """
import sys
from splince_fast import Moments, Projection
from splince_fast.exceptions import FileFormatError
for act in (Moments.load, Projection.load, Moments().save):
    try:
        act(sys.argv[1])
    except FileFormatError as error:
        print("damaged:", error)
    except PermissionError:
        print("rights")
"""


@linux
def test_a_file_without_rights_is_not_called_damaged_and_stays(tmp_path: Path) -> None:
    """A message that says "damaged: accumulate again" would cost the user a whole run."""
    folder, path = tmp_path / "closed", tmp_path / "closed" / "state"
    folder.mkdir()
    Moments().update(np.eye(2)).save(path)
    kept = path.read_bytes()
    path.chmod(0)
    folder.chmod(0o555)
    told = script(WITHOUT_RIGHTS, str(path), begin=without_powers)
    folder.chmod(0o755)
    path.chmod(0o644)
    assert told == "rights\n" * 3
    assert os.listdir(folder) == ["state"]
    assert path.read_bytes() == kept


READ_ONLY = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
import scipy.sparse
import splince_fast as sf
assert sf.__file__.startswith(sys.argv[1]), sf.__file__
X = np.random.default_rng(0).normal(size=(50, 4))
z = np.arange(50) % 2
clean = sf.leace(sf.Moments().update(X, {"z": z}), erase="z")(X)
sparse = sf.Moments(covariance_type="diag").update(scipy.sparse.csr_array(X), {"z": z})
gap = clean[z == 1].mean(axis=0) - clean[z == 0].mean(axis=0)
print(np.allclose(sparse.mean, X.mean(axis=0)), bool(abs(gap).max() < 1e-12))
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
        assert done.stdout == "True True\n"
        assert not list(home.rglob("*.nbi"))
    finally:
        for path in folders:
            path.chmod(0o755)


# --- processes and threads -----------------------------------------------------------------------

FORKED = """
import multiprocessing, threading, warnings
import numpy as np
from splince_fast import Moments, leace
from splince_fast.moments import block
warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of forks beside threads
block._GRAIN = block._GRAIN_PRODUCTS = 64  # small work is split, too

rng = np.random.default_rng(0)
X, z = rng.normal(size=(3000, 300)).astype(np.float32), np.arange(3000) % 3
locked, leave = threading.Event(), threading.Event()

def part(i):
    rows = slice(i * 1000, (i + 1) * 1000)
    return Moments(block_rows=500).update(X[rows], {"z": z[rows]})

def erased(i):
    return leace(part(i), erase="z").rank

def grown(_):
    return whole.copy().update(X, {"z": z})

def read():
    with whole._lock:
        locked.set()
        leave.wait()

here = [part(i) for i in range(3)]  # threads of ours and of BLAS have run
whole = sum(here)
thread = threading.Thread(target=read); thread.start(); locked.wait()
with multiprocessing.get_context("fork").Pool(3) as pool:
    leave.set(); thread.join()
    calls = [pool.map_async(f, range(3)) for f in (part, grown, erased)]
    there, larger, ranks = (call.get(100) for call in calls)
pairs = zip(here + [grown(0)] * 3, there + larger)
same = all((a.covariance() == b.covariance()).all() for a, b in pairs)
print(same, larger[0].n_rows, ranks)
"""


@posix
def test_forked_workers_after_threads_have_run() -> None:
    """Children use BLAS and our threads anew; a lock that another thread held is free in them."""
    assert script(FORKED, OPENBLAS_NUM_THREADS="2", SPLINCE_FAST_NUM_THREADS="2") == (
        "True 6000 [2, 2, 2]\n"
    )


IMPORTING = """
import os, pathlib, signal, sys, threading, time
import splince_fast, splince_fast.moments
folder = pathlib.Path(sys.argv[1])
(folder / "slow.py").write_text("import time; time.sleep(1)")
splince_fast.__path__.append(str(folder))
thread = threading.Thread(target=lambda: __import__("splince_fast.slow")); thread.start()
while "splince_fast.slow" not in sys.modules:
    time.sleep(0.01)
child = os.fork()
if not child:
    signal.alarm(20)
    import splince_fast.slow
    os._exit(0)
thread.join()
print(os.waitpid(child, 0)[1])
"""


@posix
def test_a_fork_waits_for_what_another_thread_imports(tmp_path: Path) -> None:
    """Kernels are imported on first use; in a child no thread would free the lock of an import."""
    assert script(IMPORTING, str(tmp_path)) == "0\n"


CORE = """
import pathlib, sys
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
np.savez(sys.argv[1], covariance=moments.covariance(), matrix=P.matrix())
maps = pathlib.Path("/proc/self/maps")
print(maps.exists() and [l for l in maps.open() if "gomp" in l or "libomp" in l])
"""


def test_blas_threads_agree_to_rounding(tmp_path: Path) -> None:
    """Without OpenMP: nothing of the core loads it."""
    found = []
    for threads in ("1", "2"):
        path = tmp_path / f"{threads}.npz"
        openmp = script(CORE, str(path), OPENBLAS_NUM_THREADS=threads)
        assert openmp == ("[]\n" if sys.platform == "linux" else "False\n")
        found.append(dict(np.load(path)))
    for name, scale in (("covariance", np.abs(found[0]["covariance"]).max()), ("matrix", 1.0)):
        # Sums of n products in another order differ by a few sqrt(n) eps; solving adds d eps.
        assert np.abs(found[0][name] - found[1][name]).max() < 300 * 8 * EPS * scale, name


# --- bad calls -----------------------------------------------------------------------------------

N, D = 12, 3


def _moments() -> Moments:
    X = np.random.default_rng(0).normal(size=(N, D))
    return Moments().update(X, {"z": np.arange(N) % 2, "y": X[:, 0] + np.arange(N)})


def _projection(**given: Any) -> Projection:
    one = np.ones((D, 1))
    return Projection(**{"left": one, "right": one, "mean": np.zeros(D), **given})


def _updated(**given: Any) -> Moments:
    return Moments(**given).update(_X, {"z": [0, 1] * 6})


_X = np.random.default_rng(0).normal(size=(N, D))
_OPTIONS = (
    "max_amplification", "on_infeasible", "null_space", "shrinkage", "rank_tol", "solver",
    "strength",
)  # fmt: skip
# Functions with arguments that they take; each argument in turn is given every value below. An
# argument that is None has its default.
TAKEN: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "Moments": (_updated, {"block_rows": 4, "kinds": {}, "joint": []}),
    "new.update": (lambda **k: Moments().update(**k), {"X": _X, "labels": None}),
    "update": (
        lambda **k: _moments().update(**k), {"X": _X, "labels": None, "sample_weight": None},
    ),
    "from_blocks": (Moments.from_blocks, {"blocks": [_X], "checkpoint_seconds": 60}),
    "covariance": (lambda **k: _moments().covariance(**k), {"ddof": 1}),
    "cross_covariance": (lambda **k: _moments().cross_covariance(**k), {"name": "z", "ddof": 1}),
    "classes": (lambda **k: _moments().classes(**k), {"name": "z"}),
    "class_counts": (lambda **k: _moments().class_counts(**k), {"name": "z"}),
    "Moments.load": (Moments.load, {"path": "nowhere"}),
    "Projection.load": (Projection.load, {"path": "nowhere"}),
    "leace": (sf.leace, {"moments": _moments(), "erase": "z"}),
    "splince": (
        sf.splince,
        {"moments": _moments(), "erase": "z", "keep": "y", **dict.fromkeys(_OPTIONS)},
    ),
    "sal": (sf.sal, {"moments": _moments(), "erase": "z", "keep": "y"}),
    "mean_projection": (sf.mean_projection, {"moments": _moments(), "erase": "z"}),
    "repair": (
        sf.repair, {"after": _moments(), "before": _moments(), "keep": "y", "strength": 1.0},
    ),
    "Projection": (_projection, {"left": None, "right": None, "mean": None}),
    "projection": (lambda **k: _projection()(**k), {"X": _X, "out": None}),
    "fold_into": (
        lambda **k: _projection().fold_into(**k), {"weight": np.ones((4, D)), "bias": None},
    ),
    "astype": (lambda **k: _projection().astype(**k), {"dtype": float}),
    "from_dict": (Report.from_dict, {"values": None}),
    "from_arrays": (
        lambda **k: list(sources.from_arrays(**k)),
        {"X": _X, "labels": None, "sample_weight": None, "block_rows": None},
    ),
    "from_npy": (lambda **k: list(sources.from_npy(**k)), {"paths": "nowhere"}),
    "encode": (partial(labels.encode, n_rows=N), {"labels": None}),
}  # fmt: skip


def _call(function: Callable[..., Any], arguments: dict[str, Any], name: str) -> Any:
    given = {key: value for key, value in arguments.items() if value is not None}
    return lambda value: function(**{**given, name: value})


CALLS: dict[str, Callable[[Any], Any]] = {
    **{
        f"{called}({name})": _call(function, arguments, name)
        for called, (function, arguments) in TAKEN.items() for name in arguments
    },
    **{
        f"update(label of {name})": lambda v, name=name: _moments().update(_X, {name: v})
        for name in ("z", "y", "new")
    },
    "from_blocks(a block)": lambda v: Moments.from_blocks([(_X, {"z": [0, 1] * 6}), v]),
    "moments + other": lambda v: _moments() + v,
    "moments - part": lambda v: _moments() - v,
    "projection @ other": lambda v: _projection() @ v,
    "other @ projection": lambda v: v @ _projection(),
}  # fmt: skip

VALUES: list[Any] = [
    None, 0, -1, 3.5, float("nan"), float("inf"), 10**30, True, np.float64(2.0), "abc", b"abc",
    object(), len, [], {}, {"z"}, {1: 2}, [1, "a"], [[1, 2], [3]], ["z", "nope"], [["z"]],
    ("z", "y"), ("z", []), np.zeros(3), np.array(1), np.zeros((0, D)), np.zeros((D, 0)),
    np.zeros((2, 2, 2)), np.full((N, D), np.nan), np.full((N, D), 1e300), np.ones((N, D)) + 1j,
    np.ones(N) + 1j, np.array(["a"] * N), np.array([None] * N, object), np.zeros(3, "M8[s]"),
    np.zeros(3, "V4"), np.ma.masked_array([1, 2], [False, True]),
]  # fmt: skip


def bad_calls(call: str) -> list[str]:
    """Outcomes of a call that are neither a result, nor an error that tells the user what to do."""
    wrong, of_path = [], call.endswith("load(path)")
    for value in map(copy.deepcopy, VALUES):
        try:
            result = CALLS[call](value)
        except (SplinceError, sf.SplinceWarning):
            continue
        except BaseException as error:
            # Python's own, for a path without a file, and for an operand or a path that is none.
            missing = isinstance(error, FileNotFoundError) and of_path
            operand = "@" in call or ("PathLike" in str(error) and of_path)
            if not missing and not (isinstance(error, TypeError) and operand):
                wrong.append(f"{value!r}: {error!r}")
        else:
            finite = not isinstance(result, np.ndarray) or np.isfinite(result).all()
            # Erasing is row by row: what is not finite in a row stays so in that row.
            if not finite and call != "projection(X)":
                wrong.append(f"{value!r}: NaN or infinity came out")
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
