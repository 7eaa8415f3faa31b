"""What the planner found, as one HTML file: the answer, the layout in words, where its step goes, what it holds, its pipeline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from flatout.core import units
from flatout.core.records.failure import Goodput
from flatout.core.records.scale import Cluster, Layout, ModelShape, Ranked, StageMemory
from flatout.machine.cost.schedules import Done
from flatout.report.html.bars import BARS, css_width
from flatout.report.html.goodput import goodput_svg
from flatout.report.html.pipeline import pipeline_of
from flatout.report.html.stages import PARTS, fullest, memory_chart, step_chart
from flatout.report.html.template import rendered_page
from flatout.report.parts.layouts import layout_words
from flatout.report.parts.reasons import difference, num_alike, where_it_goes
from flatout.report.parts.scale import accounting_lines, layout_text, prefixed
from flatout.scale.search import Ranking

_TRILLION: Final = 1e12
_DAY_S: Final = 86400.0
_SAME: Final = 0.001
"""Of a step, what no prediction tells apart."""


class Question(NamedTuple):
    """What was asked: `name` of the model, `samples` of a step over all devices, `room_bytes` of one device."""

    name: str
    model: ModelShape
    cluster: Cluster
    samples: int
    room_bytes: float

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all devices."""
        return self.samples * self.model.seq

    def __str__(self) -> str:
        return (
            f"{self.name} on {self.cluster.num_devices} x {self.cluster.device}, {self.samples} samples of "
            f"{self.model.seq} tokens"
        )


class First(NamedTuple):
    """More of the first layout: what each of its stages holds (flatout.scale.memory.memory_of), and when each stage does what
    (flatout.machine.cost.schedules.simulated_schedule); () where that is not known."""

    stages: Sequence[StageMemory] = ()
    rows: Sequence[Sequence[Done]] = ()


class Failing(NamedTuple):
    """What failures leave of the time: in words how often they come, for each way to recover the shares on this cluster, and
    the goodput over the number of devices."""

    how_often: str
    goodputs: Mapping[str, Goodput]
    curves: Mapping[str, Sequence[tuple[int, float]]]


def scale_page(
    found: Ranking, question: Question, *, how: str, first: First | None = None, failing: Failing | None = None
) -> bytes:
    """One HTML file (UTF-8) that needs no script, no network and no other file. `how` says what predictions rest on."""
    best = found.best
    timeline = pipeline_of(first.rows) if first is not None and first.rows else None
    return rendered_page(
        "scale",
        sheets=_SHEETS,
        filters=_FILTERS,
        question=question,
        headline=_headline(found, question),
        found=found,
        best=best[0] if best else None,
        lede=f"{_interval(best[0])}, {units.percent(best[0].mfu)} MFU. Of the step: {where_it_goes(best[0].step)}."
        if best
        else "",
        tiles=_tiles(found, question, failing) if best else (),
        words=tuple(layout_words(best[0].layout, question.model)) if best else (),
        next_best=_next_best(best),
        alike=num_alike(best) if best else 0,
        steps=step_chart(best) if best else None,
        lines=_lines(best, question),
        timeline=timeline,
        is_same_bubble=timeline is not None
        and best
        and math.isclose(min(timeline.idle.of_stages_s), best[0].step.bubble_s, rel_tol=1e-3, abs_tol=1e-6),
        failing=failing,
        curves=goodput_svg(failing.curves) if failing is not None and failing.curves else None,
        how=how,
        **_memory(_stages(found, first), question.room_bytes),
    )


def fit_page(
    stages: Sequence[StageMemory], layout: Layout, *, name: str, model: ModelShape, room_bytes: float | None
) -> bytes:
    """What each stage of one layout holds, as one HTML file; `room_bytes` of a device, where that is known."""
    most = stages[fullest(stages)].total_bytes
    fits = None if room_bytes is None else most <= room_bytes
    return rendered_page(
        "fit",
        sheets=_SHEETS,
        filters=_FILTERS,
        command=f"{name}, {layout_text(layout)}",
        most=units.size(most),
        fits=fits,
        words=tuple(layout_words(layout, model)),
        accounting=tuple(accounting_lines(model)),
        **_memory(stages, room_bytes),
    )


def _memory(stages: Sequence[StageMemory], room_bytes: float | None) -> dict[str, object]:
    """What the part of a page that shows memory needs."""
    return {
        "memory": memory_chart(stages, room_bytes=room_bytes) if stages else None,
        "room": None if room_bytes is None else units.size(room_bytes),
        "stages": stages,
        "outside": max((s.host_bytes for s in stages), default=0),
        "fullest": fullest(stages) if stages else 0,
        "memory_parts": [
            (field, part.label) for field, part in PARTS.items() if any(getattr(s, field) for s in stages)
        ],
    }


def _stages(found: Ranking, first: First | None) -> Sequence[StageMemory]:
    """Of the first layout, or where none fits the fullest stage of the smallest."""
    if found.best:
        return first.stages if first is not None and first.stages else (found.best[0].memory,)
    return () if found.smallest is None else (found.smallest,)


def _headline(found: Ranking, question: Question) -> str:
    if not found.best:
        return f"{question}: none of {found.num_layouts} layouts fits"
    one = found.best[0]
    return f"{question}: {units.duration(one.step.total_s)} a step ({_interval(one)}), {units.percent(one.mfu)} MFU"


def _interval(one: Ranked) -> str:
    """Both ends in the unit of the step."""
    unit = units.time_unit(one.step.total_s)
    return f"{unit.show(one.low_s)} - {unit.show(one.high_s)} {unit.name}"


def _tiles(found: Ranking, question: Question, failing: Failing | None) -> tuple[tuple[str, str, str], ...]:
    """(name, figure, a remark) of the first layout."""
    one = found.best[0]
    days = one.step.total_s * _TRILLION / question.tokens / _DAY_S
    full, room = one.memory.total_bytes, question.room_bytes
    tiles = [
        ("model FLOP utilization (MFU)", units.percent(one.mfu), "of the data sheet's rate"),
        ("tokens a second", prefixed(question.tokens / one.step.total_s), f"{prefixed(question.tokens)} tokens a step"),
        ("a trillion tokens", f"{days:.1f} days", f"{prefixed(24 * days * question.cluster.num_devices)} device-hours"),
        ("fullest device", units.size(full), f"{units.percent(full / room)} of {units.size(room)}"),
    ]
    if failing is not None and failing.goodputs:
        name, mean = next(iter(failing.goodputs.items()))
        rest = f"{name}; a trillion tokens {days / mean.goodput:.1f} days"
        tiles.append(("kept despite failures", units.percent(mean.goodput), rest))
    return tuple(tiles)


def _next_best(best: Sequence[Ranked]) -> str:
    """In what the second differs."""
    if len(best) < 2:
        return ""
    one, other = best[0].step, best[1].step
    more = other.total_s - one.total_s
    how = (
        "is as fast"
        if more < _SAME * one.total_s
        else f"takes {units.duration(more)} ({units.percent(more / one.total_s)}) more"
    )
    reason = difference(other, one)
    return f"The next, {layout_text(best[1].layout)}, {how}{f': {reason}' if reason else ''}."


def _lines(best: Sequence[Ranked], question: Question) -> list[dict[str, str]]:
    """The layouts for the table of the page."""
    return [
        {
            "layout": layout_text(one.layout),
            "step": units.duration(one.step.total_s),
            "interval": _interval(one),
            "mfu": units.percent(one.mfu),
            "tokens": prefixed(question.tokens / one.step.total_s),
            "memory": units.size(one.memory.total_bytes),
            "difference": difference(one.step, best[0].step) if one is not best[0] else "",
        }
        for one in best
    ]


_SHEETS: Final = ("style", BARS, "scale")
_FILTERS: Final = {"css_width": css_width}
