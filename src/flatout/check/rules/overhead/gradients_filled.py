"""Gradients are filled with zeros and then added to, instead of being dropped.

Costs        A write of every gradient, and in the backward an addition for every parameter where the gradient could simply be
             kept.
Evidence     zero_grad(set_to_none=False), the fill operators on its line, and the additions of the backward pass.
Levers       memory.gradients-to-none
False alarm  Gradients that are added up over several micro-batches: of their additions only one per parameter goes away.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.machine.cost.accounting import uses_by_line

_NAMES: Final = ("Optimizer.zero_grad", "Module.zero_grad")
_FILLS: Final = ("aten.zero_", "aten._foreach_zero_", "aten.fill_")


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line that fills gradients."""
    for source, uses in uses_by_line(evidence, _NAMES).items():
        if all(u.detail != "set_to_none=False" for u in uses):
            continue
        fills = [i for i, o in enumerate(evidence.operators) if o.source == source and o.op in _FILLS]
        if not fills:
            continue
        backward = [i for i, o in enumerate(evidence.operators) if o.phase == "backward" and not o.module]
        adds = [i for i in backward if evidence.operators[i].op == "aten.add_"]
        num_adds = sum(evidence.operators[i].num_calls for i in adds)
        num_tensors = sum(o.num_tensors for o in evidence.optimizers)
        num_fills = max(sum(evidence.operators[i].num_calls for i in fills), num_tensors)
        needless = min(1.0, num_fills / num_adds) if num_adds else 0.0
        fill_s = sum(evidence.operators[i].total_s for i in fills)
        add_s = needless * sum(evidence.operators[i].total_s for i in adds)
        yield Finding(
            regime="bandwidth",
            where=evidence.source_of(source),
            cost_s=fill_s + add_s,
            saved_s=(0.6 * (fill_s + add_s), fill_s + add_s),
            because=f"set_to_none=False fills {num_fills:.0f} gradients with zeros ({fill_s * 1e3:.2f} ms), and the backward "
            f"adds to them ({add_s * 1e3:.2f} ms) where it could keep its own",
            edit="zero_grad() with torch's default, set_to_none=True",
            operators=(*fills, *adds),
            basis="timed",
        )


RULE = rule(__name__, check, title="Gradients filled with zeros", rewrites_line=True)
