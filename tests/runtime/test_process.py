"""Options, names, warnings, progress bars, configuration, first use of a process."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from processes import run, script
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import splince_fast as sf
from splince_fast import Moments, baselines, evaluation, nn
from splince_fast._kernels import row_kernels
from splince_fast._runtime import progress
from splince_fast._runtime.arguments import warn
from splince_fast._runtime.progress import Progress
from splince_fast.cli import main
from splince_fast.sources import from_arrays

Z = np.repeat([0, 1], 20)
X = np.random.default_rng(0).normal(size=(40, 3)) + Z[:, None]


# --- misspelt options -----------------------------------------------------------------------------


def folds() -> list[sf.Moments]:
    return [sf.Moments().update(X[i::2], {"z": Z[i::2]}) for i in range(2)]


MISSPELT: list[tuple[Callable[[], Any], str]] = [
    (lambda: sf.erase(X, Z, colour="red"), "takes no colour= .it takes .*shrinkage"),
    (lambda: sf.erase(X, Z, shrinkge=1), "leace takes no shrinkge=; did you mean shrinkage="),
    (lambda: sf.cross_report(folds(), erase="z", rank_tool=1.0),
     "LEACE takes no rank_tool=; did you mean rank_tol="),
    (lambda: sf.cross_report(folds(), erase="z", max_amplification=1e3),
     "LEACE takes no max_amplification="),
    (lambda: sf.Moments.from_blocks([(X, Z)], block_row=2),
     "Moments takes no block_row=; did you mean block_rows="),
    (lambda: sf.Folds(2, block_row=2), "Moments takes no block_row=; did you mean block_rows"),
    (lambda: draw(None, "association", metrc="accuracy"),  # type: ignore[arg-type]
     "'association' takes no metrc=; did you mean metric="),
]  # fmt: skip


@pytest.mark.parametrize(("call", "text"), MISSPELT)
def test_the_nearest_option_is_suggested(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(sf.exceptions.InputError, match=text):
        call()


def draw(*arguments: Any, **options: Any) -> Any:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")
    from splince_fast.evaluation.figures import draw

    return draw(*arguments, **options)


# --- names imported on first use ------------------------------------------------------------------

PACKAGES = [sf, baselines, evaluation, nn]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: str(package.__name__))
def test_a_misspelt_name_is_an_error_that_suggests_the_right_one(package: ModuleType) -> None:
    name = max(package.__all__, key=len)
    code = f"import {package.__name__} as package; package.{name[:-2]}{name[-1]}{name[-2]}"
    told = run(code).stderr
    assert f"module {package.__name__!r} has no attribute" in told
    assert f"Did you mean: {name!r}?" in told


@pytest.mark.parametrize("package", PACKAGES[:3], ids=lambda package: str(package.__name__))
def test_names_are_listed_and_are_those_of_their_modules(package: ModuleType) -> None:
    assert {name for name in dir(package) if not name.startswith("__")} == set(package.__all__)
    for name in package.__all__:
        value = getattr(package, name)
        assert getattr(package, name) is value
        if hasattr(value, "__module__"):
            assert getattr(importlib.import_module(value.__module__), name) is value


def test_without_the_optional_dependency_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from splince_fast import nn\n"
        "from splince_fast.exceptions import MissingExtraError\n"
        "try: nn.fold\n"
        "except MissingExtraError as error: print(error)"
    )
    assert 'pip install "splince_fast[torch]"' in script(code)


# --- lines of warnings ----------------------------------------------------------------------------

MEANS = np.where(Z[:, None], X[Z == 1].mean(axis=0), X[Z == 0].mean(axis=0))
ERASED = X - MEANS  # nothing to erase
CALLS: dict[str, Callable[[], Any]] = {
    "function": lambda: sf.leace(sf.Moments().update(ERASED, {"z": Z}), erase="z"),
    "snapshot": lambda: sf.leace(sf.Moments().update(ERASED, {"z": Z}).factored(), erase="z"),
    "erase": lambda: sf.erase(ERASED, Z),
    "estimator": lambda: sf.LEACE().fit(ERASED, concept=Z),
    "pipeline": lambda: make_pipeline(StandardScaler(), sf.LEACE(concept_from="y")).fit(ERASED, Z),
    "partial fit": lambda: sf.LEACE().partial_fit(ERASED, concept=Z).transform(ERASED),
    "itself": lambda: warn("nothing", sf.exceptions.NothingErasedWarning),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_warning_names_the_line_of_the_caller(call: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CALLS[call]()
    lines = [w.lineno for w in caught if w.category is sf.exceptions.NothingErasedWarning]
    assert [w.filename for w in caught] == [__file__] * len(caught)
    assert lines == [CALLS[call].__code__.co_firstlineno]


def test_the_top_level_has_few_names_and_two_of_the_errors() -> None:
    assert len(sf.__all__) <= 32
    errors = {name for name in sf.__all__ if name in vars(sf.exceptions)}
    assert errors == {"SplinceError", "SplinceWarning"}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "show", "delay", "visible"),
    [
        (io.StringIO, True, 0.0, True),
        (io.StringIO, None, 0.0, False),
        (Terminal, None, 0.0, True),
        (Terminal, False, 0.0, False),
        (lambda: None, True, 0.0, False),
        (Terminal, None, progress._DELAY_SECONDS, False),  # short work shows no bar
    ],
)
def test_bar_appears_where_it_is_asked_for_or_seen(
    monkeypatch: pytest.MonkeyPatch, stream: Any, show: bool | None, delay: float, visible: bool
) -> None:
    monkeypatch.setattr(progress, "_DELAY_SECONDS", delay)
    monkeypatch.setattr(sys, "stderr", given := stream())
    with Progress(10, "reading", show=show) as bar:
        bar.advance(10, 40)
    text = "" if given is None else given.getvalue()
    assert bool(text) == visible
    assert not visible or re.search(r"reading: 100%.*10.*/10", text)


def test_notebook_counts_as_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert not progress.is_interactive()
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert progress.is_interactive()


def test_resumed_rows_are_part_of_the_fraction_but_not_of_the_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for _ in range(2):
        monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
        source = from_arrays(np.ones((8, 2)), block_rows=2)
        Moments.from_blocks(source, checkpoint=tmp_path / "state", progress=True)
        texts.append(stream.getvalue().strip().split("\r")[-1])
    assert all("8.00/8.00" in text for text in texts)
    assert "?" not in texts[0].split(",")[-2]  # the rate of the first run
    assert "? rows/s" in texts[1]  # the second run read none


def test_bar_is_closed_before_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with contextlib.suppress(ValueError), Progress(10, show=True) as bar:
        bar.advance(5)
        raise ValueError
    assert stream.getvalue().endswith("\n")


def test_hidden_bar_does_not_import_tqdm() -> None:
    code = (
        "import sys; from splince_fast._runtime.progress import Progress\n"
        "with Progress(10) as bar: bar.advance(1)\n"
        "assert 'tqdm' not in sys.modules"
    )
    script(code)


LEVEL = "from splince_fast._kernels import row_kernels; print(row_kernels.level_name())"


def test_the_environment_names_an_instruction_set() -> None:
    for name in row_kernels.levels():
        assert script(LEVEL, SPLINCE_FAST_LEVEL=name).split() == [name]
    assert row_kernels.levels()[-1] == "baseline"
    error = run(LEVEL, SPLINCE_FAST_LEVEL="avx1024").stderr
    assert "'avx1024' is not available" in error
    assert "baseline" in error


def test_show_config_measures_and_advises(capsys: pytest.CaptureFixture[str]) -> None:
    config = sf.show_config()
    assert config.syrk_float32 > 0
    assert config.syrk_float64 > 0
    assert config.copy > 0
    assert config.threads >= 1
    assert (config.products == "BLAS") is not row_kernels.wide()
    assert config.versions["numpy"] == np.__version__
    assert config.row_kernels == row_kernels.level_name()
    assert "openblas" in config.blas
    assert "BLAS" in str(config)
    assert "<table>" in config._repr_html_()
    assert set(config.to_dict()) >= {"versions", "advice", "blas_core"}
    assert main(["doctor"]) == 0
    assert "symmetric product" in capsys.readouterr().out


CORE = """
import sys
import numpy as np
import splince_fast as sf

rng = np.random.default_rng(0)
z, y = rng.integers(0, 10, 5000), rng.normal(size=5000)
for dtype in (np.float16, np.float32, np.float64):
    X = (rng.normal(size=(5000, 20)) + z[:, None] / 9).astype(dtype)
    moments = sf.Moments().update(X, {"z": z, "y": y}, sample_weight=rng.random(5000))
    sf.Moments(subsample=0.5).update(X, {"z": z}).mean
    for i in range(3):
        moments.update(X[i : i + 1], {"z": z[i : i + 1], "y": y[i : i + 1]})
    for eraser in (
        sf.splince(moments, erase="z", keep="y", shrinkage=0.1),
        sf.leace(moments, erase="y"),
        sf.sal(moments, erase="y"),
    ):
        for rows in (X, np.asfortranarray(X), X[::2], X[:1]):
            eraser(rows)
"""
# The control: work that Numba does.
SPARSE = (
    CORE
    + """
import scipy.sparse

rows = scipy.sparse.csr_matrix(X.astype(np.float64))
sf.Moments(covariance_type="diag").update(rows, {"z": z}).mean
"""
)


@pytest.mark.parametrize(("code", "numba"), [(CORE, False), (SPARSE, True)], ids=["core", "sparse"])
def test_first_use_compiles_nothing(code: str, numba: bool, tmp_path: Path) -> None:
    told = script(code + "\nprint('numba' in sys.modules)", NUMBA_CACHE_DIR=str(tmp_path))
    assert told.split() == [str(numba)]
    assert bool(list(tmp_path.iterdir())) is numba
