"""The groups of ranks that a layout makes of a run: who divides tensors, tokens, weights, batches and layers with whom."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flatout.errors import PlanError
from flatout.parallel.world import World
from flatout.records.scale import Layout


class Meshes:
    """This rank's place in each dimension of a layout, and its groups.

    `tensor` is a mesh of one dimension, or None where it has one rank; `sharded` what weights are sharded and replicated over
    (of two dimensions where they are replicated), or None where a rank is alone there: `alone` is then a mesh of it. Ranks of a
    tensor group are neighbours, then those of context, of data, and of the pipeline. All ranks make it together.

    Raises PlanError when the layout is of another number of devices than the run has ranks.
    """

    def __init__(self, layout: Layout, world: World) -> None:
        if layout.num_devices != world.num_ranks:
            raise PlanError(
                f"the layout is of {layout.num_devices} devices (tensor {layout.tensor} x context {layout.context} x data "
                f"{layout.data} x pipeline {layout.pipeline}), and the run has {world.num_ranks} ranks; start as many"
            )
        rows = layout.data * layout.context
        self.context_rank, self.data_rank, self.stage = 0, 0, 0
        self.is_first_of_stage = True
        self.tensor: DeviceMesh | None = None
        self.sharded: DeviceMesh | None = None
        self.alone: DeviceMesh | None = None
        self.context: dist.ProcessGroup | None = None
        self.pipeline: dist.ProcessGroup | None = None
        self.all_data: dist.ProcessGroup | None = None
        if world.num_ranks == 1:
            return
        # FSDP wants its mesh and that of DTensors to be parts of one. Context ranks shard weights as data ranks do.
        group = 1 if not layout.shard else (layout.shard_ranks or layout.data) * layout.context
        sizes = (layout.pipeline, rows // group, group, layout.tensor)
        whole = world.mesh(*sizes, names=("pipeline", "replicas", "shards", "tensor"))
        if layout.tensor > 1:
            self.tensor = whole["tensor"]
        if rows > 1:
            self.sharded = whole["shards"] if rows == group else whole["replicas", "shards"]
        else:
            self.alone = whole["shards"]
        if layout.pipeline > 1:
            self.pipeline = whole["pipeline"].get_group()
        places = (layout.pipeline, layout.data, layout.context, layout.tensor)
        by_place = world.mesh(*places, names=("stage", "data", "context", "peers"))
        if layout.context > 1:
            self.context = by_place["context"].get_group()
        coordinate = by_place.get_coordinate()
        assert coordinate is not None
        self.stage, self.data_rank, self.context_rank, peer = coordinate
        self.is_first_of_stage = self.data_rank == self.context_rank == peer == 0
        if rows > 1:
            rows_mesh = world.mesh(layout.pipeline, rows, layout.tensor, names=("p", "rows", "t"))
            self.all_data = rows_mesh["rows"].get_group()
