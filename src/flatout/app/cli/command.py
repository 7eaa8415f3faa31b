"""A verb of the command line: each is one module here, `<verb>.py`, with the constant COMMAND."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    import typer


Group = Literal["find", "fix", "prove", "blocks", "devices", "records"]
GROUPS: Final[dict[Group, str]] = {
    "find": "Find what is slow",
    "fix": "Fix it",
    "prove": "Prove and reproduce",
    "blocks": "Build smaller and faster models",
    "devices": "Many devices",
    "records": "Records",
}
"""The headings of `flatout --help`, in its order."""


def help_epilog(*examples: str) -> str:
    """What stands at the end of a verb's help: calls of it, each on a line of its own."""
    return "\n\n".join(("Examples:", *examples))


class Command(NamedTuple):
    """One verb, named after its module, which is imported for `flatout --help`: import rich, torch and records in functions."""

    run: Callable[..., None] | typer.Typer
    """A function with Typer's options, whose docstring is the help; or an application with verbs of its own."""
    order: int
    """Its place under its heading, smallest first; those that are there leave room between them."""
    group: Group
    """The heading in `flatout --help` under which it stands."""
    examples: tuple[str, ...]
    """Calls of it, at the end of its help."""
    takes_script: bool = False
    """Whether it runs a script of the user's: all that follows its last argument is the script's own, as with python."""
