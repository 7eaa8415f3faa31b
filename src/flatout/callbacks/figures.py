"""The figures of a report that go to a trainer's loggers."""

from __future__ import annotations

from flatout.core.records.evidence import Evidence


def figures_of(evidence: Evidence) -> dict[str, float]:
    """The median step's seconds, the share of each phase in it, and the peak of memory of each device in bytes.

    Nothing is there of what was not observed. Names hold units: 'flatout/step_s', 'flatout/forward_fraction',
    'flatout/cpu_peak_bytes', 'flatout/cuda_0_peak_bytes'.
    """
    steps = evidence.steps
    if not steps.num_timed or steps.whole_s <= 0:
        return {}
    figures = {"flatout/step_s": steps.step_s}
    figures |= {f"flatout/{p}_fraction": s / steps.whole_s for p, s in steps.phases_of_whole.items()}
    for memory in evidence.memory:
        peak = memory.measured_peak_bytes or memory.peak_bytes
        if peak:
            figures[f"flatout/{memory.device.replace(':', '_')}_peak_bytes"] = float(peak)
    return figures
