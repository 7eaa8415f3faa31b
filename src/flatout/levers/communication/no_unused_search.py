"""Replicas do not look for unused parameters in every step.

What        `find_unused_parameters` is left out where a DistributedDataParallel module is made.
Guarantee   EXACT where all parameters are used in every step; a step that leaves some out raises an error in torch.
Refuses     Modules with unused parameters in a step that was seen; those that do not search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from flatout.errors import EditError
from flatout.levers.offers import as_found
from flatout.levers.syntax.calls import DDP, DDP_ORDER, argument, call_in, with_keywords
from flatout.levers.syntax.source import place_of, text_at
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """Where the rule found a search in vain."""
    where = findings[0].where if findings else None
    place: Parameters = {}
    try:
        if where is not None:
            place = place_of(evidence, where)
            edit(text_at(evidence, place), place)
    except EditError:
        place = {}
    yield from as_found(
        LEVER.id, findings, else_because="no replicated module looks for unused parameters in vain", parameters=place
    )


def apply(seams: Seams, parameters: Parameters) -> None:
    """Have modules replicated without the search."""
    from torch.nn.parallel import DistributedDataParallel

    def replicate(kind: type, given: dict[str, Any]) -> None:
        if given.pop("find_unused_parameters", False):
            seams.note(LEVER.id)

    seams.at_making(DistributedDataParallel, replicate)


def edit(text: str, parameters: Parameters) -> str:
    """The keyword goes."""
    module, call = call_in(text, parameters, DDP)
    if argument(call, "find_unused_parameters") is None:
        raise EditError("the call has no find_unused_parameters")
    return with_keywords(module, call, {"find_unused_parameters": None}, DDP_ORDER).code


LEVER = Lever(
    id="communication.no-unused-search",
    title="No search for unused parameters",
    guarantee="exact",
    module=__name__,
    propose=propose,
    apply=apply,
    edit=edit,
)
