"""The model's kernels are launched by one CUDA graph instead of one by one.

What        `how='graphs'`: forward and backward of each root module are captured after a few equal calls (see
            `flatout.captured`) and replayed; calls of other shapes run as before. `how='compiled'`: dynamo and
            `backend='cudagraphs'`, which finds what can be captured by itself. The text is `captured(model)`, or a compile.
Guarantee   BOUNDED: the same kernels, but libraries may choose others of them. What a model returns is copied out of the graph.
Refuses     Processes without a CUDA device; devices that are busy all the time; shapes that change; scripts that compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from flatout.core.errors import EditError, LeverRefused, PlanError
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters
from flatout.machine.cost.accounting import main_model, milliseconds, model_seconds
from flatout.tune.levers.waiting_device import check_device_waits
from flatout.tune.rewrite.calls import compiles_models
from flatout.tune.rewrite.imports import with_import
from flatout.tune.rewrite.models import behind_models
from flatout.tune.rewrite.source import parsed

if TYPE_CHECKING:
    from torch import nn

_EFFORT: Final = 2.0
"""Warm-up calls and capture, or dynamo's tracing: 15 to 34 s where other trials took 12 to 15 s (H200, torch 2.11)."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it where a CUDA device waits for launches of always the same kernels."""
    check_device_waits(evidence)
    if main_model(evidence) is None:
        raise LeverRefused("no model whose calls could be captured was seen")
    steps = evidence.steps
    idle_s = steps.step_s - (steps.device_s or 0.0)
    most_s = min(idle_s, model_seconds(evidence))
    high_s = max([most_s, *(f.saved_s[1] for f in findings)])
    for share, how in ((1.0, "graphs"), (0.9, "compiled")):
        yield Candidate(
            parameters={"how": how},
            saved_s=(0.2 * share * most_s, share * high_s),
            because=f"the device idles {milliseconds(idle_s)} of a step, while the host launches kernels one by one",
        )


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Capture each root module that is on a CUDA device at its first call."""
    how = parameters.get("how", "graphs")
    if how not in ("graphs", "compiled"):
        raise PlanError(f"how {how!r} is neither 'graphs' nor 'compiled'")

    def capture(module: nn.Module) -> Callable[[], None] | None:
        from flatout.blocks.training.captured_calls import CapturedCalls
        from flatout.core.runtime.patches import replace_forward

        if any(p.device.type != "cuda" for p in module.parameters()):
            return None
        if how == "graphs":
            calls, forward = CapturedCalls(module, on_captured=lambda: hooks.note(LEVER.id)), module.forward
            return replace_forward(module, lambda *args, **kwargs: calls.run(forward, args, kwargs))
        before = module._compiled_call_impl
        module.compile(backend="cudagraphs")
        hooks.note(LEVER.id)
        return partial(setattr, module, "_compiled_call_impl", before)

    hooks.at_first_call(capture)


def edit(text: str, parameters: Parameters) -> str:
    """Write `captured(model)`, or `model.compile(backend="cudagraphs")`, after the construction of each model."""
    module = parsed(text)
    if compiles_models(module):
        raise EditError("the file compiles something already")
    if parameters.get("how") == "compiled":
        return behind_models(text, 'model.compile(backend="cudagraphs")\n')
    return behind_models(with_import(module, "flatout", "captured").code, "captured(model)\n")


LEVER = lever(
    __name__,
    propose,
    apply=apply,
    conflicts=("graph.compile", "graph.capture-update"),
    edit=edit,
    effort=_EFFORT,
    title="Captured graphs",
    errors=("captur",),
)
