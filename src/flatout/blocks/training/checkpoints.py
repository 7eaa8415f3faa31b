"""Checkpoints that training does not wait for: copied in stream order, written by a thread, whole or not there."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from flatout.blocks.training import checkpoint_files as files
from flatout.blocks.training.checkpoint_files import CheckpointIndex, Chunk, FileSum, TensorEntry
from flatout.blocks.training.checkpoint_parts import (
    RANDOM,
    LoadedState,
    Scattered,
    SplitState,
    TensorPart,
    check_saved,
    read_state,
    split_state,
    unite_parts,
    weight_names,
)
from flatout.blocks.training.staging import StagedCopies, Staging
from flatout.core.errors import CheckpointError, UsageError
from flatout.core.tensors.checksum import checksum

_PATIENCE: Final = timedelta(minutes=30)


class SavedCheckpoint(NamedTuple):
    """The cost of one checkpoint that was saved.

    Seconds of the call itself and, before it, of waiting for the save before (`before_s`), of the device's own stream for copies,
    and of the thread for writing.
    """

    step: int
    call_s: float
    before_s: float
    device_s: float
    write_s: float
    num_bytes: int


class Checkpoints:
    """`save(step, model=model, optimizer=optimizer, feed=feed)` and, in the next process, `load` of the same.

    A part is anything with `state_dict` and `load_state_dict`, or (to save only) a mapping; states of numbers, text and
    tensors. `save` copies what is there now and returns; a thread writes it. On a GPU the copy is made in stream order: on the
    device, and from there on a stream of its own, so that the host does not wait, and the device only for that first copy. A
    save that finds the one before it still being written waits for it. A checkpoint is a folder `step-N` of safetensors and a
    JSON: it appears when all of it is on the disk, and the `keep` newest stay. Random numbers of torch, its devices, Python and
    NumPy are saved for each rank, and put back where there are as many ranks. Weights (of modules) that are not finite are not
    saved.

    Ranks write to one file system: each its own shards of DTensors, and its share of what is the same on all. They agree over a
    process group of their own (gloo), so that no collective of the training is blocked. An error of any rank is raised by the
    next call, on every rank, as CheckpointError; the checkpoints before it stay. Loading places tensors as the parts are placed
    now: over more or fewer ranks, too. All ranks make it, and call it, together.

    Use it in a `with`, or call `close`: what is under way is then finished.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2, timeout: timedelta = _PATIENCE) -> None:
        if keep < 1:
            raise UsageError(f"keep is {keep}; give 1 or more, the newest checkpoints that stay")
        self._folder, self._keep = Path(folder), keep
        self._ranks = RankAgreement(timeout)
        self._staging = Staging()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._pending: Future[SavedCheckpoint] | None = None
        self.saved: list[SavedCheckpoint] = []
        """What each checkpoint cost, of this process."""
        self._ranks.on_all_ranks(lambda: self._prepare() if self._ranks.rank == 0 else None)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.close()
        except CheckpointError as e:
            assert error is not None
            error.add_note(f"besides: {e}")

    @property
    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in the order in which they were written."""
        return [step for _, step in files.serials_in(self._folder)]

    @property
    def _readable(self) -> list[tuple[int, int]]:
        """Serial and step of the checkpoints whose index can be read."""
        return [one for one in files.serials_in(self._folder) if one[0] < files.UNREADABLE]

    # -- saving --------------------------------------------------------------------------------------------------------------

    def save(self, step: int, /, **parts: Any) -> None:
        """Begin to save the state after `step` optimizer steps.

        Raises UsageError for states that hold something else than numbers, text and tensors, CheckpointError when the save
        before it has failed.
        """
        began = perf_counter()
        self.wait()
        before_s = perf_counter() - began
        check_saved(step, parts)
        state = split_state(parts, self._ranks.rank)
        mine = self._shared_out(state, parts)
        weights = {f"{name}/{n}" for name, part in parts.items() for n in weight_names(part)}
        scattered = [name for name, part in parts.items() if isinstance(part, Scattered)]
        staged = self._staging.copy({name: part.local for name, part in mine.items()})
        copies = {name: part._replace(local=staged.tensors[name]) for name, part in mine.items()}
        waited = (perf_counter() - began - before_s, before_s)
        self._pending = self._thread.submit(self._write, step, state.plain, scattered, staged, copies, weights, waited)

    def wait(self) -> None:
        """Until what was saved last is on the disk. Raises CheckpointError if that has failed, on any rank."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self.saved.append(pending.result())

    def close(self) -> None:
        """Finish what is under way. Raises CheckpointError as `wait` does."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._ranks.close()

    def _shared_out(self, state: SplitState, parts: Mapping[str, Any]) -> dict[str, TensorPart]:
        """The tensors that this rank writes: its shards; of what is the same on all ranks its share, the largest first.

        Of a scattered part what that says.
        """
        load = [0] * self._ranks.num_ranks
        mine: set[str] = set()
        own = f"{RANDOM}/{self._ranks.rank}/"
        for name, one in sorted(state.tensors.items(), key=lambda item: -item[1].local.nbytes):
            part, _, inner = name.partition("/")
            is_mine = one.is_mine
            if isinstance(owner := parts.get(part), Scattered):
                is_mine = is_mine and owner.writes(inner, is_shard=one.is_shard)
            elif not (one.is_shard or name.startswith(own)):
                writer = load.index(min(load))
                load[writer] += one.local.nbytes
                is_mine = writer == self._ranks.rank
            mine |= {name} if is_mine else set()
        return {name: part for name, part in state.tensors.items() if name in mine}

    def _write(
        self,
        step: int,
        plain: dict[str, Any],
        scattered: list[str],
        staged: StagedCopies,
        copies: dict[str, TensorPart],
        weights: set[str],
        waited: tuple[float, float],
    ) -> SavedCheckpoint:
        """Write the checkpoint, in the thread. Every rank comes to the same end."""
        writing = files.writing_folder(self._folder, step)
        file = f"rank-{self._ranks.rank:05}-of-{self._ranks.num_ranks:05}.safetensors"

        def written() -> tuple[_RankFile, float, float]:
            device_s = staged.wait()
            began = perf_counter()
            bad = next((n for n, t in staged.tensors.items() if n in weights and not _is_finite(t)), "")
            if bad:
                raise CheckpointError(f"'{bad}' is not finite")
            writing.mkdir(parents=True, exist_ok=True)
            summed = files.write_tensors(writing, file, staged.tensors, {n: p.offset for n, p in copies.items()})
            entries = {name: _entry(file, part) for name, part in copies.items()}
            return _RankFile(step, file, summed, entries, plain[RANDOM]), device_s, began

        mine, device_s, began = self._on_all_ranks_or_removed(step, written)
        gathered = self._ranks.gathered(mine, _RankFile)
        if scattered:
            own = self._ranks.gathered({name: plain[name] for name in scattered})
            plain = plain | {name: unite_parts([one[name] for one in own]) for name in scattered}
        is_first = self._ranks.rank == 0
        self._on_all_ranks_or_removed(step, lambda: self._publish(step, plain, gathered) if is_first else None)
        return SavedCheckpoint(step, *waited, device_s, perf_counter() - began, mine.sum.num_bytes)

    def _publish(self, step: int, plain: dict[str, Any], ranks: list[_RankFile]) -> None:
        """Write the index of what all ranks have written, and publish it, on the first rank."""
        others = sorted({one.step for one in ranks})
        if others != [step]:
            raise CheckpointError(f"ranks save the steps {others} at once; call save with the same step on all")
        index = CheckpointIndex(
            version=1,
            step=step,
            serial=max((serial for serial, _ in self._readable), default=0) + 1,
            num_ranks=self._ranks.num_ranks,
            torch=str(torch.__version__),
            parts=plain | {RANDOM: {rank: state for one in ranks for rank, state in one.random_numbers.items()}},
            tensors=files.united_entries(one.tensors for one in ranks),
            files={one.file: one.sum for one in ranks},
        )
        files.publish(self._folder, index, files.writing_folder(self._folder, step))
        for _, old in self._readable[: -self._keep]:
            files.remove(self._folder, old)

    def _prepare(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            files.tidy(self._folder)
        except OSError as e:
            raise CheckpointError(
                f"the folder '{self._folder}' for checkpoints cannot be made: {e.strerror or e}; give one that can"
            ) from e

    # -- loading -------------------------------------------------------------------------------------------------------------

    def load(self, step: int | None = None, /, **parts: Any) -> int | None:
        """Give the parts the state of the checkpoint that was written last (or of `step`); its step, or None when there is none.

        Nothing is changed before all of it has been read. A damaged checkpoint is passed over for the one before it, with a
        warning. Raises CheckpointError when all are damaged or `step` is not there; UsageError when it is of other parts.
        """
        self.wait()
        own = self._ranks.on_all_ranks(lambda: self.steps, lambda why: f"'{self._folder}' cannot be read; {why}")
        found = self._ranks.gathered(own)[0]
        if step is not None and step not in found:
            raise CheckpointError(f"'{self._folder}' has no checkpoint of step {step}; it has {found or 'none'}")
        messages: list[str] = []
        for candidate in [step] if step is not None else reversed(found):
            path = self._folder / f"step-{candidate}"
            why = self._damage(path)
            if not why:
                self._load(path, parts)
                return candidate
            messages.append(why)
            if self._ranks.rank == 0 and step is None:
                warnings.warn(f"the checkpoint of step {candidate} is passed over: {why}", stacklevel=2)
        if messages:
            raise CheckpointError("no checkpoint is whole: " + "; ".join(messages))
        return None

    def _damage(self, path: Path) -> str:
        """What is wrong with a checkpoint, on all ranks; each looks at its share of the files."""
        try:
            index = files.read_index(path)
            for number, (file, wanted) in enumerate(sorted(index.files.items())):
                if number % self._ranks.num_ranks == self._ranks.rank:
                    files.check_file(path, file, wanted)
            why = ""
        except CheckpointError as e:
            why = str(e)
        return next((w for w in self._ranks.gathered(why) if w), "")

    def _load(self, path: Path, parts: Mapping[str, Any]) -> None:
        ranks, fetch = self._ranks, partial(files.fetch_chunk, path)

        def read() -> LoadedState:
            return read_state(files.read_index(path), parts, path, fetch, rank=ranks.rank, num_ranks=ranks.num_ranks)

        loaded = ranks.on_all_ranks(read, lambda why: f"'{path}' was not loaded; {why}")
        try:
            loaded.load_into(parts)
        except (RuntimeError, LookupError, TypeError, ValueError, AttributeError, OverflowError) as e:
            raise CheckpointError(
                f"'{path}' does not fit: {e!r}; a part refuses its state, and others may be loaded"
            ) from e

    def _on_all_ranks_or_removed(self, step: int, action: Callable[[], Value]) -> Value:
        """The same for a part of saving; what has been written is removed when it fails."""

        def gathered(why: str) -> str:
            if self._ranks.rank == 0:
                shutil.rmtree(files.writing_folder(self._folder, step), ignore_errors=True)
            left = self._readable
            good = f"the last good one is of step {left[-1][1]}" if left else "there is none before it"
            return f"the checkpoint of step {step} was not written; {why}; {good}"

        return self._ranks.on_all_ranks(action, gathered)


class _RankFile(msgspec.Struct, frozen=True):
    """What one rank has written."""

    step: int
    file: str
    sum: FileSum
    tensors: dict[str, TensorEntry]
    random_numbers: dict[str, Any]


def _entry(file: str, part: TensorPart) -> TensorEntry:
    chunk = Chunk(file, part.offset, tuple(part.local.shape), checksum(part.local))
    return TensorEntry(files.torch_dtype_name(part.local.dtype), part.shape, (chunk,))


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


Value = TypeVar("Value")


class RankAgreement:
    """This `rank` of `num_ranks`, and what it agrees on with the others. All ranks make it, and call it, together."""

    def __init__(self, timeout: timedelta) -> None:
        has_peers = dist.is_initialized() and dist.get_world_size() > 1
        self.rank, self.num_ranks = (dist.get_rank(), dist.get_world_size()) if has_peers else (0, 1)
        self.group = dist.new_group(backend="gloo", timeout=timeout) if has_peers else None

    def gathered(self, value: Value, kind: Any = Any) -> list[Value]:
        """Every rank's value, as JSON holds it, read as a `kind`. Raises CheckpointError when a rank does not answer."""
        if self.group is None:
            return [value]
        gathered: list[bytes] = [b""] * self.num_ranks
        try:
            dist.all_gather_object(gathered, msgspec.json.encode(value), group=self.group)
        except RuntimeError as e:
            raise CheckpointError(f"ranks could not agree on the checkpoint; one of them is gone: {e}") from e
        return [msgspec.json.decode(one, type=kind) for one in gathered]

    def on_all_ranks(self, action: Callable[[], Value], message: Callable[[str], str] = str) -> Value:
        """The result of `action`, once it has succeeded on every rank. Raises CheckpointError on all of them otherwise.

        `message` makes the error's text of the first failure; a UsageError is raised as it is on the rank that made the mistake.
        """
        value: Any = None
        mistake: UsageError | None = None
        try:
            value, why = action(), ""
        except UsageError as e:
            mistake, why = e, str(e)
        except (OSError, SafetensorError, CheckpointError, MemoryError, RuntimeError) as e:
            why = str(e) or type(e).__name__
        except (AttributeError, LookupError, TypeError, ValueError) as e:  # of states that are not what they were
            why = str(e) or type(e).__name__
        wrong = [f"rank {rank}: {one}" for rank, one in enumerate(self.gathered(why)) if one]
        if mistake is not None:
            raise mistake
        if wrong:
            raise CheckpointError(message(wrong[0]))
        return value  # type: ignore[no-any-return]

    def close(self) -> None:
        """Let go of the group."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
            self.group = None
