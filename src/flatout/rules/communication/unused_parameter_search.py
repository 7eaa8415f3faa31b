"""DistributedDataParallel looks for unused parameters in every step, and all are used.

Costs        A walk over the autograd graph after each forward, and one more small collective.
Evidence     find_unused_parameters=True, no unused parameter in any step, and the time of the search, measured.
Levers       communication.no-unused-search
False alarm  A model that leaves a branch out in some steps that were not seen: without the search such a step raises an error.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.records.distributed import Replication
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding, Note, Rule


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding per module that searches in vain."""
    for module in _searching(evidence):
        yield Finding(
            rule=RULE.id,
            regime="communication",
            where=evidence.source_of(module.source),
            cost_s=module.search_s,
            saved_s=(0.9 * module.search_s, module.search_s),
            because=f"the search takes {module.search_s * 1e3:.2f} ms a step and found every parameter in use",
            edit=_EDIT,
            levers=RULE.levers,
            basis="timed",
        )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note where the search is in vain but cheap."""
    for module in _searching(evidence):
        yield Note(
            rule=RULE.id,
            where=evidence.source_of(module.source),
            text=f"find_unused_parameters=True found none; the search takes {module.search_s * 1e3:.2f} ms a step: {_EDIT}",
        )


def _searching(evidence: Evidence) -> Iterator[Replication]:
    for module in evidence.distributed.replications if evidence.distributed is not None else ():
        if module.find_unused_parameters and module.has_unused_parameters is False and not module.static_graph:
            yield module


_EDIT = "leave find_unused_parameters out (or static_graph=True when the graph never changes)"

RULE = Rule(
    id="communication.unused-parameter-search",
    title="A search for unused parameters finds none",
    module=__name__,
    check=check,
    note=note,
    levers=("communication.no-unused-search",),
)
