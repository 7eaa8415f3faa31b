"""Annotations of GitHub Actions: what a job prints so that a pull request shows it beside the line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from flatout.report.sanitise import inert

Level = Literal["error", "warning", "notice"]

_MOST: Final = 10
"""Annotations of one level that GitHub shows of one step of a job; it drops those that come later
(https://github.com/actions/toolkit/blob/main/docs/problem-matchers.md#limitations)."""
_DATA: Final = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_PROPERTY: Final = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A", ":": "%3A", ",": "%2C"})
"""Characters that end a message or a property, as GitHub's own library escapes them
(https://github.com/actions/toolkit/blob/main/packages/core/src/command.ts)."""


class Annotation(NamedTuple):
    """A remark on a line; `file` is relative to the repository, and '' where the remark is on no line.

    The message may have several lines.
    """

    level: Level
    title: str
    message: str
    file: str = ""
    line: int = 0


def github_annotations(annotations: Iterable[Annotation]) -> str:
    """Every annotation as a workflow command on a line of its own; of each level the first ten, which is what GitHub shows.

    >>> print(github_annotations([Annotation("error", "1.5x, slower", "50 % more", "a,b.py", 7)]), end="")
    ::error file=a%2Cb.py,line=7,title=1.5x%2C slower::50 %25 more
    """
    lines, num_shown = [], Counter[Level]()
    for one in annotations:
        num_shown[one.level] += 1
        if num_shown[one.level] <= _MOST:
            lines.append(f"{_command(one)}\n")
    return "".join(lines)


def _command(one: Annotation) -> str:
    place = {"file": one.file, "line": str(one.line) if one.line > 0 else ""} if one.file else {}
    named = {**place, "title": one.title}
    properties = ",".join(f"{name}={inert(value).translate(_PROPERTY)}" for name, value in named.items() if value)
    message = "\n".join(inert(line) for line in one.message.splitlines())
    return f"::{one.level} {properties}::{message.translate(_DATA)}"
