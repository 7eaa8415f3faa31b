"""Checkpoints that training does not wait for: copied in stream order, written by a thread, whole or not there."""

from __future__ import annotations

import json
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

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor

from flatout.errors import CheckpointError, UsageError
from flatout.training import checkpoint_files as files
from flatout.training.checkpoint_files import Chunk, Entry, FileSum, Index
from flatout.training.checkpoint_parts import (
    RANDOM,
    Part,
    bare,
    first_of_twins,
    numbers_of,
    shard,
    state_of,
    states_of,
    weights_of,
)
from flatout.training.random_state import random_state, set_random_state
from flatout.training.scattered import Scattered, united
from flatout.training.staging import Staged, Staging

Value = TypeVar("Value")
_PATIENCE: Final = timedelta(minutes=30)


class Saved(NamedTuple):
    """What a checkpoint cost.

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
    process group of their own (gloo), so that no collective of the training is held up. An error of any rank is raised by the
    next call, on every rank, as CheckpointError; the checkpoints before it stay. Loading places tensors as the parts are placed
    now: over more or fewer ranks, too. All ranks make it, and call it, together.

    Use it in a `with`, or call `close`: what is under way is then finished.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2, timeout: timedelta = _PATIENCE) -> None:
        if keep < 1:
            raise UsageError(f"keep is {keep}; give 1 or more, the newest checkpoints that stay")
        self._folder, self._keep = Path(folder), keep
        self._is_many = dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo", timeout=timeout) if self._is_many else None
        self._rank = dist.get_rank() if self._is_many else 0
        self._num_ranks = dist.get_world_size() if self._is_many else 1
        self._staging = Staging()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._under_way: Future[Saved] | None = None
        self.saved: list[Saved] = []
        """What each checkpoint cost, of this process."""
        self._tried(lambda: self._prepare() if self._rank == 0 else None, str)

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
        """Of which there is a checkpoint, in the order in which they were written."""
        return files.steps_in(self._folder)

    # -- saving --------------------------------------------------------------------------------------------------------------

    def save(self, step: int, /, **parts: Any) -> None:
        """Begin to save the state after `step` optimizer steps.

        Raises UsageError for states that hold something else than numbers, text and tensors, CheckpointError when the save
        before it has failed.
        """
        began = perf_counter()
        self.wait()
        before_s = perf_counter() - began
        if type(step) is not int or step < 0 or not parts or RANDOM in parts:
            raise UsageError(
                f"step {step!r}, parts {sorted(parts)}: give the number of steps done, and one part or more, "
                f"none of them named '{RANDOM}'"
            )
        tensors: dict[str, Tensor] = {}
        plain = {name: files.split(state_of(part), name, tensors) for name, part in parts.items()}
        plain[RANDOM] = {f"{self._rank}": files.split(random_state(), f"{RANDOM}/{self._rank}", tensors)}
        scattered = [name for name, part in parts.items() if isinstance(part, Scattered)]
        same = first_of_twins(tensors)
        held = self._shared_out({name: tensor for name, tensor in tensors.items() if same[name] == name}, parts)
        weights = {f"{name}/{n}" for name, part in parts.items() for n in weights_of(part)}
        mine = {name: part for name, part in held.items() if part.is_mine}
        staged = self._staging.copy({name: part.local for name, part in mine.items()})
        entries = {name: (part.offset, part.shape, files.dtype_name(part.local.dtype)) for name, part in mine.items()}
        call_s = perf_counter() - began
        self._under_way = self._thread.submit(
            self._write, step, (plain, same, scattered), staged, entries, weights, (call_s - before_s, before_s)
        )

    def wait(self) -> None:
        """Until what was saved last is on the disk. Raises CheckpointError if that has failed, on any rank."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self.saved.append(under_way.result())

    def close(self) -> None:
        """Finish what is under way. Raises CheckpointError as `wait` does."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
                self._group = None

    def _shared_out(self, tensors: Mapping[str, Tensor], parts: Mapping[str, Any]) -> dict[str, Part]:
        """Who writes what: shards those who hold them; what is the same on all ranks one each, the largest first.

        Of a scattered part those who say so.
        """
        if not self._is_many and not any(isinstance(t, DTensor) for t in tensors.values()):
            return {name: Part(t, (0,) * t.dim(), tuple(t.shape), is_mine=True) for name, t in tensors.items()}
        load = [0] * self._num_ranks
        held: dict[str, Part] = {}
        own = f"{RANDOM}/{self._rank}/"
        for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].numel() * item[1].element_size()):
            part = parts.get(name.partition("/")[0])
            shape = tuple(tensor.shape)
            if isinstance(tensor, DTensor) or isinstance(part, Scattered):
                one = shard(tensor) if isinstance(tensor, DTensor) else Part(tensor, (0,) * tensor.dim(), shape, True)
                is_mine = not isinstance(part, Scattered) or part.writes(
                    name.partition("/")[2], is_shard=isinstance(tensor, DTensor)
                )
                held[name] = one._replace(is_mine=one.is_mine and is_mine)
                continue
            writer = load.index(min(load))
            is_shared = not name.startswith(own)
            if is_shared:
                load[writer] += tensor.numel() * tensor.element_size()
            held[name] = Part(tensor, (0,) * tensor.dim(), shape, not is_shared or writer == self._rank)
        return {name: held[name] for name in tensors}

    def _write(
        self,
        step: int,
        trees: tuple[dict[str, Any], dict[str, str], list[str]],
        staged: Staged,
        entries: dict[str, tuple[tuple[int, ...], tuple[int, ...], str]],
        weights: set[str],
        waited: tuple[float, float],
    ) -> Saved:
        """In the thread. Every rank comes to the same end."""
        plain, same, scattered = trees
        if any(name != first for name, first in same.items()):
            plain = files.renamed(plain, same)
        writing = files.writing_folder(self._folder, step)
        file = f"rank-{self._rank:05}-of-{self._num_ranks:05}.safetensors"

        def written() -> tuple[FileSum, dict[str, int], float, float]:
            device_s = staged.wait()
            began = perf_counter()
            bad = next((n for n, t in staged.tensors.items() if n in weights and not _is_finite(t)), "")
            if bad:
                raise CheckpointError(f"'{bad}' is not finite")
            writing.mkdir(parents=True, exist_ok=True)
            offsets = {name: offset for name, (offset, _, _) in entries.items()}
            summed = files.write_tensors(writing, file, staged.tensors, offsets)
            return summed, {n: files.tensor_sum(t) for n, t in staged.tensors.items()}, device_s, began

        summed, sums, device_s, began = self._saved(step, written)
        described = {
            name: [list(offset), list(staged.tensors[name].shape), list(shape), dtype, sums[name]]
            for name, (offset, shape, dtype) in entries.items()
        }
        told = self._gathered([file, summed.num_bytes, summed.crc32, described, plain[RANDOM], step])
        if scattered:
            own = self._gathered({name: plain[name] for name in scattered})
            plain = plain | {name: united([one[name] for one in own]) for name in scattered}
        self._saved(step, lambda: self._published(step, plain, told) if self._rank == 0 else None)
        return Saved(step, waited[0], waited[1], device_s, perf_counter() - began, summed.num_bytes)

    def _published(self, step: int, plain: dict[str, Any], told: list[Any]) -> None:
        """On the first rank: the index of what all have written, and the name."""
        others = sorted({one[-1] for one in told})
        if others != [step]:
            raise CheckpointError(f"ranks save the steps {others} at once; call save with the same step on all")
        tensors: dict[str, Entry] = {}
        for file, _, _, described, _, _ in told:
            for name, (offset, shape, whole, dtype, crc) in described.items():
                chunk = Chunk(file=file, offset=tuple(offset), shape=tuple(shape), crc32=crc)
                known = tensors.get(name)
                chunks = (*known.chunks, chunk) if known is not None else (chunk,)
                tensors[name] = Entry(dtype=dtype, shape=tuple(whole), chunks=chunks)
        index = Index(
            version=1,
            step=step,
            serial=files.next_serial(self._folder),
            num_ranks=self._num_ranks,
            torch=str(torch.__version__),
            parts=plain | {RANDOM: {rank: state for one in told for rank, state in one[4].items()}},
            tensors=tensors,
            files={file: FileSum(num_bytes=size, crc32=crc) for file, size, crc, _, _, _ in told},
        )
        files.publish(self._folder, index, files.writing_folder(self._folder, step))
        for old in files.readable(self._folder)[: -self._keep]:
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
        found = self._agree(self._tried(lambda: self.steps, lambda why: f"'{self._folder}' cannot be read; {why}"))
        if step is not None and step not in found:
            raise CheckpointError(f"'{self._folder}' has no checkpoint of step {step}; it has {found or 'none'}")
        said: list[str] = []
        for candidate in [step] if step is not None else reversed(found):
            path = self._folder / f"step-{candidate}"
            why = self._damage(path)
            if not why:
                self._load(path, parts)
                return candidate
            said.append(why)
            if self._rank == 0 and step is None:
                warnings.warn(f"the checkpoint of step {candidate} is passed over: {why}", stacklevel=2)
        if said:
            raise CheckpointError("no checkpoint is whole: " + "; ".join(said))
        return None

    def _damage(self, path: Path) -> str:
        """What is wrong with a checkpoint, on all ranks; each looks at its share of the files."""
        try:
            index = files.read_index(path)
            for number, (file, wanted) in enumerate(sorted(index.files.items())):
                if number % self._num_ranks == self._rank:
                    files.check_file(path, file, wanted)
            why = ""
        except CheckpointError as e:
            why = str(e)
        return next((w for w in self._gathered(why) if w), "")

    def _load(self, path: Path, parts: Mapping[str, Any]) -> None:
        def read() -> tuple[dict[str, Any], Any]:
            index = files.read_index(path)
            states = states_of(index, parts, path, fetch)
            return states, numbers_of(index, self._rank, fetch) if index.num_ranks == self._num_ranks else None

        fetch = partial(files.fetched, path)
        states, numbers = self._tried(read, lambda why: f"'{path}' was not loaded; {why}")
        for name, part in parts.items():
            bare(part).load_state_dict(states[name])
        if numbers is not None:
            set_random_state(numbers)

    # -- among ranks ---------------------------------------------------------------------------------------------------------

    def _tried(self, action: Callable[[], Value], told: Callable[[str], str]) -> Value:
        """What it returns, once it has succeeded on every rank. Raises CheckpointError on all of them otherwise."""
        value: Any = None
        mistake: UsageError | None = None
        try:
            value, why = action(), ""
        except UsageError as e:
            mistake, why = e, str(e)
        except (OSError, SafetensorError, CheckpointError, MemoryError, RuntimeError, TypeError, ValueError) as e:
            why = str(e) or type(e).__name__
        wrong = {rank: w for rank, w in enumerate(self._gathered(why)) if w}
        if not wrong:
            return value  # type: ignore[no-any-return]
        if mistake is not None:
            raise mistake
        rank, why = next(iter(wrong.items()))
        raise CheckpointError(told(f"rank {rank}: {why}"))

    def _saved(self, step: int, action: Callable[[], Value]) -> Value:
        """The same for a part of saving; what has been written is removed when it fails."""

        def told(why: str) -> str:
            if self._rank == 0:
                shutil.rmtree(files.writing_folder(self._folder, step), ignore_errors=True)
            left = files.readable(self._folder)
            good = f"the last good one is of step {left[-1]}" if left else "there is none before it"
            return f"the checkpoint of step {step} was not written; {why}; {good}"

        return self._tried(action, told)

    def _gathered(self, value: Value) -> list[Value]:
        """Every rank's value, as JSON holds it. Raises CheckpointError when a rank does not answer."""
        if self._group is None:
            return [value]
        told: list[str] = [""] * self._num_ranks
        try:
            dist.all_gather_object(told, json.dumps(value), group=self._group)
        except RuntimeError as e:
            raise CheckpointError(f"ranks could not agree on the checkpoint; one of them is gone: {e}") from e
        return [json.loads(one) for one in told]

    def _agree(self, value: Value) -> Value:
        """The first rank's value, on every rank."""
        return self._gathered(value)[0]


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
