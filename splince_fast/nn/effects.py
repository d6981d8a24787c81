"""Effect of erasers on a model: loss per token, and probes of sampled activations."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splince_fast._runtime.progress import Progress
from splince_fast._solve.options import is_integer
from splince_fast.exceptions import (
    InputError,
    NeverCalledError,
    NonFiniteError,
    SiteError,
    WholeNumbersWarning,
)
from splince_fast.moments.parameters import check_random_state
from splince_fast.nn import calls, sites
from splince_fast.nn.calls import MISSING_LABEL, CallSelections, TokenRule
from splince_fast.nn.collection import (
    Labels,
    label_keys,
    read_labels,
    row_labels,
    selected_rows,
    watching,
)
from splince_fast.nn.eraser import read_erasers
from splince_fast.nn.installed import install
from splince_fast.nn.sites import Placement

Columns = dict[Any, NDArray[Any]]

_KEY, _ROWS, _SEQUENCE = object(), object(), object()  # columns of a sample, beside the labels
_MAX_SEQUENCES = 2**32  # of a batch
_RECORD = {"site": None, "variable": None, "metric": "", "n": 0, "chance": None, "before": None,
           "after": math.nan, "reason": ""}  # fmt: skip


def effect(
    model: object,
    erasers: object,
    texts: Iterable[object],
    *,
    labels: Labels | None = None,
    groups: str | None = None,
    at: object = None,
    tokens: object = None,
    forward: Callable[[Any, Any], Any] | None = None,
    progress: bool | None = None,
    max_rows: int = 2000,
    random_state: int = 0,
) -> list[dict[str, Any]]:
    """Measure a model on held-out data without and with erasers, in one pass over the data.

    Linear probes of the labels are scored on sampled rows of each site
    (:func:`splince_fast.evaluation.leakage`).

    Parameters
    ----------
    model : torch.nn.Module
        As for :func:`collect`; erasers that are already installed stay active.
    erasers : Erasers, path, or mapping of str to Projection
        As for :func:`install`; removed at the end.
    texts : iterable
        Batches of held-out data, as for :func:`collect`.
    labels : str, list of str, or function, optional
        As for :func:`collect`; by default those of the erasers' variables in the first batch.
    groups : str, optional
        Label whose classes are not split between folds; by default each sequence is a group.
    at : str, Module, or a list of them, optional
        Sites to probe; by default the sites of the erasers.
    tokens, forward, progress
        As for :func:`collect`, of the tokens to erase and to probe, by default as for
        :func:`install`; ``progress=False`` also leaves out the printed loss.
    max_rows : int
        Number of sampled rows per site, which take up to 16 max_rows d bytes.
    random_state : int
        Seed of the sample and of the folds.

    Returns
    -------
    list of dict
        Records with the keys site, variable, metric, n, chance, before, after and reason. "loss" is
        the cross-entropy of the next attended token in nats, of models that generate text from
        ``input_ids``; "perplexity" is its exponential. At each site "change" is the sum of |after -
        before|^2 over that of |before - mean|^2; "accuracy" (classes) or "R2" (quantities) of a
        probe is NaN with a reason if it cannot be fitted; `chance` is that of a constant.

    Raises
    ------
    InputError
        `texts` is empty, or there is neither a loss nor a label.
    SiteError, LabelError, NeverCalledError, NonFiniteError
        As for :func:`collect`; SiteError also if a site runs on other rows with the erasers.

    Examples
    --------
    >>> import torch
    >>> import splince_fast as sf
    >>> from splince_fast import nn as snn
    >>> model, z = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh()), torch.arange(80) % 2
    >>> train, test = ([{"input": torch.randn(80, 3) + 2 * z[:, None], "z": z}] for _ in range(2))
    >>> erasers = snn.fit_layers(model, train, ["0", "1"], sf.leace, erase="z")
    >>> records = snn.effect(model, erasers, test)
    >>> [(r["site"], r["after"] < r["before"]) for r in records if r["metric"] == "accuracy"]
    [('0', True), ('1', True)]
    """
    inner = calls.unwrap(model)
    by_site, spec = read_erasers(erasers)
    if not is_integer(max_rows) or max_rows < 2:
        raise InputError(f"max_rows is {max_rows!r}; it must be an integer of at least 2")
    random_state = check_random_state(random_state)
    calls.check_inputs(texts, forward, "texts")
    rule = TokenRule.of(spec.applied if tokens is None else tokens, spec.skip_ids)
    modules = sites.find(inner, list(by_site) if at is None else at)
    sampler = _Sampler(rule, spec.placement, int(max_rows), random_state)
    device, names = calls.device_of(inner), labels
    sums = np.zeros((2, 2))  # of the loss and of its tokens, without and with erasers
    with (
        install(inner, by_site, tokens=tokens) as installed,
        # After the erasers, to receive erased activations.
        watching(inner, modules, spec.placement, sampler.selections, sampler.add),
        calls.evaluating(inner),
        Progress(unit="batches", show=progress) as bar,
    ):
        for i, batch in enumerate(texts):
            names = _reported(by_site, batch) if names is None else names
            keys = [*label_keys(names), *([] if groups is None else [groups])]
            sampler.labels = read_labels(batch, names if callable(names) else keys) if names else {}
            inputs = calls.batch_to(batch, device)
            for phase in (0, 1):
                sampler.batch, sampler.phase = i, phase
                with nullcontext() if phase else installed.disabled():
                    output = calls.call(inner, inputs, keys, forward)
                sums[phase] += _next_token_loss(inner, inputs, output)
            bar.advance(1)
    if names is None:
        raise InputError("texts is empty; a generator is empty when it is read a second time")
    records, n_tokens = [], int(sums[1, 1])
    if n_tokens:
        losses = sums[:, 0] / n_tokens
        perplexities = np.exp(np.minimum(losses, 700.0))  # close to the largest float
        for metric, (before, after) in (("loss", losses), ("perplexity", perplexities)):
            figures = {"n": n_tokens, "before": float(before), "after": float(after)}
            records.append(_RECORD | {"metric": metric, **figures})
            if progress is not False:
                print(f"{metric} per token {before:.4g}, with erasers {after:.4g}", flush=True)
    if not names and not records:
        raise InputError(
            "nothing can be measured: the model has no loss of next tokens, and texts have no "
            "labels of the erasers' variables; pass labels="
        )
    for name in modules if names else ():
        records += _site_records(name, *sampler.result(name), groups, random_state)
    return records


def _reported(erasers: Mapping[Any, Any], batch: Any) -> list[str]:
    """Return the variables in the reports of erasers whose labels a batch has."""
    columns = batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else batch
    reports = (getattr(projection, "report", None) for projection in erasers.values())
    names = [variable.name for report in reports if report for variable in report.variables]
    return [n for n in dict.fromkeys(names) if isinstance(columns, Mapping) and n in columns]


def _next_token_loss(model: Any, batch: Any, output: Any) -> tuple[float, int]:
    """Return the summed loss and number of next tokens; zeros if the model generates no text."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    generates = getattr(model, "can_generate", lambda: False)()
    is_decoder = generates and not getattr(model.config, "is_encoder_decoder", False)
    logits = getattr(output, "logits", None) if is_decoder else None
    if ids is None or not isinstance(logits, Tensor) or logits.shape[:-1] != ids.shape:
        return 0.0, 0
    mask = batch.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    attended = (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    predictions = logits[:, :-1][attended.to(logits.device)].float()
    targets = ids[:, 1:][attended].to(logits.device)
    total = torch.nn.functional.cross_entropy(predictions, targets, reduction="sum")
    return float(total), len(targets)


def _site_records(
    site: str, rows: NDArray[np.float64], columns: Columns, groups: str | None, random_state: int
) -> Iterator[dict[str, Any]]:
    """Compare the sampled rows (2, n, d) of a site without and with erasers, and probe labels."""
    from splince_fast.evaluation import leakage

    if not np.isfinite(rows).all():
        raise NonFiniteError(
            f"the activations at the site {site!r} hold NaN or infinity; run the model in bfloat16 "
            "or float32 if it is in float16"
        )
    before, after = rows
    total = float(np.sum((before - before.mean(axis=0)) ** 2))
    change = float(np.sum((after - before) ** 2)) / total if total else math.nan
    yield _RECORD | {"site": site, "metric": "change", "n": len(before), "after": change}
    group = columns[_SEQUENCE if groups is None else groups]
    for variable, column in columns.items():
        if variable in (_KEY, _ROWS, _SEQUENCE, groups):
            continue
        labelled = column != MISSING_LABEL if column.dtype.kind in "iu" else slice(None)
        with warnings.catch_warnings():  # the fit has warned of such labels
            warnings.simplefilter("ignore", WholeNumbersWarning)
            probes = [
                leakage(values[labelled], column[labelled], probes=("linear",),
                        groups=group[labelled], random_state=random_state)
                for values in rows
            ]  # fmt: skip
        reason = probes[0].reason or probes[1].reason
        record = {"site": site, "variable": variable, "n": len(column[labelled]), "reason": reason}
        record["metric"] = "accuracy" if probes[0].n_classes else "R2"
        figures = {"chance": math.nan, "before": math.nan, "after": math.nan}
        if not reason:
            linear = [probe["linear"] for probe in probes]
            before, after = (getattr(probe, record["metric"].lower()) for probe in linear)
            figures = {"chance": linear[0].chance, "before": before, "after": after}
        yield _RECORD | record | figures


class _Sampler:
    """Random samples of the selected rows at each site, the same rows without and with erasers."""

    def __init__(self, rule: TokenRule, placement: Placement, max_rows: int, seed: int) -> None:
        self.labels: dict[str, Any] = {}  # of the batch; without labels nothing is sampled
        self.batch = self.phase = 0  # number of the batch; phase 1 with erasers
        self.selections = CallSelections(rule)
        self._placement, self._max_rows, self._seed = placement, max_rows, seed
        self._calls: dict[tuple[str, int], list[Columns]] = defaultdict(list)
        # The batch and the number of selected rows of each call.
        self._counts: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)

    def add(self, name: str, value: object) -> None:
        """Add the rows of a call to the sample of a site."""
        if not self.labels:
            return
        rows, mask, _ = selected_rows(name, value, self._placement, self.selections)
        shape, place = tuple(rows.shape[:-1]), (name, self.phase)
        positions = np.arange(math.prod(shape))
        if mask is not None:
            positions = np.flatnonzero(mask.cpu().numpy())
        # The sample has the rows with the smallest keys, which are random numbers.
        seed = (self._seed, len(self._counts[place]), len(positions))
        self._counts[place].append((self.batch, len(positions)))
        keys = np.random.default_rng(seed).random(len(positions))
        chosen = _smallest(keys, self._max_rows)
        positions = positions[chosen]
        sequence, labels = row_labels(self.labels, shape, positions)
        flat = rows.reshape(-1, rows.shape[-1])[torch.from_numpy(positions).to(rows.device)]
        columns: Columns = {k: np.ma.filled(own, MISSING_LABEL) for k, own in labels.items()}
        columns[_SEQUENCE] = self.batch * _MAX_SEQUENCES + sequence
        columns |= {_KEY: keys[chosen], _ROWS: flat.float().cpu().numpy()}
        self._calls[place].append(columns)
        if sum(len(call[_KEY]) for call in self._calls[place]) > 2 * self._max_rows:
            self._calls[place] = [self._sample(place)]

    def _sample(self, place: tuple[str, int]) -> Columns:
        calls = self._calls[place]
        joined = {key: np.concatenate([call[key] for call in calls]) for key in calls[0]}
        chosen = _smallest(joined[_KEY], self._max_rows)
        return {key: column[chosen] for key, column in joined.items()}

    def result(self, name: str) -> tuple[NDArray[np.float64], Columns]:
        """Return the sampled rows (2, n, d) of a site without and with erasers, and labels."""
        if self._counts[name, 0] != self._counts[name, 1]:
            raise SiteError(
                f"the site {name!r} runs on other rows with the erasers than without them; pass "
                "forward= with a fixed number of calls, or choose another site by at="
            )
        if not any(n for _, n in self._counts[name, 0]):
            raise NeverCalledError(
                f"the site {name!r} never ran on selected tokens; choose the module that contains "
                "it, or other tokens"
            )
        before, after = (self._sample((name, phase)) for phase in (0, 1))
        return np.stack([before[_ROWS], after[_ROWS]]).astype(np.float64), before


def _smallest(keys: NDArray[np.float64], n: int) -> NDArray[np.intp]:
    """Return the sorted indices of the n smallest keys."""
    return np.sort(np.argsort(keys, kind="stable")[:n])
