"""A function of tensors that the loop calls, or a method of an environment on the device, is replayed from CUDA graphs.

What        `@captured` (from flatout) on a function that computes tensors from its arguments alone (advantages from rewards), or
            on a method of an object that holds tensors (the step of a simulation on the device): it may put other tensors in the
            place of its attributes.
Guarantee   EXACT: the same kernels, and the same random numbers from the same generator.
Refuses     Processes without a CUDA device; devices that are busy all the time; scripts that compile; functions that read a
            value, draw in Python, or read a global variable that changes. A function that does more than a graph holds is met
            as it runs, and runs as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Parameters, string
from flatout.core.records.workload import Source
from flatout.machine.cost.accounting import milliseconds
from flatout.tune.levers.called_methods import CAPTURED, check_graph_holds, plain_function, with_decorator
from flatout.tune.levers.waiting_device import check_device_waits
from flatout.tune.rewrite.imports import with_import
from flatout.tune.rewrite.source import parsed, place_parameters, text_at

_SMALL_PART: Final = 0.003
"""The least part of the untouched step: others make such a step ten times as short, and not these functions (PPO)."""
_SAVED: Final = (0.3, 0.9)
"""Of what the host takes for its operators, in our judgement: a replay copies arguments and results."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it for each function whose operators take a part of the step, while the device waits for their launches."""
    check_device_waits(evidence)
    spent_s: dict[tuple[str, str], float] = defaultdict(float)
    first: dict[tuple[str, str], Source] = {}
    for operator in evidence.operators:
        line = evidence.source_of(operator.source)
        if line is None or line.is_installed or "<" in line.function or operator.phase == "backward":
            continue
        spent_s[line.file, line.function] += operator.python_s
        first.setdefault((line.file, line.function), line)
    why = f"no function of tensors takes {_SMALL_PART:.1%} of a step"
    for where, seconds in sorted(spent_s.items(), key=lambda item: -item[1]):
        if seconds < _SMALL_PART * evidence.steps.whole_s:
            break
        try:
            parameters = {"file": place_parameters(evidence, first[where])["file"], "function": where[1]}
            edit(text_at(evidence, parameters), parameters)
        except EditError as e:
            why = str(e)
            continue
        why = ""
        yield Candidate(
            parameters=parameters,
            saved_s=(_SAVED[0] * seconds, _SAVED[1] * seconds),
            where=first[where],
            because=f"the host takes {milliseconds(seconds)} of a step for the operators of {where[1]}, and the device waits",
        )
    if why:
        raise LeverRefused(why)


def edit(text: str, parameters: Parameters) -> str:
    """Write `@captured` before the function.

    Raises EditError where it is a module's method, or does what no graph holds.
    """
    module, name = parsed(text), string(parameters, "function")
    check_graph_holds(text, module, name, plain_function(module, name))
    return with_decorator(with_import(module, "flatout", CAPTURED), name, CAPTURED).code


LEVER = lever(
    __name__,
    propose,
    edit=edit,
    is_local=True,
    conflicts=("graph.compile-method",),
    title="Captured function",
    errors=("captur",),
)
