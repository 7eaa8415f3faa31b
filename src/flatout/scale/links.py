"""What data ranks send of weights and gradients, and what comes from the host or its disk."""

from __future__ import annotations

from collections.abc import Callable

from flatout.core.errors import PlanError
from flatout.core.records.scale import Layout
from flatout.machine.cost.collectives import all_reduce_s, gather_s
from flatout.scale.case import StepCase
from flatout.scale.sizes import WeightPart, sharded_parameters


def gathered_s(parts: tuple[WeightPart, ...], each: float, case: StepCase) -> float:
    """Seconds to gather numbers of `each` bytes from those that share them, or to scatter their sum."""
    return _sent_s(gather_s, case.layout.sharing, parts, each, case)


def all_reduced_s(parts: tuple[WeightPart, ...], each: float, case: StepCase) -> float:
    """Seconds to add up numbers of `each` bytes over the ranks that hold the same."""
    return _sent_s(all_reduce_s, case.layout.context * case.layout.data, parts, each, case)


def _sent_s(
    collective: Callable[..., float], ranks: int, parts: tuple[WeightPart, ...], each: float, case: StepCase
) -> float:
    tiers, stride = case.tiers, case.layout.tensor
    return sum(
        collective(p.numbers * each, max(1, int(ranks / p.expert)), tiers, stride=max(1, int(stride * p.expert)))
        for p in parts
    )


def scattered_s(parts: tuple[WeightPart, ...], case: StepCase) -> float:
    """Seconds to sum gradients and leave each rank its shard; groups that hold the same shards then reduce these (Zhao et al.,
    PyTorch FSDP, 2023, section 3.2.2: hybrid sharding)."""
    layout, each = case.layout, case.software.gradient_bytes
    scatter_s = gathered_s(parts, each, case)
    groups = layout.data // (layout.shard_ranks or layout.data)
    if groups == 1:
        return scatter_s
    num_bytes, stride = sharded_parameters(parts, layout) * each, layout.tensor * layout.sharing
    return scatter_s + all_reduce_s(num_bytes, groups, case.tiers, stride=stride)


def is_sent_by_layer(layout: Layout) -> bool:
    """Whether data ranks send weights or gradients in each micro-batch. Under a pipeline they do so once a step: torch keeps the
    weights of a stage gathered and its gradients whole until the last micro-batch (pipelining/stage.py, perform_reduce_grad)."""
    return layout.shard >= 2 and layout.pipeline == 1


def copies_of(case: StepCase) -> Callable[[float], float]:
    """Seconds of a copy of so many bytes to or from where the layout keeps what it offloads.

    Raises PlanError where the cluster does not say what it has.
    """
    layout, host = case.layout, case.cluster.host
    if host is None:
        raise PlanError(
            f"the layout offloads its {layout.offload}, and the cluster does not say what joins devices and host"
        )
    rate = host.bytes_per_s * case.constants.host_share
    rate = rate if layout.offload_to == "host" else min(rate, host.disk_bytes_per_s)
    return lambda num_bytes: num_bytes / rate
