"""Data sets of the paper: read, subsampled and embedded.

If the folder ``SPLINCE_FAST_DATA`` has a folder ``paper/OWNER/NAME`` with Parquet files, a data set
is read from these files; otherwise it is downloaded from Hugging Face. CelebA is read from
``paper/celeba`` in torchvision's layout, or downloaded by torchvision. Encoders are used as
published, without the fine-tuning of the paper. At most :data:`PER_CELL` rows of each cell (task,
concept) are embedded. Without a GPU, an experiment takes hours.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.extras import require
from splince_fast.experiments.dataset import VARIABLE, Dataset, MissingDataError, folder
from splince_fast.labels import ClassName

if TYPE_CHECKING:
    from PIL.Image import Image

Columns = dict[str, list[Any]]
PER_CELL = 5000
PROFESSOR = 21
LANGUAGES = ("en", "de", "fr")
CELEBA_SIDE = 50
_STAND_INS = {
    "bios": "bug_profession_gender",
    "bios_full": "bug_28_professions",
    "multilingual": "toxicity_en_de_fr",
    "winobias": "winobias_smollm2",
    "professions": "the states of the demo",
    "layers": "professions_smollm2_layers",
    "images": "faces_cmu or scikit-learn's digits",
    "waterbirds": "none; the most similar experiment is images",
}


def load(name: str) -> Dataset:
    """Read a data set of the paper.

    Raises
    ------
    MissingDataError
        The data set is not available; the message names a stand-in and the command that uses it.
    MissingExtraError
        A package that reads the data set is not installed.
    """
    if name not in _LOADERS:
        raise MissingDataError(
            f"the paper's {name} set is run through Llama models, whose weights need an account. "
            f"{_stand_in(name)}"
        )
    return _LOADERS[name]()


def _unavailable(source: str, name: str, error: Exception) -> MissingDataError:
    return MissingDataError(
        f"{source} could not be fetched ({type(error).__name__}: {str(error)[:200]}). It needs the "
        f"network once, or its files in ${VARIABLE}/paper/{source}. {_stand_in(name)}"
    )


def _stand_in(name: str) -> str:
    """Return a text that names the offline stand-in and the command that uses it."""
    experiment = "images" if name == "waterbirds" else name
    stand_in = _STAND_INS[name]
    return f"Offline stand-in: {stand_in}; python -m splince_fast.experiments {experiment}"


def read_columns(
    source: str, name: str, splits: Sequence[str], config: str | None = None
) -> Columns:
    """Return the columns of several splits of a data set on the Hugging Face hub.

    If Parquet files of the data set are in ``SPLINCE_FAST_DATA``, they are read instead. An added
    column "split" holds the name of the split of each row. `name` is for error messages.
    """
    columns: Columns = {}
    path = folder(f"paper/{source}")
    if path is None:
        require("datasets", "experiments")
        import datasets

        try:
            dataset = datasets.load_dataset(source, config)
            tables: dict[str, Any] = {split: dataset[split].to_dict() for split in splits}
        except Exception as error:  # exception types depend on the version of `datasets`
            raise _unavailable(source, name, error) from error
    else:
        require("pyarrow", "parquet")
        import pyarrow.parquet as pq

        path = path / config if config else path
        files = {s: sorted(path.glob(f"{s}*.parquet")) for s in splits}
        tables = {s: [pq.read_table(f) for f in paths] for s, paths in files.items()}
        if missing := [s for s in splits if not tables[s]]:
            raise MissingDataError(f"{path} holds no {missing[0]}*.parquet of {source}")
        tables = {
            s: {c: [v for t in parts for v in t[c].to_pylist()] for c in parts[0].column_names}
            for s, parts in tables.items()
        }
    for split, table in tables.items():
        size = len(next(iter(table.values())))
        for column, values in {**table, "split": [split] * size}.items():
            columns.setdefault(column, []).extend(values)
    return columns


def sample_cells(*columns: NDArray[np.generic], max_rows: int | None = None) -> NDArray[np.intp]:
    """Return sorted indices of at most `max_rows` random rows of each cell, drawn with seed 0.

    A cell is one combination of values of the columns. By default `max_rows` is :data:`PER_CELL`.
    """
    _, cell = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    rng = np.random.default_rng(0)
    parts = [rng.permutation(np.flatnonzero(cell.ravel() == c))[: max_rows or PER_CELL]
             for c in range(int(cell.max()) + 1)]  # fmt: skip
    return np.sort(np.concatenate(parts))


def embed_texts(texts: Sequence[str], model: str, pooling: str, name: str) -> NDArray[np.float32]:
    """Return embeddings of texts by the encoder `model`; `name` is for error messages.

    An embedding is the last-layer state of the first token if `pooling` is "cls", and the mean of
    the states of all tokens otherwise.
    """
    require("transformers", "experiments")
    import torch
    from transformers import AutoModel, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        encoder = AutoModel.from_pretrained(model).eval()
    except OSError as error:
        raise _unavailable(model, name, error) from error
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


def embed_images(images: Iterable[Image], name: str) -> NDArray[np.float32]:
    """Return embeddings of images: inputs of the last layer of a ResNet-50 trained on ImageNet."""
    require("torchvision", "experiments")
    import torch

    models = import_module("torchvision.models")
    weights = models.ResNet50_Weights.DEFAULT
    try:
        network = models.resnet50(weights=weights).eval()
    except OSError as error:
        raise _unavailable("torchvision ResNet-50", name, error) from error
    network.fc = torch.nn.Identity()
    prepare = weights.transforms()
    with torch.no_grad():
        return np.stack([network(prepare(image)[None])[0].numpy() for image in images])


def _bios_set(
    name: str, task: Callable[[NDArray[Any]], NDArray[Any]], aligned_class: ClassName | None
) -> Dataset:
    columns = read_columns("LabHC/bias_in_bios", name, ("train", "dev", "test"))
    y, gender = task(np.array(columns["profession"])), np.array(columns["gender"])
    rows = sample_cells(
        y, gender, max_rows=PER_CELL if aligned_class is not None else PER_CELL // 10
    )
    X = embed_texts([columns["hard_text"][i] for i in rows], "bert-base-uncased", "cls", name)
    return Dataset(
        "LabHC/bias_in_bios", X, {"task": y[rows], "concept": gender[rows]}, None,
        "Bias in Bios (De-Arteaga et al. 2019), bert-base-uncased as published, [CLS]", "MIT",
        aligned_class,
    )  # fmt: skip


def _bios() -> Dataset:
    """Read Bias in Bios; the task is professor or not, and professor is aligned with 0 (male)."""
    return _bios_set("bios", lambda p: (p == PROFESSOR).astype(np.intp), 0)


def _bios_full() -> Dataset:
    return _bios_set("bios_full", lambda p: p, None)


def _multilingual() -> Dataset:
    source = "textdetox/multilingual_toxicity_dataset"
    columns = read_columns(source, "multilingual", LANGUAGES)
    y = np.array(columns["toxic"], dtype=np.intp)
    z = np.array([LANGUAGES.index(split) for split in columns["split"]])
    rows = sample_cells(y, z)
    texts = [f"query: {columns['text'][i]}" for i in rows]
    X = embed_texts(texts, "intfloat/multilingual-e5-base", "mean", "multilingual")
    return Dataset(
        source, X, {"task": y[rows], "concept": z[rows]}, None,
        "multilingual toxicity (Dementieva et al. 2024), multilingual-e5-base as published",
        "openrail++", 0,
    )  # fmt: skip


def _celeba() -> Dataset:
    """Read CelebA as grey images of 50 x 50 pixels in [0, 1]; task: glasses, concept: smiling."""
    path = folder("paper/celeba")
    if path is None:
        require("torchvision", "experiments")
        dataset = import_module("torchvision.datasets").CelebA
        root = Path(os.environ.get(VARIABLE) or Path.home() / ".cache" / "splince_fast")
        try:
            dataset(str(root / "paper"), split="all", target_type="attr", download=True)
        except Exception as error:  # exception types depend on the download host
            raise _unavailable("celeba", "images", error) from error
        path = root / "paper" / "celeba"
    names, attributes = _attributes(path / "list_attr_celeba.txt")
    y, z = (attributes[c] for c in ("Eyeglasses", "Smiling"))
    rows = sample_cells(y, z)
    X = np.stack([_grey(path / "img_align_celeba" / names[i]) for i in rows])
    return Dataset(
        "CelebA", X, {"task": y[rows], "concept": z[rows]}, None,
        "CelebA (Liu et al. 2015), eyeglasses and smiling, 50 x 50 grey pixels",
        "non-commercial research", 1, arrays={"shape": np.array([CELEBA_SIDE, CELEBA_SIDE])},
        words={"task": ("no glasses", "glasses"), "concept": ("not smiling", "smiling")},
    )  # fmt: skip


def _attributes(path: Path) -> tuple[list[str], Mapping[str, NDArray[np.intp]]]:
    """Return the file names and the attributes of CelebA; the file's values -1 become 0."""
    with path.open(encoding="utf-8", newline="") as stream:
        _, header, *rows = csv.reader(stream, delimiter=" ", skipinitialspace=True)
    header = [name for name in header if name]
    values = np.array([[int(v) for v in row[1:] if v] for row in rows])
    columns = {name: (values[:, j] > 0).astype(np.intp) for j, name in enumerate(header)}
    return [row[0] for row in rows], columns


def _grey(path: Path) -> NDArray[np.float32]:
    require("PIL", "experiments")
    from PIL import Image

    with Image.open(path) as image:
        small = image.convert("L").resize((CELEBA_SIDE, CELEBA_SIDE))
        return (np.asarray(small, dtype=np.float32) / np.float32(255)).ravel()


def _waterbirds() -> Dataset:
    columns = read_columns("grodino/waterbirds", "waterbirds", ("train", "validation", "test"))
    y, z = np.array(columns["label"]), np.array(columns["place"])
    rows = sample_cells(y, z)
    X = embed_images((_image(columns["image"][i]) for i in rows), "waterbirds")
    return Dataset(
        "grodino/waterbirds", X, {"task": y[rows], "concept": z[rows]}, None,
        "Waterbirds (Sagawa et al. 2020), ResNet-50 of torchvision as published",
        "see CUB and Places", 1,
    )  # fmt: skip


def _image(value: Image | Mapping[str, bytes]) -> Image:
    """Convert an image, or a mapping with the bytes of an image file, to an RGB image."""
    if not isinstance(value, Mapping):
        return value.convert("RGB")
    require("PIL", "experiments")
    from PIL import Image as images

    return images.open(BytesIO(value["bytes"])).convert("RGB")


def winobias_prompts(name: str = "winobias") -> Columns:
    """Return the paper's prompts from the sentences of WinoBias type 1, as columns.

    The columns are prompt, referent, anti_stereotype (0 or 1) and split ("train" or "test").
    """
    columns: Columns = {"prompt": [], "referent": [], "anti_stereotype": [], "split": []}
    for anti, config in enumerate(("type1_pro", "type1_anti")):
        table = read_columns("uclanlp/wino_bias", name, ("validation", "test"), config)
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


def _winobias() -> Dataset:
    """Compute the last-token states of WinoBias prompts in a language model.

    The environment variable ``SPLINCE_FAST_MODEL`` names the model, by default Llama 2 7B.
    """
    columns = winobias_prompts()
    model = os.environ.get("SPLINCE_FAST_MODEL", "meta-llama/Llama-2-7b-hf")
    names = sorted(set(columns["referent"]))
    class_index = {name: i for i, name in enumerate(names)}
    X, head = causal_states(columns["prompt"], names, model, "winobias")
    distractors = [
        next((n for n in names if n in prompt.lower() and n != referent), referent)
        for prompt, referent in zip(columns["prompt"], columns["referent"], strict=True)
    ]
    labels = {
        "task": np.array([class_index[referent] for referent in columns["referent"]]),
        "other": np.array([class_index[referent] for referent in distractors]),
        "concept": np.array(columns["anti_stereotype"]),
        "split": np.array(columns["split"]),
    }
    return Dataset(
        "uclanlp/wino_bias", X, labels, None,
        f"WinoBias type 1 (Zhao et al. 2018) through {model}, last token", "MIT; see the model",
        arrays={"head": head, "names": np.array(names)},
    )  # fmt: skip


def causal_states(
    prompts: Sequence[str], names: Sequence[str], model: str, name: str
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return two matrices, with a row per prompt and a row per name.

    The first matrix holds the last-token states of the prompts after the final norm. The second one
    holds the rows of the language-model head for the first token of each of `names`. `name` is for
    error messages.
    """
    require("transformers", "experiments")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        network = AutoModelForCausalLM.from_pretrained(model)
    except OSError as error:
        raise _unavailable(model, name, error) from error
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


_LOADERS: dict[str, Callable[[], Dataset]] = {
    "bios": _bios,
    "bios_full": _bios_full,
    "multilingual": _multilingual,
    "winobias": _winobias,
    "images": _celeba,
    "waterbirds": _waterbirds,
}
