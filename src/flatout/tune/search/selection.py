"""Candidates that a search tries: their order, and which of them go as one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from flatout.core.records.lever import Candidate, Lever
from flatout.core.records.plan import LeftOut
from flatout.core.records.verdict import GUARANTEES, Guarantee
from flatout.tune.search.goal import SearchGoal
from flatout.tune.search.plan_so_far import PlanSoFar, guarantee_of

_SLIGHT: Final = 0.02
"""The share of a step that a lever tried with others may cost at worst, by its prediction."""


def by_gain_for_effort(
    candidates: Sequence[Candidate], levers: Mapping[str, Lever], goal: SearchGoal
) -> list[Candidate]:
    """What promises most for the effort first; behind all levers other ways to pull one, what is risky, and what others replace.

    The effort counts by its root: it is in the start of a comparison, and the race after it takes as long for all.
    """
    ordered = sorted(
        candidates, key=lambda c: -sum(c.saved_s) / math.sqrt(goal.effort_of(levers[c.lever], c.parameters))
    )
    first: dict[str, Candidate] = {}
    for candidate in ordered:
        first.setdefault(candidate.lever, candidate)
    replaced = {lever for c in candidates for lever in c.replaces}
    is_later = {
        id(c): c.is_risky or c.lever in replaced or (not levers[c.lever].is_local and first[c.lever] is not c)
        for c in ordered
    }
    return sorted(ordered, key=lambda c: is_later[id(c)])


def allowed_candidates(
    candidates: Sequence[Candidate], levers: Mapping[str, Lever], allow: Guarantee
) -> tuple[list[Candidate], list[LeftOut]]:
    """Those whose guarantee is allowed, and why the others are left out."""
    allowed, refused = [], []
    for candidate in candidates:
        guarantee = guarantee_of(levers[candidate.lever], candidate)
        if GUARANTEES.index(guarantee) <= GUARANTEES.index(allow):
            allowed.append(candidate)
        else:
            because = f"its guarantee is '{guarantee}', '{allow}' is allowed"
            if candidate.guarantee is not None:
                because = f"{candidate.because}, but {because}"
            refused.append(LeftOut(lever=candidate.lever, because=because))
    return allowed, refused


def cheap_as_one(
    plan: PlanSoFar, candidates: Sequence[Candidate], levers: Mapping[str, Lever], goal: SearchGoal
) -> list[Candidate]:
    """Those that are cheap and should gain something on top of the plan, each beside those before it.

    With them what gains little now and more once the others did their part, and what saves much of a device's memory at no cost.
    None that are judged by losses, since all would be then.
    """
    tried, slight = list[Candidate](), list[Candidate]()
    for candidate in candidates:
        is_safe = candidate.is_companion or candidate.saved_s[0] >= -_SLIGHT * goal.step_s
        is_cheap = plan.effort_of(candidate.lever, candidate.parameters) <= goal.cheap
        if candidate.is_risky or candidate.fallback_for or not is_safe or not is_cheap:
            continue
        if guarantee_of(levers[candidate.lever], candidate) == "quality":
            continue
        if any(candidate.lever in other.replaces for other in candidates):
            continue
        if not candidate.is_companion and plan.is_too_little(candidate):
            slight.append(candidate)
        elif _goes_with(plan, candidate):
            tried.append(candidate)
            plan = plan.with_one_more(candidate)
    for candidate in slight:
        is_worth_it = plan.is_much_smaller(candidate) or not plan.is_too_little(candidate, beside=tried)
        if is_worth_it and _goes_with(plan, candidate):
            tried.append(candidate)
            plan = plan.with_one_more(candidate)
    return tried


def _goes_with(plan: PlanSoFar, candidate: Candidate) -> bool:
    clash = "" if candidate.is_companion else plan.clash(candidate)
    return not clash and not plan.displaced(candidate)


def one_of_each_lever(plan: PlanSoFar, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first way to pull each lever that is worth a trial and takes no other's place, cheap or not."""
    tried: list[Candidate] = []
    for candidate in candidates:
        if candidate.is_companion or candidate.is_risky or candidate.fallback_for:
            continue
        if not plan.why_not(candidate) and not plan.displaced(candidate):
            tried.append(candidate)
            plan = plan.with_one_more(candidate)
    return tried
