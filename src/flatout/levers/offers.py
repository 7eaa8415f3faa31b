"""What several levers say to a run in the same words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Parameters, Refusal


def as_found(
    lever: str, findings: Sequence[Finding], *, else_because: str, parameters: Parameters | None = None
) -> Iterator[Candidate | Refusal]:
    """The cure of what the first finding found, at what that promises; a refusal where nothing was found."""
    if not findings:
        yield Refusal(lever=lever, because=else_because)
        return
    first = findings[0]
    yield Candidate(
        lever=lever,
        parameters=parameters or {},
        saved_s=first.saved_s,
        where=first.where,
        because=first.because,
    )
