"""Memory is given back by hand in the middle of training.

Costs        gc.collect() walks over every Python object; torch.cuda.empty_cache() waits for the device and hands its memory back,
             which the next step asks for again.
Evidence     A clock around both functions, by line. What asking again costs is not in it.
Levers       memory.leave-cache
False alarm  Once an epoch, or between models: then it takes no share of a step.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding

_FUNCTIONS = ("gc.collect", "torch.cuda.empty_cache")


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line."""
    for use in evidence.uses:
        if use.name not in _FUNCTIONS or use.source < 0:
            continue
        often = f"{use.calls:.1f} times a step" if use.calls > 1.05 else "in every step"
        often = often if use.calls > 0.95 else f"once in {1 / use.calls:.0f} steps"
        yield Finding(
            regime="overhead",
            where=evidence.source_of(use.source),
            cost_s=min(use.seconds, evidence.steps.whole_s),
            saved_s=(0.8 * use.seconds, use.seconds),
            because=f"{use.name}() runs {often} and takes {use.seconds * 1e3:.2f} ms a step",
            edit="remove it: the memory is used again by itself; where Python's cycles pile up, call gc.collect() once an epoch",
        )


RULE = rule(__name__, check, title="Memory is given back by hand")
