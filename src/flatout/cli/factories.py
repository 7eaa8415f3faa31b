"""`module:function` on the command line: the function of the user's own that it names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from flatout.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

_GIVES: Final = (
    "(module, example_inputs), (module, example_inputs, state), or a module that has an attribute example_inputs"
)


class GivenModel(NamedTuple):
    """What the factory returned."""

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


def given_model(name: str) -> GivenModel:
    """Call the factory. Raises UsageError for what it should not return."""
    from torch import nn

    made = named_function(name, gives=_GIVES)()
    if isinstance(made, nn.Module):
        if not hasattr(made, "example_inputs"):
            raise UsageError(f"'{name}' returned a {type(made).__name__} without example_inputs; return {_GIVES}")
        made = (made, made.example_inputs)
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise UsageError(f"'{name}' returned a {_told(made)}; return {_GIVES}")
    module, examples, state = made if len(made) == 3 else (*made, ())
    if not isinstance(examples, (tuple, list)):
        examples = (examples,)
    names = (state,) if isinstance(state, str) else tuple(state)
    if not all(isinstance(one, str) for one in names):
        raise UsageError(f"'{name}' returned the state {names}; give names of forward's parameters")
    return GivenModel(module, tuple(examples), names)


def _told(made: object) -> str:
    kind = type(made).__name__
    return (
        f"{kind} of {len(made)} ({', '.join(type(one).__name__ for one in made)})" if isinstance(made, tuple) else kind
    )
