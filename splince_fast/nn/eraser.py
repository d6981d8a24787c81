"""Torch module of an eraser, which computes in at least float32, and erasers of several sites."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from splince_fast._runtime import files
from splince_fast._runtime.arguments import described_type, warn
from splince_fast._runtime.torch_rows import erased_by_torch
from splince_fast.exceptions import InputError, OtherTokensWarning
from splince_fast.nn.sites import BySite, CollectionSpec
from splince_fast.projection import Projection, from_record, to_record


def check_projection(value: object) -> None:
    """Raise InputError unless `value` is a Projection; an eraser that needs labels is not one."""
    if isinstance(value, Projection):
        return
    kinds = getattr(value, "label_kinds", {})
    needs = f", which needs the labels of {', '.join(kinds)} for every row" if kinds else ""
    raise InputError(
        f"projection is {described_type(value)}{needs}; a module receives rows only: pass a "
        "Projection, such as sf.splince or sf.leace returns"
    )


class Eraser(Module):  # type: ignore[misc]
    """Torch module of the map r(x) = x - left^T (right x - bias) on the last axis of a tensor.

    Narrower inputs are converted to float32, also under autocast, and the result is rounded once.

    Parameters
    ----------
    projection : Projection
        Eraser that the module applies.
    dtype : torch.float32 or torch.float64
        Dtype of the factors, which ``.to(dtype)`` and ``.half()`` do not change.

    Attributes
    ----------
    left, right : Tensor of shape (r, d)
        Factors of the map.
    neg_bias : Tensor of shape (r,)
        -bias = -right mean.
    gate : Tensor of shape ()
        1 to erase, 0 to return the input unchanged.

    Raises
    ------
    InputError
        `projection` is not a Projection, or the dtype is invalid.

    Examples
    --------
    >>> import torch
    >>> import splince_fast as sf
    >>> from splince_fast import nn as snn
    >>> x, z = torch.randn(400, 6), torch.arange(400) % 2
    >>> projection = sf.leace(sf.Moments().update(x, {"z": z}), erase="z")
    >>> torch.allclose(snn.Eraser(projection)(x), projection(x), atol=1e-5)
    True
    """

    def __init__(self, projection: Projection, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        check_projection(projection)
        if dtype not in (torch.float32, torch.float64):
            raise InputError(
                f"dtype is {dtype}; factors are torch.float32 or torch.float64, whatever the "
                "dtype of the model"
            )
        rounded = projection.astype(np.float32 if dtype == torch.float32 else np.float64)
        factors = {"left": rounded.left.T, "right": rounded.right.T, "neg_bias": -rounded.bias}
        for name, values in factors.items():
            self.register_buffer(name, torch.tensor(np.ascontiguousarray(values), dtype=dtype))
        self.register_buffer("gate", torch.ones((), dtype=dtype))

    @property
    def n_features(self) -> int:
        """Width d of the last axis."""
        return int(self.left.shape[1])

    @property
    def rank(self) -> int:
        """Number r of erased directions."""
        return int(self.left.shape[0])

    def forward(self, x: Tensor) -> Tensor:
        """Erase along the last axis.

        Parameters
        ----------
        x : floating Tensor of shape (..., d)
            Rows; not modified.

        Returns
        -------
        Tensor of shape (..., d)
            A new tensor with the dtype and device of `x`.

        Raises
        ------
        InputError
            `x` has another width or no floating dtype.
        """
        if x.ndim == 0 or x.shape[-1] != self.left.shape[1] or not x.is_floating_point():
            raise InputError(
                f"x has shape {tuple(x.shape)} and dtype {x.dtype}; this eraser takes floating "
                f"tensors of shape (..., {self.n_features})"
            )
        with no_autocast(x):
            rows = x.reshape(-1, x.shape[-1])
            left, right, neg_bias = self.left, self.right, self.neg_bias
            dtype = left.dtype
            if x.dtype == torch.float64 and dtype != torch.float64:
                dtype = torch.float64
                left, right, neg_bias = left.to(dtype), right.to(dtype), neg_bias.to(dtype)
            result = erased_by_torch(rows.to(dtype), left, right, neg_bias, gate=self.gate)
            return result.reshape(x.shape).to(x.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Eraser:
        """Apply `fn`, a conversion of tensors, to the buffers, but keep their dtype."""
        originals = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in originals.items():
            new = self._buffers[name]
            if new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self


def eraser_for(projection: Projection, module: Module, model: Module) -> Eraser:
    """Return an eraser whose factors have 64 bits if the module or else the model is float64."""
    for owner in (module, model):
        dtypes = {p.dtype for p in owner.parameters() if p.is_floating_point()}
        if dtypes:
            break
    return Eraser(projection, dtype=torch.float64 if torch.float64 in dtypes else torch.float32)


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context manager that disables autocast, which would round products to 16 bits."""
    device_type = x.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    disabled: AbstractContextManager[object] = torch.autocast(device_type, enabled=False)
    return disabled


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
        The specification of the collection; `placement` and `tokens` are attributes, too.
    **extra
        ``sequential``, whether each projection was fitted with all earlier ones installed.

    Examples
    --------
    See :func:`fit_layers`.
    """

    _KIND = "erasers"
    _CONVERTERS = (to_record, from_record)
    _EXTRA = "sequential"
    _PATH = staticmethod(files.eraser_path)
    sequential: bool

    @property
    def apply_to(self) -> Any:
        """The rule for the tokens that :func:`install` changes."""
        return self.recipe.applied

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
        from splince_fast.evaluation.text_table import Table

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
        rules = self.recipe.to_dict()
        heading = f"fitted {fit_order}, tokens {rules['tokens']}"
        if rules["apply_to"] is not None:
            heading += f", applied to {rules['apply_to']}"
        if rules["bias"] == "drop":
            heading += ", means dropped"
        columns = ("site", "rank", "rows", "distortion", "amplification", "residual", "bound")
        return str(Table(heading, columns, tuple(rows)))

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
