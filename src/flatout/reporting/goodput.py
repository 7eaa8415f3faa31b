"""What failures leave of a run's time: a line for each way to recover, and how it goes with the number of devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from flatout.records.failure import Goodput
from flatout.reporting import units

_WIDTH = 40
_PARTS = (("goodput", "#"), ("saving", "s"), ("lost", "x"), ("down", "."))


def recovery_lines(found: Mapping[str, Goodput]) -> Iterator[str]:
    """A bar and its shares for each way to recover."""
    width = max(map(len, found))
    bars = "# kept, s saving, x twice, . down"
    yield f"{'':{width}}  {bars:{_WIDTH}}   kept  saving  twice   down  a checkpoint every"
    for name, one in found.items():
        shares = "  ".join(f"{getattr(one, part):5.1%}" for part, _ in _PARTS)
        yield f"{name:{width}}  {_bar(one)}  {shares}  {units.duration(one.interval_s)}"


def curve_lines(curve: Sequence[tuple[int, float]]) -> Iterator[str]:
    """Devices and what is kept."""
    for num, goodput in curve:
        yield f"{num:>9,} devices  {'#' * round(_WIDTH * goodput):{_WIDTH}}  {goodput:5.1%}"


def _bar(one: Goodput) -> str:
    """`_WIDTH` letters, parts rounded so that they fill it."""
    bar, end = "", 0.0
    for part, letter in _PARTS:
        end += getattr(one, part)
        bar += letter * (round(_WIDTH * end) - len(bar))
    return bar
