"""The model compiled: its operators fused into few kernels, Python out of the way.

What        `model.compile(...)` at its first call, in place.
Guarantee   BOUNDED: sums in other orders, fused multiply-adds. Random masks (dropout) are other numbers of the same distribution.
Refuses     Scripts that compile already; models whose calls are a small part of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from flatout.cost.accounting import model_seconds
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams

if TYPE_CHECKING:
    from torch import nn

_SMALL_PART = 0.1


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """The default mode."""
    if evidence.compilation is not None and evidence.compilation.num_graphs:
        yield Refusal(lever=LEVER.id, because="the script compiles already")
        return
    busy_s = model_seconds(evidence)
    if busy_s < _SMALL_PART * evidence.steps.whole_s:
        share = busy_s / evidence.steps.whole_s if evidence.steps.whole_s else 0.0
        yield Refusal(lever=LEVER.id, because=f"forward and backward are {share:.0%} of a step")
        return
    told = [f.saved_s for f in findings]
    low, high = max((a for a, _ in told), default=0.0), max((b for _, b in told), default=0.0)
    yield Candidate(
        lever=LEVER.id,
        saved_s=(min(low, 0.1 * busy_s), min(busy_s, max(high, 0.5 * busy_s))),
        because=f"forward and backward take {busy_s * 1e3:.2f} ms of a step",
    )


def apply(seams: Seams, parameters: Parameters) -> None:
    """Compile each root module that is trained or called, when it is first called."""
    options: dict[str, Any] = {k: v for k, v in parameters.items() if k in ("mode", "dynamic", "backend")}

    def compile_it(module: nn.Module) -> Callable[[], None]:
        before = module._compiled_call_impl
        module.compile(**options)
        seams.note(LEVER.id)

        def undo() -> None:
            module._compiled_call_impl = before

        return undo

    seams.at_first_call(compile_it)


LEVER = Lever(
    id="graph.compile",
    title="Compiled model",
    guarantee="bounded",
    module=__name__,
    propose=propose,
    apply=apply,
)
