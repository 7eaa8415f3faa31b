"""Weights that stay in the host's memory and come to the device a block at a time, ahead of their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from flatout.blocks.streaming.weight_stream import (
    StreamedModule,
    WeightStream,
    check_streamable,
    streaming_device,
)
from flatout.core.errors import UsageError
from flatout.core.tensors.nests import tree_leaves


def stream_weights(
    blocks: Sequence[nn.Module] | nn.ModuleList, device: torch.device | str, *, ahead: int = 1
) -> Streamed:
    """Keep the weights of blocks in the host's memory and send each to the device while the blocks before it compute.

    Results and gradients are what they are without, bitwise where a block is called once in a backward. Parameters stay the
    objects that they are and lie on the host (in pinned memory for a GPU), so do their gradients after each backward:
    optimizer, clipping and state_dict work there. Of weights at most `ahead + 1` blocks are on the device at once, in the
    order of `blocks` in the forward and the reverse in the backward, and of gradients on their way as many. Buffers move to the
    device and stay.

    Costs: each weight crosses to the device once in a forward and once more in its backward, each gradient back; what of it is
    not hidden behind the computing is waited for by the device's stream. The host waits at the end of each backward until
    gradients are there. A block must take longer than its weights do to come: with tokens in large batches, that is.

    Also for inference, in torch.no_grad. With recompute of blocks: either before this or after. Under autocast, torch keeps
    weights that were cast until the backward, on the device and of all blocks: hold them in the dtype of products, or
    recompute the blocks. Hooks of parameters are not called, so it is not for DistributedDataParallel or FSDP2; a weight of a
    block that is used outside of it is on the host there. Compile a block's `forward` before, not the block.

    With `device='cpu'` copies are real, so that all but the speed can be tried without a GPU. Raises UsageError for blocks
    that cannot be streamed.
    """
    device = streaming_device(device)
    if ahead < 0 or not len(blocks):
        raise UsageError(f"{len(blocks)} blocks, ahead {ahead}: give one block or more, and ahead of 0 or more")
    check_streamable([*blocks], "block")
    for at, block in enumerate(blocks):
        if next(block.parameters(), None) is None:
            raise UsageError(f"block {at} ({type(block).__name__}) has no parameters; leave it out")
    return Streamed([*blocks], device, ahead)


class Streamed(WeightStream["_BlockOnDevice"]):
    """Blocks whose weights are streamed; `undo` ends it, as leaving its `with` does."""

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device, ahead: int) -> None:
        super().__init__(device)
        self._ahead = ahead
        self._going = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._freed: torch.cuda.Event | None = None
        self._returned: list[tuple[nn.Parameter, Tensor]] = []
        self._leaving: deque[_GradientTransfer] = deque()
        self._task = -1
        self._last = self._at = -1
        self.peak_blocks = 0
        """Blocks whose weights were on the device at once, at most."""
        self._modules = self._blocks = [_StreamedBlock(self, at, block) for at, block in enumerate(blocks)]

    def undo(self) -> None:
        """Put weights, gradients and buffers back where they were, as they are now. A second time it does nothing.

        Between steps: a backward of what was computed before is not possible any more.
        """
        self.wait()
        self._settle()
        for block in reversed(self._blocks):
            block.undo()
        self._modules = self._blocks = []

    # -- weights -------------------------------------------------------------------------------------------------------------

    def need(self, at: int, *, is_forward: bool) -> _BlockOnDevice:
        """A block's weights, on the device for what follows on the current stream; the next ones begin to come."""
        if not self._blocks:
            raise UsageError("weights are no longer streamed, and this is computed with them; undo after the backward")
        if is_forward:
            if self._task != -1:
                self.give_up()
            if at <= self._last:
                self._drop_all()  # another pass: weights may have changed
            self._last = at
        else:
            self._settle_at_the_end()
        if is_forward or self._at != at or at not in self._here:
            self._at = at
            step = 1 if is_forward else -1
            window = range(at, at + step * (self._ahead + 1), step)
            self._move_window([i for i in window if 0 <= i < len(self._blocks)])
            self.peak_blocks = max(self.peak_blocks, self.num_live)
        here = self._here[at]
        if here.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(here.arrived)
        return here

    def give_up(self) -> None:
        """Forget a backward that ended with an error: its gradients, and weights that are on the device for it."""
        self._returned.clear()
        self._settle()

    def _send(self, number: int) -> _BlockOnDevice:
        """A block's weights, sent on a stream that first waits for computation with dropped blocks, whose memory is reused."""
        block = self._blocks[number]
        with _on(self._coming), torch.inference_mode(False), torch.no_grad():
            if self._coming is not None and self._freed is not None:
                self._coming.wait_event(self._freed)
            raw = [torch.empty_like(p, device=self.device).copy_(p, non_blocking=True) for p in block.parameters]
            arrived = None if self._coming is None else self._coming.record_event()
        self.bytes_in += sum(t.nbytes for t in raw)
        return _BlockOnDevice(raw, block.versions(), arrived)

    def _free(self, number: int, sent: _BlockOnDevice) -> None:
        self._blocks[number].leave()
        if self._coming is None:
            return
        compute = torch.cuda.current_stream(self.device)
        for tensor in sent.raw:
            if _is_referenced_elsewhere(tensor):  # by a function that keeps a weight past autograd's hooks
                tensor.record_stream(compute)
        self._freed = compute.record_event()

    # -- gradients -----------------------------------------------------------------------------------------------------------

    def send_back(self, at: int, weight: nn.Parameter, grad: Tensor) -> None:
        """A gradient goes to the host; it is the parameter's when the backward has ended."""
        if grad.layout is not torch.strided:
            raise UsageError(
                f"a gradient of block {at} is {grad.layout}; leave out the block, or have its gradients dense"
            )
        self._settle_at_the_end()
        if self._going is None:
            self._returned.append((weight, torch.empty_like(weight).copy_(grad)))
            return
        compute = torch.cuda.current_stream(self.device)
        self._going.wait_stream(compute)
        with torch.cuda.stream(self._going):
            host = torch.empty_like(weight, pin_memory=True).copy_(grad, non_blocking=True)
            self._leaving.append(_GradientTransfer(at, grad, self._going.record_event()))
        self._returned.append((weight, host))
        while abs(self._leaving[0].at - at) > self._ahead:
            compute.wait_event(self._leaving.popleft().left)  # its memory is free for what the device computes next

    def _settle_at_the_end(self) -> None:
        """Settle when the running backward ends, if one is running."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._task):
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._settle)

    def _settle(self) -> None:
        """No weight is on the device; gradients have come, and are added to those of the parameters."""
        self._task = self._last = -1
        self._drop_all()
        if self._going is not None:
            self._going.synchronize()
        self._leaving.clear()
        with torch.no_grad():
            for weight, host in self._returned:
                weight.grad = host if weight.grad is None else weight.grad.add_(host)
        self._returned.clear()


class _BlockOnDevice(NamedTuple):
    """A block's weights on the device, of these versions on the host; complete at `arrived`."""

    raw: list[Tensor]
    versions: list[int]
    arrived: torch.cuda.Event | None


class _GradientTransfer(NamedTuple):
    """A gradient on the device that is on its way to the host."""

    at: int
    grad: Tensor
    left: torch.cuda.Event


class _StreamedBlock(StreamedModule):
    """A block, and what is its `forward` while it is streamed."""

    def __init__(self, over: Streamed, at: int, module: nn.Module) -> None:
        super().__init__(module, over.device)
        self.over, self.at = over, at
        self.parameters = [*self.weights.values()]
        self._homes = [(p.device, p.is_pinned()) for p in self.parameters]
        for weight in self.parameters:
            _move(weight, torch.device("cpu"), is_pinned=over.device.type == "cuda" or weight.is_pinned())
        self._is_in = False
        self.replace_forward()

    def undo(self) -> None:
        """The module as it was."""
        self.restore()
        for weight, (home, is_pinned) in zip(self.parameters, self._homes, strict=True):
            _move(weight, home, is_pinned=is_pinned)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_forward = torch._C._current_graph_task_id() == -1
        here = self.over.need(self.at, is_forward=is_forward)
        was_in = self._is_in
        if not was_in:
            self._use(here)
        try:
            if not torch.is_grad_enabled():
                return self.forward(*args, **kwargs)
            with _NotedWeights(here.raw, here.versions, self.read):
                out = self.forward(*args, **kwargs)
        finally:
            if not was_in:
                self.leave()
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._before_backward)
        return out

    def leave(self) -> None:
        """The module has its parameters again, which are on the host."""
        if self._is_in:
            self._is_in = False
            self.take_out()

    def read(self, saved: _SavedWeight) -> Tensor:
        """A weight, or a view of it, that autograd needs."""
        if self.parameters[saved.which]._version != saved.version:
            self.over.give_up()
            raise RuntimeError(
                f"a weight of block {self.at}, of shape {list(self.parameters[saved.which].shape)}, was changed after the "
                "forward and before its backward"
            )
        here = self.over.need(self.at, is_forward=False)
        return here.raw[saved.which].as_strided(saved.shape, saved.stride, saved.offset)

    def _use(self, here: _BlockOnDevice) -> None:
        with torch.inference_mode(False):
            tracked = torch.is_grad_enabled()
            fetched: Callable[..., Tensor] = _FetchedWeight.apply
            self.put_in(
                fetched(p, raw, self) if tracked and p.requires_grad else raw.detach()
                for p, raw in zip(self.parameters, here.raw, strict=True)
            )
        self._is_in = True

    def _before_backward(self, grad: Tensor) -> None:
        """What is recomputed inside finds its weights, and those of the block before begin to come."""
        if torch.is_grad_enabled():
            raise UsageError("streamed weights have no second derivatives; call backward without create_graph")
        here = self.over.need(self.at, is_forward=False)
        if not self._is_in:
            with torch.enable_grad():
                self._use(here)


class _FetchedWeight(torch.autograd.Function):
    """A parameter on the host, as it is on the device; its gradient is sent back and not through autograd."""

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, raw: Tensor, block: _StreamedBlock) -> Tensor:
        ctx.weight, ctx.block = weight, block
        return raw.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.block.over.send_back(ctx.block.at, ctx.weight, grad)
        return None, None, None


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _move(weight: nn.Parameter, device: torch.device, *, is_pinned: bool) -> None:
    """A parameter's numbers, and its gradient's, to other memory; the parameter stays."""
    for tensor in (weight, weight.grad):
        if tensor is None or (tensor.device == device and tensor.is_pinned() == is_pinned):
            continue
        moved = tensor.data.to(device)
        if is_pinned:
            moved = moved.pin_memory()
        elif moved.is_pinned():
            moved = torch.empty_like(moved).copy_(moved)
        tensor.data = moved


def _is_referenced_elsewhere(tensor: Tensor) -> bool:
    """Whether something besides this tensor refers to its memory."""
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)  # the tensor and `storage`


# -- weights that autograd saves for the backward ----------------------------------------------------------------------------


class _SavedWeight(NamedTuple):
    """Where in which weight a tensor that autograd saved lies, and the weight's version then; nothing that holds memory."""

    which: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    version: int


class _SavedTensor(NamedTuple):
    """Another tensor that autograd saved, and its version then: with hooks autograd does not look for changes in place itself."""

    tensor: Tensor
    version: int


class _NotedWeights(torch.autograd.graph.saved_tensors_hooks):
    """Inside this `with`, autograd notes which of `weights` it saves, and asks `read` for it in the backward.

    A weight is known by its memory, so views of it are noted, too. `versions` are those that `read` may compare. Other tensors
    go to the hooks around this one (recompute, offload of activations), or are saved as ever.
    """

    def __init__(
        self, weights: Sequence[Tensor], versions: Sequence[int], read: Callable[[_SavedWeight], Tensor]
    ) -> None:
        self._device, self._read = weights[0].device, read
        self._index = {w.untyped_storage().data_ptr(): i for i, w in enumerate(weights) if w.numel()}
        self._versions, self._dtypes = [*versions], [w.dtype for w in weights]
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._outer_pack, self._outer_unpack = outer if outer is not None else (_save, _restore)
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.layout is torch.strided and tensor.device == self._device and tensor.numel():
            index = self._index.get(tensor.untyped_storage().data_ptr())
            if (
                index is not None
                and tensor.dtype == self._dtypes[index]
                and not tensor.is_conj()
                and not tensor.is_neg()
            ):
                offset = int(tensor.storage_offset())
                return _SavedWeight(index, tuple(tensor.shape), tensor.stride(), offset, self._versions[index])
        return self._outer_pack(tensor)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _SavedWeight):
            return self._read(packed)
        tensor: Tensor = self._outer_unpack(packed)
        return tensor


def _save(tensor: Tensor) -> _SavedTensor:
    return _SavedTensor(tensor.detach(), tensor._version)  # itself it would hold its own node, and never go


def _restore(saved: _SavedTensor) -> Tensor:
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            f"a tensor of shape {list(saved.tensor.shape)} that a backward needs was changed in place: it is at version "
            f"{saved.tensor._version}, and was saved at {saved.version}"
        )
    return saved.tensor
