"""Options as earlier versions called them: they still work, with a note of their present names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

FORMER_OPTIONS: Final[dict[str, dict[str, str]]] = {
    "tune": {
        "--budget": "--time-budget",
        "--md": "--markdown",
        "--memory": "--memory-limit",
        "--allowed-loss": "--accuracy-loss",
    },
    "shrink": {"--budget": "--accuracy-loss", "--time": "--time-budget"},
    "survive": {"--nnodes": "--nodes", "--memory": "--memory-folder"},
}
"""For each verb, former names of options and their present ones."""


def with_present_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments with present names of options, and the notes to print; what stands behind `--` is the script's own.

    >>> with_present_options(["tune", "--budget=5m", "train.py", "--", "--budget", "3"])
    (['tune', '--time-budget=5m', 'train.py', '--', '--budget', '3'], ['note: --budget is called --time-budget now'])
    """
    present = FORMER_OPTIONS.get(arguments[0], {}) if arguments else {}
    end = arguments.index("--") if "--" in arguments else len(arguments)
    changed, notes = [], []
    for argument in arguments[:end]:
        name, equals, value = argument.partition("=")
        if name in present:
            notes.append(f"note: {name} is called {present[name]} now")
        changed.append(f"{present.get(name, name)}{equals}{value}")
    return [*changed, *arguments[end:]], notes
