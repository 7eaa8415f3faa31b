"""The same constant is computed anew in every step.

Costs        The operators, and the Python that builds them on lines that compute nothing else. On a line that also works on the
             batch or weights (a call of nn.LSTM with constant states) the Python before a constant is mostly not its own: there
             each operator costs itself and one dispatch.
Evidence     Tensors made from nothing but constants (no parameter, no batch, no random number), bit for bit equal in several
             steps. Named is the costliest line that makes nothing else; in a file that a library generated, the line above it.
Levers       graph.hoist-constant
False alarm  Something that happens to be equal in the steps looked at, such as a mask while no row is padded: it depends on the
             batch, which the data flow shows. An `arange` that costs microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Constant, Evidence, Operator
from flatout.core.records.finding import Finding
from flatout.core.records.workload import Source
from flatout.machine.cost.accounting import around, group_by
from flatout.machine.cost.lines import function_finder

_VIEWS: Final = frozenset(
    f"aten.{n}"
    for n in (
        "alias",
        "detach",
        "expand",
        "permute",
        "select",
        "slice",
        "squeeze",
        "t",
        "transpose",
        "unsqueeze",
        "view",
    )
)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for each group of constants that are made from one another, or in one function."""
    mixed = _mixed_lines(evidence)
    seconds_of = {c: _seconds(evidence, c, is_mixed=c.source in mixed) for c in evidence.constants}
    for constants in _groups(evidence):
        cost_s = sum(seconds_of[c] for c in constants)
        # What passes a constant on into a layer comes after what makes it.
        ranked = sorted(constants, key=lambda c: (c.source in mixed, -seconds_of[c]))
        sources = list(dict.fromkeys(s for s in (_editable(evidence, c.source) for c in ranked) if s is not None))
        # A layer may copy a constant that it is passed all the same, computed once or not.
        least_s = sum(seconds_of[c] for c in constants if c.source not in mixed) or cost_s
        num_tensors = sum(c.num_tensors for c in constants)
        yield Finding(
            where=sources[0],
            cost_s=cost_s,
            saved_s=(around(least_s, 0.1)[0], around(cost_s, 0.1)[1]),
            because=f"{num_tensors} tensor(s) made from constants alone came out bit for bit the same in every step looked at; "
            f"making them takes {cost_s * 1e3:.2f} ms a step",
            edit=_edit(sources),
            also=tuple(sources[1:]),
            operators=tuple(sorted({i for c in constants for i in c.operators})),
            basis="timed",
        )


def _edit(sources: list[Source]) -> str:
    if sources and ".repeat(" in sources[0].text:
        return (
            "expand(...) in place of repeat(...), which copies nothing; or compute it once for each shape that occurs"
        )
    return "compute it once: self.register_buffer(..., persistent=False) in __init__, or before the loop"


def _mixed_lines(evidence: Evidence) -> set[int]:
    """Lines whose Python is not the constants' own: they compute more in the forward, or only look at a tensor in another shape.

    The Python before a view at the beginning of a forward is the loop's.
    """
    constant = {row for c in evidence.constants for row in c.operators}
    rows = enumerate(evidence.operators)
    computing = {o.source for i, o in rows if i not in constant and o.phase != "backward"}
    only_views = (
        c for c in evidence.constants if c.operators and {evidence.operators[i].op for i in c.operators} <= _VIEWS
    )
    views = {c.source for c in only_views}
    return computing | views


def _seconds(evidence: Evidence, constant: Constant, *, is_mixed: bool) -> float:
    """What making a line's constants takes, without Python that the line runs for other things."""
    if not is_mixed or not constant.operators:
        return constant.seconds
    dispatch_s = evidence.machine.dispatch_s if evidence.machine is not None else 0.0
    return sum(_alone_s(evidence.operators[i], dispatch_s) for i in constant.operators)


def _alone_s(operator: Operator, dispatch_s: float) -> float:
    """Seconds of an operator's calls with one dispatch each."""
    if operator.bound == "device":
        return operator.op_s
    own_s = operator.op_s if operator.bound == "sum" else 0.0
    return own_s + min(operator.python_s, operator.num_calls * dispatch_s)


def _editable(evidence: Evidence, index: int) -> Source | None:
    """The line, or the next above it that is in no generated file: one with dots in its name, which no import finds."""
    callers = evidence.callers.get(index, ())
    lines = [s for s in map(evidence.source_of, (index, *callers)) if s is not None]
    return next((s for s in lines if "." not in PurePath(s.file).stem), lines[0] if lines else None)


def _groups(evidence: Evidence) -> list[list[Constant]]:
    constants = [c for c in evidence.constants if c.source >= 0]
    function_of = function_finder(evidence)
    by_function = list(group_by(constants, lambda c: function_of(c.source)).values())
    owner = {row: number for number, group in enumerate(by_function) for c in group for row in c.operators}
    joined = list(range(len(by_function)))
    trace = evidence.trace
    for call, row in enumerate(trace.operator):
        for producer in trace.producers[call]:
            if row in owner and producer >= 0 and trace.operator[producer] in owner:
                first, second = joined[owner[row]], joined[owner[trace.operator[producer]]]
                joined = [first if number == second else number for number in joined]
    merged = group_by(range(len(by_function)), lambda number: joined[number])
    return [[c for number in numbers for c in by_function[number]] for numbers in merged.values()]


RULE = rule(__name__, check, title="A constant computed in every step", rewrites_line=True)
