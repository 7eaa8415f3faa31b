"""One CPU, one GPU, or all ranks that torchrun started, to which a script is written alike; and their groups in a layout."""

from __future__ import annotations

import gc
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from flatout.blocks.parallel.own_store import join_ranks
from flatout.core.errors import PlanError, UsageError
from flatout.core.records.scale import Layout

Value = TypeVar("Value")
Module = TypeVar("Module", bound=nn.Module)


class World:
    """The ranks of this run: `rank` of `num_ranks`, each with its `device`. Use it in a `with`, or `close` it.

    Started by torchrun it joins the process group (NCCL for GPUs, gloo for CPUs) unless there is one already, and leaves it at
    the end; started plainly it is a single rank and no group is made. `device` is 'cuda' where there is one and 'cpu'
    elsewhere, if not given. Raises UsageError when a device is wanted that is not there.
    """

    def __init__(self, device: str = "") -> None:
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
            raise UsageError(f"device '{device}': this machine has {_there()}; give one of them, or nothing")
        self._has_begun = not dist.is_initialized() and dist.is_torchelastic_launched()
        if self._has_begun:
            local = dist.get_node_local_rank() if kind == "cuda" else 0
            if kind == "cuda" and local >= torch.cuda.device_count():
                raise UsageError(
                    f"this is process {local} of its machine, which has {_there()}; start as many processes as GPUs"
                )
            here = torch.device(kind, local) if kind == "cuda" else None
            if here is not None:
                torch.cuda.set_device(here)
            join_ranks("nccl" if kind == "cuda" else "gloo", device_id=here)
        self._replicated: list[DistributedDataParallel] = []
        self._meshes: dict[tuple[tuple[int, ...], tuple[str, ...]], DeviceMesh] = {}
        is_one_of_many = dist.is_initialized()
        self.rank = dist.get_rank() if is_one_of_many else 0
        self.num_ranks = dist.get_world_size() if is_one_of_many else 1
        self.device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the process group, if this joined it. Replicated models end with it; what they hold is their `module`.

        They let go of the group, so that its threads end here: what still holds it when the interpreter is taken down now and
        then ends the process with "terminate called without an active exception" (torch 2.13, gloo; pytorch issue 190489).
        """
        if not self._has_begun or not dist.is_initialized():
            return
        for model in self._replicated:
            for name in ("reducer", "logger", "process_group"):
                model.__dict__.pop(name, None)
        self._replicated.clear()
        self._meshes.clear()
        gc.collect()  # hooks of the reducer go round in circles
        dist.destroy_process_group()
        self._has_begun = False

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0: who prints and writes."""
        return self.rank == 0

    def mesh(self, *sizes: int, names: tuple[str, ...] = ("data",)) -> DeviceMesh:
        """A DeviceMesh over the ranks, for FSDP2 and DTensor; one dimension of all ranks if no sizes are given.

        Its groups are made once for the same sizes and names: NCCL keeps memory of the device for each group.
        """
        wanted = (sizes or (self.num_ranks,), names)
        if wanted not in self._meshes:
            self._meshes[wanted] = init_device_mesh(self.device.type, wanted[0], mesh_dim_names=names)
        return self._meshes[wanted]

    def place(self, model: Module, **options: Any) -> Module:
        """The model on this rank's device; with several ranks replicated, its gradients averaged (DistributedDataParallel).

        `options` go to DistributedDataParallel. What is called is what is returned; the optimizer takes its parameters.
        """
        model = model.to(self.device)
        if self.num_ranks == 1 or not any(p.requires_grad for p in model.parameters()):
            return model
        devices = [self.device] if self.device.type == "cuda" else None
        replicated = DistributedDataParallel(model, device_ids=devices, **options)
        self._replicated.append(replicated)
        return replicated  # type: ignore[return-value]

    def total(self, value: Tensor) -> Tensor:
        """The sum over ranks, on every rank; on a device without a wait of the host."""
        value = value.detach().clone()
        if self.num_ranks > 1:
            dist.all_reduce(value)
        return value

    def part_of_mean(self, loss_sum: Tensor, total: int | Tensor) -> Tensor:
        """This rank's part of the mean loss over `total` items of all ranks and the whole accumulation: call backward on it.

        Gradients are averaged over ranks, and the mean of ranks' means is wrong as soon as they hold different numbers of
        items; so each rank takes its sum over the global count. Added over ranks (`total`) and divided by `num_ranks`, the
        parts are that mean. The count of a planned batch is known (`Batches.step(...).num_tokens`); others cost one `total` of
        a number.
        """
        return loss_sum * (self.num_ranks / total)

    def gathered(self, value: Value) -> list[Value]:
        """Every rank's value, on every rank; of anything that can be pickled."""
        if self.num_ranks == 1:
            return [value]
        found: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(found, value)
        return found


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


def _there() -> str:
    return f"{torch.cuda.device_count()} GPU(s) and a CPU" if torch.cuda.is_available() else "a CPU and no GPU"


_LAYOUT: Final[list[Layout]] = []
"""The layout, in a process that `flatout run --layout` started."""


def set_layout(layout: Layout) -> None:
    """Have `layout_from_environment` return it in this process."""
    _LAYOUT[:] = [layout]


def layout_from_environment(world: World, *, micro_batch: int = 1, global_batch: int = 0) -> Layout:
    """The layout of `flatout run --layout layout.toml train.py`; started otherwise, all ranks hold the whole model.

    The latter with micro-batches of `micro_batch` samples and `global_batch` of them a step (one micro-batch a rank if 0). Raises
    PlanError for a batch that does not divide.
    """
    if _LAYOUT:
        return _LAYOUT[0]
    ranks = world.num_ranks
    batch = global_batch or ranks * micro_batch
    if batch % (ranks * micro_batch):
        raise PlanError(f"a global batch of {batch} is no multiple of {ranks} ranks x {micro_batch} samples")
    return Layout(data=ranks, micro_batch=micro_batch, global_batch=batch)
