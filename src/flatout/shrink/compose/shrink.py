"""The search for the cheapest model that keeps its metric, and the proof of what it found."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Final, NamedTuple, Protocol

import msgspec

from flatout.core.errors import PlanError
from flatout.core.records.allowance import Allowance
from flatout.core.records.reduction import Reduction
from flatout.core.records.shrink import Objective, Point, Shrunk, Tried, Where
from flatout.core.records.verdict import Equality, Outcome, Speed, Verdict
from flatout.shrink.compose.explorer import Composition, Explorer, composition_name
from flatout.shrink.compose.ranking import beside_original, best, is_gain, is_within, pareto_names

_PROOF: Final = 3.0
"""The proof measures so many times longer than a trial."""


class CompositionRunner(Protocol):
    """Makes compositions and measures them, here or in processes of their own."""

    def tried(self, composition: Composition, *, allowed_loss: float, times: float = 1.0) -> Tried:
        """What came of it; timed `times` as long as usual."""


class ShrinkSettings(NamedTuple):
    """What a search for a cheaper model is asked for."""

    model: str
    objective: Objective
    allowance: Allowance
    is_cost: bool
    budget_s: float


def find_cheapest(
    runner: CompositionRunner,
    reductions: Iterable[Reduction],
    settings: ShrinkSettings,
    *,
    on_progress: Callable[[str], None] = lambda _: None,
) -> tuple[Shrunk, Composition]:
    """What was tried, and the composition that was selected, proved once more; empty where nothing is better.

    Raises PlanError when the original model cannot be measured.
    """
    began = monotonic()
    allowed, where = math.nan, Where()

    def attempt(composition: Composition) -> Tried:
        nonlocal allowed, where
        on_progress(composition_name(composition))
        tried = runner.tried(composition, allowed_loss=0.0 if math.isnan(allowed) else allowed)
        if not composition:
            if tried.point is None:
                raise PlanError(f"the model as it is cannot be measured: {tried.because}")
            allowed, where = settings.allowance.of_metric(tried.point.metric), tried.where
        return tried

    explorer = Explorer(
        attempt,
        {reduction.id: reduction.kind for reduction in reductions},
        objective=settings.objective,
        allowed_loss=lambda: allowed,
        is_over=lambda: monotonic() - began > settings.budget_s,
    )
    explorer.run()
    points, failed = explorer.points, set[str]()
    while True:
        selected, because = best([p for p in points if p.name not in failed], settings.objective, allowed)
        on_progress(f"proof of {selected.name}")
        proved, verdict = _proved(runner, explorer, selected, settings, allowed, where)
        if verdict.outcome == "proved" or selected is points[0]:
            break
        failed.add(selected.name)
        points[points.index(selected)] = proved
    points[points.index(selected)] = proved
    points = [beside_original(point, points[0]) for point in points]
    found = Shrunk(
        model=settings.model,
        objective=settings.objective,
        allowed_loss=allowed,
        is_cost=settings.is_cost,
        points=tuple(points),
        untried=tuple(explorer.untried),
        pareto=pareto_names(points),
        selected=selected.name,
        because=because,
        verdict=msgspec.structs.replace(verdict, seconds=monotonic() - began),
        where=where,
    )
    return found, explorer.composition(selected.name)


def _proved(
    runner: CompositionRunner,
    explorer: Explorer,
    selected: Point,
    settings: ShrinkSettings,
    allowed: float,
    where: Where,
) -> tuple[Point, Verdict]:
    """The selected one built and measured once more; the original model needs no proof."""
    original, point = explorer.points[0], selected
    outcome: Outcome = "unknown"
    because = "nothing better was found"
    if selected is not original:
        tried = runner.tried(explorer.composition(selected.name), allowed_loss=allowed, times=_PROOF)
        because = tried.because
        if tried.point is not None:
            point, outcome, because = tried.point, "proved", ""
            if not is_within(point, allowed):
                outcome, because = "different", f"the metric lost {point.lost:.3g}, {allowed:.3g} is allowed"
            elif not is_gain(point, original, settings.objective):
                outcome, because = "slower", "made and measured once more, it was not better beyond doubt"
    interval = "" if point.lost_range is None else f" ({point.lost_range[0]:.3g} .. {point.lost_range[1]:.3g})"
    notes = (
        f"metric {original.metric:.4g} -> {point.metric:.4g}, lost {point.lost:.3g}{interval}, allowed {allowed:.3g}"
    )
    verdict = Verdict(
        before=original.name,
        after=point.name,
        equality=Equality(guarantee="quality", holds=is_within(point, allowed), because=notes),
        speed=None if point is original else _speed(point),
        outcome=outcome,
        because=because or notes,
        device=where.device or where.processor,
        torch=where.torch,
        python=platform.python_version(),
    )
    return point, verdict


def _speed(point: Point) -> Speed:
    """Speed of a point, as its pairs with the original model have it."""
    ratio, low, high = point.faster
    after_s = point.call_s[0]
    return Speed(ratio=ratio, low=low, high=high, num_pairs=point.num_pairs, before_s=after_s * ratio, after_s=after_s)
