"""A change of the graphs that torch.compile makes of a model, before they are differentiated, and what reads such graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from flatout.core.runtime.patches import set_attributes


def change_graphs(change: Callable[[Graph], object], *files: str) -> Callable[[], None]:
    """Have `change` called with each graph that Inductor compiles from now on, behind a pass that was there before.

    Args:
        change: Changes a graph of torch's own functions in place.
        files: Those of the code that does it: by their text Inductor tells graphs in its cache apart.

    Returns:
        The undo.
    """
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    before: Any = config.pre_grad_custom_pass

    class Changed(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            if before is not None:
                before(graph)
            change(graph)

        def uuid(self) -> Any | None:
            other = None if before is None else getattr(before, "uuid", lambda: None)()
            return None if before is not None and other is None else (get_hash_for_files((__file__, *files)), other)

        def __reduce__(self) -> tuple[Any, ...]:
            return str, (repr(self.uuid() or id(before)),)  # torch 2.11 pickles it for the key of its cache

        def __deepcopy__(self, memo: dict[int, Any]) -> Changed:
            return self

    return set_attributes(config, pre_grad_custom_pass=Changed())


def called_name(node: Node) -> str:
    """The function or method that a node calls, by name; '[]' where it indexes."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    name = getattr(node.target, "__name__", "")
    return "[]" if name == "getitem" else name


def first_argument(node: Node) -> Node | None:
    """Its first argument, where that is a node."""
    found = node.args[0] if node.args else node.kwargs.get("input")
    return found if isinstance(found, Node) else None


def fake_result(node: Node) -> Tensor | None:
    """What it returns, without numbers."""
    found = node.meta.get("example_value")
    return found if isinstance(found, Tensor) else None


def changes_first(call: Node) -> bool:
    """Whether a call changes its first argument in place, by its name."""
    name = called_name(call)
    return name == "setitem" or (name.endswith("_") and not name.endswith("__"))
