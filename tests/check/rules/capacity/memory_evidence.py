"""Evidence with a memory record: a host of 16 GiB whose step peaks at 1 GiB."""

from __future__ import annotations

import msgspec
from tests.evidence_builder import EvidenceBuilder

from flatout.core.records.evidence import Evidence
from flatout.core.records.memory import Growth, Memory, MemoryKind, MemoryPart, RetainedGraph
from flatout.core.records.usage import CallUse, ModuleFact

MIB = 1 << 20
GIB = 1 << 30


def part(kind: MemoryKind, num_bytes: int, *, source: int = -1, example: str = "") -> MemoryPart:
    return MemoryPart(kind=kind, bytes=num_bytes, num_tensors=1, source=source, example=example)


def remembering(
    run: EvidenceBuilder,
    *,
    parts: tuple[MemoryPart, ...] = (),
    growth: tuple[Growth, ...] = (),
    slope: float = 0.0,
    retained: tuple[RetainedGraph, ...] = (),
    uses: tuple[CallUse, ...] = (),
    facts: tuple[ModuleFact, ...] = (),
    peak_bytes: int = GIB,
    total_bytes: int = 16 * GIB,
) -> Evidence:
    """What `run` builds, with this memory."""
    memory = Memory(
        device="cpu",
        peak_bytes=peak_bytes,
        peak_phase="backward",
        at_peak=parts,
        measured_peak_bytes=peak_bytes,
        total_bytes=total_bytes,
        growth=growth,
        growth_bytes_per_step=slope,
        retained=retained,
    )
    return msgspec.structs.replace(run.build(), memory=(memory,), uses=uses, module_facts=facts)
