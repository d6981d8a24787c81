"""Data sets of the experiments: those of the paper, and offline stand-ins for them.

``load(name)`` reads a stand-in from the folder that the environment variable ``SPLINCE_FAST_DATA``
names, or from files that ship with the package or scikit-learn. ``load(name, data="paper")`` reads
a data set of the paper (:mod:`splince_fast.experiments.paper_sets`).
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.exceptions import InputError
from splince_fast.experiments import paper_sets
from splince_fast.experiments.dataset import VARIABLE, Dataset, MissingDataError, folder

__all__ = ["Dataset", "MissingDataError", "load"]


def load(name: str, data: str = "offline") -> Dataset:
    """Read a data set.

    Parameters
    ----------
    name : str
        "bios", "bios_full", "multilingual", "professions", "layers", "winobias", "images" or
        "waterbirds".
    data : {"offline", "paper"}
        Read the offline stand-in, or the data set of the paper.

    Returns
    -------
    Dataset
        Rows, labels, groups, provenance, licence.

    Raises
    ------
    InputError
        `name` or `data` is invalid.
    MissingDataError
        The data set is not available; the message says how to obtain it, or names a stand-in.

    Examples
    --------
    >>> from splince_fast.experiments.datasets import load
    >>> data = load("images")
    >>> data.X.shape[0] == len(data.labels["task"])
    True
    """
    if data not in ("offline", "paper"):
        raise InputError(f"data is {data!r}; choose 'offline' or 'paper'")
    if name not in _OFFLINE:
        raise InputError(f"there is no data set {name!r}; choose one of {', '.join(_OFFLINE)}")
    if data == "paper":
        return paper_sets.load(name)
    return _OFFLINE[name]()


def required_folder(name: str, experiment: str) -> Path:
    """Return the folder of an offline data set that does not ship with the package.

    Raises
    ------
    MissingDataError
        ``SPLINCE_FAST_DATA`` does not contain the folder.
    """
    path = folder(name)
    if path is None:
        raise MissingDataError(
            f"the stand-in {name!r} does not ship with the package, and the environment variable "
            f"{VARIABLE} names no folder that holds it. Set it to the folder with {name}/ and run "
            f"python -m splince_fast.experiments {experiment} again; bios and images run without it"
        )
    return path


def _arrays(path: Path, names: str) -> list[NDArray[Any]]:
    return [np.load(path / f"{name}.npy", allow_pickle=False) for name in names.split()]


def _table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


_BUG = (
    "sentences of the BUG corpus, the profession masked, through all-MiniLM-L6-v2 (Levy, Lazar, "
    "Stanovsky 2021); a stand-in for Bias in Bios"
)
_BUG_LICENCE = "corpus MIT, encoder Apache-2.0"
_SMOLLM = "SmolLM2-135M-Instruct, last token"


def shipped_bios() -> Dataset:
    """Read the stand-in for Bias in Bios that ships with the package, with 8 bits per value."""
    with as_file(files("splince_fast.experiments") / "data" / "bios.npz") as path:
        arrays = np.load(path, allow_pickle=False)
        X = arrays["centre"] + arrays["step"] * arrays["codes"].astype(np.float32)
        labels = {"task": arrays["y"], "concept": arrays["z"]}
    return Dataset(
        "bug_profession_gender (shipped, 8 bit)", X, labels, None, _BUG, _BUG_LICENCE, 0,
        (4000, 600, 1000),
    )  # fmt: skip


def _bios() -> Dataset:
    path = folder("bug_profession_gender")
    if path is None:
        return shipped_bios()
    X, y, z = _arrays(path, "X y z")
    labels = {"task": y, "concept": z}
    sizes = (4000, 600, 1000)
    return Dataset("bug_profession_gender", X, labels, None, _BUG, _BUG_LICENCE, 0, sizes)


def _bios_full() -> Dataset:
    X, y, z = _arrays(required_folder("bug_28_professions", "bios_full"), "X y z")
    return Dataset("bug_28_professions", X, {"task": y, "concept": z}, None, _BUG, _BUG_LICENCE)


def _multilingual() -> Dataset:
    X, y, z = _arrays(required_folder("toxicity_en_de_fr", "multilingual"), "X y z")
    return Dataset(
        "toxicity_en_de_fr", X, {"task": y, "concept": z}, None,
        "tweets of MLMA (Ousidhoum et al. 2019; en, fr) and GermEval-2018 (Wiegand, Siegel, "
        "Ruppenhofer 2018; de) through multilingual-e5-small; the language goes with the source",
        "MLMA and encoder MIT; GermEval CC BY 4.0", 0, (1600, 400, 600),
    )  # fmt: skip


def _professions() -> Dataset:
    path = required_folder("professions_smollm2", "professions")
    X, z, y, head = _arrays(path, "X z_stereotype y_fact lm_head_he_she")
    rows = _table(path / "prompts.csv")
    nouns = np.array([row["profession"] for row in rows])
    labels = {"task": y.astype(np.float64), "concept": z.astype(np.float64), "noun": nouns}
    labels["prompt"] = np.array([row["prompt"] for row in rows])
    return Dataset(
        "professions_smollm2", X, labels, nouns,
        f"prompts of the DAMA paper with scores of Bolukbasi et al. 2016, through {_SMOLLM}",
        "MIT; model Apache-2.0", arrays={"head": head},
    )  # fmt: skip


def _layers() -> Dataset:
    prompts = _professions()
    (rows,) = _arrays(required_folder("professions_smollm2_layers", "layers"), "rows")
    labels = {name: column[rows] for name, column in prompts.labels.items()}
    return Dataset(
        "professions_smollm2_layers", prompts.X[rows], labels, labels["noun"], prompts.provenance,
        prompts.licence, arrays={**prompts.arrays, "rows": rows},
    )  # fmt: skip


def _winobias() -> Dataset:
    path = required_folder("winobias_smollm2", "winobias")
    X, head = _arrays(path, "X lm_head_professions")
    rows = _table(path / "prompts.csv")
    names = (path / "professions.txt").read_text(encoding="utf-8").split("\n")
    names = [name for name in names if name]
    class_index = {name: i for i, name in enumerate(names)}
    labels = {
        "task": np.array([class_index[row["referent"]] for row in rows]),
        "other": np.array([class_index[row["other"]] for row in rows]),
        "concept": np.array([int(row["anti_stereotype"]) for row in rows]),
        "split": np.array([row["split"] for row in rows]),
    }
    return Dataset(
        "winobias_smollm2", X, labels, None,
        f"WinoBias type 1 (Zhao et al. 2018) with the paper's prompt, through {_SMOLLM}",
        "WinoBias MIT; model Apache-2.0", arrays={"head": head, "names": np.array(names)},
    )  # fmt: skip


def _images() -> Dataset:
    path = folder("faces_cmu")
    return _digits() if path is None else _faces(path)


def _faces(path: Path) -> Dataset:
    """Read face images of 15 x 16 pixels in [0, 1], the means of 2 x 2 original pixels."""
    (pixels,) = _arrays(path, "X")
    if pixels.shape[1] != 960:
        raise InputError(f"{path} holds images of {pixels.shape[1]} pixels, not 32 x 30")
    X = pixels.reshape(-1, 15, 2, 16, 2).mean(axis=(2, 4)).reshape(len(pixels), -1) / 255
    rows = _table(path / "rows.csv")
    y, z = (np.array([int(row[c]) for row in rows]) for c in ("sunglasses", "sideways"))
    return Dataset(
        "faces_cmu", X, {"task": y, "concept": z}, np.array([row["person"] for row in rows]),
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
        "digits", digits.data / 16.0, {"task": y, "concept": z, "digit": digits.target}, None,
        "optical recognition of handwritten digits (E. Alpaydin, C. Kaynak, 1998), bundled with "
        "scikit-learn: task even, concept 5 or above",
        "CC BY 4.0 (UCI)", 1, (560, 0, 160), {"shape": np.array([8, 8])},
        {"task": ("odd", "even"), "concept": ("below 5", "5 and above")},
    )  # fmt: skip


def _waterbirds() -> Dataset:
    raise MissingDataError(
        "Waterbirds has no offline stand-in: no free image set with a background concept is small "
        "enough to ship. With network run python -m splince_fast.experiments waterbirds --data "
        "paper (reads grodino/waterbirds); the most similar offline experiment is images"
    )


_OFFLINE: dict[str, Callable[[], Dataset]] = {
    "bios": _bios,
    "bios_full": _bios_full,
    "multilingual": _multilingual,
    "professions": _professions,
    "layers": _layers,
    "winobias": _winobias,
    "images": _images,
    "waterbirds": _waterbirds,
}
