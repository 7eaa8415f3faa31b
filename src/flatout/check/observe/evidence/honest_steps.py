"""How long a step takes when little disturbs it, what it spends where, and what the device did meanwhile."""

from __future__ import annotations

import statistics
from typing import Final

from flatout.check.observe.collectors.loaders import LoaderWatch
from flatout.check.observe.collectors.uses import CallUses
from flatout.check.observe.evidence.accounts import usual_root_calls
from flatout.check.observe.observation import ObservationState
from flatout.check.observe.steps.schedule import Mode
from flatout.check.observe.steps.timeline import COMPILE, UNWATCHED, TimedStep
from flatout.core.records.evidence import Steps
from flatout.machine.measure.stats import median_estimate

_FEWEST_UNWATCHED: Final = 10
_FEWEST_ROUNDS: Final = 5
_RARE: Final = 2.0
"""A step with so many times the usual seconds of watched calls has a call that few steps have."""
_FEWEST_COMPILING: Final = 3
"""Compilations in timed steps, the last in their later half, before they count as a cost of every step."""
_FEWEST_FOR_INTERVAL: Final = 6
"""Order statistics of fewer values do not reach 95 %."""


def steps_of(observation: ObservationState, device_s: float | None) -> Steps:
    """Honest timing from the light steps (from the warm-up when there are no others)."""
    observation.timeline.drain()
    timed = observation.timeline.steps
    profiled = next((i for i, s in enumerate(timed) if s.mode == Mode.KERNELS.value), len(timed))
    light = [s for s in timed[:profiled] if s.mode == Mode.LIGHT.value] or timed[1:] or timed
    kind = "training" if observation.kind == "manual" else observation.kind
    if not light:
        return Steps(
            kind=kind,
            num_observed=observation.num_steps,
            num_timed=0,
            step_s=0.0,
            low_s=0.0,
            high_s=0.0,
            device_s=device_s,
        )
    unwatched = [s for s in timed[:profiled] if s.mode == UNWATCHED]
    num_timed = len(light) + len(unwatched)
    compile_s = _going_on_s(timed) / num_timed
    rare_s = _rare_s(observation, timed)
    ordinary, extra = _split([_without_compiling(s) for s in light])
    ordinary = [_without_evaluation(s) for s in ordinary]
    ordinary, starting = _without_starts(ordinary)
    round_size = _round_size(observation, len(ordinary))
    ordinary = _rounds(ordinary, round_size)
    plain = [s for s in unwatched if not (starting and s.num_starts)]
    durations = [s.duration_s for s in _rounds(_usual(plain, ordinary, extra), round_size)]
    middle = statistics.median(durations)
    interval = median_estimate(durations)
    evaluation_s = sum(s.weight * max(0.0, s.duration_s - middle) for s in extra) / sum(s.weight for s in light)
    late = [*starting, *(s for s in unwatched if s.num_starts)] if starting else []
    restart_s = sum(max(0.0, s.duration_s - middle) for s in late) / num_timed
    acting_s = evaluation_s if _acts_in_extra(observation, extra) else 0.0
    evaluation_s -= acting_s
    acting = "rollout" if any("rollout" in s.phases for s in ordinary) else "no_grad"
    between = {"evaluation": evaluation_s, acting: acting_s, "data": restart_s, COMPILE: compile_s, "other": rare_s}
    phases = _with(_phases(ordinary, middle), between)
    return Steps(
        kind=kind,
        num_observed=observation.num_steps,
        num_timed=num_timed,
        step_s=middle,
        low_s=interval.low,
        high_s=interval.high,
        evaluation_s=evaluation_s,
        restart_s=restart_s,
        occasional_s=compile_s + rare_s + acting_s,
        device_s=device_s,
        durations_s=tuple(round(s.duration_s, 9) for s in light[-2000:]),
        phases=phases,
        phase_intervals=_phase_intervals(ordinary, phases),
    )


def _usual(unwatched: list[TimedStep], ordinary: list[TimedStep], extra: list[TimedStep]) -> list[TimedStep]:
    """The steps that the step time is the median of: the unwatched ones where there are enough, which nothing disturbed."""
    if len(unwatched) < _FEWEST_UNWATCHED:
        return ordinary
    if not extra:
        return unwatched
    lengths = (statistics.median(s.duration_s for s in ordinary), statistics.median(s.duration_s for s in extra))
    return [s for s in unwatched if s.duration_s < sum(lengths) / 2] or ordinary


def _with(phases: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    """The phases with these seconds added."""
    return phases | {name: phases.get(name, 0.0) + seconds for name, seconds in more.items() if seconds > 0}


def _rare_s(observation: ObservationState, timed: list[TimedStep]) -> float:
    """Mean seconds of the calls (files saved, copies made) that few ordinary steps make, so that the median misses them."""
    light = [i for i, s in enumerate(timed) if s.mode in (Mode.LIGHT.value, UNWATCHED)]
    usual = usual_root_calls([timed[i] for i in light if timed[i].mode != UNWATCHED])
    by_step = observation.collector(CallUses).by_step
    seconds = [by_step.get(i, 0.0) for i in light if usual.has(timed[i])]
    if not seconds:
        return 0.0
    usual_s = statistics.median(seconds)
    return sum(s - usual_s for s in seconds if s > _RARE * usual_s) / len(light)


def _going_on_s(timed: list[TimedStep]) -> float:
    """Seconds of compiling in the timed steps, 0 where it faded: what is compiled once is no cost of every step."""
    seconds = [s.phases.get(COMPILE, 0.0) if s.mode in (Mode.LIGHT.value, UNWATCHED) else 0.0 for s in timed]
    compiling = [i for i, s in enumerate(seconds) if s > 0]
    goes_on = len(compiling) >= _FEWEST_COMPILING and compiling[-1] >= len(timed) // 2
    return sum(seconds) if goes_on else 0.0


def _without_compiling(step: TimedStep) -> TimedStep:
    compile_s = step.phases.get(COMPILE, 0.0)
    if not compile_s:
        return step
    phases = {name: seconds for name, seconds in step.phases.items() if name != COMPILE}
    return step._replace(duration_s=step.duration_s - compile_s, phases=phases)


def _without_evaluation(step: TimedStep) -> TimedStep:
    """An ordinary step: what runs without gradients in each of them is no evaluation (a target network, a teacher)."""
    if "evaluation" not in step.phases:
        return step
    phases = {("no_grad" if name == "evaluation" else name): seconds for name, seconds in step.phases.items()}
    return step._replace(phases=phases)


def _split(steps: list[TimedStep]) -> tuple[list[TimedStep], list[TimedStep]]:
    """Ordinary steps, and those with more root calls than usual: an evaluation pass lies in them."""
    usual = usual_root_calls(steps)
    return [s for s in steps if usual.has(s)], [s for s in steps if not usual.has(s)]


def _acts_in_extra(observation: ObservationState, extra: list[TimedStep]) -> bool:
    """Whether more calls than usual are more actions: an environment is stepped, and no network was put into evaluation mode."""
    roots = observation.calls.roots.values()
    is_evaluating = any(r.has_parameters and not r.is_training for r in roots)
    return not is_evaluating and any("environment" in s.phases for s in extra)


def _without_starts(steps: list[TimedStep]) -> tuple[list[TimedStep], list[TimedStep]]:
    """Steps in which no loader started over, and those in which one did; where nearly all steps start one, all are ordinary."""
    plain = [s for s in steps if not s.num_starts]
    return (plain, [s for s in steps if s.num_starts]) if 2 * len(plain) > len(steps) else (steps, [])


def _round_size(observation: ObservationState, num_steps: int) -> int:
    """Steps that make one round of a loader's workers: they hand over batches in turn, so single steps wait unevenly."""
    workers = max((u.num_workers for u in observation.collector(LoaderWatch).loaders.values() if u.fetches), default=1)
    return max(1, min(workers, num_steps // _FEWEST_ROUNDS))


def _rounds(steps: list[TimedStep], size: int) -> list[TimedStep]:
    """The mean step of each `size` that follow one another."""
    if size == 1:
        return steps
    means = []
    for start in range(0, len(steps) - size + 1, size):
        chunk = steps[start : start + size]
        names = {name for s in chunk for name in s.phases}
        means.append(
            chunk[0]._replace(
                duration_s=sum(s.duration_s for s in chunk) / size,
                phases={n: sum(s.phases.get(n, 0.0) for s in chunk) / size for n in names},
            )
        )
    return means


def _phases(ordinary: list[TimedStep], step_s: float) -> dict[str, float]:
    """Share of each phase in the middle half of the steps, scaled to the median step.

    A step that another process held up is long in whatever phase it was in; it must not count as a usual step.
    """
    by_length = sorted(ordinary, key=lambda s: s.duration_s)
    middle = by_length[len(by_length) // 4 : -(len(by_length) // 4) or None]
    total = sum(s.duration_s for s in middle)
    names = {name for s in middle for name in s.phases}
    return {n: sum(s.phases.get(n, 0.0) for s in middle) / total * step_s for n in sorted(names)} if total else {}


def _phase_intervals(ordinary: list[TimedStep], phases: dict[str, float]) -> dict[str, tuple[float, float]]:
    """The interval of each phase's median, scaled to the phase's seconds (its share of the median step)."""
    intervals = {}
    for name, seconds in phases.items():
        spread = median_estimate([s.phases.get(name, 0.0) for s in ordinary])
        if spread.num_samples >= _FEWEST_FOR_INTERVAL and spread.low > 0:
            intervals[name] = (seconds * spread.low / spread.value, seconds * spread.high / spread.value)
    return intervals
