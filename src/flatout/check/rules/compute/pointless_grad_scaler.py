"""A GradScaler scales losses that need no scaling.

Costs        A pass over every gradient that unscales it and looks for infinity, a host read, and the scaling itself.
Evidence     Calls of an enabled GradScaler while autocast computes in bfloat16 or not at all (only float16 underflows), with the
             time of the scaler's operators.
Levers       graph.no-grad-scaler
False alarm  float16, the case it is made for; a scaler made with enabled=False.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.machine.cost.accounting import uses_by_line

_NAMES: Final = ("GradScaler.scale", "GradScaler.update")


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for the run."""
    lines = uses_by_line(evidence, _NAMES)
    uses = [u for us in lines.values() for u in us if "enabled=True" in u.detail]
    if not uses or any("autocast=float16" in u.detail for u in uses) or _has_half_weights(evidence):
        return
    rows = tuple(i for i, o in enumerate(evidence.operators) if o.op.startswith("aten._amp"))
    call_s = sum(u.seconds for u in uses)
    in_rows_s = sum(evidence.operators[i].total_s for i in rows if evidence.operators[i].source not in lines)
    wait_s = sum(r.wait_s for r in evidence.host_reads if r.on_device and r.source in lines)
    cost_s = call_s + in_rows_s + wait_s
    dtype = "bfloat16" if any("autocast=bfloat16" in u.detail for u in uses) else "float32"
    yield Finding(
        where=evidence.source_of(uses[0].source),
        cost_s=cost_s,
        saved_s=(0.7 * cost_s, cost_s),
        because=f"the scaler is enabled though the model computes in {dtype}, whose gradients do not underflow; its calls and "
        f"operators take {cost_s * 1e3:.2f} ms of each step",
        edit="GradScaler(enabled=False), or plain loss.backward() and optimizer.step()",
        also=evidence.sources_of(lines),
        operators=rows,
        basis="timed",
    )


def _has_half_weights(evidence: Evidence) -> bool:
    return any(t.dtype == "float16" for o in evidence.operators for t in o.inputs)


RULE = rule(__name__, check, title="A GradScaler without float16")
