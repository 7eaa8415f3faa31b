"""The same constant is computed anew in every step.

Costs        The operators, and the Python that builds them.
Evidence     Tensors made from nothing but constants (no parameter, no batch, no random number), bit for bit equal in several
             steps.
Levers       graph.hoist-constant
False alarm  Something that happens to be equal in the steps looked at, such as a mask while no row is padded: it depends on the
             batch, which the data flow shows. An `arange` that costs microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Constant, Evidence
from flatout.core.records.finding import Finding
from flatout.machine.cost.accounting import around, group_by
from flatout.machine.cost.lines import function_finder


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for each group of constants that are made from one another, or in one function."""
    for constants in _groups(evidence):
        cost_s = sum(c.seconds for c in constants)
        ranked = sorted(constants, key=lambda c: -c.seconds)
        sources = [s for s in (evidence.source_of(c.source) for c in ranked) if s is not None]
        num_tensors = sum(c.num_tensors for c in constants)
        yield Finding(
            where=sources[0],
            cost_s=cost_s,
            saved_s=around(cost_s, 0.1),
            because=f"{num_tensors} tensor(s) made from constants alone came out bit for bit the same in every step looked at; "
            f"making them takes {cost_s * 1e3:.2f} ms a step",
            edit="compute it once: self.register_buffer(..., persistent=False) in __init__, or before the loop",
            also=tuple(sources[1:]),
            operators=tuple(sorted({i for c in constants for i in c.operators})),
            basis="timed",
        )


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
