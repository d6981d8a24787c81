"""Projections of several sites: fits, files and tables."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from scipy.linalg import block_diag

from splince_fast._runtime import files
from splince_fast._runtime.arguments import check_keywords, described_type, warn
from splince_fast.exceptions import (
    InputError,
    NothingErasedWarning,
    OtherTokensWarning,
    SplinceError,
)
from splince_fast.methods.table import Function, method_of
from splince_fast.moments import Moments
from splince_fast.nn.eraser import check_projection
from splince_fast.nn.sites import BySite, CollectionSpec, format_table
from splince_fast.projection import Projection, from_record, to_record


class Erasers(BySite):
    """Projections by site; a mapping from names to :class:`Projection`.

    Made by :func:`fit_layers` or :meth:`Collected.erasers`, and installed by :func:`install`.

    Parameters
    ----------
    values : mapping of str to Projection
        Projections by site, in the order in which the sites run.
    sites : iterable of Site
        Names, classes and widths of the modules, in the same order.
    recipe : CollectionSpec
        The specification of the collection.
    **extra
        ``sequential``, whether each projection was fitted with all earlier projections installed,
        so that all are exact when installed together.

    Examples
    --------
    >>> import torch
    >>> import splince_fast as sf
    >>> from splince_fast import nn as snn
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh())
    >>> z = torch.arange(60) % 2
    >>> batches = [{"input": torch.randn(60, 3) + z[:, None], "z": z}]
    >>> erasers = snn.fit_layers(model, batches, ["0", "1"], sf.leace, erase="z", labels="z")
    >>> list(erasers), erasers.sequential
    (['0', '1'], True)
    """

    _KIND = "erasers"
    _CONVERTERS = (to_record, from_record)
    _EXTRA_ATTRIBUTES = {"sequential": bool}  # noqa: RUF012
    sequential: bool

    @property
    def apply_to(self) -> Any:
        """The rule for the tokens that :func:`install` changes."""
        return self._recipe.applied

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file.

        Parameters
        ----------
        path : path
            The file, which is replaced atomically; its suffix is ``.safetensors`` or empty.
        """
        super().save(files.eraser_path(path))

    def _check_tokens(self, tokens: object) -> None:
        """Warn if `tokens` differ from the tokens that the erasers changed during the fit."""
        fit_rule = self.apply_to
        if self.sequential and len(self) > 1 and tokens != fit_rule and fit_rule != "a function":
            warn(
                f"these erasers of {len(self)} sites were fitted one after the other with tokens "
                f"{fit_rule!r} erased, and tokens {tokens!r} are erased now: later sites have "
                "other activations than in the fit and keep part of the concept. Fit them with "
                f"fit_layers(..., apply_to={tokens!r})",
                OtherTokensWarning,
            )

    def __str__(self) -> str:
        rows = []
        for name, projection in self.items():
            report, cells = projection.report, ["-"] * 5
            if report is not None:
                cells[0], cells[2] = f"{report.n_rows:,}", f"{report.amplification:.3g}"
                if report.distortion is not None:
                    cells[1] = f"{100 * report.distortion:.3g} %"
                erased = [v for v in report.variables if v.role == "erased"]
                if erased:
                    worst = max(erased, key=lambda v: v.residual)
                    cells[3:] = f"{worst.residual:.1e}", f"{worst.bound:.1e}"
            rows.append((name, str(projection.rank), *cells))
        fit_order = "layer by layer" if self.sequential else "in one pass"
        rules = self._recipe.to_dict()
        heading = f"fitted {fit_order}, tokens {rules['tokens']}"
        if rules["apply_to"] is not None:
            heading += f", applied to {rules['apply_to']}"
        if rules["bias"] == "drop":
            heading += ", means dropped"
        columns = ("site", "rank", "rows", "distortion", "amplification", "residual", "bound")
        return format_table(heading, columns, rows)

    __repr__ = __str__


def read_erasers(erasers: Any) -> tuple[Mapping[Any, Any], CollectionSpec]:
    """Return erasers by site, from a file or a mapping, and the specification of their fit."""
    if isinstance(erasers, str | os.PathLike):
        erasers = Erasers.load(erasers)
    if not isinstance(erasers, Mapping):
        if hasattr(erasers, "label_kinds"):
            check_projection(erasers)
        raise InputError(
            f"erasers is {described_type(erasers)}; pass Erasers, the path of a file with Erasers, "
            "or a mapping of names to projections, such as {'norm': projection}"
        )
    spec = erasers.recipe if isinstance(erasers, Erasers) else CollectionSpec(tokens=None)
    return erasers, spec


def linear_part(projection: Projection) -> Projection:
    """Return the linear map x - left right^T x of a projection, without its offset."""
    return Projection(
        projection.left, projection.right, np.zeros(projection.n_features),
        method=projection.method, report=projection.report,
    )  # fmt: skip


def block_diagonal(projections: Sequence[Projection]) -> Projection:
    """Return the projection of concatenated features, with one diagonal block per projection."""
    if len(projections) == 1:
        return projections[0]
    left = block_diag(*(p.left for p in projections))
    right = block_diag(*(p.right for p in projections))
    mean = np.concatenate([p.mean for p in projections])
    return Projection(left, right, mean, method=projections[0].method)


def fit_site(
    name: str,
    moments: Moments,
    method: str | Function | None,
    erase: object,
    keep: object,
    options: Mapping[str, object],
    erased_before: bool = False,
) -> Projection:
    """Fit the eraser of one site; errors and the warning that nothing was erased name the site."""
    entry = method_of(method, keep)
    if entry.needs_labels:
        raise InputError(
            f"the erasers of {entry.label} need labels, which a running model does not have; use "
            "'leace' or 'splince'"
        )
    check_keywords(options, entry.function, without=("moments", "erase", "keep"))
    if keep is not None:
        options = {**options, "keep": keep}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            projection = cast(Projection, entry.function(moments, erase=erase, **options))
    except SplinceError as error:
        error.args = (f"at the site {name!r}: {error}", *error.args[1:])
        raise
    for warning in caught:
        text = str(warning.message)
        if issubclass(warning.category, NothingErasedWarning):
            if erased_before:
                text = (
                    "nothing was erased, and the eraser is the identity; the erasers of the sites "
                    "before it probably removed the association"
                )
            text = f"at the site {name!r}: {text}"
        warn(text, warning.category)
    return projection
