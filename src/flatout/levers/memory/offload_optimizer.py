"""The optimizer's state lies in the host's memory between its steps.

What        After each step the state is copied to pinned memory and freed on the device; before the next it is brought in.
Guarantee   EXACT: the same numbers come back.
Refuses     Runs on the CPU; optimizers whose state is a small part of the peak, or which have the peak in their own step.
Costs       Time: two copies of the state a step, of which the way out runs beside the next forward. It is for memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import libcst as cst
from libcst import matchers as m

from flatout.cost.memory import bytes_at_peak, main_memory
from flatout.errors import EditError
from flatout.levers.syntax.imports import call_name, with_import
from flatout.levers.syntax.source import code_of, find, parsed, place_of, statements, text_at, with_statements
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams

if TYPE_CHECKING:
    from torch.optim import Optimizer

_SMALLEST_SHARE = 0.05
_NAMES = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SGD", "RMSprop", "Adagrad", "Adadelta", "Rprop", "ASGD")
"""Optimizers of torch.optim whose state has its parameters' sizes."""
_OPTIMIZERS = {f"torch.optim.{name}" for name in _NAMES}
_USUAL_BYTES_PER_S = 20e9
"""Copies from pinned memory over PCIe 4 with 16 lanes (31.5 GB/s by the standard, some two thirds of it in practice)."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """Where state takes a share of a device's peak."""
    memory = main_memory(evidence)
    if memory is None or memory.device == "cpu" or not evidence.optimizers:
        yield Refusal(lever=LEVER.id, because="no optimizer keeps its state on a device")
        return
    num_bytes = bytes_at_peak(memory, "optimizer state")
    if memory.peak_phase == "optimizer" or num_bytes < _SMALLEST_SHARE * memory.peak_bytes:
        yield Refusal(
            lever=LEVER.id,
            because=f"the state is {num_bytes / 2**20:.0f} MiB of the peak, in the phase '{memory.peak_phase}'",
        )
        return
    rate = evidence.machine.h2d_pinned_bytes_per_s if evidence.machine is not None else None
    copy_s = num_bytes / (rate or _USUAL_BYTES_PER_S)
    made = evidence.optimizers[0].constructed
    yield Candidate(
        lever=LEVER.id,
        parameters=_place(evidence, made),
        saved_s=(-4.0 * copy_s, -0.5 * copy_s),
        saved_bytes=num_bytes,
        where=evidence.source_of(made),
        because=f"the state of {evidence.optimizers[0].name} takes {num_bytes / 2**20:.0f} MiB of the peak, for one use a step",
    )


def _place(evidence: Evidence, constructed: int) -> Parameters:
    where = evidence.source_of(constructed)
    try:
        place = place_of(evidence, where) if where is not None else {}
        if place:
            edit(text_at(evidence, place), place)
        return place
    except EditError:
        return {}


def apply(seams: Seams, parameters: Parameters) -> None:
    """Offload each optimizer when it steps for the first time."""
    from weakref import WeakSet

    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from flatout.training.offload import offload_state

    known: WeakSet[Optimizer] = WeakSet()
    undo: list[Callable[[], None]] = []

    def meet(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in known:
            known.add(optimizer)
            undo.append(offload_state(optimizer))
            seams.note(LEVER.id)

    def start() -> Callable[[], None]:
        handle = register_optimizer_step_pre_hook(meet)

        def end() -> None:
            handle.remove()
            while undo:
                undo.pop()()

        return end

    seams.at_start(start)


def edit(text: str, parameters: Parameters) -> str:
    """`offload_state(optimizer)` below the line that makes it."""
    if "code" in parameters:
        place = find(text, parameters)
        module, lines = place.module, [place.statement]
    else:
        module = parsed(text)
        lines = [s for s in m.findall(module, m.SimpleStatementLine()) if isinstance(s, cst.SimpleStatementLine)]
    made = [(line, target) for line in lines if (target := _made(module, line))]
    if len(made) != 1:
        raise EditError(f"{len(made) or 'no'} optimizers of torch.optim are made and named there")
    line, target = made[0]
    changed = with_statements(module, {line: [line, *statements(f"offload_state({target})\n")]})
    return with_import(changed, "flatout", "offload_state").code


def _made(module: cst.Module, line: cst.CSTNode) -> str:
    """The name that is given an optimizer in this statement; '' for another statement."""
    if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1 or not isinstance(line.body[0], cst.Assign):
        return ""
    assign = line.body[0]
    if len(assign.targets) != 1 or not isinstance(assign.value, cst.Call):
        return ""
    return code_of(assign.targets[0].target) if call_name(module, assign.value.func) in _OPTIMIZERS else ""


LEVER = Lever(
    id="memory.offload-optimizer",
    title="Optimizer state in the host's memory",
    guarantee="exact",
    module=__name__,
    propose=propose,
    apply=apply,
    edit=edit,
)
