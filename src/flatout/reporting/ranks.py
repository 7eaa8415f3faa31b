"""The ranks beside one another: step, own work, waiting, batch."""

from __future__ import annotations

from statistics import fmean
from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flatout.records.distributed import Distributed, RankSummary
from flatout.records.evidence import Evidence
from flatout.reporting import units
from flatout.reporting.inert import Words, place_of

_MOST: Final = 16
"""Ranks shown: the slowest of them where there are more."""
_MOST_COLLECTIVES: Final = 8


def ranks(evidence: Evidence) -> list[RenderableType]:
    """The section about several ranks; empty for a single process."""
    distributed = evidence.distributed
    if distributed is None or not distributed.ranks:
        return []
    parts: list[RenderableType] = [
        "",
        Words(_title(distributed), style="bold"),
        Padding(_table(distributed), (0, 0, 0, 2)),
    ]
    if distributed.collectives:
        heading = f"Collectives of rank {distributed.rank} in a step"
        parts += ["", Words(heading, style="bold"), Padding(_collectives(evidence, distributed), (0, 0, 0, 2))]
    return [Group(*parts)]


def _title(distributed: Distributed) -> str:
    seen = len(distributed.ranks)
    backend = f", {distributed.backend}" if distributed.backend else ""
    if seen == distributed.world_size:
        return f"{seen} ranks{backend}"
    missing = ", ".join(map(str, distributed.missing_ranks))
    return f"{seen} of {distributed.world_size} ranks{backend}; nothing from rank {missing}"


def _table(distributed: Distributed) -> Table:
    shown = sorted(distributed.ranks, key=lambda r: -r.work_s)[:_MOST]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    unit = units.time_unit(max(r.step_s for r in shown))
    names = ("rank", f"step {unit.name}", "own work", "in collectives", "waiting for others", "batch, elements", "end")
    for name in names:
        table.add_column(name, justify="left" if name == "end" else "right", no_wrap=name != "end")
    for rank in sorted(shown, key=lambda r: r.rank):
        table.add_row(
            Text(str(rank.rank)),
            unit.show(rank.step_s),
            unit.show(rank.work_s),
            unit.show(max(0.0, rank.step_s - rank.work_s)),
            unit.show(rank.wait_s),
            _batch(rank),
            Words(_end(rank)),
        )
    return table


def _batch(rank: RankSummary) -> str:
    if not rank.batch_elements:
        return ""
    low, high = min(rank.batch_elements), max(rank.batch_elements)
    return f"{low:,}" if low == high else f"{fmean(rank.batch_elements):,.0f} ({low:,} - {high:,})"


def _end(rank: RankSummary) -> str:
    return f"exit {rank.exit_code}" if rank.exit_code else ""


def _collectives(evidence: Evidence, distributed: Distributed) -> Table:
    rows = sorted(distributed.collectives, key=lambda c: -c.exposed_s)[:_MOST_COLLECTIVES]
    unit = units.time_unit(max(c.exposed_s for c in rows))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("line", "call", "times", "bytes", f"exposed {unit.name}", "of it waiting"):
        table.add_column(name, justify="left" if name in ("line", "call") else "right", no_wrap=name != "line")
    for row in rows:
        table.add_row(
            Words(place_of(evidence.source_of(row.source), cwd=evidence.workload.cwd) or "elsewhere"),
            Words(row.op),
            f"{row.num:.3g}",
            units.size(row.bytes),
            unit.show(row.exposed_s),
            unit.show(row.wait_s),
        )
    return table
