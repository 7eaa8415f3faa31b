"""Which points are worth a look, and which one is best. Pure: points in, names out."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.records.shrinking import Objective, Point


def front(points: Sequence[Point]) -> tuple[str, ...]:
    """Names of the points that no other beats in time, bytes and loss at once (Pareto), the fastest first."""
    kept = [p for p in points if not any(_beats(other, p) for other in points)]
    return tuple(p.name for p in sorted(kept, key=lambda p: p.call_s[0]))


def _beats(a: Point, b: Point) -> bool:
    mine, theirs = _costs(a), _costs(b)
    return mine != theirs and all(x <= y for x, y in zip(mine, theirs, strict=True))


def _costs(point: Point) -> tuple[float, float, float]:
    return point.call_s[0], point.num_bytes, point.lost


def is_within(point: Point, allowed_loss: float) -> bool:
    """Whether its metric lost no more than is allowed. NaN is never within."""
    return point.lost <= allowed_loss


def gain(point: Point, given: Point, objective: Objective) -> float:
    """How many times better than the given model at what it is for; above 1 is better."""
    return given.num_bytes / max(point.num_bytes, 1) if objective == "memory" else point.faster[0]


def is_gain(point: Point, given: Point, objective: Objective) -> bool:
    """Whether it is better beyond doubt, and not slower in any case: intervals exclude 1, of the time from the right side."""
    if objective == "memory":
        return point.num_bytes < given.num_bytes and point.faster[2] >= 1
    return point.faster[1] > 1


def best(points: Sequence[Point], objective: Objective, allowed_loss: float) -> tuple[Point, str]:
    """The point with the largest gain among those that are allowed, and why it; the first, given, where none is.

    >>> given = Point(name="given", call_s=(2.0, 2.0, 2.0), num_bytes=8, metric=0.9)
    >>> fast = Point(name="fast", call_s=(1.0, 1.0, 1.0), faster=(2.0, 1.9, 2.1), num_bytes=8, metric=0.5, lost=0.4)
    >>> best([given, fast], "latency", 0.01)[1]
    'nothing that is better keeps the metric'
    """
    given, *others = points
    better = [p for p in others if is_gain(p, given, objective)]
    allowed = [p for p in better if is_within(p, allowed_loss)]
    if not allowed:
        because = "nothing that is better keeps the metric" if better else "nothing is better than the model as it is"
        return given, because
    # of equal gains the milder one: it stands earlier
    chosen = max(allowed, key=lambda p: gain(p, given, objective))
    what = {"memory": "fewest bytes", "latency": "shortest call", "train-cost": "shortest step"}[objective]
    return chosen, f"{what} of {len(allowed)} that keep the metric and are better beyond doubt"
