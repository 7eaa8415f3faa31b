"""Loops whose iterations are independent, written as one call of torch.vmap, and what reads their results.

The two ways there differ in what an iteration is given (`LoopInputs`); what it computes and hands over is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import libcst as cst
import msgspec
from libcst import matchers as m

from flatout.core.errors import EditError
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Parameters
from flatout.core.records.workload import Source
from flatout.machine.cost.accounting import step_loops
from flatout.tune.rewrite.bodies import BodyLifter, Result, assignment_targets, statements_of
from flatout.tune.rewrite.enclosing_blocks import parents_of
from flatout.tune.rewrite.imports import with_torch
from flatout.tune.rewrite.iterations import Iteration, check_unread
from flatout.tune.rewrite.loop_lifting import Lifter
from flatout.tune.rewrite.loop_results import Changes, as_tensor, handed_over, listed, replace_uses, start_of, uses_of
from flatout.tune.rewrite.operands import atom
from flatout.tune.rewrite.source import (
    SourcePlace,
    assigned_in,
    code_of,
    expression,
    find,
    fresh_name,
    names_in,
    nodes_of,
    statements,
    with_changes,
    with_expression,
)

_WIDTH: Final = 100
"""Calls that would get longer get a function of their own."""

Block: TypeAlias = "Sequence[cst.BaseStatement]"


class Loop(NamedTuple):
    """A loop as it is written, or a comprehension as a loop that appends."""

    module: cst.Module
    torch: str
    target: cst.BaseExpression
    over: cst.BaseExpression
    block: Block


class LoopInputs(NamedTuple):
    """The inputs of an iteration, its body for them, and statements that must come first."""

    iteration: Iteration
    block: Block
    before: Block = ()


class _Batched(NamedTuple):
    """The call that computes all iterations, and the definition before it if there is one."""

    before: list[cst.BaseStatement]
    call: cst.BaseExpression


def findings_in_loops(evidence: Evidence, findings: Sequence[Finding]) -> list[Finding]:
    """The findings with the lines whose loops may be what one edit replaces: their own, and those that call them."""
    return [msgspec.structs.replace(f, where=None, also=tuple(_lines_around(evidence, f))) for f in findings]


def _lines_around(evidence: Evidence, finding: Finding) -> Iterator[Source]:
    """The finding's lines, those that call them, and each of them as if its inner loops were not there; no loop over steps."""
    own = step_loops(evidence)
    for source in (s for s in (finding.where, *finding.also) if s is not None):
        callers = evidence.callers.get(evidence.sources.index(source), ()) if source in evidence.sources else ()
        for one in (source, *(evidence.sources[c] for c in callers)):
            for num in range(len(one.loops), 0, -1):
                if (one.file, one.loops[num - 1]) not in own:
                    yield msgspec.structs.replace(one, loops=one.loops[:num])


def batched(text: str, parameters: Parameters, open_: Callable[[Loop], LoopInputs]) -> str:
    """The text with the loop at the place as one call; `open_` chooses the inputs of an iteration.

    Raises EditError where that is not certain.
    """
    place = find(text, parameters)
    torch = with_torch(place.module)[1]
    if isinstance(place.statement, cst.For):
        changed = _without_loop(place, place.statement, torch, open_)
    else:
        changed = _without_comprehension(place, torch, open_)
    return with_torch(changed)[0].code


def _without_loop(place: SourcePlace, loop: cst.For, torch: str, open_: Callable[[Loop], LoopInputs]) -> cst.Module:
    if loop.orelse is not None or loop.asynchronous is not None:
        raise EditError("the loop has more than a body")
    block = statements_of(loop.body)
    local = assigned_in(block) | names_in(loop.target)
    opened = open_(Loop(place.module, torch, loop.target, loop.iter, block))
    lifted, body = _lifted(place.module, opened.iteration, opened.block, torch)
    results = body.results
    if not results:
        raise EditError("nothing leaves the loop")
    check_unread(parents_of(place.module), place, local - {code_of(r.target) for r in results})
    new, changes = _handed_over(place, opened.iteration, lifted, results, torch)
    changes[place.statement] = _after(opened.before, new)
    return with_changes(place.module, changes)


def _lifted(
    module: cst.Module, iteration: Iteration, block: Sequence[cst.CSTNode], torch: str
) -> tuple[Lifter, BodyLifter]:
    carried = assignment_targets(block, set(iteration.names))
    fixed = frozenset(set(iteration.names) - assigned_in(block))
    lifter = Lifter(module, torch, dict(iteration.names), counter=iteration.counter, carried=carried, fixed=fixed)
    body = BodyLifter(lifter, counter=iteration.counter)
    lifter.statements += iteration.unpacking
    body.lift(block)
    names = [code_of(r.target) for r in body.results]
    if len(set(names)) < len(names):
        raise EditError(f"'{next(n for n in names if names.count(n) > 1)}' is added to more than once")
    return lifter, body


def _handed_over(
    place: SourcePlace, iteration: Iteration, lifter: Lifter, results: Sequence[Result], torch: str
) -> tuple[list[cst.BaseStatement], Changes]:
    """What stands in place of the loop, and what else changes because of it."""
    changes: Changes = {}
    counted = [r for r in results if _is_shared(r)]
    results = [r for r in results if not _is_shared(r)]
    after: list[cst.BaseStatement] = []
    for result in counted:
        if iteration.length is None or result.how not in ("add", "subtract"):
            raise EditError(f"'{code_of(result.target)}' gets the same in each iteration")
        after += _counted(result, iteration.length)
    if not results:
        raise EditError("nothing is computed in the loop")
    grouped = _grouped(place, iteration, results, changes, torch)
    if grouped is not None:
        return grouped + after, changes
    outs = {code_of(o): o for r in results for o in _outs_of(r, lifter)}
    names = _names(place, results, lifter)
    batched = _call(place.module, iteration, lifter, list(outs.values()), list(names.values()), torch)
    outputs = {next(iter(outs)): batched.call} if len(outs) == 1 else {c: cst.Name(n) for c, n in names.items()}
    new: list[cst.BaseStatement] = []
    if len(outs) > 1:
        new += statements(f"{', '.join(names.values())} = {{call}}\n", call=batched.call)
    for result in results:
        parts = [outputs[code_of(o)] for o in _outs_of(result, lifter)]
        new += handed_over(place, iteration, result, parts, changes, torch)
    if batched.before:
        new[0] = _after_line(new[0])
    return [*_insert_before(place, batched.before, changes), *new, *after], changes


def _is_shared(result: Result) -> bool:
    return not result.value.is_batched and result.condition is None and not result.keys


def _counted(result: Result, length: cst.BaseExpression) -> list[cst.BaseStatement]:
    """`count += 1` in each iteration."""
    each = result.value.node
    total = length if code_of(each) == "1" else expression("{n} * {x}", n=atom(length), x=atom(each))
    sign = "+" if result.how == "add" else "-"
    return statements(f"{{t}} {sign}= {{x}}\n", t=result.target, x=total)


def _grouped(
    place: SourcePlace, iteration: Iteration, results: Sequence[Result], changes: Changes, torch: str
) -> list[cst.BaseStatement] | None:
    """Sums or means of the rows of each group, all groups at once."""
    group, length = results[0].value.group, iteration.length
    is_list = results[0].how == "append" and isinstance(results[0].target, cst.Name) and results[0].condition is None
    is_by_number = iteration.counter == iteration.parameters[0]
    if len(results) > 1 or group is None or length is None or not is_list or not is_by_number:
        return None
    name = code_of(results[0].target)
    new: list[cst.BaseStatement] = []
    rows, owner = group.rows, group.owner
    if not isinstance(rows, cst.Name):
        new += statements("{n} = {rows}\n", n=cst.Name(fresh_name(place.module, "rows")), rows=rows)
        rows = cst.Name(fresh_name(place.module, "rows"))
    shape = "{n}, *{rows}.shape[1:]" if group.is_by_row else "{n}"
    call = expression(
        f"{{rows}}.new_zeros({shape}).index_add(0, {{owner}}, {{rows}})", n=length, rows=rows, owner=owner
    )
    if group.how == "mean":
        new += statements("{t} = {x}\n", t=cst.Name(name), x=call)
        along = ".unsqueeze(1)" if group.is_by_row else ""
        counts = f"{{t}} / {torch}.bincount({{owner}}, minlength={{n}}){along}"
        call = expression(counts, t=cst.Name(name), owner=owner, n=length)
    return new + listed(place, name, call, is_number=False, changes=changes)


def _names(place: SourcePlace, results: Sequence[Result], lifter: Lifter) -> dict[str, str]:
    """A name for each thing that iterations return, by its code."""
    found: dict[str, str] = {}
    for result in results:
        base = _tail(result.target)
        is_anew = isinstance(result.target, cst.Name) and start_of(place, result) is not None
        for n, out in enumerate(_outs_of(result, lifter)):
            if code_of(out) in found:
                continue
            is_key = n < len(result.keys)
            if is_key:
                wanted = code_of(out) if isinstance(out, cst.Name) else f"{base}_at"
            else:
                wanted = f"{base}_kept" if n == 1 and result.how == "append" else base
            if isinstance(result.target, cst.Name) and wanted == base and not is_anew:
                wanted = f"all_{base}"
            name = wanted if wanted == base and is_anew else _fresh(place.module, wanted, found)
            found[code_of(out)] = name
    return found


def _fresh(module: cst.Module, wanted: str, taken: Mapping[str, str]) -> str:
    """A name that neither the file nor these have."""
    plural = wanted if wanted.endswith("s") else f"{wanted}s"
    name = next((n for n in (wanted, plural) if n not in names_in(module)), f"all_{plural}")
    return fresh_name(module, name, taken=taken.values())


def _outs_of(result: Result, lifter: Lifter) -> list[cst.BaseExpression]:
    """What an iteration returns for a result."""
    value, condition = result.value.node, result.condition
    if result.how == "count":
        return [*result.keys, *([condition] if condition is not None else [])]
    if result.how == "scatter":
        return [*result.keys, *([value] if result.value.is_batched else [])]
    if condition is None:
        return [value]
    if result.how in ("add", "subtract"):
        return [condition] if code_of(value) == "1" else [lifter.where(condition, value, cst.Integer("0"))]
    return [value, condition]


def _call(
    module: cst.Module,
    iteration: Iteration,
    lifter: Lifter,
    outs: Sequence[cst.BaseExpression],
    names: Sequence[str],
    torch: str,
) -> _Batched:
    used = {n for one in (*lifter.statements, *outs) for n in names_in(one)}
    used_inputs = [(p, x) for p, x in zip(iteration.parameters, iteration.inputs, strict=True) if p in used]
    if not used_inputs:
        raise EditError("what the loop computes is the same in each iteration")
    inputs = ", ".join(code_of(x) for _, x in used_inputs)
    parameters = ", ".join(p for p, _ in used_inputs)
    returned = code_of(outs[0]) if len(outs) == 1 else ", ".join(code_of(o) for o in outs)
    if not lifter.statements:
        lambda_ = f"{torch}.vmap(lambda {parameters}: {returned if len(outs) == 1 else f'({returned})'})({inputs})"
        if len(lambda_) <= _WIDTH and "\n" not in lambda_:
            return _Batched([], cst.parse_expression(lambda_))
    name = fresh_name(module, f"one_{_singular(names[0]) if len(outs) == 1 else used_inputs[-1][0]}")
    definition = cst.ensure_type(cst.parse_statement(f"def {name}({parameters}):\n    pass\n"), cst.FunctionDef)
    last = cst.parse_statement(f"return ({returned})\n" if "\n" in returned else f"return {returned}\n")
    body = cst.IndentedBlock([*_folded(lifter.statements, outs), last])
    call = cst.parse_expression(f"{torch}.vmap({name})({inputs})")
    definition = definition.with_changes(body=body)
    return _Batched([definition], call)


def _folded(lines: Sequence[cst.BaseStatement], outs: Sequence[cst.BaseExpression]) -> list[cst.BaseStatement]:
    """The statements without assignments that nothing reads."""
    used_lines: list[cst.BaseStatement] = []
    read = {n for o in outs for n in names_in(o)}
    for line in reversed(lines):
        found = m.extract(line, m.SimpleStatementLine([m.Assign([m.AssignTarget(m.SaveMatchedNode(m.Name(), "n"))])]))
        if found is None or code_of(found["n"]) in read:  # type: ignore[arg-type]
            used_lines.insert(0, line)
            read |= names_in(line)
    return used_lines


def _without_comprehension(place: SourcePlace, torch: str, open_: Callable[[Loop], LoopInputs]) -> cst.Module:
    """`torch.stack([f(x) for x in rows])` and the like, in one statement."""
    statement = place.statement
    if not isinstance(statement, cst.SimpleStatementLine):
        raise EditError("there is no loop here")
    whole = next((c for c in nodes_of(cst.BaseSimpleComp, statement) if not isinstance(c, cst.SetComp)), None)
    if not isinstance(whole, (cst.ListComp, cst.GeneratorExp)):
        raise EditError("there is no loop here")
    if whole.for_in.inner_for_in is not None or whole.for_in.ifs:
        raise EditError(f"'{code_of(whole)}' is more than one loop")
    line = cst.SimpleStatementLine([cst.Expr(expression("out.append({x})", x=whole.elt))])
    opened = open_(Loop(place.module, torch, whole.for_in.target, whole.for_in.iter, [line]))
    lifter, lifted = _lifted(place.module, opened.iteration, opened.block, torch)
    value = lifted.results[0].value
    if not value.is_batched:
        raise EditError("what the loop computes is the same in each iteration")
    name = _assigned_name(statement) or "part"
    changes: Changes = {}
    batched = _call(place.module, opened.iteration, lifter, [value.node], [name], torch)
    new = _in_statement(place, statement, whole, batched.call, is_number=value.is_number, changes=changes)
    changed = [*_insert_before(place, batched.before, {}), _after_line(new)] if batched.before else [new]
    changes[statement] = _after(opened.before, changed)
    return with_changes(place.module, changes)


def _in_statement(
    place: SourcePlace,
    statement: cst.SimpleStatementLine,
    whole: cst.ListComp | cst.GeneratorExp,
    call: cst.BaseExpression,
    *,
    is_number: bool,
    changes: Changes,
) -> cst.BaseStatement:
    outer = next((c for c in nodes_of(cst.Call, statement) if c.args and c.args[0].value is whole), None)
    taken = fresh_name(place.module, "given")
    new = asked = None
    if outer is not None:
        asked = outer.with_changes(args=[outer.args[0].with_changes(value=cst.Name(taken)), *outer.args[1:]])
        new = as_tensor(place.module, asked, taken, is_number=is_number)
    name = _assigned_name(statement)
    if outer is None and name and statement.body[0].value is whole:  # type: ignore[attr-defined]
        uses = uses_of(place, name, statement, is_number=is_number)
        if uses is not None:
            replace_uses(place, uses, changes)
            return with_expression(statement, whole, call)
    if outer is None or new is None or new is asked:
        as_list = "{x}.tolist()" if is_number else "list({x})"
        return with_expression(statement, whole, expression(as_list, x=call))
    inside = next((n for n in m.findall(new, m.Name(taken))), new)
    value = call if inside is new else new.deep_replace(inside, call)
    return with_expression(statement, outer, value)


def _after_line(statement: cst.BaseStatement) -> cst.BaseStatement:
    return statement.with_changes(leading_lines=[cst.EmptyLine(indent=False)])


def _insert_before(
    place: SourcePlace, definition: list[cst.BaseStatement], changes: Changes
) -> list[cst.BaseStatement]:
    """The definition after an empty line, where it is not the first in its block."""
    before = [s for s in place.block[: place.index] if s not in changes]
    return [_after_line(d) for d in definition] if before else definition


def _after(before: Block, new: Block) -> Block:
    if before and isinstance(new[0], cst.FunctionDef):
        return [*before, _after_line(new[0]), *new[1:]]
    return [*before, *new]


def _assigned_name(statement: cst.SimpleStatementLine) -> str:
    first = statement.body[0]
    if isinstance(first, cst.Assign) and isinstance(first.targets[0].target, cst.Name):
        return first.targets[0].target.value
    return ""


def _tail(target: cst.BaseExpression) -> str:
    """The last name of a target."""
    while isinstance(target, cst.Subscript):
        target = target.value
    return target.attr.value if isinstance(target, cst.Attribute) else code_of(target)


def _singular(name: str) -> str:
    for ending in ("sses", "xes"):
        if name.endswith(ending):
            return name[:-2]
    return name[:-1] if name.endswith("s") and not name.endswith("ss") and len(name) > 3 else name
