"""A method of a module that the loop calls instead of the module is replayed from CUDA graphs.

What        `@captured` (from flatout) on a method of a class of modules that calls them from outside `forward`: a policy's
            `get_action_and_value`, in a rollout and with gradients in an update.
Guarantee   EXACT: the same kernels, and the same random numbers from the same generator. What a distribution checks of its
            arguments is left out of the graph.
Refuses     Processes without a CUDA device; scripts that compile; models that keep the device busy; methods that read a value,
            draw in Python, change their module, or read a global variable that changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import libcst as cst

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters, string
from flatout.machine.cost.accounting import milliseconds
from flatout.tune.levers.called_methods import (
    CAPTURED,
    REPLAY_S,
    check_graph_holds,
    plain_method,
    slowest_method,
    with_decorator,
)
from flatout.tune.rewrite.imports import with_import
from flatout.tune.rewrite.source import code_of, nodes_of, parsed, pull, text_at

_LEAST_SAVED: Final = 0.4
_EFFORT: Final = 1.0
"""A capture takes a fraction of a second."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it for the method in which most time is spent, where a CUDA device waits for its launches."""
    if evidence.workload.device == "cpu":
        raise LeverRefused("no CUDA device")
    method = slowest_method(evidence)
    if not method.waits_for_host:
        raise LeverRefused(f"the device is busy with what {method.line.function} computes")
    try:
        edit(text_at(evidence, method.parameters), method.parameters)
    except EditError as e:
        raise LeverRefused(str(e)) from e
    most_s = max(0.0, method.seconds - method.num_calls * REPLAY_S)
    yield Candidate(
        parameters=method.parameters,
        saved_s=(_LEAST_SAVED * most_s, most_s),
        where=method.line,
        because=f"{method.line.function}, and the backward of what it computes, take {milliseconds(method.seconds)} of a step, "
        "while the device waits for the host's launches",
    )


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Decorate the method in the text of its file."""
    pull(LEVER.id, hooks, parameters, edit)


def edit(text: str, parameters: Parameters) -> str:
    """Write `@captured` before the method.

    Raises EditError where it is no method of a module, or does what no graph holds.
    """
    module, name = parsed(text), string(parameters, "function")
    method = plain_method(module, name)
    check_graph_holds(text, module, name, method)
    stored = [code_of(t.target) for t in nodes_of(cst.AssignTarget, method.body)]
    stored += [code_of(t.target) for t in nodes_of(cst.AugAssign, method.body)]
    if changed := [target for target in stored if target.startswith("self.")]:
        raise EditError(f"'{name}' changes {changed[0]}")
    return with_decorator(with_import(module, "flatout", CAPTURED), name, CAPTURED).code


LEVER = lever(
    __name__,
    propose,
    apply=apply,
    edit=edit,
    effort=_EFFORT,
    conflicts=("graph.compile", "graph.capture", "graph.compile-method"),
    title="Captured method",
    errors=("captur",),
)
