"""Calls of one module inside a root module, answered by something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from flatout.core.records.lever import Hooks

if TYPE_CHECKING:
    from torch import nn

Answer = Callable[[Callable[..., Any], "nn.Module", tuple[Any, ...], dict[str, Any]], Any]
"""Called with the class's forward, the module and its arguments: returns what the call returns."""


def answer_calls(hooks: Hooks, name: str, make: Callable[[nn.Module], Answer]) -> None:
    """Have calls of the module `name`, the root module's class and the path inside it, go to what `make` makes of the module.

    Calls that dynamo traces go to the module itself.
    """
    import torch

    root, _, path = name.partition(".")
    root = root.partition(" (")[0]
    known: WeakKeyDictionary[nn.Module, Answer] = WeakKeyDictionary()
    changed: set[type] = set()
    is_compiling = torch.compiler.is_dynamo_compiling

    def answering(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            answer = known.get(self) if not is_compiling() else None
            return original(self, *args, **kwargs) if answer is None else answer(original, self, args, kwargs)

        return forward

    def meet(module: nn.Module) -> Callable[[], None] | None:
        if type(module).__name__ != root:
            return None
        try:
            inner = module.get_submodule(path)
        except AttributeError:
            return None
        if inner in known:
            return None
        known[inner] = make(inner)
        if type(inner) not in changed:
            changed.add(type(inner))
            hooks.replace(type(inner), "forward", answering(type(inner).forward))

        def forget() -> None:
            known.pop(inner, None)

        return forget

    hooks.at_first_call(meet)
