"""Traces of one rank or of several, from files and folders, to one Evidence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from flatout.check.traces.evidence import RankTrace, evidence_of
from flatout.check.traces.kineto import read_trace, trace_of
from flatout.core.errors import RecordError
from flatout.core.records.distributed import Collective, Distributed, RankSummary
from flatout.core.records.evidence import Evidence

_ENDINGS: Final = (".json", ".json.gz")


def evidence_of_files(paths: Sequence[Path]) -> Evidence:
    """The Evidence in one trace, or of several ranks in several traces or a folder of them.

    Raises RecordError when a file is no trace, a folder holds none, or two files claim the same rank.
    """
    files = files_in(paths)
    ranks: list[RankTrace] = []
    for file in files:  # one at a time: a trace may be large; all ranks are judged by the same step
        ranks.append(evidence_of(read_trace(file), (file.name,), step=ranks[0].step if ranks else None))
    return merge_ranks(ranks, [f.name for f in files])


def evidence_of_bytes(raw: bytes, path: Path) -> Evidence:
    """The Evidence in the bytes of one trace; `path` is for messages."""
    return merge_ranks([evidence_of(trace_of(raw, path), (path.name,))], [path.name])


def merge_ranks(ranks: Sequence[RankTrace], names: Sequence[str]) -> Evidence:
    """The Evidence of the lowest rank, with what all ranks showed together."""
    numbers = [r.rank for r in ranks]
    if len(set(numbers)) < len(numbers):
        twice = next(n for n in numbers if numbers.count(n) > 1)
        same = ", ".join(name for name, n in zip(names, numbers, strict=True) if n == twice)
        raise RecordError(f"{same} all claim to be rank {twice}; give one trace for each rank of one run")
    first = min(ranks, key=lambda r: r.rank)
    world_size = max(first.world_size, len(ranks))
    if world_size < 2 and not first.collectives:
        return first.evidence
    waits_s = _waits_s(ranks)
    missing = tuple(n for n in range(world_size) if n not in numbers)
    notes = list(first.evidence.notes)
    if missing:
        notes.append(
            f"{len(ranks)} of {world_size} ranks were passed: who waits for whom is unknown without the others; "
            "give all traces, or their folder"
        )
    distributed = Distributed(
        backend=first.backend or (first.collectives[0].backend if first.collectives else ""),
        rank=first.rank,
        world_size=world_size,
        ranks=tuple(
            RankSummary(
                rank=r.rank,
                host=r.host,
                step_s=r.evidence.steps.step_s,
                work_s=max(0.0, r.evidence.steps.step_s - waits_s.get(r.rank, 0.0)),
                phases=r.evidence.steps.phases,
                num_steps=r.evidence.steps.num_timed,
            )
            for r in sorted(ranks, key=lambda r: r.rank)
        ),
        collectives=_with_waits(first.collectives, waits_s.get(first.rank, 0.0)),
        missing_ranks=missing,
    )
    workload = msgspec.structs.replace(first.evidence.workload, world_size=world_size, command=tuple(names))
    return msgspec.structs.replace(first.evidence, workload=workload, distributed=distributed, notes=tuple(notes))


def _waits_s(ranks: Sequence[RankTrace]) -> dict[int, float]:
    """For each rank its wait for slower ones in a step.

    The last to arrive at a collective waits for nobody, so the shortest call of all ranks is the communication and the rest of
    a longer one is waiting. That needs no common clock. Empty unless all ranks ran the same number of collectives.
    """
    counts = {len(r.lengths_ns) for r in ranks}
    if len(ranks) < 2 or len(counts) != 1 or counts == {0}:
        return {}
    shortest = [min(lengths) for lengths in zip(*(r.lengths_ns for r in ranks), strict=True)]
    return {r.rank: sum(own - least for own, least in zip(r.lengths_ns, shortest, strict=True)) * 1e-9 for r in ranks}


def _with_waits(collectives: tuple[Collective, ...], wait_s: float) -> tuple[Collective, ...]:
    """The rank's wait, shared out over its collectives by their length."""
    total_s = sum(c.seconds for c in collectives)
    if not total_s or not wait_s:
        return collectives
    return tuple(msgspec.structs.replace(c, wait_s=min(c.seconds, wait_s * c.seconds / total_s)) for c in collectives)


def files_in(paths: Iterable[Path]) -> list[Path]:
    """The files themselves, and those of each folder.

    Raises RecordError when a folder holds none.
    """
    files: list[Path] = []
    for path in paths:
        found = sorted(p for p in path.iterdir() if p.name.endswith(_ENDINGS)) if path.is_dir() else [path]
        if not found:
            raise RecordError(
                f"the folder '{path}' holds no trace (*.json, *.json.gz); give the folder of the exported traces, "
                "or of the files that --json wrote"
            )
        files += found
    return files
