"""A training's state, saved at each step in memory that outlives the process and now and then on the disk; and restored."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from types import TracebackType
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from flatout.blocks.elastic.launched import LaunchedContext, launched_context
from flatout.blocks.elastic.memory import (
    MemoryCopies,
    NodeCopies,
    Reading,
    buddies,
    copies_on_node,
    erase_later_copies,
    exchange_copies,
    read_copies,
    remove_other_copies,
    restore_plans,
)
from flatout.blocks.elastic.memory_slots import first_difference, index_of, saved_sums, sums_of
from flatout.blocks.elastic.messages import rank_context
from flatout.blocks.elastic.preemption import EXIT_CODE, Preempted, PreemptionNotice, usual_signals
from flatout.blocks.training.checkpoint_files import CheckpointIndex, Chunk, read_index
from flatout.blocks.training.checkpoint_parts import RANDOM, LoadedState, check_saved, read_state, split_state
from flatout.blocks.training.checkpoints import Checkpoints, RankAgreement
from flatout.core.errors import CheckpointError, UsageError
from flatout.core.records.failure import Failures, Recovery
from flatout.core.runtime.script import print_to_stderr
from flatout.scale.failures import best_interval_s

_PATIENCE: Final = timedelta(minutes=30)
_SHARED: Final = "/dev/shm"


class Survivor:
    """A training's state, saved so that a job that fails goes on from its last step.

    Call `resume(model=model, ...)` at the beginning, `keep(step, model=model, ...)` after each optimizer step.

    Under `flatout survive`, torchrun, or in a job of Slurm each rank's state lies in its node's memory: two copies in turn, whole
    or not there, `every` so many steps; ranks of several nodes also hold one another's (`buddy`: 'nodes'; 'ranks' also within a
    node; 'none'). Every `disk_every` steps it goes to the disk, as `Checkpoints` in `folder`. Started otherwise, only the disk is
    left.

    `memory` is the folder in memory in which copies lie where another launcher than `flatout survive` starts ranks; None keeps
    none there. Where a node has no room for them, rank 0 warns, and the disk alone is left.

    `resume` brings back the newest step that all ranks have, from memory, else from the disk, also for another number of ranks;
    returns it, or 0 when there is none; and proves that what is there is what was saved, tensor by tensor: it raises
    CheckpointError with the name of the first that differs. Parts are those of `Checkpoints`. Give the model as it is called:
    DistributedDataParallel gets its final buckets, so that a step adds up as it would have without a restart.

    A rank that gets one of the signals `preemption` asks for the end: all ranks save their state after the same step, also where
    none was due, and `keep` raises `Preempted`, with which the program ends with exit code 75. 'usual' is SIGUSR1, and SIGTERM
    where no agent of torchrun sends it to ranks whose peers have failed; () none. `ask_to_end` does what a signal does.

    Either interval may be 'measured': after eight steps it is the best for the stall, the step and the restart as they were
    measured, and for `mtbf_s` seconds between failures. A save to the disk that fails warns on rank 0; when `disk_failures` have
    failed in a row, all ranks raise CheckpointError. A copy to memory that fails is an error at once.
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
        memory: str | Path | None = _SHARED,
        timeout: timedelta = _PATIENCE,
        preemption: Literal["usual"] | tuple[signal.Signals, ...] = "usual",
    ) -> None:
        if disk_failures < 1 or (folder is None and disk_every is not None):
            raise UsageError(
                f"disk_failures {disk_failures}, disk_every {disk_every!r} in folder {folder!r}; give 1 or more, and a folder"
            )
        self._every = KeepInterval(every, mtbf_s, "every")
        self._disk_every = KeepInterval(disk_every, mtbf_s, "disk_every")
        self._folder, self._most = folder, disk_failures
        self._ranks = RankAgreement(timeout)
        self._context = rank_context() or self._launched(memory)
        self._disk = Checkpoints(folder, keep=keep, timeout=timeout) if folder is not None else None
        self._memory = self._copies(buddy, timeout) if self._context is not None else None
        signals = usual_signals(os.environ, is_supervised=rank_context() is not None)
        self._has_place = self._context is not None or folder is not None
        signals = (signals if preemption == "usual" else preemption) if self._has_place else ()
        self._notice = PreemptionNotice(signals, timeout)
        self._is_sure_of_room = False
        self._in_a_row = self._num_saved = 0
        self._last_s: float | None = None
        self.failed_saves: list[str] = []
        """The message of each save to the disk that failed."""

    def _launched(self, memory: str | Path | None) -> LaunchedContext | None:
        """The place of this rank in a job of another launcher, under the name that rank 0 has for the job."""
        context = None
        if memory == _SHARED and not os.access(_SHARED, os.W_OK):
            memory = None  # nobody asked for it
        if memory is not None:
            training = str(Path(self._folder).absolute()) if self._folder is not None else ""
            context = self._ranks.on_all_ranks(lambda: launched_context(Path(memory), training, os.environ))
        names = self._ranks.gathered(context.job if context is not None else "")
        if context is None or not all(names):
            return None
        context.job = names[0]
        return context

    def _has_room(self, parts: Mapping[str, Any]) -> bool:
        """Whether all nodes have room for the copies of their ranks, and for those of other nodes that they are to hold."""
        context = self._context
        if not isinstance(context, LaunchedContext):
            return True
        tensors = split_state(parts, self._ranks.rank).tensors.values()
        own = sum(part.local.nbytes for part in tensors)
        mine = (context.node, own, context.written_bytes(), context.room_bytes())
        all_of_them = self._ranks.gathered(mine, tuple[int, int, int, float])
        kinds = 2 if len({node for node, *_ in all_of_them}) > 1 else 1
        for node in {node for node, *_ in all_of_them}:
            there = [one for one in all_of_them if one[0] == node]
            needed = 2 * kinds * sum(own for _, own, _, _ in there) - max(written for _, _, written, _ in there)
            if needed > min(room for *_, room in there):
                self._go_without_memory(needed, min(room for *_, room in there))
                return False
        return True

    def _go_without_memory(self, needed: float, room: float) -> None:
        if self._folder is None:
            raise CheckpointError(
                f"copies of the state need {needed / 2**30:.1f} GiB of a node's memory, which has {room / 2**30:.1f} GiB free, "
                "and there is no folder on a disk; give one, or keep fewer bytes"
            )
        if self._ranks.rank == 0:
            warnings.warn(
                f"no copies are kept in memory: they need {needed / 2**30:.1f} GiB of a node, which has "
                f"{room / 2**30:.1f} GiB free; the disk alone is left",
                stacklevel=4,
            )

    def _copies(self, buddy: str, timeout: timedelta) -> MemoryCopies:
        assert self._context is not None
        nodes = self._ranks.gathered(self._context.node)
        pairs: list[int | None] = [None] * self._ranks.num_ranks
        if buddy != "none":
            pairs = buddies(nodes, is_within=buddy == "ranks")
        has_any = any(pair is not None for pair in pairs)
        group = dist.new_group(backend="gloo", timeout=timeout) if has_any else None
        is_overlapped = has_any or torch.cuda.is_available()
        own = self._ranks.group
        meet = partial(dist.barrier, group=own) if own is not None and is_overlapped else None
        return MemoryCopies(
            self._context,
            rank=self._ranks.rank,
            num_ranks=self._ranks.num_ranks,
            group=group,
            buddies=pairs,
            meet=meet,
        )

    def __enter__(self) -> Survivor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
            return
        self._notice.restore()
        if self._disk is not None:
            self._disk.__exit__(kind, error, tb)

    def close(self) -> None:
        """Finish the saves that are being written. Raises CheckpointError when the last save to the disk has failed."""
        try:
            self._notice.close()
            if self._memory is not None:
                self._memory.close()
        finally:
            if self._disk is not None:
                self._disk.close()
        if isinstance(self._context, LaunchedContext):
            self._context.remove_at_end()

    # -- keeping -------------------------------------------------------------------------------------------------------------

    def keep(self, step: int, /, **parts: Any) -> None:
        """Keep the state after `step` optimizer steps, where that is due. All ranks call it together.

        Raises UsageError for what cannot be kept, CheckpointError and Preempted as described above.
        """
        check_saved(step, parts)
        began = perf_counter()
        step_s = began - self._last_s if self._last_s is not None else None
        is_due = self._memory is not None and self._every.is_due(step)
        if is_due and not self._is_sure_of_room:
            self._is_sure_of_room = True
            if not self._has_room(parts):
                self._memory, is_due = None, False
        if self._context is not None:
            self._context.reach(step)
        if self._memory is not None and is_due:
            stall_s = self._memory.write(step, parts, step_s)
            self.alive()
            self._measure(self._every, stall_s, step_s)
            self._num_saved += 1
            if self._num_saved == _SURE and self._context is not None:
                remove_other_copies(self._context, self._ranks.num_ranks)
        if self._disk is not None and self._disk_every.is_due(step):
            before = perf_counter()
            self._save(self._disk, step, parts)
            self._measure(self._disk_every, perf_counter() - before, step_s)
        self._last_s = perf_counter()
        if self._notice.is_due():
            self._end(step, parts, is_in_memory=is_due)

    def ask_to_end(self) -> None:
        """Have all ranks save their state after one of the next steps, and end; one rank is enough.

        Raises UsageError where there is no place for the state: no folder, and nobody who starts ranks again.
        """
        if not self._has_place:
            raise UsageError(
                "there is no place for the state: give a folder, or start the script with flatout-torchrun"
            )
        self._notice.ask()

    def _end(self, step: int, parts: Mapping[str, Any], *, is_in_memory: bool) -> None:
        """Save the state wherever it can be, and raise Preempted."""
        where = []
        if self._memory is not None:
            if not is_in_memory:
                self._memory.write(step, parts, None)
            self._memory.close()
            where.append("memory")
        if self._disk is not None:
            if step not in self._ranks.gathered(self._disk.steps)[0]:
                self._disk.save(step, **parts)
            self._disk.close()
            where.append(f"'{self._folder}'")
        self._notice.close()
        ended = Preempted(step, " and ".join(where))
        if self._ranks.rank == 0:
            print_to_stderr(f"flatout: {ended}; exit code {EXIT_CODE}")
        raise ended

    def alive(self) -> None:
        """Show the supervisor that something goes on that takes long and is no step, such as an evaluation."""
        if self._context is not None:
            self._context.advance()

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
            if self._ranks.rank == 0:
                warnings.warn(f"{e}; the training goes on", stacklevel=3)
        disk.save(step, **parts)

    def _measure(self, interval: KeepInterval, stall_s: float, step_s: float | None) -> None:
        if interval.note(stall_s, step_s):
            restart_s = (self._context.restart_s if self._context is not None else None) or 0.0
            all_s = self._ranks.gathered([*interval.measured, restart_s])
            interval.settle(*map(max, zip(*all_s, strict=True)))  # of all ranks the slowest counts

    # -- resuming ------------------------------------------------------------------------------------------------------------

    def resume(self, **parts: Any) -> int:
        """Load the newest state that all ranks have into the parts; its step, 0 when there is none. All ranks call it together.

        Raises CheckpointError when what is there is damaged, or is not what was saved; UsageError when it is of other parts.
        """
        for part in parts.values():
            _finalize_buckets(part)
        step = self._restored(parts)
        if self._context is not None:
            if self._is_first_of_node:
                erase_later_copies(self._context, after=step)
            self._ranks.gathered(None)
            self._context.resume(step)
        return step

    def _restored(self, parts: Mapping[str, Any]) -> int:
        on_disk = self._ranks.gathered(self._disk.steps if self._disk is not None else [])[0]
        newest = on_disk[-1] if on_disk else -1
        copies = copies_on_node(self._context) if self._context is not None else NodeCopies(0, ())
        tables = self._ranks.gathered(copies, NodeCopies)
        self._nodes = [t.node for t in tables]
        for step, readings in restore_plans(tables):
            if newest > step and self._from_disk(parts, newest):
                return newest
            newest = -1
            if self._from_memory(step, readings[self._ranks.rank], parts):
                return step
        if self._disk is None or not on_disk:
            return 0
        found = self._disk.load(**parts)
        if found is None:
            return 0
        self._check(self._index_of(found), parts)
        return found

    @property
    def _is_first_of_node(self) -> bool:
        return self._nodes.index(self._nodes[self._ranks.rank]) == self._ranks.rank

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

    def _index_of(self, step: int) -> CheckpointIndex:
        assert self._folder is not None
        return read_index(Path(self._folder) / f"step-{step}")

    def _from_memory(self, step: int, reading: Reading, parts: Mapping[str, Any]) -> bool:
        """Whether all ranks' copies of that step were whole, and are loaded."""
        place, ranks = self._context, self._ranks
        assert place is not None
        try:
            loads, sends = ranks.on_all_ranks(lambda: read_copies(place, reading))
            loads |= ranks.on_all_ranks(lambda: exchange_copies(reading, sends, ranks.rank, ranks.group))
            index = index_of(loads)

            def fetch(name: str, chunk: Chunk, there: tuple[slice, ...]) -> Tensor:
                whole = loads[int(chunk.file)].tensor(name)
                return whole[there] if there else whole

            def read() -> LoadedState:
                where = "the copy in memory"
                return read_state(index, parts, where, fetch, rank=ranks.rank, num_ranks=ranks.num_ranks)

            loaded = ranks.on_all_ranks(read)
        except CheckpointError as e:
            self._warn(str(e))
            return False
        loaded.load_into(parts)
        self._check(index, parts)
        return True

    def _check(self, index: CheckpointIndex, parts: Mapping[str, Any]) -> None:
        """Check that the parts are what was saved. Raises CheckpointError on all ranks otherwise."""

        def check() -> None:
            rank, num_ranks = self._ranks.rank, self._ranks.num_ranks
            live = split_state(parts, rank)
            saved = saved_sums(index, parts, rank if index.num_ranks == num_ranks else -1, live.tensors)
            now = sums_of(live)
            used = {_generator(name) for name in saved}  # one that was not used then is none of the state
            now = {name: text for name, text in now.items() if _generator(name) in used}
            message = first_difference(saved, now)
            if message is not None:
                raise CheckpointError(f"the state of step {index.step} came back changed: {message}")

        self._ranks.on_all_ranks(check)

    def _warn(self, message: str) -> None:
        if self._ranks.rank == 0:
            warnings.warn(f"passed over: {message}", stacklevel=4)


def _finalize_buckets(model: Any) -> None:
    """Give a DistributedDataParallel its final buckets now. All ranks call it together.

    It begins with one bucket of all gradients and makes others after its first step. A ring adds up a number in an order that
    depends on where it lies in its bucket, so that a step after a restart, taken as a first one, ends in other last bits than the
    same step of a run that was not stopped (from three ranks on). The buckets are filled from the last parameter to the first,
    about the order in which gradients come. Models that look for unused parameters keep their first buckets anyhow; those with a
    static graph are left as they are. Uses the functions by which torch's own `__setstate__` makes a reducer (2.11 to 2.13).
    """
    ddp: Any = getattr(model, "_orig_mod", model)
    if not isinstance(ddp, DistributedDataParallel) or ddp.find_unused_parameters or ddp.static_graph:
        return
    parameters, expect_sparse = ddp._build_params_for_reducer()
    parameters, expect_sparse = list(reversed(parameters)), list(reversed(expect_sparse))
    ddp._ddp_init_helper(parameters, expect_sparse, ddp._build_debug_param_to_name_mapping(parameters), False)
    hooks, ddp._comm_hooks = ddp._comm_hooks, []
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)
    ddp.reducer._push_all_rebuilt_params()
    ddp.reducer._rebuild_buckets()


def _generator(name: str) -> str:
    """The name of the random generator that a checksum is of; '' for a part's."""
    top, _, rest = name.partition("/")
    return rest.partition("/")[0] if top == RANDOM else ""


_SURE: Final = 3
"""When a rank saves a state for the third time, all have saved one."""


# -- how often ---------------------------------------------------------------------------------------------------------------


Every = int | Literal["measured"]
_NUM_MEASURED: Final = 8
"""Steps that are measured, each of them kept."""
_DAY_S: Final = 86400.0


class KeepInterval:
    """The steps at which a state is kept. A measured interval is due at each step until `settle` fixes it."""

    def __init__(self, every: Every | None, mtbf_s: float | None, name: str) -> None:
        if every == "measured" and not (mtbf_s is not None and mtbf_s > 0):
            raise UsageError(
                f"{name} is 'measured' and mtbf_s {mtbf_s}; give the mean seconds between failures of the job"
            )
        if not (every is None or every == "measured" or (type(every) is int and every >= 1)):
            raise UsageError(f"{name} is {every!r}; give 1 step or more, 'measured', or None")
        self._mtbf_s = mtbf_s
        self._is_measuring = every == "measured"
        self.steps: int | None = None if every == "measured" else every
        """Steps between two saves; None for never, or while it is measured."""
        self._stalls_s: list[float] = []
        self._steps_s: list[float] = []

    def is_due(self, step: int) -> bool:
        """Whether a state is to be kept after so many steps."""
        return self._is_measuring or (self.steps is not None and step % self.steps == 0)

    def note(self, stall_s: float, step_s: float | None) -> bool:
        """Record what keeping a state cost, and the step before it; whether enough is known now to settle."""
        if not self._is_measuring:
            return False
        self._stalls_s.append(stall_s)
        self._steps_s += [step_s] if step_s is not None else []
        return len(self._stalls_s) == _NUM_MEASURED

    @property
    def measured(self) -> tuple[float, float]:
        """Medians of a stall and of a step, in seconds."""
        return median(self._stalls_s), median(self._steps_s)

    def settle(self, stall_s: float, step_s: float, restart_s: float) -> int:
        """Fix the interval for these seconds, the same on all ranks; in steps."""
        assert self._mtbf_s is not None
        self.steps = best_steps(stall_s=stall_s, step_s=step_s, restart_s=restart_s, mtbf_s=self._mtbf_s)
        self._is_measuring = False
        return self.steps


def best_steps(*, stall_s: float, step_s: float, restart_s: float, mtbf_s: float) -> int:
    """Steps between two saves that leave the most of the time (scale.failures: Daly 2006, Young 1974), at least 1.

    >>> best_steps(stall_s=0.5, step_s=1.0, restart_s=10.0, mtbf_s=810.0)
    28
    """
    failures = Failures(num_nodes=1, per_thousand_node_days=1000 * _DAY_S / mtbf_s)
    return max(1, round(best_interval_s(failures, Recovery(stall_s=stall_s, restart_s=restart_s)) / step_s))
