"""Several ranks' Evidence made one: the lowest rank's, with what all ranks showed beside one another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Final

import msgspec

from flatout.core.errors import RecordError
from flatout.core.records.distributed import Collective, Distributed, RankLine, RankSummary
from flatout.core.records.evidence import Evidence
from flatout.core.records.workload import Source
from flatout.machine.cost.waiting import waits

_ONE_SIDED: Final = ("broadcast", "send", "recv", "isend", "irecv", "scatter", "gather", "reduce", "batch_isend_irecv")
"""Calls that need not end for all ranks at once: nobody's wait can be told from them."""

_NO_EVIDENCE: Final = "left no evidence"

_Place = tuple[str, str, int, str, str]


def merge(ranks: Sequence[Evidence], *, notes: Iterable[str] = ()) -> Evidence:
    """One Evidence of several ranks of the same run, in any order; `notes` are added to what could not be seen.

    One of them may be several ranks' itself (the first host's report). Ranks that are in it alone stay as it has them: their
    waiting is that among the ranks it was made of.

    Raises RecordError when one of them is no rank's Evidence, when a rank comes twice, or when they are of different runs.
    """
    by_rank = _by_rank(ranks)
    base = by_rank[min(by_rank)]
    known = {rank: _distributed(e) for rank, e in by_rank.items()}
    own = known[min(by_rank)]
    waited = _waited(by_rank, known)
    sources = list(base.sources)
    summaries = [
        _summary(by_rank[rank], known[rank], wait_s=sum(waited[rank].values()), sources=sources)
        for rank in sorted(by_rank)
    ]
    summaries += _merged_before(by_rank, known, sources=sources)
    first = min(by_rank)
    collectives = tuple(
        msgspec.structs.replace(c, wait_s=min(c.exposed_s, waited[first].get(_place(c, base), 0.0)))
        for c in own.collectives
    )
    there = {s.rank for s in summaries}
    missing = tuple(r for r in range(own.world_size) if r not in there)
    ordered = tuple(sorted(summaries, key=lambda s: s.rank))
    distributed = msgspec.structs.replace(own, ranks=ordered, collectives=collectives, missing_ranks=missing)
    known_notes = [n for n in base.notes if _NO_EVIDENCE not in n]
    return msgspec.structs.replace(
        base,
        sources=tuple(sources),
        distributed=distributed,
        notes=tuple(dict.fromkeys([*known_notes, *notes, *_notes(by_rank, missing, own.world_size)])),
    )


def _by_rank(ranks: Sequence[Evidence]) -> dict[int, Evidence]:
    if not ranks:
        raise RecordError("no Evidence given, merging needs that of at least one rank")
    by_rank: dict[int, Evidence] = {}
    for evidence in ranks:
        distributed = _distributed(evidence)
        if distributed.rank in by_rank:
            raise RecordError(f"rank {distributed.rank} comes twice; give each rank's file once")
        by_rank[distributed.rank] = evidence
    sizes = {_distributed(e).world_size for e in ranks}
    if len(sizes) > 1 or len({e.workload.command for e in ranks}) > 1:
        raise RecordError("the files are of different runs (another command or number of ranks); give those of one run")
    return by_rank


def _distributed(evidence: Evidence) -> Distributed:
    if evidence.distributed is None:
        raise RecordError("the Evidence is that of a single process, not of a rank; give one file to report it alone")
    return evidence.distributed


def _waited(by_rank: dict[int, Evidence], known: dict[int, Distributed]) -> dict[int, dict[_Place, float]]:
    """Mean seconds of a step that each rank waited for slower ranks, by rank and collective."""
    result: dict[int, dict[_Place, float]] = {rank: {} for rank in by_rank}
    columns = {rank: _columns(by_rank[rank], d) for rank, d in known.items()}
    if len(columns) < 2 or any(not d.ranks for d in known.values()):
        return result
    common = sorted(set.intersection(*(set(d.ranks[0].step_numbers) for d in known.values() if d.ranks)))
    if not common:
        return result
    for place in set.intersection(*(set(c) for c in columns.values())):
        if place[0] in _ONE_SIDED:
            continue
        times = {rank: [column[place][n] for n in common] for rank, column in columns.items()}
        for rank, waited in waits(times).items():
            result[rank][place] = fmean(waited)
    return result


def _columns(evidence: Evidence, distributed: Distributed) -> dict[_Place, dict[int, float]]:
    """Exposed seconds by collective and step number."""
    if not distributed.ranks:
        return {}
    numbers = next(r.step_numbers for r in distributed.ranks if r.rank == distributed.rank)
    return {
        _place(c, evidence): dict(zip(numbers, c.exposed_by_step, strict=True))
        for c in distributed.collectives
        if len(c.exposed_by_step) == len(numbers) and c.group_size == distributed.world_size
    }


def _merged_before(
    by_rank: dict[int, Evidence], known: dict[int, Distributed], *, sources: list[Source]
) -> list[RankSummary]:
    """Ranks that only an Evidence of several ranks shows."""
    found: dict[int, RankSummary] = {}
    for rank, distributed in sorted(known.items()):
        for other in distributed.ranks:
            if other.rank not in by_rank and other.rank not in found:
                lines = _moved(other.lines, by_rank[rank], sources)
                found[other.rank] = msgspec.structs.replace(other, lines=lines)
    return list(found.values())


def _moved(lines: Sequence[RankLine], evidence: Evidence, sources: list[Source]) -> tuple[RankLine, ...]:
    """Lines of one Evidence, counted in the merged table of sources, which grows by those it lacks."""
    places = ((line, evidence.source_of(line.source)) for line in lines)
    return tuple(
        RankLine(source=_index(source, sources), phase=line.phase, seconds=line.seconds)
        for line, source in places
        if source is not None
    )


def _place(collective: Collective, evidence: Evidence) -> _Place:
    """What is the same collective on all ranks, whose tables of lines differ."""
    source = evidence.source_of(collective.source)
    file, line = (source.file, source.line) if source is not None else ("", 0)
    return collective.op, file, line, collective.phase, collective.caller


def _summary(evidence: Evidence, distributed: Distributed, *, wait_s: float, sources: list[Source]) -> RankSummary:
    """The rank's own summary, as the merged Evidence has it."""
    own = next(r for r in distributed.ranks if r.rank == distributed.rank)
    lines = _moved(own.lines, evidence, sources)
    return msgspec.structs.replace(own, wait_s=wait_s, lines=lines, exit=evidence.exit, exit_code=evidence.exit_code)


def _index(source: Source, sources: list[Source]) -> int:
    for index, known in enumerate(sources):
        if (known.file, known.line, known.library) == (source.file, source.line, source.library):
            return index
    sources.append(source)
    return len(sources) - 1


def _notes(by_rank: dict[int, Evidence], missing: tuple[int, ...], world_size: int) -> Iterable[str]:
    if missing:
        names = ", ".join(map(str, missing))
        yield f"rank {names} of {world_size} {_NO_EVIDENCE}: what the others waited for cannot be told in full"
    first = min(by_rank)
    for rank, evidence in sorted(by_rank.items()):
        if rank != first and evidence.exit_code:
            yield f"rank {rank} ended with code {evidence.exit_code}: {evidence.exit or 'no message'}"
        for note in evidence.notes:
            if rank != first and note not in by_rank[first].notes:
                yield f"rank {rank}: {note}"
