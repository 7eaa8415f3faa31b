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
from torch.utils._pytree import tree_map_only

from flatout.errors import UsageError
from flatout.parallel.attending import Attending
from flatout.parallel.clipping import scale_down, square_sum
from flatout.parallel.compressed import Compressed
from flatout.parallel.divided import for_loss, placed, united
from flatout.parallel.kept import KeptOptimizer, Writing, cut, in_one_piece, load_tensors, place_of
from flatout.parallel.meshes import Meshes
from flatout.parallel.replicated import is_offloaded_by_fsdp
from flatout.parallel.staged import Loss, MicroBatch, Staged, cast_to
from flatout.parallel.twins import Twins
from flatout.parallel.world import World
from flatout.records.scale import Layout
from flatout.training.offload import offload_state


class Made(NamedTuple):
    """What `lay_out` has made on this rank: the modules to call, what surrounds their forward, and what joins them.

    `first_names`: of each name of a parameter of the plain model the first that it has. `after` is called when a step is over.
    """

    modules: Sequence[nn.Module]
    attending: Attending
    first_names: Mapping[str, str]
    staged: Staged | None = None
    twins: Twins | None = None
    compressed: Compressed | None = None
    autocast: torch.dtype | None = None
    has_divided_classes: bool = False
    after: Sequence[Callable[[], None]] = ()


class LaidOut:
    """A model spread over ranks. `step` takes this data rank's samples and leaves the gradients of the mean loss.

    Made by `lay_out`. Parameters are those of this rank (DTensors where they are divided or sharded). Have `optimizer` make the
    optimizer: it offloads the state where the layout says so, and keeps DTensors of different ranks in groups of their own.
    """

    def __init__(self, made: Made, layout: Layout, meshes: Meshes, world: World) -> None:
        self.modules: list[nn.Module] = list(made.modules)
        self.layout = layout
        self.compressed = made.compressed
        """What compresses gradients, where the layout has them compressed; its state belongs into checkpoints."""
        self._made, self._meshes, self._world = made, meshes, world

    @property
    def divided_fraction(self) -> float:
        """Of the numbers of this rank's layers, those that tensor ranks divide; what has no role stays whole on each."""
        if self._meshes.tensor is None:
            return 0.0
        sizes = [(p.numel(), isinstance(p, DTensor) and not p.placements[-1].is_replicate()) for p in self.parameters()]
        return sum(n for n, is_divided in sizes if is_divided) / sum(n for n, _ in sizes)

    def train(self, mode: bool = True) -> None:
        """As nn.Module.train, of all that this rank holds."""
        for module in self.modules:
            module.train(mode)

    # -- what an optimizer and a checkpoint take -----------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of this rank, by the names that they have in the plain model; of tied ones the first."""
        seen: set[int] = set()
        for module in self.modules:
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    plain = _plain_name(name)
                    yield self._made.first_names.get(plain, plain), parameter

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
                found.setdefault(self._made.first_names.get(plain, plain), []).append(tensor)
        return found

    def _writing(self) -> Writing:
        twins = self._made.twins.counted_elsewhere() if self._made.twins is not None else frozenset()
        names = frozenset(name for name, p in self.named_parameters() if id(p) in twins)
        first = {name for name, p in self.named_parameters() if id(p) not in twins}
        return Writing(is_writer=self._meshes.is_first_of_stage, twins=names - first)

    def clip_grad_norm_(self, most: float) -> Tensor:
        """Scale all gradients down to a norm of `most` over the whole model, and give the norm that they had.

        Parameters that two stages share are counted once.
        """
        twice = self._made.twins.counted_elsewhere() if self._made.twins is not None else frozenset()
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
            losses = self._made.staged.run(batches, loss) if self._made.staged else self._steps(batches, loss)
        self._place_gradients()
        if self._made.twins is not None:
            self._made.twins.sum_gradients()
        return self._mean(losses)

    @torch.no_grad()
    def evaluate(self, *args: Any, target: Any, loss: Loss, **kwargs: Any) -> Tensor:
        """The mean loss as `step` gives it, without gradients."""
        batches = self._micro_batches(args, kwargs, target)
        with self._inside():
            if self._made.staged:
                return self._mean(self._made.staged.forward(batches, loss))
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
        with cast_to(self._made.autocast, self._world.device):
            with self._made.attending.on():
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
            for end in self._made.after:
                stack.callback(end)
            if self._meshes.tensor is not None:
                stack.enter_context(implicit_replication())
                stack.enter_context(loss_parallel() if self._made.has_divided_classes else nullcontext())
            if self._made.autocast is not None:  # off: what the forwards inside cast is kept for all micro-batches
                stack.enter_context(torch.autocast(self._world.device.type, enabled=False))
            before = self._made.attending.num_calls
            yield
            if self._made.attending.num_calls > before:
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


def _whole(value: Tensor) -> Tensor:
    return united(value) if isinstance(value, DTensor) else value


def _plain_name(name: str) -> str:
    for lead in ("module.", "stage.model."):
        name = name.removeprefix(lead)
    return name
