"""A layout made true: a plain model spread over the ranks of a run, and steps that compute what one process computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from flatout.errors import PlanError, UsageError
from flatout.parallel.attending import Attending
from flatout.parallel.clipping import scale_down, square_sum
from flatout.parallel.compressed import Compressed
from flatout.parallel.divided import divide, for_loss, placed
from flatout.parallel.kept import KeptOptimizer, Writing, cut, first_names, in_one_piece, load_tensors, place_of
from flatout.parallel.meshes import Meshes
from flatout.parallel.recomputing import recompute_within
from flatout.parallel.refusals import refuse
from flatout.parallel.replicated import is_offloaded_by_fsdp, sharded
from flatout.parallel.roles import Watched, roles_of, watch
from flatout.parallel.staged import Loss, MicroBatch, Staged, numbers_of
from flatout.parallel.stages import Stage, part_of, shares
from flatout.parallel.twins import Twins
from flatout.parallel.world import World
from flatout.records.scale import Layout
from flatout.training.offload import offload_state
from flatout.training.recompute import blocks_of


class LaidOut:
    """A model spread over ranks. `step` takes this data rank's samples and leaves the gradients of the mean loss.

    Made by `lay_out`. Parameters are those of this rank (DTensors where they are divided or sharded); the optimizer takes
    `parameters()`.
    """

    def __init__(
        self, modules: Sequence[nn.Module], layout: Layout, meshes: Meshes, world: World, attending: Attending
    ) -> None:
        self.modules: list[nn.Module] = list(modules)
        self.layout = layout
        self._meshes, self._world = meshes, world
        self._attending = attending
        self._staged: Staged | None = None
        self._twins: Twins | None = None
        self._autocast: torch.dtype | None = None
        self._has_divided_classes = False
        self._first_names: dict[str, str] = {}
        self.compressed: Compressed | None = None
        """What compresses gradients, where the layout has them compressed; its state belongs into checkpoints."""

    # -- what an optimizer and a checkpoint take -----------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of this rank, by the names that they have in the plain model; of tied ones the first."""
        seen: set[int] = set()
        for module in self.modules:
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    plain = _plain_name(name)
                    yield self._first_names.get(plain, plain), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of this rank."""
        return (parameter for _, parameter in self.named_parameters())

    def optimizer(self, kind: Callable[..., Optimizer], **options: Any) -> Optimizer:
        """An optimizer of this rank's parameters, as `laid.optimizer(torch.optim.AdamW, lr=1e-3)`.

        Where the layout offloads it, its state is in the host's memory but for its step.
        """
        groups: dict[object, list[nn.Parameter]] = {}
        for p in self.parameters():
            groups.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
        made = kind([{"params": group} for group in groups.values()], **options)
        if self.layout.offload == "state" and not is_offloaded_by_fsdp(self.layout, self._meshes):
            offload_state(made)
        return made

    def kept(self, optimizer: Optimizer) -> KeptOptimizer:
        """The optimizer as `Checkpoints` and `Survivor` take it: `save(step, model=laid, optimizer=laid.kept(optimizer))`.

        Saved by names, it loads into any other layout of the model.
        """
        return KeptOptimizer(optimizer, self.named_parameters(), self._writing())

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's weights and buffers, by the names of the plain model; of tied ones the first."""
        return {name: in_one_piece(tensors[0]) for name, tensors in self._tensors().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """The same, as a checkpoint gives it. Raises UsageError for tensors of another shape."""
        load_tensors(self._tensors(), state)

    def places(self) -> Mapping[str, Tensor]:
        """As training.scattered has it."""
        return {name: place_of(tensors[0]) for name, tensors in self._tensors().items()}

    def own(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """As training.scattered has it."""
        return cut(state, self._tensors(), "the checkpoint")

    def writes(self, name: str, *, is_shard: bool) -> bool:
        """As training.scattered has it."""
        writing = self._writing()
        return not writing.has_twin(name) if is_shard else writing(name)

    def weights(self) -> list[str]:
        """Names of parameters."""
        return [name for name, _ in self.named_parameters()]

    def _tensors(self) -> dict[str, list[Tensor]]:
        found: dict[str, list[Tensor]] = {}
        for module in self.modules:
            for name, tensor in module.state_dict().items():
                plain = _plain_name(name)
                found.setdefault(self._first_names.get(plain, plain), []).append(tensor)
        return found

    def _writing(self) -> Writing:
        twins = self._twins.counted_elsewhere() if self._twins is not None else frozenset()
        names = frozenset(name for name, p in self.named_parameters() if id(p) in twins)
        first = {name for name, p in self.named_parameters() if id(p) not in twins}
        return Writing(is_writer=self._meshes.is_first_of_stage, twins=names - first)

    def clip_grad_norm_(self, most: float) -> Tensor:
        """Scale all gradients down to a norm of `most` over the whole model, and give the norm that they had.

        Parameters that two stages share are counted once.
        """
        twice = self._twins.counted_elsewhere() if self._twins is not None else frozenset()
        own = [p.grad for p in self.parameters() if p.grad is not None and id(p) not in twice]
        total = square_sum(own, self._world.device)
        if self._meshes.pipeline is not None:
            dist.all_reduce(total, group=self._meshes.pipeline)
        norm = total.sqrt()
        scale_down([p.grad for p in self.parameters() if p.grad is not None], norm, most)
        return norm

    # -- a step --------------------------------------------------------------------------------------------------------------

    def share(self, batch: Any) -> Any:
        """This data rank's samples of a batch over all ranks: tensors cut along their first dimension.

        Raises UsageError for another number of samples than the layout's.
        """
        each = self.layout.global_batch // self.layout.data
        begin = self._meshes.data_rank * each

        def cut(tensor: Tensor) -> Tensor:
            if not tensor.dim() or tensor.size(0) != self.layout.global_batch:
                raise UsageError(
                    f"a tensor of shape {list(tensor.shape)} for a global batch of {self.layout.global_batch}; give the samples "
                    "of all ranks in the first dimension"
                )
            return tensor[begin : begin + each]

        return tree_map_only(Tensor, cut, batch)

    def step(self, *args: Any, target: Any, loss: Loss, **kwargs: Any) -> Tensor:
        """Forward and backward of all micro-batches of this data rank; the mean loss over all ranks, on each.

        `loss(output, target)` is the mean over a micro-batch (of this rank's tokens, where samples are divided by tokens; then
        all ranks must count as many). Gradients are added to what is there, as backward does. Tensors among the arguments have
        this rank's samples in their first dimension, and all tokens in their second.

        Raises UsageError for another number of samples than the layout's.
        """
        batches = self._micro_batches(args, kwargs, target)
        with self._inside():
            losses = self._staged.run(batches, loss) if self._staged else self._steps(batches, loss)
        self._place_gradients()
        if self._twins is not None:
            self._twins.sum_gradients()
        return self._mean(losses)

    @torch.no_grad()
    def evaluate(self, *args: Any, target: Any, loss: Loss, **kwargs: Any) -> Tensor:
        """The mean loss as `step` gives it, without gradients."""
        batches = self._micro_batches(args, kwargs, target)
        with self._inside():
            if self._staged:
                return self._mean(self._staged.forward(batches, loss))
            return self._mean(torch.stack([_whole(self._loss(b, loss)) for b in batches]))

    def _steps(self, batches: Sequence[MicroBatch], loss: Loss) -> Tensor:
        module, found = self.modules[0], []
        for number, batch in enumerate(batches):
            is_last = number == len(batches) - 1
            with self._synced(module, is_last):
                value = self._loss(batch, loss)
                (value / len(batches)).backward()
            found.append(_whole(value.detach()))
        return torch.stack(found)

    def _loss(self, batch: MicroBatch, loss: Loss) -> Tensor:
        with self._attending.on():
            out = self.modules[0](*batch.args, **batch.kwargs)
        return loss(for_loss(out), batch.target)

    @contextmanager
    def _synced(self, module: nn.Module, is_last: bool) -> Iterator[None]:
        """Gradients are reduced with the last micro-batch; with sharded gradients with each."""
        if isinstance(module, DistributedDataParallel):
            with nullcontext() if is_last else module.no_sync():
                yield
            return
        if isinstance(module, FSDPModule):
            is_held = self.layout.shard < 2
            module.set_is_last_backward(is_last)
            module.set_requires_gradient_sync(is_last or not is_held)
            module.set_reshard_after_backward(is_last or self.layout.shard == 3)  # else gathered once a step
        yield

    @contextmanager
    def _inside(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._meshes.tensor is not None:
                stack.enter_context(implicit_replication())
                stack.enter_context(loss_parallel() if self._has_divided_classes else nullcontext())
            if self._autocast is not None:
                stack.enter_context(torch.autocast(self._world.device.type, self._autocast))
            before = self._attending.num_calls
            yield
            if self._attending.num_calls > before:
                return
            if self._meshes.context is not None:
                raise UsageError(
                    "the model called no scaled_dot_product_attention, so that its tokens saw those of their own rank alone; "
                    "write its attention so, or use context 1"
                )
            if self.layout.recompute == "selective":
                raise UsageError(
                    "the model called no scaled_dot_product_attention, so that nothing was left to be computed again; write its "
                    "attention so, or use recompute 'full' or 'none'"
                )

    def _micro_batches(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> list[MicroBatch]:
        layout, num = self.layout, self.layout.num_micro_batches
        wanted = layout.micro_batch * num

        def pieces(nest: Any) -> list[Any]:
            return [tree_map_only(Tensor, partial(self._piece, number=n, wanted=wanted), nest) for n in range(num)]

        cut = zip(pieces(tuple(args)), pieces(dict(kwargs)), pieces(target), strict=True)
        batches = [MicroBatch(*one) for one in cut]
        mesh = self._meshes.tensor
        return [MicroBatch(*placed(tuple(b), mesh)) for b in batches] if mesh is not None else batches

    def _piece(self, tensor: Tensor, number: int, wanted: int) -> Tensor:
        size = self.layout.micro_batch
        if not tensor.dim() or tensor.size(0) != wanted:
            raise UsageError(
                f"a tensor of shape {list(tensor.shape)} for {wanted} samples ({self.layout.num_micro_batches} micro-batches of "
                f"{size}); give this data rank's samples in the first dimension, as `share` cuts them"
            )
        piece = tensor[number * size : (number + 1) * size]
        ranks = self.layout.context
        if ranks > 1 and piece.dim() > 1:
            if piece.size(1) % ranks:
                raise UsageError(f"{piece.size(1)} tokens are no multiple of {ranks} context ranks")
            piece = piece.chunk(ranks, 1)[self._meshes.context_rank]
        return piece.to(self._world.device)

    def _place_gradients(self) -> None:
        """As their parameters are: DTensor leaves them as the operators gave them, in parts to be summed or cut another way."""
        for p in self.parameters():
            if isinstance(p, DTensor) and isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
                p.grad = p.grad.redistribute(placements=p.placements)

    def _mean(self, losses: Tensor | None) -> Tensor:
        """Over micro-batches and all ranks that had any."""
        mine = torch.zeros((), device=self._world.device) if losses is None else losses.mean().float()
        if self._world.num_ranks == 1:
            return mine
        mine = mine / (self._world.num_ranks // self.layout.pipeline)
        dist.all_reduce(mine)
        return mine


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
    prepared = _prepare(model, layout, world, example=example, keywords=keywords, blocks=blocks)
    _same_on_all(model, world)
    return _spread_out(model, layout, world, prepared, mixed=mixed)


class _Prepared(NamedTuple):
    """What a layout of a model needs to know before anything of it is touched."""

    meshes: Meshes
    paths: list[str]
    watched: Watched | None
    first_names: dict[str, str]


def _prepare(
    model: nn.Module,
    layout: Layout,
    world: World,
    *,
    example: Sequence[Any] = (),
    keywords: Mapping[str, Any] | None = None,
    blocks: str = "",
) -> _Prepared:
    """The first half of `lay_out`: groups of ranks, and a look at the model. Raises as it does."""
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
    return _Prepared(meshes, paths, watched, first_names(model))


def _spread_out(
    model: nn.Module, layout: Layout, world: World, prepared: _Prepared, *, mixed: torch.dtype | None = None
) -> LaidOut:
    """The second half: the model's parameters divided, sharded, and on their devices."""
    meshes, paths, watched, names = prepared
    is_again = layout.recompute == "selective"
    attending = Attending(meshes.context, has_pieces=meshes.tensor is not None, recompute=is_again)
    if layout.pipeline > 1:
        assert watched is not None
        laid = _staged(model, layout, meshes, world, watched, paths, mixed, attending)
    else:
        laid = LaidOut([], layout, meshes, world, attending)
        laid._has_divided_classes = _divide(model, layout, meshes, watched, paths, paths)
        if layout.recompute == "full":
            recompute_within([model.get_submodule(path) for path in paths], attending.on)
        spread = sharded(model, [model.get_submodule(p) for p in paths], layout, meshes, world, mixed)
        laid.modules.append(spread.module)
        laid.compressed = spread.compressed
        laid._autocast = None if isinstance(spread.module, FSDPModule) else mixed
    laid._first_names = names
    return laid


def _of_one_rank(
    example: Sequence[Any], keywords: Mapping[str, Any] | None, layout: Layout
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The shapes that one context rank has."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor.chunk(layout.context, 1)[0] if layout.context > 1 and tensor.dim() > 1 else tensor

    return tree_map_only(Tensor, cut, (tuple(example), dict(keywords or {})))  # type: ignore[no-any-return]


def _staged(
    model: nn.Module,
    layout: Layout,
    meshes: Meshes,
    world: World,
    watched: Watched,
    paths: Sequence[str],
    mixed: torch.dtype | None,
    attending: Attending,
) -> LaidOut:
    assert meshes.pipeline is not None
    num = layout.pipeline * layout.parts_per_stage
    parts = shares(paths, num)
    twins = Twins(model, watched, paths, layout, meshes)
    stages: dict[int, Stage] = {}
    has_divided_classes = False
    for number in numbers_of(layout, meshes.stage):
        part = part_of(model, watched, paths, parts[number])
        twins.separate(part, number)
        has_divided_classes = _divide(part, layout, meshes, watched, paths, parts[number])
        own = [part.get_submodule(path) for path in parts[number]]
        if layout.recompute == "full":
            recompute_within(own, attending.on)
        stages[number] = Stage(part, parts[number], is_first=number == 0, is_last=number == num - 1)
    hidden = watched.of(paths[0])[0].out
    if layout.tensor > 1 and layout.is_sequence_parallel:
        hidden = hidden.chunk(layout.tensor, 1)[0]
    stream = (meshes.tensor, layout.is_sequence_parallel) if meshes.tensor is not None else None
    if mixed is not None:
        hidden = hidden.to(mixed)
    staged = Staged(stages, layout, meshes.pipeline, world.device, hidden=hidden, stream=stream, within=attending.on)
    for number, module in zip(stages, staged.modules, strict=True):
        own = [stages[number].model.get_submodule(path) for path in parts[number]]
        sharded(module, own, layout, meshes, world, mixed)
    laid = LaidOut(staged.modules, layout, meshes, world, attending)
    laid._staged, laid._twins, laid._has_divided_classes = staged, twins.made(staged.modules), has_divided_classes
    laid._autocast = None if meshes.sharded is not None else mixed
    return laid


def _divide(
    model: nn.Module,
    layout: Layout,
    meshes: Meshes,
    watched: Watched | None,
    paths: Sequence[str],
    mine: Sequence[str],
) -> bool:
    """Over tensor ranks; whether the logits' classes are divided."""
    if meshes.tensor is None:
        return False
    assert watched is not None
    roles = roles_of(watched, paths, layout.tensor)
    there = {path for path, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Embedding))}
    own = {path: role for path, role in roles.items() if path in there}
    divide(model, meshes.tensor, own, by_tokens=layout.is_sequence_parallel, blocks=mine)
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


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _plain_name(name: str) -> str:
    for lead in ("module.", "stage.model."):
        name = name.removeprefix(lead)
    return name
