"""Effect of erasers on a model: loss per token, and probes of sampled activations."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module

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
from splince_fast.nn import running, sites
from splince_fast.nn.collection import Labels, label_keys, label_rows, read_labels
from splince_fast.nn.erasers import read_erasers
from splince_fast.nn.installed import install
from splince_fast.nn.sites import Placement
from splince_fast.nn.tokens import MISSING_LABEL, CallSelections, TokenRule

Columns = dict[Any, NDArray[Any]]

_KEY, _ROWS, _SEQUENCE = object(), object(), object()  # columns of a sample, beside the labels


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
    max_rows: int = 2000,
    random_state: int = 0,
    progress: bool | None = None,
) -> list[dict[str, Any]]:
    """Measure a model on held-out data without and with erasers, in one pass over the data.

    Each batch runs twice. The loss and the perplexity per token need no labels, and are printed
    before the first probe is fitted. Linear probes of the labels are then scored on sampled rows of
    each site, by five-fold cross-validation (:func:`splince_fast.evaluation.leakage`).

    Parameters
    ----------
    model : torch.nn.Module
        As for :func:`collect`; erasers that are already installed stay active.
    erasers : Erasers, path, or mapping of str to Projection
        As for :func:`install`; removed at the end.
    texts : iterable
        Batches of held-out data, as for :func:`collect`.
    labels : str, list of str, or function, optional
        As for :func:`collect`; by default the variables in the reports of the erasers, as far as
        the first batch has them. Without labels nothing is probed.
    groups : str, optional
        Label whose classes are not split between folds, for example the noun that fills a prompt
        template: if the noun determines the probed variable, a probe could learn the nouns instead.
        By default each sequence is a group.
    at : str, Module, or a list of them, optional
        Sites to probe; by default the sites of the erasers.
    tokens : {"body", "all", "first", "last"} or function, optional
        Tokens to erase and to probe; by default as for :func:`install`.
    forward : function, optional
        ``forward(model, batch)`` runs the model and returns its output.
    max_rows : int
        Number of sampled rows per site; the samples take up to 16 max_rows d bytes during the pass.
    random_state : int
        Seed of the sample and of the folds.
    progress : bool, optional
        Show a progress bar on stderr; by default only in a terminal or notebook, after two
        seconds. False also leaves out the printed loss.

    Returns
    -------
    list of dict
        Records with the keys site, variable, metric, n, chance, before, after and reason. "loss" is
        the cross-entropy of the next attended token in nats, of models that generate text from
        ``input_ids``; "perplexity" is its exponential. At each site "change" is the sum of |after -
        before|^2 over that of |before - mean|^2. "accuracy" (classes) or "R2" (quantities) of a
        probe is NaN with a reason if it cannot be fitted; `chance` is the fraction of the most
        frequent class, or 0.

    Raises
    ------
    InputError
        `texts` is empty, or there is neither a loss nor a label.
    SiteError, LabelError, NeverCalledError
        As for :func:`collect` and :func:`install`; SiteError also if a site runs on other rows with
        the erasers than without them.
    NonFiniteError
        Activations are NaN or infinite.

    Examples
    --------
    >>> import torch
    >>> import splince_fast as sf
    >>> from splince_fast import nn as snn
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh())
    >>> z = torch.arange(80) % 2
    >>> train, test = ([{"input": torch.randn(80, 3) + 2 * z[:, None], "z": z}] for _ in range(2))
    >>> erasers = snn.fit_layers(model, train, ["0", "1"], sf.leace, erase="z")
    >>> records = snn.effect(model, erasers, test)
    >>> [(r["site"], r["after"] < r["before"]) for r in records if r["metric"] == "accuracy"]
    [('0', True), ('1', True)]
    """
    inner = running.unwrap(model)
    by_site, spec = read_erasers(erasers)
    if not is_integer(max_rows) or max_rows < 2:
        raise InputError(f"max_rows is {max_rows!r}; it must be an integer of at least 2")
    random_state = check_random_state(random_state)
    running.check_inputs(texts, forward, "texts")
    rule = TokenRule.of(spec.applied if tokens is None else tokens, spec.skip_ids)
    modules = sites.find(inner, list(by_site) if at is None else at)
    sampler = _Sampler(modules, rule, spec.placement, int(max_rows), random_state)
    device, names = running.device_of(inner), labels
    totals, n_tokens = np.zeros(2), 0
    with (
        install(inner, by_site, tokens=tokens) as installed,
        sampler.attached(inner),  # after the erasers, to receive erased activations
        running.evaluating(inner),
        Progress(unit="batches", show=progress) as bar,
    ):
        for batch in texts:
            names = _reported(by_site, batch) if names is None else names
            read: Any = names if groups is None or callable(names) else [*label_keys(names), groups]
            keys = [*label_keys(names), *([] if groups is None else [groups])]
            sampler.labels = read_labels(batch, read) if names else {}
            inputs = running.batch_to(batch, device)
            for phase in (0, 1):
                sampler.start_phase()
                with nullcontext() if phase else installed.disabled():
                    output = running.call(inner, inputs, keys, forward)
                total, n = _next_token_loss(inner, inputs, output)
                totals[phase] += total
            n_tokens += n
            sampler.end_batch()
            bar.advance(1)
    if names is None:
        raise InputError("texts is empty; a generator is empty when it is read a second time")
    records = []
    if n_tokens:
        losses = totals / n_tokens
        perplexities = np.exp(np.minimum(losses, 700.0))  # close to the largest float
        for metric, (before, after) in (("loss", losses), ("perplexity", perplexities)):
            records.append(_record(None, None, metric, n_tokens, float(before), float(after)))
            if progress is not False:
                print(f"{metric} per token {before:.4g}, with erasers {after:.4g}", flush=True)
    if not names and not records:
        raise InputError(
            "nothing can be measured: the model has no loss of next tokens, and texts have no "
            "labels of the erasers' variables; pass labels="
        )
    for name in modules if names else ():
        records += _site_records(name, sampler.result(name), groups, random_state)
    return records


def _reported(erasers: Mapping[Any, Any], batch: Any) -> list[str]:
    """Return the variables in the reports of erasers whose labels a batch has."""
    columns = batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else batch
    reports = (getattr(projection, "report", None) for projection in erasers.values())
    names = [variable.name for report in reports if report for variable in report.variables]
    return [n for n in dict.fromkeys(names) if isinstance(columns, Mapping) and n in columns]


def _next_token_loss(model: Any, batch: Any, output: Any) -> tuple[float, int]:
    """Return the summed cross-entropy of the next tokens, and the number of these tokens.

    Returns (0, 0) for models that do not generate text from ``input_ids``.
    """
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    logits = getattr(output, "logits", None)
    generates = getattr(model, "can_generate", lambda: False)()
    if (
        ids is None
        or not generates
        or getattr(model.config, "is_encoder_decoder", False)
        or not isinstance(logits, Tensor)
        or logits.shape[:-1] != ids.shape
    ):
        return 0.0, 0
    mask = batch.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    attended = (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    predictions = logits[:, :-1][attended.to(logits.device)].float()
    targets = ids[:, 1:][attended].to(logits.device)
    total = torch.nn.functional.cross_entropy(predictions, targets, reduction="sum")
    return float(total), len(targets)


# -- records -------------------------------------------------------------------------------


def _record(
    site: str | None, variable: str | None, metric: str, n: int, before: float | None,
    after: float, chance: float | None = None, reason: str = "",
) -> dict[str, Any]:  # fmt: skip
    return {"site": site, "variable": variable, "metric": metric, "n": n, "chance": chance,
            "before": before, "after": after, "reason": reason}  # fmt: skip


def _site_records(
    name: str, columns: Columns, groups: str | None, random_state: int
) -> list[dict[str, Any]]:
    """Compare the sampled rows (n, 2, d) of a site without and with erasers, and probe labels."""
    from splince_fast.evaluation import leakage

    rows = columns[_ROWS].astype(np.float64)
    if not np.isfinite(rows).all():
        raise NonFiniteError(
            f"the activations at the site {name!r} hold NaN or infinity; run the model in bfloat16 "
            "or float32 if it is in float16"
        )
    before, after = rows[:, 0], rows[:, 1]
    total = float(np.sum((before - before.mean(axis=0)) ** 2))
    change = float(np.sum((after - before) ** 2)) / total if total else math.nan
    records = [_record(name, None, "change", len(rows), None, change)]
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
                for values in (before, after)
            ]  # fmt: skip
        reason = probes[0].reason or probes[1].reason
        metric = "accuracy" if probes[0].n_classes else "R2"
        scores, chance = [math.nan] * 2, math.nan
        if not reason:
            scores = [getattr(probe["linear"], metric.lower()) for probe in probes]
            chance = probes[0]["linear"].chance
        n = len(column[labelled])
        records.append(_record(name, variable, metric, n, scores[0], scores[1], chance, reason))
    return records


# -- samples -------------------------------------------------------------------------------


class _Sampler:
    """Random sample of the selected rows at each site, without and with erasers.

    Each row has a random key, which depends on the batch and on its position among the rows of the
    site, and the rows with the smallest keys are kept: the same ones in both phases.
    """

    def __init__(
        self,
        modules: Mapping[str, Module],
        rule: TokenRule,
        placement: Placement,
        max_rows: int,
        random_state: int,
    ) -> None:
        self.labels: dict[str, Any] = {}  # of the batch; without labels nothing is sampled
        self._modules, self._placement = modules, placement
        self._max_rows, self._random_state = max_rows, random_state
        self._selections = CallSelections(rule)
        self._samples: dict[str, list[Columns]] = {name: [] for name in modules}
        self._max_keys = dict.fromkeys(modules, math.inf)
        self._phases: list[dict[str, list[Columns]]] = []  # of the batch
        self._n_batches = self._n_sequences = self._size = 0

    @contextmanager
    def attached(self, model: Module) -> Iterator[None]:
        """Attach the hooks inside a ``with`` block."""
        with ExitStack() as stack:
            for name, module in self._modules.items():
                add = partial(self._add, name)
                stack.callback(sites.add_hook(name, module, self._placement.side, add).remove)
            stack.callback(self._selections.detach)
            self._selections.attach(model, self._modules)
            yield

    def start_phase(self) -> None:
        self._phases.append({name: [] for name in self._modules})

    def _add(self, name: str, value: object) -> None:
        if not self.labels:
            return
        rows = sites.pick_rows(name, value, self._placement)[0].detach()
        mask = self._selections.current(name).mask_for(name, rows)
        shape, calls = tuple(rows.shape[:-1]), self._phases[-1][name]
        positions = np.arange(math.prod(shape))
        if mask is not None:
            positions = np.flatnonzero(mask.cpu().numpy())
        seed = (self._random_state, self._n_batches, len(calls), len(positions))
        keys = np.random.default_rng(seed).random(len(positions))
        is_small = keys <= self._max_keys[name]
        positions = positions[is_small]
        sequence = positions // math.prod(shape[1:])
        flat = rows.reshape(-1, rows.shape[-1])[torch.from_numpy(positions).to(rows.device)]
        labels: Columns = {}
        for label, column in self.labels.items():
            of_rows: Any = label_rows(label, column, shape, positions, sequence)
            labels[label] = np.ma.filled(of_rows, MISSING_LABEL)
        values = flat.float().cpu().numpy()[:, None]
        sequence += self._n_sequences
        calls.append({_KEY: keys[is_small], _ROWS: values, _SEQUENCE: sequence, **labels})
        self._size = max(self._size, shape[0])

    def end_batch(self) -> None:
        """Add the rows of both phases of a batch to the samples."""
        for name in self._modules:
            before, after = (_joined(phase[name]) for phase in self._phases)
            keys, other_keys = (columns.get(_KEY, np.zeros(0)) for columns in (before, after))
            if not np.array_equal(keys, other_keys):
                raise SiteError(
                    f"the site {name!r} runs on other rows with the erasers than without them; "
                    "pass forward= with a fixed number of calls, or choose another site by at="
                )
            if not len(keys):
                continue
            before[_ROWS] = np.concatenate([before[_ROWS], after[_ROWS]], axis=1)
            self._samples[name].append(before)
            if sum(len(columns[_KEY]) for columns in self._samples[name]) > 2 * self._max_rows:
                sample = self._smallest(name)
                self._samples[name], self._max_keys[name] = [sample], sample[_KEY].max()
        self._phases = []
        self._n_batches += 1
        self._n_sequences += self._size

    def _smallest(self, name: str) -> Columns:
        joined = _joined(self._samples[name])
        index = np.sort(np.argsort(joined[_KEY], kind="stable")[: self._max_rows])
        return {key: column[index] for key, column in joined.items()}

    def result(self, name: str) -> Columns:
        """Return the sample of a site: rows (n, 2, d) in float32, and labels."""
        if not self._samples[name]:
            raise NeverCalledError(
                f"the site {name!r} never ran on selected tokens; choose the module that contains "
                "it, or other tokens"
            )
        return self._smallest(name)


def _joined(parts: list[Columns]) -> Columns:
    return {k: np.concatenate([part[k] for part in parts]) for k in (parts[0] if parts else ())}
