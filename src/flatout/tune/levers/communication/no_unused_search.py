"""Replicas do not look for unused parameters in every step.

What        `find_unused_parameters` is left out where a DistributedDataParallel module is made.
Guarantee   EXACT where all parameters are used in every step; a step that leaves some out raises an error in torch.
Refuses     Modules with unused parameters in a step that was seen; those that do not search.
"""

from __future__ import annotations

from typing import Any

from flatout.core.errors import EditError
from flatout.core.parts import lever
from flatout.core.records.lever import Hooks, Parameters
from flatout.tune.levers.proposals import as_found
from flatout.tune.rewrite.calls import DDP, DDP_ORDER, argument, call_in, with_keywords


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Construct DistributedDataParallel without the search for unused parameters."""
    from torch.nn.parallel import DistributedDataParallel

    def replicate(kind: type, arguments: dict[str, Any]) -> None:
        if arguments.pop("find_unused_parameters", False):
            hooks.note(LEVER.id)

    hooks.at_construction(DistributedDataParallel, replicate)


def edit(text: str, parameters: Parameters) -> str:
    """Take the keyword `find_unused_parameters` out of the call."""
    module, call = call_in(text, parameters, DDP)
    if argument(call, "find_unused_parameters") is None:
        raise EditError("the call has no find_unused_parameters")
    return with_keywords(module, call, {"find_unused_parameters": None}, DDP_ORDER).code


LEVER = lever(
    __name__,
    as_found("no replicated module looks for unused parameters in vain", edit=edit),
    apply=apply,
    edit=edit,
    title="No search for unused parameters",
)
