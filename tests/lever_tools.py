"""What tests of levers share: a lever pulled around a piece of code, and what it says to a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import dedent
from typing import Any

from flatout.core.records.finding import Finding
from flatout.core.records.lever import Lever, Parameter, PlannedLever
from flatout.core.records.plan import Plan
from flatout.tune.apply import applied
from flatout.tune.script_hooks import ScriptHooks


@contextmanager
def pulled(lever: Lever, **parameters: Parameter) -> Iterator[ScriptHooks]:
    """The lever alone, for the time of the context."""
    with applied(Plan(lever=(PlannedLever(id=lever.id, guarantee=lever.guarantee, parameters=parameters),))) as hooks:
        yield hooks


def found(saved_s: float) -> Finding:
    """A finding that names the lever as its cure."""
    return Finding(
        rule="a.rule",
        regime="overhead",
        where=None,
        cost_s=saved_s,
        saved_s=(0.5 * saved_s, saved_s),
        because="it is slow",
        edit="make it fast",
    )


def ran(text: str, **names: object) -> dict[str, Any]:
    """What a text leaves behind when it runs, with these names given."""
    left: dict[str, Any] = {"__name__": "__main__", **names}
    exec(compile(dedent(text), "train.py", "exec", dont_inherit=True), left)
    return left


def edited(lever: Lever, text: str, **parameters: Parameter) -> str:
    """The text after the lever's edit."""
    assert lever.edit is not None
    return lever.edit(dedent(text), parameters)
