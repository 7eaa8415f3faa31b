"""DistributedDataParallel looks for unused parameters in every step, and all are used.

Costs        A walk over the autograd graph after each forward, and one more small collective.
Evidence     find_unused_parameters=True, no unused parameter in any step, and the time of the search, measured.
Levers       communication.no-unused-search
False alarm  A model that leaves a branch out in some steps that were not seen: without the search such a step raises an error.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.distributed import Replication
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding, Note


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding per module that searches in vain."""
    for module in _searching(evidence):
        yield Finding(
            where=evidence.source_of(module.source),
            cost_s=module.search_s,
            saved_s=(0.9 * module.search_s, module.search_s),
            because=f"the search takes {module.search_s * 1e3:.2f} ms a step and found every parameter in use",
            edit=_EDIT,
            basis="timed",
        )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note where the search is in vain but cheap."""
    for module in _searching(evidence):
        yield Note(
            where=evidence.source_of(module.source),
            text=f"find_unused_parameters=True found none; the search takes {module.search_s * 1e3:.2f} ms a step: {_EDIT}",
        )


def _searching(evidence: Evidence) -> Iterator[Replication]:
    for module in evidence.distributed.replications if evidence.distributed is not None else ():
        if module.find_unused_parameters and module.has_unused_parameters is False and not module.static_graph:
            yield module


_EDIT = "leave find_unused_parameters out (or static_graph=True when the graph never changes)"

RULE = rule(__name__, check, note=note, title="A search for unused parameters finds none")
