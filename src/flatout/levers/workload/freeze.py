"""Gradients that no optimizer reads are not computed.

What        `requires_grad_(False)` on the parameters that no optimizer holds, at the model's first call.
Guarantee   EXACT: what is trained gets the same gradients.
Refuses     Runs in which every gradient is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams

if TYPE_CHECKING:
    from torch import nn


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """All modules whose gradients nobody reads, together."""
    modules = [m for u in evidence.unused_gradients for m in u.modules]
    if not modules:
        yield Refusal(lever=LEVER.id, because="every gradient is read by an optimizer")
        return
    told = [f.saved_s for f in findings]
    seconds = sum(u.seconds for u in evidence.unused_gradients)
    yield Candidate(
        lever=LEVER.id,
        parameters={"modules": tuple(sorted(modules))},
        saved_s=(sum(a for a, _ in told), sum(b for _, b in told)) if told else (0.0, seconds),
        where=findings[0].where if findings else None,
        because=f"{len(modules)} module(s) get gradients that no optimizer reads",
    )


def apply(seams: Seams, parameters: Parameters) -> None:
    """Freeze the own parameters of the named modules."""
    from flatout.levers.seams import name_of

    given = parameters["modules"]
    wanted = set(given if isinstance(given, (tuple, list)) else [str(given)])
    seen: dict[str, int] = {}

    def freeze(module: nn.Module) -> Callable[[], None] | None:
        kind = name_of(module)
        seen[kind] = seen.get(kind, 0) + 1
        title = kind if seen[kind] == 1 else f"{kind} ({seen[kind]})"
        found = []
        for path, inner in module.named_modules():
            if (f"{title}.{path}" if path else title) in wanted:
                found += [p for p in inner.parameters(recurse=False) if p.requires_grad]
        for parameter in found:
            parameter.requires_grad_(False)
        if not found:
            return None
        seams.note(LEVER.id)

        def undo() -> None:
            for parameter in found:
                parameter.requires_grad_(True)

        return undo

    seams.at_first_call(freeze)


LEVER = Lever(
    id="workload.freeze",
    title="No gradients that nobody reads",
    guarantee="exact",
    module=__name__,
    propose=propose,
    apply=apply,
)
