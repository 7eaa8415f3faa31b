"""Copies of a rank's state in memory that outlives it: on its own node, and with a buddy on another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from flatout.surviving.agreement import Reading, Seen, Table
from flatout.surviving.seat import Seat
from flatout.surviving.slots import Copy, Slot, head_of, read_copy
from flatout.surviving.sums import Picture, picture
from flatout.training.staging import Staging

_PAGE: Final = 4096
_BESIDE: Final = 0.5
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
        seat: Seat,
        *,
        rank: int,
        num_ranks: int,
        group: dist.ProcessGroup | None,
        buddies: list[int | None],
        meet: Callable[[], None] | None = None,
    ) -> None:
        self._seat, self._rank, self._num_ranks, self._group = seat, rank, num_ranks, group
        self._meet = meet
        self._buddy = buddies[rank]
        self._senders = [other for other, buddy in enumerate(buddies) if buddy == rank]
        self._own = self._slots("own", rank)
        self._held = {other: self._slots("held", other) for other in self._senders}
        self._staging = Staging()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copies")
        self._under_way: Future[None] | None = None
        self._took_s: float | None = None

    def write(self, step: int, parts: Mapping[str, Any], step_s: float | None = None) -> float:
        """Copy the state after so many steps, each of which takes `step_s`; it may go on after the return. Seconds of the call.

        On return all ranks' copies of the state before are whole.
        """
        began = perf_counter()
        self.wait()
        if self._meet is not None:
            self._meet()
        taken = picture(parts, self._rank)
        if any(part.local.is_cuda for part in taken.tensors.values()):
            staged = self._staging.copy({name: part.local.detach() for name, part in taken.tensors.items()})

            def finish() -> None:
                staged.wait()
                tensors = {n: part._replace(local=staged.tensors[n]) for n, part in taken.tensors.items()}
                self._exchange(self._written(step, taken._replace(tensors=tensors)))
                self._took_s = perf_counter() - began

            self._under_way = self._thread.submit(finish)
        else:
            slot = self._written(step, taken)

            def send() -> None:
                self._exchange(slot)
                self._took_s = perf_counter() - began

            if self._buddy is not None or self._senders:
                self._under_way = self._thread.submit(send)
        if step_s is None or self._took_s is None or self._took_s > _BESIDE * step_s:
            self.wait()
        return perf_counter() - began

    def wait(self) -> None:
        """Until the last copy is where it belongs. Raises CheckpointError when there was no room for it."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """Finish what is under way."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _slots(self, kind: str, rank: int) -> tuple[Slot, Slot]:
        one, two = (self._seat.memory / f"{kind}-{rank:05}-of-{self._num_ranks:05}.{n}" for n in (0, 1))
        return Slot(one), Slot(two)

    def _written(self, step: int, taken: Picture) -> Slot:
        slot = _older(self._own)
        ranks = (self._rank, self._num_ranks)
        slot.write(step, self._seat.job, ranks, taken.plain, taken.tensors, is_scattered=taken.is_scattered)
        return slot

    def _exchange(self, slot: Slot) -> None:
        """Send the copy to the buddy, and take those of the ranks that this one is the buddy of; headers come last."""
        head = slot.head
        assert head is not None
        size = head.num_bytes
        works: list[dist.Work | None] = []
        if self._buddy is not None:
            whole = slot.bytes_of(size)
            works.append(dist.isend(torch.tensor([size]), self._buddy, group=self._group))
            works += [dist.isend(piece, self._buddy, group=self._group) for piece in whole[_PAGE:].split(_PIECE)]
            works.append(dist.isend(whole[:_PAGE].clone(), self._buddy, group=self._group))
        for other in self._senders:
            coming = torch.zeros(1, dtype=torch.int64)
            dist.recv(coming, other, group=self._group)
            target = _older(self._held[other])
            for piece in target.room_for(int(coming)).split(_PIECE):
                dist.recv(piece, other, group=self._group)
            page = torch.zeros(_PAGE, dtype=torch.uint8)
            dist.recv(page, other, group=self._group)
            target.seal(page.numpy().tobytes())
        for work in works:
            if work is not None:
                work.wait()


def _older(slots: tuple[Slot, Slot]) -> Slot:
    """The one to be written: with nothing whole in it, or the older state."""
    return min(slots, key=lambda slot: slot.head.step if slot.head is not None else -1)


# -- after a failure ---------------------------------------------------------------------------------------------------------


def table(seat: Seat) -> Table:
    """What lies in this node's memory and looks whole. Own copies come before those that are held for other nodes."""
    found: dict[tuple[int, int, int], Seen] = {}
    for path in sorted(seat.memory.glob("*-of-*"), reverse=True):
        head = _head(path)
        if head is not None and head.job == seat.job:
            key = (head.step, head.rank, head.num_ranks)
            found.setdefault(key, Seen(head.step, head.rank, head.num_ranks, head.is_sharded, path.name))
    return Table(seat.node, tuple(found.values()))


def _head(path: Path) -> Any:
    with suppress(OSError), path.open("rb") as file:
        return head_of(file.read(_PAGE))
    return None


def read(seat: Seat, reading: Reading) -> tuple[dict[int, Copy], dict[int, Copy]]:
    """The copies that this rank loads, and those that it sends, each found whole. Raises CheckpointError."""
    loads = {rank: read_copy(seat.memory / file) for rank, file in reading.files.items()}
    sends = {rank: read_copy(seat.memory / file) for rank, file in reading.sends}
    return loads, sends


def brought(reading: Reading, sends: Mapping[int, Copy], rank: int, group: dist.ProcessGroup | None) -> dict[int, Copy]:
    """This rank's own copy from another node, and what others want from here; all ranks call it. Raises CheckpointError."""
    works = []
    for other, copy in sends.items():
        works.append(dist.isend(torch.tensor([copy.data.numel()]), other, group=group))
        works += [dist.isend(piece, other, group=group) for piece in copy.data.split(_PIECE)]
    data: Tensor | None = None
    if reading.sender is not None:
        coming = torch.zeros(1, dtype=torch.int64)
        dist.recv(coming, reading.sender, group=group)
        data = torch.empty(int(coming), dtype=torch.uint8)
        for piece in data.split(_PIECE):
            dist.recv(piece, reading.sender, group=group)
    for work in works:
        if work is not None:
            work.wait()
    return {rank: Copy(data, f"what rank {reading.sender} sent")} if data is not None else {}


def forget(seat: Seat, *, after: int) -> None:
    """Erase this node's copies of later steps than this: they are of a course that is not gone on with."""
    for path in seat.memory.glob("*-of-*"):
        head = _head(path)
        if head is not None and head.step > after:
            Slot(path).erase()


def forget_others(seat: Seat, num_ranks: int) -> None:
    """Remove copies of another number of ranks, once there are new ones for all."""
    for path in seat.memory.glob("*-of-*"):
        if f"-of-{num_ranks:05}." not in path.name:
            path.unlink(missing_ok=True)
