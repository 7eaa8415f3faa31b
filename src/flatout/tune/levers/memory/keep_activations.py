"""Activations are kept for the backward instead of computed again, where the memory holds them.

What        Calls of `torch.utils.checkpoint.checkpoint` call their function directly. Batch norms below them that have a momentum
            update their running statistics as far as both of their forwards did, in one.
Guarantee   BOUNDED: the same operators on the same numbers. The momentum of those batch norms is rounded.
Refuses     Runs that recompute nothing, or whose memory would be short without it.
Costs       Memory: what is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError
from flatout.core.parts import lever
from flatout.core.records.lever import Hooks, Parameters
from flatout.tune.levers.proposals import as_found
from flatout.tune.rewrite.calls import calls_to, keyword_argument, with_calls
from flatout.tune.rewrite.source import parsed

if TYPE_CHECKING:
    from torch import Tensor, nn

_NAME: Final = "torch.utils.checkpoint.checkpoint"
_OPTIONS: Final = (
    "use_reentrant",
    "context_fn",
    "determinism_check",
    "debug",
    "early_stop",
    "preserve_rng_state",
)
"""Keyword arguments of `checkpoint` that are not its function's (signature in torch 2.11 to 2.13)."""


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Call functions directly, from the script's first line on."""
    hooks.at_start(lambda: _keep(lambda: hooks.note(LEVER.id)))


def _keep(note: Callable[[], None]) -> Callable[[], None]:
    """Patch `checkpoint` and the forward of batch norms; returns how to undo both."""
    import torch
    import torch.utils.checkpoint
    from torch.nn.modules.batchnorm import _BatchNorm

    from flatout.core.runtime.patches import Patches

    depth = 0
    forward_once = _BatchNorm.forward

    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        is_reentrant = options.get("use_reentrant") is not False
        is_recomputed = torch.is_grad_enabled()
        if is_reentrant:  # gradients go through it where one of its inputs has one, and else not at all
            is_recomputed &= any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        contexts = options["context_fn"]() if "context_fn" in options else None
        note()
        depth += is_recomputed
        try:
            with torch.set_grad_enabled(is_recomputed):
                if contexts is None:
                    return function(*args, **kwargs)
                with contexts[0]:
                    return function(*args, **kwargs)
        finally:
            depth -= is_recomputed

    def forward(self: nn.modules.batchnorm._BatchNorm, input: Tensor) -> Tensor:
        is_counted = self.training and self.running_mean is not None and self.momentum is not None
        if not depth or not is_counted or not torch.is_grad_enabled():
            return forward_once(self, input)
        momentum = self.momentum
        assert momentum is not None
        self.momentum = 1 - (1 - momentum) ** 2
        try:
            output = forward_once(self, input)
        finally:
            self.momentum = momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return output

    patches = Patches()
    patches.set(torch.utils.checkpoint, "checkpoint", checkpoint)
    patches.set(_BatchNorm, "forward", forward)
    return patches.undo


def edit(text: str, parameters: Parameters) -> str:
    """Write `f(x)` for each `checkpoint(f, x, use_reentrant=...)`."""
    module = parsed(text)
    calls = calls_to(module, (_NAME,))
    if not calls:
        raise EditError(f"the file does not call {_NAME}")
    if "BatchNorm" in text or "SyncBatchNorm" in text:
        raise EditError("batch norms below it would count each batch once, and do so twice")
    if any(keyword_argument(call, "context_fn") is not None or _is_starred(call) for call in calls):
        raise EditError("a call has a context_fn, or arguments that are not written out")
    return with_calls(module, calls, _direct).code


def _is_starred(call: cst.Call) -> bool:
    return not call.args or call.args[0].star != "" or any(a.star == "**" for a in call.args)


def _direct(call: cst.Call) -> cst.Call:
    """The function of the call, called with the rest of its arguments."""
    function, *rest = call.args
    left = [a for a in rest if a.keyword is None or a.keyword.value not in _OPTIONS]
    if left:
        left[-1] = left[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    inner = function.value
    if not m.matches(inner, m.Name() | m.Attribute() | m.Call() | m.Subscript()):
        inner = inner.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return call.with_changes(func=inner, args=left)


LEVER = lever(
    __name__,
    as_found("nothing is computed again that the memory would hold", edit=edit),
    apply=apply,
    edit=edit,
    title="Activations kept",
)
