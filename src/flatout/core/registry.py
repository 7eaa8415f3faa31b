"""Finds the constants RULE, LEVER, REDUCTION and KERNEL in their packages, and entry points of other distributions.

Importing this does no search; asking does.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flatout.core.errors import PlanError, UsageError, explained

if TYPE_CHECKING:
    from flatout.core.records.finding import Rule
    from flatout.core.records.kernel import Kernel
    from flatout.core.records.lever import Lever
    from flatout.core.records.reduction import Reduction


@cache
def rules() -> tuple[Rule, ...]:
    """Every rule, sorted by id: the constants RULE in `flatout.check.rules`, then the entry points of group 'flatout.rules'.

    Raises:
        UsageError: Two rules share an id.
    """
    return _parts("rule", "flatout.check.rules")


@cache
def levers() -> tuple[Lever, ...]:
    """Every lever, sorted by id: the constants LEVER in `flatout.tune.levers`, then the entry points of group 'flatout.levers'.

    Raises:
        UsageError: Two levers share an id.
    """
    return _parts("lever", "flatout.tune.levers")


def lever_of(id: str) -> Lever:
    """The lever of this id; of flatout's own, no other is imported for that.

    Raises:
        PlanError: There is none.
    """
    module = f"flatout.tune.levers.{id.replace('-', '_')}"
    if re.fullmatch(r"[a-z_]+\.[a-z0-9_-]+", id) and all(find_spec(m) for m in (module.rpartition(".")[0], module)):
        own: Lever | None = getattr(importlib.import_module(module), "LEVER", None)
        if own is not None:
            return own
    known = {lever.id: lever for lever in levers()}
    if id not in known:
        raise PlanError(f"there is no lever '{id}'; `flatout levers` lists those there are")
    return known[id]


@cache
def reductions() -> tuple[Reduction, ...]:
    """Every reduction, sorted by id: the constants REDUCTION in `flatout.shrink.reductions`, then the entry points of group
    'flatout.reductions'.

    Raises:
        UsageError: Two reductions share an id.
    """
    return _parts("reduction", "flatout.shrink.reductions")


def reduction_of(id: str) -> Reduction:
    """The reduction of this id.

    Raises:
        PlanError: There is none.
    """
    known = {reduction.id: reduction for reduction in reductions()}
    if id not in known:
        raise PlanError(f"there is no reduction '{id}'; `flatout shrink` knows {', '.join(known)}")
    return known[id]


@cache
def kernels(op: str) -> tuple[Kernel, ...]:
    """Every implementation of an operation, the preferred one first.

    They are the constants KERNEL in the operation's own package of `flatout.blocks.kernels`, then the entry points of group
    'flatout.kernels'.

    Raises:
        UsageError: Two kernels share an id, or nothing implements `op`.
    """
    package = f"flatout.blocks.kernels.{op}"
    is_there = all(find_spec(name) for name in accumulate(package.split("."), "{}.{}".format))
    ranked = [kernel for kernel in _parts("kernel", package if is_there else "") if kernel.op == op]
    if not ranked:
        known = sorted({kernel.op for kernel in _parts("kernel", "flatout.blocks.kernels")})
        raise UsageError(f"no kernel implements '{op}'; there are {', '.join(known)}")
    return tuple(sorted(ranked, key=lambda k: k.order))


def ids_of_own(kind: Literal["rule", "lever"]) -> tuple[str, ...]:
    """The ids of flatout's own rules or levers, sorted, from the paths of their modules: none is imported."""
    folder = Path(__file__).parents[1] / {"rule": "check/rules", "lever": "tune/levers"}[kind]
    constant = re.compile(rf"^{kind.upper()}\b.*=", re.MULTILINE)
    files = [file for file in folder.glob("*/*.py") if constant.search(file.read_text(encoding="utf-8"))]
    return tuple(sorted(f"{file.parent.name}.{file.stem}".replace("_", "-") for file in files))


def _parts(kind: str, package: str) -> tuple[Any, ...]:
    """The parts of this kind in a package, if one is named, and those of other distributions; sorted by id."""
    found: dict[str, Any] = {}
    loaded = [point.load() for point in entry_points(group=f"flatout.{kind}s")]
    for part in [*(constants(package, kind.upper()) if package else ()), *loaded]:
        if part.id in found:
            raise UsageError(
                f"{kind} id '{part.id}' is taken by {found[part.id].module}; give {part.module} an id of its own"
            )
        found[part.id] = part
    return tuple(found[id] for id in sorted(found))


def constants(package: str, name: str) -> list[Any]:
    """The constants of this name in the modules of a package, by the names of the modules."""
    found: dict[str, Any] = {}
    for info in pkgutil.walk_packages(importlib.import_module(package).__path__, prefix=f"{package}."):
        try:
            module = importlib.import_module(info.name)
        except ModuleNotFoundError as e:
            raise explained(e) from e
        if hasattr(module, name):
            found[info.name] = getattr(module, name)
    return [found[module] for module in sorted(found)]
