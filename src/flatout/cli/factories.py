"""`module:function` on the command line: the function of the user's own that it names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from flatout.errors import UsageError


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
