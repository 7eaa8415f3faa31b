"""A module on the ranks of data and context: replicated, or its weights sharded, with torch's own means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from flatout.blocks.parallel.experts import spread_experts
from flatout.blocks.parallel.gradient_compression import Compressed, compress
from flatout.blocks.parallel.tensor_parallel import sharded_dim
from flatout.blocks.parallel.weight_streaming import stream_weights
from flatout.blocks.parallel.world import Meshes, World
from flatout.core.records.scale import Layout


def spread_over_data_ranks(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    layout: Layout,
    meshes: Meshes,
    world: World,
    mixed: torch.dtype | None,
) -> tuple[nn.Module, Compressed | None]:
    """The module spread over data and context ranks, and what compresses its gradients.

    It is FSDP2, or DistributedDataParallel where nothing is sharded or mixed.

    `mixed` precision on several ranks is FSDP2's, whose activations are of that type throughout; autocast leaves what flows
    between layers in float32. Tensor and pipeline ranks always take FSDP2, which leaves one shard on each rank where nothing is
    sharded. In it, shard 1 and 2 keep weights gathered, 3 gathers them for each block; gradients are reduced with the last
    micro-batch (0, 1) or with each. Experts are divided before.
    """
    if layout.offload == "weights" and meshes.sharded is None:
        stream_weights(blocks, world.device)
        _rest_to(module, blocks, world.device)
        return module, None
    if any(p.device.type != world.device.type for p in (*module.parameters(), *module.buffers())):
        module.to(world.device)
    mesh = meshes.sharded or (meshes.alone if mixed is not None else None)
    if mesh is None:
        return module, None
    experts = spread_experts(module, _of_experts(layout, world)) if layout.expert > 1 else []
    is_replicated = layout.shard == 0 and layout.tensor == 1 and layout.pipeline == 1
    if is_replicated and (mixed is None or layout.compression != "none"):
        devices = [world.device] if world.device.type == "cuda" else None
        # gradients that lie in the buckets are there once
        replicated = DistributedDataParallel(
            module, device_ids=devices, process_group=meshes.all_data, gradient_as_bucket_view=True
        )
        compressed = compress(replicated, layout.compression) if layout.compression != "none" else None
        return replicated, compressed
    policy = MixedPrecisionPolicy(param_dtype=mixed, reduce_dtype=torch.float32) if mixed else MixedPrecisionPolicy()
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "reshard_after_forward": layout.shard == 3,
        "shard_placement_fn": sharded_dim,
        "ignored_params": set(experts),
    }
    if is_offloaded_by_fsdp(layout, meshes) and world.device.type == "cuda":
        options["offload_policy"] = CPUOffloadPolicy()
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(module, **options)
    return module, None


def is_offloaded_by_fsdp(layout: Layout, meshes: Meshes) -> bool:
    """Whether FSDP2 keeps this rank's shards, their gradients and with them the optimizer's state in the host's memory."""
    is_sharded = meshes.sharded is not None and (layout.shard > 0 or layout.tensor > 1 or layout.pipeline > 1)
    return layout.offload != "none" and is_sharded


def _of_experts(layout: Layout, world: World) -> DeviceMesh:
    """Copies, and in each of them the ranks that divide the experts."""
    rows = layout.data * layout.context
    if rows == layout.expert:
        return world.mesh(rows, names=("expert",))
    return world.mesh(rows // layout.expert, layout.expert, names=("copies", "expert"))


def _rest_to(module: nn.Module, blocks: Sequence[nn.Module], device: torch.device) -> None:
    """What is outside of the blocks, onto the device."""
    inside = {id(m) for block in blocks for m in block.modules()}
    for part in module.modules():
        if id(part) not in inside:
            part._apply(lambda tensor: tensor.to(device), recurse=False)
