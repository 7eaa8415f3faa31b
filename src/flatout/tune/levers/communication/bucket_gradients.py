"""Gradients of replicas are reduced in buckets of a size that suits, without a copy into them and out.

What        `bucket_cap_mb`, `gradient_as_bucket_view=True` and, where no parameter is ever left out, `static_graph=True` where a
            DistributedDataParallel module is made.
Guarantee   BOUNDED: another bucket is another order of the same sum over ranks.
Refuses     Runs of one process; modules with unused parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from flatout.core.errors import LeverRefused
from flatout.core.parts import lever
from flatout.core.records.distributed import Replication
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters, integer
from flatout.tune.rewrite.calls import DDP, DDP_ORDER, call_in, with_keywords
from flatout.tune.rewrite.source import editable_place

_FEWEST_BUCKETS = 4
_USUAL_CAP_MB = 25
"""The default of torch 2.11 to 2.13."""
_LARGE_CAP_MB = 100
_OPTIONS = ("gradient_as_bucket_view", "static_graph")


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose larger buckets where there are many small ones, views, and a static graph where nothing changes."""
    distributed = evidence.distributed
    modules = distributed.replications if distributed is not None else ()
    able = [r for r in modules if not r.has_unused_parameters]
    if not able:
        why = "a replicated module has unused parameters" if modules else "no module is replicated over processes"
        raise LeverRefused(why)
    module = max(able, key=lambda r: sum(r.bucket_bytes))
    where = evidence.source_of(module.source)
    for parameters in _parameter_sets(module):
        yield Candidate(
            parameters=editable_place(evidence, where, edit) | parameters,
            saved_s=(0.0, _most_s(evidence, module, parameters)),
            saved_bytes=sum(module.bucket_bytes) if not module.gradient_as_bucket_view else 0,
            where=where,
            because=f"{sum(module.bucket_bytes) / 1e6:.1f} MB of gradients are reduced in {len(module.bucket_bytes)} bucket(s)",
        )


def _parameter_sets(module: Replication) -> Iterator[Parameters]:
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


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Change the arguments with which DistributedDataParallel is constructed."""
    from torch.nn.parallel import DistributedDataParallel

    cap = integer(parameters, "bucket_cap_mb") if "bucket_cap_mb" in parameters else None
    options = [name for name in _OPTIONS if parameters.get(name) is True]

    def replicate(kind: type, arguments: dict[str, Any]) -> None:
        if arguments.get("find_unused_parameters") and "static_graph" in options:
            return
        arguments.update(dict.fromkeys(options, True))
        if cap is not None:
            arguments["bucket_cap_mb"] = cap
        hooks.note(LEVER.id)

    hooks.at_construction(DistributedDataParallel, replicate)


def edit(text: str, parameters: Parameters) -> str:
    """Write the keywords into the call of DistributedDataParallel."""
    module, call = call_in(text, parameters, DDP)
    values: dict[str, str | None] = {name: "True" for name in _OPTIONS if parameters.get(name) is True}
    if "bucket_cap_mb" in parameters:
        values["bucket_cap_mb"] = str(integer(parameters, "bucket_cap_mb"))
    return with_keywords(module, call, values, DDP_ORDER).code


LEVER = lever(__name__, propose, apply=apply, edit=edit, title="Buckets of gradients that suit")
