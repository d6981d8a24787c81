"""sources._hdf5, and .h5, .hdf5 and .h5ad files on the command line, beside .npy and anndata."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import splince_fast as sf
from splince_fast.sources import from_hdf5, from_npy

h5py = pytest.importorskip("h5py", reason="h5py is not installed")
N, D = 90, 4
Y, Z = np.random.default_rng(0).integers(0, 2, (2, N))
X = 9 * np.random.default_rng(1).normal(size=(N, D)) + 9 * np.outer(Z, np.eye(D)[0])
CODES = np.where(np.arange(N) % 5 == 0, -1, Z)  # -1 is missing
NAMES = np.array(["man", "woman", None])[CODES]
STORED: dict[str, dict[str, Any]] = {
    "contiguous, half precision": {"dtype": "f2"},
    "chunks of columns": {"chunks": (7, 3), "compression": "gzip", "shuffle": True},
    "other byte order": {"dtype": ">f4", "maxshape": (None, D)},
    "integers": {"dtype": "i4", "chunks": (16, D), "scaleoffset": 0},
}


@pytest.fixture(autouse=True)
def cli(told: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    return lambda line, code=0: told(*line.split(), code=code)


def write(name: str, part: slice, **options: Any) -> str:
    """Write rows, also as .npy; labels as anndata did before 0.8; data sets that are no rows."""
    np.save(name, X[part].astype(options.get("dtype", "f8")))
    with h5py.File(f"{name}.h5", "w") as file:
        file.create_dataset("a/x", data=X[part], **options).attrs["unit"] = "m"
        file["names"], file["w"], file["z"] = ["man", "woman"], 1.0 + Y[part], CODES[part]
        file["z"].attrs["categories"] = file["names"].ref
        file["ones"] = np.ones((3, D))
    return f"{name}.h5"


@pytest.mark.parametrize("stored", STORED)
def test_rows_and_commands_are_those_of_npy_files(stored: str, cli: Any) -> None:
    paths = [write(n, p, **STORED[stored]) for n, p in (("a", slice(50)), ("b", slice(50, N)))]
    twin = from_npy(["a.npy", "b.npy"], {"z": NAMES}, sample_weight=1.0 + Y, block_rows=8)
    source = from_hdf5(paths, "/a/x", {"z": "/z"}, sample_weight="w", block_rows=8)
    assert (source.n_rows, source.nbytes, source.files) == (N, twin.nbytes, tuple(paths))
    assert source.name != from_hdf5(paths, "/ones", block_rows=8).name  # in checkpoints
    later = [[block.X.tobytes() for block in s.iter_from(8)] for s in (source, twin)]
    assert later[0] == later[1]
    sf.Moments.from_blocks(source).save("m")
    sf.Moments.from_blocks(twin).save("n")
    np.save("z", Z)
    cli("fit a.h5 b.h5 --key /a/x --labels z.npy --erase z -o e")
    cli("fit a.npy b.npy --labels z.npy --erase z -o f")
    assert all(Path(a).read_bytes() == Path(b).read_bytes() for a, b in ("mn", "ef"))
    apply = "apply e a.h5 --key /a/x -o out.hdf5"
    assert cli(apply) == "50 rows: out.hdf5\n"
    assert "finished before" in cli(f"{apply} --resume")
    with h5py.File("a.h5") as old, h5py.File("out.hdf5", "r+") as new:
        found, given, erased = new["a/x"], old["a/x"], sf.load_eraser("e")(np.load("a.npy"))
        assert (found.dtype, found.attrs["unit"]) == (erased.dtype, "m")
        np.testing.assert_array_equal(found, erased)
        for field in ("chunks", "compression", "shuffle", "maxshape"):
            assert getattr(found, field) == getattr(given, field)
        assert (new["w"][:] == old["w"]).all()
        assert given[25].tobytes() not in Path("out.hdf5").read_bytes()
        found[25] = 0
    assert "exists" in cli(f"{apply} --resume", 2)  # control
    h5py.File("link.h5", "w")["x"] = h5py.ExternalLink("a.h5", "/a/x")
    with h5py.File("a.h5", "a") as file:
        file["hard"], file["soft"] = file["a/x"], h5py.SoftLink("/a/x")
    cli("apply e a.h5 --key soft -o all.h5")
    with h5py.File("all.h5") as file:
        assert file["a/x"] == file["hard"] == file["soft"]  # one data set
        np.testing.assert_array_equal(file["a/x"], erased)
    assert "a.h5'; apply the eraser to that" in cli("apply e link.h5 --key x -o no.h5", 2)


@pytest.mark.parametrize(("name", "dataset", "labels", "message"), [
    *((f"{n}.h5", "/a/x", None, "cannot be read as HDF5") for n in ("absent", "text", "cut")),
    *(("x.h5", f"/{key}", None, f"'/{key}' is no data set .* are '/a/x', '/ones'")
      for key in ("absent", "a", "w", "names")),  # a group, one axis, text
    *(("x.h5", "/a/x", key, f"has no column '{key}'") for key in ("/obs/job", "/a")),
    ("wide.h5", "/a/x", None, "has 9 columns but .* has 4"),
])  # fmt: skip
def test_malformed_files_are_named(name: str, dataset: str, labels: Any, message: str) -> None:
    Path("cut.h5").write_bytes(Path(write("x", slice(N))).read_bytes()[:-100])
    Path("text.h5").write_text("age,job\n")
    h5py.File("wide.h5", "w")["a/x"] = np.ones((5, 9))
    with pytest.raises(sf.exceptions.InputError, match=message) as caught:
        from_hdf5(["x.h5", name][name != "wide.h5" :], dataset, labels)
    assert repr(name) in str(caught.value)


def test_a_pass_and_apply_hold_a_few_blocks(cli: Any) -> None:
    h5py.File("x.h5", "w").create_dataset("x", (60_000, 64), "f4", chunks=(20_000, 16))  # 15 MB
    sf.leace(sf.Moments().update(np.eye(64), {"z": np.arange(64) % 2}), erase="z").save("e")
    tracemalloc.start()
    assert sum(len(block.X) for block in from_hdf5("x.h5", "x")) == 60_000
    cli("apply e x.h5 --key x -o x.h5 --force")
    peak = tracemalloc.get_traced_memory()[1]
    rows = h5py.File("x.h5")["x"][:]  # the control
    assert peak < 6e6 < rows.nbytes < tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


def test_anndata_reads_and_writes_the_same(cli: Any, pd: Any) -> None:
    anndata = pytest.importorskip("anndata", reason="anndata is not installed")
    strings = anndata.settings.override(allow_write_nullable_strings=True)
    with pd.option_context("mode.string_storage", "python"), strings:  # for pandas 3
        data = anndata.AnnData(np.ones((N, 2), np.float32), obsm={"X_pca": X})
        data.obs = obs = pd.DataFrame({
            "category": pd.Categorical(NAMES), "number": pd.Categorical(Z + 3), "z": Z, "y": Y == 1,
            "text": np.array(["a", "b"])[Y], "age": np.where(CODES < 0, np.nan, X[:, 1]),
            "nullable": pd.array(np.where(CODES < 0, None, Z), "Int64"),
        }, index=data.obs_names)  # fmt: skip
        data.write_h5ad("c.h5ad", convert_strings_to_categoricals=False)
    source = from_hdf5("c.h5ad", "X_pca", {name: f"/obs/{name}" for name in obs})
    moments = sf.Moments.from_blocks(source), sf.Moments().update(X, dict(obs.items()))
    for name in obs:
        maps = [sf.leace(m, erase=name).matrix() for m in moments]
        np.testing.assert_allclose(*maps, atol=1e-12)
    cli("fit c.h5ad --embedding X_pca --erase text --method oracle -o e")
    cli("apply e c.h5ad --embedding X_pca -o out.h5ad")
    clean, erased = anndata.read_h5ad("out.h5ad"), sf.load_eraser("e")(X, {"text": obs["text"]})
    np.testing.assert_array_equal(clean.obsm["X_pca"], erased)
    pd.testing.assert_frame_equal(clean.obs, anndata.read_h5ad("c.h5ad").obs)
    h5py.File("x.h5", "w")["x"] = X
    obs[["z", "y"]].to_csv("obs.csv")
    options = "--erase z --keep y --seeds 1 --alphas .1 --eraser LEACE"
    table = cli(f"compare c.h5ad --embedding X_pca {options}")
    assert table == cli(f"compare x.h5 --key x --labels obs.csv {options}")
