"""Calls of a copy of a captured root module."""

from __future__ import annotations

import contextlib
import copy
import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from flatout.check.observe.calls import Captured, RootModule
from flatout.check.trials.context import Refused
from flatout.core.records.workload import short_place
from flatout.core.runtime.live_cells import file_of_cell
from flatout.core.tensors.nests import tensors_in

_NOT_THEIRS: Final = tuple(str(folder) + os.sep for folder in (Path(torch.__file__).parent, Path(__file__).parents[2]))


def module_and_inputs(root: RootModule) -> tuple[nn.Module, Captured]:
    """The user's module and its captured inputs.

    Raises Refused when one of them is gone.
    """
    module, captured = root.alive, root.captured
    if module is None or captured is None:
        raise Refused("the module or its inputs could not be captured")
    return module, captured


_WITH_BACKWARD: Final = 3.0
"""Forward and backward together take so many times the forward: a backward computes two products for each of its."""


def usual_call_s(root: RootModule, *, backward: bool) -> float:
    """What a call of the module took in the script, with a backward as long as backwards usually are."""
    return root.call_s * (_WITH_BACKWARD if backward else 1.0)


def copied_module(module: nn.Module) -> nn.Module:
    """A deep copy of the user's module: trials never run its own.

    Results that it has stored (a weight that weight_norm computed, the last loss, the actions of an episode) are copied without
    their graphs, which torch does not copy.

    Raises Refused when it cannot be copied.
    """
    stored = tensors_in([vars(inner) for inner in module.modules()])
    without_graph = {id(t): t.detach().clone() for t in stored if not t.is_leaf}
    try:
        return copy.deepcopy(module, without_graph)
    except (RuntimeError, TypeError, NotImplementedError) as e:
        raise Refused(f"the module cannot be copied ({e})") from e


def call_of(
    module: nn.Module,
    captured: Captured,
    args: Any,
    kwargs: Any,
    *,
    backward: bool,
    autocast: Mapping[str, torch.dtype] | None = None,
) -> Callable[[], object]:
    """A function that calls the module as captured, with a backward if asked for; it has run once.

    Autocast, to these dtypes by device or else as captured, is entered anew for each forward, so that weights are cast in each.
    The backward starts at the module's own loss, where it returns one number, else at the sum of its outputs.

    Raises Refused when the module does not take these inputs.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    regions = captured.autocast if autocast is None else autocast

    def forward() -> Any:
        with contextlib.ExitStack() as stack:
            for device, dtype in regions.items():
                stack.enter_context(torch.autocast(device, dtype=dtype))
            if not backward and not captured.grad_enabled:
                stack.enter_context(torch.no_grad())
            return module(*args, **kwargs)

    def both() -> object:
        for parameter in parameters:
            parameter.grad = None
        loss = _scalar(forward())
        loss.backward()
        return loss

    call = both if backward else forward
    try:
        call()
    except Exception as e:  # the user's own module may raise anything on a variant of its inputs
        at = raising_line(e)
        hint = "; .reshape there would take them" if at and ".view(" in at else ""
        where = f" at {at}" if at else ""
        raise Refused(f"the module does not take these inputs ({type(e).__name__}: {str(e)[:80]}){where}{hint}") from e
    return call


def raising_line(error: BaseException) -> str:
    """The innermost line outside torch and this project that raised, 'model.py:12 x.view(n, -1)'; '' where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith(_NOT_THEIRS) and not f.filename.startswith("<")]
    if not theirs:
        return ""
    last = theirs[-1]
    return f"{short_place(file_of_cell(last.filename) or last.filename, last.lineno or 0)} {last.line}"


def _scalar(output: Any) -> Tensor:
    tensors = [t for t in tensors_in(output) if t.requires_grad and t.is_floating_point()]
    if not tensors:
        raise Refused("the module's output has no gradient")
    losses = [t for t in tensors if t.numel() == 1]
    sums = [t.float().sum() for t in losses or tensors]
    return sum(sums[1:], sums[0])
