"""Loaders (`data`), on small files in the format of the originals."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reproduction import data as loaders
from reproduction.__main__ import main
from reproduction.data import VARIABLE, MissingDataError, load
from reproduction.experiments import EXPERIMENTS
from reproduction.findings import Options

pa = pytest.importorskip("pyarrow", reason="pyarrow writes the small files")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path / "paper"


def write(folder: Path, split: str, columns: dict[str, list[Any]]) -> None:
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), folder / f"{split}-00000-of-00001.parquet")


@pytest.fixture
def embedder(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str, str]]:
    """Stands in for an encoder: the length of a text, and its number."""
    asked: list[tuple[list[str], str, str]] = []

    def embed(texts: list[str], model: str, pooling: str) -> Any:
        asked.append((list(texts), model, pooling))
        return np.array([[len(t), i] for i, t in enumerate(texts)], dtype=np.float32)

    monkeypatch.setattr(loaders, "embed_texts", embed)
    return asked


def test_bias_in_bios(root: Path, embedder: list[Any]) -> None:
    for k, split in enumerate(("train", "dev", "test")):
        columns = {
            "hard_text": [f"{split} {i}" for i in range(8)],
            "profession": [21, 21, 2, 5, 21, 21, 11, 27],
            "gender": [0, 1, 0, 1, k % 2, 0, 1, 1],
        }
        write(root / "LabHC" / "bias_in_bios", split, columns)
    found = load("bios", "paper")
    assert found.name == "LabHC/bias_in_bios"
    assert found.X.shape == (24, 2)
    assert found.labels["task"].sum() == 12
    texts, model, pooling = embedder[0]
    assert (texts[0], texts[-1]) == ("train 0", "test 7")
    assert (model, pooling) == ("bert-base-uncased", "cls")
    assert found.aligned_class == 0
    whole = load("bios_full", "paper")
    assert set(whole.labels["task"]) == {2, 5, 11, 21, 27}
    assert whole.aligned_class is None


def test_multilingual(root: Path, embedder: list[Any]) -> None:
    for split in ("en", "de", "fr", "es"):
        columns = {"text": [f"{split} a", f"{split} b"], "toxic": [0, 1]}
        write(root / "textdetox" / "multilingual_toxicity_dataset", split, columns)
    found = load("multilingual", "paper")
    np.testing.assert_array_equal(found.labels["concept"], [0, 0, 1, 1, 2, 2])
    np.testing.assert_array_equal(found.labels["task"], [0, 1] * 3)
    assert embedder[0][0][0] == "query: en a"
    assert embedder[0][2] == "mean"


def test_winobias_prompts(root: Path) -> None:
    sentence = "The developer argued with the designer because {} did not like it ."
    for config, pronoun in (("type1_pro", "he"), ("type1_anti", "she")):
        tokens = sentence.format(pronoun).split()
        row = {"tokens": [tokens], "coreference_clusters": [["0", "1", "7", "7"]]}
        for split in ("validation", "test"):
            write(root / "uclanlp" / "wino_bias" / config, split, row)
    found = loaders.winobias_prompts()
    assert found["prompt"][0] == (
        "The developer argued with the designer because he did not like it. 'He' refers to the"
    )
    assert found["referent"] == ["developer"] * 4
    assert found["anti_stereotype"] == [0, 0, 1, 1]
    assert found["split"] == ["train", "test"] * 2


def test_celeba(root: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow writes the small pictures")
    (root / "celeba" / "img_align_celeba").mkdir(parents=True)
    lines = ["4", "Eyeglasses Male Smiling "]
    for i in range(4):
        picture = image.new("RGB", (178, 218), (60 * i, 60 * i, 60 * i))
        picture.save(root / "celeba" / "img_align_celeba" / f"00000{i}.jpg")
        lines.append(f"00000{i}.jpg  {1 if i > 1 else -1} -1  {1 if i % 2 else -1}")
    (root / "celeba" / "list_attr_celeba.txt").write_text("\n".join(lines) + "\n")
    found = load("images", "paper")
    np.testing.assert_array_equal(found.labels["task"], [0, 0, 1, 1])
    np.testing.assert_array_equal(found.labels["concept"], [0, 1, 0, 1])
    assert found.X.shape == (4, 2500)
    np.testing.assert_allclose(found.X[:, 0], np.arange(4) * 60 / 255, atol=2 / 255)
    assert found.cell(1, 0) == "glasses, not smiling"


def test_waterbirds(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A made set of the hub's format, through the loader and the whole experiment."""
    image = pytest.importorskip("PIL.Image", reason="Pillow writes the small pictures")
    from io import BytesIO

    rng = np.random.default_rng(0)

    def picture(y: int, z: int) -> dict[str, Any]:
        buffer = BytesIO()
        image.new("RGB", (4, 4), (50 + 100 * y, 50 + 100 * z, int(rng.integers(99)))).save(
            buffer, "PNG"
        )
        return {"bytes": buffer.getvalue(), "path": "x.png"}

    for split in ("train", "validation", "test"):
        y, z = rng.integers(0, 2, 150).tolist(), rng.integers(0, 2, 150).tolist()
        pictures = [picture(a, b) for a, b in zip(y, z, strict=True)]
        columns = {"image": pictures, "label": y, "place": z}
        write(root / "grodino" / "waterbirds", split, columns)

    def embed(images: Any) -> Any:
        rows = [np.asarray(im, dtype=np.float64).mean(axis=(0, 1)) / 50 for im in images]
        return np.stack(rows) + rng.normal(size=(len(rows), 3))

    monkeypatch.setattr(loaders, "embed_images", embed)
    data = load("waterbirds", "paper")
    assert data.X.shape == (450, 3)
    found = EXPERIMENTS["waterbirds"].run(Options("paper", quick=True), data)
    assert found.values["accuracy/none/retrained/0.5"] > 0.75
    assert found.values["probe_accuracy/none/retrained/0.5"] > 0.75
    assert found.values["probe_accuracy/SPLINCE/retrained/0.5"] < 0.65


def test_cells_are_cut_alike() -> None:
    y = np.array([0] * 10 + [1] * 3)
    rows = loaders.sample_cells(y, np.zeros(13, int), max_rows=4)
    assert np.bincount(y[rows]).tolist() == [4, 3]
    np.testing.assert_array_equal(rows, loaders.sample_cells(y, np.zeros(13, int), max_rows=4))


def test_without_network_the_error_names_the_set_and_the_stand_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    datasets = pytest.importorskip("datasets", reason="the hub's client is not installed")

    def refused(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(datasets, "load_dataset", refused)
    with pytest.raises(MissingDataError) as caught:
        load("multilingual", "paper")
    for text in ("textdetox/multilingual_toxicity_dataset", "offline stand-in", "no route"):
        assert text in str(caught.value)


def test_a_missing_file_of_a_local_copy_is_named(root: Path) -> None:
    write(root / "LabHC" / "bias_in_bios", "train", {"hard_text": ["a"]})
    with pytest.raises(MissingDataError, match=r"no dev\*.parquet of LabHC"):
        load("bios", "paper")


def test_a_missing_library_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert main(["bios", "--data", "paper"]) == 2
    assert "splince_fast[experiments]" in capsys.readouterr().err


def test_sets_behind_an_account_say_so() -> None:
    with pytest.raises(MissingDataError, match=r"an account.*reproduction layers"):
        load("layers", "paper")


@pytest.mark.parametrize("name", ["multilingual", "bios_full", "winobias", "layers"])
def test_stand_ins_that_are_not_here_say_what_to_do(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(MissingDataError, match=f"{VARIABLE}.*python -m reproduction"):
        load(name)


def test_fresh_machines_have_bios_and_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert load("bios").X.shape == (10_052, 384)
    digits = load("images")
    assert digits.name == "digits"
    assert digits.X.shape == (1797, 64)
    assert 0 <= digits.X.min() < digits.X.max() == 1
    assert digits.cell(1, 1) == "even, 5 and above"


def test_names_are_told_apart_where_a_leading_space_is_a_token_of_its_own() -> None:
    """As in the vocabulary of Llama 2."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = ["▁", "▁the", "▁nurse", "▁judge"]
    pieces = tokenizers.Tokenizer(tokenizers.models.Unigram([(word, -1.0) for word in words], 0))
    normalizers = tokenizers.normalizers
    pieces.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=pieces)
    assert tokenizer(" nurse")["input_ids"] == [0, 2]  # the space comes first
    assert loaders.first_tokens(tokenizer, ["nurse", "judge"]) == [2, 3]
