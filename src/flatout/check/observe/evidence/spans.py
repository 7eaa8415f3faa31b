"""One real step on a time axis: a typical undisturbed step's phases, and a deep step's operators in order inside them.

Nothing can show when each operator of an undisturbed step ran, since looking would disturb it. The phases are that step's own
stamps; the operators are those of the last deep step, in its order, each as long as its row says, fitted into their phase.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Final

from flatout.check.observe.evidence.accounts import OperatorTable, usual_root_calls
from flatout.check.observe.observation import ObservationState
from flatout.check.observe.steps.schedule import Mode
from flatout.check.observe.steps.timeline import TimedStep
from flatout.core.records.evidence import Operator
from flatout.core.records.span import Span, StepTimeline

MOST_SPANS: Final = 600
"""The most spans of a timeline: more than a screen has room for, and some 100 kB of a report."""
_MOST_PHASES: Final = 200
_MOST_STRETCH: Final = 1.3
"""A phase of one step may be this much longer than its operators' mean; beyond that the rest of it is no operator's."""


def timeline_of(observation: ObservationState, table: OperatorTable) -> StepTimeline | None:
    """The step nearest to the median, None when no step was timed in order. Device spans are for others to add."""
    step = _typical(observation.timeline.steps)
    if step is None:
        return None
    phases = _phase_spans(step)
    operators = _operator_spans(table, phases)
    longest, left_out = _longest(operators, MOST_SPANS - min(len(phases), _MOST_PHASES))
    shown, phases_left_out = _longest(phases, _MOST_PHASES)
    return StepTimeline(
        duration_s=step.duration_s,
        spans=(*shown, *longest),
        is_scaled=bool(operators),
        num_left_out=left_out + phases_left_out,
    )


def _typical(steps: list[TimedStep]) -> TimedStep | None:
    """The light step nearest to the median length, among those without an evaluation pass whose order of phases is known."""
    profiled = next((i for i, s in enumerate(steps) if s.mode == Mode.KERNELS.value), len(steps))
    light = [s for s in steps[:profiled] if s.mode == Mode.LIGHT.value]
    if not light:
        return None
    usual = usual_root_calls(light)
    ordinary = [s for s in light if usual.has(s)]
    middle_s = statistics.median(s.duration_s for s in ordinary)
    return min((s for s in ordinary if s.order), key=lambda s: abs(s.duration_s - middle_s), default=None)


def _phase_spans(step: TimedStep) -> list[Span]:
    """The phases in order, stretches of the same phase as one."""
    spans: list[Span] = []
    at_s = 0.0
    for phase, length_s in step.order:
        if spans and spans[-1].name == phase:
            before = spans.pop()
            spans.append(_phase(phase, before.start_s, before.duration_s + length_s))
        elif length_s > 0:
            spans.append(_phase(phase, at_s, length_s))
        at_s += length_s
    return spans


def _phase(name: str, start_s: float, duration_s: float) -> Span:
    return Span(track="phase", name=name, start_s=start_s, duration_s=duration_s, is_wait=name == "data")


def _operator_spans(table: OperatorTable, phases: list[Span]) -> list[Span]:
    """The trace's operators placed one after another in the intervals of their phase, scaled to fill it."""
    by_phase: dict[str, list[Operator]] = defaultdict(list)
    for row in table.trace.operator:
        operator = table.operators[row]
        by_phase[operator.phase].append(operator)
    spans: list[Span] = []
    for phase, operators in by_phase.items():
        stretches = [s for s in phases if s.name == phase]
        room_s = sum(s.duration_s for s in stretches)
        needed_s = sum(sum(_per_call(o)) for o in operators)
        if stretches and needed_s > 0:
            spans += _placed(operators, stretches, min(_MOST_STRETCH, room_s / needed_s))
    return sorted(spans, key=lambda s: s.start_s)


def _placed(operators: list[Operator], stretches: list[Span], scale: float) -> list[Span]:
    """Operators from the start of the first stretch on; what goes over the end of one continues in the next."""
    spans = []
    index, used_s = 0, 0.0
    for operator in operators:
        python_s, op_s = (scale * s for s in _per_call(operator))
        while index < len(stretches) - 1 and used_s + python_s >= stretches[index].duration_s:
            python_s -= stretches[index].duration_s - used_s
            index, used_s = index + 1, 0.0
        used_s += max(0.0, python_s)
        length_s = min(op_s, max(0.0, stretches[index].duration_s - used_s))
        start_s = stretches[index].start_s + used_s
        spans.append(
            Span(
                track="host",
                name=operator.op,
                start_s=round(start_s, 9),
                duration_s=round(length_s, 9),
                source=operator.source,
            )
        )
        used_s += op_s
        while index < len(stretches) - 1 and used_s >= stretches[index].duration_s:
            used_s -= stretches[index].duration_s
            index += 1
    return spans


def _per_call(operator: Operator) -> tuple[float, float]:
    """Seconds of one call on the host: Python before it, the operator itself. On a device its dispatch is all the host spends."""
    calls = max(operator.num_calls, 1e-9)
    if operator.bound == "sum":
        return operator.python_s / calls, operator.op_s / calls
    return 0.0, operator.python_s / calls


def _longest(spans: list[Span], most: int) -> tuple[list[Span], int]:
    """The longest `most` spans in their order, and how many are left out."""
    longest = sorted(sorted(range(len(spans)), key=lambda i: -spans[i].duration_s)[:most])
    return [spans[i] for i in longest], len(spans) - len(longest)
