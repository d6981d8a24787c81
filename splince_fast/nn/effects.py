"""Effect of erasers on a model: loss, probes and activations without and with erasers."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module

from splince_fast._runtime.extras import require
from splince_fast._runtime.files import write_text
from splince_fast._runtime.keywords import as_names
from splince_fast._runtime.progress import Progress
from splince_fast._solve.options import is_integer
from splince_fast.evaluation._tables import Table, number
from splince_fast.evaluation.probes import leakage
from splince_fast.exceptions import (
    InputError,
    LabelError,
    NeverCalledError,
    NonFiniteError,
    WholeNumbersWarning,
)
from splince_fast.labels import ClassCodes, Encoded, VariableName
from splince_fast.labels.names import listed
from splince_fast.moments.parameters import Parameters, check_random_state
from splince_fast.nn import running, sites
from splince_fast.nn.accumulate import RowLabels
from splince_fast.nn.collection import Collector, Labels, label_keys
from splince_fast.nn.erasers import read_erasers
from splince_fast.nn.installed import install
from splince_fast.nn.tokens import TokenRule

# Phases of a batch: the index 0 is the run without erasers, 1 the run with erasers.
_BEFORE, _AFTER = 0, 1
_COLOURS = {"erased": "#D55E00", "kept": "#0072B2"}


@dataclass(frozen=True)
class ProbeEffect:
    """A linear probe of one variable at one site.

    Attributes
    ----------
    variable : str
    role : {"erased", "kept"}
    metric : {"accuracy", "R2"}
        "accuracy" for classes, "R2" for a continuous variable.
    chance : float
        Chance level: fraction of the most frequent class; 0 for R2.
    before, after : float
        Metric on held-out folds without and with the erasers; NaN if `reason` is not empty.
    reason : str
        Reason why the metric cannot be computed; empty if it can be computed.
    """

    variable: str
    role: str
    metric: str
    chance: float
    before: float
    after: float
    reason: str


@dataclass(frozen=True)
class SiteEffect:
    """Effect of erasers on the activations at one site.

    Attributes
    ----------
    site : str
    n_rows : int
        Number of rows sampled without erasers.
    change : float
        sum |after - before|^2 / sum |before - mean|^2 over the rows sampled both without and with
        erasers, with the mean without erasers; NaN without such rows.
    probes : tuple of ProbeEffect
        One probe per variable.
    """

    site: str
    n_rows: int
    change: float
    probes: tuple[ProbeEffect, ...]


@dataclass(frozen=True)
class Effect:
    """Loss, probes and activations without and with erasers; made by :func:`effect`.

    Attributes
    ----------
    sites : tuple of SiteEffect
        Effects by site, in the order in which the sites ran.
    loss : tuple of (float, float), or None
        Mean loss without and with erasers; None for a model without a loss.
    n_sequences : int
        Number of sequences with selected tokens.

    Examples
    --------
    >>> import torch
    >>> import splince_fast as sf
    >>> from splince_fast import nn as snn
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh())
    >>> z = torch.arange(60) % 2
    >>> train, test = ([{"input": torch.randn(60, 3) + 2 * z[:, None], "z": z}] for _ in range(2))
    >>> erasers = snn.fit_layers(model, train, "1", sf.leace, erase="z")
    >>> result = snn.effect(model, erasers, test)
    >>> [(s.site, s.n_rows, s.probes[0].metric) for s in result.sites]
    [('1', 60, 'accuracy')]
    """

    sites: tuple[SiteEffect, ...]
    loss: tuple[float, float] | None
    n_sequences: int

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of the table in long form.

        Yields
        ------
        dict
            Site, variable, role, metric, chance, before and after. Rows with the metric "change"
            have no variable; the row with the metric "loss" has no site.
        """
        empty: dict[str, Any] = dict.fromkeys(("site", "variable", "role", "chance", "before"))
        if self.loss is not None:
            yield {**empty, "metric": "loss", "before": self.loss[0], "after": self.loss[1]}
        for site in self.sites:
            yield {**empty, "site": site.site, "metric": "change", "after": site.change}
            for probe in site.probes:
                row = {"site": site.site, **asdict(probe)}
                del row["reason"]
                yield row

    def to_frame(self, backend: str = "pandas") -> Any:
        """Convert the table in long form to a data frame.

        Parameters
        ----------
        backend : {"pandas", "polars", "pyarrow"}
            Library of the data frame.

        Returns
        -------
        frame
            A data frame with the columns site, variable, role, metric, chance, before, after.

        Raises
        ------
        InputError
            `backend` is unknown.
        MissingExtraError
            The library is not installed.
        """
        import narwhals

        if backend not in ("pandas", "polars", "pyarrow"):
            raise InputError(f"backend is {backend!r}; choose 'pandas', 'polars' or 'pyarrow'")
        require(backend, "evaluate")
        text, real = narwhals.String, narwhals.Float64
        schema = {"site": text, "variable": text, "role": text, "metric": text, "chance": real,
                  "before": real, "after": real}  # fmt: skip
        rows = list(self.rows())
        columns = {name: [row[name] for row in rows] for name in schema}
        from_dict: Any = narwhals.from_dict
        return from_dict(columns, schema, backend=backend).to_native()

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Convert to JSON; NaN and infinity become null.

        Parameters
        ----------
        path : path, optional
            File to which the text is also written.

        Returns
        -------
        str
            A JSON object with the keys loss, n_sequences and sites.
        """
        text = json.dumps(_plain(asdict(self)), indent=1, allow_nan=False)
        if path is not None:
            write_text(path, text)
        return text

    def plot(self) -> Any:
        """Plot the probe metrics and the relative change of the activations at all sites.

        Returns
        -------
        matplotlib.figure.Figure
            Figure with dashed lines for metrics without erasers, and solid lines with erasers.

        Raises
        ------
        MissingExtraError
            matplotlib is not installed.
        """
        figure = require("matplotlib.figure", "demo").Figure(figsize=(7.5, 6), layout="constrained")
        probe_ax, change_ax = figure.subplots(2, sharex=True)
        positions = range(len(self.sites))
        for i, probe in enumerate(self.sites[0].probes):
            probes = [site.probes[i] for site in self.sites]
            style = {"color": _COLOURS[probe.role], "marker": "os^v"[i % 4]}
            label = f"{probe.variable}, {probe.role}"
            probe_ax.plot(positions, [p.before for p in probes], linestyle="--", alpha=0.6, **style)
            probe_ax.plot(positions, [p.after for p in probes], label=label, **style)
        metrics = dict.fromkeys(probe.metric for probe in self.sites[0].probes)
        probe_ax.set_ylabel(f"probe, {' or '.join(metrics)}")
        probe_ax.legend(frameon=False)
        change_ax.bar(positions, [site.change for site in self.sites], color="0.6")
        change_ax.set_ylabel("relative change of the activations")
        change_ax.set_xticks(positions, [s.site for s in self.sites], rotation=90, fontsize=7)
        return figure

    def _table(self) -> Table:
        headings = [f"{p.variable} ({p.role}, {p.metric})" for p in self.sites[0].probes]
        rows = tuple(
            (
                site.site, f"{site.n_rows:,}", f"{site.change:.2g}",
                *(f"{number(p.before)} to {number(p.after)}" for p in site.probes),
            )
            for site in self.sites
        )  # fmt: skip
        title = f"effect of erasers on {self.n_sequences:,} sequences"
        if self.loss is not None:
            title += f"; loss {self.loss[0]:.4g} to {self.loss[1]:.4g}"
        reasons = dict.fromkeys(
            f"{p.variable}: {p.reason}" for site in self.sites for p in site.probes if p.reason
        )
        chances = dict.fromkeys(
            f"chance is {number(p.chance)} for {p.variable}"
            for p in self.sites[0].probes
            if p.metric == "accuracy" and not p.reason
        )
        return Table(title, ("site", "rows", "change", *headings), rows, (*chances, *reasons))

    def __str__(self) -> str:
        return str(self._table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()


def _plain(value: object) -> object:
    """Replace NaN and infinity, which JSON cannot represent, by None."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -- rows ----------------------------------------------------------------------------------


# Keys of three columns of a sample: random keys, rows and ids of the rows. Other columns hold
# labels. The id of a row has five entries: the indices of the batch and of the sequence, the index
# of the call of the site in the batch, the number of selected rows, and the position among them.
_RANDOM_KEY, _ROWS, _ID = object(), object(), object()


class _RowSample:
    """Random sample of the rows of one site, with labels; in float32 on the host.

    Each row has a random key, and the rows with the smallest keys are kept. The key depends only on
    `random_state`, the batch, the call in the batch, the number of selected rows and the position
    of the row. Therefore all sites with the same calls and selections sample the same rows, without
    and with erasers.
    """

    def __init__(self, width: int, max_rows: int, random_state: int) -> None:
        self.width, self._max_rows, self._random_state = width, max_rows, random_state
        self._max_key = math.inf
        self._batch, self._call = -1, 0
        self._chunks: list[dict[Any, NDArray[Any]]] = []
        self._n = 0

    def add(self, rows: Tensor, labels: RowLabels) -> None:
        """Add rows (n, d), and keep the rows with the smallest keys."""
        batch = labels.batch_index // 2
        self._batch, self._call = batch, self._call + 1 if batch == self._batch else 0
        seed = (self._random_state, batch, self._call, labels.n)
        keys = np.random.default_rng(seed).random(labels.n)
        index = np.flatnonzero(keys <= self._max_key)
        if not len(index):
            return
        values = rows[torch.from_numpy(index).to(rows.device)].float().cpu().numpy()
        columns = {name: _label_column(column)[index] for name, column in labels.encoded.items()}
        row_id = np.empty((len(index), 5), np.int64)
        row_id[:] = batch, 0, self._call, labels.n, 0
        row_id[:, 1], row_id[:, 4] = labels.sequence_index[index], index
        self._chunks.append({_RANDOM_KEY: keys[index], _ROWS: values, _ID: row_id, **columns})
        self._n += len(index)
        if self._n > 2 * self._max_rows:
            self._chunks = [self.columns()]
            self._n = self._max_rows
            self._max_key = float(self._chunks[0][_RANDOM_KEY].max())

    def columns(self) -> dict[Any, NDArray[Any]]:
        """Return the columns of the sample: random keys, rows, ids and labels.

        Rows are in the order of the data.
        """
        joined = {k: np.concatenate([chunk[k] for chunk in self._chunks]) for k in self._chunks[0]}
        if self._n <= self._max_rows:
            return joined
        index = np.sort(np.argsort(joined[_RANDOM_KEY], kind="stable")[: self._max_rows])
        return {name: column[index] for name, column in joined.items()}


def _label_column(column: Encoded) -> NDArray[np.generic]:
    """Return the labels of rows: class names (None if missing) or numbers (NaN if missing)."""
    if isinstance(column, ClassCodes):
        names = np.empty(len(column.classes) + 1, object)
        names[:-1] = list(map(repr, column.classes))
        return names[column.codes]
    values: NDArray[np.generic] = column.values
    if column.present is not None:
        values = np.where(column.present[:, None], values, np.nan)
    return values[:, 0] if values.shape[1] == 1 else values


@dataclass(eq=False)
class _SampleCollector(Collector):
    """Collector that samples rows; `phase` says whether the erasers are disabled or active."""

    max_rows: int = 2000
    random_state: int = 0
    phase: int = _BEFORE

    def __post_init__(self) -> None:
        super().__post_init__()
        self.samples: tuple[dict[str, _RowSample], dict[str, _RowSample]] = ({}, {})

    def _sums_of(self, name: str, rows: Tensor) -> Any:
        width = int(rows.shape[1])
        sample = self.samples[self.phase].setdefault(
            name, _RowSample(width, self.max_rows, self.random_state)
        )
        if width != sample.width:
            sites.check_width(name, rows, -1, sample.width)
        return sample


# -- measurement ---------------------------------------------------------------------------


def effect(
    model: object,
    erasers: object,
    texts: Iterable[object],
    *,
    erase: str | None = None,
    keep: str | Iterable[str] | None = None,
    labels: Labels | None = None,
    groups: str | None = None,
    kinds: Mapping[str, str] | None = None,
    at: object = None,
    tokens: object = None,
    loss: Callable[[Any, Any], Any] | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
    max_rows: int = 2000,
    random_state: int = 0,
    progress: bool | None = None,
) -> Effect:
    """Measure a model on held-out data without and with erasers, in one pass over the data.

    Each batch runs twice. At each site, linear probes of the erased and of the kept variables are
    evaluated by five-fold cross-validation on sampled rows of these data, and the activations
    without and with erasers are compared row by row. If a site runs more often without than with
    erasers, or on other tokens, each run has its own rows and labels, and the comparison is
    restricted to the rows of both runs.

    Parameters
    ----------
    model : torch.nn.Module
        As for :func:`collect`; erasers that are already installed stay active.
    erasers : Erasers, path, or mapping of str to Projection
        As for :func:`install`; removed at the end.
    texts : iterable
        Batches of held-out data, as for :func:`collect`.
    erase, keep : str, optional
        Variables to probe; `keep` may name several. By default the variables in the reports of the
        erasers.
    labels : str, list of str, or function, optional
        As for :func:`collect`; by default `erase`, `keep` and `groups`.
    groups : str, optional
        Label whose classes are not split between folds, for example the noun that fills a prompt
        template: if the noun determines the probed variable, a probe could learn the nouns instead.
        By default each sequence is a group.
    kinds : mapping of str to {"classes", "continuous"}, optional
        Kinds of labels, as for :class:`splince_fast.Moments`.
    at : str, Module, or a list of them, optional
        Sites to measure; by default the sites of the erasers.
    tokens : {"body", "all", "first", "last"} or function, optional
        Tokens to erase and measure; by default as for :func:`install`.
    loss : function, optional
        ``loss(output, batch)`` returns the mean loss of a batch, which is averaged over sequences;
        the tensors of `batch`, labels included, are on the model's device. By default the
        cross-entropy of the next token, in nats per attended token, for models that generate text
        from ``input_ids``; other models have no loss.
    forward : function, optional
        ``forward(model, batch)`` runs the model and returns its output.
    max_rows : int
        Number of sampled rows per site; the samples take up to 16 max_rows d bytes during the pass.
    random_state : int
        Seed of the sample and of the folds.
    progress : bool, optional
        Show a progress bar on stderr; by default only in a terminal or notebook, after two
        seconds.

    Returns
    -------
    Effect
        Table of loss, probes and changes, with methods `plot`, `to_frame` and `to_json`.

    Raises
    ------
    InputError
        Neither `erase` nor a report names a variable to probe, or `texts` is empty.
    SiteError, LabelError, NeverCalledError
        As for :func:`collect` and :func:`install`.
    NonFiniteError
        Activations are NaN or infinite, without or with erasers.

    Examples
    --------
    >>> import torch
    >>> import splince_fast as sf
    >>> from splince_fast import nn as snn
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh())
    >>> z = torch.arange(80) % 2
    >>> train, test = ([{"input": torch.randn(80, 3) + 2 * z[:, None], "z": z}] for _ in range(2))
    >>> erasers = snn.fit_layers(model, train, ["0", "1"], sf.leace, erase="z")
    >>> result = snn.effect(model, erasers, test)
    >>> all(site.probes[0].after < site.probes[0].before for site in result.sites)
    True
    """
    inner = running.unwrap(model)
    by_site, spec = read_erasers(erasers)
    if not is_integer(max_rows) or max_rows < 2:
        raise InputError(f"max_rows is {max_rows!r}; it must be an integer of at least 2")
    running.check_inputs(texts, forward, "texts")
    if loss is not None and not callable(loss):
        raise InputError(f"loss is {loss!r}; it must be a function of output and batch")
    roles = _roles(by_site, erase, keep)
    rule = spec.applied if tokens is None else tokens
    label_names = [*roles, *([] if groups is None else [groups])]
    modules = sites.find(inner, list(by_site) if at is None else at)
    collector = _SampleCollector(
        modules=modules,
        token_rule=TokenRule.of(rule, spec.skip_ids),
        placement=spec.placement,
        labels=label_names if labels is None else labels,
        by_sequence=False,
        device=None,
        parameters=Parameters.of(None, kinds, (), False),
        max_rows=int(max_rows),
        random_state=check_random_state(random_state),
    )
    losses = _run_batches(inner, by_site, texts, collector, tokens, loss, forward, progress)
    before, after = collector.samples
    first_sample = next(iter(before.values()), None)
    if first_sample is None:
        raise InputError(
            "no token of texts was selected at any site; pass batches with selected tokens"
        )
    one_sided = sorted(before.keys() ^ after.keys())
    if one_sided:
        raise NeverCalledError(
            f"the sites {listed(one_sided)} ran either only without or only with the erasers, on "
            "selected tokens: the path through the model depends on activations. Choose the "
            "modules that contain these sites"
        )
    missing = [name for name in label_names if name not in first_sample.columns()]
    if missing:
        raise LabelError(
            f"texts have no labels {listed(missing)}; labels= must include the variables to "
            "probe, and `groups`"
        )
    effects = tuple(
        _site_effect(
            name, sample.columns(), after[name].columns(), roles, groups, collector.random_state
        )
        for name, sample in before.items()
    )
    return Effect(effects, losses, collector.n_sequences // 2)


def _roles(erasers: Mapping[str, Any], erase: Any, keep: Any) -> dict[str, str]:
    """Return the roles, "erased" or "kept", of the variables to probe."""
    reported: dict[str, list[VariableName]] = {"erased": [], "kept": []}
    for projection in erasers.values():
        report = getattr(projection, "report", None)
        for variable in () if report is None else report.variables:
            reported[variable.role].append(variable.name)
    roles: dict[str, str] = {}
    for role, argument, names in (("erased", "erase", erase), ("kept", "keep", keep)):
        variables = reported[role] if names is None else as_names(names, argument)
        roles |= {name: role for name in variables if isinstance(name, str) and name not in roles}
    if "erased" not in roles.values():
        raise InputError(
            "the erasers' reports name no variable that was erased; pass erase=, the label of "
            "the texts to probe"
        )
    return roles


def _run_batches(
    model: Module,
    erasers: Mapping[str, object],
    texts: Iterable[object],
    collector: _SampleCollector,
    tokens: object,
    loss: Callable[[Any, Any], Any] | None,
    forward: Callable[[Any, Any], Any] | None,
    progress: bool | None,
) -> tuple[float, float] | None:
    """Run each batch without and with erasers, and return the mean loss of each run.

    Returns None if the model has no loss.
    """
    device, keys = running.device_of(model), label_keys(collector.labels)
    totals, weights = np.zeros(2), np.zeros(2)
    with (
        install(model, erasers, tokens=tokens) as installed,
        # The hooks of the collector follow those of the erasers, to receive erased activations.
        collector.attached(model),
        running.evaluating(model),
        Progress(unit="sequences", show=progress) as bar,
    ):
        for batch in texts:
            n_before = collector.n_sequences
            inputs = running.batch_to(batch, device)
            for phase in (_BEFORE, _AFTER):
                collector.phase = phase
                disabled = installed.disabled() if phase == _BEFORE else nullcontext()
                with disabled, collector.batch_scope(batch):
                    output = running.call(model, inputs, keys, forward)
                if loss is None:
                    total, weight = _next_token_loss(model, inputs, output)
                else:
                    weight = float(max(1, (collector.n_sequences - n_before) // (phase + 1)))
                    total = weight * float(loss(output, inputs))
                totals[phase] += total
                weights[phase] += weight
            bar.advance((collector.n_sequences - n_before) // 2)
    if not collector.n_batches:
        raise InputError("texts is empty; a generator is empty when it is read a second time")
    collector.check_called()
    if not weights.all():
        return None
    before, after = (totals / weights).tolist()
    return before, after


def _next_token_loss(model: Module, batch: Any, output: Any) -> tuple[float, float]:
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
        return 0.0, 0.0
    mask = batch.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    attended = (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    predictions = logits[:, :-1][attended.to(logits.device)].float()
    targets = ids[:, 1:][attended].to(logits.device)
    total = torch.nn.functional.cross_entropy(predictions, targets, reduction="sum")
    return float(total), float(len(targets))


def _site_effect(
    name: str,
    before: Mapping[Any, NDArray[Any]],
    after: Mapping[Any, NDArray[Any]],
    roles: Mapping[str, str],
    groups: str | None,
    random_state: int,
) -> SiteEffect:
    """Compare the sampled rows of one site without and with erasers, and probe both samples."""
    samples = (before, after)
    rows = [columns[_ROWS].astype(np.float64) for columns in samples]
    for values, condition in zip(rows, ("without", "with"), strict=True):
        if not np.isfinite(values).all():
            raise NonFiniteError(
                f"the activations at the site {name!r} hold NaN or infinity {condition} the "
                "erasers; run the model in bfloat16 or float32 if it is in float16"
            )
    common, other = (
        values[index]
        for values, index in zip(rows, _common_rows(before[_ID], after[_ID]), strict=True)
    )
    total = float(np.sum((common - common.mean(axis=0)) ** 2)) if len(common) else 0.0
    change = float(np.sum((other - common) ** 2)) / total if total else math.nan
    group_labels = [
        columns[_ID][:, :2] if groups is None else columns[groups].astype(str)
        for columns in samples
    ]
    group_index = [
        np.unique(labels, axis=0, return_inverse=True)[1].reshape(-1) for labels in group_labels
    ]
    probes = []
    for variable, role in roles.items():
        # The labels were encoded when the batches were read, with this warning where it applied.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WholeNumbersWarning)
            results = [
                leakage(values, columns[variable], probes=("linear",), groups=index,
                        random_state=random_state)
                for values, columns, index in zip(rows, samples, group_index, strict=True)
            ]  # fmt: skip
        metric = "accuracy" if results[0].n_classes else "R2"
        reason = results[0].reason or results[1].reason
        value_before, value_after = (
            math.nan if result.reason else getattr(result["linear"], metric.lower())
            for result in results
        )
        chance = math.nan if results[0].reason else results[0]["linear"].chance
        probes.append(
            ProbeEffect(variable, role, metric, chance, value_before, value_after, reason)
        )
    return SiteEffect(name, len(rows[0]), change, tuple(probes))


def _common_rows(
    first: NDArray[np.int64], second: NDArray[np.int64]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the indices, in two arrays of row ids, of the ids that occur in both."""
    codes = np.unique(np.concatenate([first, second]), axis=0, return_inverse=True)[1].reshape(-1)
    n = len(first)
    _, *indices = np.intersect1d(codes[:n], codes[n:], assume_unique=True, return_indices=True)
    return indices[0], indices[1]
