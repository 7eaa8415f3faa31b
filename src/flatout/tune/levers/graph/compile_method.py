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

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError, LeverRefused, PlanError
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters, string
from flatout.core.records.workload import Source
from flatout.machine.cost.accounting import milliseconds
from flatout.machine.cost.compiling import draws_in_model
from flatout.tune.levers.eager_draws import draw_as_eager
from flatout.tune.rewrite.calls import compiles_models
from flatout.tune.rewrite.imports import call_name, with_torch
from flatout.tune.rewrite.source import (
    code_of,
    function_at,
    nodes_of,
    parsed,
    place_parameters,
    pull,
    text_at,
    with_changes,
)

_SMALL_PART: Final = 0.1
_EFFORT: Final = 5.0
"""As of `graph.compile`."""
_MAY_COST: Final = 0.3
_LEAST_SAVED: Final = 0.2
"""Where a device waits for the host's launches of a small model."""
_MOST_SAVED: Final = 0.6
"""Of the host's time in the method: what one call of compiled code takes instead of hundreds of operators, in our judgement."""
_SLOW_DEVICE: Final = 1e12
"""FLOP/s that any GPU reaches in small products: a call that takes ten times as long as that waits for its host."""
_MODES: Final = ("default", "reduce-overhead")
_READS: Final = ("backward", "step", "item", "tolist", "numpy", "cpu")
"""What makes the graph end, or changes more than it returns."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it for the method in which most time is spent, where models are called in methods of modules."""
    if evidence.compilation is not None and evidence.compilation.num_graphs:
        raise LeverRefused("the script compiles already")
    calling = {
        where: evidence.source_of(model.source)
        for model in evidence.models
        if (where := _method(evidence, model.source))
    }
    seconds = {where: _seconds_in(evidence, *where) for where in calling}
    if not seconds:
        raise LeverRefused("the loop calls its models as they are, and no method of theirs that does")
    where = max(seconds, key=lambda w: seconds[w])
    line, spent_s = calling[where], seconds[where]
    if spent_s < _SMALL_PART * evidence.steps.whole_s or line is None:
        raise LeverRefused(f"{where[1]} takes {milliseconds(spent_s)} of a step")
    try:
        parameters: Parameters = {"file": place_parameters(evidence, line)["file"], "function": where[1]}
        edit(text_at(evidence, parameters), parameters)
    except EditError as e:
        raise LeverRefused(str(e)) from e
    if draws_in_model(evidence) or _draws(evidence, *where):
        parameters["fallback_random"] = True
    modes = _MODES if evidence.workload.device != "cpu" else _MODES[:1]
    least = _LEAST_SAVED if _waits_for_host(evidence, *where) else -_MAY_COST
    for share, mode in zip((1.0, 0.95), modes, strict=False):
        yield Candidate(
            parameters=parameters | {"mode": mode},
            saved_s=(share * least * spent_s, share * _MOST_SAVED * spent_s),
            where=line,
            because=f"{where[1]}, and the backward of what it computes, take {milliseconds(spent_s)} of a step",
        )


def _method(evidence: Evidence, source: int) -> tuple[str, str] | None:
    """File and name of the method that a line is in, other than a `forward`; None for a line of a plain function."""
    line = evidence.source_of(source)
    if line is None or line.is_installed or "." not in line.function or "<" in line.function:
        return None
    return None if line.function.endswith((".forward", ".__call__")) else (line.file, line.function)


def _is_in(line: Source | None, file: str, function: str) -> bool:
    return line is not None and (line.file, line.function) == (file, function)


def _seconds_in(evidence: Evidence, file: str, function: str) -> float:
    """Seconds of a step in a method, what it calls included, and its part of the backward pass."""
    forward_s = sum(
        t.seconds
        for t in evidence.lines
        if t.process == "main" and _is_in(evidence.source_of(t.source), file, function)
    )
    called_s = sum(model.calls * model.call_s for model in evidence.models)
    in_it_s = sum(
        model.calls * model.call_s
        for model in evidence.models
        if _is_in(evidence.source_of(model.source), file, function)
    )
    share = in_it_s / called_s if called_s else 0.0
    return max(forward_s, in_it_s) + share * evidence.steps.phases.get("backward", 0.0)


def _waits_for_host(evidence: Evidence, file: str, function: str) -> bool:
    """Whether the models that are called in a method are so small that a device waits for their launches."""
    called = [m for m in evidence.models if _is_in(evidence.source_of(m.source), file, function)]
    flop = sum(2.0 * m.num_parameters * max(1, m.batch_size) * m.calls for m in called)
    seconds = sum(m.call_s * m.calls for m in called)
    return evidence.workload.device != "cpu" and flop < 0.1 * _SLOW_DEVICE * seconds


def _draws(evidence: Evidence, file: str, function: str) -> bool:
    return any(
        word in t.text for t in evidence.sources if _is_in(t, file, function) for word in ("sample", "rand", "normal")
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
    module = parsed(text)
    name = string(parameters, "function")
    method = function_at(module, name)
    holder = next((c for c in nodes_of(cst.ClassDef, module) if c.name.value == name.split(".")[-2:][0]), None)
    if holder is None or not _is_module(module, holder):
        raise EditError(f"'{name}' is no method of a module")
    decorators = {code_of(d.decorator) for d in method.decorators}
    if compiles_models(module):
        raise EditError("the file compiles something already")
    if decorators & {"property", "staticmethod", "classmethod"} or method.asynchronous is not None:
        raise EditError(f"'{name}' is no plain method")
    called = {c.func.attr.value for c in nodes_of(cst.Call, method.body) if isinstance(c.func, cst.Attribute)}
    if reads := sorted(called & set(_READS)):
        raise EditError(f"'{name}' calls {', '.join(f'.{read}()' for read in reads)}")
    if m.findall(method.body, m.Yield()):
        raise EditError(f"'{name}' is a generator")
    module, torch = with_torch(module)
    mode = parameters.get("mode", "default")
    option = f', mode="{mode}"' if mode != "default" else ""
    decorator = cst.Decorator(cst.parse_expression(f"{torch}.compile(dynamic=False{option})"))
    method = function_at(module, name)
    return with_changes(module, {method: method.with_changes(decorators=[*method.decorators, decorator])}).code


def _is_module(module: cst.Module, holder: cst.ClassDef, depth: int = 0) -> bool:
    """Whether a class of the file is one of torch.nn.Module, as far as the file shows."""
    for base in holder.bases:
        if call_name(module, base.value).startswith("torch.nn."):
            return True
        inside = next((c for c in nodes_of(cst.ClassDef, module) if c.name.value == code_of(base.value)), None)
        if inside is not None and depth < len(module.body) and _is_module(module, inside, depth + 1):
            return True
    return False


LEVER = lever(
    __name__,
    propose,
    apply=apply,
    edit=edit,
    effort=_EFFORT,
    conflicts=("graph.compile", "graph.capture"),
    title="Compiled method",
)
