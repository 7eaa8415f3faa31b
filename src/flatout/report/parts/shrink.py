"""What `flatout shrink` found: a line for each composition, the chosen one, and what it is proved to cost."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import shorten

from flatout.core import units
from flatout.core.records.shrink import Point, Shrunk
from flatout.report.document import Block, Column, Listing, Table, numbers

_CALL = {"latency": "call", "memory": "call", "train-cost": "step"}


def shrunk_blocks(found: Shrunk) -> Iterator[Block]:
    """The table, the reasons for what is not in it, and the verdict."""
    where = found.where
    threads = units.counted(where.num_threads, "thread")
    yield f"{found.model} on {where.device or where.processor or 'this machine'}, {threads}, torch {where.torch or '-'}"
    yield f"{found.objective}; {found.allowed_loss:.3g} of the metric may go"
    yield ""
    columns = [
        Column(is_whole=True),
        Column(is_whole=True),
        *numbers(_CALL[found.objective], "faster", "bytes", "metric", "lost"),
    ]
    yield Table(columns, [_row(point, found) for point in found.points], inset=0)
    yield "> chosen, * no other is better in time, bytes and metric at once"
    if found.untried:
        yield ""
        yield "not in the table:"
        yield Listing([("", f"{one.name}: {shorten(one.because, 160)}") for one in found.untried])
    yield ""
    best, original, speed = found.best, found.original, found.verdict.speed
    if best is original:
        yield f"Keep the model as it is: {found.because}."
        return
    yield f"Take: {best.name}"
    assert speed is not None
    remarks = (
        f"{speed.ratio:.2f}x faster a {_CALL[found.objective]} ({speed.low:.2f} .. {speed.high:.2f}, {speed.num_pairs} pairs): "
        f"{units.duration(original.call_s[0])} -> {units.duration(best.call_s[0])}",
        f"{_bytes_words(original.num_bytes / max(best.num_bytes, 1))}: "
        f"{units.size(original.num_bytes)} -> {units.size(best.num_bytes)}",
        found.verdict.equality.because,
        f"{found.verdict.outcome}: {found.because}",
        *(f"- {note}" for note in best.notes),
    )
    yield Listing([("", remark) for remark in remarks])


def _bytes_words(times: float) -> str:
    if abs(times - 1) < 0.02:
        return "about as many bytes"
    return f"{times:.2f}x fewer bytes" if times > 1 else f"{1 / times:.2f}x as many bytes"


def _row(point: Point, found: Shrunk) -> list[str]:
    ratio, low, high = point.faster
    return [
        ">" if point.name == found.selected else "*" if point.name in found.pareto else "",
        point.name,
        units.duration(point.call_s[0]),
        "" if point is found.original else f"{ratio:.2f}x {low:.2f}..{high:.2f}",
        units.size(point.num_bytes),
        f"{point.metric:.4g}",
        f"{point.lost:.3g}" + ("" if point.lost <= found.allowed_loss else " !"),
    ]
