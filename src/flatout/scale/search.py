"""The layouts that fit a cluster, ranked by the seconds of their steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Final, NamedTuple

from msgspec import structs

from flatout.core.errors import PlanError
from flatout.core.records.scale import (
    Cluster,
    Compression,
    Constants,
    Layout,
    ModelShape,
    Ranked,
    Recompute,
    Software,
    StageMemory,
    StepTime,
)
from flatout.machine.cost.roofline import memory_bytes, peak_flop_per_s
from flatout.machine.specs.catalog import load_spec
from flatout.scale.activations import recomputed_share
from flatout.scale.calibration import Calibrated
from flatout.scale.candidates import LONG_TOKENS, NOTHING_OR_ALL, Recomputing, Space, layouts
from flatout.scale.case import rate_dtype
from flatout.scale.intervals import interval_of
from flatout.scale.memory import memory_of
from flatout.scale.sizes import active_parameters, compressed_visible, layer_kinds, num_parameters
from flatout.scale.step import QuickTime, quick_s, step_time

_MOST_PLAYED: Final = 200
"""Layouts whose schedules are played event by event: the best by their bubble's closed form."""
_HALF: Final = Recomputing("full", share=0.5)
_PROGRAMS: Final = {
    "": Space(),
    "torch": Space(recomputing=(*NOTHING_OR_ALL, Recomputing("operators"), _HALF), counts_ends=True),
    "megatron": Space(recomputing=(*NOTHING_OR_ALL, _HALF), schedules=("1f1b", "interleaved")),
    "megatron-core": Space(
        recomputing=(*NOTHING_OR_ALL, Recomputing("parts", ("norms", "gates")), _HALF),
        schedules=("1f1b", "interleaved"),
        counts_ends=True,
    ),
}
"""What each program can run: torch's selective checkpointing of operators and all of its schedules, Megatron's two, and the
modules that Megatron-Core computes again; and half of the layers."""
_LESS: Final[dict[Recompute, tuple[Recompute, ...]]] = {
    "none": (),
    "selective": ("none",),
    "operators": ("none", "selective"),
    "parts": ("none",),
    "full": ("none", "selective", "operators", "parts"),
}
"""What computes less again: where that fits, it is faster."""


class Ranking(NamedTuple):
    """The fastest first; how many layouts were looked at, how many of them do not fit the memory, the fullest stage of the one
    that takes the least, and what was allowed because nothing fitted without it ('' for nothing)."""

    best: tuple[Ranked, ...]
    num_layouts: int
    num_too_large: int
    smallest: StageMemory | None
    widened: str = ""


class _Fitting(NamedTuple):
    layouts: list[tuple[Layout, StageMemory]]
    num: int
    smallest: StageMemory | None


def ranked_layouts(
    model: ModelShape,
    cluster: Cluster,
    global_batch: int,
    software: Software,
    constants: Constants,
    *,
    most: int = 10,
    calibrated: Calibrated | None = None,
    compressions: tuple[Compression, ...] = (),
    preset: str = "",
) -> Ranking:
    """The layouts of all devices that fit, the fastest first; by constants, or by those that were `calibrated`.

    `preset` names the software, for the intervals. `compressions` of gradients change results: they are among the layouts only
    when asked for. Short samples are divided by tokens, and state or weights offloaded, only where nothing fits otherwise;
    `widened` says so.

    Raises PlanError when no layout divides the model and the batch, HardwareError when the data sheet lacks a figure.
    """
    found, widened = _fitting_first(model, cluster, global_batch, software, compressions)
    constants = calibrated.constants if calibrated is not None else constants
    quick = _estimated(model, cluster, software, constants, found)
    quick.sort(key=lambda one: one[0].about_s)
    best: list[Ranked] = []
    for estimate, layout, memory in quick[:_MOST_PLAYED]:
        if len(best) >= most and estimate.least_s > best[most - 1].step.total_s and calibrated is None:
            continue
        step = step_time(model, layout, cluster, software, constants)
        best.append(_placed(model, cluster, software, layout, memory, step, calibrated, preset))
        best.sort(key=lambda one: one.step.total_s)
    return Ranking(tuple(best[:most]), found.num, found.num - len(found.layouts), found.smallest, widened)


class Estimated(NamedTuple):
    """A layout that fits, about how long its step takes, and its fullest stage."""

    estimate: QuickTime
    layout: Layout
    memory: StageMemory


def _estimated(
    model: ModelShape, cluster: Cluster, software: Software, constants: Constants, found: _Fitting
) -> list[Estimated]:
    return [
        Estimated(quick_s(model, layout, cluster, software, constants), layout, memory)
        for layout, memory in _undominated(found.layouts)
    ]


def ranked_by_memory(
    model: ModelShape,
    cluster: Cluster,
    global_batch: int,
    software: Software,
    constants: Constants,
    *,
    preset: str = "",
) -> tuple[Ranked, ...]:
    """The layouts that fit and that no other beats both in seconds and in memory, the fastest first; () where none fits.

    Raises PlanError when no layout divides the model and the batch, HardwareError when the data sheet lacks a figure.
    """
    found = _fitting_first(model, cluster, global_batch, software, ())[0]
    quick = _estimated(model, cluster, software, constants, found)
    quick.sort(key=lambda one: (one.estimate.about_s, one.memory.total_bytes))
    unbeaten: list[Ranked] = []
    least = inf
    for one in quick:
        if one.memory.total_bytes >= least:
            continue
        least = one.memory.total_bytes
        step = step_time(model, one.layout, cluster, software, constants)
        unbeaten.append(_placed(model, cluster, software, one.layout, one.memory, step, None, preset))
    unbeaten.sort(key=lambda one: one.step.total_s)
    ends = [min((one.memory.total_bytes for one in unbeaten[:n]), default=inf) for n in range(len(unbeaten))]
    return tuple(one for one, before in zip(unbeaten, ends, strict=True) if one.memory.total_bytes < before)


def _fitting_first(
    model: ModelShape,
    cluster: Cluster,
    global_batch: int,
    software: Software,
    compressions: tuple[Compression, ...],
) -> tuple[_Fitting, str]:
    """What fits in the nearest space where anything does, and what was allowed for it."""
    found, widened = _Fitting([], 0, None), ""
    for space, reason in _spaces(model, cluster, compressions, software):
        found, widened = _fitting(model, cluster, global_batch, software, space), reason
        if not found.num:
            raise PlanError(
                f"no layout divides {model.heads} heads, {model.layers} layers and a batch of {global_batch} over "
                f"{cluster.num_devices} devices; give another batch or number"
            )
        if found.layouts:
            break
    return found, widened


def _spaces(
    model: ModelShape, cluster: Cluster, compressions: tuple[Compression, ...], software: Software
) -> Iterator[tuple[Space, str]]:
    """Further and further, each with what it allows, as far as the program can."""
    first = replace(_PROGRAMS[software.program], compressions=compressions)
    yield first, ""
    if model.seq < LONG_TOKENS:
        yield replace(first, context_of_any_length=True), "samples divided by tokens"
    if cluster.host is None:
        return
    for offload, reason in (
        ("state", "the optimizer's state"),
        ("weights", "weights, gradients and the optimizer's state"),
    ):
        for place in ("host", "disk"):
            where = "in the host's memory" if place == "host" else "on its disk"
            further = replace(first, compressions=(), offload=offload, offload_to=place)  # type: ignore[arg-type]
            yield further, f"{reason} kept {where}"


def _fitting(model: ModelShape, cluster: Cluster, global_batch: int, software: Software, space: Space) -> _Fitting:
    room = memory_bytes(load_spec(cluster.device))
    host = cluster.host.memory_bytes if cluster.host is not None and space.offload_to == "host" else None
    fitting, smallest, num = [], None, 0
    for layout in layouts(model, cluster, global_batch, space):
        num += 1
        stages = memory_of(model, layout, software)
        memory = max(stages, key=lambda m: m.total_bytes)
        if smallest is None or memory.total_bytes < smallest.total_bytes:
            smallest = memory
        if memory.total_bytes <= room and max(m.host_bytes for m in stages) <= (inf if host is None else host):
            fitting.append((layout, memory))
    return _Fitting(fitting, num, smallest)


def _undominated(fitting: list[tuple[Layout, StageMemory]]) -> Iterator[tuple[Layout, StageMemory]]:
    """Layouts without those that compute more again than they need to fit."""
    there: dict[Layout, list[Layout]] = {}
    for layout, _ in fitting:
        there.setdefault(_plain(layout), []).append(layout)
    for layout, memory in fitting:
        if not any(_is_less(one, layout) for one in there[_plain(layout)]):
            yield layout, memory


def _plain(layout: Layout) -> Layout:
    return structs.replace(layout, recompute="none", recomputed=(), recompute_layers=0)


def _is_less(one: Layout, other: Layout) -> bool:
    """Whether `one` computes less again than another layout that is the same in all else."""
    if one.recompute == other.recompute:
        return one.recompute_layers > 0 and other.recompute_layers == 0
    return one.recompute in _LESS[other.recompute]


def _placed(
    model: ModelShape,
    cluster: Cluster,
    software: Software,
    layout: Layout,
    memory: StageMemory,
    step: StepTime,
    calibrated: Calibrated | None,
    preset: str,
) -> Ranked:
    interval = interval_of(model, cluster, preset)
    low_s, high_s = step.total_s / (1 + interval.high), step.total_s / (1 - interval.low)
    if calibrated is not None:
        predicted = calibrated.predict(model, layout)
        step, low_s, high_s = _stretched(step, predicted.seconds), predicted.low_s, predicted.high_s
    peak = peak_flop_per_s(load_spec(cluster.device), rate_dtype(software.dtype)) * cluster.num_devices
    mfu = model_flop(model, layout.global_batch) / (step.total_s * peak)
    return Ranked(layout=layout, step=step, memory=memory, low_s=low_s, high_s=high_s, mfu=mfu)


def _stretched(step: StepTime, total_s: float) -> StepTime:
    """The same parts of another total."""
    factor = total_s / step.total_s
    return StepTime(**{name: factor * getattr(step, name) for name in StepTime.__struct_fields__})


def model_flop(model: ModelShape, global_batch: int, *, is_causal: bool = True) -> float:
    """FLOP of one step, nothing computed twice: 6 a parameter that a token meets, and attention's 6 a pair of query and key and
    number of either's vectors: of causal pairs, or, as PaLM counts (Chowdhery et al., 2022, appendix B), of all."""
    tokens = global_batch * model.seq
    active = active_parameters(model) + num_parameters(model)[1] * (1 + model.extra_tokens)
    kinds = layer_kinds(model)
    pairs = sum((kind.visible / 2 if kind.visible == model.seq else kind.visible) for kind in kinds)
    pairs += sum(compressed_visible(model, kind) for kind in kinds)
    if not is_causal:
        pairs = sum(kind.mixer == "attention" for kind in kinds) * model.seq
    return 6.0 * tokens * (active + pairs * model.heads * (model.query_width + model.head_width))


def recomputed_flop(model: ModelShape, layout: Layout) -> float:
    """FLOP of one step that a backward computes again."""
    if layout.recompute in ("none", "selective", "parts"):
        again = 0.0
    else:
        again = recomputed_share(model, layout) if layout.recompute == "full" else 0.5
    of_layers = structs.replace(model, vocab=1)
    products = 2.0 * layout.global_batch * model.seq * active_parameters(model) * again
    attention = model_flop(of_layers, layout.global_batch) / 3 - 2.0 * layout.global_batch * model.seq * (
        active_parameters(model) + model.hidden
    )
    attends_again = {"none": 0.0, "selective": 1.0, "operators": 0.0, "parts": 0.0, "full": again}[layout.recompute]
    return products + attention * attends_again
