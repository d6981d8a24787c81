"""The shipped data of the demonstration: tables, loader, and the recipe that made the array."""

from __future__ import annotations

import csv
import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from splince_fast._runtime import files
from splince_fast.demo import data as professions
from splince_fast.exceptions import FileFormatError, MissingExtraError

DATA = Path(professions.__file__).parent / professions.FOLDER
TOOL = Path(__file__).parents[2] / "tools" / "build_profession_activations.py"
FACTUAL = {
    "neutral by definition": 0,
    "male by definition": 1,
    "male by its modifier": 1,
    "masculine of a pair": 1,
    "female by definition": -1,
    "female by its modifier": -1,
    "feminine of a pair": -1,
}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    with (DATA / professions.NOUNS).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def data() -> professions.ProfessionData:
    return professions.load()


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    if not TOOL.exists():
        pytest.skip("tools/build_profession_activations.py is only in the source tree")
    spec = importlib.util.spec_from_file_location(TOOL.stem, TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[TOOL.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tool: ModuleType) -> Any:
    try:
        return tool.read_model()
    except MissingExtraError as error:
        pytest.skip(str(error))


# --- tables ------------------------------------------------------------------------------------


def test_scores_recompute_from_the_percentages_and_nouns_come_in_pairs(
    rows: list[dict[str, str]],
) -> None:
    by_noun = {row["noun"]: row for row in rows}
    assert len(by_noun) == len(rows)
    neutral = [row for row in rows if row["factual"] == "0"]
    assert len(neutral) == 60
    # Spot checks against the published tabulation.
    percent = [by_noun[o]["percent_women"] for o in ("nurse", "plumber", "clerk")]
    assert percent == ["89.58", "0.7", "69.53"]
    for row in rows:
        assert int(row["factual"]) == FACTUAL[row["provenance_factual"]], row
        assert row["provenance_stereotype"], row
        assert row["kind"] in {"occupation", "role", "modified"}, row
        if row["bls_occupation"]:
            # Percentages have two decimals, so 1 - 2 p / 100 has four and is stored exactly.
            assert row["stereotype"] == f"{1 - float(row['percent_women']) / 50:.4f}", row
            source = by_noun[row["bls_occupation"]]
            assert row["percent_women"] == source["percent_women"], row
            own = "" if row is source else f" figure of {source['noun']}"
            assert row["provenance_stereotype"] == f"BLS {source['bls_year']}{own}", row
        else:
            assert row["stereotype"] == "0.0000", row
            assert row["percent_women"] == row["bls_year"] == "", row
            assert row["provenance_stereotype"] == "none: 0 by convention", row
        if row in neutral:
            assert row["counterpart"] == "", row
            assert by_noun[f"male {row['noun']}"]["factual"] == "1", row
            continue
        other = by_noun[row["counterpart"]]
        assert other["counterpart"] == row["noun"], row
        assert int(other["factual"]) == -int(row["factual"]), row
        same = ("stereotype", "kind", "family", "bls_occupation")
        assert [other[k] for k in same] == [row[k] for k in same], row


# --- loader ------------------------------------------------------------------------------------


def test_loader_lines_rows_up_with_prompts(data: professions.ProfessionData) -> None:
    n = len(data.nouns) * len(data.templates)
    assert data.activations.shape == (n, data.he_minus_she.size)
    assert data.activations.dtype == data.he_minus_she.dtype == np.float64
    assert np.isfinite(data.activations).all()
    prompts = [
        data.templates[row % len(data.templates)].replace(professions.SLOT, data.nouns[i])
        for row, i in enumerate(data.noun_index)
    ]
    assert prompts == professions.read_tables(DATA).prompts()
    assert len(set(prompts)) == n
    assert data.licence == "Apache-2.0"


def test_log_odds_are_those_of_the_head(data: professions.ProfessionData) -> None:
    tensors, _ = files.read(DATA / professions.ARRAYS, professions.KIND, 1)
    logits = data.activations @ tensors["head"].astype(np.float64).T
    # Two sums of d = 576 products differ by rounding only: d u |x|.|w| is some 1e-11 here.
    np.testing.assert_allclose(data.log_odds(), logits[:, 0] - logits[:, 1], atol=1e-10, rtol=0)
    np.testing.assert_array_equal(data.log_odds(0 * data.activations), 0)


def _copy(folder: Path) -> Path:
    return Path(shutil.copytree(DATA, folder))


def test_a_faithful_copy_loads_whatever_its_line_ends(tmp_path: Path) -> None:
    folder = _copy(tmp_path / "copy")
    for name in (professions.NOUNS, professions.TEMPLATES):
        text = (folder / name).read_bytes()
        (folder / name).write_bytes(text.replace(b"\n", b"\r\n"))
    np.testing.assert_array_equal(
        professions.load(folder).activations, professions.load().activations
    )


@given(data=st.data(), name=st.sampled_from([professions.NOUNS, professions.TEMPLATES]))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_tables_changed_in_any_character_are_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, name: str
) -> None:
    folder = _copy(tmp_path_factory.mktemp("tampered") / "copy")
    text = (DATA / name).read_text(encoding="utf-8")
    at = data.draw(st.integers(0, len(text) - 1))
    (folder / name).write_text(f"{text[:at]}#{text[at + 1 :]}", encoding="utf-8")
    with pytest.raises(FileFormatError):
        professions.load(folder)
    shutil.rmtree(folder)


# --- the recipe --------------------------------------------------------------------------------


@pytest.mark.slow
def test_recipe_agrees_with_the_shipped_array(
    tool: ModuleType, model: Any, data: professions.ProfessionData
) -> None:
    rows = np.random.default_rng(0).choice(len(data.noun_index), 12, replace=False)
    prompts = professions.read_tables(DATA).prompts()
    states = tool.activations([prompts[row] for row in rows], *model)
    # Half a unit in the last place of float16, and 1e-3 for the float32 pass: its own rounding is
    # 4e-5 at most here (measured against float64), and depends on the order of the sums in BLAS.
    tolerance = 2.0**-11 * np.abs(states) + 2.0**-25 + 1e-3
    assert (np.abs(states - data.activations[rows]) <= tolerance).all()
    # Control: the neighbouring prompts are far outside of it.
    assert (np.abs(states - data.activations[rows - 1]) > tolerance).mean() > 0.5

    head = tool.head_rows(*model).astype(np.float64)
    np.testing.assert_array_equal(head[0] - head[1], data.he_minus_she)
