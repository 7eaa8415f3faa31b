"""Who keeps a tensor alive: the container or variable with a name, and the user's line that puts things into it."""

from __future__ import annotations

import ast
import gc
import inspect
import linecache
import re
import sys
from collections import deque
from collections.abc import Iterator
from traceback import walk_stack
from types import CellType, FrameType, ModuleType
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from flatout.core.records.workload import Source
from flatout.core.runtime.source_sites import Sites

_LEVELS: Final = 6
"""How far up from the tensor a name is looked for."""
_WIDTH: Final = 64
"""Referrers followed on each level."""
_CONTAINERS: Final = (list, dict, tuple, set, deque, CellType)
_ADDING: Final = ("append", "appendleft", "extend", "add", "insert", "update", "setdefault", "push", "put")


class Holder(NamedTuple):
    """The line (an index of Sites, -1 when not found) and the container in words ('' when not found)."""

    site: int
    words: str


class Name(NamedTuple):
    """A name of an object: a variable of a running function or of a module, or an attribute of an object."""

    name: str
    is_attribute: bool
    owner: str
    """The function, module or class that the name belongs to."""
    file: str
    first_line: int
    """First line of the function for a local variable, 0 otherwise."""


def find_holders(tensors: list[Tensor], sites: Sites, created_at: list[int]) -> list[Holder]:
    """The holder of each tensor. Walks the garbage collector's referrers, about 10 ms a level.

    `created_at` are the lines that created the tensors: of several that add to a container, one in the same function is likelier.
    """
    if not tensors:
        return []
    names = _names_of_running(sites)
    sources = sites.table()
    found = []
    for index, site in enumerate(created_at):  # no zip: its tuples would be referrers too
        keys: set[str] = set()
        name, kind = _name_above(tensors[index], names, hidden=[tensors], keys=keys)
        if name is None:
            found.append(Holder(-1, f"a {kind} without a name" if kind else ""))
            continue
        near = sources[site] if site >= 0 else None
        files = dict.fromkeys([name.file, *(s.file for s in sources)])
        line = next((at for file in files if file for at in [_adding_line(file, name, near, keys)] if at), None)
        words = f"{kind} '{name.name}' of {name.owner}"
        found.append(Holder(sites.add(line) if line is not None else -1, words))
    return found


def _names_of_running(sites: Sites) -> dict[int, Name]:
    """Names of objects (by id) in the user's running functions and modules."""
    names: dict[int, Name] = {}
    for frame, _ in walk_stack(sys._getframe(1)):
        if sites.is_user_code(frame.f_code):
            for name, value in _locals_of(frame):
                code = frame.f_code
                is_module = code.co_name == "<module>"
                owner = "the script" if is_module else f"{code.co_name}()"
                first = 0 if is_module else code.co_firstlineno
                names.setdefault(id(value), Name(name, False, owner, code.co_filename, first))
            for name, value in list(frame.f_globals.items()):
                if not isinstance(value, ModuleType) and not name.startswith("__"):
                    owner = f"module {frame.f_globals.get('__name__', '')}".replace("module __main__", "the script")
                    names.setdefault(id(value), Name(name, False, owner, frame.f_code.co_filename, 0))
    return names


def _locals_of(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """The local variables of a frame."""
    values = frame.f_locals
    yield from list(values.items())
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        values.clear()  # the snapshot stays with the frame, and would keep alive what the function lets go of


def _name_above(
    tensor: Tensor, names: dict[int, Name], *, hidden: list[Any], keys: set[str]
) -> tuple[Name | None, str]:
    """The nearest name above the tensor, and what sort of object has it; keys of dicts in between are added to `keys`."""
    level: list[Any] = [tensor]
    visited = {id(tensor)}
    visited_ids = {id(tensor)}
    ours = {id(h) for h in hidden}
    for _ in range(_LEVELS):
        for thing in level:
            if id(thing) in names and not isinstance(thing, nn.Module):
                return names[id(thing)], _sort_of(thing)
        above: list[Any] = []
        ours |= {id(level), id(above), id(visited), id(visited_ids), id(names)}
        for thing in gc.get_referrers(*level):
            if id(thing) in visited or id(thing) in ours or _is_ours(thing):
                continue
            visited.add(id(thing))
            if isinstance(thing, _CONTAINERS):
                above.append(thing)
                if isinstance(thing, dict):
                    keys |= {k for k, value in list(thing.items()) if isinstance(k, str) and id(value) in visited_ids}
            found = _attribute_of(thing, visited_ids)
            if found is not None:
                return found
        level = above[:_WIDTH]
        visited_ids |= {id(thing) for thing in level}
        if not level:
            break
    return None, ""


def _is_ours(thing: Any) -> bool:
    return isinstance(thing, FrameType) or type(thing).__module__.startswith("flatout.")


def _attribute_of(thing: Any, visited_ids: set[int]) -> tuple[Name, str] | None:
    """The name of an attribute of `thing`, an object with attributes, whose value is one of these (by id), and its sort."""
    if isinstance(thing, (*_CONTAINERS, ModuleType, type, Tensor)) or not hasattr(type(thing), "__dict__"):
        return None
    try:
        attributes = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return None
    for name, value in list(attributes.items()) if isinstance(attributes, dict) else ():
        if id(value) in visited_ids:
            code = sys.modules.get(type(thing).__module__)
            file = getattr(code, "__file__", "") or ""
            return Name(name, True, type(thing).__qualname__, file, 0), _sort_of(value)
    return None


def _sort_of(thing: Any) -> str:
    return "variable" if isinstance(thing, (Tensor, CellType)) else type(thing).__name__


def _adding_line(file: str, name: Name, near: Source | None, keys: set[str]) -> Source | None:
    """The line of `file` that puts something into the named container, or extends the named variable.

    Of several the one that names a key that leads to the tensor, then one that names what the line `near` assigned.
    """
    text = "".join(linecache.getlines(file))
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    if name.first_line and file == name.file:
        inside = [n for n in ast.walk(tree) if getattr(n, "lineno", 0) == name.first_line]
        nodes = [n for f in inside if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)) for n in ast.walk(f)]
    elif name.first_line:
        return None
    else:
        nodes = list(ast.walk(tree))
    lines = sorted({n.lineno for n in nodes if isinstance(n, (ast.stmt, ast.expr)) and _adds(n, name)})
    if not lines:
        return None
    assigned = near.text.partition("=")[0].strip() if near is not None else ""

    def score(line: int) -> tuple[bool, bool, bool, int]:
        text = linecache.getline(file, line)
        has_key = any(f'"{key}"' in text or f"'{key}'" in text for key in keys)
        speaks = assigned.isidentifier() and re.search(rf"\b{assigned}\b", text) is not None
        return has_key, speaks, near is not None and near.file == file and line >= near.line, -line

    return Source(file=file, line=max(lines, key=score))


def _adds(node: ast.AST, name: Name) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADDING:
        return _mentions(node.func.value, name)
    if isinstance(node, ast.AugAssign):
        return _mentions(node.target, name)
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _mentions(target.value, name):
                return True
            if _is(target, name):
                return any(_is(inner, name) for inner in ast.walk(node.value))
    return False


def _mentions(node: ast.AST, name: Name) -> bool:
    """Whether the expression is the named thing, or an item or attribute of it."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return _is(node, name)


def _is(node: ast.AST, name: Name) -> bool:
    if name.is_attribute:
        return isinstance(node, ast.Attribute) and node.attr == name.name
    return isinstance(node, ast.Name) and node.id == name.name
