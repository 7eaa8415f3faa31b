"""What failures leave of a run's time: a line for each way to recover, and how it goes with the number of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flatout.core import units
from flatout.core.records.failure import Goodput
from flatout.report.document import Column, Table, numbers

_WIDTH = 40
_PARTS = (("goodput", "#"), ("saving", "s"), ("lost", "x"), ("down", "."))


def recovery_table(found: Mapping[str, Goodput]) -> Table:
    """A bar and its shares for each way to recover."""
    shares = numbers("goodput", "saving", "twice", "down")
    rows = [
        [name, _bar(one), *(f"{getattr(one, part):.1%}" for part, _ in _PARTS), units.long_duration(one.interval_s)]
        for name, one in found.items()
    ]
    bars = Column("# goodput, s saving, x twice, . down")
    return Table([Column(), bars, *shares, Column("a checkpoint every")], rows, inset=0)


def curve_table(curve: Sequence[tuple[int, float]]) -> Table:
    """Devices and the goodput on them."""
    rows = [[f"{num:,} devices", "#" * round(_WIDTH * goodput), f"{goodput:.1%}"] for num, goodput in curve]
    return Table([*numbers(""), Column(), *numbers("")], rows, inset=0)


def _bar(one: Goodput) -> str:
    """`_WIDTH` letters, parts rounded so that they fill it."""
    bar, end = "", 0.0
    for part, letter in _PARTS:
        end += getattr(one, part)
        bar += letter * (round(_WIDTH * end) - len(bar))
    return bar
