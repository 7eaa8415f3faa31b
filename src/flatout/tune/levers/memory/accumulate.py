"""A batch goes through the model in parts, whose gradients are added up before the update.

What        The statements from the model's call to `backward()` become the body of a loop over parts of the batch; each part's
            loss counts by its share of the samples, and `loss` is their sum afterwards.
Guarantee   BOUNDED: the same mean of the losses and its gradient, summed in another order. Models that look at the whole batch
            (batch norm, contrastive losses) and losses that are no mean over samples give others: the proof then refuses it.
Refuses     Runs whose activations are a small part of the peak; steps whose intermediate results are read again after the
            backward; batches that cannot be decided from the text.
Costs       Time: smaller products, more launches. It is for memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Parameters, integer, string
from flatout.machine.cost.accounting import main_model
from flatout.machine.cost.memory import bytes_at_peak, main_memory
from flatout.tune.rewrite.enclosing_blocks import (
    Parents,
    assigns_names,
    calls_backward,
    enclosing_loops,
    occurrences,
    only_small,
    parents_of,
    scope_of,
)
from flatout.tune.rewrite.source import (
    Change,
    SourcePlace,
    assigned_in,
    code_of,
    expression,
    find,
    first_line,
    fresh_name,
    names_in,
    place_parameters,
    statements,
    text_at,
    with_changes,
)

_PARTS: Final = (2, 4, 8)
_SMALLEST_SHARE: Final = 0.05
_MAY_COST: Final = 0.5
"""Of a step: products of half the rows take more than half the time where they do not fill the machine."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose two, four and eight parts, where activations are large and the text is plain."""
    memory, model = main_memory(evidence), main_model(evidence)
    if evidence.steps.kind != "training" or memory is None or model is None:
        raise LeverRefused("no training step's memory was recorded")
    activation_bytes = bytes_at_peak(memory, "activations")
    if activation_bytes < _SMALLEST_SHARE * memory.peak_bytes:
        raise LeverRefused("activations are a small part of the peak")
    try:
        place = _place(evidence, model)
    except EditError as e:
        raise LeverRefused(str(e)) from e
    for parts in _PARTS:
        yield Candidate(
            parameters=place | {"parts": parts},
            saved_s=(-_MAY_COST * evidence.steps.step_s, -0.01 * evidence.steps.step_s),
            saved_bytes=round(activation_bytes * (1 - 1 / parts)),
            because=f"activations hold {activation_bytes / 2**20:.0f} MiB at the peak; of each part of the batch, less",
        )


def _place(evidence: Evidence, model: int) -> Parameters:
    """The backward's statement and, as `model`, that of the model's call in the same block."""
    call = evidence.source_of(evidence.models[model].source)
    lines = [s for s in map(evidence.source_of, evidence.backward_sources) if s is not None]
    if call is None or len(lines) != 1:
        raise EditError(f"the model's call and one backward were not found (backwards: {len(lines)})")
    called = place_parameters(evidence, call)
    place = place_parameters(evidence, lines[0]) | {"model": string(called, "code")}
    edit(text_at(evidence, place), place | {"parts": _PARTS[0]})
    return place


class _AccumulatedStep(NamedTuple):
    """What is done for each part: `inside` from the model's call to the loss; `before` is put ahead of it."""

    before: tuple[cst.BaseStatement, ...]
    inside: tuple[cst.BaseStatement, ...]
    loss: str


def edit(text: str, parameters: Parameters) -> str:
    """Put the step's statements into a loop over parts of the batch.

    Raises EditError where that is not certain.
    """
    place, parts = find(text, parameters), integer(parameters, "parts")
    module, parents = place.module, parents_of(place.module)
    loops = enclosing_loops(parents, place.statement)
    if not loops:
        raise EditError("the backward is in no loop of its function")
    step = _step(place, string(parameters, "model"))
    inner = assigned_in(step.inside)
    _check_unread(place, step, inner)
    fed = _fed(loops[0], step, parents, inner)
    if not fed:
        raise EditError("nothing that comes anew in each step goes into the model there")
    leaves = list(dict.fromkeys(map(code_of, fed)))
    names = {code: fresh_name(module, f"{_tail(code)}_part") for code in leaves}
    size, share, total = (fresh_name(module, name) for name in ("part_size", "share", "total"))
    changes: dict[cst.CSTNode, Change] = {leaf: cst.Name(names[code_of(leaf)]) for leaf in fed}
    body: list[cst.BaseStatement] = [with_changes(one, changes) for one in step.inside]
    body += statements(f"{share} = len({names[leaves[0]]}) / len({leaves[0]})\n")
    body.append(_weighted(place.statement, parents, step.loss, share))
    body += statements(f"{total} += {step.loss}.detach() * {share}\n")
    split = [f"{code}.split({size})" for code in leaves]
    over = split[0] if len(split) == 1 else f"zip({', '.join(split)}, strict=True)"
    new = statements(
        f"{size} = -(-len({leaves[0]}) // {parts})\n{total} = 0.0\n"
        f"for {', '.join(names.values())} in {over}:\n    pass\n{step.loss} = {total}\n"
    )
    loop = cst.ensure_type(new[2], cst.For)
    new[2] = loop.with_changes(body=cst.IndentedBlock(body=[_bare(one) for one in body]))
    first = step.inside[0]
    gone: dict[cst.CSTNode, Sequence[cst.BaseStatement]] = {
        one: [] for one in (*step.before, *step.inside, place.statement)
    }
    gone[first] = [*map(_bare, step.before), *new]
    return with_changes(module, gone).code


def _step(place: SourcePlace, model: str) -> _AccumulatedStep:
    """The statements between the model's call and the backward, sorted."""
    backward = only_small(place.statement)
    if backward is None or not calls_backward(place.statement):
        raise EditError(f"'{first_line(place.module, place.statement)}' is no plain call of backward()")
    start = next((i for i, s in enumerate(place.block) if first_line(place.module, s) == model), None)
    if start is None or start >= place.index:
        raise EditError("the model is not called in the same block, ahead of the backward")
    before: list[cst.BaseStatement] = []
    inside: list[cst.BaseStatement] = []
    for one in place.block[start : place.index]:
        assert isinstance(one, cst.BaseStatement)
        statement = one
        if _is_zero_grad(statement):
            before.append(statement)
        elif assigns_names(statement):
            inside.append(statement)
        else:
            raise EditError(f"'{first_line(place.module, statement)}' is between the model's call and the backward")
    losses = names_in(backward) & assigned_in(inside)
    if len(losses) != 1:
        raise EditError("the loss is not one name that is assigned ahead of the backward")
    return _AccumulatedStep(tuple(before), tuple(inside), losses.pop())


def _is_zero_grad(statement: cst.BaseStatement) -> bool:
    small = only_small(statement)
    called = m.Call(func=m.Attribute(attr=m.Name("zero_grad")))
    return small is not None and m.matches(small, m.Expr(value=called))


def _check_unread(place: SourcePlace, step: _AccumulatedStep, inner: set[str]) -> None:
    scope = scope_of(place.module, place.function)
    ours = (*step.inside, place.statement)
    for name in inner - {step.loss}:
        if len(occurrences(scope, name)) > sum(len(occurrences(one, name)) for one in ours):
            raise EditError(f"'{name}' is read outside of the step's forward")


def _fed(
    owner: cst.For | cst.While, step: _AccumulatedStep, parents: Parents, inner: set[str]
) -> list[cst.BaseExpression]:
    """Where the step reads what the loop brings anew: names, `batch["x"]`, `batch.x`; counters are none."""
    bound = assigned_in(owner.body) - inner
    if isinstance(owner, cst.For):
        target = owner.target
        if m.matches(owner.iter, m.Call(func=m.Name("enumerate"))) and isinstance(target, cst.Tuple):
            bound |= names_in(target.elements[1:]) - {step.loss}
        elif not m.matches(owner.iter, m.Call(func=m.Name("range") | m.Name("enumerate"))):
            bound |= names_in(target)
    return [_whole(one, parents) for name in sorted(bound) for one in occurrences(step.inside, name)]


def _whole(name: cst.Name, parents: Parents) -> cst.BaseExpression:
    """The largest of `name`, `name.a`, `name["a"]` around a name that is not called."""
    node: cst.BaseExpression = name
    while True:
        above = parents.get(node)
        if isinstance(above, cst.Attribute) and above.value is node:
            if isinstance(parents.get(above), cst.Call) and cst.ensure_type(parents[above], cst.Call).func is above:
                return node
            node = above
        elif isinstance(above, cst.Subscript) and above.value is node and _is_key(above):
            node = above
        elif isinstance(above, cst.Arg) and above.star:
            raise EditError(f"'{above.star}{name.value}' passes on more than is known")
        else:
            return node


def _is_key(node: cst.Subscript) -> bool:
    return len(node.slice) == 1 and m.matches(node.slice[0].slice, m.Index(value=m.SimpleString() | m.Integer()))


def _weighted(statement: cst.BaseStatement, parents: Parents, loss: str, share: str) -> cst.BaseStatement:
    """The backward of the loss times its share."""
    changes: dict[cst.CSTNode, Change] = {}
    for name in occurrences(statement, loss):
        is_argument = isinstance(parents.get(name), cst.Arg)
        changes[name] = expression(f"{loss} * {share}" if is_argument else f"({loss} * {share})")
    return with_changes(statement, changes)


def _tail(code: str) -> str:
    word = "".join(c if c.isalnum() else " " for c in code).split()[-1]
    return word if word.isidentifier() else "batch"


def _bare(statement: cst.CSTNode) -> cst.BaseStatement:
    assert isinstance(statement, cst.BaseStatement)
    return statement.with_changes(leading_lines=())


LEVER = lever(
    __name__, propose, edit=edit, num_losses=lambda parameters: 0, title="The batch in parts, gradients added up"
)
