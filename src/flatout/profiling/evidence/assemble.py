"""From what an Observer kept to Evidence."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Final, cast

import msgspec

from flatout.measure.stats import median_estimate
from flatout.profiling.calls import Root, iter_tensors
from flatout.profiling.evidence.accounts import OperatorTable, usual_root_calls
from flatout.profiling.observer import Observer
from flatout.profiling.steps.schedule import Mode
from flatout.profiling.steps.timeline import COMPILE, UNWATCHED, TimedStep
from flatout.records.device import DeviceStep
from flatout.records.evidence import (
    Constant,
    LineTime,
    Loader,
    Model,
    Observing,
    OptimizerUse,
    Padding,
    Phase,
    RepeatedModule,
    Steps,
    UnusedGradient,
)
from flatout.records.workload import Source

_FEWEST_UNWATCHED: Final = 10
_FEWEST_ROUNDS: Final = 5
_RARE: Final = 2.0
"""A step with so many times the usual seconds of watched calls has made one that is made in few steps."""
_FEWEST_COMPILING: Final = 3
"""Compilations in timed steps, the last in their later half, before they count as a cost of every step."""
_FEWEST_FOR_INTERVAL: Final = 6
"""Order statistics of fewer values do not reach 95 %."""


def steps_of(observer: Observer, device_s: float | None) -> Steps:
    """Honest timing from the light steps (from the warm-up when there are no others)."""
    observer.timeline.drain()
    timed = observer.timeline.steps
    profiled = next((i for i, s in enumerate(timed) if s.mode == Mode.KERNELS.value), len(timed))
    light = [s for s in timed[:profiled] if s.mode == Mode.LIGHT.value] or timed[1:] or timed
    kind = "training" if observer.kind == "manual" else observer.kind
    if not light:
        return Steps(
            kind=kind, num_seen=observer.seen, num_timed=0, step_s=0.0, low_s=0.0, high_s=0.0, device_s=device_s
        )
    unwatched = [s for s in timed[:profiled] if s.mode == UNWATCHED]
    num_timed = len(light) + len(unwatched)
    compile_s = _going_on_s(timed) / num_timed
    rare_s = _rare_s(observer, timed)
    ordinary, extra = _split([_without_compiling(s) for s in light])
    ordinary, starting = _without_starts(ordinary)
    round_size = _round_size(observer, len(ordinary))
    ordinary = _rounds(ordinary, round_size)
    plain = [s for s in unwatched if not (starting and s.num_starts)]
    durations = [s.duration_s for s in _rounds(_usual(plain, ordinary, extra), round_size)]
    middle = statistics.median(durations)
    interval = median_estimate(durations)
    evaluation_s = sum(s.weight * max(0.0, s.duration_s - middle) for s in extra) / sum(s.weight for s in light)
    late = [*starting, *(s for s in unwatched if s.num_starts)] if starting else []
    restart_s = sum(max(0.0, s.duration_s - middle) for s in late) / num_timed
    between = {"evaluation": evaluation_s, "data": restart_s, COMPILE: compile_s, "other": rare_s}
    phases = _with(_phases(ordinary, middle), between)
    return Steps(
        kind=kind,
        num_seen=observer.seen,
        num_timed=num_timed,
        step_s=middle,
        low_s=interval.low,
        high_s=interval.high,
        evaluation_s=evaluation_s,
        restart_s=restart_s,
        occasional_s=compile_s + rare_s,
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


def _rare_s(observer: Observer, timed: list[TimedStep]) -> float:
    """Mean seconds of the calls (files saved, copies made) that few ordinary steps make, so that the median misses them."""
    light = [i for i, s in enumerate(timed) if s.mode in (Mode.LIGHT.value, UNWATCHED)]
    usual = usual_root_calls([timed[i] for i in light if timed[i].mode != UNWATCHED])
    seconds = [observer.uses.by_step.get(i, 0.0) for i in light if timed[i].root_calls <= usual]
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


def _split(steps: list[TimedStep]) -> tuple[list[TimedStep], list[TimedStep]]:
    """Ordinary steps, and those with more root calls than usual: an evaluation pass lies in them."""
    usual = usual_root_calls(steps)
    ordinary = [s for s in steps if s.root_calls <= usual]
    return ordinary, [s for s in steps if s.root_calls > usual]


def _without_starts(steps: list[TimedStep]) -> tuple[list[TimedStep], list[TimedStep]]:
    """Steps in which no loader started over, and those in which one did; where nearly all steps start one, none is apart."""
    plain = [s for s in steps if not s.num_starts]
    return (plain, [s for s in steps if s.num_starts]) if 2 * len(plain) > len(steps) else (steps, [])


def _round_size(observer: Observer, num_steps: int) -> int:
    """Steps that make one round of a loader's workers: they hand over batches in turn, so single steps wait unevenly."""
    workers = max((u.num_workers for u in observer.feeding.loaders.values() if u.fetches), default=1)
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

    A step that another process held up is long in whatever phase it was in; it must not speak for the usual step.
    """
    by_length = sorted(ordinary, key=lambda s: s.duration_s)
    middle = by_length[len(by_length) // 4 : -(len(by_length) // 4) or None]
    total = sum(s.duration_s for s in middle)
    names = {name for s in middle for name in s.phases}
    return {n: sum(s.phases.get(n, 0.0) for s in middle) / total * step_s for n in sorted(names)} if total else {}


def device_step_of(observer: Observer, steps: Steps) -> DeviceStep | None:
    """What the device did in the profiled step, how much longer that took than an honest one, and the honest one's gaps.

    Kernels take as long profiled as not; what the profiler adds, it adds to the host, and so to the gaps. The device idles in an
    honest step for what its busy time leaves of it, before each line in the share seen.
    """
    step = observer.kernels.device_step
    if step is None or not steps.step_s:
        return step
    profiled_s = sum(g.seconds for g in step.gaps)
    scale = max(0.0, steps.step_s - step.busy_s) / profiled_s if profiled_s else 1.0
    gaps = tuple(msgspec.structs.replace(g, seconds=g.seconds * scale) for g in step.gaps)
    return msgspec.structs.replace(step, slowdown=step.span_s / steps.step_s, gaps=gaps)


def _phase_intervals(ordinary: list[TimedStep], phases: dict[str, float]) -> dict[str, tuple[float, float]]:
    """The interval of each phase's median, laid around the phase's seconds (its share of the median step)."""
    intervals = {}
    for name, seconds in phases.items():
        spread = median_estimate([s.phases.get(name, 0.0) for s in ordinary])
        if spread.num_samples >= _FEWEST_FOR_INTERVAL and spread.low > 0:
            intervals[name] = (seconds * spread.low / spread.value, seconds * spread.high / spread.value)
    return intervals


def constants_of(observer: Observer, table: OperatorTable) -> tuple[Constant, ...]:
    """Lines whose constant results were equal in all deep steps."""
    steps = observer.deep.steps
    if len(steps) < 2:
        return ()
    by_site: dict[int, list[int]] = defaultdict(list)
    flags = {call.key for call in steps[-1].calls if call.is_constant}
    for row, key in enumerate(table.keys):
        if key in flags:
            by_site[key.site].append(row)
    found = []
    for site, marks in steps[-1].constants.items():
        if all(s.constants.get(site) == marks for s in steps) and by_site[site]:
            rows = by_site[site]
            operators = [table.operators[r] for r in rows]
            found.append(
                Constant(
                    source=site,
                    operators=tuple(rows),
                    num_tensors=len(marks),
                    bytes=sum(o.bytes for o in operators),
                    seconds=sum(o.total_s for o in operators),
                )
            )
    return tuple(found)


def callers_of(observer: Observer) -> dict[int, tuple[int, ...]]:
    """Who called the functions of the lines that were sampled, ran operators, or stepped an optimizer."""
    known = observer.uses.callers | observer.sampler.callers | observer.deep.callers | observer.optimizing.callers
    return {site: chain for site, chain in known.items() if site >= 0 and chain}


def lines_of(observer: Observer, table: OperatorTable, step_s: float) -> tuple[LineTime, ...]:
    """Sampled lines in seconds of a step, and the lines of worker processes."""
    num_steps = max(1, observer.num_sampled)
    # Steps may grow after they were recorded.
    growth = max(1.0, step_s / table.nearby_step_s) if table.nearby_step_s else 1.0
    merged: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for spot, seconds, samples in observer.sampler.by_phase(observer.deep.phases_of_lines()):
        row = merged[spot.phase, spot.site]
        row[0] += seconds / num_steps
        row[1] += samples
        row[2] += seconds / num_steps if spot.is_own else 0.0
    rows = [
        LineTime(
            source=site,
            phase=cast(Phase, phase),
            seconds=seconds,
            num_samples=round(num_samples),
            in_python_s=max(0.0, own_s - growth * table.in_torch_s.get(site, 0.0)),
        )
        for (phase, site), (seconds, num_samples, own_s) in merged.items()
    ]
    for file, line, function, seconds, count in observer.feeding.worker_samples():
        site = observer.sites.add(Source(file=file, line=line, function=function))
        a_step_s = seconds / max(1, observer.seen)
        rows.append(LineTime(source=site, phase="data", seconds=a_step_s, num_samples=count, process="worker"))
    return tuple(sorted(rows, key=lambda r: -r.seconds))


def models_of(observer: Observer) -> tuple[tuple[Model, ...], list[Root]]:
    """Root modules that hold parameters, with the objects behind them in the same order."""
    roots = [r for r in observer.calls.roots.values() if r.has_parameters]
    steps = max(1, sum(s.weight for s in observer.timeline.steps))
    models = tuple(
        Model(
            name=r.name,
            source=r.site,
            callers=r.callers,
            num_parameters=r.num_parameters,
            is_training=r.is_training,
            grad_enabled=r.grad_enabled,
            calls=r.weighted_calls / steps,
            call_s=r.total_s / max(1, r.calls),
            num_calls_seen=r.calls,
            num_graphs_built=r.graphs_built,
            num_graphs_used=min(r.graphs_used, r.graphs_built),
            num_compared_calls=r.num_compared,
            num_prefix_calls=r.num_prefix,
            captured_length=r.captured_length,
            batch_size=_rows_of(r),
        )
        for r in roots
    )
    return models, roots


def _rows_of(root: Root) -> int:
    if root.captured is None:
        return 0
    return next((t.shape[0] for t in iter_tensors((root.captured.args, root.captured.kwargs)) if t.dim() > 1), 0)


def optimizers_of(observer: Observer) -> tuple[OptimizerUse, ...]:
    """The optimizers that stepped."""
    return tuple(
        OptimizerUse(
            name=w.name,
            variant=w.variant,
            source=w.site,
            constructed=w.constructed,
            num_tensors=w.num_tensors,
            num_elements=w.num_elements,
            step_s=statistics.median(w.step_s) if w.step_s else 0.0,
            fused_supported=w.fused_supported,
        )
        for w in observer.optimizing.watched.values()
    )


def loaders_of(observer: Observer) -> tuple[Loader, ...]:
    """The DataLoaders that were iterated."""
    steps = max(1, sum(s.weight for s in observer.timeline.steps))
    return tuple(
        Loader(
            source=u.site,
            getitem=u.getitem_site,
            collate=u.collate_site,
            dataset=type(u.dataset).__name__,
            num_workers=u.num_workers,
            batch_size=u.batch_size,
            wait_s=u.wait_s / max(1, u.fetches),
            fetches=u.weighted_fetches / steps,
            is_map_style=u.is_map_style,
            has_own_collate=u.has_own_collate,
            pin_memory=u.pin_memory,
            persistent_workers=u.persistent_workers,
            prefetch_factor=u.prefetch_factor,
            num_epochs=max(0, observer.feeding.epochs[id(u.dataset)] - 1) / max(1, observer.seen),
            first_wait_s=statistics.fmean(u.first_waits_s) if u.first_waits_s else 0.0,
            is_in_ram=u.is_in_ram,
            sampler=u.sampler,
            constructed=u.constructed,
        )
        for u in observer.feeding.loaders.values()
    )


def unused_gradients_of(observer: Observer, table: OperatorTable) -> tuple[UnusedGradient, ...]:
    """Modules whose own parameters get gradients that no optimizer reads; one entry per root module."""
    deep = observer.deep
    by_root: dict[str, set[str]] = defaultdict(set)
    for path in deep.unused:
        if path not in deep.trained_modules:
            by_root[path.partition(".")[0]].add(path)
    found = (_unused_gradient(observer, table, root, paths) for root, paths in by_root.items())
    return tuple(f for f in found if f is not None)


def _unused_gradient(observer: Observer, table: OperatorTable, root: str, paths: set[str]) -> UnusedGradient | None:
    deep = observer.deep
    rows = [i for i, o in enumerate(table.operators) if o.phase == "backward" and o.module in paths]
    if not rows:
        return None
    is_whole = not any(path.partition(".")[0] == root for path in deep.trained_modules)
    if is_whole:
        calls = [r for r in observer.calls.roots.values() if r.name == root]
        place = max(calls, key=lambda r: r.total_s).site if calls else -1
    else:
        forward = [o for o in table.operators if o.phase == "forward" and o.source >= 0]
        frozen = [o.source for o in forward if o.module in paths]
        sources = observer.sites.table()
        others = {sources[o.source].function for o in forward if o.module in deep.trained_modules}
        chain = (frozen[0], *deep.callers.get(frozen[0], ())) if frozen else ()
        # Where trained code calls the frozen part: the innermost line whose function does other work too.
        place = next((s for s in chain if sources[s].function in others), chain[0] if chain else -1)
    return UnusedGradient(
        num_tensors=sum(deep.unused[p][0] for p in paths),
        num_elements=sum(deep.unused[p][1] for p in paths),
        modules=tuple(sorted(paths)),
        operators=tuple(rows),
        seconds=sum(table.operators[i].total_s for i in rows),
        source=place,
        is_whole=is_whole,
    )


def paddings_of(observer: Observer) -> tuple[Padding, ...]:
    """Tensors of the batches that end in constants."""
    rows = []
    for found in observer.deep.padded.values():
        padding = sum(found.padding) / len(found.padding)
        if padding > 0:
            signs = observer.deep.padding_signs + (("integers",) if len(found.shape) == 2 else ())
            rows.append(
                Padding(
                    name=found.name,
                    source=found.source,
                    shape=found.shape,
                    dtype=found.dtype,
                    pad_value=found.pad_value,
                    padding_fraction=padding,
                    longest_fraction=sum(found.longest) / len(found.longest),
                    num_batches=len(found.padding),
                    signs=signs,
                    mean_length=sum(found.mean_length) / len(found.mean_length),
                    longest=max(found.longest) * found.shape[1],
                )
            )
    return tuple(rows)


def recurrences_of(observer: Observer, table: OperatorTable) -> tuple[RepeatedModule, ...]:
    """Recurrent cells called step by step."""
    if not observer.deep.steps:
        return ()
    return tuple(
        RepeatedModule(
            kind=c.kind,
            module=c.path,
            source=c.site,
            calls=c.calls,
            batch=c.batch,
            input_size=c.input_size,
            hidden_size=c.hidden_size,
            operators=tuple(i for i, o in enumerate(table.operators) if o.module == c.path),
        )
        for c in observer.deep.steps[-1].cells
    )


def observing_of(observer: Observer, table: OperatorTable, other_s: float) -> Observing:
    """What all this cost."""
    return Observing(
        light_fraction=observer.light_fraction(),
        deep_s=max(0.0, observer.deep_s),
        trials_s=observer.trials_s,
        other_s=other_s,
        num_deep_steps=len(observer.deep.steps),
        deep_agreement=table.agreement,
        nearby_step_s=table.nearby_step_s,
    )
