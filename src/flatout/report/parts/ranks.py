"""The ranks beside one another: step, own work, waiting, batch."""

from __future__ import annotations

from statistics import fmean
from typing import Final

from flatout.core import units
from flatout.core.records.distributed import Distributed, RankSummary
from flatout.core.records.evidence import Evidence
from flatout.report.document import Block, Column, Heading, Table, numbers
from flatout.report.sanitise import place_of

_MOST: Final = 16
"""Ranks shown: the slowest of them where there are more."""
_MOST_COLLECTIVES: Final = 8


def ranks(evidence: Evidence) -> list[Block]:
    """The section about several ranks; empty for a single process."""
    distributed = evidence.distributed
    if distributed is None or not distributed.ranks:
        return []
    blocks: list[Block] = ["", Heading(_title(distributed)), _table(distributed)]
    if distributed.collectives:
        heading = Heading(f"Collectives of rank {distributed.rank} in a step")
        blocks += ["", heading, _collectives(evidence, distributed)]
    return blocks


def _title(distributed: Distributed) -> str:
    num_ranks = len(distributed.ranks)
    backend = f", {distributed.backend}" if distributed.backend else ""
    if num_ranks == distributed.world_size:
        return f"{num_ranks} ranks{backend}"
    missing = ", ".join(map(str, distributed.missing_ranks))
    return f"{num_ranks} of {distributed.world_size} ranks{backend}; nothing from rank {missing}"


def _table(distributed: Distributed) -> Table:
    shown = sorted(distributed.ranks, key=lambda r: -r.work_s)[:_MOST]
    unit = units.time_unit(max(r.step_s for r in shown))
    has_nodes = len({rank.host for rank in distributed.ranks}) > 1
    rows = [
        [
            str(rank.rank),
            *([rank.host] if has_nodes else []),
            unit.show(rank.step_s),
            unit.show(rank.work_s),
            unit.show(max(0.0, rank.step_s - rank.work_s)),
            unit.show(rank.wait_s),
            _batch(rank),
            f"exit {rank.exit_code}" if rank.exit_code else "",
        ]
        for rank in sorted(shown, key=lambda r: r.rank)
    ]
    times = ("own work", "in collectives", "waiting for others")
    node = [Column("node")] if has_nodes else []
    figures = numbers(f"step {unit.name}", *times, "batch, elements")
    return Table([*numbers("rank"), *node, *figures, Column("end")], rows)


def _batch(rank: RankSummary) -> str:
    if not rank.batch_elements:
        return ""
    low, high = min(rank.batch_elements), max(rank.batch_elements)
    return f"{low:,}" if low == high else f"{fmean(rank.batch_elements):,.0f} ({low:,} - {high:,})"


def _collectives(evidence: Evidence, distributed: Distributed) -> Table:
    largest = sorted(distributed.collectives, key=lambda c: -c.exposed_s)[:_MOST_COLLECTIVES]
    unit = units.time_unit(max(c.exposed_s for c in largest))
    rows = [
        [
            place_of(evidence.source_of(one.source), cwd=evidence.workload.cwd) or "elsewhere",
            one.op,
            f"{one.num:.3g}",
            units.size(one.bytes),
            unit.show(one.exposed_s),
            unit.show(one.wait_s),
        ]
        for one in largest
    ]
    figures = numbers("times", "bytes", f"exposed {unit.name}", "of it waiting")
    return Table([Column("line"), Column("call", is_whole=True), *figures], rows)
