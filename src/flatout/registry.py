"""Finds RULE, LEVER and KERNEL in their shelves, and entry points of others. Importing this does no search; asking does."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from flatout.errors import PlanError, UsageError

if TYPE_CHECKING:
    from flatout.records.finding import Rule
    from flatout.records.kernel import Kernel
    from flatout.records.lever import Lever

    Part = TypeVar("Part", Rule, Lever, Kernel)


@cache
def rules() -> tuple[Rule, ...]:
    """Every rule: the constants RULE under `flatout.rules`, then the entry points of group 'flatout.rules'; sorted by id.

    Raises UsageError when two rules share an id.
    """
    found: dict[str, Rule] = {}
    for module in _shelved("flatout.rules"):
        rule: Rule | None = getattr(module, "RULE", None)
        if rule is not None:
            _add(found, rule, "rule")
    for point in entry_points(group="flatout.rules"):
        _add(found, point.load(), "rule")
    return tuple(found[key] for key in sorted(found))


@cache
def levers() -> tuple[Lever, ...]:
    """Every lever: the constants LEVER under `flatout.levers`, then the entry points of group 'flatout.levers'; sorted by id.

    Raises UsageError when two levers share an id.
    """
    found: dict[str, Lever] = {}
    for module in _shelved("flatout.levers"):
        lever: Lever | None = getattr(module, "LEVER", None)
        if lever is not None:
            _add(found, lever, "lever")
    for point in entry_points(group="flatout.levers"):
        _add(found, point.load(), "lever")
    return tuple(found[key] for key in sorted(found))


def lever_of(id: str) -> Lever:
    """The lever of this id.

    Raises PlanError when there is none.
    """
    known = {lever.id: lever for lever in levers()}
    if id not in known:
        raise PlanError(f"there is no lever '{id}'; `flatout levers` lists those there are")
    return known[id]


@cache
def kernels(op: str) -> tuple[Kernel, ...]:
    """Every implementation of an operation, the preferred first: the constants KERNEL under `flatout.kernels`, then the entry
    points of group 'flatout.kernels'.

    Raises UsageError when two kernels share an id, and when nothing implements `op`.
    """
    found: dict[str, Kernel] = {}
    for module in _shelved("flatout.kernels"):
        kernel: Kernel | None = getattr(module, "KERNEL", None)
        if kernel is not None:
            _add(found, kernel, "kernel")
    for point in entry_points(group="flatout.kernels"):
        _add(found, point.load(), "kernel")
    ranked = tuple(sorted((k for k in found.values() if k.op == op), key=lambda k: (k.order, k.id)))
    if not ranked:
        raise UsageError(f"no kernel implements '{op}'; there are {', '.join(sorted({k.op for k in found.values()}))}")
    return ranked


def _shelved(room: str) -> Iterator[ModuleType]:
    shelf = importlib.import_module(room)
    for info in pkgutil.walk_packages(shelf.__path__, prefix=f"{room}."):
        yield importlib.import_module(info.name)


def _add(found: dict[str, Part], part: Part, kind: str) -> None:
    if part.id in found:
        raise UsageError(
            f"{kind} id '{part.id}' is taken by {found[part.id].module}; give {part.module} an id of its own"
        )
    found[part.id] = part
