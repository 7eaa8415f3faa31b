"""A model spread over ranks: its steps, its optimizer, and what a checkpoint holds of it."""

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

from flatout.blocks.parallel.attention import Attending
from flatout.blocks.parallel.clipping import scale_down, square_sum
from flatout.blocks.parallel.data_parallel import is_offloaded_by_fsdp
from flatout.blocks.parallel.gradient_compression import Compressed
from flatout.blocks.parallel.layout_checkpoints import (
    NamedOptimizer,
    Writing,
    block_template,
    cut,
    in_one_piece,
    load_tensors,
)
from flatout.blocks.parallel.pipeline import Loss, MicroBatch, Pipeline, cast_to
from flatout.blocks.parallel.pipeline_stages import TiedWeights
from flatout.blocks.parallel.tensor_parallel import for_loss, gather_whole, replicated
from flatout.blocks.parallel.world import Meshes, World
from flatout.blocks.training.offload import offload_state
from flatout.core.errors import UsageError
from flatout.core.records.scale import Layout
from flatout.core.tensors.nests import tree_map_only


class ModelParts(NamedTuple):
    """What `parallelize` has built on this rank: the modules to call, what surrounds their forward, and what joins them.

    `first_names`: by each name of a parameter of the plain model, its first. `after` is called when a step is over.
    """

    modules: Sequence[nn.Module]
    attending: Attending
    first_names: Mapping[str, str]
    pipeline: Pipeline | None = None
    tied: TiedWeights | None = None
    compressed: Compressed | None = None
    autocast: torch.dtype | None = None
    has_divided_classes: bool = False
    after: Sequence[Callable[[], None]] = ()


class ParallelModel:
    """A model spread over ranks. `step` takes this data rank's samples and leaves the gradients of the mean loss.

    Built by `parallelize`. Parameters are those of this rank (DTensors where they are divided or sharded). Let `optimizer` build
    the optimizer: it offloads the state where the layout says so, and keeps DTensors of different ranks in groups of their own.
    """

    def __init__(self, parts: ModelParts, layout: Layout, meshes: Meshes, world: World) -> None:
        self.modules: list[nn.Module] = list(parts.modules)
        self.layout = layout
        self.compressed = parts.compressed
        """What compresses gradients, where the layout has them compressed; its state belongs into checkpoints."""
        self._parts, self._meshes, self._world = parts, meshes, world

    @property
    def divided_fraction(self) -> float:
        """The fraction of this rank's parameters that tensor ranks divide; layers without a role stay whole on each."""
        if self._meshes.tensor is None:
            return 0.0
        sizes = [(p.numel(), isinstance(p, DTensor) and not p.placements[-1].is_replicate()) for p in self.parameters()]
        return sum(n for n, is_divided in sizes if is_divided) / sum(n for n, _ in sizes)

    def train(self, mode: bool = True) -> None:
        """Set training or evaluation mode, as nn.Module.train does, for all modules of this rank."""
        for module in self.modules:
            module.train(mode)

    # -- what an optimizer and a checkpoint take -----------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters with their names in the plain model, the first one where they are tied."""
        visited: set[int] = set()
        for module in self.modules:
            for name, parameter in module.named_parameters():
                if id(parameter) not in visited:
                    visited.add(id(parameter))
                    yield self._plain_name(name), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank, each once."""
        return (parameter for _, parameter in self.named_parameters())

    def optimizer(self, kind: Callable[..., Optimizer], **options: Any) -> Optimizer:
        """An optimizer of this rank's parameters, as `parallel.optimizer(torch.optim.AdamW, lr=1e-3)`.

        Where the layout offloads it, its state is in the host's memory but for its step.
        """
        groups: dict[object, list[nn.Parameter]] = {}
        for p in self.parameters():
            groups.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
        result = kind([{"params": group} for group in groups.values()], **options)
        if self.layout.offload == "state" and not is_offloaded_by_fsdp(self.layout, self._meshes):
            offload_state(result)
        return result

    def named_optimizer(self, optimizer: Optimizer) -> NamedOptimizer:
        """The optimizer as `Checkpoints` and `Survivor` take it: `save(step, model=m, optimizer=m.named_optimizer(optimizer))`.

        Saved by names, it loads into any other layout of the model.
        """
        return NamedOptimizer(optimizer, self.named_parameters(), self._writing())

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's weights and buffers, by the names of the plain model; of tied ones the first."""
        return {name: in_one_piece(tensors[0]) for name, tensors in self._tensors().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load such a state, as a checkpoint has it. Raises UsageError for tensors of another shape."""
        load_tensors(self._tensors(), state)

    def places(self) -> Mapping[str, Tensor]:
        """Tensors that are divided as those of a checkpoint are; see `Scattered`."""
        return {name: block_template(tensors[0]) for name, tensors in self._tensors().items()}

    def own(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of a checkpoint's state; see `Scattered`."""
        return cut(state, self._tensors(), "the checkpoint")

    def writes(self, name: str, *, is_shard: bool) -> bool:
        """Whether this rank writes the tensor of that name; see `Scattered`."""
        return self._writing().writes(name, is_shard=is_shard)

    def weights(self) -> list[str]:
        """The names of this rank's parameters."""
        return [name for name, _ in self.named_parameters()]

    def _tensors(self) -> dict[str, list[Tensor]]:
        found: dict[str, list[Tensor]] = {}
        for module in self.modules:
            for name, tensor in module.state_dict().items():
                found.setdefault(self._plain_name(name), []).append(tensor)
        return found

    def _plain_name(self, name: str) -> str:
        """The name in the plain model of a module's parameter or buffer, the first where it is tied."""
        for lead in ("module.", "stage.model."):
            name = name.removeprefix(lead)
        return self._parts.first_names.get(name, name)

    def _writing(self) -> Writing:
        tied = self._parts.tied.counted_elsewhere() if self._parts.tied is not None else frozenset()
        names = frozenset(name for name, p in self.named_parameters() if id(p) in tied)
        first = {name for name, p in self.named_parameters() if id(p) not in tied}
        return Writing(is_writer=self._meshes.is_first_of_stage, written_elsewhere=names - first)

    def clip_grad_norm_(self, most: float) -> Tensor:
        """Scale all gradients down to a norm of `most` over the whole model, and give the norm that they had.

        Parameters that two stages share are counted once.
        """
        twice = self._parts.tied.counted_elsewhere() if self._parts.tied is not None else frozenset()
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
            losses = self._parts.pipeline.run(batches, loss) if self._parts.pipeline else self._steps(batches, loss)
        self._place_gradients()
        if self._parts.tied is not None:
            self._parts.tied.sum_gradients()
        return self._mean(losses)

    @torch.no_grad()
    def evaluate(self, *args: Any, target: Any, loss: Loss, **kwargs: Any) -> Tensor:
        """The mean loss as `step` gives it, without gradients."""
        batches = self._micro_batches(args, kwargs, target)
        with self._inside():
            if self._parts.pipeline:
                return self._mean(self._parts.pipeline.forward(batches, loss))
            return self._mean(torch.stack([gather_whole(self._loss(b, loss)) for b in batches]))

    def _steps(self, batches: Sequence[MicroBatch], loss: Loss) -> Tensor:
        module, found = self.modules[0], []
        for number, batch in enumerate(batches):
            is_last = number == len(batches) - 1
            with self._synced(module, is_last):
                value = self._loss(batch, loss)
                (value / len(batches)).backward()
            found.append(gather_whole(value.detach()))
        return torch.stack(found)

    def _loss(self, batch: MicroBatch, loss: Loss) -> Tensor:
        with cast_to(self._parts.autocast, self._world.device):
            with self._parts.attending.on():
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
            is_synced_once = self.layout.shard < 2
            module.set_is_last_backward(is_last)
            module.set_requires_gradient_sync(is_last or not is_synced_once)
            module.set_reshard_after_backward(is_last or self.layout.shard == 3)  # else gathered once a step
        yield

    @contextmanager
    def _inside(self) -> Iterator[None]:
        with ExitStack() as stack:
            for end in self._parts.after:
                stack.callback(end)
            if self._meshes.tensor is not None:
                stack.enter_context(implicit_replication())
                stack.enter_context(loss_parallel() if self._parts.has_divided_classes else nullcontext())
            if self._parts.autocast is not None:  # off: what the forwards inside cast is cached for all micro-batches
                stack.enter_context(torch.autocast(self._world.device.type, enabled=False))
            before = self._parts.attending.num_calls
            yield
            if self._parts.attending.num_calls > before:
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
        nest = (tuple(args), dict(kwargs), target)
        cut = [tree_map_only(Tensor, partial(self._piece, number=n, wanted=wanted), nest) for n in range(num)]
        mesh = self._meshes.tensor
        return [MicroBatch(*(replicated(one, mesh) if mesh is not None else one)) for one in cut]

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
        """Divide gradients as their parameters are: DTensor leaves them as operators returned them, such as partial sums."""
        for p in self.parameters():
            if isinstance(p, DTensor) and isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
                p.grad = p.grad.redistribute(placements=p.placements)

    def _mean(self, losses: Tensor | None) -> Tensor:
        """The mean over micro-batches and all ranks that had any."""
        mine = torch.zeros((), device=self._world.device) if losses is None else losses.mean().float()
        if self._world.num_ranks == 1:
            return mine
        mine = mine / (self._world.num_ranks // self.layout.pipeline)
        dist.all_reduce(mine)
        return mine
