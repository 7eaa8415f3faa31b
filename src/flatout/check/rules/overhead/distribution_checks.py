"""Distributions check their arguments and every value in every step.

Costs        Comparisons and reductions of all parameters at each construction and of the value at each `log_prob`, and a host
             read of each result: dozens of small operators around a few that compute.
Evidence     Seconds in the checks of torch.distributions (its base class's constructor and `_validate_sample`), by line.
Levers       none
False alarm  Hunting a NaN; distributions that are built once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.machine.cost.accounting import group_by

_GONE: Final = (0.85, 1.0)
"""Share of the checks' time that goes with them; the constructors that remain are a few attribute assignments."""


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for all lines together: one switch turns all checks off."""
    uses = [u for u in evidence.uses if u.name.startswith("Distribution.") and u.detail == "checked"]
    by_line = group_by(uses, lambda u: u.source)
    if not by_line:
        return
    lines = sorted(by_line, key=lambda s: -sum(u.seconds for u in by_line[s]))
    cost_s = sum(u.seconds for u in uses)
    low, high = _GONE
    yield Finding(
        regime="overhead",
        where=evidence.source_of(lines[0]),
        cost_s=cost_s,
        saved_s=(low * cost_s, high * cost_s),
        because=f"distributions check their arguments {sum(u.calls for u in uses):.0f} times a step, "
        f"{cost_s * 1e3:.2f} ms in all",
        edit="torch.distributions.Distribution.set_default_validate_args(False)  # once, after the imports",
        also=evidence.sources_of(lines),
        basis="timed",
    )


RULE = rule(__name__, check, title="Distributions check their arguments in every step")
