"""Sampling of rows by their leverage, and sums over their labels; compiled by Numba, serial."""

from __future__ import annotations

from typing import Any

import numpy as np

from splince_fast._kernels.jit import kernel


@kernel
def weigh_classes(codes: Any, weight: Any, weights: Any) -> None:
    """weights[c] = sum_{i: codes[., i] = c} w_i.

    Parameters
    ----------
    codes : (v, n) intp below k, -1 for none
    weight : (n,) float64, or empty for unit weights
    weights : (k,) float64, overwritten
    """
    weights[:] = 0.0
    for v in range(codes.shape[0]):
        for i in range(codes.shape[1]):
            if codes[v, i] >= 0:
                weights[codes[v, i]] += weight[i] if weight.shape[0] > 0 else 1.0


@kernel
def invert_variances(
    reference: Any, deviation: Any, squares: Any, weight: float, roundings: float, least: float,
    inverse: Any,
) -> None:  # fmt: skip
    """inverse_j = 1 / max(v_j, (roundings mean_j)^2, least max v), with v = squares / weight.

    All are 0 where max v is 0.

    Parameters
    ----------
    reference, deviation, squares : (d,) float64; weight > 0
        Of a state: sum w (x - reference), and sum w (x - mean)^2.
    inverse : (d,) float64, overwritten
    """
    largest = 0.0
    for j in range(squares.shape[0]):
        largest = max(largest, squares[j] / weight)
    for j in range(squares.shape[0]):
        rounding = (roundings * (reference[j] + deviation[j] / weight)) ** 2
        variance = max(max(squares[j] / weight, rounding), least * largest)
        inverse[j] = 1.0 / variance if largest > 0.0 else 0.0


@kernel
def choose_rows(
    leverage: Any, weight: Any, rate: float, key: Any, position: int, chosen: Any, inclusion: Any
) -> int:
    """Poisson sampling with the floor-leverage probability, decided by a hash of the position::

        pi_i = min(1, rate max(1, q_i / mean q)),    q_i = w_i sum_s leverage[s, i]

    Row i is taken if splitmix64(key + position + i) < pi_i 2^64.

    Parameters
    ----------
    leverage : (s, n) float64
    weight : (n,) float64 > 0, or empty for unit weights
    rate : float in (0, 1]
    key : uint64
        Start of the sequence of hashes.
    position : int
        Of the first of these rows in the stream.
    chosen, inclusion : (n,) intp, (n,) float64
        Overwritten up to the number of rows taken: their numbers and probabilities.

    Returns
    -------
    int
        Number of rows taken.
    """
    n = leverage.shape[1]
    size = np.zeros(n)
    for s in range(leverage.shape[0]):
        for i in range(n):
            size[i] += leverage[s, i]
    mean = 0.0
    for i in range(n):
        if weight.shape[0] > 0:
            size[i] *= weight[i]
        mean += size[i]
    mean /= n
    taken = 0
    for i in range(n):
        probability = rate
        if size[i] > mean:
            probability = min(1.0, rate * (size[i] / mean))
        mixed = key + np.uint64(position) + np.uint64(i) + np.uint64(1)
        mixed = mixed * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
        # The 53 highest bits are a number in [0, 1) without rounding.
        if np.float64(mixed >> np.uint64(11)) * 2.0**-53 < probability:
            chosen[taken] = i
            inclusion[taken] = probability
            taken += 1
    return taken
