"""Where a cause lies, in words: the user's line, and the way from there to a library's line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from flatout.core.records.finding import RankedFinding
from flatout.core.records.workload import LibraryFrame, Source
from flatout.report.sanitise import inert, place, place_of

_ARROW: Final = " -> "
_MOST_PLACES: Final = 5
"""Further places that are named; the rest is counted."""
_LONGEST_CALL: Final = 40
"""Characters of the user's line within a chain."""


def chain_of_finding(finding: RankedFinding, *, cwd: str) -> str:
    """'train.py:12 trainer.train() -> transformers/trainer.py:2300 -> .../modeling_bert.py:312', or the user's line alone."""
    where = place(finding.file, finding.line, cwd=cwd)
    if not finding.via:
        return where
    return _ARROW.join([f"{where} {_call(finding.text)}".rstrip(), *_steps(finding.via)])


def chain_of(source: Source | None, *, cwd: str) -> str:
    """'train.py:12 -> transformers/trainer.py:2300 -> .../modeling_bert.py:312', the user's line alone, or '' for None."""
    where = place_of(source, cwd=cwd)
    return _ARROW.join([where, *_steps(source.via)]) if source is not None else where


def innermost_place(source: Source, *, cwd: str) -> str:
    """The line of a library that the source ends in, or the user's line."""
    return inert(source.via[-1].place) if source.via else place_of(source, cwd=cwd)


def innermost_text(finding: RankedFinding) -> str:
    """The code of the line that a cause lies in: the library's, or the user's."""
    return finding.via[-1].text or finding.text if finding.via else finding.text


def other_places(finding: RankedFinding, *, cwd: str) -> tuple[str, ...]:
    """The finding's further places, each once; of many the first, and how many more there are."""
    here = (finding.file, finding.line)
    library = finding.via[-1].place if finding.via else ""
    lines: dict[str, set[str]] = defaultdict(set)
    for source in finding.also:
        is_here = (source.file, source.line) == here
        if is_here and (not source.via or source.library == library):
            continue  # the finding's own place again
        lines[innermost_place(source, cwd=cwd) if is_here else place_of(source, cwd=cwd)].add(source.library)
    shown = [f"{at} ({len(below)} lines below it)" if len(below) > 1 else at for at, below in lines.items()]
    more = len(shown) - _MOST_PLACES
    return tuple(shown) if more <= 0 else (*shown[:_MOST_PLACES], f"and {more} more")


def _steps(via: Sequence[LibraryFrame]) -> Iterator[str]:
    """The outermost line of a library and the innermost, whose folders are left out where they are the same package's."""
    if not via:
        return
    first, last = via[0], via[-1]
    yield inert(first.place)
    if last is not first:
        is_same = last.package == first.package
        yield inert(f".../{last.place.rpartition('/')[2]}" if is_same else last.place)


def _call(text: str) -> str:
    text = inert(text)
    return text if len(text) <= _LONGEST_CALL else f"{text[:_LONGEST_CALL]}..."
