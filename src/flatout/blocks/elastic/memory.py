"""Copies of a rank's state in memory that outlives it, here and with a buddy on another node, and which one all go on from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from flatout.blocks.elastic.memory_slots import MemorySlot, StateCopy, parse_header, read_copy
from flatout.blocks.elastic.messages import RankContext
from flatout.blocks.training.checkpoint_parts import SplitState, split_state
from flatout.blocks.training.staging import Staging

_PAGE: Final = 4096
_OVERLAP_FRACTION: Final = 0.5
"""Of a step: a copy that takes less is whole well before the next step is done."""
_PIECE: Final = 256 << 20
"""What is sent to another rank at once."""


class MemoryCopies:
    """Writes one rank's copies: on a CPU at once, from a GPU in stream order by a thread, which then sends it to the buddy.

    A copy goes on beside the next step where it takes less than half of one: else a failure would cost more than that step.

    `buddies` are, by rank, who holds a copy of it; None for nobody. The group is of gloo, and of nobody else. `meet` returns when
    all ranks have called it: where copies go on beside the training, no rank may write over a state before all have the next one
    whole, or there would be none that all have.
    """

    def __init__(
        self,
        context: RankContext,
        *,
        rank: int,
        num_ranks: int,
        group: dist.ProcessGroup | None,
        buddies: list[int | None],
        meet: Callable[[], None] | None = None,
    ) -> None:
        self._context, self._rank, self._num_ranks, self._group = context, rank, num_ranks, group
        self._meet = meet
        self._buddy = buddies[rank]
        self._senders = [other for other, buddy in enumerate(buddies) if buddy == rank]
        self._own = self._memory_slots("own", rank)
        self._received = {other: self._memory_slots("buddy", other) for other in self._senders}
        self._staging = Staging()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copies")
        self._pending: Future[None] | None = None
        self._took_s: float | None = None

    def write(self, step: int, parts: Mapping[str, Any], step_s: float | None = None) -> float:
        """Copy the state after so many steps, each of which takes `step_s`; it may go on after the return. Seconds of the call.

        On return all ranks' copies of the state before are whole.
        """
        began = perf_counter()
        self.wait()
        if self._meet is not None:
            self._meet()
        state = split_state(parts, self._rank)
        if any(part.local.is_cuda for part in state.tensors.values()):
            staged = self._staging.copy({name: part.local.detach() for name, part in state.tensors.items()})

            def write() -> None:
                staged.wait()
                tensors = {n: part._replace(local=staged.tensors[n]) for n, part in state.tensors.items()}
                self._finish(self._write_own(step, state._replace(tensors=tensors)), began)

            self._pending = self._thread.submit(write)
        else:
            memory_slot = self._write_own(step, state)
            if self._buddy is not None or self._senders:
                self._pending = self._thread.submit(self._finish, memory_slot, began)
        if step_s is None or self._took_s is None or self._took_s > _OVERLAP_FRACTION * step_s:
            self.wait()
        return perf_counter() - began

    def wait(self) -> None:
        """Wait until the last copy is where it belongs. Raises CheckpointError when there was no room for it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Finish the copy that is being written."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _memory_slots(self, kind: str, rank: int) -> tuple[MemorySlot, MemorySlot]:
        one, two = (self._context.memory / f"{kind}-{rank:05}-of-{self._num_ranks:05}.{n}" for n in (0, 1))
        return MemorySlot(one), MemorySlot(two)

    def _write_own(self, step: int, state: SplitState) -> MemorySlot:
        memory_slot = _older(self._own)
        memory_slot.write(step, self._context.job, (self._rank, self._num_ranks), state)
        return memory_slot

    def _finish(self, memory_slot: MemorySlot, began: float) -> None:
        self._exchange(memory_slot)
        self._took_s = perf_counter() - began

    def _exchange(self, memory_slot: MemorySlot) -> None:
        """Send the copy to the buddy, and take those of the ranks that this one is the buddy of; headers come last."""
        head = memory_slot.head
        assert head is not None
        works: list[dist.Work] = []
        if self._buddy is not None:
            whole = memory_slot.bytes_of(head.num_bytes)
            works += _send(whole[_PAGE:], self._buddy, self._group) + _send(
                whole[:_PAGE].clone(), self._buddy, self._group
            )
        for other in self._senders:
            target = _older(self._received[other])
            _receive(target.room_for, other, self._group)
            page = _receive(_bytes, other, self._group)
            target.seal(page.numpy().tobytes())
        for work in works:
            work.wait()


def _send(data: Tensor, to: int, group: dist.ProcessGroup | None) -> list[dist.Work]:
    """Begin to send bytes to a rank, their number first."""
    pieces = (torch.tensor([data.numel()]), *data.split(_PIECE))
    return [work for piece in pieces if (work := dist.isend(piece, to, group=group)) is not None]


def _receive(room: Callable[[int], Tensor], sender: int, group: dist.ProcessGroup | None) -> Tensor:
    """Receive such bytes into the `room` that there is for so many."""
    coming = torch.zeros(1, dtype=torch.int64)
    dist.recv(coming, sender, group=group)
    data = room(int(coming))
    for piece in data.split(_PIECE):
        dist.recv(piece, sender, group=group)
    return data


def _bytes(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _older(memory_slots: tuple[MemorySlot, MemorySlot]) -> MemorySlot:
    """The slot to be written: the one with nothing whole in it, or the older state."""
    return min(memory_slots, key=lambda memory_slot: memory_slot.head.step if memory_slot.head is not None else -1)


# -- after a failure ---------------------------------------------------------------------------------------------------------


def copies_on_node(context: RankContext) -> NodeCopies:
    """The copies in this node's memory that look whole. Own ones come before those that are stored for other nodes."""
    found: dict[tuple[int, int, int], StoredCopy] = {}
    for path in sorted(context.memory.glob("*-of-*"), reverse=True):
        head = _head(path)
        if head is not None and head.job == context.job:
            key = (head.step, head.rank, head.num_ranks)
            found.setdefault(key, StoredCopy(head.step, head.rank, head.num_ranks, head.is_sharded, path.name))
    return NodeCopies(context.node, tuple(found.values()))


def _head(path: Path) -> Any:
    with suppress(OSError), path.open("rb") as file:
        return parse_header(file.read(_PAGE))
    return None


def read_copies(context: RankContext, reading: Reading) -> tuple[dict[int, StateCopy], dict[int, StateCopy]]:
    """The copies that this rank loads, and those that it sends, each found whole. Raises CheckpointError."""
    loads = {rank: read_copy(context.memory / file) for rank, file in reading.files.items()}
    sends = {rank: read_copy(context.memory / file) for rank, file in reading.sends}
    return loads, sends


def exchange_copies(
    reading: Reading, sends: Mapping[int, StateCopy], rank: int, group: dist.ProcessGroup | None
) -> dict[int, StateCopy]:
    """Receive this rank's own copy from another node, and send what others need; all ranks call it. Raises CheckpointError."""
    works = [work for other, copy in sends.items() for work in _send(copy.data, other, group)]
    data = _receive(_bytes, reading.sender, group) if reading.sender is not None else None
    for work in works:
        work.wait()
    return {rank: StateCopy(data, f"what rank {reading.sender} sent")} if data is not None else {}


def erase_later_copies(context: RankContext, *, after: int) -> None:
    """Erase this node's copies of later steps than this: they are of a course that is not gone on with."""
    for path in context.memory.glob("*-of-*"):
        head = _head(path)
        if head is not None and head.step > after:
            MemorySlot(path).erase()


def remove_other_copies(context: RankContext, num_ranks: int) -> None:
    """Remove copies of another number of ranks, once there are new ones for all."""
    for path in context.memory.glob("*-of-*"):
        if f"-of-{num_ranks:05}." not in path.name:
            path.unlink(missing_ok=True)


# -- which of them all ranks go on from --------------------------------------------------------------------------------------


class StoredCopy(msgspec.Struct, frozen=True, array_like=True):
    """A copy in a node's memory that looks whole: of the state of `rank` of `num_ranks` after `step`, and its file."""

    step: int
    rank: int
    num_ranks: int
    is_sharded: bool
    file: str


class NodeCopies(msgspec.Struct, frozen=True, array_like=True):
    """What one rank finds: its node, and the copies there."""

    node: int
    copies: tuple[StoredCopy, ...]


class Reading(msgspec.Struct, frozen=True):
    """One rank's part in a plan: which ranks' copies it reads on its node, or who sends its own, and to whom it sends."""

    files: dict[int, str] = {}
    sender: int | None = None
    sends: tuple[tuple[int, str], ...] = ()


def restore_plans(tables: Sequence[NodeCopies]) -> Iterator[tuple[int, list[Reading]]]:
    """Steps from which the job can go on, the newest first, with each rank's reading. All ranks come to the same.

    Copies of as many ranks are read as they are, each rank its own, from another node where there is none on this one. Copies of
    another number of ranks are read where each rank sees all of them, or one if nothing in them is sharded.
    """
    kinds = {(s.step, s.num_ranks) for table in tables for s in table.copies}
    for step, num_ranks in sorted(kinds, key=lambda kind: (-kind[0], kind[1] != len(tables))):
        stored = [{s.rank: s for s in t.copies if (s.step, s.num_ranks) == (step, num_ranks)} for t in tables]
        readings = _same(stored, tables) if num_ranks == len(tables) else _other(stored, num_ranks)
        if readings is not None:
            yield step, readings


def _same(stored: list[dict[int, StoredCopy]], tables: Sequence[NodeCopies]) -> list[Reading] | None:
    readings: list[Reading] = []
    sends: dict[int, list[tuple[int, str]]] = {}
    for rank in range(len(tables)):
        if rank in stored[rank]:
            readings.append(Reading(files={rank: stored[rank][rank].file}))
            continue
        sender = next((other for other, copies in enumerate(stored) if rank in copies), None)
        if sender is None:
            return None
        sends.setdefault(sender, []).append((rank, stored[sender][rank].file))
        readings.append(Reading(sender=sender))
    return [msgspec.structs.replace(r, sends=tuple(sends.get(rank, ()))) for rank, r in enumerate(readings)]


def _other(stored: list[dict[int, StoredCopy]], num_ranks: int) -> list[Reading] | None:
    readings: list[Reading] = []
    for copies in stored:
        if len(copies) == num_ranks:
            readings.append(Reading(files={rank: s.file for rank, s in copies.items()}))
        elif copies and not any(s.is_sharded for s in copies.values()):
            rank = min(copies)
            readings.append(Reading(files={rank: copies[rank].file}))
        else:
            return None
    return readings


def buddies(nodes: Sequence[int], *, is_within: bool) -> list[int | None]:
    """The rank that holds a copy of each rank's state: at the same place of the next node, or, `is_within` one, the next rank.

    >>> buddies([0, 0, 1, 1], is_within=False)
    [2, 3, 0, 1]
    >>> buddies([0, 0], is_within=False)
    [None, None]
    """
    if len(nodes) < 2 or (len(set(nodes)) < 2 and not is_within):
        return [None] * len(nodes)
    if is_within:
        return [(rank + 1) % len(nodes) for rank in range(len(nodes))]
    order = sorted(set(nodes))
    members = {node: [rank for rank, other in enumerate(nodes) if other == node] for node in order}
    found: list[int | None] = []
    for rank, node in enumerate(nodes):
        there = members[order[(order.index(node) + 1) % len(order)]]
        found.append(there[members[node].index(rank) % len(there)])
    return found
