"""The laws of an honest report: a claim that contradicts the measured step is left out, and the report says so.

- A floor is never above the time that was measured. Where it is, the rate, the dtype or the count of FLOP is not the one that
  applied.
- A cause never takes more than the step; causes together never more than all of it.
- A gain is never more than what goes with the cause, and no step is said to become shorter than the noise of its measurement.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from flatout.core import units
from flatout.core.records.finding import BrokenLaw, Finding, HotLine

_SPREAD: Final = 0.05
"""Two measurements of the same on one machine differ by so much: within it, a cost is the step."""
_RATE_SPREAD: Final = 0.15
"""So much a rate differs from the one that was measured, by clocks and caches: within it, a floor is the measured time."""


def lawful_floors(lines: Iterable[HotLine]) -> tuple[list[HotLine], tuple[BrokenLaw, ...]]:
    """Leave out floors above the time of their line. The sum of the others is a floor of the step still."""
    lawful: list[HotLine] = []
    broken: list[BrokenLaw] = []
    for line in lines:
        floor_s = line.floor_s or 0.0
        if not line.seconds:  # too short for its time to be told from that of watching it
            lawful.append(msgspec.structs.replace(line, floor_s=None))
        elif floor_s > (1 + _RATE_SPREAD) * line.seconds:
            lawful.append(msgspec.structs.replace(line, floor_s=None))
            broken.append(_too_high(f"{line.source.file}:{line.source.line}", floor_s, line.seconds))
        else:
            lawful.append(msgspec.structs.replace(line, floor_s=min(floor_s, line.seconds)))
    return lawful, tuple(broken)


def lawful_floor(floor_s: float, step_s: float) -> tuple[float | None, tuple[BrokenLaw, ...]]:
    """The floor of the whole step, None where it is above the step that was measured."""
    if floor_s <= (1 + _RATE_SPREAD) * step_s:
        return min(floor_s, step_s), ()
    return None, (_too_high("the step", floor_s, step_s),)


def _too_high(what: str, floor_s: float, seconds: float) -> BrokenLaw:
    text = (
        f"the floor of {what}: {units.duration(floor_s)} by the rates measured here, more than the "
        f"{units.duration(seconds)} that it took"
    )
    return BrokenLaw(law="floor", text=text)


def lawful_costs(
    findings: Iterable[tuple[Finding, list[str]]], *, step_s: float, noise_s: float
) -> tuple[list[tuple[Finding, list[str]]], tuple[BrokenLaw, ...]]:
    """Findings with the rules each absorbed, by rank, whose costs add up to the step at most, gains to no more.

    One that claims more than the whole step was measured wrongly, and is left out. Those that claim the same time share it.
    """
    lawful: list[tuple[Finding, list[str]]] = []
    broken: list[BrokenLaw] = []
    for finding, others in findings:
        if finding.cost_s > (1 + _SPREAD) * step_s:
            text = (
                f"{finding.rule}: it would take {units.duration(finding.cost_s)} of a step of {units.duration(step_s)}"
            )
            broken.append(BrokenLaw(law="cost", rule=finding.rule, text=text))
        else:
            lawful.append((finding, others))
    # First what each would gain, so that a cause with a small gain does not take the time from one with a large one.
    left_s = step_s
    gains_s = []
    for finding, _ in lawful:
        most_s = max(0.0, min(finding.cost_s, finding.saved_s[1], step_s - noise_s, left_s))
        gains_s.append(most_s)
        left_s -= most_s
    shared = []
    for (finding, others), most_s in zip(lawful, gains_s, strict=True):
        more_s = min(left_s, max(0.0, finding.cost_s - most_s))
        left_s -= more_s
        low_s = min(max(0.0, finding.saved_s[0]), most_s)
        shared.append((msgspec.structs.replace(finding, cost_s=most_s + more_s, saved_s=(low_s, most_s)), others))
    return shared, tuple(broken)
