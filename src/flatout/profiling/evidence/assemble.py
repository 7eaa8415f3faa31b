"""From what an Observer kept to Evidence."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import cast

from flatout.profiling.calls import Root, iter_tensors
from flatout.profiling.evidence.accounts import OperatorTable
from flatout.profiling.observer import Observer
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
    UnusedGradient,
)
from flatout.records.workload import Source


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
