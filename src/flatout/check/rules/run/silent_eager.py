"""A compiled function has hit the limit of recompilations and runs eagerly since, without an error.

Costs        What compiling had gained is gone for the rest of the run, and the check of all kept versions is paid in every call.
Evidence     dynamo's own record: the limit, the line whose check failed every time, and the steps before the limit (less what
             compiling took in them) beside the steps after it.
Levers       graph.dynamic-shapes
False alarm  Steps that are no slower than before the limit: then it is a note.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding, Note

_SLOWER: Final = 1.1
_EDIT: Final = (
    "make what changes a tensor, or keep it out of the compiled function (a counter, a Python number, a list that grows); for "
    "sizes torch.compile(..., dynamic=True) or torch._dynamo.mark_dynamic"
)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for the run when its steps are slower since the limit."""
    compilation = evidence.compilation
    if compilation is None or compilation.before_limit_s is None:
        return
    lost_s = evidence.steps.step_s - compilation.before_limit_s
    if evidence.steps.step_s < _SLOWER * compilation.before_limit_s or lost_s <= evidence.steps.noise_s:
        return
    limits = evidence.compile_events("limit")
    if not limits:
        return
    yield Finding(
        where=evidence.source_of(limits[0].source),
        cost_s=lost_s,
        saved_s=(0.5 * lost_s, lost_s),
        because=f"recompiled until the limit: the check `{limits[0].reason}` fails for every new value; a step took "
        f"{compilation.before_limit_s * 1e3:.2f} ms while it ran compiled (compiling left out), "
        f"{evidence.steps.step_s * 1e3:.2f} ms since",
        edit=_EDIT,
        basis="timed",
    )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note per line that hit the limit, and one where torch.compile was called and nothing came of it."""
    compilation = evidence.compilation
    if compilation is not None and compilation.compiled_at and not compilation.num_frames and evidence.steps.num_timed:
        yield Note(
            where=evidence.source_of(compilation.compiled_at[0]),
            text="torch.compile was called, but nothing was compiled in the steps seen: they run eagerly",
        )
    for event in evidence.compile_events("limit"):
        yield Note(
            where=evidence.source_of(event.source),
            text=f"hit torch.compile's limit of recompilations in step {event.last_step}; the function runs eagerly since. The "
            f"check that failed last: {event.reason}",
        )


RULE = rule(__name__, check, note=note, title="Compiled code was given up silently")
