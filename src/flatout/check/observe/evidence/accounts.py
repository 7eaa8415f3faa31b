"""The deep steps as rows of equal calls, with the times that a light step would show.

Recording slows a step down, and not evenly. Three honest clocks put it right: the phases of the light steps nearby (backward,
optimizer, the rest), what recording costs each call (the same for a large call as for a small one), and the samples by line.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from math import prod
from typing import Final, NamedTuple, cast

import msgspec
import torch

from flatout.check.observe.collector import CommunicationClock
from flatout.check.observe.collectors.escapes import EscapingTensors
from flatout.check.observe.collectors.host_reads import HostReads
from flatout.check.observe.collectors.kernels import KernelProfiling
from flatout.check.observe.evidence.rows import (
    GROUPS,
    Bound,
    OperatorRow,
    bound_of,
    phase_group,
    to_host,
    to_kernels,
    waited_s,
)
from flatout.check.observe.observation import ObservationState
from flatout.check.observe.operators.overhead import InterceptionCost
from flatout.check.observe.operators.recorder import MAX_CALLS, DeepStep, Example, OperatorKey, RecordedCall, TensorMeta
from flatout.check.observe.steps.schedule import Mode
from flatout.check.observe.steps.timeline import TimedStep
from flatout.core.records.evidence import Operator, Phase, TensorSpec, Trace
from flatout.machine.cost.flops import operator_flop
from flatout.machine.cost.traffic import operator_traffic

_VIEW_NAMES: Final = """
view _unsafe_view reshape expand expand_as t transpose permute select slice unsqueeze squeeze detach alias
as_strided split split_with_sizes chunk unbind unfold diagonal _reshape_alias lift_fresh narrow empty
empty_like empty_strided new_empty new_empty_strided
"""
VIEWS: Final = frozenset(f"aten.{name}" for name in _VIEW_NAMES.split())
"""Operators that move no data."""


_USUAL_FRACTION: Final = 0.25
_REGULAR_FRACTION: Final = 0.5
"""Where so many steps make the same number of training calls, more of them belong to something that few steps do."""
_NEARBY: Final = 9
_INDEX_BYTES: Final = torch.int64.itemsize
_TRUSTED_SAMPLES: Final = 25
"""With so many samples on a line, the samples and the recorded times weigh the same (a sampling error of a fifth)."""


class Nearby(NamedTuple):
    """The light steps closest to the deep ones: seconds of the whole and of each group of phases."""

    step_s: float
    groups: dict[str, float]


class OperatorTable:
    """Rows of operators, the live examples behind them, and the order of the last deep step."""

    def __init__(self, observation: ObservationState) -> None:
        self.keys: list[OperatorKey] = []
        self.examples: list[Example | None] = []
        self.operators: tuple[Operator, ...] = ()
        self.trace = Trace()
        self.agreement: float | None = None
        self.device_s: float | None = None
        self.nearby_step_s: float | None = None
        self.in_torch_s: dict[int, float] = defaultdict(float)
        """By line, what the host spends of a step inside torch's operators and waiting for a device; without the backward."""
        escapes = observation.collector(EscapingTensors)
        self._escaping = escapes.keys if escapes.is_known else None
        usual = usual_root_calls([s for s in observation.timeline.steps if s.mode == Mode.LIGHT.value])
        ordinary = [s for s in observation.deep.steps if usual.has(s)]
        self.passive_phase: Phase = "no_grad" if ordinary else "evaluation"
        """The phase of what ran in evaluation mode or without gradients in the steps that are in the table."""
        steps = ordinary[1:] or ordinary or observation.deep.steps
        if steps:
            nearby = nearby_steps(observation.timeline.steps, num_deep=len(observation.deep.steps))
            for clock in observation.listening(CommunicationClock):
                nearby = _less_communication(nearby, clock)
            self._fill(observation, steps, nearby)

    def _fill(self, observation: ObservationState, steps: list[DeepStep], nearby: Nearby) -> None:
        self.nearby_step_s = nearby.step_s or None
        is_whole = not any(s.truncated for s in steps)
        note = f"a step runs more than {MAX_CALLS:,} operators; those after that are in no table of this report"
        if not is_whole and note not in observation.notes:
            observation.notes.append(note)
        is_correctable = is_whole and not observation.is_device and nearby.step_s > 0
        costs = _costs(observation.deep.interception, steps, nearby) if is_correctable else {}
        rows = _rows(steps, costs, observation.deep.interception)
        self.keys = [r.key for r in rows]
        self.examples = [observation.deep.examples.get(k) for k in self.keys]
        if is_correctable:
            accounted_s = sum(r.op_s + r.python_s for r in _rows(steps, {}, observation.deep.interception)) / len(steps)
            self.agreement = accounted_s / nearby.step_s
            rows = _to_samples(_to_phases(rows, len(steps), nearby), observation, len(steps))
            rows = _to_phases(rows, len(steps), nearby)  # the samples shift time between lines and add none
        bound: Bound = "sum"
        if observation.is_device:
            recorded_s = sum(r.op_s for r in rows) / len(steps)
            kernels, reads = observation.collector(KernelProfiling).times, observation.collector(HostReads).host_reads()
            self.device_s = kernels.busy_s if kernels.busy_s is not None else recorded_s
            rows = to_kernels(rows, kernels.device_step, len(steps), self.device_s)
            wait_s = waited_s(reads, kernels.device_step)
            if nearby.step_s > 0:
                rows = to_host(rows, len(steps), max(0.0, _recorded_s(rows, nearby, is_whole=is_whole) - wait_s))
            bound = bound_of(self.device_s, step_s=nearby.step_s, wait_s=wait_s)
            for read in reads:
                self.in_torch_s[read.source] += read.wait_s
        for row in rows:
            if row.key.phase != "backward":
                self.in_torch_s[row.key.site] += (row.dispatch_s if observation.is_device else row.op_s) / len(steps)
        flop = observation.deep.graph_flop
        operators = (_operator(r, len(steps), bound, flop.get(r.key)) for r in rows)
        self.operators = tuple(
            msgspec.structs.replace(o, phase=self.passive_phase) if o.phase == "evaluation" else o for o in operators
        )
        index = {key: row for row, key in enumerate(self.keys)}
        last = steps[-1].calls
        self.trace = Trace(
            operator=tuple(index[c.key] for c in last),
            producers=tuple(c.producers for c in last),
            truncated=not is_whole,
            escapes=None if self._escaping is None else tuple(i for i, c in enumerate(last) if c.key in self._escaping),
        )


def _recorded_s(rows: list[OperatorRow], nearby: Nearby, *, is_whole: bool) -> float:
    """Seconds of a light step in the phases of the operators that were recorded: of a step that was cut, not in all."""
    if is_whole:
        return nearby.step_s
    return sum(nearby.groups.get(group, 0.0) for group in {phase_group(r.key.phase) for r in rows})


def _rows(steps: list[DeepStep], costs: dict[str, InterceptionCost], default: InterceptionCost) -> list[OperatorRow]:
    """Calls added up by key, each less what recording it cost in its group of phases."""
    op_s: dict[OperatorKey, list[float]] = defaultdict(list)
    python_s: dict[OperatorKey, float] = defaultdict(float)
    dispatch_s: dict[OperatorKey, float] = defaultdict(float)
    for step in steps:
        for call in step.calls:
            op, python, dispatch = _times(call, costs.get(phase_group(call.key.phase), default))
            op_s[call.key].append(op)
            python_s[call.key] += python
            dispatch_s[call.key] += dispatch
        is_device = any(call.events is not None for call in step.calls)
    # A kernel takes the same time at each call; where the host was late, the time between its two events is longer.
    typical = min if is_device else statistics.fmean
    return [
        OperatorRow(key, len(times), typical(times) * len(times), python_s[key], dispatch_s[key])
        for key, times in op_s.items()
    ]


def _costs(known: InterceptionCost, steps: list[DeepStep], nearby: Nearby) -> dict[str, InterceptionCost]:
    """What recording cost a call of each group, so that the group's calls add up to its time in a light step."""
    calls: Counter[str] = Counter(phase_group(c.key.phase) for s in steps for c in s.calls)
    seconds: dict[str, float] = defaultdict(float)
    for row in _rows(steps, {}, known):
        seconds[phase_group(row.key.phase)] += row.op_s + row.python_s
    in_op = known.in_op_s / (known.in_op_s + known.in_python_s) if known.in_op_s + known.in_python_s > 0 else 0.5
    costs = {}
    for group, num in calls.items():
        excess_s = max(0.0, seconds[group] / len(steps) - nearby.groups.get(group, 0.0)) * len(steps) / num
        costs[group] = InterceptionCost(known.in_op_s + in_op * excess_s, known.in_python_s + (1 - in_op) * excess_s)
    return costs


def _to_phases(rows: list[OperatorRow], num_steps: int, nearby: Nearby) -> list[OperatorRow]:
    """Rows scaled so that each group adds up to its time in a light step."""
    seconds: dict[str, float] = defaultdict(float)
    for row in rows:
        seconds[phase_group(row.key.phase)] += (row.op_s + row.python_s) / num_steps
    scale = {g: nearby.groups.get(g, 0.0) / s if s > 0 else 1.0 for g, s in seconds.items()}
    return [r.scaled(scale[phase_group(r.key.phase)]) for r in rows]


def _to_samples(rows: list[OperatorRow], observation: ObservationState, num_steps: int) -> list[OperatorRow]:
    """Forward rows drawn towards the sampled seconds of their line, the more the more samples there are."""
    num_sampled = max(1, observation.num_sampled)
    sampled_s: dict[int, float] = defaultdict(float)
    samples: dict[int, float] = defaultdict(float)
    for spot, seconds, count in observation.sampler.by_phase(observation.deep.phases_of_lines()):
        if phase_group(spot.phase) == "rest":
            sampled_s[spot.site] += seconds / num_sampled
            samples[spot.site] += count
    recorded_s: dict[int, float] = defaultdict(float)
    for row in rows:
        if phase_group(row.key.phase) == "rest":
            recorded_s[row.key.site] += (row.op_s + row.python_s) / num_steps
    scale = {}
    for site, seconds in recorded_s.items():
        weight = samples[site] / (samples[site] + _TRUSTED_SAMPLES)
        # A line that Python alone keeps busy between its operators is known by the samples; its operators do not grow for it.
        scale[site] = min(2.0, 1.0 + weight * (sampled_s[site] / seconds - 1.0)) if seconds > 0 and site >= 0 else 1.0
    return [r.scaled(scale[r.key.site]) if phase_group(r.key.phase) == "rest" else r for r in rows]


def nearby_steps(steps: list[TimedStep], *, num_deep: int) -> Nearby:
    """Medians of the ordinary light steps closest to the last `num_deep` deep ones: a step may grow while the script runs.

    On a device they are those before its profiler was first opened, which slows launches down from then on.
    """
    deep = [i for i, s in enumerate(steps) if s.mode == Mode.DEEP.value][-num_deep:]
    profiled = next((i for i, s in enumerate(steps) if s.mode == Mode.KERNELS.value), len(steps))
    light = [(i, s) for i, s in enumerate(steps) if s.mode == Mode.LIGHT.value]
    light = [(i, s) for i, s in light if i < profiled] or light
    if not deep or not light:
        return Nearby(0.0, {})
    usual = usual_root_calls([s for _, s in light])
    ordinary = sorted((min(abs(i - d) for d in deep), i) for i, s in light if usual.has(s))
    near = [steps[i] for _, i in ordinary[:_NEARBY]]
    whole_s = statistics.median(s.duration_s for s in near)
    groups = {g: statistics.median(s.phases.get(g, 0.0) for s in near) for g in GROUPS}
    return Nearby(whole_s, {**groups, "rest": max(0.0, whole_s - sum(groups.values()))})


def _less_communication(nearby: Nearby, clock: CommunicationClock) -> Nearby:
    """The rank's own work alone: a wait in a collective is no operator's time."""
    groups = {g: max(0.0, s - clock.exposed_s(g)) for g, s in nearby.groups.items() if g != "rest"}
    if not groups:
        return nearby
    step_s = max(0.0, nearby.step_s - clock.exposed_s())
    return Nearby(step_s, {**groups, "rest": max(0.0, step_s - sum(groups.values()))})


class UsualRootCalls(NamedTuple):
    """How many calls of root modules a step without an evaluation pass makes."""

    most: int
    is_of_evaluation: bool
    """Whether only calls in evaluation mode or without gradients count: where others vary (episodes), they tell nothing."""

    def has(self, step: TimedStep | DeepStep) -> bool:
        """Whether the step makes no more than that."""
        return (step.evaluation_calls if self.is_of_evaluation else step.root_calls) <= self.most


def usual_root_calls(steps: list[TimedStep]) -> UsualRootCalls:
    """The fewest calls that a good share of the steps make; where all differ (rollouts), the most there are."""
    training = Counter(s.root_calls - s.evaluation_calls for s in steps)
    is_regular = max(training.values(), default=0) >= _REGULAR_FRACTION * len(steps)
    counts = Counter(s.root_calls if is_regular else s.evaluation_calls for s in steps)
    common = [calls for calls, num in counts.items() if num >= _USUAL_FRACTION * len(steps)]
    return UsualRootCalls(min(common, default=max(counts, default=0)), not is_regular)


def _times(call: RecordedCall, cost: InterceptionCost) -> tuple[float, float, float]:
    """Seconds of the operator, of Python, and of that in dispatch, of one call without the recorder's share."""
    python = max(0.0, call.python_s - cost.in_python_s)
    if call.events is None:
        return max(0.0, call.op_s - cost.in_op_s), python, 0.0
    call.events[1].synchronize()
    device_s = call.events[0].elapsed_time(call.events[1]) * 1e-3 - cost.in_device_s
    dispatch = max(0.0, call.op_s - cost.in_op_s)
    return max(0.0, device_s), python + dispatch, dispatch


def _operator(row: OperatorRow, num_steps: int, bound: Bound, flop: int | None) -> Operator:
    key = row.key
    inputs = tuple(map(_spec, key.inputs))
    outputs = tuple(map(_spec, key.outputs))
    sizes = [[_num_bytes(m) for m in metas] for metas in (key.inputs, key.outputs)]
    return Operator(
        op=key.op,
        source=key.site,
        module=key.module,
        phase=cast(Phase, key.phase),
        inputs=inputs,
        outputs=outputs,
        num_calls=row.num_calls / num_steps,
        op_s=row.op_s / num_steps,
        python_s=row.python_s / num_steps,
        flop=round(
            _density(key.inputs)
            * (flop or operator_flop(key.op, [m.shape for m in key.inputs], [m.shape for m in key.outputs]) or 0)
        ),
        bytes=0 if key.op in VIEWS else operator_traffic(key.op, *sizes),
        scalars=key.scalars,
        bound=bound,
    )


def _spec(meta: TensorMeta) -> TensorSpec:
    return TensorSpec(shape=meta.shape, dtype=str(meta.dtype).removeprefix("torch."), is_contiguous=meta.is_contiguous)


def _num_bytes(meta: TensorMeta) -> int:
    """Bytes of the numbers that a tensor holds, with the indices of a sparse one."""
    if meta.num_stored is None:
        return prod(meta.shape) * meta.dtype.itemsize
    return meta.num_stored * (meta.dtype.itemsize + len(meta.shape) * _INDEX_BYTES)


def _density(inputs: Sequence[TensorMeta]) -> float:
    """The share of a dense product's arithmetic that a sparse input leaves."""
    least = 1.0
    for meta in inputs:
        num_elements = prod(meta.shape)
        if meta.num_stored is not None and num_elements:
            least = min(least, meta.num_stored / num_elements)
    return least
