"""Activations of a model's repeated blocks computed again in the backward: of some, or of as many as a budget asks for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import ceil
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatout.blocks.training.snapshot import copied, random_state, set_random_state
from flatout.core.errors import UsageError
from flatout.core.runtime.patches import replace_forward

Undo = Callable[[], None]


def recompute(module: nn.Module, *, fraction: float = 1.0, container: str = "") -> tuple[tuple[str, ...], Undo]:
    """Have the first blocks of a model recomputed in training: paths of those that will be, and how to undo it.

    Blocks are the modules of one class and one set of shapes beside one another in `container` (a path; '' searches for the
    container whose blocks hold most parameters). Random masks are drawn again as they were, and precisions are kept. Blocks that
    count what they see (batch norm's running statistics) would count twice and are left out.

    Raises ValueError for a fraction outside 0..1.
    """
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"fraction is {fraction} and must be between 0 and 1")
    blocks = [b for b in blocks_of(module, container) if not _counts(b[1])]
    selected = blocks[: ceil(fraction * len(blocks))]
    return tuple(path for path, _ in selected), recompute_blocks([block for _, block in selected])


def recompute_blocks(
    blocks: Sequence[nn.Module], *, within: Callable[[], AbstractContextManager[object]] | None = None
) -> Undo:
    """Have these modules recomputed in training, their forwards, the first and the second, inside of `within()`.

    Returns:
        What gives the modules their own forwards back.
    """
    undos = [replace_forward(block, _recomputed(block, within)) for block in blocks]

    def undo() -> None:
        for undo_one in undos:
            undo_one()

    return undo


def recomputable_blocks(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules that could be recomputed: the outermost that lie beside others of their kind, with their paths, in order."""
    found: list[tuple[str, nn.Module]] = []
    for path, holder in module.named_modules():
        inside = any(path == p or path.startswith(f"{p}.") for p, _ in found)
        found += [] if inside else [b for group in _alike(path, holder) for b in group if not _counts(b[1])]
    return found


def blocks_of(module: nn.Module, container: str = "") -> list[tuple[str, nn.Module]]:
    """The repeated blocks with their paths, in order; empty where there are none."""
    groups = [g for path, holder in module.named_modules() if container in ("", path) for g in _alike(path, holder)]
    return max(groups, key=lambda g: sum(p.numel() for _, b in g for p in b.parameters()), default=[])


def _alike(path: str, holder: nn.Module) -> Iterator[list[tuple[str, nn.Module]]]:
    """Groups of at least two equal children that have parts of their own: one layer alone keeps its input either way."""
    groups: dict[tuple[object, ...], list[tuple[str, nn.Module]]] = {}
    for name, child in holder.named_children():
        shapes = tuple(p.shape for p in child.parameters())
        if shapes and next(child.children(), None) is not None and "forward" not in vars(child):
            groups.setdefault((type(child), shapes), []).append((f"{path}.{name}" if path else name, child))
    yield from (g for g in groups.values() if len(g) > 1)


def _counts(block: nn.Module) -> bool:
    return any(name.rpartition(".")[2] in ("num_batches_tracked", "running_mean") for name, _ in block.named_buffers())


def _recomputed(block: nn.Module, within: Callable[[], AbstractContextManager[object]] | None) -> Callable[..., Any]:
    original = block.forward

    def inside(*args: Any, **kwargs: Any) -> Any:
        if within is None:
            return original(*args, **kwargs)
        with within():
            return original(*args, **kwargs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not block.training or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        return checkpoint(original if within is None else inside, *args, use_reentrant=False, **kwargs)

    return forward


# -- as much as a budget of memory asks for ----------------------------------------------------------------------------------


class Recomputed(NamedTuple):
    """What is recomputed within a budget. Bytes are of tensors kept for the backward, beside weights and buffers.

    `saved_bytes` are kept before any is recomputed; `now_bytes` at the worst moment of the backward, when one block has been
    computed again; `extra_s` is what computing them again takes. `undo()` gives the model its own forward back.
    """

    paths: tuple[str, ...]
    saved_bytes: int
    now_bytes: int
    extra_s: float
    undo: Undo


class SavedStorage(NamedTuple):
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
    blocks = recomputable_blocks(module)
    storages, seconds = _observed(module, [block for _, block in blocks], step)
    selected = _select(storages, seconds, num_bytes)
    before, now = _peak(storages, frozenset()), _peak(storages, selected)
    if now > num_bytes:
        raise UsageError(
            f"{num_bytes} bytes are not enough: of {before} that a step saves for its backward {now} are left when "
            f"{len(selected)} of {len(blocks)} blocks are recomputed, and no others free more; give as much, or a smaller batch"
        )
    undo = recompute_blocks([blocks[number][1] for number in sorted(selected)])
    return Recomputed(
        paths=tuple(blocks[number][0] for number in sorted(selected)),
        saved_bytes=before,
        now_bytes=now,
        extra_s=sum(seconds[number] for number in selected),
        undo=undo,
    )


def _select(storages: Sequence[SavedStorage], seconds: Sequence[float], num_bytes: int) -> frozenset[int]:
    """Blocks that bring the peak below, by seconds a byte, without those that turn out not to be needed.

    Where none do, those of the lowest peak on the way.
    """
    selected = lowest = frozenset[int]()
    left = set(range(len(seconds)))
    peak = _peak(storages, selected)
    while peak > num_bytes and left:
        freed = {n: _saved_bytes(storages, selected) - _saved_bytes(storages, selected | {n}) for n in left}
        best = min(left, key=lambda n: (seconds[n] + 1e-9) / max(freed[n], 1e-3))
        left.remove(best)
        selected |= {best}
        peak = _peak(storages, selected)
        lowest = min(lowest, selected, key=lambda c: _peak(storages, c))
    if peak > num_bytes:
        return lowest
    for number in sorted(selected, key=lambda n: -seconds[n]):
        if _peak(storages, selected - {number}) <= num_bytes:
            selected -= {number}
    return selected


def _saved_bytes(storages: Sequence[SavedStorage], selected: frozenset[int]) -> int:
    """Bytes from the forward on: a recomputed block keeps what goes into it instead of what it saves."""
    return sum(s.num_bytes for s in storages if not s.savers <= selected or s.enters & selected)


def _peak(storages: Sequence[SavedStorage], selected: frozenset[int]) -> int:
    """Bytes while the block that saves most is computed again."""
    own = [
        sum(s.num_bytes for s in storages if n in s.savers and s.savers <= selected and not s.enters & selected)
        for n in selected
    ]
    return _saved_bytes(storages, selected) + max(own, default=0)


def _observed(
    module: nn.Module, blocks: Sequence[nn.Module], step: Callable[[], Tensor]
) -> tuple[list[SavedStorage], list[float]]:
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
        self._savers: defaultdict[int, set[int]] = defaultdict(set)
        self._enters: defaultdict[int, set[int]] = defaultdict(set)
        self._timestamps: list[list[Any]] = [[] for _ in range(num_blocks)]

    def _note(self, tensor: Tensor) -> int:
        """The address of the tensor's memory."""
        storage = tensor.untyped_storage()
        self._alive.append(tensor)
        self._bytes[storage.data_ptr()] = storage.nbytes()
        return storage.data_ptr()

    def pack(self, tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() not in self._own:
            self._savers[self._note(tensor)].add(self._running[-1] if self._running else -1)
        return tensor

    def enter(self, number: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._running:
            inputs = (*args, *kwargs.values())
            for tensor in inputs:
                if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                    self._enters[self._note(tensor)].add(number)
            self._timestamps[number].append(_timestamp(inputs))
        self._running.append(number)

    def leave(self, number: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self._running.pop()
        if not self._running:
            self._timestamps[number].append(_timestamp((*args, *kwargs.values())))

    def storages(self) -> list[SavedStorage]:
        return [
            SavedStorage(size, frozenset(self._savers[place]), frozenset(self._enters[place]))
            for place, size in self._bytes.items()
        ]

    def seconds(self) -> list[float]:
        return [sum(map(_between, stamps[::2], stamps[1::2])) for stamps in self._timestamps]


@contextmanager
def _watching(module: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[_Watch]:
    watch = _Watch(module, len(blocks))
    handles = []
    for number, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(partial(watch.enter, number), with_kwargs=True))
        handles.append(block.register_forward_hook(partial(watch.leave, number), with_kwargs=True))
    try:
        with torch.autograd.graph.saved_tensors_hooks(watch.pack, lambda tensor: tensor):
            yield watch
    finally:
        for handle in handles:
            handle.remove()


def _timestamp(inputs: Sequence[Any]) -> Any:
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
