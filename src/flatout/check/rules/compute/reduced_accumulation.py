"""Half-precision products may add up in half precision although float32 was asked for.

Costs        Accuracy, not time: sums over a split inner dimension are rounded to bfloat16 or float16 in between.
Evidence     Half-precision products on a GPU, the switch that allows reduced sums (on by default), and a line that asked for
             exact float32 products or for deterministic algorithms.
Levers       workload.full-accumulation
False alarm  Runs that never asked for more: for them nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Note
from flatout.core.records.workload import Setting
from flatout.machine.cost.accounting import setting_of

_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
_SWITCHES = {"bfloat16": "bf16_reduced_precision_reduction", "float16": "fp16_reduced_precision_reduction"}


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield one note per dtype."""
    asked = next((s for s in evidence.workload.settings if _asks_for_more(s)), None)
    if asked is None or evidence.workload.device == "cpu":
        return
    used = {t.dtype for o in evidence.operators if o.op in _PRODUCTS for t in o.inputs}
    for dtype, switch in _SWITCHES.items():
        if dtype in used and setting_of(evidence, switch) == "True":
            yield Note(
                where=asked.source,
                text=f"{dtype} products may round partial sums to {dtype} although this line asks for accuracy; "
                f"torch.backends.cuda.matmul.allow_{switch} = False keeps them in float32",
            )


def _asks_for_more(setting: Setting) -> bool:
    exact = setting.name == "float32_matmul_precision" and setting.value == "highest"
    repeatable = setting.name == "deterministic_algorithms" and setting.value == "True"
    return (exact or repeatable) and setting.source is not None


RULE = rule(__name__, note=note, title="Sums in less precision than asked for")
