"""A training's state, kept at each step in memory that outlives the process and now and then on the disk; and brought back."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Final, Literal, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from flatout.errors import CheckpointError, UsageError
from flatout.surviving.agreement import Reading, Table, buddies, plans
from flatout.surviving.buckets import settle
from flatout.surviving.interval import Every, Interval
from flatout.surviving.memory import MemoryCopies, brought, forget, forget_others, read, table
from flatout.surviving.seat import seat
from flatout.surviving.slots import Copy, index_of
from flatout.surviving.sums import first_difference, kept_sums, picture, sums_of
from flatout.training.checkpoint_files import Chunk, Index, read_index
from flatout.training.checkpoint_parts import RANDOM, bare, numbers_of, states_of
from flatout.training.checkpoints import Checkpoints
from flatout.training.random_state import set_random_state

Value = TypeVar("Value")
_PATIENCE: Final = timedelta(minutes=30)


class Survivor:
    """`resume(model=model, ...)` at the beginning, `keep(step, model=model, ...)` after each optimizer step.

    Under `flatout survive` each rank's state lies in its node's memory: two copies in turn, whole or not there, `every` so many
    steps; ranks of several nodes also hold one another's (`buddy`: 'nodes'; 'ranks' also within a node; 'none'). Every
    `disk_every` steps it goes to the disk, as `Checkpoints` in `folder`. Started otherwise, only the disk is left.

    `resume` brings back the newest step that all ranks have, from memory, else from the disk, also for another number of ranks;
    returns it, or 0 when there is none; and proves that what is there is what was kept, tensor by tensor: it raises
    CheckpointError with the name of the first that differs. Parts are those of `Checkpoints`. Give the model as it is called:
    DistributedDataParallel gets its final buckets, so that a step adds up as it would have without a restart.

    Either interval may be 'measured': after eight steps it is the best for the stall, the step and the restart as they were
    measured, and for `mtbf_s` seconds between failures. A save to the disk that fails is told to all ranks, as a warning; when
    `disk_failures` have failed in a row, as CheckpointError. A copy to memory that fails is an error at once.
    """

    def __init__(
        self,
        folder: str | Path | None,
        *,
        every: Every = 1,
        disk_every: Every | None = None,
        mtbf_s: float | None = None,
        keep: int = 2,
        buddy: Literal["nodes", "ranks", "none"] = "nodes",
        disk_failures: int = 3,
        timeout: timedelta = _PATIENCE,
    ) -> None:
        if disk_failures < 1 or (folder is None and disk_every is not None):
            raise UsageError(
                f"disk_failures {disk_failures}, disk_every {disk_every!r} in folder {folder!r}; give 1 or more, and a folder"
            )
        self._every = Interval(every, mtbf_s, "every")
        self._disk_every = Interval(disk_every, mtbf_s, "disk_every")
        self._folder, self._most = folder, disk_failures
        self._seat = seat()
        self._is_many = dist.is_initialized() and dist.get_world_size() > 1
        self._rank = dist.get_rank() if self._is_many else 0
        self._num_ranks = dist.get_world_size() if self._is_many else 1
        self._group = dist.new_group(backend="gloo", timeout=timeout) if self._is_many else None
        self._disk = Checkpoints(folder, keep=keep, timeout=timeout) if folder is not None else None
        self._memory = self._copies(buddy, timeout) if self._seat is not None else None
        self._in_a_row = self._num_kept = 0
        self._last_s: float | None = None
        self.failed_saves: list[str] = []
        """What was said of each save to the disk that failed."""

    def _copies(self, buddy: str, timeout: timedelta) -> MemoryCopies:
        assert self._seat is not None
        nodes = self._gathered(self._seat.node)
        pairs: list[int | None] = [None] * self._num_ranks
        if buddy != "none":
            pairs = buddies(nodes, is_within=buddy == "ranks")
        has_any = any(pair is not None for pair in pairs)
        group = dist.new_group(backend="gloo", timeout=timeout) if has_any else None
        go_on_beside = has_any or torch.cuda.is_available()
        meet = partial(dist.barrier, group=self._group) if self._is_many and go_on_beside else None
        return MemoryCopies(
            self._seat, rank=self._rank, num_ranks=self._num_ranks, group=group, buddies=pairs, meet=meet
        )

    def __enter__(self) -> Survivor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        elif self._disk is not None:
            self._disk.__exit__(kind, error, tb)

    def close(self) -> None:
        """Finish what is under way. Raises CheckpointError when the last save to the disk has failed."""
        try:
            if self._memory is not None:
                self._memory.close()
        finally:
            if self._disk is not None:
                self._disk.close()

    # -- keeping -------------------------------------------------------------------------------------------------------------

    def keep(self, step: int, /, **parts: Any) -> None:
        """Keep the state after `step` optimizer steps, where that is due. All ranks call it together.

        Raises UsageError for what cannot be kept, CheckpointError as told above.
        """
        if type(step) is not int or step < 0 or not parts or RANDOM in parts:
            raise UsageError(
                f"step {step!r}, parts {sorted(parts)}: give the number of steps done, and one part or more, "
                f"none of them named '{RANDOM}'"
            )
        began = perf_counter()
        step_s = began - self._last_s if self._last_s is not None else None
        is_due = self._memory is not None and self._every.is_due(step)
        if self._seat is not None and not is_due:
            self._seat.reach(step)
        if self._memory is not None and is_due:
            stall_s = self._memory.write(step, parts, step_s)
            if self._seat is not None:  # the state before is safe on all ranks
                self._seat.reach(step)
            self._settled(self._every, stall_s, step_s)
            self._num_kept += 1
            if self._num_kept == _SURE and self._seat is not None:
                forget_others(self._seat, self._num_ranks)
        if self._disk is not None and self._disk_every.is_due(step):
            before = perf_counter()
            self._save(self._disk, step, parts)
            self._settled(self._disk_every, perf_counter() - before, step_s)
        self._last_s = perf_counter()

    def alive(self) -> None:
        """Tell the supervisor that something goes on that takes long and is no step, such as an evaluation."""
        if self._seat is not None:
            self._seat.advance()

    def _save(self, disk: Checkpoints, step: int, parts: Mapping[str, Any]) -> None:
        try:
            disk.wait()
            if disk.saved:
                self._in_a_row = 0
        except CheckpointError as e:
            self._in_a_row += 1
            self.failed_saves.append(str(e))
            if self._in_a_row >= self._most:
                raise CheckpointError(f"{self._in_a_row} saves in a row failed; the last: {e}") from e
            if self._rank == 0:
                warnings.warn(f"{e}; the training goes on", stacklevel=3)
        disk.save(step, **parts)

    def _settled(self, interval: Interval, stall_s: float, step_s: float | None) -> None:
        if interval.note(stall_s, step_s):
            all_s = self._gathered(list(interval.measured))  # of all ranks the slowest counts
            restart_s = (self._seat.restart_s if self._seat is not None else None) or 0.0
            restart_s = max(self._gathered(restart_s))
            interval.settle(max(s[0] for s in all_s), max(s[1] for s in all_s), restart_s)

    # -- resuming ------------------------------------------------------------------------------------------------------------

    def resume(self, **parts: Any) -> int:
        """Give the parts the newest state that all ranks have; its step, 0 when there is none. All ranks call it together.

        Raises CheckpointError when what is there is damaged, or is not what was kept; UsageError when it is of other parts.
        """
        for part in parts.values():
            settle(part)
        step = self._brought_back(parts)
        if self._seat is not None:
            if self._is_first_of_node:
                forget(self._seat, after=step)
            self._gathered(None)
            self._seat.resume(step)
        return step

    def _brought_back(self, parts: Mapping[str, Any]) -> int:
        on_disk = self._gathered(self._disk.steps if self._disk is not None else [])[0]
        newest = on_disk[-1] if on_disk else -1
        tables = [msgspec.convert(t, Table) for t in self._gathered(self._seen())]
        self._nodes = [t.node for t in tables]
        for step, readings in plans(tables):
            if newest > step and self._from_disk(parts, newest):
                return newest
            newest = -1
            if self._from_memory(step, readings[self._rank], parts):
                return step
        if self._disk is None or not on_disk:
            return 0
        found = self._disk.load(**parts)
        if found is None:
            return 0
        self._check(self._index_of(found), parts)
        return found

    def _seen(self) -> Any:
        seen = table(self._seat) if self._seat is not None else Table(0, ())
        return msgspec.to_builtins(seen)

    @property
    def _is_first_of_node(self) -> bool:
        return self._nodes.index(self._nodes[self._rank]) == self._rank

    def _from_disk(self, parts: Mapping[str, Any], step: int) -> bool:
        """Whether the checkpoint of that step was whole, and is loaded."""
        assert self._disk is not None
        try:
            self._disk.load(step, **parts)
        except CheckpointError as e:
            self._warn(str(e))
            return False
        self._check(self._index_of(step), parts)
        return True

    def _index_of(self, step: int) -> Index:
        assert self._folder is not None
        return read_index(Path(self._folder) / f"step-{step}")

    def _from_memory(self, step: int, reading: Reading, parts: Mapping[str, Any]) -> bool:
        """Whether all ranks' copies of that step were whole, and are loaded."""
        place = self._seat
        assert place is not None
        try:
            loads, sends = self._tried(lambda: read(place, reading))
            loads |= self._tried(lambda: brought(reading, sends, self._rank, self._group))
            index = index_of(loads)
            states, numbers = self._tried(lambda: self._states(index, loads, parts))
        except CheckpointError as e:
            self._warn(str(e))
            return False
        for name, part in parts.items():
            bare(part).load_state_dict(states[name])
        if numbers is not None:
            set_random_state(numbers)
        self._check(index, parts)
        return True

    def _states(self, index: Index, loads: Mapping[int, Copy], parts: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        fetch = partial(_fetched, loads)
        is_same = index.num_ranks == self._num_ranks
        states = states_of(index, parts, "the copy in memory", fetch)
        return states, numbers_of(index, self._rank, fetch) if is_same else None

    def _check(self, index: Index, parts: Mapping[str, Any]) -> None:
        """Raises CheckpointError, on all ranks, when the parts are not what was kept."""

        def check() -> None:
            live = picture(parts, self._rank)
            kept = kept_sums(index, parts, self._rank if index.num_ranks == self._num_ranks else -1, live.tensors)
            now = sums_of(live)
            drawn_from = {_generator(name) for name in kept}  # one that was not used then is none of the state
            now = {name: text for name, text in now.items() if _generator(name) in drawn_from}
            said = first_difference(kept, now)
            if said is not None:
                raise CheckpointError(f"the state of step {index.step} came back changed: {said}")

        self._tried(check)

    # -- among ranks ---------------------------------------------------------------------------------------------------------

    def _tried(self, action: Callable[[], Value]) -> Value:
        """What it returns, once it has succeeded on every rank. Raises CheckpointError on all of them otherwise."""
        value: Any = None
        mistake: UsageError | None = None
        try:
            value, why = action(), ""
        except UsageError as e:
            mistake, why = e, str(e)
        except (OSError, CheckpointError, RuntimeError) as e:
            why = str(e) or type(e).__name__
        wrong = {rank: said for rank, said in enumerate(self._gathered(why)) if said}
        if mistake is not None:
            raise mistake
        if wrong:
            rank, said = next(iter(wrong.items()))
            raise CheckpointError(f"rank {rank}: {said}")
        return value  # type: ignore[no-any-return]

    def _gathered(self, value: Value) -> list[Value]:
        """Every rank's value, as JSON holds it."""
        if self._group is None:
            return [value]
        told: list[str] = [""] * self._num_ranks
        dist.all_gather_object(told, json.dumps(value), group=self._group)
        return [json.loads(one) for one in told]

    def _warn(self, said: str) -> None:
        if self._rank == 0:
            warnings.warn(f"passed over: {said}", stacklevel=4)


def _generator(name: str) -> str:
    """Which random numbers a sum is of; '' for a part's."""
    top, _, rest = name.partition("/")
    return rest.partition("/")[0] if top == RANDOM else ""


_SURE: Final = 3
"""When a rank keeps a state for the third time, all have kept one for the first."""


def _fetched(loads: Mapping[int, Copy], name: str, chunk: Chunk, there: tuple[slice, ...]) -> Tensor:
    whole = loads[int(chunk.file)].tensor(name)
    return whole[there] if there else whole
