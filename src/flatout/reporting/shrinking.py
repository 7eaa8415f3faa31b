"""What `flatout shrink` found: a line for each composition, the chosen one, and what it is proved to cost."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import shorten

from flatout.records.shrinking import Point, Shrunk
from flatout.reporting import units

_CALL = {"latency": "call", "memory": "call", "train-cost": "step"}


def shrunk_lines(found: Shrunk) -> Iterator[str]:
    """The table, the reasons for what is not in it, and the verdict."""
    where = found.where
    threads = f"{where.num_threads} thread{'s' * (where.num_threads != 1)}"
    yield f"{found.model} on {where.device or where.processor or 'this machine'}, {threads}, torch {where.torch or '-'}"
    yield f"{found.objective}; {found.allowed_loss:.3g} of the metric may go"
    yield ""
    yield from _table(found)
    if found.untried:
        yield ""
        yield "not in the table:"
        yield from (f"  {one.name}: {shorten(one.because, 160)}" for one in found.untried)
    yield ""
    yield from verdict_lines(found)


def verdict_lines(found: Shrunk) -> Iterator[str]:
    """The choice in words."""
    best, given, speed = found.best, found.given, found.verdict.speed
    if best is given:
        yield f"Keep the model as it is: {found.because}."
        return
    yield f"Take: {best.name}"
    assert speed is not None
    what = _CALL[found.objective]
    yield (
        f"  {speed.ratio:.2f}x faster a {what} ({speed.low:.2f} .. {speed.high:.2f}, {speed.num_pairs} pairs): "
        f"{units.duration(given.call_s[0])} -> {units.duration(best.call_s[0])}"
    )
    fewer = given.num_bytes / max(best.num_bytes, 1)
    yield f"  {fewer:.2f}x fewer bytes: {units.size(given.num_bytes)} -> {units.size(best.num_bytes)}"
    yield f"  {found.verdict.equality.because}"
    yield f"  {found.verdict.outcome}: {found.because}"
    yield from (f"  - {said}" for said in best.told)


def _table(found: Shrunk) -> Iterator[str]:
    width = max(len(p.name) for p in found.points) + 2
    head = f"{_CALL[found.objective]:>10}  {'faster':>20}  {'bytes':>9}  {'metric':>8}  {'lost':>8}"
    yield f"{'':{width}}{head}"
    for point in found.points:
        mark = ">" if point.name == found.chosen else "*" if point.name in found.front else " "
        yield f"{mark} {point.name:{width - 2}}{_cells(point, found)}"
    yield "> chosen, * no other is better in time, bytes and metric at once"


def _cells(point: Point, found: Shrunk) -> str:
    ratio, low, high = point.faster
    faster = "" if point is found.given else f"{ratio:.2f}x {low:.2f}..{high:.2f}"
    lost = f"{point.lost:.3g}" + ("" if point.lost <= found.allowed_loss else " !")
    cells = f"{units.duration(point.call_s[0]):>10}  {faster:>20}  {units.size(point.num_bytes):>9}"
    return f"{cells}  {point.metric:>8.4g}  {lost:>8}"
