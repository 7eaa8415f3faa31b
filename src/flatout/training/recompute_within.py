"""The blocks to recompute so that what a step keeps for its backward stays within a budget, at the least time; measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.training.random_state import random_state, set_random_state
from flatout.training.recompute import Undo, recompute_blocks, repeated_blocks
from flatout.training.snapshot import copied


class Recomputed(NamedTuple):
    """What is recomputed within a budget. Bytes are of tensors kept for the backward, beside weights and buffers.

    `kept_bytes` are kept before any is recomputed; `now_bytes` at the worst moment of the backward, when one block has been
    computed again; `extra_s` is what computing them again takes. `undo()` gives the model its own forward back.
    """

    paths: tuple[str, ...]
    kept_bytes: int
    now_bytes: int
    extra_s: float
    undo: Undo


class Storage(NamedTuple):
    """Memory that is kept for the backward: by which blocks (-1: outside all), and into which it goes."""

    num_bytes: int
    savers: frozenset[int]
    enters: frozenset[int]


def recompute_within(module: nn.Module, num_bytes: int, step: Callable[[], Tensor]) -> Recomputed:
    """Have blocks recomputed, the cheap ones first, until what is saved for the backward is within `num_bytes`.

    `step` computes the loss on a usual batch. It is called twice, without a backward, and counted: what each of the model's
    repeated blocks saves, how long its forward takes. Random numbers and buffers are put back after it. Blocks that count what
    they see (batch norm's running statistics) would count twice and are not recomputed.

    Raises UsageError when no more of them free enough; the message says how far it came.
    """
    blocks = repeated_blocks(module)
    storages, seconds = _observed(module, [block for _, block in blocks], step)
    chosen = _chosen(storages, seconds, num_bytes)
    before, now = _peak(storages, frozenset()), _peak(storages, chosen)
    if now > num_bytes:
        raise UsageError(
            f"{num_bytes} bytes are not enough: of {before} that a step keeps for its backward {now} are left when "
            f"{len(chosen)} of {len(blocks)} blocks are recomputed, and no others free more; give as much, or a smaller batch"
        )
    undo = recompute_blocks([blocks[number][1] for number in sorted(chosen)])
    return Recomputed(
        paths=tuple(blocks[number][0] for number in sorted(chosen)),
        kept_bytes=before,
        now_bytes=now,
        extra_s=sum(seconds[number] for number in chosen),
        undo=undo,
    )


def _chosen(storages: Sequence[Storage], seconds: Sequence[float], num_bytes: int) -> frozenset[int]:
    """Blocks that bring the peak below, by seconds a byte, without those that turn out not to be needed.

    Where none do, those of the lowest peak on the way.
    """
    chosen = lowest = frozenset[int]()
    left = set(range(len(seconds)))
    peak = _peak(storages, chosen)
    while peak > num_bytes and left:
        freed = {n: _kept(storages, chosen) - _kept(storages, chosen | {n}) for n in left}
        best = min(left, key=lambda n: (seconds[n] + 1e-9) / max(freed[n], 1e-3))
        left.remove(best)
        chosen |= {best}
        peak = _peak(storages, chosen)
        lowest = min(lowest, chosen, key=lambda c: _peak(storages, c))
    if peak > num_bytes:
        return lowest
    for number in sorted(chosen, key=lambda n: -seconds[n]):
        if _peak(storages, chosen - {number}) <= num_bytes:
            chosen -= {number}
    return chosen


def _kept(storages: Sequence[Storage], chosen: frozenset[int]) -> int:
    """Bytes from the forward on: a recomputed block keeps what goes into it instead of what it saves."""
    return sum(s.num_bytes for s in storages if not s.savers <= chosen or s.enters & chosen)


def _peak(storages: Sequence[Storage], chosen: frozenset[int]) -> int:
    """Bytes while the block that saves most is computed again."""
    own = [
        sum(s.num_bytes for s in storages if n in s.savers and s.savers <= chosen and not s.enters & chosen)
        for n in chosen
    ]
    return _kept(storages, chosen) + max(own, default=0)


def _observed(
    module: nn.Module, blocks: Sequence[nn.Module], step: Callable[[], Tensor]
) -> tuple[list[Storage], list[float]]:
    """What one step saves, and seconds of each block's forward; of the second call."""
    devices = [p.device for p in module.parameters() if p.is_cuda]
    buffers, numbers = copied(dict(module.named_buffers())), random_state()
    try:
        with torch.random.fork_rng(devices=sorted({d.index or 0 for d in devices}), device_type="cuda"):
            step()
            with _watching(module, blocks) as watch:
                step()
            return watch.storages(), watch.seconds()
    finally:
        set_random_state(numbers)
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])


class _Watch:
    """Notes what is saved while which block runs."""

    def __init__(self, module: nn.Module, num_blocks: int) -> None:
        self._own = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers()]}
        self._running: list[int] = []
        self._alive: list[Tensor] = []  # so that no address is given away twice
        self._bytes: dict[int, int] = {}
        self._savers: dict[int, set[int]] = {}
        self._enters: dict[int, set[int]] = {}
        self._marks: list[list[Any]] = [[] for _ in range(num_blocks)]

    def pack(self, tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() not in self._own:
            place = tensor.untyped_storage().data_ptr()
            self._alive.append(tensor)
            self._bytes[place] = tensor.untyped_storage().nbytes()
            self._savers.setdefault(place, set()).add(self._running[-1] if self._running else -1)
        return tensor

    def enter(self, number: int, inputs: Sequence[Any]) -> None:
        if not self._running:
            for tensor in inputs:
                if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                    self._alive.append(tensor)
                    self._bytes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                    self._enters.setdefault(tensor.untyped_storage().data_ptr(), set()).add(number)
            self._marks[number].append(_mark(inputs))
        self._running.append(number)

    def leave(self, number: int, inputs: Sequence[Any]) -> None:
        self._running.pop()
        if not self._running:
            self._marks[number].append(_mark(inputs))

    def storages(self) -> list[Storage]:
        return [
            Storage(size, frozenset(self._savers.get(place, ())), frozenset(self._enters.get(place, ())))
            for place, size in self._bytes.items()
        ]

    def seconds(self) -> list[float]:
        return [sum(map(_between, marks[::2], marks[1::2])) for marks in self._marks]


@contextmanager
def _watching(module: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[_Watch]:
    watch = _Watch(module, len(blocks))
    handles = []
    for number, block in enumerate(blocks):

        def enter(_: nn.Module, args: Any, kwargs: Any, number: int = number) -> None:
            watch.enter(number, (*args, *kwargs.values()))

        def leave(_: nn.Module, args: Any, kwargs: Any, out: Any, number: int = number) -> None:
            watch.leave(number, (*args, *kwargs.values()))

        handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(block.register_forward_hook(leave, with_kwargs=True))
    try:
        with torch.autograd.graph.saved_tensors_hooks(watch.pack, lambda tensor: tensor):
            yield watch
    finally:
        for handle in handles:
            handle.remove()


def _mark(inputs: Sequence[Any]) -> Any:
    """A moment of the device that the inputs are on."""
    if not any(isinstance(t, Tensor) and t.is_cuda for t in inputs):
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(began: Any, ended: Any) -> float:
    if isinstance(began, float):
        return float(ended - began)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3
