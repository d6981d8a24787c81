"""All statements in order, and a run over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

from proofs_check._check import REGISTRY, Check, Outcome, run_check

MODULES = (
    "theorem1",
    "uniqueness",
    "price",
    "lemmas",
    "theorem2",
    "retraining",
    "theorem3",
    "frozen_heads",
    "theorem4",
    "overconfidence",
    "remarks",
    "numerics",
)

SECTIONS = {
    "1": "Theorem 1: the eraser",
    "2": "The lemmas and the printed proof",
    "3": "Theorem 2: a retrained head",
    "4": "Theorem 3: a frozen head, squared error",
    "5": "Theorem 4: a frozen head, log-loss",
    "6": "The remarks",
    "7": "The library in floating point",
}


def _order(key: str) -> tuple[int, ...]:
    return tuple(map(int, key.split(".")))


def checks(keys: Sequence[str] = ()) -> list[Check]:
    """Registered checks in order; with keys, those equal to one of them or in its section.

    Raises
    ------
    ValueError
        If a key names nothing.
    """
    for name in MODULES:
        import_module(f"proofs_check.{name}")
    everything = [REGISTRY[key] for key in sorted(REGISTRY, key=_order)]
    if not keys:
        return everything
    named = {key: [c for c in everything if f"{c.key}.".startswith(f"{key}.")] for key in keys}
    unknown = [key for key, found in named.items() if not found]
    if unknown:
        raise ValueError(f"no statement is numbered {', '.join(unknown)}")
    return [c for c in everything if any(c in found for found in named.values())]


def run(
    selected: Sequence[Check],
    *,
    seed: int,
    quick: bool,
    tick: Callable[[int, Check | None], None] = lambda done, item: None,
) -> list[Outcome]:
    """Run checks one after the other; ``tick(done, next)`` is called before each and at the end."""
    outcomes = []
    for done, item in enumerate(selected):
        tick(done, item)
        outcomes.append(run_check(item, seed=seed, quick=quick))
    tick(len(selected), None)
    return outcomes
