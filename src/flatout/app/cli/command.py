"""A verb of the command line: each is one module here, `<verb>.py`, with the constant COMMAND."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import typer


class Command(NamedTuple):
    """One verb, named after its module, which is imported for `flatout --help`: import rich, torch and records in functions."""

    run: Callable[..., None] | typer.Typer
    """A function with Typer's options, whose docstring is the help; or an application with verbs of its own."""
    order: int
    """Its place in `flatout --help`, smallest first; those that are there leave room between them."""
    takes_script: bool = False
    """Whether options that the verb does not know are arguments of the user's script."""
