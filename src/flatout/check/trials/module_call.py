"""Calls of a copy of a captured root module."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flatout.check.observe.calls import Captured, RootModule
from flatout.check.trials.context import Refused
from flatout.core.tensors.nests import tensors_in


def module_and_inputs(root: RootModule) -> tuple[nn.Module, Captured]:
    """The user's module and its captured inputs.

    Raises Refused when one of them is gone.
    """
    module, captured = root.alive, root.captured
    if module is None or captured is None:
        raise Refused("the module or its inputs could not be captured")
    return module, captured


def copied_module(module: nn.Module) -> nn.Module:
    """A deep copy of the user's module: trials never run its own.

    Raises Refused when it cannot be copied.
    """
    try:
        return copy.deepcopy(module)
    except (RuntimeError, TypeError, NotImplementedError) as e:
        raise Refused(f"the module cannot be copied ({e})") from e


def call_of(module: nn.Module, captured: Captured, args: Any, kwargs: Any, *, backward: bool) -> Callable[[], object]:
    """A function that calls the module as captured, with a backward if asked for; it has run once.

    Raises Refused when the module does not take these inputs.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]

    def forward() -> Any:
        with contextlib.ExitStack() as stack:
            for device, dtype in captured.autocast.items():
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
        raise Refused(f"the module does not take these inputs ({type(e).__name__}: {str(e)[:80]})") from e
    return call


def _scalar(output: Any) -> Tensor:
    sums = [t.float().sum() for t in tensors_in(output) if t.requires_grad and t.is_floating_point()]
    if not sums:
        raise Refused("the module's output has no gradient")
    return sum(sums[1:], sums[0])
