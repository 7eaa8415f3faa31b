"""Environments take much of each iteration, and step one after another on the loop's own thread.

Costs        The policy's network and the device wait while the environment computes.
Evidence     Time inside `step` and `reset` of gymnasium's, gym's or a library's environments.
Levers       none
False alarm  An environment that is the point of the experiment and cannot be stepped beside others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding, Note

_WORTH_SAYING: Final = 0.03
"""Share of the step from which environments are named (time that no report should leave out)."""


def check(evidence: Evidence) -> Iterator[Finding]:
    """No finding: what stepping them side by side gains depends on the environment, and is not known."""
    yield from ()


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note when environments take more than a few percent of the step."""
    seconds, whole_s = evidence.steps.phases.get("environment", 0.0), evidence.steps.whole_s
    if whole_s and seconds > _WORTH_SAYING * whole_s:
        yield Note(
            where=None,
            text=f"environments take {seconds / whole_s:.0%} of each step ({seconds * 1e3:.2f} ms), stepped on the loop's own "
            "thread; gymnasium.vector.AsyncVectorEnv steps several in processes of their own, which pays where one step of "
            "one takes longer than some 100 us",
        )


RULE = rule(__name__, check, note=note, title="Environments are stepped one after another")
