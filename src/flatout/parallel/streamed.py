"""Weights that stay in the host's memory and come to the device a block at a time, ahead of their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves

from flatout.errors import UsageError
from flatout.parallel.noted_weights import NotedWeights, Saved


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
    device = torch.device(device)
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise UsageError(f"device '{device}': give 'cuda' on a machine with a GPU, or 'cpu'")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if ahead < 0 or not len(blocks):
        raise UsageError(f"{len(blocks)} blocks, ahead {ahead}: give one block or more, and ahead of 0 or more")
    _check([*blocks])
    return Streamed([*blocks], device, ahead)


def _check(blocks: Sequence[nn.Module]) -> None:
    """Raises UsageError where a block's weights could not be taken away."""
    seen: dict[int, int] = {}
    for at, block in enumerate(blocks):
        if next(block.parameters(), None) is None:
            raise UsageError(f"block {at} ({type(block).__name__}) has no parameters; leave it out")
        for path, module in block.named_modules():
            name = f"block {at}" + (f", '{path}'" if path else "")
            if seen.setdefault(id(module), at) != at:
                raise UsageError(f"{name} is in block {seen[id(module)]} too; give blocks that share no module")
            if isinstance(module, nn.RNNBase):
                raise UsageError(
                    f"{name} is a {type(module).__name__}, which keeps weights in a list of its own; leave it out"
                )
            if isinstance(vars(module).get("forward"), _Block):
                raise UsageError(f"{name} is streamed already; undo that first")
            if any(type(p) is not nn.Parameter or p.is_meta for p in module.parameters(recurse=False)):
                raise UsageError(
                    f"{name} has parameters that are DTensors, meta or otherwise no plain ones; leave it out"
                )


class Streamed:
    """Blocks whose weights are streamed; `undo` ends it, as leaving its `with` does."""

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device, ahead: int) -> None:
        self.device, self._ahead = device, ahead
        is_gpu = device.type == "cuda"
        self._coming = torch.cuda.Stream(device) if is_gpu else None
        self._going = torch.cuda.Stream(device) if is_gpu else None
        self._freed: torch.cuda.Event | None = None
        self._returned: list[tuple[nn.Parameter, Tensor]] = []
        self._leaving: deque[_Leaving] = deque()
        self._task = -1
        self._last = self._at = -1
        self._here: dict[int, _Here] = {}
        self.peak_blocks = 0
        """Blocks whose weights were on the device at once, at most."""
        self.bytes_in = 0
        """Of weights sent to the device until now."""
        self._blocks = [_Block(self, at, block) for at, block in enumerate(blocks)]

    def __enter__(self) -> Streamed:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    @property
    def num_live(self) -> int:
        """Blocks whose weights are on the device, or on their way."""
        return len(self._here)

    def wait(self) -> None:
        """Until no weight is on its way. For a change of weights after a forward that no backward followed."""
        if self._coming is not None:
            self._coming.synchronize()

    def undo(self) -> None:
        """Put weights, gradients and buffers back where they were, as they are now. A second time it does nothing.

        Between steps: a backward of what was computed before is not possible any more.
        """
        self.wait()
        self._settle()
        for block in reversed(self._blocks):
            block.undo()
        self._blocks = []

    # -- weights -------------------------------------------------------------------------------------------------------------

    def need(self, at: int, *, is_forward: bool) -> _Here:
        """A block's weights, on the device for what follows on the current stream; the next ones begin to come."""
        if not self._blocks:
            raise UsageError("weights are no longer streamed, and this is computed with them; undo after the backward")
        if is_forward:
            self._begin_forward(at)
        else:
            self._settle_at_the_end()
        if is_forward or self._at != at or at not in self._here:
            self._move_window(at, 1 if is_forward else -1)
        here = self._here[at]
        if here.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(here.arrived)
        return here

    def _begin_forward(self, at: int) -> None:
        if self._task != -1:
            self.give_up()
        if at <= self._last:
            self._drop_all()  # another pass: weights may have changed
        self._last = at

    def _move_window(self, at: int, step: int) -> None:
        """Have `at` and the next `ahead` blocks on the device, or on their way, and no other."""
        self._at = at
        window = [i for i in range(at, at + step * (self._ahead + 1), step) if 0 <= i < len(self._blocks)]
        for i in [i for i, here in self._here.items() if i not in window or not here.is_fresh()]:
            self._drop(i)
        for i in window:
            if i not in self._here:
                self._here[i] = self._fetched(self._blocks[i])
        self.peak_blocks = max(self.peak_blocks, len(self._here))

    def give_up(self) -> None:
        """Forget a backward that ended with an error: its gradients, and weights that are on the device for it."""
        self._returned.clear()
        self._settle()

    def _fetched(self, block: _Block) -> _Here:
        """On a stream of its own, which first waits for what was computed with blocks that went: it uses their memory again."""
        with _on(self._coming), torch.inference_mode(False), torch.no_grad():
            if self._coming is not None and self._freed is not None:
                self._coming.wait_event(self._freed)
            raw = [torch.empty_like(p, device=self.device).copy_(p, non_blocking=True) for p in block.weights]
            arrived = None if self._coming is None else self._coming.record_event()
        self.bytes_in += sum(t.nbytes for t in raw)
        return _Here(block, raw, [p._version for p in block.weights], arrived)

    def _drop(self, at: int) -> None:
        here = self._here.pop(at)
        here.block.take_out()
        if self._coming is None:
            return
        compute = torch.cuda.current_stream(self.device)
        for tensor in here.raw:
            if _is_held_elsewhere(tensor):  # by a function that keeps a weight past autograd's hooks
                tensor.record_stream(compute)
        self._freed = compute.record_event()

    def _drop_all(self) -> None:
        for at in list(self._here):
            self._drop(at)

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
            self._leaving.append(_Leaving(at, grad, self._going.record_event()))
        self._returned.append((weight, host))
        while abs(self._leaving[0].at - at) > self._ahead:
            compute.wait_event(self._leaving.popleft().left)  # its memory is free for what the device computes next

    def _settle_at_the_end(self) -> None:
        """Of the backward that runs, if one does."""
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


class _Here(NamedTuple):
    """A block's weights on the device, of these versions on the host; complete at `arrived`."""

    block: _Block
    raw: list[Tensor]
    versions: list[int]
    arrived: torch.cuda.Event | None

    def is_fresh(self) -> bool:
        return all(p._version == v for p, v in zip(self.block.weights, self.versions, strict=True))


class _Leaving(NamedTuple):
    """A gradient on the device that is on its way to the host."""

    at: int
    grad: Tensor
    left: torch.cuda.Event


class _Block:
    """A block, and what is its `forward` while it is streamed."""

    def __init__(self, over: Streamed, at: int, module: nn.Module) -> None:
        self._over, self.at, self._module = over, at, module
        self._own_forward = vars(module).get("forward")
        self._forward: Callable[..., Any] = module.forward
        self._sites: dict[int, list[tuple[nn.Module, str]]] = {}
        for inner in module.modules():
            for name, weight in inner._parameters.items():
                if weight is not None:
                    self._sites.setdefault(id(weight), []).append((inner, name))
        self.weights = list(module.parameters())
        self._homes = [(p.device, p.is_pinned()) for p in self.weights]
        for weight in self.weights:
            _move(weight, torch.device("cpu"), is_pinned=over.device.type == "cuda" or weight.is_pinned())
        self._buffers = [(m, n, b.device) for m in module.modules() for n, b in m._buffers.items() if b is not None]
        for inner, name, _ in self._buffers:
            inner._buffers[name] = inner._buffers[name].to(over.device)  # type: ignore[union-attr]
        self._is_in = False
        module.forward = self

    def undo(self) -> None:
        """The module as it was."""
        del self._module.forward
        if self._own_forward is not None:
            self._module.forward = self._own_forward
        for weight, (home, is_pinned) in zip(self.weights, self._homes, strict=True):
            _move(weight, home, is_pinned=is_pinned)
        for inner, name, home in self._buffers:
            inner._buffers[name] = inner._buffers[name].to(home)  # type: ignore[union-attr]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_forward = torch._C._current_graph_task_id() == -1
        here = self._over.need(self.at, is_forward=is_forward)
        was_in = self._is_in
        if not was_in:
            self._put_in(here)
        try:
            if not torch.is_grad_enabled():
                return self._forward(*args, **kwargs)
            with NotedWeights(here.raw, here.versions, self.read):
                out = self._forward(*args, **kwargs)
        finally:
            if not was_in:
                self.take_out()
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._before_backward)
        return out

    def take_out(self) -> None:
        """The module has its parameters again, which are on the host."""
        if self._is_in:
            self._is_in = False
            self._set(self.weights)

    def send_back(self, weight: nn.Parameter, grad: Tensor) -> None:
        self._over.send_back(self.at, weight, grad)

    def read(self, saved: Saved) -> Tensor:
        """A weight, or a view of it, that autograd wants back."""
        if self.weights[saved.which]._version != saved.version:
            self._over.give_up()
            raise RuntimeError(
                f"a weight of block {self.at}, of shape {list(self.weights[saved.which].shape)}, was changed after the forward "
                "and before its backward"
            )
        here = self._over.need(self.at, is_forward=False)
        return here.raw[saved.which].as_strided(saved.shape, saved.stride, saved.offset)

    def _put_in(self, here: _Here) -> None:
        with torch.inference_mode(False):
            tracked = torch.is_grad_enabled()
            self._set(
                [
                    _tracked(p, raw, self) if tracked and p.requires_grad else raw.detach()
                    for p, raw in zip(self.weights, here.raw, strict=True)
                ]
            )
        self._is_in = True

    def _set(self, values: Sequence[Tensor]) -> None:
        for weight, value in zip(self.weights, values, strict=True):
            for inner, name in self._sites[id(weight)]:
                inner._parameters[name] = value  # type: ignore[assignment]

    def _before_backward(self, grad: Tensor) -> None:
        """What is recomputed inside finds its weights, and those of the block before begin to come."""
        if torch.is_grad_enabled():
            raise UsageError("streamed weights have no second derivatives; call backward without create_graph")
        here = self._over.need(self.at, is_forward=False)
        if not self._is_in:
            with torch.enable_grad():
                self._put_in(here)


class _Fetched(torch.autograd.Function):
    """A parameter on the host, as it is on the device; its gradient is sent back and not through autograd."""

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, raw: Tensor, block: _Block) -> Tensor:
        ctx.weight, ctx.block = weight, block
        return raw.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.block.send_back(ctx.weight, grad)
        return None, None, None


def _tracked(weight: nn.Parameter, raw: Tensor, block: _Block) -> Tensor:
    out: Tensor = _Fetched.apply(weight, raw, block)  # type: ignore[no-untyped-call]
    return out


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


def _is_held_elsewhere(tensor: Tensor) -> bool:
    """Whether something besides this tensor holds its memory."""
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)  # the tensor and `storage`
