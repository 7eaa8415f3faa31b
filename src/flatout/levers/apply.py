"""A plan's levers pulled in this process, for the time of a context."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from flatout.errors import PlanError
from flatout.levers.seams import ScriptSeams
from flatout.levers.syntax.source import pull
from flatout.records.plan import Circumstances, Plan
from flatout.registry import lever_of


@contextmanager
def applied(plan: Plan, *, root: str = "", look_at: Callable[[nn.Module], None] | None = None) -> Iterator[ScriptSeams]:
    """All levers of the plan put into the seams of what runs inside; undone at the end, last first.

    `root` is the script's folder; `look_at` is given each root module at its first call, before a lever is.
    A lever without an `apply` is its edit, made to the text when it is compiled. Raises PlanError
    when a lever is not known, or one of its parameters is missing or wrong.
    """
    seams = ScriptSeams(root)
    if look_at is not None:
        seams.at_first_call(look_at)
    for planned in plan.lever:
        lever = lever_of(planned.id)
        if lever.apply is not None:
            lever.apply(seams, planned.parameters)
        elif lever.edit is not None:
            pull(lever.id, seams, planned.parameters, lever.edit)
        else:
            raise PlanError(f"lever '{lever.id}' makes a model cheaper, not a script; `flatout shrink` pulls it")
    try:
        seams.install()
        yield seams
    finally:
        seams.remove()


def circumstances(*, world_size: int = 1) -> Circumstances:
    """Where this process runs, as a plan tells where it was proved."""
    is_device = torch.cuda.is_available()
    return Circumstances(
        device=torch.cuda.get_device_name() if is_device else "cpu",
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        torch=str(torch.__version__),
        python=platform.python_version(),
        world_size=world_size,
    )
