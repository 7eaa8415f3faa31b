"""What can be set where a cause lies in a library's code, or in a loop that a library runs: `libraries/<library>.toml`.

Nobody edits a package's own lines. A finding there names the argument, flag or class that changes what they do; where none is
known it says so, and prints no edit that could not be made.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import resources
from typing import Final, Literal

import msgspec

from flatout.core.errors import UsageError
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.record import Record
from flatout.core.records.workload import LibraryFrame, Source

_WHOLE: Final = 0.8
"""Of a user's line's operators: a cause with this share of them is what the line asks for, and is mended at the line."""
_NOTHING: Final = (
    "this is {package}'s own code, and no setting is known that changes it; a class or function of your own in its place "
    "would"
)


class LibrarySetting(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to set against the causes that these rules find, or that these levers mend.

    `through` is the file, or how its path within the package begins, that the chain must go through; '' for any. With the scope
    'loop' it counts for causes in the user's own code too, where the package runs the loop.
    """

    edit: str
    edit_on_cpu: str = ""
    """What to set where the script runs on a CPU, if that is something else."""
    rules: tuple[str, ...] = ()
    levers: tuple[str, ...] = ()
    through: str = ""
    scope: Literal["below", "loop"] = "below"
    beside: bool = False
    """Whether it is told after the rule's own edit, which can be made in the user's code, and not in its place."""

    def cures(self, finding: Finding) -> bool:
        """Whether it is set against this cause."""
        return finding.rule in self.rules or any(lever in self.levers for lever in finding.levers)


class Library(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A library: the folders of its packages, and what can be set; the first setting that fits counts."""

    packages: tuple[str, ...]
    settings: tuple[LibrarySetting, ...]
    replaces: tuple[str, ...] = ()
    """Packages whose classes it derives its own from: what is set for theirs is set as it says, where it says anything."""


@cache
def libraries() -> dict[str, Library]:
    """Every library by the name of its file.

    Raises UsageError where a file does not hold a Library.
    """
    folder = resources.files("flatout.check.libraries")
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    return {file.name.removesuffix(".toml"): _parse(file.name, file.read_text(encoding="utf-8")) for file in files}


def with_settings(findings: Iterable[Finding], evidence: Evidence, *, rewriting: frozenset[str]) -> Iterator[Finding]:
    """Findings whose causes lie in a library, with what can be set in place of the edit.

    The edits of the rules `rewriting` rewrite the very lines: in a library they are left out, unless the cause is all that the
    user's line does.
    """
    loop = [frame for source in _loop_lines(evidence) for frame in source.via]
    for finding in findings:
        setting = _setting(finding, loop)
        if setting is not None:
            on_cpu = evidence.workload.device == "cpu" and setting.edit_on_cpu
            edit = setting.edit_on_cpu if on_cpu else setting.edit
            edit = f"{finding.edit}; or {edit}" if setting.beside else edit
            yield msgspec.structs.replace(finding, edit=edit)
        elif finding.rule in rewriting and _is_inside(finding, evidence):
            package = finding.where.library.partition("/")[0] if finding.where is not None else ""
            yield msgspec.structs.replace(finding, edit=_NOTHING.format(package=package))
        else:
            yield finding


def _setting(finding: Finding, loop: list[LibraryFrame]) -> LibrarySetting | None:
    """The innermost library's first: BERT's attention is set at BERT, not at the Trainer that calls it.

    What is set for the whole loop is set where the user starts it: at the Trainer, not at the Accelerator that it makes.
    """
    chain = finding.where.via if finding.where is not None else ()
    for frame in reversed(chain):
        for setting in _settings_of(frame):
            if setting.scope == "below" and setting.cures(finding):
                derived = (s for outer in chain for s in _settings_of(outer, replacing=frame.package))
                return next((s for s in derived if s.scope == "below" and s.cures(finding)), setting)
    loop = [*chain, *loop]
    return next((s for frame in loop for s in _settings_of(frame) if s.scope == "loop" and s.cures(finding)), None)


def _settings_of(frame: LibraryFrame, *, replacing: str = "") -> Iterator[LibrarySetting]:
    """The settings of a frame's library; with `replacing` only where it derives its classes from those of this package."""
    for library in libraries().values():
        if frame.package in library.packages and (not replacing or replacing in library.replaces):
            inside = frame.file.partition("/")[2]
            yield from (setting for setting in library.settings if inside.startswith(setting.through))


def _loop_lines(evidence: Evidence) -> tuple[Source, ...]:
    """The lines that start the backward and step the optimizers: whose chains go through a library that runs the loop."""
    return evidence.sources_of((*evidence.backward_sources, *(o.source for o in evidence.optimizers)))


def _is_inside(finding: Finding, evidence: Evidence) -> bool:
    """Whether the cause is a part of what a library does below the user's line, which therefore cannot be rewritten."""
    where = finding.where
    if where is None or not where.library:
        return False
    sources = {i for i, s in enumerate(evidence.sources) if (s.file, s.line) == (where.file, where.line)}
    line_s = sum(o.total_s for o in evidence.operators if o.source in sources)
    claimed_s = sum(evidence.operators[i].total_s for i in finding.operators) if finding.operators else finding.cost_s
    return claimed_s < _WHOLE * line_s


def _parse(name: str, text: str) -> Library:
    try:
        return msgspec.convert(tomllib.loads(text), Library)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as e:
        raise UsageError(f"'{name}' does not hold a Library: {e}; compare it with its neighbours") from e
