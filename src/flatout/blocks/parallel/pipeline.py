"""Stages of a pipeline on one rank, run by one of torch's schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor, Replicate, Shard

from flatout.blocks.parallel.pipeline_stages import ModelStage
from flatout.blocks.parallel.tensor_parallel import for_loss
from flatout.core.errors import PlanError
from flatout.core.records.scale import FOLDED, LOOPED, Layout, ScheduleKind

_CLASSES: Final[Mapping[ScheduleKind, str]] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""The names of schedules in torch.distributed.pipelining.schedules.get_schedule_class."""

Loss = Callable[[Any, Any], Tensor]


class MicroBatch(NamedTuple):
    """One call of the model, and what its output is compared with."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any


def cast_to(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """Autocast to a dtype, or a context that does nothing for None."""
    return torch.autocast(device.type, dtype) if dtype is not None else nullcontext()


def stage_numbers(layout: Layout, rank: int) -> list[int]:
    """The parts of the model that a pipeline rank holds.

    >>> stage_numbers(Layout(pipeline=4, schedule="zbv"), 1)
    [1, 6]
    """
    if layout.schedule in FOLDED:
        return [rank, 2 * layout.pipeline - 1 - rank]
    return [rank + layout.pipeline * i for i in range(layout.chunks)]


class _Part(PipelineStage):
    """A stage that opens no connection to its own rank: torch 2.11 does for neighbouring stages of one rank, and gloo refuses."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        ops: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        return [op for op in ops if op.group_peer != self.group_rank]


class Pipeline:
    """One rank of a pipeline: `run` has all its micro-batches go forward and backward, as the schedule orders it.

    `hidden` is what stages send one another, on one rank: without data, for its shape. `within` is entered for each forward.
    """

    def __init__(
        self,
        stages: Mapping[int, ModelStage],
        layout: Layout,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        hidden: Tensor,
        stream: tuple[DeviceMesh, bool] | None,
        within: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._num = num = layout.pipeline * layout.parts_per_stage
        self._layout, self._group, self._device, self._hidden = layout, group, device, hidden
        self._batches: Sequence[MicroBatch] = ()
        self._loss: Loss | None = None
        self._within = within
        self.autocast: torch.dtype | None = None
        """The dtype of autocast for forwards and losses, None for none."""
        sent = torch.empty(hidden.shape, dtype=hidden.dtype, device="meta").requires_grad_()
        number, loss = torch.zeros(1, dtype=torch.int64, device="meta"), torch.zeros(1, device="meta").requires_grad_()
        built = [
            _Part(
                _MicroBatchStage(self, stage, stream),
                at,
                num,
                device,
                input_args=number if at == 0 else sent,
                output_args=loss if at == num - 1 else sent,
                group=group,
            )
            for at, stage in stages.items()
        ]
        kind = get_schedule_class(_CLASSES[layout.schedule])
        has_several = layout.schedule in LOOPED or layout.schedule in FOLDED
        argument: Any = built if has_several else built[0]
        self.modules: list[nn.Module] = [stage.submod for stage in built]
        self._own = dict(sorted(zip(stages, self.modules, strict=True)))
        try:
            self._schedule = kind(
                argument, layout.num_micro_batches, loss_fn=lambda out, _: out.sum(), scale_grads=True
            )
        except ValueError as e:
            raise PlanError(f"schedule '{layout.schedule}' of torch refuses the layout: {e}") from e
        self._numbers = torch.arange(layout.num_micro_batches)

    def run(self, batches: Sequence[MicroBatch], loss: Loss) -> Tensor | None:
        """Forward and backward; the losses of the micro-batches, on ranks that hold the last part."""
        losses: list[Tensor] = []
        args = (self._numbers,) if 0 in self._own else ()
        target = self._numbers if self._num - 1 in self._own else None
        with self._using(batches, loss):
            self._schedule.step(
                *args, number=self._numbers, target=target, losses=losses if target is not None else None
            )
        return torch.stack([loss.detach().sum() for loss in losses]) if losses else None

    def forward(self, batches: Sequence[MicroBatch], loss: Loss) -> Tensor | None:
        """Forward without gradients or a schedule, as torch's own evaluation fails for folded ones; the losses, as `run`."""
        losses = []
        with self._using(batches, loss):
            for number in self._numbers:
                out = self._numbers.new_empty(0)
                for at in self._own:
                    if at and at - 1 not in self._own:
                        out = torch.empty(self._hidden.shape, dtype=self._hidden.dtype, device=self._device)
                        dist.recv(out, group=self._group, group_src=self._holder(at - 1))
                    out = self._own[at](out, number=number)
                    if at < self._num - 1 and at + 1 not in self._own:
                        dist.send(out, group=self._group, group_dst=self._holder(at + 1))
                if self._num - 1 in self._own:
                    losses.append(out.sum())
        return torch.stack(losses) if losses else None

    @contextmanager
    def _using(self, batches: Sequence[MicroBatch], loss: Loss) -> Iterator[None]:
        self._batches, self._loss = batches, loss
        try:
            yield
        finally:
            self._batches, self._loss = (), None

    def _holder(self, at: int) -> int:
        return next(rank for rank in range(self._layout.pipeline) if at in stage_numbers(self._layout, rank))


class _MicroBatchStage(nn.Module):
    """A stage, called with the inputs of the micro-batch whose number the schedule names; the last returns the loss."""

    def __init__(self, owner: Pipeline, stage: ModelStage, stream: tuple[DeviceMesh, bool] | None) -> None:
        super().__init__()
        self.stage = stage
        self._owner, self._stream = [owner], stream

    def forward(self, inputs: Tensor, *, number: Tensor) -> Tensor:
        """The output of one micro-batch."""
        owner = self._owner[0]
        batch = owner._batches[int(number)]
        hidden = None if self.stage.is_first else self._from_previous(inputs)
        with cast_to(owner.autocast, owner._device):
            with owner._within():
                out = self.stage(hidden, batch.args, batch.kwargs)
            if not self.stage.is_last:
                return self._sent(out)
            assert owner._loss is not None
            loss = owner._loss(for_loss(out), batch.target)
        return torch.stack([loss.full_tensor() if isinstance(loss, DTensor) else loss]).float()

    def _from_previous(self, inputs: Tensor) -> Tensor:
        if self._stream is None:
            return inputs
        mesh, by_tokens = self._stream
        if inputs.requires_grad:
            inputs.register_hook(Tensor.contiguous)  # as it is sent
        return DTensor.from_local(inputs, mesh, [Shard(1) if by_tokens else Replicate()], run_check=False)

    def _sent(self, out: Tensor) -> Tensor:
        if self._stream is None:
            return out
        _, by_tokens = self._stream
        assert isinstance(out, DTensor)
        place = Shard(1) if by_tokens else Replicate()
        local = out.redistribute(placements=[place]).to_local(grad_placements=[place])
        # Split schedules detach it in place, which a view does not allow; what is sent must be contiguous.
        return local.clone(memory_format=torch.contiguous_format)
