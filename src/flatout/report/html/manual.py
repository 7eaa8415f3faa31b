"""What the docstring of a rule says, for the reader who wants to know what a finding means."""

from __future__ import annotations

import importlib
import re
from inspect import cleandoc
from typing import Final, NamedTuple

from flatout.core.registry import rules

_SECTION: Final = re.compile(r"^(?P<name>[A-Z][\w -]*?) {2,}(?P<text>\S.*)$")
_SHOWN: Final = ("Costs", "Evidence", "False alarm")


class Entry(NamedTuple):
    """One section of a rule's page."""

    name: str
    text: str


def manual(rule_id: str) -> tuple[Entry, ...]:
    """The sections that explain a finding; none when the rule is not installed here."""
    rule = next((r for r in rules() if r.id == rule_id), None)
    docstring = importlib.import_module(rule.module).__doc__ if rule is not None else None
    found: list[Entry] = []
    for line in cleandoc(docstring or "").splitlines():
        section = _SECTION.match(line)
        if section:
            found.append(Entry(section["name"], section["text"]))
        elif found and line.startswith(" "):
            found[-1] = Entry(found[-1].name, f"{found[-1].text} {line.strip()}")
    return tuple(e for e in found if e.name in _SHOWN)
