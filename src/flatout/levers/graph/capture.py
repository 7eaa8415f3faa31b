"""The model's kernels are launched by one CUDA graph instead of one by one.

What        `how='graphs'`: forward and backward of each root module are captured after a few equal calls
            (`torch.cuda.make_graphed_callables`) and replayed; calls of other shapes run as before. `how='compiled'`: dynamo and
            `backend='cudagraphs'`, which finds what can be captured by itself.
Guarantee   BOUNDED: the same kernels, but libraries may choose others of them. What a model returns is copied out of the graph.
Refuses     Processes without a CUDA device; devices that are busy all the time; shapes that change; scripts that compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from flatout.cost.accounting import main_model, milliseconds, model_seconds
from flatout.cost.compiling import has_changing_shapes
from flatout.errors import EditError, PlanError
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams

if TYPE_CHECKING:
    from torch import nn


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """Where a CUDA device waits for launches of always the same kernels."""
    why_not = _why_not(evidence)
    if why_not:
        yield Refusal(lever=LEVER.id, because=why_not)
        return
    steps = evidence.steps
    idle_s = steps.step_s - (steps.device_s or 0.0)
    most_s = min(idle_s, model_seconds(evidence))
    high_s = max([most_s, *(f.saved_s[1] for f in findings)])
    model = main_model(evidence)
    is_called_once = model is not None and evidence.models[model].calls < 1.5
    for share, how in ((1.0, "graphs"), (0.9, "compiled")) if is_called_once else ((1.0, "compiled"),):
        yield Candidate(
            lever=LEVER.id,
            parameters={"how": how},
            saved_s=(0.2 * share * most_s, share * high_s),
            because=f"the device idles {milliseconds(idle_s)} of a step, while the host launches kernels one by one",
        )


def _why_not(evidence: Evidence) -> str:
    if evidence.steps.device_s is None:
        return "no CUDA device"
    if evidence.compilation is not None and evidence.compilation.num_graphs:
        return "the script compiles; there mode='reduce-overhead' captures graphs"
    if evidence.steps.is_device_bound:
        return "the device is busy nearly all of the step"
    if has_changing_shapes(evidence):
        return "shapes change from step to step; a graph has fixed ones"
    if main_model(evidence) is None:
        return "no model whose calls could be captured was seen"
    return ""


def apply(seams: Seams, parameters: Parameters) -> None:
    """Capture each root module that lies on a CUDA device, when it is first called."""
    how = parameters.get("how", "graphs")
    if how not in ("graphs", "compiled"):
        raise PlanError(f"how {how!r} is neither 'graphs' nor 'compiled'")

    def with_graphs(module: nn.Module) -> Callable[[], None] | None:
        from flatout.levers.graphed import GraphedForward, captured_on_device

        if any(p.device.type != "cuda" for p in module.parameters()):
            return None
        module.forward = GraphedForward(module, captured_on_device, lambda: seams.note(LEVER.id))

        def undo() -> None:
            del module.forward

        return undo

    def compiled(module: nn.Module) -> Callable[[], None] | None:
        if any(p.device.type != "cuda" for p in module.parameters()):
            return None
        before = module._compiled_call_impl
        module.compile(backend="cudagraphs")
        seams.note(LEVER.id)

        def undo() -> None:
            module._compiled_call_impl = before

        return undo

    seams.at_first_call(with_graphs if how == "graphs" else compiled)


def edit(text: str, parameters: Parameters) -> str:
    """`model.compile(backend="cudagraphs")` behind the making of the model."""
    from flatout.levers.syntax.models import behind_model

    if parameters.get("how") != "compiled":
        raise EditError("torch.cuda.make_graphed_callables needs sample inputs, which only a run can show")
    return behind_model(text, 'model.compile(backend="cudagraphs")\n')


LEVER = Lever(
    id="graph.capture",
    title="Captured graphs",
    guarantee="bounded",
    module=__name__,
    propose=propose,
    apply=apply,
    conflicts=("graph.compile",),
    edit=edit,
)
