"""Convolutions by the algorithm that was fastest here when cuDNN timed them.

What        `torch.backends.cudnn.benchmark = True` before the script starts and again when a model is first called: cuDNN runs
            each algorithm at the first convolution of each shape, where it would take one by a rule of thumb.
Guarantee   BOUNDED: another algorithm takes the same sums in another order.
Refuses     Processors; scripts that allow it already, or ask for deterministic algorithms; models with few convolutions; shapes
            that change, each of which would be timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters
from flatout.machine.cost.accounting import milliseconds, operator_seconds, setting_of
from flatout.machine.cost.compiling import has_changing_shapes
from flatout.tune.rewrite.imports import below_imports, with_import
from flatout.tune.rewrite.source import parsed, statements

if TYPE_CHECKING:
    from torch import nn

_SMALL_PART: Final = 0.1
_MOST: Final = 0.3
"""Of the convolutions' time, in our judgement."""
_EFFORT: Final = 2.0
"""The first step takes seconds longer."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it where convolutions of the same shapes are much of a step on a GPU."""
    if evidence.workload.device == "cpu":
        raise LeverRefused("cuDNN computes on GPUs")
    if setting_of(evidence, "cudnn_benchmark") == "True":
        raise LeverRefused("the script has cuDNN time its algorithms already")
    if setting_of(evidence, "deterministic_algorithms") == "True":
        raise LeverRefused("the script asks for deterministic algorithms")
    rows = [i for i, o in enumerate(evidence.operators) if "convolution" in o.op]
    seconds = operator_seconds(evidence, rows)
    if seconds < _SMALL_PART * evidence.steps.whole_s:
        raise LeverRefused(f"convolutions take {milliseconds(seconds)} of a step")
    if has_changing_shapes(evidence):
        raise LeverRefused("shapes change, and the algorithms would be timed for each")
    yield Candidate(
        parameters={},
        saved_s=(0.0, _MOST * seconds),
        because=f"convolutions take {milliseconds(seconds)} of a step, by algorithms that cuDNN chose without timing them",
    )


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Allow it at the start, and again at a model's first call: a script may set it in between."""

    def at_call(module: nn.Module) -> Callable[[], None]:
        hooks.note(LEVER.id)
        return _allow()

    hooks.at_start(_allow)
    hooks.at_first_call(at_call)


def _allow() -> Callable[[], None]:
    """Set the switch; returns how to set what was there before."""
    import torch

    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True

    def undo() -> None:
        torch.backends.cudnn.benchmark = before

    return undo


def edit(text: str, parameters: Parameters) -> str:
    """Write one line that allows it after the imports."""
    if "cudnn.benchmark" in text:
        raise EditError("the file sets it itself")
    line = "torch.backends.cudnn.benchmark = True\n"
    return below_imports(with_import(parsed(text), "torch"), statements(line)).code


LEVER = lever(
    __name__, propose, apply=apply, edit=edit, effort=_EFFORT, title="cuDNN's algorithms chosen by their time"
)
