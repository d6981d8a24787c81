"""R-LACE: relaxed linear adversarial concept erasure, a game of a predictor and a projection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from scipy.special import expit, softmax
from sklearn.metrics import log_loss

from splince_fast._runtime.progress import Progress
from splince_fast.baselines.iterative import (
    ClassRows,
    ErasureData,
    ErasureRun,
    Float,
    Index,
    IterativeEraser,
    fit_probe,
    orthonormal_basis,
)
from splince_fast.exceptions import InputError


@dataclass(kw_only=True, eq=False, repr=False)
class RLACE(IterativeEraser):
    """Erase the subspace that maximises the loss of a linear predictor of the concept (R-LACE).

    A linear predictor (w, b) and a matrix P play the game min_{w, b} max_P, in alternating
    stochastic gradient steps. The objective is the log-loss of the scores
    w^T (I - P)(x - mean) + b; for more than two classes the predictor is a softmax. P is in the
    Fantope {0 <= P <= I, tr P = rank}.

    Every `check_every` steps, P is rounded to the projection onto its `rank` leading eigenvectors,
    and a new probe is trained on rows from which these eigenvectors are projected out. If the
    accuracy of the probe on the validation rows is at chance level, this projection is the result.
    Otherwise the result is the projection whose probe has the largest log-loss on the validation
    rows.

    A step costs O(d^3).

    Parameters
    ----------
    alpha, validation_share, concept_from, random_state, progress
        As for :class:`INLP`, as are the attributes; `random_state` also draws the initial P and
        predictor, and the batches.
    rank : int
        Number of dimensions to remove.
    step_size : float
        Step size of the predictor and of P.
    momentum : float in [0, 1)
        Momentum of the predictor.
    weight_decay : float
        Weight decay of the predictor and of P.
    batch_size, max_steps, check_every : int
        Rows per step, largest number of steps, and steps between two probes.
    tol : float
        A probe is at chance level, and the fit stops, if the accuracy of the probe differs from the
        fraction of the majority class by less than `tol`.
    patience : int, optional
        The fit stops after `patience` successive probes without a larger log-loss. With None, it
        does not stop for this reason.

    References
    ----------
    S. Ravfogel, M. Twiton, Y. Goldberg, R. Cotterell, "Linear adversarial concept erasure",
    ICML 2022.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast.baselines import RLACE
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, size=600)
    >>> X = rng.normal(size=(600, 5)) + np.outer(z, [2, 0, 0, 0, 0])
    >>> eraser = RLACE(max_steps=2000, random_state=0).fit(X, concept=z)
    >>> eraser.projection_.rank, eraser.report_.residual < 0.2
    (1, True)
    """

    rank: int = 1
    step_size: float = 0.005
    momentum: float = 0.0
    weight_decay: float = 1e-4
    batch_size: int = 128
    max_steps: int = 75_000
    check_every: int = 1000
    tol: float = 0.0015
    patience: int | None = 10

    def _erase(self, data: ErasureData) -> ErasureRun:
        d, n_classes = data.train.rows.shape[1], len(self.classes_)
        if self.rank > d:
            raise InputError(f"rank is {self.rank}, and X has only {d} features")
        rng = data.rng
        best_basis = orthonormal_basis(rng.normal(size=(d, self.rank)))
        P = best_basis @ best_basis.T
        predictor = _Predictor(d, n_classes, self, rng)
        decay = 1.0 - self.step_size * self.weight_decay
        accuracies: list[float] = []
        largest_loss, no_improvement_count = -np.inf, 0
        stop = "the largest number of steps is reached"
        with Progress(self.max_steps * self.batch_size, "R-LACE", show=self.progress) as bar:
            batches = islice(_batches(data.train, self.batch_size, rng), self.max_steps)
            for step, (rows, codes) in enumerate(batches, 1):
                # The derivative of the log-loss with respect to P is the symmetric part of
                # -W^T G, with the weights W of the predictor and G = errors^T rows.
                gradient = predictor.errors(rows - rows @ P, codes).T @ rows
                product = predictor.weights.T @ gradient
                ascent = -0.5 * self.step_size * (product + product.T)
                P = project_to_fantope(decay * P + ascent, self.rank)
                predictor.step(rows - rows @ P, codes)
                bar.advance(len(rows), rows.nbytes)
                if step % self.check_every and step < self.max_steps:
                    continue
                candidate = np.linalg.eigh(P).eigenvectors[:, -self.rank :]
                accuracy, loss = self._score_probe(data, candidate)
                accuracies.append(accuracy)
                no_improvement_count += 1
                if loss > largest_loss:
                    best_basis, largest_loss, no_improvement_count = candidate, loss, 0
                if abs(accuracy - data.selection.majority()) < self.tol:
                    best_basis, stop = candidate, "a probe is no better than the majority"
                    break
                if no_improvement_count == self.patience:
                    stop = f"{self.patience} probes in a row did not raise the loss"
                    break
        return ErasureRun(best_basis, step, stop, accuracies)

    def _score_probe(self, data: ErasureData, basis: Float) -> tuple[float, float]:
        """Return accuracy and log-loss of a probe of rows without the span of `basis`."""
        train, selection = (
            replace(part, rows=part.rows - (part.rows @ basis) @ basis.T)
            for part in (data.train, data.selection)
        )
        proba = fit_probe(train, self.alpha).predict_proba(selection.rows)
        loss = log_loss(
            selection.codes, proba, sample_weight=selection.weight, labels=np.arange(proba.shape[1])
        )
        return selection.fraction(proba.argmax(axis=1) == selection.codes), float(loss)


def project_to_fantope(matrix: Float, k: int) -> Float:
    """Return the matrix of the Fantope {0 <= P <= I, tr P = k} nearest to a symmetric matrix.

    Each eigenvalue v becomes clip(v - t, 0, 1). The trace is a decreasing, piecewise linear
    function of t with breakpoints v and v - 1, and equals k at the t that is interpolated.
    """
    values, vectors = np.linalg.eigh(matrix)
    breakpoints = np.sort(np.concatenate([values - 1.0, values]))
    traces = np.clip(values - breakpoints[:, None], 0.0, 1.0).sum(axis=1)
    shift = np.interp(-k, -traces, breakpoints)
    return np.asarray((vectors * np.clip(values - shift, 0.0, 1.0)) @ vectors.T)


class _Predictor:
    """Linear predictor of the game: logistic for two classes, softmax for more."""

    def __init__(self, d: int, n_classes: int, options: RLACE, rng: np.random.Generator) -> None:
        self.binary, self.options = n_classes == 2, options
        n_outputs = 1 if self.binary else n_classes
        self.weights: Float = 0.1 / np.sqrt(d) * rng.normal(size=(n_outputs, d))
        self.bias: Float = np.zeros(n_outputs)
        self.indicators: Float = np.arange(2.0)[:, None] if self.binary else np.eye(n_classes)
        self.velocity: tuple[Float | float, Float | float] = 0.0, 0.0

    def errors(self, erased: Float, codes: Index) -> Float:
        """Return the derivative of the mean log-loss by the scores; (n, 1) for two classes."""
        scores = erased @ self.weights.T + self.bias
        proba = expit(scores) if self.binary else softmax(scores, axis=1)
        return np.asarray((proba - self.indicators[codes]) / len(codes))

    def step(self, erased: Float, codes: Index) -> None:
        error, options = self.errors(erased, codes), self.options
        gradients = error.T @ erased + options.weight_decay * self.weights, error.sum(axis=0)
        weights, bias = self.velocity = (
            options.momentum * self.velocity[0] + gradients[0],
            options.momentum * self.velocity[1] + gradients[1],
        )
        self.weights = self.weights - options.step_size * weights
        self.bias = self.bias - options.step_size * bias


def _batches(
    train: ClassRows, size: int, rng: np.random.Generator
) -> Iterator[tuple[Float, Index]]:
    """Yield random batches endlessly, with rows drawn in proportion to the row weights."""
    cumulative = np.cumsum(train.weight)
    while True:
        draws = rng.random(size) * cumulative[-1]
        index = np.minimum(np.searchsorted(cumulative, draws, side="right"), len(train) - 1)
        yield train.rows[index], train.codes[index]
