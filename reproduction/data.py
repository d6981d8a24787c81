"""Data sets of the experiments: those of the paper, and offline stand-ins for them.

``load(name)`` reads a stand-in from the folder that the environment variable ``SPLINCE_FAST_DATA``
names, from ``bios.npz`` in this folder, or from scikit-learn. ``load(name, "paper")`` reads a data
set of the paper: from Parquet files in the folder ``paper/OWNER/NAME`` of ``SPLINCE_FAST_DATA`` if
they are there, otherwise from Hugging Face. CelebA is read from ``paper/celeba`` in torchvision's
layout, or downloaded by torchvision. Encoders are used as published, without the fine-tuning of the
paper. At most :data:`PER_CELL` rows of each cell (task, concept) are embedded. Without a GPU, this
takes hours.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from splince_fast import SplinceError

if TYPE_CHECKING:
    from PIL.Image import Image

Columns = dict[str, list[Any]]

VARIABLE = "SPLINCE_FAST_DATA"
PER_CELL = 5000
PROFESSOR = 21
LANGUAGES = ("en", "de", "fr")
CELEBA_SIDE = 50


class MissingDataError(SplinceError, FileNotFoundError):
    """A data set is not available; the message says how to obtain it."""


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """The data set of an experiment: rows, labels and provenance."""

    name: str
    X: NDArray[Any]  # (n, d)
    labels: Mapping[str, NDArray[Any]]  # "task", "concept" and others, of shape (n,)
    provenance: str
    licence: str
    # Class of the concept that goes with the second class of the task where an experiment varies
    # the association of both; None if it does not.
    aligned_class: int | None = None
    # Numbers of training, validation and test rows for such an experiment; None for the default of
    # `spurious_split`.
    sizes: tuple[int, int, int] | None = None
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # not one entry per row
    words: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # of class 0 and class 1

    def cell(self, y: int, z: int) -> str:
        """Return a text that describes the cell of task class y and concept class z."""
        task, concept = (self.words.get(k, ()) for k in ("task", "concept"))
        return f"{task[y]}, {concept[z]}" if task and concept else f"y = {y}, z = {z}"


def load(name: str, data: str = "offline") -> Dataset:
    """Read the data set `name`: the stand-in, or with "paper" the data set of the paper."""
    loaders = _PAPER if data == "paper" else _OFFLINE
    if name not in loaders:
        raise MissingDataError(_NOT_AVAILABLE[data].format(name=name))
    return loaders[name]()


_NOT_AVAILABLE = {
    "offline": "{name} has no offline stand-in: no free image set with a background concept is "
    "small enough to ship. With network run python -m reproduction {name} --data paper; the most "
    "similar offline experiment is images",
    "paper": "the paper's {name} set is run through Llama models, whose weights need an account. "
    "Offline stand-in: python -m reproduction {name}",
}


def folder(name: str) -> Path | None:
    """Return the folder of a data set in ``SPLINCE_FAST_DATA``, or None if it does not exist."""
    root = os.environ.get(VARIABLE)
    path = Path(root) / name if root else None
    return path if path is not None and path.is_dir() else None


# -- offline stand-ins -------------------------------------------------------------------------


def _required_folder(name: str) -> Path:
    path = folder(name)
    if path is None:
        raise MissingDataError(
            f"the stand-in {name!r} is not part of the repository, and the environment variable "
            f"{VARIABLE} names no folder that holds it; python -m reproduction bios and images run "
            "without it"
        )
    return path


def _arrays(path: Path, names: str) -> list[NDArray[Any]]:
    return [np.load(path / f"{name}.npy", allow_pickle=False) for name in names.split()]


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


_BUG = (
    "sentences of the BUG corpus, the profession masked, through all-MiniLM-L6-v2 (Levy, Lazar, "
    "Stanovsky 2021); a stand-in for Bias in Bios"
)
_BUG_LICENCE = "corpus MIT, encoder Apache-2.0"
_SMOLLM = "SmolLM2-135M-Instruct, last token"


def quantised_bios() -> Dataset:
    """Read the stand-in for Bias in Bios of this folder, with 8 bits per value."""
    with np.load(Path(__file__).parent / "bios.npz", allow_pickle=False) as file:
        arrays = dict(file)
    X = arrays["centre"] + arrays["step"] * arrays["codes"].astype(np.float32)
    return _bug("bug_profession_gender (8 bit)", X, arrays["y"], arrays["z"])


def _bug(name: str, X: NDArray[Any], y: NDArray[Any], z: NDArray[Any]) -> Dataset:
    labels = {"task": y, "concept": z}
    return Dataset(name, X, labels, _BUG, _BUG_LICENCE, 0, (4000, 600, 1000))


def _bios() -> Dataset:
    path = folder("bug_profession_gender")
    return quantised_bios() if path is None else _bug(path.name, *_arrays(path, "X y z"))


def _bios_full() -> Dataset:
    X, y, z = _arrays(_required_folder("bug_28_professions"), "X y z")
    return Dataset("bug_28_professions", X, {"task": y, "concept": z}, _BUG, _BUG_LICENCE)


def _multilingual() -> Dataset:
    X, y, z = _arrays(_required_folder("toxicity_en_de_fr"), "X y z")
    return Dataset(
        "toxicity_en_de_fr", X, {"task": y, "concept": z},
        "tweets of MLMA (Ousidhoum et al. 2019; en, fr) and GermEval-2018 (Wiegand, Siegel, "
        "Ruppenhofer 2018; de) through multilingual-e5-small; the language goes with the source",
        "MLMA and encoder MIT; GermEval CC BY 4.0", 0, (1600, 400, 600),
    )  # fmt: skip


def _layers() -> Dataset:
    path = _required_folder("professions_smollm2")
    X, z, y, head = _arrays(path, "X z_stereotype y_fact lm_head_he_she")
    (rows,) = _arrays(_required_folder("professions_smollm2_layers"), "rows")
    prompts = _rows(path / "prompts.csv")
    labels = {"task": y.astype(np.float64)[rows], "concept": z.astype(np.float64)[rows]}
    for name, column in (("noun", "profession"), ("prompt", "prompt")):
        labels[name] = np.array([row[column] for row in prompts])[rows]
    return Dataset(
        "professions_smollm2_layers", X[rows], labels,
        f"prompts of the DAMA paper with scores of Bolukbasi et al. 2016, through {_SMOLLM}",
        "MIT; model Apache-2.0", arrays={"head": head},
    )  # fmt: skip


def _winobias() -> Dataset:
    path = _required_folder("winobias_smollm2")
    X, head = _arrays(path, "X lm_head_professions")
    rows = _rows(path / "prompts.csv")
    names = (path / "professions.txt").read_text(encoding="utf-8").splitlines()
    columns: Columns = {
        "referent": [row["referent"] for row in rows],
        "other": [row["other"] for row in rows],
        "anti_stereotype": [int(row["anti_stereotype"]) for row in rows],
        "split": [row["split"] for row in rows],
    }
    return _coreference("winobias_smollm2", X, head, names, columns, _SMOLLM)


def _coreference(
    name: str, X: NDArray[Any], head: NDArray[Any], names: list[str], columns: Columns, model: str
) -> Dataset:
    class_index = {word: i for i, word in enumerate(names)}
    labels = {
        "task": np.array([class_index[word] for word in columns["referent"]]),
        "other": np.array([class_index[word] for word in columns["other"]]),
        "concept": np.array(columns["anti_stereotype"]),
        "split": np.array(columns["split"]),
    }
    return Dataset(
        name, X, labels, f"WinoBias type 1 (Zhao et al. 2018) with the paper's prompt, through "
        f"{model}", "WinoBias MIT; see the model",
        arrays={"head": head, "names": np.array(names)},
    )  # fmt: skip


def _images() -> Dataset:
    path = folder("faces_cmu")
    return _digits() if path is None else _faces(path)


def _faces(path: Path) -> Dataset:
    """Read face images of 15 x 16 pixels in [0, 1], the means of 2 x 2 original pixels."""
    (pixels,) = _arrays(path, "X")
    X = pixels.reshape(-1, 15, 2, 16, 2).mean(axis=(2, 4)).reshape(len(pixels), -1) / 255
    rows = _rows(path / "rows.csv")
    y, z = (np.array([int(row[c]) for row in rows]) for c in ("sunglasses", "sideways"))
    return Dataset(
        "faces_cmu", X, {"task": y, "concept": z},
        "CMU Face Images (T. Mitchell, 1999), 2 x 2 block means: sunglasses, head turned sideways",
        "educational use with attribution; not shipped", 1, (280, 0, 80),
        {"shape": np.array([15, 16])},
        {"task": ("no sunglasses", "sunglasses"), "concept": ("facing", "sideways")},
    )  # fmt: skip


def _digits() -> Dataset:
    """Read the handwritten digits of scikit-learn; task: even or odd, concept: 5 or above."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    y, z = (digits.target % 2 == 0).astype(np.int8), (digits.target >= 5).astype(np.int8)
    return Dataset(
        "digits", digits.data / 16.0, {"task": y, "concept": z},
        "optical recognition of handwritten digits (E. Alpaydin, C. Kaynak, 1998), bundled with "
        "scikit-learn: task even, concept 5 or above",
        "CC BY 4.0 (UCI)", 1, (560, 0, 160), {"shape": np.array([8, 8])},
        {"task": ("odd", "even"), "concept": ("below 5", "5 and above")},
    )  # fmt: skip


_OFFLINE: dict[str, Callable[[], Dataset]] = {
    "bios": _bios,
    "bios_full": _bios_full,
    "multilingual": _multilingual,
    "layers": _layers,
    "winobias": _winobias,
    "images": _images,
}


# -- data sets of the paper --------------------------------------------------------------------


def _unavailable(source: str, error: Exception) -> MissingDataError:
    return MissingDataError(
        f"{source} could not be fetched ({type(error).__name__}: {str(error)[:200]}). It needs the "
        f"network once, or its files in ${VARIABLE}/paper/{source}. Without --data paper the "
        "experiment runs on its offline stand-in"
    )


def read_columns(source: str, splits: Sequence[str], config: str | None = None) -> Columns:
    """Return the columns of several splits of a data set on the Hugging Face hub.

    If Parquet files of the data set are in ``SPLINCE_FAST_DATA``, they are read instead. An added
    column "split" holds the name of the split of each row.
    """
    path = folder(f"paper/{source}")
    if path is None:
        import datasets

        try:
            dataset = datasets.load_dataset(source, config)
            tables: dict[str, Any] = {split: dataset[split].to_dict() for split in splits}
        except Exception as error:  # exception types depend on the version of `datasets`
            raise _unavailable(source, error) from error
    else:
        import pyarrow.parquet as pq

        path = path / config if config else path
        tables = {}
        for split in splits:
            files = sorted(path.glob(f"{split}*.parquet"))
            if not files:
                raise MissingDataError(f"{path} holds no {split}*.parquet of {source}")
            parts = [pq.read_table(file) for file in files]
            tables[split] = {
                c: [v for part in parts for v in part[c].to_pylist()] for c in parts[0].column_names
            }
    columns: Columns = {}
    for split, table in tables.items():
        size = len(next(iter(table.values())))
        for column, values in {**table, "split": [split] * size}.items():
            columns.setdefault(column, []).extend(values)
    return columns


def sample_cells(*columns: NDArray[np.generic], max_rows: int = PER_CELL) -> NDArray[np.intp]:
    """Return sorted indices of at most `max_rows` random rows of each cell, drawn with seed 0."""
    _, cell = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    rng = np.random.default_rng(0)
    parts = [rng.permutation(np.flatnonzero(cell.ravel() == c))[:max_rows]
             for c in range(int(cell.max()) + 1)]  # fmt: skip
    return np.sort(np.concatenate(parts))


def embed_texts(texts: Sequence[str], model: str, pooling: str) -> NDArray[np.float32]:
    """Return embeddings of texts by the encoder `model`, from states of its last layer.

    An embedding is the state of the first token if `pooling` is "cls", else the mean state.
    """
    import torch
    from transformers import AutoModel, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        encoder = AutoModel.from_pretrained(model).eval()
    except OSError as error:
        raise _unavailable(model, error) from error
    embeddings = np.empty((len(texts), encoder.config.hidden_size), dtype=np.float32)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    with torch.no_grad():
        for start in range(0, len(order), 32):
            rows = order[start : start + 32]
            batch = tokenizer(
                [texts[i] for i in rows], return_tensors="pt", padding=True, truncation=True,
                max_length=128,
            )  # fmt: skip
            hidden = encoder(**batch).last_hidden_state
            mask = batch["attention_mask"][..., None]
            mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
            embeddings[rows] = (hidden[:, 0] if pooling == "cls" else mean).numpy()
    return embeddings


def embed_images(images: Iterable[Image]) -> NDArray[np.float32]:
    """Return embeddings of images: inputs of the last layer of a ResNet-50 trained on ImageNet."""
    import torch

    models = import_module("torchvision.models")
    weights = models.ResNet50_Weights.DEFAULT
    try:
        network = models.resnet50(weights=weights).eval()
    except OSError as error:
        raise _unavailable("torchvision ResNet-50", error) from error
    network.fc = torch.nn.Identity()
    prepare = weights.transforms()
    with torch.no_grad():
        return np.stack([network(prepare(image)[None])[0].numpy() for image in images])


def _bios_paper(*, professors: bool) -> Dataset:
    """Read Bias in Bios; the task is the profession, or professor or not, aligned with 0 (male)."""
    columns = read_columns("LabHC/bias_in_bios", ("train", "dev", "test"))
    y, gender = np.array(columns["profession"]), np.array(columns["gender"])
    if professors:
        y = (y == PROFESSOR).astype(np.intp)
    rows = sample_cells(y, gender, max_rows=PER_CELL if professors else PER_CELL // 10)
    X = embed_texts([columns["hard_text"][i] for i in rows], "bert-base-uncased", "cls")
    return Dataset(
        "LabHC/bias_in_bios", X, {"task": y[rows], "concept": gender[rows]},
        "Bias in Bios (De-Arteaga et al. 2019), bert-base-uncased as published, [CLS]", "MIT",
        0 if professors else None,
    )  # fmt: skip


def _multilingual_paper() -> Dataset:
    source = "textdetox/multilingual_toxicity_dataset"
    columns = read_columns(source, LANGUAGES)
    y = np.array(columns["toxic"], dtype=np.intp)
    z = np.array([LANGUAGES.index(split) for split in columns["split"]])
    rows = sample_cells(y, z)
    texts = [f"query: {columns['text'][i]}" for i in rows]
    X = embed_texts(texts, "intfloat/multilingual-e5-base", "mean")
    return Dataset(
        source, X, {"task": y[rows], "concept": z[rows]},
        "multilingual toxicity (Dementieva et al. 2024), multilingual-e5-base as published",
        "openrail++", 0,
    )  # fmt: skip


def _celeba() -> Dataset:
    """Read CelebA as grey images of 50 x 50 pixels in [0, 1]; task: glasses, concept: smiling."""
    path = folder("paper/celeba")
    if path is None:
        dataset = import_module("torchvision.datasets").CelebA
        root = Path(os.environ.get(VARIABLE) or Path.home() / ".cache" / "splince_fast")
        try:
            dataset(str(root / "paper"), split="all", target_type="attr", download=True)
        except Exception as error:  # exception types depend on the download host
            raise _unavailable("celeba", error) from error
        path = root / "paper" / "celeba"
    with (path / "list_attr_celeba.txt").open(encoding="utf-8", newline="") as stream:
        _, header, *lines = csv.reader(stream, delimiter=" ", skipinitialspace=True)
    names = [line[0] for line in lines]
    columns = [1 + header.index(name) for name in ("Eyeglasses", "Smiling")]
    y, z = (np.array([int(line[c]) > 0 for line in lines], dtype=np.intp) for c in columns)
    rows = sample_cells(y, z)
    X = np.stack([_grey(path / "img_align_celeba" / names[i]) for i in rows])
    return Dataset(
        "CelebA", X, {"task": y[rows], "concept": z[rows]},
        "CelebA (Liu et al. 2015), eyeglasses and smiling, 50 x 50 grey pixels",
        "non-commercial research", 1, arrays={"shape": np.array([CELEBA_SIDE, CELEBA_SIDE])},
        words={"task": ("no glasses", "glasses"), "concept": ("not smiling", "smiling")},
    )  # fmt: skip


def _grey(path: Path) -> NDArray[np.float32]:
    from PIL import Image

    with Image.open(path) as image:
        small = image.convert("L").resize((CELEBA_SIDE, CELEBA_SIDE))
        return (np.asarray(small, dtype=np.float32) / np.float32(255)).ravel()


def _waterbirds() -> Dataset:
    columns = read_columns("grodino/waterbirds", ("train", "validation", "test"))
    y, z = np.array(columns["label"]), np.array(columns["place"])
    rows = sample_cells(y, z)
    X = embed_images(_image(columns["image"][i]) for i in rows)
    return Dataset(
        "grodino/waterbirds", X, {"task": y[rows], "concept": z[rows]},
        "Waterbirds (Sagawa et al. 2020), ResNet-50 of torchvision as published",
        "see CUB and Places", 1,
    )  # fmt: skip


def _image(value: Image | Mapping[str, bytes]) -> Image:
    """Convert an image, or a mapping with the bytes of an image file, to an RGB image."""
    from PIL import Image as images

    image = images.open(BytesIO(value["bytes"])) if isinstance(value, Mapping) else value
    return image.convert("RGB")


def winobias_prompts() -> Columns:
    """Return the paper's prompts from the sentences of WinoBias type 1, as columns.

    The columns are prompt, referent, anti_stereotype (0 or 1) and split ("train" or "test").
    """
    columns: Columns = {"prompt": [], "referent": [], "anti_stereotype": [], "split": []}
    for anti, config in enumerate(("type1_pro", "type1_anti")):
        table = read_columns("uclanlp/wino_bias", ("validation", "test"), config)
        for tokens, clusters, split in zip(
            table["tokens"], table["coreference_clusters"], table["split"], strict=True
        ):
            ends = zip(clusters[::2], clusters[1::2], strict=True)
            spans = sorted((int(a), int(b)) for a, b in ends)
            person, pronoun = ([t.lower() for t in tokens[a : b + 1]] for a, b in spans[:2])
            words = [t for t in person if t not in ("the", "a", "an")]
            sentence = " ".join(tokens).replace(" .", ".").replace(" ,", ",").replace(" '", "'")
            columns["prompt"].append(f"{sentence} '{pronoun[0].capitalize()}' refers to the")
            columns["referent"].append(" ".join(words))
            columns["anti_stereotype"].append(anti)
            columns["split"].append("train" if split == "validation" else "test")
    return columns


def _winobias_paper() -> Dataset:
    """Compute last-token states of WinoBias prompts in the model ``SPLINCE_FAST_MODEL``."""
    columns = winobias_prompts()
    model = os.environ.get("SPLINCE_FAST_MODEL", "meta-llama/Llama-2-7b-hf")
    names = sorted(set(columns["referent"]))
    X, head = causal_states(columns["prompt"], names, model)
    columns["other"] = [
        next((n for n in names if n in prompt.lower() and n != referent), referent)
        for prompt, referent in zip(columns["prompt"], columns["referent"], strict=True)
    ]
    return _coreference("uclanlp/wino_bias", X, head, names, columns, f"{model}, last token")


def causal_states(
    prompts: Sequence[str], names: Sequence[str], model: str
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return last-token states of the prompts after the final norm, and rows of the head.

    The rows of the language-model head are those of the first tokens of `names`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        network = AutoModelForCausalLM.from_pretrained(model)
    except OSError as error:
        raise _unavailable(model, error) from error
    network.eval()
    with torch.no_grad():
        states = [
            network.base_model(**tokenizer(prompt, return_tensors="pt")).last_hidden_state[0, -1]
            for prompt in prompts
        ]
    ids = first_tokens(tokenizer, names)
    head = network.get_output_embeddings().weight.detach().float().numpy()[ids]
    return np.stack([state.float().numpy() for state in states]), head


def first_tokens(tokenizer: Any, names: Sequence[str]) -> list[int]:
    """Return the id of the first token of each name, from the tokens of the text "the NAME".

    In a text without "the", the space before the name may be a separate token.
    """
    texts = ["the", *(f"the {name}" for name in names)]
    prefix, *with_name = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
    return [ids[len(prefix)] for ids in with_name]


_PAPER: dict[str, Callable[[], Dataset]] = {
    "bios": lambda: _bios_paper(professors=True),
    "bios_full": lambda: _bios_paper(professors=False),
    "multilingual": _multilingual_paper,
    "winobias": _winobias_paper,
    "images": _celeba,
    "waterbirds": _waterbirds,
}
