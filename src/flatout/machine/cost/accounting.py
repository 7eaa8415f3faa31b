"""Sums over Evidence that several rules need: what a line costs, what a trial found, which loops are the training's own."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from flatout.core.errors import UsageError
from flatout.core.records.evidence import Evidence, Model, Operator
from flatout.core.records.memory import MemoryKind, MemoryPart
from flatout.core.records.trial import ModelVariant, TimeModel, Trial, TrialResult
from flatout.core.records.usage import CallUse, ModuleFact
from flatout.core.records.workload import Source

T = TypeVar("T")
K = TypeVar("K")


def group_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by key, in order of first appearance."""
    groups: dict[K, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return dict(groups)


def bytes_by_kind(parts: Iterable[MemoryPart]) -> dict[MemoryKind, int]:
    """What is alive at the peak, added up by kind, the largest first."""
    sums: dict[MemoryKind, int] = defaultdict(int)
    for part in parts:
        sums[part.kind] += part.bytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def rows_at(evidence: Evidence, sources: Iterable[int]) -> tuple[int, ...]:
    """Indices of all operators, forward and backward, that belong to these source lines."""
    wanted = set(sources)
    return tuple(i for i, o in enumerate(evidence.operators) if o.source in wanted)


def rows_with_shape(evidence: Evidence, sources: set[int], shapes: set[tuple[int, ...]]) -> tuple[int, ...]:
    """Operators of these lines, forward and backward, one of whose tensors has one of these shapes in its last two dimensions."""
    return tuple(
        i
        for i, o in enumerate(evidence.operators)
        if o.source in sources and any(t.shape[-2:] in shapes for t in o.inputs + o.outputs)
    )


def operator_seconds(evidence: Evidence, rows: Iterable[int]) -> float:
    """Seconds of these operators in a step, the Python before them included."""
    return sum(evidence.operators[i].total_s for i in rows)


def operators_at(evidence: Evidence, source: int, begins: str) -> tuple[int, ...]:
    """The operators of a line whose name begins so and whose inputs were seen."""
    rows = enumerate(evidence.operators)
    return tuple(i for i, o in rows if o.source == source and o.op.startswith(begins) and o.inputs)


def has_backward(evidence: Evidence, rows: Iterable[int]) -> bool:
    """Whether any of these operators runs in the backward pass."""
    return any(evidence.operators[i].phase == "backward" for i in rows)


def result_of(evidence: Evidence, trial: Trial | None) -> TrialResult | None:
    """What came of this trial; None when there is none, or it has not run or was refused."""
    for result in evidence.trials:
        if result.trial == trial and result.now_s is not None and result.cured_s is not None:
            return result
    return None


def remaining_fraction(result: TrialResult) -> float:
    """What is left of the time after the cure: cured over now."""
    if not result.now_s or result.cured_s is None:
        return 1.0
    return result.cured_s / result.now_s


def around(seconds: float, spread: float) -> tuple[float, float]:
    """A range of +-`spread` (a fraction) around a saving, never negative."""
    return max(0.0, seconds * (1.0 - spread)), max(0.0, seconds * (1.0 + spread))


def speed_up(step_s: float, saved_s: float) -> float:
    """How many times faster a step of `step_s` seconds is when `saved_s` of them are gone (Amdahl 1967).

    Negative `saved_s` makes it slower. Raises UsageError unless saved_s < step_s.

    >>> speed_up(0.2, 0.1)
    2.0
    """
    if not saved_s < step_s:
        raise UsageError(f"saved_s {saved_s} must be less than step_s, which is {step_s}")
    return step_s / (step_s - saved_s)


def is_steady(evidence: Evidence) -> bool:
    """Whether the steps are steps after warm-up, and not one stretch of time with the start-up in it."""
    return evidence.steps.kind != "call" or evidence.steps.num_timed > 1


def model_seconds(evidence: Evidence) -> float:
    """Seconds of forward, loss and backward in a step."""
    phases = evidence.steps.phases
    return phases.get("forward", 0.0) + phases.get("backward", 0.0)


def forward_seconds(evidence: Evidence, model: Model) -> float:
    """Seconds of a step in calls of this root module, no more than the step has for forwards of all kinds.

    Calls grow longer while a sequence is generated: their mean is above the median step.
    """
    others = ("backward", "optimizer", "data")
    left_s = evidence.steps.whole_s - sum(evidence.steps.phases.get(phase, 0.0) for phase in others)
    return min(model.calls * model.call_s, max(0.0, left_s))


def host_seconds(evidence: Evidence) -> float:
    """Seconds of a step in which the host launches the operators of forward and backward, waited for or not."""
    return sum(o.python_s for o in evidence.operators if o.phase in ("forward", "backward"))


def main_model(evidence: Evidence) -> int | None:
    """Index of the root module that takes most of a step: one whose graphs are used, or any in an inference loop."""
    used = [i for i, m in enumerate(evidence.models) if m.num_graphs_used or evidence.steps.kind == "inference"]
    return max(used, key=lambda i: evidence.models[i].call_s * evidence.models[i].calls, default=None)


def model_trial(evidence: Evidence, variant: ModelVariant, *, factor: int = 1) -> TimeModel | None:
    """A call of the main model as it is in the steps, against a variant; None where there is no such model."""
    index = main_model(evidence)
    if index is None:
        return None
    backward = evidence.models[index].num_graphs_used > 0
    return TimeModel(model=index, variant=variant, backward=backward, factor=factor)


def call_of_model(evidence: Evidence) -> Source | None:
    """The line that calls the main model."""
    index = main_model(evidence)
    return evidence.source_of(evidence.models[index].source) if index is not None else None


def setting_line(evidence: Evidence, name: str) -> Source | None:
    """The line that threw a global switch, else the call of the main model."""
    lines = (s.source for s in evidence.workload.settings if s.name == name and s.source is not None)
    return next(lines, None) or call_of_model(evidence)


def idle_seconds(evidence: Evidence) -> float:
    """Seconds of a step in which the device does nothing; all of it where no device was watched."""
    return max(0.0, evidence.steps.step_s - (evidence.steps.device_s or 0.0))


def facts_named(evidence: Evidence, name: str) -> list[ModuleFact]:
    """The facts about modules of this kind."""
    return [f for f in evidence.module_facts if f.name == name]


def setting_of(evidence: Evidence, name: str) -> str:
    """Value of a global switch, '' when it was not read."""
    return next((s.value for s in evidence.workload.settings if s.name == name), "")


def milliseconds(seconds: float) -> str:
    """Seconds as the sentences of findings write them.

    >>> milliseconds(0.00123)
    '1.23 ms'
    """
    return f"{seconds * 1e3:.2f} ms"


def step_loops(evidence: Evidence) -> set[tuple[str, int]]:
    """The loops (file, line) whose iterations are steps or micro-batches: they enclose the optimizer's step or the backward."""
    inner = [o.source for o in evidence.optimizers] + list(evidence.backward_sources)
    if evidence.steps.kind == "inference":
        inner += [m.source for m in evidence.models]
    return {loop for source in inner for loop in loops_around(evidence, source)}


def loops_around(evidence: Evidence, source: int) -> Iterator[tuple[str, int]]:
    """Loops (file, line) around a source line, innermost first, through its callers."""
    for index in (source, *evidence.callers.get(source, ())):
        line = evidence.source_of(index)
        if line is not None:
            for loop in reversed(line.loops):
                yield line.file, loop


PYTHON_CONVERSIONS: Final = ("torch.tensor", "torch.as_tensor")
"""Watched calls that make a tensor of what Python holds."""


def uses_by_line(evidence: Evidence, names: Iterable[str]) -> dict[int, list[CallUse]]:
    """The watched calls of these functions by source line, those that took most of a step first.

    A call made once in the whole run is left out: it belongs to no step.
    """
    wanted = set(names)
    uses = [u for u in evidence.uses if u.name in wanted and u.calls * max(1, evidence.steps.num_observed) > 1.5]
    lines = group_by(uses, lambda u: u.source)
    return dict(sorted(lines.items(), key=lambda item: -sum(u.seconds for u in item[1])))


def usual_calls(operators: Iterable[Operator]) -> float:
    """How often the operators of a loop's lines run in a step: the commonest count of (operator, line, module), any shapes."""
    counts: dict[tuple[str, int, str], float] = defaultdict(float)
    for o in operators:
        counts[o.op, o.source, o.module] += o.num_calls
    by_count = Counter(round(c) for c in counts.values())
    return max(by_count, key=lambda count: (by_count[count], count), default=0)
