"""Application of a layout: a plain model is spread over the ranks of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from flatout.blocks.parallel.attention import Attending
from flatout.blocks.parallel.data_parallel import spread_over_data_ranks
from flatout.blocks.parallel.experts import Experts
from flatout.blocks.parallel.layout_checkpoints import first_names
from flatout.blocks.parallel.parallel_model import ModelParts, ParallelModel
from flatout.blocks.parallel.pipeline import Pipeline, stage_numbers
from flatout.blocks.parallel.pipeline_stages import ModelStage, TiedWeights, shares, stage_model
from flatout.blocks.parallel.roles import ObservedForward, observe_forward, roles_of
from flatout.blocks.parallel.tensor_parallel import divide
from flatout.blocks.parallel.world import Meshes, World
from flatout.blocks.training.recompute import blocks_of, recompute_blocks
from flatout.core.errors import PlanError
from flatout.core.records.scale import SPLIT, Layout
from flatout.core.tensors.nests import tree_map_only


def parallelize(
    model: nn.Module,
    layout: Layout,
    world: World,
    *,
    example: Sequence[Any] = (),
    keywords: Mapping[str, Any] | None = None,
    mixed: torch.dtype | None = None,
    blocks: str = "",
) -> ParallelModel:
    """Spread a plain model over the ranks of a run as the layout says. The model itself is spread, and not to be used any more.

    `example` and `keywords` are what the forward takes for one micro-batch of one data rank: needed where tensors, tokens or
    layers are divided; only their shapes are looked at. `mixed` is the type of the arithmetic (bfloat16), with float32 weights.
    `blocks` names the container of the repeated blocks; '' takes the one with most parameters. All ranks get the first rank's
    weights.

    Layers are divided by what a forward without data shows of them (`roles_of`). Raises PlanError for a layout that the model or
    the run cannot have, with the reason.
    """
    _refuse(model, layout)
    meshes = Meshes(layout, world)
    paths = [path for path, _ in blocks_of(model, blocks)]
    is_cut = layout.tensor > 1 or layout.pipeline > 1
    if is_cut and not paths:
        raise PlanError(
            "the model has no repeated blocks to divide; name their container, or use tensor 1 and pipeline 1"
        )
    if is_cut and not (example or keywords):
        raise PlanError("tensor and pipeline ranks need an example: what the forward takes for one micro-batch")
    observed = observe_forward(model, *_of_one_rank(example, keywords, layout)) if is_cut else None
    is_again = layout.recompute == "selective"
    attending = Attending(meshes.context, has_pieces=meshes.tensor is not None, recompute=is_again)
    prepared = _PreparedModel(model, layout, meshes, world, mixed, attending, paths, observed, first_names(model), [])
    _same_on_all(model, world)
    parts = _in_stages(prepared) if layout.pipeline > 1 else _in_one_piece(prepared)
    return ParallelModel(parts, layout, meshes, world)


class _PreparedModel(NamedTuple):
    """A model that is being spread, and what is known of it: paths of its blocks, a forward without data, parameters' names.

    `after` is called when a step is over.
    """

    model: nn.Module
    layout: Layout
    meshes: Meshes
    world: World
    mixed: torch.dtype | None
    attending: Attending
    paths: list[str]
    observed: ObservedForward | None
    first_names: dict[str, str]
    after: list[Callable[[], None]]


def _refuse(model: nn.Module, layout: Layout) -> None:
    """Raise PlanError with the first reason why this model cannot have the layout, with what to do."""
    has_experts = any(isinstance(module, Experts) for module in model.modules())
    is_one_piece = layout.tensor == layout.pipeline == 1
    for is_so, why in (
        (
            layout.pipeline > 1 and layout.schedule in SPLIT and layout.shard == 3,
            f"schedule '{layout.schedule}' with shard 3: torch loses gradients of weights that are gathered once more for a "
            "backward in two halves; use shard 1 or 2, or another schedule",
        ),
        (
            layout.expert > 1 and not has_experts,
            f"expert {layout.expert}, and the model has no Experts (flatout.blocks.parallel.experts) to divide; use expert 1",
        ),
        (
            has_experts and layout.tensor > 1,
            f"tensor {layout.tensor} with Experts, whose rows have no fixed place; use tensor 1 and divide the experts",
        ),
        (
            layout.expert > 1 and (layout.expert_ranks != layout.tensor or layout.data % layout.expert != 0),
            f"expert {layout.expert} with expert_tensor {layout.expert_tensor} on data {layout.data} can be planned and is not "
            "built; use expert_tensor 0 and a divisor of data",
        ),
        (
            layout.recompute in ("operators", "parts") or bool(layout.recompute_layers),
            f"recompute '{layout.recompute}' with recompute_layers {layout.recompute_layers} can be planned and is not built; "
            "use 'none', 'selective' or 'full', and 0",
        ),
        (
            layout.counts_ends and layout.pipeline > 1,
            "counts_ends can be planned and is not built; use false",
        ),
        (
            layout.expert > 1 and layout.pipeline > 1,
            f"expert {layout.expert} with pipeline {layout.pipeline}: stages would exchange rows out of step; use one of them",
        ),
        (
            layout.compression != "none" and not is_one_piece,
            f"compression '{layout.compression}' is of replicated models; use tensor 1 and pipeline 1",
        ),
        (
            layout.offload != "none" and layout.offload_to == "disk",
            "offloading to the disk can be planned and is not built; use offload_to 'host'",
        ),
        (
            layout.offload == "weights" and not is_one_piece and not layout.shard,
            "weights in the host's memory of tensor and pipeline ranks need them sharded; use shard 3",
        ),
    ):
        if is_so:
            raise PlanError(why)


def _in_one_piece(prepared: _PreparedModel) -> ModelParts:
    """Spread a model that has all blocks on each rank."""
    model, layout, meshes, attending = prepared.model, prepared.layout, prepared.meshes, prepared.attending
    has_divided_classes = _divide(model, prepared, prepared.paths)
    own = [model.get_submodule(path) for path in prepared.paths]
    if layout.recompute == "full":
        recompute_blocks(own, within=attending.on)
    module, compressed = spread_over_data_ranks(model, own, layout, meshes, prepared.world, prepared.mixed)
    return ModelParts(
        modules=[module],
        attending=attending,
        first_names=prepared.first_names,
        compressed=compressed,
        after=prepared.after,
        autocast=None if isinstance(module, FSDPModule) else prepared.mixed,
        has_divided_classes=has_divided_classes,
    )


def _in_stages(prepared: _PreparedModel) -> ModelParts:
    """Spread a model of which each rank has the blocks of its stages."""
    layout, meshes, observed, attending = prepared.layout, prepared.meshes, prepared.observed, prepared.attending
    assert meshes.pipeline is not None and observed is not None
    num = layout.pipeline * layout.parts_per_stage
    parts = shares(prepared.paths, num)
    tied = TiedWeights(prepared.model, observed, prepared.paths, layout, meshes)
    stages: dict[int, ModelStage] = {}
    has_divided_classes = False
    for number in stage_numbers(layout, meshes.stage):
        part = stage_model(prepared.model, observed, prepared.paths, parts[number])
        tied.separate(part, number)
        has_divided_classes = _divide(part, prepared, parts[number])
        if layout.recompute == "full":
            recompute_blocks([part.get_submodule(path) for path in parts[number]], within=attending.on)
        stages[number] = ModelStage(part, parts[number], is_first=number == 0, is_last=number == num - 1)
    stream = (meshes.tensor, layout.is_sequence_parallel) if meshes.tensor is not None else None
    pipeline = Pipeline(
        stages,
        layout,
        meshes.pipeline,
        prepared.world.device,
        hidden=_between(prepared, observed),
        stream=stream,
        within=attending.on,
    )
    for number, module in zip(stages, pipeline.modules, strict=True):
        own = [stages[number].model.get_submodule(path) for path in parts[number]]
        spread_over_data_ranks(module, own, layout, meshes, prepared.world, prepared.mixed)
    is_cast = all(isinstance(module, FSDPModule) for module in pipeline.modules)
    pipeline.autocast = None if is_cast else prepared.mixed
    return ModelParts(
        modules=pipeline.modules,
        attending=attending,
        first_names=prepared.first_names,
        pipeline=pipeline,
        tied=tied.found_in(pipeline.modules),
        after=prepared.after,
        autocast=pipeline.autocast,
        has_divided_classes=has_divided_classes,
    )


def _between(prepared: _PreparedModel, observed: ObservedForward) -> Tensor:
    """The tensor that a stage sends of one micro-batch: without data, for its shape and dtype, which FSDP2 may cast."""
    hidden: Tensor = observed.of(prepared.paths[0])[0].out
    layout = prepared.layout
    if layout.tensor > 1 and layout.is_sequence_parallel:
        hidden = hidden.chunk(layout.tensor, 1)[0]
    is_streamed = layout.offload == "weights" and prepared.meshes.sharded is None
    is_cast = prepared.mixed is not None and not is_streamed
    return hidden.to(prepared.mixed) if is_cast else hidden


def _of_one_rank(
    example: Sequence[Any], keywords: Mapping[str, Any] | None, layout: Layout
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example as one context rank has it."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor.chunk(layout.context, 1)[0] if layout.context > 1 and tensor.dim() > 1 else tensor

    return tree_map_only(Tensor, cut, (tuple(example), dict(keywords or {})))  # type: ignore[no-any-return]


def _divide(model: nn.Module, prepared: _PreparedModel, mine: Sequence[str]) -> bool:
    """Divide the layers over tensor ranks; whether the logits' classes are divided."""
    layout, meshes, observed = prepared.layout, prepared.meshes, prepared.observed
    if meshes.tensor is None:
        return False
    assert observed is not None
    tokens = observed.of(prepared.paths[0])[0].out.shape[1]
    if layout.is_sequence_parallel and tokens % layout.tensor:
        raise PlanError(
            f"{tokens} tokens are no multiple of {layout.tensor} tensor ranks that divide them; unset is_sequence_parallel"
        )
    roles = roles_of(observed, prepared.paths, layout.tensor)
    there = {path for path, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Embedding))}
    own = {path: role for path, role in roles.items() if path in there}
    prepared.after.append(divide(model, meshes.tensor, own, by_tokens=layout.is_sequence_parallel, blocks=mine))
    if not any(role.kind == "columns" for role in roles.values()):
        raise PlanError(
            f"none of the layers in the blocks can be divided over {layout.tensor} tensor ranks: no layers lead from the stream "
            "and back to it in widths that divide; use tensor 1"
        )
    return any(role.kind == "head" for role in roles.values())


def _same_on_all(model: nn.Module, world: World) -> None:
    """Copy the first rank's weights and buffers to all ranks."""
    if world.num_ranks == 1:
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                there = tensor.detach().to(world.device)
                dist.broadcast(there, 0)
                tensor.copy_(there)
