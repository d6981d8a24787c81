"""Nouns, templates and language-model states of the demo, which ship with the package.

``professions/README.md`` states the origin of the tables and the meaning of the scores. The script
``tools/build_profession_activations.py`` of the source tree computes the states.
"""

from __future__ import annotations

import csv
import hashlib
from dataclasses import dataclass
from importlib.resources import as_file
from importlib.resources import files as resource_files
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime import files
from splince_fast.exceptions import FileFormatError

FOLDER: Final = "professions"
NOUNS: Final = "nouns.csv"
TEMPLATES: Final = "templates.txt"
ARRAYS: Final = "professions.safetensors"
KIND: Final = "profession-activations"
FORMAT_VERSION: Final = 1
SLOT: Final = "{noun}"


@dataclass(frozen=True)
class Tables:
    """Nouns with two scores, and the templates of prompts."""

    nouns: tuple[str, ...]
    # "nurse" and "male nurse" are one family, and so are "king" and "queen".
    families: tuple[str, ...]
    # 1 - 2 * (fraction of women in the occupation), in [-1, 1]; 0 if the fraction is unknown.
    stereotype: NDArray[np.float64]
    factual: NDArray[np.float64]  # gender by dictionary meaning: 1 male, -1 female, 0 neither
    templates: tuple[str, ...]  # beginnings of sentences with the slot ``{noun}``
    checksum: str  # SHA-256 of the text of both files, with line ends "\n"

    def prompts(self) -> list[str]:
        """Return all prompts in the order of the activations: by noun, then by template."""
        return [t.replace(SLOT, noun) for noun in self.nouns for t in self.templates]


@dataclass(frozen=True)
class ProfessionData(Tables):
    """Last-token states of a language model for every noun in every template."""

    # (n, d), inputs of the language-model head, one row per prompt; the file stores float16.
    activations: NDArray[np.float64]
    noun_index: NDArray[np.intp]  # (n,), noun of each row, as a position in `nouns`
    he_minus_she: NDArray[np.float64]  # (d,), difference of two rows of the head
    model: str
    licence: str

    def log_odds(self, activations: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
        """Return log p(he) - log p(she) of `activations`, by default of the stored ones."""
        # The head has no bias, and the normaliser of the softmax cancels.
        return (self.activations if activations is None else activations) @ self.he_minus_she


def read_tables(folder: Path, checksum: str | None = None) -> Tables:
    """Read ``nouns.csv`` and ``templates.txt`` in a folder; refuse another checksum."""
    # Reading as text converts line ends to "\n", so that the checksum is the same on Windows.
    noun_text, template_text = (
        (folder / name).read_text(encoding="utf-8") for name in (NOUNS, TEMPLATES)
    )
    found = hashlib.sha256(f"{noun_text}\0{template_text}".encode()).hexdigest()
    if checksum not in (None, found):
        raise FileFormatError(
            f"{folder / ARRAYS} was made from other tables than {NOUNS} and {TEMPLATES} beside it "
            f"(checksum {checksum}, found {found}): one of them was changed; restore the files as "
            "they were shipped, or build the activations again"
        )
    rows = list(csv.DictReader(noun_text.splitlines()))
    return Tables(
        nouns=tuple(row["noun"] for row in rows),
        families=tuple(row["family"] for row in rows),
        stereotype=np.array([float(row["stereotype"]) for row in rows]),
        factual=np.array([float(row["factual"]) for row in rows]),
        templates=tuple(line for line in template_text.splitlines() if line),
        checksum=found,
    )


def load(folder: Path | None = None) -> ProfessionData:
    """Load tables and their activations, by default those that ship with the package."""
    if folder is None:
        with as_file(resource_files("splince_fast.demo").joinpath(FOLDER)) as shipped:
            return load(shipped)
    tensors, metadata = files.read(folder / ARRAYS, KIND, FORMAT_VERSION)
    tables = read_tables(folder, metadata["tables_sha256"])
    he, she = tensors["head"].astype(np.float64)
    return ProfessionData(
        **vars(tables),
        activations=tensors["activations"].astype(np.float64),
        noun_index=np.repeat(np.arange(len(tables.nouns)), len(tables.templates)),
        he_minus_she=he - she,
        model=metadata["model"],
        licence=metadata["licence"],
    )
