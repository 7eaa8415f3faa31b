"""A layout made true: a plain model spread over the ranks of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only

from flatout.errors import PlanError
from flatout.parallel.attending import Attending
from flatout.parallel.divided import divide
from flatout.parallel.kept import first_names
from flatout.parallel.laid_out import LaidOut, Made
from flatout.parallel.meshes import Meshes
from flatout.parallel.recomputing import recompute_within
from flatout.parallel.refusals import refuse
from flatout.parallel.replicated import sharded
from flatout.parallel.roles import Watched, roles_of, watch
from flatout.parallel.staged import Staged, numbers_of
from flatout.parallel.stages import Stage, part_of, shares
from flatout.parallel.twins import Twins
from flatout.parallel.world import World
from flatout.records.scale import Layout
from flatout.training.recompute import blocks_of


def lay_out(
    model: nn.Module,
    layout: Layout,
    world: World,
    *,
    example: Sequence[Any] = (),
    keywords: Mapping[str, Any] | None = None,
    mixed: torch.dtype | None = None,
    blocks: str = "",
) -> LaidOut:
    """Spread a plain model over the ranks of a run as the layout says. The model is used up: it is what is spread.

    `example` and `keywords` are what the forward takes for one micro-batch of one data rank: needed where tensors, tokens or
    layers are divided; only their shapes are looked at. `mixed` is the type of the arithmetic (bfloat16), with float32 weights.
    `blocks` names the container of the repeated blocks; '' takes the one with most parameters. All ranks get the first rank's
    weights.

    Layers are divided by what a forward without data shows of them (`roles_of`). Raises PlanError for a layout that the model or
    the run cannot have, with the reason.
    """
    laying = _prepared(model, layout, world, example=example, keywords=keywords, mixed=mixed, blocks=blocks)
    _same_on_all(model, world)
    made = _staged(laying) if layout.pipeline > 1 else _in_one_piece(laying)
    return LaidOut(made, layout, laying.meshes, world)


class _Laying(NamedTuple):
    """A model on its way, and what was seen of it: paths of its blocks, a forward without data, names of parameters.

    `after` is called when a step is over.
    """

    model: nn.Module
    layout: Layout
    meshes: Meshes
    world: World
    mixed: torch.dtype | None
    attending: Attending
    paths: list[str]
    watched: Watched | None
    first_names: dict[str, str]
    after: list[Callable[[], None]]


def _prepared(
    model: nn.Module,
    layout: Layout,
    world: World,
    *,
    example: Sequence[Any],
    keywords: Mapping[str, Any] | None,
    mixed: torch.dtype | None,
    blocks: str,
) -> _Laying:
    """Groups of ranks, and a look at the model, of which nothing is touched. Raises as `lay_out` does."""
    refuse(model, layout)
    meshes = Meshes(layout, world)
    paths = [path for path, _ in blocks_of(model, blocks)]
    is_cut = layout.tensor > 1 or layout.pipeline > 1
    if is_cut and not paths:
        raise PlanError(
            "the model has no repeated blocks to divide; name their container, or use tensor 1 and pipeline 1"
        )
    if is_cut and not (example or keywords):
        raise PlanError("tensor and pipeline ranks need an example: what the forward takes for one micro-batch")
    watched = watch(model, *_of_one_rank(example, keywords, layout)) if is_cut else None
    is_again = layout.recompute == "selective"
    attending = Attending(meshes.context, has_pieces=meshes.tensor is not None, recompute=is_again)
    return _Laying(model, layout, meshes, world, mixed, attending, paths, watched, first_names(model), [])


def _in_one_piece(laying: _Laying) -> Made:
    """All blocks on each rank."""
    model, layout, meshes, attending = laying.model, laying.layout, laying.meshes, laying.attending
    has_divided_classes = _divide(model, laying, laying.paths)
    own = [model.get_submodule(path) for path in laying.paths]
    if layout.recompute == "full":
        recompute_within(own, attending.on)
    spread = sharded(model, own, layout, meshes, laying.world, laying.mixed)
    return Made(
        modules=[spread.module],
        attending=attending,
        first_names=laying.first_names,
        compressed=spread.compressed,
        after=laying.after,
        autocast=None if isinstance(spread.module, FSDPModule) else laying.mixed,
        has_divided_classes=has_divided_classes,
    )


def _staged(laying: _Laying) -> Made:
    """The blocks of this rank's stages."""
    layout, meshes, watched, attending = laying.layout, laying.meshes, laying.watched, laying.attending
    assert meshes.pipeline is not None and watched is not None
    num = layout.pipeline * layout.parts_per_stage
    parts = shares(laying.paths, num)
    twins = Twins(laying.model, watched, laying.paths, layout, meshes)
    stages: dict[int, Stage] = {}
    has_divided_classes = False
    for number in numbers_of(layout, meshes.stage):
        part = part_of(laying.model, watched, laying.paths, parts[number])
        twins.separate(part, number)
        has_divided_classes = _divide(part, laying, parts[number])
        if layout.recompute == "full":
            recompute_within([part.get_submodule(path) for path in parts[number]], attending.on)
        stages[number] = Stage(part, parts[number], is_first=number == 0, is_last=number == num - 1)
    stream = (meshes.tensor, layout.is_sequence_parallel) if meshes.tensor is not None else None
    staged = Staged(
        stages,
        layout,
        meshes.pipeline,
        laying.world.device,
        hidden=_between(laying, watched),
        stream=stream,
        within=attending.on,
    )
    for number, module in zip(stages, staged.modules, strict=True):
        own = [stages[number].model.get_submodule(path) for path in parts[number]]
        sharded(module, own, layout, meshes, laying.world, laying.mixed)
    is_cast = all(isinstance(module, FSDPModule) for module in staged.modules)
    staged.autocast = None if is_cast else laying.mixed
    return Made(
        modules=staged.modules,
        attending=attending,
        first_names=laying.first_names,
        staged=staged,
        twins=twins.made(staged.modules),
        after=laying.after,
        autocast=staged.autocast,
        has_divided_classes=has_divided_classes,
    )


def _between(laying: _Laying, watched: Watched) -> Tensor:
    """What a stage sends of one micro-batch: without data, for its shape. FSDP2 casts weights, and with them the stream."""
    hidden: Tensor = watched.of(laying.paths[0])[0].out
    layout = laying.layout
    if layout.tensor > 1 and layout.is_sequence_parallel:
        hidden = hidden.chunk(layout.tensor, 1)[0]
    is_streamed = layout.offload == "weights" and laying.meshes.sharded is None
    is_cast = laying.mixed is not None and not is_streamed
    return hidden.to(laying.mixed) if is_cast else hidden


def _of_one_rank(
    example: Sequence[Any], keywords: Mapping[str, Any] | None, layout: Layout
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The shapes that one context rank has."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor.chunk(layout.context, 1)[0] if layout.context > 1 and tensor.dim() > 1 else tensor

    return tree_map_only(Tensor, cut, (tuple(example), dict(keywords or {})))  # type: ignore[no-any-return]


def _divide(model: nn.Module, laying: _Laying, mine: Sequence[str]) -> bool:
    """Over tensor ranks; whether the logits' classes are divided."""
    layout, meshes, watched = laying.layout, laying.meshes, laying.watched
    if meshes.tensor is None:
        return False
    assert watched is not None
    tokens = watched.of(laying.paths[0])[0].out.shape[1]
    if layout.is_sequence_parallel and tokens % layout.tensor:
        raise PlanError(
            f"{tokens} tokens are no multiple of {layout.tensor} tensor ranks that divide them; unset is_sequence_parallel"
        )
    roles = roles_of(watched, laying.paths, layout.tensor)
    there = {path for path, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Embedding))}
    own = {path: role for path, role in roles.items() if path in there}
    laying.after.append(divide(model, meshes.tensor, own, by_tokens=layout.is_sequence_parallel, blocks=mine))
    if not any(role.kind == "columns" for role in roles.values()):
        raise PlanError(
            f"none of the layers in the blocks can be divided over {layout.tensor} tensor ranks: no layers lead from the stream "
            "and back to it in widths that divide; use tensor 1"
        )
    return any(role.kind == "head" for role in roles.values())


def _same_on_all(model: nn.Module, world: World) -> None:
    """The first rank's weights and buffers on all."""
    if world.num_ranks == 1:
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                there = tensor.detach().to(world.device)
                dist.broadcast(there, 0)
                tensor.copy_(there)
