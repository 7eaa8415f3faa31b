"""Gradients of replicas are reduced in buckets of a size that suits, without a copy into them and out.

What        `bucket_cap_mb`, `gradient_as_bucket_view=True` and, where no parameter is ever left out, `static_graph=True` where a
            DistributedDataParallel module is made.
Guarantee   BOUNDED: another bucket is another order of the same sum over ranks.
Refuses     Runs of one process; modules with unused parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from flatout.errors import EditError
from flatout.levers.syntax.calls import DDP, DDP_ORDER, call_in, with_keywords
from flatout.levers.syntax.source import place_of, text_at
from flatout.records.distributed import Replication
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams, integer

_FEWEST_BUCKETS = 4
_USUAL_CAP_MB = 25
"""The default of torch 2.11 to 2.13."""
_LARGE_CAP_MB = 100
_OPTIONS = ("gradient_as_bucket_view", "static_graph")


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """Larger buckets where there are many small ones; views; a static graph where nothing changes."""
    distributed = evidence.distributed
    modules = distributed.replications if distributed is not None else ()
    able = [r for r in modules if not r.has_unused_parameters]
    if not able:
        why = "a replicated module has unused parameters" if modules else "no module is replicated over processes"
        yield Refusal(lever=LEVER.id, because=why)
        return
    module = max(able, key=lambda r: sum(r.bucket_bytes))
    for parameters in _ways(module):
        yield Candidate(
            lever=LEVER.id,
            parameters=_place(evidence, module) | parameters,
            saved_s=(0.0, _most_s(evidence, module, parameters)),
            saved_bytes=sum(module.bucket_bytes) if not module.gradient_as_bucket_view else 0,
            where=evidence.source_of(module.source),
            because=f"{sum(module.bucket_bytes) / 1e6:.1f} MB of gradients are reduced in {len(module.bucket_bytes)} bucket(s)",
        )


def _ways(module: Replication) -> Iterator[Parameters]:
    views: Parameters = {} if module.gradient_as_bucket_view else {"gradient_as_bucket_view": True}
    total_mb = sum(module.bucket_bytes) / (1 << 20)
    cap_mb = module.bucket_cap_bytes / (1 << 20) or _USUAL_CAP_MB
    if len(module.bucket_bytes) >= _FEWEST_BUCKETS and cap_mb < _LARGE_CAP_MB:
        yield {
            "bucket_cap_mb": _USUAL_CAP_MB if cap_mb < _USUAL_CAP_MB and total_mb < 4 * _USUAL_CAP_MB else _LARGE_CAP_MB
        } | views
    if views:
        yield views
    # Without a synchronisation in each backward, or with a search, a graph is not the same every time.
    if not module.static_graph and not module.find_unused_parameters and module.syncs_per_step < 1.5:
        yield {"static_graph": True} | views


def _most_s(evidence: Evidence, module: Replication, parameters: Parameters) -> float:
    """What waits for the gradients now, in part; and a copy of them in and one out."""
    distributed = evidence.distributed
    rows = [c for c in distributed.collectives if c.op == "ddp.gradients"] if distributed is not None else []
    exposed_s = sum(c.transfer_s for c in rows)
    rate = evidence.machine.copy_bytes_per_s if evidence.machine is not None else None
    copy_s = 4 * sum(module.bucket_bytes) / rate if rate and "gradient_as_bucket_view" in parameters else 0.0
    share = 0.5 if "bucket_cap_mb" in parameters else 0.1
    return min(0.5 * evidence.steps.step_s, share * exposed_s + copy_s)


def _place(evidence: Evidence, module: Replication) -> Parameters:
    where = evidence.source_of(module.source)
    try:
        place = place_of(evidence, where) if where is not None else {}
        if place:
            edit(text_at(evidence, place), place)
        return place
    except EditError:
        return {}


def apply(seams: Seams, parameters: Parameters) -> None:
    """Have modules replicated so."""
    from torch.nn.parallel import DistributedDataParallel

    cap = integer(parameters, "bucket_cap_mb") if "bucket_cap_mb" in parameters else None
    options = [name for name in _OPTIONS if parameters.get(name) is True]

    def replicate(kind: type, given: dict[str, Any]) -> None:
        if given.get("find_unused_parameters") and "static_graph" in options:
            return
        given.update(dict.fromkeys(options, True))
        if cap is not None:
            given["bucket_cap_mb"] = cap
        seams.note(LEVER.id)

    seams.at_making(DistributedDataParallel, replicate)


def edit(text: str, parameters: Parameters) -> str:
    """The keywords in the call."""
    module, call = call_in(text, parameters, DDP)
    values: dict[str, str | None] = {name: "True" for name in _OPTIONS if parameters.get(name) is True}
    if "bucket_cap_mb" in parameters:
        values["bucket_cap_mb"] = str(integer(parameters, "bucket_cap_mb"))
    return with_keywords(module, call, values, DDP_ORDER).code


LEVER = Lever(
    id="communication.bucket-gradients",
    title="Buckets of gradients that suit",
    guarantee="bounded",
    module=__name__,
    propose=propose,
    apply=apply,
    edit=edit,
)
