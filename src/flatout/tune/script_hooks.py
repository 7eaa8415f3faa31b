"""Hooks of an unchanged script: its start, the objects that it constructs, the calls of its models, the text of its files.

A lever registers a change at a hook; the hooks make it when the script gets there, and undo all changes at the end.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.machinery import SourceFileLoader
from itertools import chain
from pathlib import Path
from threading import get_ident
from types import CodeType
from typing import Any

import torch
from torch import nn

from flatout.check.observe.calls import wrapped
from flatout.core.errors import PlanError
from flatout.core.records.workload import PACKAGE_FOLDERS
from flatout.core.runtime.patches import Patches
from flatout.core.runtime.project_folder import is_editable

Undo = Callable[[], object]
ConstructorChange = Callable[[type, dict[str, Any]], None]
"""Called with the class that is constructed and its arguments by name, which it may change."""


class CallHooks:
    """The part of the Hooks that is the same wherever a lever is applied: changes of calls and attributes, and undoing them."""

    def __init__(self) -> None:
        self.contexts: list[Callable[[nn.Module], AbstractContextManager[object] | None]] = []
        self.inputs: list[Callable[[nn.Module, Any], Any]] = []
        self.outputs: list[Callable[[nn.Module, Any], Any]] = []
        self.calls: list[Callable[[nn.Module, Callable[..., Any], Any, Any], Any]] = []
        self.has_replaced = False
        self._patches = Patches()
        self._undo: list[Undo] = []

    def around_calls(self, context: Callable[[nn.Module], AbstractContextManager[object] | None]) -> None:
        """Enter this context around every call of a root module with parameters."""
        self.contexts.append(context)

    def on_inputs(self, change: Callable[[nn.Module, Any], Any]) -> None:
        """Pass (args, kwargs) of every call of a root module with parameters through `change`."""
        self.inputs.append(change)

    def in_place_of_calls(self, call: Callable[[nn.Module, Callable[..., Any], Any, Any], Any]) -> None:
        """Have `call(module, original, args, kwargs)` compute what a call of a root module with parameters returns."""
        self.calls.append(call)

    def on_outputs(self, change: Callable[[nn.Module, Any], Any]) -> None:
        """Pass what every call of a root module with parameters returns through `change`."""
        self.outputs.append(change)

    def replace(self, owner: object, name: str, value: object) -> None:
        """Replace an attribute of torch or of the script until everything is undone."""
        self.has_replaced = True
        self._patches.set(owner, name, value)

    def remove(self) -> None:
        """Undo every change and every patch, last first."""
        self._patches.undo()
        while self._undo:
            self._undo.pop()()


class ScriptHooks(CallHooks):
    """The Hooks of one script, with the changes that wait for it: `install` them before it runs, `remove` them after it.

    `done` lists the changes that were really made: a plan whose lever found nothing to change was not applied.
    """

    def __init__(self, root: str = "") -> None:
        super().__init__()
        self.done: list[str] = []
        self._sources: dict[Path, list[Callable[[str], str]]] = {}
        self._root = Path(root).resolve()
        self._starts: list[Callable[[], Undo]] = []
        self._constructions: dict[type, list[ConstructorChange]] = {}
        self._first_calls: list[Callable[[nn.Module], Undo | None]] = []
        self._met: dict[int, nn.Module] = {}
        self._is_inside = False
        self._thread_id = get_ident()

    # -- what levers ask for ----------------------------------------------------------------------------------------------

    def at_start(self, change: Callable[[], Undo]) -> None:
        """Make a change before the script's first line; it returns how to undo it."""
        self._starts.append(change)

    def at_construction(self, kind: type, change: ConstructorChange) -> None:
        """Change the arguments of each constructor of `kind`, or of a subclass that calls it."""
        self._constructions.setdefault(kind, []).append(change)

    def at_first_call(self, change: Callable[[nn.Module], Undo | None]) -> None:
        """Make a change before the first call of each root module with parameters; it may return how to undo it."""
        self._first_calls.append(change)

    def at_source(self, file: str, change: Callable[[str], str]) -> None:
        """Change the text of a file in the script's project before it is compiled: the script (see `code_of`) or an import.

        Raises PlanError for a file elsewhere, or of an installed package.
        """
        path = (self._root / file).resolve()
        if not is_editable(path, self._root) or not set(PACKAGE_FOLDERS).isdisjoint(path.parts):
            raise PlanError(f"the plan changes '{file}', which is not in the project of '{self._root}'; tune it again")
        self._sources.setdefault(path, []).append(change)

    def note(self, what: str) -> None:
        """Record in `done` that a change has really been made."""
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

    # -- installing and removing ------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Patch torch and the importer, and make the changes that belong to the start."""
        for start in self._starts:
            self._undo.append(start())
        for kind, changes in self._constructions.items():
            self._patches.set(kind, "__init__", _observed_constructor(kind, changes))
        if self._sources:
            self._patches.set(SourceFileLoader, "get_code", self._importing(SourceFileLoader.get_code))
        if self._first_calls or self.contexts or self.inputs or self.outputs or self.calls:
            self._patches.set(nn.Module, "__call__", self._calling(nn.Module.__call__))

    def _importing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        hooks = self

        def get_code(self: SourceFileLoader, fullname: str) -> Any:
            changed = hooks.code_of(self.path) if self.path else None
            return changed if changed is not None else original(self, fullname)

        return get_code

    def _calling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        hooks = self
        is_compiling = torch.compiler.is_dynamo_compiling  # dynamo folds it, so that no guard looks at our own state

        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or hooks._is_inside or get_ident() != hooks._thread_id:
                return original(self, *args, **kwargs)
            if id(self) not in hooks._met:
                if next(self.parameters(), None) is None:
                    return original(self, *args, **kwargs)
                hooks._meet(self)
            return call_through([hooks], self, partial(original, self), args, kwargs, inside=hooks._inside)

        return __call__

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    def _meet(self, module: nn.Module) -> None:
        self._met[id(module)] = module
        for change in self._first_calls:
            undo = change(module)
            if undo is not None:
                self._undo.append(undo)


def call_through(
    levers: Sequence[CallHooks],
    module: nn.Module,
    call: Callable[..., Any],
    args: Any,
    kwargs: Any,
    *,
    inside: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Any:
    """Call a module through the changes of inputs, the contexts (`inside` around them), what computes the call in its place, and
    the changes of outputs of levers.
    """
    for change in chain.from_iterable(hooks.inputs for hooks in levers):
        args, kwargs = change(module, (args, kwargs))
    with inside(), ExitStack() as stack:
        for around in chain.from_iterable(hooks.contexts for hooks in levers):
            context = around(module)
            if context is not None:
                stack.enter_context(context)
        for replacement in chain.from_iterable(hooks.calls for hooks in levers):
            call = partial(_replaced, replacement, module, call)
        output = call(*args, **kwargs)
    for change in chain.from_iterable(hooks.outputs for hooks in levers):
        output = change(module, output)
    return output


def _replaced(
    replacement: Callable[..., Any], module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return replacement(module, original, args, kwargs)


def _observed_constructor(kind: type, changes: Iterable[ConstructorChange]) -> Callable[..., None]:
    """A constructor whose arguments go, by name, through the changes first."""
    from inspect import signature

    original: Callable[..., None] = vars(kind)["__init__"]
    names = signature(original)
    changes = tuple(changes)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = names.bind(self, *args, **kwargs)
        arguments = dict(bound.arguments)
        me = arguments.pop(next(iter(names.parameters)))
        for change in changes:
            change(type(self), arguments)
        original(me, **_flat(arguments, names.parameters))

    return __init__


def _flat(arguments: dict[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, with those that went to `**kwargs` at the top."""
    flat: dict[str, Any] = {}
    for name, value in arguments.items():
        known = parameters.get(name)
        if known is not None and known.kind is known.VAR_KEYWORD:
            flat.update(value)
        else:
            flat[name] = value
    return flat


def user_class_name(module: nn.Module) -> str:
    """Name of the class of the user's module, under any wrapper such as DistributedDataParallel."""
    return type(wrapped(module)).__name__
