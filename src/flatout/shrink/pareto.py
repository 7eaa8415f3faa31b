"""Candidates that no other one beats in every cost at once (the Pareto front)."""

from __future__ import annotations

from collections.abc import Sequence


def pareto_indices(costs: Sequence[Sequence[float]]) -> list[int]:
    """Places of the candidates that no other beats: none costs as little in everything and less in something.

    Candidates of equal costs stay together. A cost that is NaN beats nothing and is beaten by nothing.

    >>> pareto_indices([(1.0, 5.0), (2.0, 5.0), (3.0, 1.0)])
    [0, 2]
    """
    return [i for i, own in enumerate(costs) if not any(_beats(other, own) for other in costs)]


def _beats(a: Sequence[float], b: Sequence[float]) -> bool:
    return tuple(a) != tuple(b) and all(x <= y for x, y in zip(a, b, strict=True))
