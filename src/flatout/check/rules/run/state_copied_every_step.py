"""The model's state is copied in the midst of the steps, whether the copy is needed or not.

Costs        A new tensor for every parameter and buffer, the copying, and Python's walk over the state.
Evidence     Calls of copy.deepcopy on modules or dicts of tensors, or clones of a state_dict, with their seconds.
Levers       graph.copy-when-needed
False alarm  Copies of settings (no tensors in them), copies before the loop or at its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.machine.cost.accounting import uses_by_line

_COPIES: Final = ("aten.clone", "aten.copy_", "aten._to_copy")
_FEWEST_CLONES: Final = 2.0
_MIB: Final = 1 << 20


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line that copies state."""
    for source, uses in uses_by_line(evidence, ("copy.deepcopy", "Module.state_dict", "Optimizer.state_dict")).items():
        copies = [u for u in uses if u.name == "copy.deepcopy" and u.detail in ("module", "tensors")]
        rows = tuple(
            i
            for i, o in enumerate(evidence.operators)
            if o.source == source and o.phase not in ("forward", "backward") and o.op.startswith("aten.")
        )
        clones = sum(evidence.operators[i].num_calls for i in rows if evidence.operators[i].op in _COPIES)
        if copies:
            cost_s = sum(u.seconds for u in uses)
            calls = sum(u.calls for u in copies)
            what = "copy.deepcopy of a module" if copies[0].detail == "module" else "copy.deepcopy of tensors"
        elif clones >= _FEWEST_CLONES:
            cost_s = sum(u.seconds for u in uses) + sum(evidence.operators[i].total_s for i in rows)
            calls, what = sum(u.calls for u in uses), f"a state_dict whose {clones:.0f} tensors are cloned"
        else:
            continue
        num_bytes = max(u.bytes for u in uses)
        yield Finding(
            where=evidence.source_of(source),
            cost_s=cost_s,
            saved_s=(0.8 * cost_s, cost_s),
            because=f"{what}, {calls:.2g} times a step, takes {cost_s * 1e3:.2f} ms of each step"
            + (f" for {num_bytes / _MIB:.1f} MiB" if num_bytes else ""),
            edit="copy only when the score has improved, into tensors made once before the loop (torch._foreach_copy_), or save "
            "to a file instead",
            operators=rows,
            basis="timed",
        )


RULE = rule(__name__, check, title="The model's state is copied again and again")
