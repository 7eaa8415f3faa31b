"""An update, from the forward to the optimizer's step, is replayed from one CUDA graph.

What        The statements of a loop, or of a function, from the model's call, or `zero_grad`, to `optimizer.step()` become a
            function before the loop, decorated with `@captured_update(optimizer)` (from flatout), which is called in their place;
            for a loop over minibatches that does nothing else once, with all their arguments (`update.each`).
            What changes from round to round is passed to it, what is read later comes back, and what the host reads in between
            it reads after it. With `compiled` it is compiled first: a graph of fewer kernels, and minutes of compiling at most.
Guarantee   BOUNDED: the same kernels, with the optimizer's own that count its steps on the device; compiled ones take sums in
            other orders.
Refuses     Processes without a CUDA device; devices that are busy all the time; shapes that change; scripts that compile; updates
            in a library; loops that read values in the midst of an update and go on by them; gradient scalers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters
from flatout.machine.cost.accounting import milliseconds
from flatout.machine.cost.compiling import draws_in_model
from flatout.tune.levers.waiting_device import check_device_waits
from flatout.tune.rewrite.calls import compiles_models
from flatout.tune.rewrite.enclosing_blocks import (
    Loop,
    enclosing_loops,
    levels,
    only_small,
    parents_of,
    scope_of,
)
from flatout.tune.rewrite.imports import with_import
from flatout.tune.rewrite.source import (
    Change,
    code_of,
    find,
    first_line,
    fresh_name,
    nodes_of,
    place_parameters,
    pull,
    statements,
    text_at,
    with_changes,
    with_expression,
)
from flatout.tune.rewrite.update_values import (
    arguments_of_update,
    changing_attributes,
    parameters_not_passed,
    results_of_update,
)
from flatout.tune.rewrite.updates import names_bound, update_around
from flatout.tune.rewrite.updates_in_a_row import in_one_call

_BLOCK: Final = "captured_update"
_LEAST: Final = 0.3
"""Of what the host takes for an update: a PPO's of 320 small updates went from 0.88 s to 0.11 s (H200, torch 2.11)."""
_EFFORT, _EFFORT_COMPILED = 1.0, 5.0
"""A capture takes a fraction of a second; compiling takes as long as that of a model."""
_OF_BUSY: Final = 0.5
"""What compiling may save of the kernels' own time, at most: small ones take as long as their launches, fused or not."""
_MOST: Final = 3
_LONG: Final = 80
"""Characters of a call, above which its arguments get a line of their own."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it for the optimizers that step most, where a CUDA device waits for the launches of always the same kernels."""
    check_device_waits(evidence)
    if evidence.steps.kind != "training":
        raise LeverRefused("the loop trains nothing, or by hand")
    steps = evidence.steps
    idle_s = steps.step_s - (steps.device_s or 0.0)
    updating_s = sum(steps.phases.get(phase, 0.0) for phase in ("forward", "backward", "optimizer"))
    most_s = min(idle_s, updating_s)
    why = "no optimizer was seen to step"
    places: list[Parameters] = []
    for use in sorted(evidence.optimizers, key=lambda o: -o.calls)[:_MOST]:
        where = evidence.source_of(use.source)
        try:
            place = place_parameters(evidence, where) if where is not None else {}
            if not place or place in places:
                continue
            edit(text_at(evidence, place), place)
        except EditError as e:
            why = str(e)
            continue
        places.append(place)
        because = (
            f"the device idles {milliseconds(idle_s)} of a step, while the host launches an update's kernels one by one"
        )
        part = 1 / len(evidence.optimizers)
        saved_s = (part * _LEAST * most_s, part * most_s)
        yield Candidate(parameters=place, saved_s=saved_s, where=where, because=because)
        if not draws_in_model(evidence):  # compiled code would draw other numbers
            saved_s = (saved_s[0], saved_s[1] + part * _OF_BUSY * (steps.device_s or 0.0))
            yield Candidate(parameters=place | {"compiled": True}, saved_s=saved_s, where=where, because=because)
    if not places:
        raise LeverRefused(why)


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Change the text of the file before it runs."""
    pull(LEVER.id, hooks, parameters, edit)


def edit(text: str, parameters: Parameters) -> str:
    """Have the statements around the optimizer's step in a function that is captured.

    Raises EditError where it is not certain that the function does the same.
    """
    place = find(text, parameters)
    module, parents = place.module, parents_of(place.module)
    if compiles_models(module):
        raise EditError("the file compiles something already")
    loops = enclosing_loops(parents, place.statement)
    level = next(iter(levels(parents, place.statement)))
    if not loops and place.function is None:
        raise EditError("the optimizer steps in no loop, and in no function that one may call")
    small = only_small(place.statement)
    if not m.matches(small or place.statement, m.Expr(value=m.Call(func=m.Attribute(attr=m.Name("step")), args=[]))):
        raise EditError(f"'{first_line(module, place.statement)}' is no plain call of step()")
    around = loops[-1] if loops else place.function
    assert around is not None
    parameters_of_it = {one.name.value for one in m.findall(around, m.Param())} if not loops else set()  # type: ignore[attr-defined]
    found = update_around(place, level.block, level.at, names_bound(around) | parameters_of_it)
    steps = [
        c for s in found.inside for c in nodes_of(cst.Call, s) if m.matches(c.func, m.Attribute(attr=m.Name("step")))
    ]
    optimizers = list(dict.fromkeys(code_of(cst.ensure_type(c.func, cst.Attribute).value) for c in steps))
    changing = {
        code: fresh_name(module, code.rpartition(".")[2])
        for code in changing_attributes(module, around, found, optimizers)
    }
    found = found._replace(inside=[_with_names_for(one, changing) for one in found.inside])
    name = fresh_name(module, "update")
    passed_in = parameters_of_it - parameters_not_passed(found.inside, optimizers, place.owner is not None, around)
    arguments = arguments_of_update(found.inside, names_bound(around) | passed_in)
    results = results_of_update(place, found, level.block)
    passed = ", ".join([*arguments, *changing])
    arguments += changing.values()
    options = ["compiled=True"] if parameters.get("compiled") else []
    [function] = statements(
        f"@{_BLOCK}({', '.join([*optimizers, *options])})\ndef {name}({', '.join(arguments)}):\n    pass\n"
    )
    inside = [found.inside[0].with_changes(leading_lines=()), *found.inside[1:]]
    if results:
        inside += statements(f"return {', '.join(results)}\n")
    function = cst.ensure_type(function, cst.FunctionDef).with_changes(body=cst.IndentedBlock(inside))
    target = f"{', '.join(results)} = " if results else ""
    is_long = len(target) + len(name) + len(passed) > _LONG
    [call] = statements(f"{target}{name}(\n    {passed}\n)\n" if is_long else f"{target}{name}({passed})\n")
    lines = found.inside[0].leading_lines  # type: ignore[attr-defined]
    changes: dict[cst.CSTNode, Change] = dict.fromkeys(level.block[found.first : found.last + 1], ())
    if isinstance(around, cst.FunctionDef):
        blank = [cst.EmptyLine(indent=False)]
        function = function.with_changes(leading_lines=[*blank, *(one for one in lines if one.comment is not None)])
        changes[level.block[found.first]] = [
            *found.before,
            function,
            call.with_changes(leading_lines=blank),
            *found.after,
        ]
        return with_import(with_changes(module, changes), "flatout", _BLOCK).code
    scope = module if place.function is None else scope_of(module, place.function)
    is_alone = bool(loops) and not results and not changing
    in_a_row = in_one_call(loops, level.block, found, name, arguments, scope) if is_alone else None
    if in_a_row is not None:
        changes = {loops[0]: [in_a_row]}
    else:
        changes[level.block[found.first]] = [*found.before, call.with_changes(leading_lines=lines), *found.after]
    changed = with_changes(module, changes)
    at = _same_loop(changed, module, around)
    return with_import(_with_before(changed, at, function), "flatout", _BLOCK).code


def _with_names_for(statement: cst.BaseStatement, attributes: Mapping[str, str]) -> cst.BaseStatement:
    """A statement that reads these names in the place of attributes."""
    changes: dict[cst.CSTNode, Change] = {
        one: cst.Name(attributes[code])
        for one in nodes_of(cst.Attribute, statement)
        if (code := code_of(one)) in attributes
    }
    return with_changes(statement, changes) if changes else statement


def _with_before(module: cst.Module, loop: Loop, function: cst.FunctionDef) -> cst.Module:
    """The file with a function before a loop, which keeps its comments."""
    comments = list(loop.leading_lines)
    while comments and comments[0].comment is None:
        comments.pop(0)
    block = next((b for b in nodes_of(cst.IndentedBlock, module) if any(one is loop for one in b.body)), None)
    blank = [cst.EmptyLine(indent=False)] * (2 if block is None else 1)
    new = [function.with_changes(leading_lines=blank), loop.with_changes(leading_lines=[*blank, *comments])]
    body = [two for one in (block or module).body for two in (new if one is loop else [one])]
    if block is None:
        return module.with_changes(body=body)
    return with_expression(module, block, block.with_changes(body=body))


def _same_loop(changed: cst.Module, module: cst.Module, loop: Loop) -> Loop:
    """The loop in the changed tree: the one at the same place among the loops that begin before it."""
    number = next(i for i, one in enumerate(m.findall(module, m.For() | m.While())) if one is loop)
    found = m.findall(changed, m.For() | m.While())[number]
    assert isinstance(found, (cst.For, cst.While))
    return found


LEVER = lever(
    __name__,
    propose,
    apply=apply,
    edit=edit,
    is_local=True,
    effort=lambda parameters: _EFFORT_COMPILED if parameters.get("compiled") else _EFFORT,
    conflicts=("graph.compile", "graph.capture", "graph.compile-method"),
    title="Captured update",
    errors=("captur", "torch._dynamo", "torch._inductor"),
)
