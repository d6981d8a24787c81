"""The effect of erasers on a live model: loss, probes and states, before and after."""

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

from splince_fast._runtime.extras import require
from splince_fast._runtime.files import write_text
from splince_fast._runtime.progress import Progress
from splince_fast._solve.options import is_integer
from splince_fast.evaluation._tables import Table, number
from splince_fast.evaluation.probes import leakage
from splince_fast.exceptions import InputError, LabelError, NonFiniteError, WholeNumbersWarning
from splince_fast.labels import ClassCodes, VariableName
from splince_fast.moments.parameters import Parameters, check_random_state
from splince_fast.nn import sites
from splince_fast.nn.accumulate import RowLabels
from splince_fast.nn.collection import moved, quiet, unwrapped
from splince_fast.nn.collector import Collector, Labels, label_keys
from splince_fast.nn.erasers import Erasers
from splince_fast.nn.installed import install
from splince_fast.nn.recipe import Placement
from splince_fast.nn.tokens import Tokens

Tensor = Any
Module = Any
Floats = NDArray[np.float32]

# The states of a model without erasers and with them.
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
        R2 for a continuous variable.
    chance : float
        Fraction of the most frequent class; 0 for R2.
    before, after : float
        The metric on held-out folds without the erasers and with them; NaN where `reason` says
        why there is none.
    reason : str
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
    """The states at one site.

    Attributes
    ----------
    site : str
    n_rows : int
        Rows that were compared and probed.
    change : float
        sum |after - before|^2 / sum |before - mean|^2 over these rows.
    probes : tuple of ProbeEffect
    """

    site: str
    n_rows: int
    change: float
    probes: tuple[ProbeEffect, ...]


@dataclass(frozen=True)
class Effect:
    """Loss, probes and states without erasers and with them; made by :func:`effect`.

    Attributes
    ----------
    sites : tuple of SiteEffect
        In the order in which they ran.
    loss : tuple of (float, float), or None
        Before and after.
    n_sequences : int

    Examples
    --------
    >>> import torch
    >>> import splince_fast as sf
    >>> from splince_fast import nn as snn
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh())
    >>> z = torch.arange(60) % 2
    >>> train, test = ([{"input": torch.randn(60, 3) + 2 * z[:, None], "z": z}] for _ in range(2))
    >>> erasers = snn.fit_layers(model, train, "1", sf.leace, erase="z")
    >>> found = snn.effect(model, erasers, test)
    >>> [(s.site, s.n_rows, s.probes[0].metric) for s in found.sites]
    [('1', 60, 'accuracy')]
    """

    sites: tuple[SiteEffect, ...]
    loss: tuple[float, float] | None
    n_sequences: int

    def rows(self) -> Iterator[dict[str, Any]]:
        """The table in long form.

        Yields
        ------
        dict
            Site, variable, role, metric, chance, before and after, one per figure. Rows whose
            metric is "change" have no variable, and the row of the loss has no site.
        """
        empty: dict[str, Any] = dict.fromkeys(("site", "variable", "role", "chance", "before"))
        if self.loss is not None:
            yield {**empty, "metric": "loss", "before": self.loss[0], "after": self.loss[1]}
        for one in self.sites:
            yield {**empty, "site": one.site, "metric": "change", "after": one.change}
            for probe in one.probes:
                yield {"site": one.site, **{k: v for k, v in asdict(probe).items()
                                            if k != "reason"}}  # fmt: skip

    def to_frame(self, backend: str = "pandas") -> Any:
        """The table in long form as a frame.

        Parameters
        ----------
        backend : {"pandas", "polars", "pyarrow"}
            Whose frame.

        Returns
        -------
        frame
            Columns site, variable, role, metric, chance, before, after.

        Raises
        ------
        InputError
            An unknown backend.
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
        made: Any = narwhals.from_dict
        columns = {name: [row[name] for row in rows] for name in schema}
        return made(columns, schema, backend=backend).to_native()

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Everything as JSON; NaN is null.

        Parameters
        ----------
        path : path, optional
            Where to write it, too.

        Returns
        -------
        str
            An object with loss, n_sequences and sites.
        """
        text = json.dumps(_plain(asdict(self)), indent=1, allow_nan=False)
        if path is not None:
            write_text(path, text)
        return text

    def plot(self) -> Any:
        """Draw probes and relative change over the sites.

        Returns
        -------
        matplotlib.figure.Figure
            Dashed lines are before, solid ones after; ``.savefig(path)`` writes it.

        Raises
        ------
        MissingExtraError
            matplotlib is not installed.
        """
        figure = require("matplotlib.figure", "demo").Figure(figsize=(7.5, 6), layout="constrained")
        above, below = figure.subplots(2, sharex=True)
        places = range(len(self.sites))
        for i, probe in enumerate(self.sites[0].probes):
            own = [site.probes[i] for site in self.sites]
            style = {"color": _COLOURS[probe.role], "marker": "os^v"[i % 4]}
            label = f"{probe.variable}, {probe.role}"
            above.plot(places, [p.before for p in own], linestyle="--", alpha=0.6, **style)
            above.plot(places, [p.after for p in own], label=label, **style)
        metrics = dict.fromkeys(probe.metric for probe in self.sites[0].probes)
        above.set_ylabel(f"probe, {' or '.join(metrics)}")
        above.legend(frameon=False)
        below.bar(places, [site.change for site in self.sites], color="0.6")
        below.set_ylabel("relative change of the states")
        below.set_xticks(places, [s.site for s in self.sites], rotation=90, fontsize=7)
        return figure

    def _table(self) -> Table:
        heads = [f"{p.variable} ({p.role}, {p.metric})" for p in self.sites[0].probes]
        rows = tuple(
            (
                one.site, f"{one.n_rows:,}", f"{one.change:.2g}",
                *(f"{number(p.before)} to {number(p.after)}" for p in one.probes),
            )
            for one in self.sites
        )  # fmt: skip
        title = f"effect of erasers on {self.n_sequences:,} sequences"
        if self.loss is not None:
            title += f"; loss {self.loss[0]:.4g} to {self.loss[1]:.4g}"
        reasons = dict.fromkeys(
            f"{p.variable}: {p.reason}" for one in self.sites for p in one.probes if p.reason
        )
        chances = dict.fromkeys(
            f"chance is {number(p.chance)} for {p.variable}"
            for p in self.sites[0].probes
            if p.metric == "accuracy" and not p.reason
        )
        return Table(title, ("site", "rows", "change", *heads), rows, (*chances, *reasons))

    def __str__(self) -> str:
        return str(self._table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()


def _plain(value: Any) -> Any:
    """A value with None in the place of NaN, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value


# -- rows ----------------------------------------------------------------------------------


class _Sample:
    """A random sample of the rows of one site, with labels, in float32 on the host.

    The key of a row depends on its batch and position alone, so every site samples the same rows,
    before and after.
    """

    def __init__(self, width: int, limit: int, random_state: int) -> None:
        self.width, self._limit, self._random_state = width, limit, random_state
        self._largest = math.inf
        self._parts: list[dict[Any, NDArray[Any]]] = []
        self._n = 0

    def feed(self, rows: Tensor, labels: RowLabels) -> None:
        """Add rows (n, d); those with the smallest keys stay."""
        seed = (self._random_state, labels.batch // 2, labels.n)
        keys = np.random.default_rng(seed).random(labels.n)
        kept = np.flatnonzero(keys <= self._largest)
        if not len(kept):
            return
        values = rows[torch.from_numpy(kept).to(rows.device)].float().cpu().numpy()
        own = {name: _column(column)[kept] for name, column in labels.encoded.items()}
        batch = np.full(len(kept), labels.batch // 2)
        self._parts.append(
            {
                _KEYS: keys[kept], _ROWS: values,
                _SEQUENCE: np.stack([batch, labels.sequence[kept]], axis=1), **own,
            }
        )  # fmt: skip
        self._n += len(kept)
        if self._n > 2 * self._limit:
            self._parts = [self.columns()]
            self._n = self._limit
            self._largest = float(self._parts[0][_KEYS].max())

    def columns(self) -> dict[Any, NDArray[Any]]:
        """Rows, sequences and labels of the sample, in the order of the rows."""
        joined = {k: np.concatenate([p[k] for p in self._parts]) for k in self._parts[0]}
        if self._n <= self._limit:
            return joined
        chosen = np.sort(np.argsort(joined[_KEYS], kind="stable")[: self._limit])
        return {name: column[chosen] for name, column in joined.items()}


# Columns of a sample that are no labels.
_KEYS, _ROWS, _SEQUENCE = object(), object(), object()


def _column(column: Any) -> NDArray[Any]:
    """Labels of rows: texts for classes, or numbers; None or NaN where missing."""
    if isinstance(column, ClassCodes):
        names = np.empty(len(column.classes) + 1, object)
        names[:-1] = list(map(repr, column.classes))
        return names[column.codes]
    values: NDArray[Any] = column.values
    if column.present is not None:
        values = np.where(column.present[:, None], values, np.nan)
    return values[:, 0] if values.shape[1] == 1 else values


class _Recorder(Collector):
    """A collector that samples rows in the place of summing them; `phase` is before or after."""

    phase = _BEFORE

    def __init__(self, *args: Any, limit: int, random_state: int) -> None:
        super().__init__(*args)
        self._limit, self._random_state = limit, random_state
        self.samples: tuple[dict[str, _Sample], dict[str, _Sample]] = ({}, {})

    def _sums_of(self, name: str, rows: Tensor) -> Any:
        width = int(rows.shape[1])
        found = self.samples[self.phase].setdefault(
            name, _Sample(width, self._limit, self._random_state)
        )
        if width != found.width:
            sites.check_width(name, rows, -1, found.width)
        return found


# -- measuring -----------------------------------------------------------------------------


def effect(
    model: Any,
    erasers: Any,
    texts: Iterable[Any],
    *,
    erase: str | None = None,
    keep: str | Iterable[str] | None = None,
    labels: Labels | None = None,
    groups: str | None = None,
    kinds: Mapping[str, str] | None = None,
    at: Any = None,
    tokens: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
    max_rows: int = 2000,
    random_state: int = 0,
    progress: bool | None = None,
) -> Effect:
    """Measure a model on held-out data without erasers and with them, in one pass over the data.

    Every batch runs twice. At each site, linear probes of the erased and of the kept variables are
    trained and scored by five folds within these rows, and the states before and after are compared
    row by row.

    Parameters
    ----------
    model : torch.nn.Module
        As for :func:`collect`; erasers that are installed already count as part of it.
    erasers : Erasers, path, or mapping of str to Projection
        As for :func:`install`; they are not installed afterwards.
    texts : iterable
        Batches as for :func:`collect`, of data that the erasers were not fitted on.
    erase, keep : str, optional
        Variables to probe, `keep` also several; by default those of the erasers' reports.
    labels : str, list of str, or function, optional
        As for :func:`collect`; by default `erase`, `keep` and `groups`.
    groups : str, optional
        A label whose classes stay in one fold each, such as the noun of a prompt that occurs in
        several templates: a probe that has seen the noun knows its label. By default every
        sequence is a group.
    kinds : mapping of str to {"classes", "continuous"}, optional
        How labels are read, as for :class:`splince_fast.Moments`.
    at : str, Module, or a list of them, optional
        Sites to look at; by default those of the erasers.
    tokens : {"body", "all", "first", "last"} or function, optional
        Tokens that are erased and looked at; by default those that the erasers are for.
    loss : function, optional
        ``loss(output, batch)`` returns the mean loss of a batch, which is averaged over sequences.
        By default it is the cross-entropy of the next token, in nats per attended token, of models
        that generate text from ``input_ids``; others have none.
    forward : function, optional
        ``forward(model, batch)`` runs the model and returns its output.
    max_rows : int
        Rows per site that are kept, chosen at random: 8 max_rows d bytes a site.
    random_state : int
        Of the choice of rows and of the folds.
    progress : bool, optional
        Show a progress bar on stderr; by default only in a terminal or notebook, after two
        seconds.

    Returns
    -------
    Effect
        A table, with `plot`, `to_frame` and `to_json`.

    Raises
    ------
    InputError
        No variable is named by `erase` or by a report, or `texts` is empty.
    SiteError, LabelError, NeverCalledError
        As :func:`collect` and :func:`install`.
    NonFiniteError
        States are NaN or infinite, before or after.

    Examples
    --------
    >>> import torch
    >>> import splince_fast as sf
    >>> from splince_fast import nn as snn
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh())
    >>> z = torch.arange(80) % 2
    >>> train, test = ([{"input": torch.randn(80, 3) + 2 * z[:, None], "z": z}] for _ in range(2))
    >>> erasers = snn.fit_layers(model, train, ["0", "1"], sf.leace, erase="z")
    >>> found = snn.effect(model, erasers, test)
    >>> all(site.probes[0].after < site.probes[0].before for site in found.sites)
    True
    """
    inner = unwrapped(model)
    if isinstance(erasers, str | os.PathLike):
        erasers = Erasers.load(erasers)
    if not isinstance(erasers, Mapping):
        raise InputError(
            f"erasers is {type(erasers).__name__}; pass Erasers, the path of their file, or a "
            "mapping of names to projections"
        )
    if not is_integer(max_rows) or max_rows < 2:
        raise InputError(f"max_rows is {max_rows!r}; it must be an integer of at least 2")
    roles = _roles(erasers, erase, keep)
    placement, rule = Placement(), tokens
    skip_ids: tuple[int, ...] = ()
    if isinstance(erasers, Erasers):
        placement, skip_ids = erasers.placement, erasers.skip_ids
        rule = erasers.apply_to if tokens is None else tokens
    chosen = sites.find(inner, list(erasers) if at is None else at)
    names = [*roles, *([] if groups is None else [groups])]
    recorder = _Recorder(
        chosen, Tokens.of(rule, skip_ids), placement, names if labels is None else labels,
        "token", None, Parameters.of(None, kinds, (), False), limit=int(max_rows),
        random_state=check_random_state(random_state),
    )  # fmt: skip
    losses = _run(inner, erasers, texts, recorder, tokens, loss, forward, progress)
    before, after = recorder.samples
    first = next(iter(before.values()), None)
    missing = [] if first is None else [one for one in names if one not in first.columns()]
    if missing:
        raise LabelError(f"the labels of texts have no {missing}; labels= must give them all")
    found = tuple(
        _site(name, before[name].columns(), after[name].columns(), roles, groups, int(random_state))
        for name in before
    )
    if not found:
        raise InputError("texts gave no rows at any site; pass batches with selected tokens")
    return Effect(found, losses, recorder.n_sequences // 2)


def _roles(erasers: Mapping[str, Any], erase: Any, keep: Any) -> dict[str, str]:
    """Variables to probe, with "erased" or "kept"."""
    reports = [p.report for p in erasers.values() if getattr(p, "report", None) is not None]
    of: dict[str, list[VariableName]] = {"erased": [], "kept": []}
    for report in reports:
        for variable in report.variables:
            of[variable.role].append(variable.name)
    given = {"erased": erase, "kept": keep}
    roles: dict[str, str] = {}
    for role, names in given.items():
        known = of[role] if names is None else [names] if isinstance(names, str) else list(names)
        roles |= {name: role for name in known if isinstance(name, str) and name not in roles}
    if "erased" not in roles.values():
        raise InputError(
            "the erasers' reports name no variable that was erased; say by erase= which label of "
            "the texts is to be probed"
        )
    return roles


def _run(
    model: Module,
    erasers: Mapping[str, Any],
    texts: Iterable[Any],
    recorder: _Recorder,
    tokens: Any,
    loss: Any,
    forward: Any,
    progress: bool | None,
) -> tuple[float, float] | None:
    """Run every batch without the erasers and with them; returns both losses."""
    device, keys = sites.device_of(model), label_keys(recorder.labels)
    totals, weights = np.zeros(2), np.zeros(2)
    installed = install(model, erasers, tokens=tokens)
    handles = []
    try:
        handles = recorder.attach(model)  # behind the erasers
        with quiet(model), Progress(unit="sequences", show=progress) as bar:
            for batch in texts:
                seen = recorder.n_sequences
                ready = moved(batch, device)
                for phase in (_BEFORE, _AFTER):
                    recorder.phase = phase
                    off = installed.disabled() if phase == _BEFORE else nullcontext()
                    with off, recorder.one_batch(batch):
                        output = sites.call(model, ready, keys, forward)
                    if loss is None:
                        total, weight = _next_token_loss(model, ready, output)
                    else:
                        weight = float(max(1, (recorder.n_sequences - seen) // (phase + 1)))
                        total = weight * float(loss(output, ready))
                    totals[phase] += total
                    weights[phase] += weight
                bar.advance((recorder.n_sequences - seen) // 2, 0)
            installed.check()
    finally:
        for handle in handles:
            handle.remove()
        installed.remove()
    if not recorder.batch:
        raise InputError(
            "texts gave nothing; a generator that was used up gives nothing the second time"
        )
    if not weights.all():
        return None
    before, after = (totals / weights).tolist()
    return before, after


def _next_token_loss(model: Module, batch: Any, output: Any) -> tuple[float, float]:
    """Summed cross-entropy of the next tokens, and their number; 0 for other models."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    logits = getattr(output, "logits", None)
    generates = getattr(model, "can_generate", lambda: False)()
    if (
        ids is None
        or not generates
        or getattr(model.config, "is_encoder_decoder", False)
        or not isinstance(logits, torch.Tensor)
        or logits.shape[:-1] != ids.shape
    ):
        return 0.0, 0.0
    mask = batch.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    shown = (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    wide = logits[:, :-1][shown.to(logits.device)].float()
    targets = ids[:, 1:][shown].to(logits.device)
    total = torch.nn.functional.cross_entropy(wide, targets, reduction="sum")
    return float(total), float(len(targets))


def _site(
    name: str,
    before: Mapping[Any, NDArray[Any]],
    after: Mapping[Any, NDArray[Any]],
    roles: Mapping[str, str],
    groups: str | None,
    random_state: int,
) -> SiteEffect:
    """Compare and probe the rows of one site."""
    rows = [part[_ROWS].astype(np.float64) for part in (before, after)]
    for values, when in zip(rows, ("without", "with"), strict=True):
        if not np.isfinite(values).all():
            raise NonFiniteError(
                f"the states at the site {name!r} hold NaN or infinity {when} the erasers; run "
                "the model in bfloat16 or float32 if it is in float16"
            )
    centred = rows[0] - rows[0].mean(axis=0)
    size = float(np.sum(centred**2))
    change = float(np.sum((rows[1] - rows[0]) ** 2)) / size if size else math.nan
    of = before[_SEQUENCE] if groups is None else before[groups].astype(str)
    _, member = np.unique(of, axis=0, return_inverse=True)
    probes = []
    for variable, role in roles.items():
        with warnings.catch_warnings():  # the kind was decided when the batches were read
            warnings.simplefilter("ignore", WholeNumbersWarning)
            found = [
                leakage(values, before[variable], probes=("linear",), groups=member.reshape(-1),
                        random_state=random_state)
                for values in rows
            ]  # fmt: skip
        metric = "accuracy" if found[0].n_classes else "R2"
        first, second = (
            math.nan if one.reason else getattr(one["linear"], metric.lower()) for one in found
        )
        chance = math.nan if found[0].reason else found[0]["linear"].chance
        probes.append(ProbeEffect(variable, role, metric, chance, first, second, found[0].reason))
    return SiteEffect(name, len(rows[0]), change, tuple(probes))
