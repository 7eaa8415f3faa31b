"""The optimizer keeps state for parameters that are not trained any more.

Costs        Two tensors of the parameter's size for Adam, one for momentum, and the gradient, all dead.
Evidence     Parameters with state that no backward of a watched step reached, whose gradient is none or nothing but zeros, and
             whose state was not written in the steps after it.
Levers       memory.drop-state
False alarm  Parameters that are trained now and then (experts, alternating optimizers): three steps more are watched.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.machine.cost.accounting import facts_named
from flatout.machine.cost.memory import main_memory

_NAMED = 3


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for all dead state together."""
    dead = sorted(facts_named(evidence, "dead-optimizer-state"), key=lambda f: -f.value)
    memory = main_memory(evidence)
    if not dead or memory is None:
        return
    total_bytes = round(sum(f.value for f in dead))
    names = ", ".join(f.module or "parameters outside modules" for f in dead[:_NAMED])
    more = f" and {len(dead) - _NAMED} more modules" if len(dead) > _NAMED else ""
    constructed = next((o.constructed for o in evidence.optimizers if o.constructed >= 0), -1)
    yield Finding(
        where=evidence.source_of(constructed),
        because=f"{total_bytes / 2**20:.1f} MiB of state and zero gradients belong to parameters that no backward reaches: "
        f"{names}{more}.",
        edit="make the optimizer from the parameters that are trained: "
        "[p for p in model.parameters() if p.requires_grad]; make it anew after freezing, and zero_grad(set_to_none=True)",
        module=dead[0].module,
        saved_bytes=total_bytes,
        device=memory.device,
    )


RULE = rule(__name__, check, title="Optimizer state of parameters that are not trained")
