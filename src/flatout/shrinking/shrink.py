"""The search for the cheapest model that keeps its metric, and the proof of what it found."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Final, NamedTuple, Protocol

import msgspec

from flatout.errors import PlanError, UsageError
from flatout.records.lever import Kind, Lever
from flatout.records.shrinking import Objective, Point, Shrunk, Tried, Where
from flatout.records.verdict import Equality, Outcome, Speed, Verdict
from flatout.shrinking.exploring import Composition, Explorer, name_of
from flatout.shrinking.front import best, front, is_gain, is_within

_PROOF: Final = 3.0
"""The proof measures so many times longer than a trial."""


class Bench(Protocol):
    """Makes compositions and measures them, here or in processes of their own."""

    def tried(self, composition: Composition, *, allowed_loss: float, times: float = 1.0) -> Tried:
        """What came of it; timed `times` as long as usual."""


class Allowance(NamedTuple):
    """What of the metric may be lost: in its own unit, or relative to what the given model has."""

    value: float
    is_relative: bool

    @classmethod
    def of(cls, text: str) -> Allowance:
        """Out of '1%' (of the given model's metric) or '0.01' (of its unit).

        >>> Allowance.of("1%").of_metric(0.5)
        0.005

        Raises UsageError for anything else, and below 0.
        """
        number, percent, rest = text.strip().partition("%")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if rest or not (math.isfinite(value) and value >= 0):
            raise UsageError(
                f"a loss of '{text}' cannot be allowed; write '1%' of the metric, or '0.01' in its own unit"
            )
        return cls(value / 100 if percent else value, bool(percent))

    def of_metric(self, metric: float) -> float:
        """In the metric's unit."""
        return self.value * abs(metric) if self.is_relative else self.value


class Settings(NamedTuple):
    """What is asked for."""

    model: str
    objective: Objective
    allowance: Allowance
    is_cost: bool
    budget_s: float


def shrink(
    bench: Bench,
    levers: Iterable[Lever],
    settings: Settings,
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[Shrunk, Composition]:
    """What was tried, and the composition that was chosen, proved once more; empty where nothing is better.

    Raises PlanError when the model as it is cannot be measured.
    """
    began = monotonic()
    allowed, where = math.nan, Where()

    def attempt(composition: Composition) -> Tried:
        nonlocal allowed, where
        tell(name_of(composition))
        tried = bench.tried(composition, allowed_loss=0.0 if math.isnan(allowed) else allowed)
        if not composition:
            if tried.point is None:
                raise PlanError(f"the model as it is cannot be measured: {tried.because}")
            allowed, where = settings.allowance.of_metric(tried.point.metric), tried.where
        return tried

    explorer = Explorer(
        attempt,
        kinds_of(levers),
        objective=settings.objective,
        allowed_loss=lambda: allowed,
        is_over=lambda: monotonic() - began > settings.budget_s,
    )
    explorer.run()
    points = explorer.points
    chosen, because = best(points, settings.objective, allowed)
    tell(f"proof of {chosen.name}")
    proved, verdict = _proved(bench, explorer, chosen, settings, allowed, where)
    failed: set[str] = set()
    while verdict.outcome != "proved" and chosen is not points[0]:
        failed.add(chosen.name)
        points[points.index(chosen)] = proved or chosen
        rest = [p for p in points if p.name not in failed]
        chosen, because = best(rest, settings.objective, allowed)
        proved, verdict = _proved(bench, explorer, chosen, settings, allowed, where)
    points[points.index(chosen)] = proved or chosen
    found = Shrunk(
        model=settings.model,
        objective=settings.objective,
        allowed_loss=allowed,
        is_cost=settings.is_cost,
        points=tuple(points),
        untried=tuple(explorer.untried),
        front=front(points),
        chosen=chosen.name,
        because=because,
        verdict=msgspec.structs.replace(verdict, seconds=monotonic() - began),
        where=where,
    )
    return found, explorer.composition(chosen.name)


def kinds_of(levers: Iterable[Lever]) -> dict[str, Kind]:
    """What each lever with a reduction does, by id."""
    return {lever.id: lever.reduction.kind for lever in levers if lever.reduction is not None}


def _proved(
    bench: Bench, explorer: Explorer, chosen: Point, settings: Settings, allowed: float, where: Where
) -> tuple[Point | None, Verdict]:
    """The chosen one made and measured once more; the given model needs no proof."""
    given = explorer.points[0]
    if chosen is given:
        return None, _verdict(given, given, settings, allowed, "unknown", "nothing better was found", where)
    tried = bench.tried(explorer.composition(chosen.name), allowed_loss=allowed, times=_PROOF)
    if tried.point is None:
        return None, _verdict(given, chosen, settings, allowed, "unknown", tried.because, where)
    point = tried.point
    outcome: Outcome = "proved"
    because = ""
    if not is_within(point, allowed):
        outcome, because = "different", f"the metric lost {point.lost:.3g}, {allowed:.3g} is allowed"
    elif not is_gain(point, given, settings.objective):
        outcome, because = "slower", "made and measured once more, it was not better beyond doubt"
    return point, _verdict(given, point, settings, allowed, outcome, because, where)


def _speed(point: Point) -> Speed:
    """As its pairs with the given model have it."""
    ratio, low, high = point.faster
    after_s = point.call_s[0]
    return Speed(ratio=ratio, low=low, high=high, num_pairs=point.num_pairs, before_s=after_s * ratio, after_s=after_s)


def _verdict(
    given: Point,
    point: Point,
    settings: Settings,
    allowed: float,
    outcome: Outcome,
    because: str,
    where: Where,
) -> Verdict:
    interval = "" if point.lost_range is None else f" ({point.lost_range[0]:.3g} .. {point.lost_range[1]:.3g})"
    told = f"metric {given.metric:.4g} -> {point.metric:.4g}, lost {point.lost:.3g}{interval}, allowed {allowed:.3g}"
    return Verdict(
        before=given.name,
        after=point.name,
        equality=Equality(guarantee="quality", is_kept=is_within(point, allowed), because=told),
        speed=None if point is given else _speed(point),
        outcome=outcome,
        because=because or told,
        device=where.device or where.processor,
        torch=where.torch,
        python=platform.python_version(),
    )
