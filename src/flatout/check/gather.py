"""Equal findings gathered: a line that a rule finds twelve times is told once, with all that it costs."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from flatout.core.records.finding import Finding, Note
from flatout.core.records.workload import Source
from flatout.machine.cost.accounting import group_by, milliseconds


def gathered(findings: Iterable[Finding]) -> list[Finding]:
    """One finding for all of a rule at one line of the user's that ask for one and the same edit, in the order of the first.

    Their costs and savings are added up, so that those that claim operators of another stay on their own; so do those of memory,
    whose peaks are not at one time.
    """
    ready: list[Finding] = []
    for alike in group_by(enumerate(findings), lambda item: _likeness(*item)).values():
        ready += _joined([finding for _, finding in alike])
    return ready


def gathered_notes(notes: Iterable[Note]) -> list[Note]:
    """One note for all of a rule at one line of the user's that say the same."""
    ready = []
    for alike in group_by(notes, lambda n: (n.rule, _line(n.where), n.text)).values():
        more = len({n.where for n in alike}) - 1
        places = "place" if more == 1 else "places"
        text = f"{alike[0].text} (and at {more} more {places} below this line)" if more else alike[0].text
        ready.append(msgspec.structs.replace(alike[0], text=text))
    return ready


def _line(where: Source | None) -> tuple[str, int]:
    return (where.file, where.line) if where is not None else ("", 0)


def _likeness(number: int, finding: Finding) -> tuple[object, ...]:
    """What equal findings agree in; the number of one that stands alone."""
    if finding.where is None or finding.phases or finding.saved_bytes or finding.growth_bytes_per_step:
        return (number,)
    return finding.rule, _line(finding.where), finding.edit, finding.regime, finding.basis, finding.device


def _joined(alike: list[Finding]) -> list[Finding]:
    """The largest with all that claim other operators added to it, then the others."""
    ranked = sorted(alike, key=lambda f: -sum(f.saved_s))
    joined: list[Finding] = []
    separate: list[Finding] = []
    claimed: set[int] = set()
    for finding in ranked:
        (separate if claimed & set(finding.operators) else joined).append(finding)
        claimed |= set(finding.operators)
    if len(joined) == 1:
        return ranked
    first, cost_s = joined[0], sum(f.cost_s for f in joined)
    places = dict.fromkeys(place for f in joined for place in (f.where, *f.also) if place is not None)
    whole = msgspec.structs.replace(
        first,
        cost_s=cost_s,
        saved_s=(sum(f.saved_s[0] for f in joined), sum(f.saved_s[1] for f in joined)),
        because=f"{first.because}; the largest of {len(joined)} alike here, {milliseconds(cost_s)} together",
        also=tuple(place for place in places if place != first.where),
        operators=tuple(sorted(i for f in joined for i in f.operators)),
    )
    return [whole, *separate]
