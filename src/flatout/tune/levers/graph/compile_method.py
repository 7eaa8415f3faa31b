"""A method of a module that the loop calls instead of the module is compiled, with all that it computes beside its layers.

What        `@torch.compile(dynamic=False)` on a method of a class of modules that calls them from outside `forward`: a policy's
            `get_action_and_value`, a model's `loss` or `log_prob`. `mode` is that of torch.compile.
Guarantee   BOUNDED: sums in other orders, fused multiply-adds. With `fallback_random` random numbers are drawn as they are
            without compiling, so that steps can be compared.
Refuses     Scripts that compile already; methods that run backward, step an optimizer or hand values to Python; methods that
            take a small part of a step; scripts whose modules are called as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from flatout.core.errors import EditError, LeverRefused, PlanError
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters, string
from flatout.machine.cost.accounting import milliseconds
from flatout.machine.cost.compiling import draws_in_model
from flatout.tune.levers.called_methods import draws_in, plain_method, slowest_method, with_decorator
from flatout.tune.levers.eager_draws import draw_as_eager
from flatout.tune.rewrite.calls import compiles_models
from flatout.tune.rewrite.imports import with_torch
from flatout.tune.rewrite.source import parsed, pull, text_at

_EFFORT: Final = 5.0
"""As of `graph.compile`."""
_MAY_COST: Final = 0.3
_LEAST_SAVED: Final = 0.2
"""Where a device waits for the host's launches of a small model."""
_MOST_SAVED: Final = 0.6
"""Of the host's time in the method: what one call of compiled code takes instead of hundreds of operators, in our judgement."""
_MODES: Final = ("default", "reduce-overhead")


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it for the method in which most time is spent, where models are called in methods of modules."""
    method = slowest_method(evidence)
    parameters = dict(method.parameters)
    try:
        edit(text_at(evidence, parameters), parameters)
    except EditError as e:
        raise LeverRefused(str(e)) from e
    if draws_in_model(evidence) or draws_in(evidence, method):
        parameters["fallback_random"] = True
    modes = _MODES if evidence.workload.device != "cpu" else _MODES[:1]
    least = _LEAST_SAVED if method.waits_for_host else -_MAY_COST
    for share, mode in zip((1.0, 0.95), modes, strict=False):
        yield Candidate(
            parameters=parameters | {"mode": mode},
            saved_s=(share * least * method.seconds, share * _MOST_SAVED * method.seconds),
            where=method.line,
            because=f"{method.line.function}, and the backward of what it computes, take "
            f"{milliseconds(method.seconds)} of a step",
        )


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Decorate the method in the text of its file."""
    mode = parameters.get("mode", "default")
    if mode not in _MODES:
        raise PlanError(f"mode {mode!r} is none of {', '.join(_MODES)}; see torch.compile")
    if parameters.get("fallback_random"):
        hooks.at_start(draw_as_eager)
    pull(LEVER.id, hooks, parameters, edit)


def edit(text: str, parameters: Parameters) -> str:
    """Write `@torch.compile(dynamic=False)` before the method.

    Raises EditError where it is no method of a module, or does what no graph holds.
    """
    module, name = parsed(text), string(parameters, "function")
    plain_method(module, name)
    if compiles_models(module):
        raise EditError("the file compiles something already")
    module, torch = with_torch(module)
    mode = parameters.get("mode", "default")
    option = f', mode="{mode}"' if mode != "default" else ""
    return with_decorator(module, name, f"{torch}.compile(dynamic=False{option})").code


LEVER = lever(
    __name__,
    propose,
    apply=apply,
    edit=edit,
    effort=_EFFORT,
    conflicts=("graph.compile", "graph.capture", "graph.capture-method"),
    title="Compiled method",
    errors=("torch._dynamo", "torch._inductor", "donated buffers"),
)
