"""The batch is made by hand in Python before each forward pass.

Costs        The time between the end of a step and the next forward pass: a wait for data in all but name, whether a function, a
             generator or the loop's own lines make the batch.
Evidence     Sampled time between the steps, on lines that the loop over steps reaches before it calls the model, and that is not
             spent in tensor operators. Trial: the model called without a pause, for what the pauses cost it.
Levers       communication.prepare-in-memory, graph.vectorise, graph.hoist-constant, graph.compile-loop,
             communication.tensors-once
False alarm  Logging and saving after the optimizer's step; on a device, Python that runs while the device is still busy; a batch
             that one line converts from Python numbers (overhead.tensor-from-python tells it); a solver that calls the model many
             times before one backward, whose Python in between makes no batch; the line that steps an environment, and what
             its steps need beside them on lines that make no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, LineTime
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeModel
from flatout.core.records.workload import Source
from flatout.machine.cost.accounting import PYTHON_CONVERSIONS, group_by, step_loops, uses_by_line
from flatout.machine.cost.feeding import hottest, of_pause, pause_s, steady_trial, with_pause

_FEWEST_SAMPLES = 8
_IN_PYTHON = 0.5
_MOST = 0.7
_MOST_BESIDE = 0.5
"""Of the time: with less on lines that call no model, the batch is made on the very line of the call."""
_MOST_FORWARDS = 8
"""Calls of the model before one backward from which on what runs between them belongs to a solver or a recurrence."""
_MAKES_TENSORS = frozenset(f"aten.{n}" for n in ("lift_fresh", "_to_copy", "copy_", "stack", "cat", "index"))
_WORTH_FRACTION = 0.1
"""Picking a batch out of ready tensors takes some per cent of a short step too; that is no fault."""


def propose(evidence: Evidence) -> Iterator[TimeModel]:
    """Time the model without the pauses in which its batches are made."""
    total_s = sum(r.seconds for r in _before_forward(evidence))
    trial = steady_trial(evidence)
    if trial is not None and total_s > _WORTH_FRACTION * evidence.steps.step_s:
        yield trial


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for all that is done before the forward pass."""
    if evidence.steps.is_device_bound:
        return
    rows = _beside_calls(evidence, _before_forward(evidence))
    total_s = sum(r.seconds for r in rows)
    if sum(r.num_samples for r in rows) < _FEWEST_SAMPLES or total_s < _WORTH_FRACTION * evidence.steps.step_s:
        return
    lines = {r.source for r in rows}
    operators = tuple(i for i, o in enumerate(evidence.operators) if o.source in lines and o.phase == "other")
    in_operators_s = sum(evidence.operators[i].op_s for i in operators)
    if total_s - in_operators_s < _IN_PYTHON * total_s or _most_in_one_conversion(evidence, rows, total_s):
        return
    cost_s = _cost_s(evidence, total_s)
    if cost_s < _WORTH_FRACTION * evidence.steps.step_s:
        return
    hot = hottest(evidence, rows, total_s)
    yield Finding(
        where=hot.where,
        cost_s=cost_s + pause_s(evidence),
        saved_s=with_pause(evidence, (0.88 * cost_s, 0.98 * cost_s)),
        because=f"{cost_s * 1e3:.2f} ms of each step pass in Python before the forward pass, while its batch is made; "
        f"{hot.share:.0%} of it in {hot.function}, {in_operators_s * 1e3:.2f} ms in tensor operators"
        f"{of_pause(evidence)}",
        edit="make all the data tensors once before the loop and index a whole batch at a time; what is random, draw and apply "
        "for the whole batch; or move it into a Dataset and let DataLoader workers do it beside the model",
        also=hot.also,
        operators=operators,
    )


def _cost_s(evidence: Evidence, sampled_s: float) -> float:
    """The part of the time between the phases that these samples stand for.

    The timeline knows that time exactly. A sampler that waits for a long call in C files its sample under what is next: samples
    between the phases on lines of the backward and the optimizer are such, and tell nothing of where the time went.
    """
    between_s = evidence.steps.phases.get("other", sampled_s)
    late = set(evidence.backward_sources) | {o.source for o in evidence.optimizers}
    rows = [r for r in evidence.lines if r.process == "main" and r.phase == "other" and r.source not in late]
    share = min(1.0, sampled_s / max(sampled_s, sum(r.seconds for r in rows)))
    return min(between_s, max(sampled_s, share * between_s))


def _most_in_one_conversion(evidence: Evidence, rows: list[LineTime], total_s: float) -> bool:
    """Whether most of the time passes on one line that makes a tensor of Python numbers."""
    conversions = {
        source
        for source, uses in uses_by_line(evidence, PYTHON_CONVERSIONS).items()
        if any(u.detail == "list" for u in uses)
    }
    by_line = group_by(rows, lambda r: r.source)
    return any(sum(r.seconds for r in by_line.get(source, ())) >= _MOST * total_s for source in conversions)


def _before_forward(evidence: Evidence) -> list[LineTime]:
    """Lines sampled between the steps that the loop over steps reaches before the model's call."""
    if _forwards_before_backward(evidence) > _MOST_FORWARDS:
        return []
    loops = step_loops(evidence)
    skip = {r.source for r in evidence.host_reads if r.on_device} | {u.source for u in evidence.loaders}
    skip |= {o.source for o in evidence.optimizers} | set(evidence.backward_sources)
    skip |= {i for i, source in enumerate(evidence.sources) if "zero_grad(" in source.text}  # which makes no batch
    # Of one line the part outside `step` (a wrapper of the user's, what steps that were not watched are filed under) is no batch.
    in_environment = {_line_of(evidence, r.source) for r in evidence.lines if r.phase == "environment"}
    makes_tensors = _lines_that_make_tensors(evidence) - in_environment
    trained = [m for m in evidence.models if m.is_training and m.num_graphs_used]
    models = trained or [m for m in evidence.models if m.is_training or not m.grad_enabled]
    calls = [_entry(evidence, loops, m.source, m.callers) for m in models]
    last: dict[tuple[str, str], int] = {}
    for call in calls:
        if call is not None:
            place = (call.file, call.function)
            last[place] = max(call.line, last.get(place, 0))
    found = []
    of_model = _functions_of_model(evidence)
    for row in evidence.lines:
        if row.process != "main" or row.phase != "other" or row.source < 0 or row.source in skip:
            continue
        if evidence.function_of(row.source) in of_model:
            continue  # a sample of steps that went by unwatched: its phase is a guess
        if in_environment and _line_of(evidence, row.source) not in makes_tensors:
            continue
        entry = _entry(evidence, loops, row.source, evidence.callers.get(row.source, ()))
        if entry is not None and entry.line <= last.get((entry.file, entry.function), 0):
            found.append(row)
    return found


def _beside_calls(evidence: Evidence, rows: list[LineTime]) -> list[LineTime]:
    """The lines that do not call a model, where most of the time passes on these: what else a call's line does is the call."""
    calls = {m.source for m in evidence.models}
    others = [r for r in rows if r.source not in calls]
    return others if sum(r.seconds for r in others) >= _MOST_BESIDE * sum(r.seconds for r in rows) else rows


def _forwards_before_backward(evidence: Evidence) -> float:
    """Calls of the model for each backward in the step that was drawn; 0 where none was."""
    spans = evidence.timeline.spans if evidence.timeline is not None else ()
    names = [span.name for span in spans if span.track == "phase"]
    return names.count("forward") / max(1, names.count("backward"))


def _lines_that_make_tensors(evidence: Evidence) -> set[tuple[str, int]]:
    """Lines (file, line) of the user's on which tensors are made between the steps."""
    return {
        _line_of(evidence, o.source)
        for o in evidence.operators
        if o.phase == "other" and o.op in _MAKES_TENSORS and o.source >= 0
    }


def _functions_of_model(evidence: Evidence) -> set[tuple[str, str]]:
    """Functions (file, name) that run inside the model, and not the ones that call it."""
    inside = {evidence.function_of(o.source) for o in evidence.operators if o.phase == "forward" and o.module}
    return inside - {evidence.function_of(m.source) for m in evidence.models}


def _line_of(evidence: Evidence, source: int) -> tuple[str, int]:
    line = evidence.source_of(source)
    return ("", 0) if line is None else (line.file, line.line)


def _entry(evidence: Evidence, loops: set[tuple[str, int]], source: int, callers: tuple[int, ...]) -> Source | None:
    """The line in the body of a loop over steps through which this one is reached: itself or one of its callers."""
    for index in (source, *callers):
        line = evidence.source_of(index)
        if line is not None and any((line.file, loop) in loops for loop in line.loops):
            return line
    return None


RULE = rule(__name__, check, propose=propose, title="The batch is made by hand in Python")
