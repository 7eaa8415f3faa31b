"""Finds the constants RULE in their shelves, and entry points of other packages. Importing this does no search; asking does."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from flatout.errors import UsageError

if TYPE_CHECKING:
    from flatout.records.finding import Rule


@cache
def rules() -> tuple[Rule, ...]:
    """Every rule: the constants RULE under `flatout.rules`, then the entry points of group 'flatout.rules'; sorted by id.

    Raises UsageError when two rules share an id.
    """
    shelf = importlib.import_module("flatout.rules")
    found: dict[str, Rule] = {}
    for info in pkgutil.walk_packages(shelf.__path__, prefix="flatout.rules."):
        rule: Rule | None = getattr(importlib.import_module(info.name), "RULE", None)
        if rule is not None:
            _add(found, rule)
    for point in entry_points(group="flatout.rules"):
        _add(found, point.load())
    return tuple(found[key] for key in sorted(found))


def _add(found: dict[str, Rule], rule: Rule) -> None:
    if rule.id in found:
        raise UsageError(
            f"rule id '{rule.id}' is taken by {found[rule.id].module}; give {rule.module} an id of its own"
        )
    found[rule.id] = rule
