"""DistributedDataParallel that adds up in the same order from its first step on.

It begins with one bucket of all gradients and makes others after its first step. A ring adds up a number in an order that depends
on where it lies in its bucket, so that a step after a restart, taken as a first one, ends in other last bits than the same step
of a run that was not stopped (from three ranks on). Here the buckets are made at once, and for good.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def settle(model: nn.Module) -> bool:
    """Give the model its final buckets now; whether there was anything to settle. All ranks call it together.

    They are filled from the last parameter to the first, about the order in which gradients come. Models that look for unused
    parameters keep their first buckets anyhow; those with a static graph are left as they are. Uses the functions by which
    torch's own `__setstate__` makes a reducer (torch 2.11 to 2.13).
    """
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, nn.parallel.DistributedDataParallel):
        return False
    ddp: Any = inner
    if ddp.find_unused_parameters or ddp.static_graph:
        return False
    parameters, expect_sparse = ddp._build_params_for_reducer()
    parameters, expect_sparse = list(reversed(parameters)), list(reversed(expect_sparse))
    ddp._ddp_init_helper(parameters, expect_sparse, ddp._build_debug_param_to_name_mapping(parameters), False)
    hooks, ddp._comm_hooks = ddp._comm_hooks, []
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)
    ddp.reducer._push_all_rebuilt_params()
    ddp.reducer._rebuild_buckets()
    return True
