"""Distributions check their arguments and every value in every step.

Costs        Comparisons and reductions of all parameters at each construction and of the value at each `log_prob`, and a host
             read of each result: dozens of small operators around a few that compute.
Evidence     Seconds in the checks of torch.distributions (its base class's constructor and `_validate_sample`), by line, without
             what watching them took; the comparisons and reductions of these lines in the phases of the checks are its operators.
Levers       graph.distribution-checks-off
False alarm  Hunting a NaN; distributions that are built once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.usage import CallUse
from flatout.machine.cost.accounting import group_by

_GONE: Final = (0.85, 1.0)
"""Share of the checks' time that goes with them; the constructors that remain are a few attribute assignments."""
_CHECKS: Final = re.compile(
    r"aten\.(ge|gt|le|lt|eq|ne|isfinite|isnan|abs|all|_is_all_true|logical_and|bitwise_and|is_nonzero|_local_scalar_dense)"
)
"""Operators in torch.distributions.constraints, and those that read their results."""


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for all lines together: one switch turns all checks off."""
    uses = [u for u in evidence.uses if u.name.startswith("Distribution.") and u.detail == "checked"]
    by_line = group_by(uses, lambda u: u.source)
    if not by_line:
        return
    lines = sorted(by_line, key=lambda s: -sum(u.seconds for u in by_line[s]))
    cost_s = sum(_lawful_s(evidence, phase, own) for phase, own in group_by(uses, lambda u: u.phase).items())
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
        operators=_operators(evidence, uses),
        basis="timed",
    )


def _lawful_s(evidence: Evidence, phase: str, uses: list[CallUse]) -> float:
    """Seconds of these uses, no more than the phase has that they are in."""
    seconds = sum(u.seconds for u in uses)
    phases = evidence.steps.phases
    # What runs in evaluation mode in each step (a policy that acts) is no evaluation, and is part of the phase "no_grad".
    names = ("evaluation", "no_grad") if phase == "evaluation" else (phase,)
    limits = [phases[name] for name in names if name in phases]
    return min(seconds, sum(limits)) if limits else seconds


def _operators(evidence: Evidence, uses: list[CallUse]) -> tuple[int, ...]:
    """The operators of the checks: so that no other finding claims their time, nor the phase they are in, besides."""
    places = {(u.source, u.phase) for u in uses}
    rows = enumerate(evidence.operators)
    return tuple(i for i, o in rows if (o.source, o.phase) in places and _CHECKS.fullmatch(o.op))


RULE = rule(__name__, check, title="Distributions check their arguments in every step")
