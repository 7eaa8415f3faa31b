"""Applies the levers of a plan in this process, for the time of a context."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from flatout.core.errors import PlanError
from flatout.core.records.plan import Circumstances, Plan
from flatout.core.registry import lever_of
from flatout.core.runtime.cores import usable_cores
from flatout.tune.script_hooks import ScriptHooks


@contextmanager
def applied(
    plan: Plan,
    *,
    root: str = "",
    look_at: Callable[[nn.Module], None] | None = None,
    texts: Mapping[str, str] | None = None,
) -> Iterator[ScriptHooks]:
    """Register all levers of the plan with the hooks of what runs inside; at the end undo them, last first.

    `root` is the script's folder; `look_at` is called with each root module at its first call, before any lever. `texts` take the
    place of those of files, by path.
    A lever without an `apply` is its edit, made to the text when it is compiled. Raises PlanError
    when a lever is not known, or one of its parameters is missing or wrong.
    """
    hooks = ScriptHooks(root)
    if look_at is not None:
        hooks.at_first_call(look_at)
    for planned in plan.lever:
        lever = lever_of(planned.id)
        if lever.apply is not None:
            lever.apply(hooks, planned.parameters)
        elif lever.edit is not None:
            from flatout.tune.rewrite.source import changed_places, pull  # libcst, which a plan without texts needs not

            for parameters in changed_places(planned.parameters):
                pull(lever.id, hooks, parameters, lever.edit)
        else:
            raise PlanError(f"lever '{lever.id}' has neither an `apply` nor an `edit`; take it out of the plan")
    for file, text in (texts or {}).items():
        hooks.at_source(file, partial(_text_of, text))
    try:
        hooks.install()
        yield hooks
    finally:
        hooks.remove()


def _text_of(text: str, before: str) -> str:
    """The text that takes the place of the one before."""
    return text


def circumstances(*, world_size: int = 1) -> Circumstances:
    """Hardware and versions of this process, to compare with those that a plan was proved on."""
    is_device = torch.cuda.is_available()
    return Circumstances(
        device=torch.cuda.get_device_name() if is_device else "cpu",
        num_cores=usable_cores(),
        torch=str(torch.__version__),
        python=platform.python_version(),
        world_size=world_size,
    )
