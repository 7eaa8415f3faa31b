"""The device runs below its clock.

Costs        Arithmetic and, less so, bandwidth in proportion to the clock, if the step is bound by the device.
Evidence     The clock over its maximum and the driver's reasons, read between two steps.
Levers       run.steady-clock
False alarm  A power limit under full load is normal for large products: it is said, not blamed. A device that waits for the host
             lowers its clock by itself, so nothing is said of steps that the device does not bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Note

_LOW: Final = 0.9


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note when the driver holds the clock back, or it is low for no stated reason."""
    step = evidence.device_step
    if step is None or not evidence.steps.is_device_bound:
        return
    reasons = ", ".join(step.throttle_reasons)
    if step.clock_fraction is None and not reasons:
        return
    clock = f"{step.clock_fraction:.0%} of its highest clock" if step.clock_fraction is not None else "an unknown clock"
    if reasons:
        yield Note(where=None, text=f"the device ran at {clock}; the driver holds it back: {reasons}")
    elif step.clock_fraction is not None and step.clock_fraction < _LOW:
        yield Note(where=None, text=f"the device ran at {clock}, and the driver gives no reason for it")


RULE = rule(__name__, note=note)
