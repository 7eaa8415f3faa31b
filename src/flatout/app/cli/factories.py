"""`module:function` on the command line: the function of the user's own that it names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from flatout.core.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

_GIVES: Final = (
    "(module, example_inputs), (module, example_inputs, state), or a module that has an attribute example_inputs"
)


class NamedModel(NamedTuple):
    """A model that a factory of the user's returned, with example inputs and the names of its carried state."""

    module: nn.Module
    example_inputs: tuple[Any, ...]
    state: tuple[str, ...]


def named_function(name: str, *, gives: str) -> Callable[..., Any]:
    """The function; the current folder is looked into first, as under `python -m`. `gives` says what it is to return.

    Raises UsageError for a name that is not module:function, a module that cannot be imported, and a function that is not there.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise UsageError(f"'{name}' is not module:function; the function returns {gives}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(import_module(module), function)
    except (ImportError, AttributeError) as e:
        raise UsageError(f"'{name}': {e}") from e
    finally:
        sys.path.remove(str(Path.cwd()))
    if not callable(found):
        raise UsageError(f"'{name}' is of type {type(found).__name__}; name a function that returns {gives}")
    return found  # type: ignore[no-any-return]


def named_model(name: str) -> NamedModel:
    """Call the factory. Raises UsageError for what it should not return."""
    from torch import nn

    built = named_function(name, gives=_GIVES)()
    if isinstance(built, nn.Module):
        if not hasattr(built, "example_inputs"):
            raise UsageError(f"'{name}' returned a {type(built).__name__} without example_inputs; return {_GIVES}")
        built = (built, built.example_inputs)
    if not isinstance(built, tuple) or len(built) not in (2, 3) or not isinstance(built[0], nn.Module):
        raise UsageError(f"'{name}' returned a {_type_of(built)}; return {_GIVES}")
    module, examples, state = built if len(built) == 3 else (*built, ())
    if not isinstance(examples, (tuple, list)):
        examples = (examples,)
    names = (state,) if isinstance(state, str) else tuple(state)
    if not all(isinstance(one, str) for one in names):
        raise UsageError(f"'{name}' returned the state {names}; give names of forward's parameters")
    return NamedModel(module, tuple(examples), names)


def _type_of(built: object) -> str:
    kind = type(built).__name__
    return (
        f"{kind} of {len(built)} ({', '.join(type(one).__name__ for one in built)})"
        if isinstance(built, tuple)
        else kind
    )
