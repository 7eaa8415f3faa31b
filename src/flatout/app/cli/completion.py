"""`flatout completion`: a script for the shell that completes verbs, options, names and files."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from flatout.app.cli.command import Command


def completion(
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="The shell that the script is for.")],
) -> None:
    """Print a script that completes verbs, options, names of rules and levers, and files; a TAB then starts no Python.

    bash: `source <(flatout completion bash)` in ~/.bashrc. zsh: `source <(flatout completion zsh)` in ~/.zshrc, after compinit.
    fish: `flatout completion fish > ~/.config/fish/completions/flatout.fish`. Print it anew after an update.
    """
    from flatout.app.cli.app import commands
    from flatout.app.cli.completion_scripts import SHELLS, completed_verbs
    from flatout.app.option_values import one_of

    render = SHELLS[one_of(tuple(SHELLS), shell, name="the shell")]
    sys.stdout.write(render(completed_verbs(dict(commands()))))


COMMAND = Command(
    completion,
    order=230,
    group="records",
    examples=("flatout completion bash", "flatout completion fish > ~/.config/fish/completions/flatout.fish"),
)
