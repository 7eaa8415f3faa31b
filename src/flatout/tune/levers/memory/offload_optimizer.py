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

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters
from flatout.machine.cost.memory import bytes_at_peak, main_memory
from flatout.tune.rewrite.enclosing_blocks import assignment
from flatout.tune.rewrite.imports import call_name, with_import
from flatout.tune.rewrite.source import code_of, editable_place, find, nodes_of, parsed, statements, with_changes

if TYPE_CHECKING:
    from torch.optim import Optimizer

_SMALLEST_SHARE = 0.05
_NAMES = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SGD", "RMSprop", "Adagrad", "Adadelta", "Rprop", "ASGD")
"""Optimizers of torch.optim whose state has its parameters' sizes."""
_OPTIMIZERS = {f"torch.optim.{name}" for name in _NAMES}
_USUAL_BYTES_PER_S = 20e9
"""Copies from pinned memory over PCIe 4 with 16 lanes (31.5 GB/s by the standard, some two thirds of it in practice)."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it where the optimizer's state takes a share of a device's peak."""
    memory = main_memory(evidence)
    if memory is None or memory.device == "cpu" or not evidence.optimizers:
        raise LeverRefused("no optimizer keeps its state on a device")
    num_bytes = bytes_at_peak(memory, "optimizer state")
    if memory.peak_phase == "optimizer" or num_bytes < _SMALLEST_SHARE * memory.peak_bytes:
        raise LeverRefused(f"the state is {num_bytes / 2**20:.0f} MiB of the peak, in the phase '{memory.peak_phase}'")
    rate = evidence.machine.h2d_pinned_bytes_per_s if evidence.machine is not None else None
    copy_s = num_bytes / (rate or _USUAL_BYTES_PER_S)
    where = evidence.source_of(evidence.optimizers[0].constructed)
    yield Candidate(
        parameters=editable_place(evidence, where, edit),
        saved_s=(-4.0 * copy_s, -0.5 * copy_s),
        saved_bytes=num_bytes,
        where=where,
        because=f"the state of {evidence.optimizers[0].name} takes {num_bytes / 2**20:.0f} MiB of the peak, for one use a step",
    )


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Offload the state of each optimizer at its first step."""
    from weakref import WeakSet

    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from flatout.blocks.training.offload import offload_state

    known: WeakSet[Optimizer] = WeakSet()
    undo: list[Callable[[], None]] = []

    def meet(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in known:
            known.add(optimizer)
            undo.append(offload_state(optimizer))
            hooks.note(LEVER.id)

    def start() -> Callable[[], None]:
        handle = register_optimizer_step_pre_hook(meet)

        def end() -> None:
            handle.remove()
            while undo:
                undo.pop()()

        return end

    hooks.at_start(start)


def edit(text: str, parameters: Parameters) -> str:
    """Write `offload_state(optimizer)` below the line that constructs it."""
    if "code" in parameters:
        place = find(text, parameters)
        module, lines = place.module, [place.statement]
    else:
        module = parsed(text)
        lines = [*nodes_of(cst.SimpleStatementLine, module)]
    constructor = [(line, target) for line in lines if (target := _constructed_name(module, line))]
    if len(constructor) != 1:
        raise EditError(f"{len(constructor) or 'no'} optimizers of torch.optim are made and named there")
    line, target = constructor[0]
    changed = with_changes(module, {line: [line, *statements(f"offload_state({target})\n")]})
    return with_import(changed, "flatout", "offload_state").code


def _constructed_name(module: cst.Module, line: cst.CSTNode) -> str:
    """The name that is given an optimizer in this statement; '' for another statement."""
    target, value = assignment(line) or (None, None)
    is_optimizer = isinstance(value, cst.Call) and call_name(module, value.func) in _OPTIMIZERS
    return code_of(target) if is_optimizer and target is not None else ""


LEVER = lever(__name__, propose, apply=apply, edit=edit, title="Optimizer state in the host's memory")
