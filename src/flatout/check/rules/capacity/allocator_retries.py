"""The device's allocator runs out of cached memory in a step and goes back to the driver.

Costs        cudaMalloc and cudaFree wait for the device and take milliseconds; a retry frees the whole cache and begins anew.
Evidence     Calls of cudaMalloc and cudaFree in a step after warm-up with the time the host spent in them, and the allocator's
             count of retries.
Levers       memory.expandable-segments
False alarm  The first steps, in which the cache grows; empty_cache in the loop, which has a rule of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding, Note
from flatout.machine.cost.accounting import group_by, idle_seconds, is_steady

_CALLS: Final = ("cudaMalloc", "cudaFree", "hipMalloc", "hipFree")
_EDIT: Final = "set PYTORCH_ALLOC_CONF=expandable_segments:True; else fewer different sizes, or less memory at the peak"


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line whose step-by-step allocations reach the driver."""
    step = evidence.device_step
    if step is None or not is_steady(evidence) or _clears_cache(evidence):
        return
    for source, waits in group_by([w for w in step.waits if w.call in _CALLS], lambda w: w.source).items():
        seconds = min(sum(w.seconds for w in waits), evidence.steps.step_s)
        # While the host waits the device works through its queue: only its idle time is lost for sure.
        saved_s = min(seconds, idle_seconds(evidence))
        yield Finding(
            where=evidence.source_of(source),
            cost_s=seconds,
            saved_s=(0.5 * saved_s, saved_s),
            because=f"{sum(w.num for w in waits)} calls of cudaMalloc and cudaFree in a step long after warm-up take "
            f"{seconds * 1e3:.2f} ms" + _retries(evidence),
            edit=_EDIT,
            basis="timed",
        )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note when the allocator had to begin anew."""
    if _retries(evidence) and not _clears_cache(evidence):
        yield Note(where=None, text=f"the device's memory is too tight or in pieces{_retries(evidence)}: {_EDIT}")


def _retries(evidence: Evidence) -> str:
    num = sum(m.num_retries for m in evidence.memory)
    return f"; its allocator freed its whole cache and tried again {num} times" if num else ""


def _clears_cache(evidence: Evidence) -> bool:
    return any(m.num_cache_clears > 0 for m in evidence.memory)


RULE = rule(__name__, check, note=note, title="The allocator goes back to the driver in every step")
