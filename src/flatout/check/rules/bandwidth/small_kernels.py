"""Many short pointwise kernels from one line, which one fused kernel would do.

Costs        Each kernel reads its inputs from the device's memory and writes its result back, and none is long enough to reach
             the memory's bandwidth.
Evidence     Pointwise kernels of one line on the device's own clock, and the bytes of its operators; a fused kernel's time from
             those bytes and the bandwidth that was measured on this machine.
Levers       memory.fusion, graph.compile
False alarm  Steps that the host bounds (the kernels hide behind launches); an optimizer's kernels; a line that runs one operator
             on many tensors, which nothing can fuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.machine.cost.accounting import group_by
from flatout.machine.cost.module_cures import compiling_failed
from flatout.machine.cost.roofline import bandwidth_bytes_per_s

_FEWEST_LAUNCHES: Final = 8
_FEWEST_OPERATORS: Final = 3
_SHORT_S: Final = 50e-6
_POINTWISE: Final = ("elementwise", "triton_poi", "pointwise")
_FUSED_LAUNCH_S: Final = 3e-6
"""Least time of a pointwise kernel on the device, estimated: an empty node of a CUDA graph takes 1 us on an H200."""


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line."""
    step, machine = evidence.device_step, evidence.machine
    if step is None or machine is None or not evidence.steps.is_device_bound:
        return
    pointwise = [k for k in step.kernels if any(name in k.name for name in _POINTWISE)]
    at_lines = [k for k in pointwise if k.source >= 0 and k.phase != "optimizer"]
    for source, kernels in group_by(at_lines, lambda k: k.source).items():
        num = sum(k.num_launches for k in kernels)
        cost_s = sum(k.seconds for k in kernels)
        if num < _FEWEST_LAUNCHES or cost_s / num > _SHORT_S:
            continue
        names = {k.op for k in kernels}
        rows = tuple(i for i, o in enumerate(evidence.operators) if o.source == source and o.op in names and o.bytes)
        num_fused = len({evidence.operators[i].op for i in rows if evidence.operators[i].phase != "backward"})
        if num_fused < _FEWEST_OPERATORS:
            continue
        moved = sum(evidence.operators[i].bytes * evidence.operators[i].num_calls for i in rows)
        fused_s = moved / num_fused / bandwidth_bytes_per_s(machine) + num / num_fused * _FUSED_LAUNCH_S
        gain_s = max(0.0, cost_s - fused_s)
        other = "" if compiling_failed(evidence) else ", or torch.compile the function"
        yield Finding(
            where=evidence.source_of(source),
            cost_s=min(cost_s, evidence.steps.step_s),
            saved_s=(0.4 * gain_s, 0.9 * gain_s),
            because=f"{num} pointwise kernels of {cost_s / num * 1e6:.1f} us each take {cost_s * 1e3:.2f} ms a step; one kernel "
            f"for the {num_fused} operators of the line would take about {fused_s * 1e3:.2f} ms by its traffic",
            edit=f"use torch's own function for the formula if there is one{other}",
            operators=rows,
        )


RULE = rule(__name__, check, title="Many short kernels that one would do")
