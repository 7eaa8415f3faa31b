"""The plain form of `flatout run`, which begins at once: no other verb is imported and no help is made for it."""

from __future__ import annotations

import os
from collections.abc import Sequence


def planned_words(words: Sequence[str]) -> list[str] | None:
    """What the process of `run --plan PLAN [-m MODULE | SCRIPT.py] [-- ARGS...]` gets; None for any other command line.

    Any other is parsed in full, and so are those that name no files: there the errors are.
    """
    verb, *rest = words or ("",)
    plan = module = ""
    while not module and rest and rest[0].startswith("-") and rest[0] != "--":
        option, *more = rest
        if option.startswith("--plan="):
            plan, rest = option.removeprefix("--plan="), more
        elif option in ("--plan", "-m") and more:
            plan, module = (more[0], module) if option == "--plan" else (plan, more[0])
            rest = more[1:]
        else:
            return None
    if verb != "run" or not os.path.isfile(plan):
        return None
    target = [module] if module else rest[:1]
    rest = rest if module else rest[1:]
    is_known = bool(module) or bool(target and target[0].endswith(".py") and os.path.isfile(target[0]))
    if not is_known or rest[:1] not in ([], ["--"]) or _has_defaults():
        return None
    return [os.path.abspath(plan), "module" if module else "script", *target, *rest[1:]]


def _has_defaults() -> bool:
    """Whether a pyproject.toml sets options, or is to be complained of."""
    from pathlib import Path

    from flatout.app.cli.project_table import project_table
    from flatout.core.errors import UsageError

    try:
        return project_table(Path.cwd())[0] is not None
    except UsageError:
        return True
