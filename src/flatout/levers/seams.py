"""The places at which an unchanged script can be changed while it runs: its start, what it makes, the first call of a model.

A lever names what it wants to do at a seam; the seams do it when the script gets there, and undo all of it.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from importlib.machinery import SourceFileLoader
from pathlib import Path
from threading import get_ident
from types import CodeType
from typing import Any

import torch
from torch import nn

from flatout.profiling.calls import wrapped
from flatout.profiling.patching import Patches

Undo = Callable[[], object]
Making = Callable[[type, dict[str, Any]], None]
"""Told the class that is being made and its arguments by name, which it may change."""


class ScriptSeams:
    """The Seams of one script: changes waiting for it, and those that were made. `install` before it runs, `remove` after it.

    What is noted in `done` are the changes that the script really met: a plan whose lever met nothing was not applied.
    """

    def __init__(self, root: str = "") -> None:
        self.done: list[str] = []
        self._sources: dict[Path, list[Callable[[str], str]]] = {}
        self._root = Path(root).resolve()
        self._patches = Patches()
        self._undo: list[Undo] = []
        self._starts: list[Callable[[], Undo]] = []
        self._makings: dict[type, list[Making]] = {}
        self._first_calls: list[Callable[[nn.Module], Undo | None]] = []
        self._around: list[Callable[[nn.Module], AbstractContextManager[object] | None]] = []
        self._inputs: list[Callable[[nn.Module, Any], Any]] = []
        self._outputs: list[Callable[[nn.Module, Any], Any]] = []
        self._met: dict[int, nn.Module] = {}
        self._is_inside = False
        self._thread_id = get_ident()

    # -- what levers ask for ----------------------------------------------------------------------------------------------

    def at_start(self, change: Callable[[], Undo]) -> None:
        """Before the script's first line; returns how to undo it."""
        self._starts.append(change)

    def at_making(self, kind: type, change: Making) -> None:
        """Whenever an object of `kind`, or of a subclass that calls its constructor, is made."""
        self._makings.setdefault(kind, []).append(change)

    def at_first_call(self, change: Callable[[nn.Module], Undo | None]) -> None:
        """When a root module with parameters is called for the first time, before it runs; returns how to undo it, if it did."""
        self._first_calls.append(change)

    def around_calls(self, context: Callable[[nn.Module], AbstractContextManager[object] | None]) -> None:
        """Around every call of a root module with parameters."""
        self._around.append(context)

    def on_inputs(self, change: Callable[[nn.Module, Any], Any]) -> None:
        """Of every call of a root module with parameters: (args, kwargs) in, (args, kwargs) out."""
        self._inputs.append(change)

    def on_outputs(self, change: Callable[[nn.Module, Any], Any]) -> None:
        """Of every call of a root module with parameters: what it returned in, what the script gets out."""
        self._outputs.append(change)

    def replace(self, owner: object, name: str, value: object) -> None:
        """An attribute of torch's or the script's."""
        self._patches.set(owner, name, value)

    def at_source(self, file: str, change: Callable[[str], str]) -> None:
        """The text of a file in the script's folder before it is compiled: its own (see `code_of`) or one it imports."""
        self._sources.setdefault((self._root / file).resolve(), []).append(change)

    def note(self, what: str) -> None:
        """A change has met what it is for."""
        if what not in self.done:
            self.done.append(what)

    def code_of(self, file: str) -> CodeType | None:
        """The compiled code of a file whose text is changed; None for one that stays as it is.

        Raises EditError when a change cannot be made.
        """
        path = Path(file).resolve()
        changes = self._sources.get(path)
        if changes is None:
            return None
        with open(path, encoding="utf-8") as opened:
            text = opened.read()
        for change in changes:
            text = change(text)
        lines = text.splitlines(keepends=True)
        linecache.cache[file] = (len(text), None, lines, file)  # tracebacks show what runs; None: never read again
        self._undo.append(lambda: linecache.cache.pop(file, None))
        return compile(text, file, "exec", dont_inherit=True)

    # -- life -------------------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Make ready; what is to be done at the start is done now."""
        for start in self._starts:
            self._undo.append(start())
        for kind, changes in self._makings.items():
            self._patches.set(kind, "__init__", _making(kind, changes))
        if self._sources:
            self._patches.set(SourceFileLoader, "get_code", self._importing(SourceFileLoader.get_code))
        if self._first_calls or self._around or self._inputs or self._outputs:
            self._patches.set(nn.Module, "__call__", self._calling(nn.Module.__call__))

    def remove(self) -> None:
        """Undo everything, last first."""
        self._patches.undo()
        while self._undo:
            self._undo.pop()()

    def _importing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        seams = self

        def get_code(self: SourceFileLoader, fullname: str) -> Any:
            changed = seams.code_of(self.path) if self.path else None
            return changed if changed is not None else original(self, fullname)

        return get_code

    def _calling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        seams = self
        is_compiling = torch.compiler.is_dynamo_compiling  # dynamo folds it, so that no guard looks at our own state

        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or seams._is_inside or get_ident() != seams._thread_id:
                return original(self, *args, **kwargs)
            if id(self) not in seams._met:
                if next(self.parameters(), None) is None:
                    return original(self, *args, **kwargs)
                seams._meet(self)
            for change in seams._inputs:
                args, kwargs = change(self, (args, kwargs))
            seams._is_inside = True
            try:
                with ExitStack() as stack:
                    for around in seams._around:
                        context = around(self)
                        if context is not None:
                            stack.enter_context(context)
                    output = original(self, *args, **kwargs)
            finally:
                seams._is_inside = False
            for told in seams._outputs:
                output = told(self, output)
            return output

        return __call__

    def _meet(self, module: nn.Module) -> None:
        self._met[id(module)] = module
        for change in self._first_calls:
            undo = change(module)
            if undo is not None:
                self._undo.append(undo)


def _making(kind: type, changes: Iterable[Making]) -> Callable[..., None]:
    """A constructor whose arguments are seen by name first."""
    from inspect import signature

    original: Callable[..., None] = vars(kind)["__init__"]
    names = signature(original)
    wanted = tuple(changes)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = names.bind(self, *args, **kwargs)
        given = dict(bound.arguments)
        me = given.pop(next(iter(names.parameters)))
        for change in wanted:
            change(type(self), given)
        original(me, **_flat(given, names.parameters))

    return __init__


def _flat(given: dict[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, with those that went to `**kwargs` at the top."""
    flat: dict[str, Any] = {}
    for name, value in given.items():
        known = parameters.get(name)
        if known is not None and known.kind is known.VAR_KEYWORD:
            flat.update(value)
        else:
            flat[name] = value
    return flat


def name_of(module: nn.Module) -> str:
    """The class of the user's module."""
    return type(wrapped(module)).__name__
