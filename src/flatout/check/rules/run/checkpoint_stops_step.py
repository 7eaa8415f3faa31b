"""The loop waits while a checkpoint is written.

Costs        Serialising the state and the disk's time, in the midst of the steps.
Evidence     Calls of torch.save (or safetensors) between two steps, with the line and the seconds they take.
Levers       runs.async-checkpoint
False alarm  A file saved so seldom that its share of a step is below the noise; what is saved after the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.machine.cost.accounting import uses_by_line

_NAMES: Final = ("torch.save", "safetensors.torch.save_file", "safetensors.torch.save_model")
_EVERY_STEP: Final = 0.5
_MIB: Final = 1 << 20


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line that saves."""
    for source, uses in uses_by_line(evidence, _NAMES).items():
        cost_s = sum(u.seconds for u in uses)
        calls = sum(u.calls for u in uses)
        often = "in every step" if calls >= _EVERY_STEP else f"every {1 / calls:.0f} steps"
        yield Finding(
            where=evidence.source_of(source),
            cost_s=cost_s,
            saved_s=(0.7 * cost_s, 0.98 * cost_s),
            because=f"{uses[0].name} {often} takes {cost_s / calls * 1e3:.2f} ms each time"
            + (f" for {uses[0].bytes / _MIB:.1f} MiB of tensors" if uses[0].bytes else "")
            + f", {cost_s * 1e3:.2f} ms of each step on average",
            edit="save every some hundred steps or when the score has improved; if it must be often, copy the state and "
            "write it in a thread (torch.distributed.checkpoint.async_save)",
            basis="timed",
        )


RULE = rule(__name__, check, title="Steps wait while a checkpoint is written")
