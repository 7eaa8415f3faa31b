"""Points that no other beats, and the best one of those allowed; pure, points in and names out."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flatout.core.records.shrink import Objective, Point
from flatout.shrink.pareto import pareto_indices


def pareto_names(points: Sequence[Point]) -> tuple[str, ...]:
    """Names of the points that no other beats in time, bytes and loss at once, the fastest first."""
    remaining = [points[i] for i in pareto_indices([(p.call_s[0], p.num_bytes, p.lost) for p in points])]
    return tuple(p.name for p in sorted(remaining, key=lambda p: p.call_s[0]))


def beside_original(point: Point, original: Point) -> Point:
    """The point with the seconds that its pairs with the original model say: those of other minutes do not compare.

    >>> original = Point(name="original", call_s=(2.0, 1.9, 2.1), num_bytes=8, metric=0.9)
    >>> fast = Point(name="fast", call_s=(3.0, 3.0, 3.0), faster=(2.0, 1.6, 2.5), num_bytes=8, metric=0.5)
    >>> beside_original(fast, original).call_s
    (1.0, 0.8, 1.25)
    """
    ratio, low, high = point.faster
    if point is original or not low > 0:
        return point
    call_s = original.call_s[0]
    return msgspec.structs.replace(point, call_s=(call_s / ratio, call_s / high, call_s / low))


def is_within(point: Point, allowed_loss: float) -> bool:
    """Whether its metric lost no more than is allowed. NaN is never within."""
    return point.lost <= allowed_loss


def gain(point: Point, original: Point, objective: Objective) -> float:
    """How many times better than the original model at what it is for; above 1 is better."""
    return original.num_bytes / max(point.num_bytes, 1) if objective == "memory" else point.faster[0]


def is_gain(point: Point, original: Point, objective: Objective) -> bool:
    """Whether it is better beyond doubt, and not slower in any case: intervals exclude 1, of the time from the right side."""
    if objective == "memory":
        return point.num_bytes < original.num_bytes and point.faster[2] >= 1
    return point.faster[1] > 1


def best(points: Sequence[Point], objective: Objective, allowed_loss: float) -> tuple[Point, str]:
    """The point with the largest gain among those that are allowed, and the reason; the first, the original, where none is.

    >>> original = Point(name="original", call_s=(2.0, 2.0, 2.0), num_bytes=8, metric=0.9)
    >>> fast = Point(name="fast", call_s=(1.0, 1.0, 1.0), faster=(2.0, 1.9, 2.1), num_bytes=8, metric=0.5, lost=0.4)
    >>> best([original, fast], "latency", 0.01)[1]
    'nothing that is better keeps the metric'
    """
    original, *others = points
    better = [p for p in others if is_gain(p, original, objective)]
    allowed = [p for p in better if is_within(p, allowed_loss)]
    if not allowed:
        because = "nothing that is better keeps the metric" if better else "nothing is better than the model as it is"
        return original, because
    # of equal gains the milder one: it stands earlier
    selected = max(allowed, key=lambda p: gain(p, original, objective))
    what = {"memory": "fewest bytes", "latency": "shortest call", "train-cost": "shortest step"}[objective]
    return selected, f"{what} of {len(allowed)} that keep the metric and are better beyond doubt"
