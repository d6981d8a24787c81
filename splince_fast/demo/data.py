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
# Tokens whose odds are compared, in the order of the rows of the stored head.
PRONOUNS: Final = (" he", " she")
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


def read_tables(folder: Path) -> Tables:
    """Read ``nouns.csv`` and ``templates.txt`` in a folder."""
    # Reading as text converts line ends to "\n", so that the checksum is the same on Windows.
    noun_text = (folder / NOUNS).read_text(encoding="utf-8")
    template_text = (folder / TEMPLATES).read_text(encoding="utf-8")
    rows = list(csv.DictReader(noun_text.splitlines()))
    templates = tuple(line for line in template_text.splitlines() if line)
    for template in templates:
        if template.count(SLOT) != 1:
            raise FileFormatError(
                f"{folder / TEMPLATES}: the template {template!r} must hold {SLOT} exactly once"
            )
    try:
        return Tables(
            nouns=tuple(row["noun"] for row in rows),
            families=tuple(row["family"] for row in rows),
            stereotype=np.array([float(row["stereotype"]) for row in rows]),
            factual=np.array([float(row["factual"]) for row in rows]),
            templates=templates,
            checksum=hashlib.sha256(f"{noun_text}\0{template_text}".encode()).hexdigest(),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(
            f"{folder / NOUNS} cannot be read: {error!r}. Each row needs noun, family, stereotype "
            "and factual, the scores as numbers"
        ) from error


def load(folder: Path | None = None) -> ProfessionData:
    """Load tables and their activations, by default those that ship with the package."""
    if folder is None:
        with as_file(resource_files("splince_fast.demo").joinpath(FOLDER)) as shipped:
            return load(shipped)
    tables = read_tables(folder)
    path = folder / ARRAYS
    tensors, metadata = files.read(path, KIND, FORMAT_VERSION)
    try:
        states, head = tensors["activations"], tensors["head"]
        checksum, model, licence = (metadata[k] for k in ("tables_sha256", "model", "licence"))
    except KeyError as error:
        raise FileFormatError(f"{path} lacks {error}: it is incomplete; build it again") from error
    advice = "restore the files as they were shipped, or build the activations again"
    if checksum != tables.checksum:
        raise FileFormatError(
            f"{path} was made from other tables than {NOUNS} and {TEMPLATES} beside it (checksum "
            f"{checksum}, found {tables.checksum}): one of them was changed; {advice}"
        )
    n_nouns, n_templates = len(tables.nouns), len(tables.templates)
    if states.shape != (n_nouns * n_templates, head.shape[-1]) or head.shape[:-1] != (2,):
        raise FileFormatError(
            f"{path} holds activations of shape {states.shape} and a head of shape {head.shape}, "
            f"for {n_nouns} nouns in {n_templates} templates and 2 pronouns; {advice}"
        )
    he, she = head.astype(np.float64)
    return ProfessionData(
        **vars(tables),
        activations=states.astype(np.float64),
        noun_index=np.repeat(np.arange(n_nouns), n_templates),
        he_minus_she=he - she,
        model=model,
        licence=licence,
    )
