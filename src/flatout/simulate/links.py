"""What data ranks send of weights and gradients, and what comes from the host or its disk."""

from __future__ import annotations

from collections.abc import Callable

from flatout.cost.collectives import all_reduce_s, gather_s
from flatout.errors import PlanError
from flatout.records.scale import Cluster, Constants, Layout, Software
from flatout.simulate.sizes import Part, sharded


def gathered_s(parts: tuple[Part, ...], each: float, layout: Layout, cluster: Cluster, constants: Constants) -> float:
    """Seconds to gather numbers of `each` bytes from those that share them, or to scatter their sum."""
    return sum(
        gather_s(
            part.numbers * each,
            max(1, layout.sharing // part.expert),
            cluster.tiers,
            stride=layout.tensor * part.expert,
            share=constants.link_share,
        )
        for part in parts
    )


def scattered_s(
    parts: tuple[Part, ...], layout: Layout, cluster: Cluster, software: Software, constants: Constants
) -> float:
    """Seconds to sum gradients and leave each rank its shard; groups that hold the same shards then reduce these (Zhao et al.,
    PyTorch FSDP, 2023, section 3.2.2: hybrid sharding)."""
    scatter_s = gathered_s(parts, software.gradient_bytes, layout, cluster, constants)
    groups = layout.data // (layout.shard_ranks or layout.data)
    if groups == 1:
        return scatter_s
    return scatter_s + all_reduce_s(
        sharded(parts, layout) * software.gradient_bytes,
        groups,
        cluster.tiers,
        stride=layout.tensor * layout.sharing,
        share=constants.link_share,
    )


def is_sent_by_layer(layout: Layout) -> bool:
    """Whether data ranks send weights or gradients in each micro-batch. Under a pipeline they do so once a step: torch keeps the
    weights of a stage gathered and its gradients whole until the last micro-batch (pipelining/stage.py, perform_reduce_grad)."""
    return layout.shard >= 2 and layout.pipeline == 1


def copies_of(layout: Layout, cluster: Cluster, constants: Constants) -> Callable[[float], float]:
    """Seconds of a copy of so many bytes to or from where the layout keeps what it offloads.

    Raises PlanError where the cluster does not say what it has.
    """
    host = cluster.host
    if host is None:
        raise PlanError(
            f"the layout offloads its {layout.offload}, and the cluster does not say what joins devices and host"
        )
    rate = host.bytes_per_s * constants.host_share
    rate = rate if layout.offload_to == "host" else min(rate, host.disk_bytes_per_s)
    return lambda num_bytes: num_bytes / rate
