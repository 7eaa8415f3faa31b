"""GELU is written out in separate operators where torch has one.

Costs        Five to eight operators that each read and write the whole tensor, and as many in backward; a third power by `pow`.
Evidence     A function with tanh and a third power, or with the error function, beside multiplications and an addition of the
             same size. Trial: the formula against F.gelu at the same shape, with its backward.
Levers       memory.fusion
False alarm  A formula that looks like GELU and is another: compare the results once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Operator
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeActivation
from flatout.machine.cost.accounting import group_by, milliseconds
from flatout.machine.cost.lines import function_finder
from flatout.machine.cost.suspects import PricedSuspect, proposing, tried

_OF_FORMULA: Final = frozenset(f"aten.{name}" for name in ("mul", "add", "div", "pow", "tanh", "erf"))
_FEWEST: Final = 4
_MOST: Final = 12
"""Calls of such operators for each tanh or erf: with more, the function does other things besides."""
_WORTH_A_TRIAL: Final = 0.03
_SPREAD: Final = (0.8, 1.1)


class _WrittenOut(NamedTuple):
    rows: tuple[int, ...]
    trial: TimeActivation
    source: int


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line that holds the formula."""
    for source, items in group_by(tried(evidence, _suspects), lambda item: item.suspect.source).items():
        yield _finding(evidence, source, items)


def _finding(evidence: Evidence, source: int, items: list[PricedSuspect[_WrittenOut]]) -> Finding:
    largest = max(items, key=lambda item: item.cost_s)
    cost_s, saved_s = sum(item.cost_s for item in items), sum(item.saved_s for item in items)
    remaining = 1 - saved_s / cost_s if cost_s else 1.0
    kind = largest.suspect.trial.kind
    own = "F.gelu(x, approximate='tanh')" if kind == "tanh" else "F.gelu(x)"
    low, high = _SPREAD
    return Finding(
        where=evidence.source_of(source),
        cost_s=cost_s,
        saved_s=(low * saved_s, min(high * saved_s, cost_s)),
        because=f"GELU by {kind}, written out, takes {milliseconds(cost_s)} of the step; "
        f"{own} takes {remaining:.0%} of that (tried)",
        edit=f"{own} (nn.GELU) in place of the formula; in transformers activation_function='gelu_pytorch_tanh' for 'gelu_new'",
        module=evidence.operators[largest.suspect.rows[0]].module,
        operators=tuple(dict.fromkeys(row for item in items for row in item.suspect.rows)),
        basis="trial",
    )


def _suspects(evidence: Evidence) -> Iterator[_WrittenOut]:
    """Functions that hold the formula, by the size of its tensors."""
    operators = evidence.operators
    function_of = function_finder(evidence)
    of_formula = [i for i, o in enumerate(operators) if o.source >= 0 and _is_of_formula(o)]
    key = lambda i: (function_of(operators[i].source), operators[i].outputs[0].shape, operators[i].outputs[0].dtype)  # noqa: E731
    for (_, shape, dtype), rows in group_by(of_formula, key).items():
        forward = [i for i in rows if operators[i].phase != "backward"]
        kind = _kind([operators[i] for i in forward])
        if kind is None:
            continue
        functions = {function_of(operators[i].source) for i in forward}
        backward = [
            i
            for i, o in enumerate(operators)
            if o.phase == "backward"
            and o.source >= 0
            and function_of(o.source) in functions
            and o.outputs
            and o.outputs[0].shape == shape
        ]
        trial = TimeActivation(kind=kind, shape=shape, dtype=dtype, backward=bool(backward))
        yield _WrittenOut((*forward, *backward), trial, operators[forward[0]].source)


def _is_of_formula(operator: Operator) -> bool:
    return operator.op in _OF_FORMULA and operator.phase != "backward" and bool(operator.outputs)


def _kind(forward: list[Operator]) -> Literal["tanh", "erf"] | None:
    """Which of the two formulas these operators of one size are; None for something else."""
    calls: dict[str, float] = {}
    for operator in forward:
        name = operator.op.removeprefix("aten.")
        calls[name] = calls.get(name, 0.0) + operator.num_calls
    total, central = sum(calls.values()), calls.get("tanh", 0.0) or calls.get("erf", 0.0)
    if not central or not _FEWEST <= total / central <= _MOST or "add" not in calls or "mul" not in calls:
        return None
    if "erf" in calls and "tanh" not in calls:
        return "erf"
    has_third_power = calls.get("pow", 0.0) >= central or calls["mul"] >= 4 * central
    return "tanh" if "tanh" in calls and "erf" not in calls and has_third_power else None


RULE = rule(
    __name__,
    check,
    propose=proposing(_suspects, worth=_WORTH_A_TRIAL),
    title="GELU written out in separate operators",
    rewrites_line=True,
)
