"""Which eraser leads by a metric, and whether a test says so."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splince_fast.exceptions import InputError

if TYPE_CHECKING:
    from splince_fast.evaluation.result import Comparison


@dataclass(frozen=True, slots=True)
class Verdict:
    """Erasers ordered by a metric, over the seeds that all of them have.

    Attributes
    ----------
    order : tuple of str
        Erasers with values, the best first.
    leaders : tuple of str
        The best, and those that the test does not tell from it.
    level : tuple of str
        The best, and those with the same mean.
    tested : bool
        Whether the best was tested against another eraser.
    n_seeds : int
        Seeds at which every one of them has a value.
    """

    order: tuple[str, ...]
    leaders: tuple[str, ...]
    level: tuple[str, ...]
    tested: bool
    n_seeds: int

    @property
    def confirmed(self) -> str | None:
        """The eraser that beats every other one in the test, if there is one."""
        return self.leaders[0] if len(self.leaders) == 1 and self.tested else None


def verdict(result: Comparison, metric: str, head: str | None, p: float | None) -> Verdict:
    """Order the erasers by a metric.

    Raises
    ------
    InputError
        The metric has no direction.
    """
    lower = result.metric(metric).lower_is_better
    if lower is None:
        raise InputError(
            f"the metric {metric!r} has no direction, so no eraser is the best by it; pass one of "
            f"your own as metrics={{{metric!r}: Metric(function, lower_is_better=...)}}"
        )
    values = {
        eraser: {
            seed: value
            for seed, value in result.values(metric, eraser=eraser, head=head, p=p).items()
            if not math.isnan(value)
        }
        for eraser in result.context.erasers
    }
    values = {eraser: found for eraser, found in values.items() if found}
    seeds = set.intersection(*(set(found) for found in values.values())) if values else set()
    if not seeds:
        return Verdict((), (), (), False, 0)
    means = {e: math.fsum(found[s] for s in seeds) / len(seeds) for e, found in values.items()}
    sign = -1.0 if lower else 1.0
    order = sorted(means, key=lambda e: -sign * means[e])
    best = order[0]
    found = result.differences(metric, reference=best, head=head, p=p)
    worse = {row.method for row in found if row.significant and sign * row.difference < 0}
    return Verdict(
        tuple(order),
        tuple(e for e in order if e not in worse),
        tuple(e for e in order if math.isclose(means[e], means[best], abs_tol=1e-12)),
        any(not math.isnan(row.p) for row in found),
        len(seeds),
    )
