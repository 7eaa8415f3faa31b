"""The parts of the Evidence that come from the observation itself and not from a collector."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Final, cast

import msgspec

from flatout.check.observe.calls import RootModule
from flatout.check.observe.evidence.accounts import OperatorTable
from flatout.check.observe.observation import ObservationState
from flatout.check.observe.steps.timeline import UNWATCHED
from flatout.core.records.evidence import (
    Constant,
    LineTime,
    Model,
    Observing,
    OptimizerUse,
    Padding,
    Phase,
    RepeatedModule,
    Steps,
    UnusedGradient,
)
from flatout.core.tensors.nests import tensors_in

_MUCH_MORE: Final = 1.25
"""Times the step: sampled lines that add up to more are of steps that are longer than the median."""


def constant_lines_of(observation: ObservationState, table: OperatorTable) -> tuple[Constant, ...]:
    """Lines whose constant results were equal in all deep steps."""
    steps = observation.deep.steps
    if len(steps) < 2:
        return ()
    by_site: dict[int, list[int]] = defaultdict(list)
    flags = {call.key for call in steps[-1].calls if call.is_constant}
    for row, key in enumerate(table.keys):
        if key in flags:
            by_site[key.site].append(row)
    found = []
    for site, fingerprints in steps[-1].constants.items():
        if all(s.constants.get(site) == fingerprints for s in steps) and by_site[site]:
            rows = by_site[site]
            operators = [table.operators[r] for r in rows]
            found.append(
                Constant(
                    source=site,
                    operators=tuple(rows),
                    num_tensors=len(fingerprints),
                    bytes=sum(o.bytes for o in operators),
                    seconds=sum(o.total_s for o in operators),
                )
            )
    return tuple(found)


def callers_of(observation: ObservationState) -> dict[int, tuple[int, ...]]:
    """Who called the functions of the lines that were sampled, ran operators, or stepped an optimizer."""
    known = observation.sampler.callers | observation.deep.callers | observation.optimizing.callers
    return {site: call_stack for site, call_stack in known.items() if site >= 0 and call_stack}


def sampled_lines_of(observation: ObservationState, table: OperatorTable, steps: Steps) -> tuple[LineTime, ...]:
    """Sampled lines in seconds of a step, and the lines of worker processes.

    The samples are of all steps. Where a few are much longer than the median (episodes of a game that last longer and longer),
    they are scaled to the step that the report is of.
    """
    step_s = steps.step_s
    num_steps = max(1, observation.num_sampled)
    # Steps may grow after they were recorded.
    growth = max(1.0, step_s / table.nearby_step_s) if table.nearby_step_s else 1.0
    # Where no step stands out by an evaluation pass, what runs without gradients is part of every step.
    renamed = {} if steps.evaluation_s > 0 else {"evaluation": "no_grad"}
    merged: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for spot, seconds, samples in observation.sampler.by_phase(observation.deep.phases_of_lines()):
        row = merged[renamed.get(spot.phase, spot.phase), spot.site]
        row[0] += seconds / num_steps
        row[1] += samples
        row[2] += seconds / num_steps if spot.is_own else 0.0
    sampled_s = sum(seconds for seconds, _, _ in merged.values())
    scale = steps.whole_s / sampled_s if sampled_s > _MUCH_MORE * steps.whole_s > 0 else 1.0
    rows = [
        LineTime(
            source=site,
            phase=cast(Phase, phase),
            seconds=scale * seconds,
            num_samples=round(num_samples),
            in_python_s=max(0.0, scale * own_s - growth * table.in_torch_s.get(site, 0.0)),
        )
        for (phase, site), (seconds, num_samples, own_s) in merged.items()
    ]
    return tuple(sorted(rows, key=lambda r: -r.seconds))


def models_of(observation: ObservationState) -> tuple[tuple[Model, ...], list[RootModule]]:
    """Root modules that hold parameters, with the objects behind them in the same order."""
    roots = [r for r in observation.calls.roots.values() if r.has_parameters]
    steps = max(1, sum(s.weight for s in observation.timeline.steps))
    models = tuple(
        Model(
            name=r.name,
            source=r.site,
            callers=r.callers,
            num_parameters=r.num_parameters,
            is_training=r.is_training,
            grad_enabled=r.grad_enabled,
            calls=r.weighted_calls / steps,
            call_s=r.call_s,
            num_calls_observed=r.calls,
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


def _rows_of(root: RootModule) -> int:
    if root.captured is None:
        return 0
    return next((t.shape[0] for t in tensors_in((root.captured.args, root.captured.kwargs)) if t.dim() > 1), 0)


def optimizers_of(observation: ObservationState) -> tuple[OptimizerUse, ...]:
    """The optimizers that stepped, one record each."""
    num_watched = sum(1 for s in observation.timeline.steps if s.mode != UNWATCHED)
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
            calls=max(1.0, round(w.num_calls / num_watched, 2)) if num_watched else 1.0,
        )
        for w in observation.optimizing.watched.values()
    )


def unused_gradients_of(observation: ObservationState, table: OperatorTable) -> tuple[UnusedGradient, ...]:
    """Modules whose own parameters get gradients that no optimizer reads; one entry per root module."""
    deep = observation.deep
    by_root: dict[str, set[str]] = defaultdict(set)
    for path in deep.unused:
        if path not in deep.trained_modules:
            by_root[path.partition(".")[0]].add(path)
    found = (_unused_gradient(observation, table, root, paths) for root, paths in by_root.items())
    return tuple(f for f in found if f is not None)


def _unused_gradient(
    observation: ObservationState, table: OperatorTable, root: str, paths: set[str]
) -> UnusedGradient | None:
    deep = observation.deep
    rows = [i for i, o in enumerate(table.operators) if o.phase == "backward" and o.module in paths]
    if not rows:
        return None
    is_whole = not any(path.partition(".")[0] == root for path in deep.trained_modules)
    if is_whole:
        calls = [r for r in observation.calls.roots.values() if r.name == root]
        place = max(calls, key=lambda r: r.total_s).site if calls else -1
    else:
        forward = [o for o in table.operators if o.phase == "forward" and o.source >= 0]
        frozen = [o.source for o in forward if o.module in paths]
        sources = observation.sites.table()
        others = {sources[o.source].function for o in forward if o.module in deep.trained_modules}
        call_stack = (frozen[0], *deep.callers.get(frozen[0], ())) if frozen else ()
        # Where trained code calls the frozen part: the innermost line whose function does other work too.
        place = next((s for s in call_stack if sources[s].function in others), call_stack[0] if call_stack else -1)
    return UnusedGradient(
        num_tensors=sum(deep.unused[p][0] for p in paths),
        num_elements=sum(deep.unused[p][1] for p in paths),
        modules=tuple(sorted(paths)),
        operators=tuple(rows),
        seconds=sum(table.operators[i].total_s for i in rows),
        source=place,
        is_whole=is_whole,
    )


def paddings_of(observation: ObservationState) -> tuple[Padding, ...]:
    """Tensors of the batches that end in constants."""
    rows = []
    for found in observation.deep.padded.values():
        padding = sum(found.padding) / len(found.padding)
        if padding > 0:
            signs = observation.deep.padding_signs + (("integers",) if len(found.shape) == 2 else ())
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


def recurrences_of(observation: ObservationState, table: OperatorTable) -> tuple[RepeatedModule, ...]:
    """Recurrent cells called step by step."""
    if not observation.deep.steps:
        return ()
    return tuple(
        msgspec.structs.replace(c, operators=tuple(i for i, o in enumerate(table.operators) if o.module == c.module))
        for c in observation.deep.steps[-1].cells
    )


def observing_of(
    observation: ObservationState,
    table: OperatorTable,
    *,
    light_fraction: float,
    other_s: float,
    trials_budget_s: float,
) -> Observing:
    """The cost of observing, for the Evidence."""
    return Observing(
        light_fraction=light_fraction,
        deep_s=max(0.0, observation.times.deep_s),
        trials_s=observation.times.trials_s,
        other_s=other_s,
        trials_budget_s=trials_budget_s,
        num_deep_steps=len(observation.deep.steps),
        deep_agreement=table.agreement,
        nearby_step_s=table.nearby_step_s,
    )
