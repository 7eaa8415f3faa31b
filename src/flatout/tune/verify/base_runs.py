"""The steps of the script that changes are compared with, recorded in the precisions and under the noise that judge a change."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import Final, Literal

import msgspec

from flatout.tune.verify.environment_answers import FILE
from flatout.tune.verify.fork_server import fork_servers
from flatout.tune.verify.proof_terms import ProofTerms
from flatout.tune.verify.recording import Step, read_recorded_steps
from flatout.tune.verify.side import SideAnswer
from flatout.tune.verify.side_process import Failed, Request, SideProcess

Shared = Literal["", "ordered draws", "answers"]
"""What runs share besides seeds: draws that do not depend on dtype and memory format, or the answers of environments."""
_SPARED: Final = 0.8
_TOGETHER: Final = 0.85
"""The part of a device's memory that two processes may hold at their peaks: allocators round, and each has its kernels there."""
_WIDE: Final = 2.2
_NOISY: Final = 1.4
"""What a run in float64, and another under rounding noise, holds at most, by what the script holds: numbers twice as wide, and
what an operator returns once more."""


class BaseRuns:
    """Records first steps; those of the script `base` once for a seed, a precision and what else the runs share.

    Set `terms` before each proof. Use `end` at last.
    """

    def __init__(self, base: Request, terms: ProofTerms, on_progress: Callable[[str], None]) -> None:
        self.base = base
        self.terms = terms
        self.device = "cpu"
        self.recording_s = 0.0
        """Spent so far on runs that judge what others compute; each is made once for a seed."""
        self._on_progress = on_progress
        self._peak_bytes = self._free_bytes = 0
        """Bytes of the device: what the script holds at its peak, and what is free beside it."""
        self.is_tight = False
        """Whether two sides do not run on the device at once: one starts after the other, and what stands caches nothing."""
        self._shared: Shared = ""
        self._folder = tempfile.TemporaryDirectory(prefix="flatout-proof-")
        self._num_folders = 0
        self._servers = fork_servers()
        self._recorded: dict[tuple[int, str, int, Shared], list[Step]] = {}
        self._begun: dict[tuple[int, str, int, Shared], tuple[SideProcess, ExitStack]] = {}
        """Processes that record already, until they are asked, with what ends them."""
        self._unrecordable: dict[tuple[int, str, int, Shared], str] = {}
        """Why steps could not be recorded by a process alone, which is not tried again."""
        self._environments: dict[int, Path] = {}
        """What the environments answered in the base's run on a seed, where it has any."""

    def end(self) -> None:
        """End the processes that wait to be forked, and remove what was recorded."""
        self.end_begun()
        if self._servers is not None:
            self._servers.end()
        self._folder.cleanup()

    def process(self, request: Request) -> SideProcess:
        """A process for this request, to be used in a `with`."""
        return SideProcess(request, self._servers)

    def recording(self, request: Request) -> Request:
        """The request with its first steps recorded, on the seed of the terms."""
        self._num_folders += 1
        folder = Path(self._folder.name) / str(self._num_folders)
        folder.mkdir()
        terms = self.terms
        answers = self._environments.get(terms.seed) if self._shared == "answers" else None
        return msgspec.structs.replace(
            request,
            folder=str(folder),
            num_recorded=terms.num_steps,
            seed=terms.seed,
            has_ordered_draws=self._shared == "ordered draws",
            environment_answers=str(answers or ""),
        )

    def expect(self, device: str, peak_bytes: int, total_bytes: int) -> None:
        """What is known of the script before it is run here: its device, what it holds of that, and how much there is."""
        self.device = device
        self.is_tight = 2 * peak_bytes > _TOGETHER * total_bytes > 0
        self._peak_bytes, self._free_bytes = peak_bytes, total_bytes - peak_bytes

    def note_memory(self, one: SideAnswer, two: SideAnswer | None = None) -> None:
        """What a side held of the device's memory at its peak, and what is free beside it, and beside another."""
        self._peak_bytes, self._free_bytes = one.device_peak_bytes, one.device_free_bytes
        if two is not None and two.device_free_bytes:
            self._free_bytes = two.device_free_bytes
        other = one if two is None else two
        both = one.device_peak_bytes + max(one.device_peak_bytes, other.device_peak_bytes)
        if one.device_total_bytes and both > _TOGETHER * one.device_total_bytes:
            self.is_tight = True

    def add(self, request: Request) -> None:
        """Keep what a process for this request of the base has recorded, if that is not known yet."""
        key = (self.terms.seed, "", 0, self._shared)
        if key not in self._recorded:
            self._recorded[key] = read_recorded_steps(Path(request.folder))
            self._note_environments(request)

    @property
    def has_environments(self) -> bool:
        """Whether environments answered the base's run on this seed."""
        return self.terms.seed in self._environments

    @contextmanager
    def sharing(self, what: Shared) -> Iterator[None]:
        """Inside, all runs share this."""
        self._shared = what
        try:
            yield
        finally:
            self._shared = ""

    @property
    def has_room_for_two(self) -> bool:
        """Whether two runs go on a device at once, by what those so far held of its memory."""
        return self.device != "cpu" and _num_that_fit(["", ""], self._peak_bytes, self._free_bytes) > 1

    def begin(self, dtype: str) -> None:
        """Begin to record the base's steps in this precision, beside two sides that start, where a device has room for all three.

        They are asked for once the sides stand, and would start only then.
        """
        key: tuple[int, str, int, Shared] = (self.terms.seed, dtype, 0, self._shared)
        known = self._recorded.keys() | self._unrecordable.keys() | self._begun.keys()
        if self.device == "cpu" or self.is_tight or key in known:
            return
        if _num_that_fit([dtype], self._peak_bytes, self._free_bytes):
            stack = ExitStack()
            request = msgspec.structs.replace(self.recording(self.base), dtype=dtype)
            self._begun[key] = stack.enter_context(self.process(request)), stack

    def end_begun(self) -> None:
        """End the processes that were begun and not asked."""
        while self._begun:
            _, (_, stack) = self._begun.popitem()
            stack.close()

    def steps(self, dtype: str = "", noise_seed: int = 0) -> list[Step]:
        """The base's steps, in this precision and with this rounding noise; run for that if they have not been.

        Raises Failed when they cannot be run.
        """
        # the base's own answers are what it gets again
        shared: Shared = "" if self._shared == "answers" and not dtype and not noise_seed else self._shared
        key = (self.terms.seed, dtype, noise_seed, shared)
        if key in self._unrecordable:
            raise Failed(self._unrecordable[key])
        if key not in self._recorded:
            precision = f" in {dtype}" if dtype else ""
            self._on_progress(f"the steps before the change{precision}{' under rounding noise' if noise_seed else ''}")
            request = msgspec.structs.replace(self.recording(self.base), dtype=dtype, noise_seed=noise_seed)
            try:
                with self._judging():
                    self._ask_begun(key)
                    if key not in self._recorded:
                        self._recorded[key] = self.first_steps(request)
                    self._note_environments(request)
            except Failed as e:
                self._unrecordable[key] = str(e)
                raise
        return self._recorded[key]

    def record_together(self, wanted: Sequence[tuple[str, int]]) -> None:
        """Record the base's steps in these precisions and with these noise seeds, at once as far as the device has memory.

        A process takes most of its time to start, for which the device does nothing. On a CPU they would wait for each other.
        """
        if self.device == "cpu":
            return
        seed, shared = self.terms.seed, self._shared
        wanted = list(dict.fromkeys(wanted))
        with self._judging():
            for dtype, noise in wanted:
                self._ask_begun((seed, dtype, noise, shared))
        known = self._recorded.keys() | self._unrecordable.keys()
        left = [(dtype, noise) for dtype, noise in wanted if (seed, dtype, noise, shared) not in known]
        while left:
            num = max(1, _num_that_fit([dtype for dtype, _ in left], self._peak_bytes, self._free_bytes))
            group, left = left[:num], left[num:]
            self._on_progress(f"the steps before the change in {len(group)} other ways at once")
            with self._judging(), ExitStack() as stack:
                requests = [
                    msgspec.structs.replace(self.recording(self.base), dtype=dtype, noise_seed=noise)
                    for dtype, noise in group
                ]
                processes = [stack.enter_context(self.process(request)) for request in requests]
                for (dtype, noise), process in zip(group, processes, strict=True):
                    with suppress(Failed):  # it is run alone where it is wanted, with all the memory
                        self._recorded[seed, dtype, noise, shared] = self._recorded_by(process)

    def _ask_begun(self, key: tuple[int, str, int, Shared]) -> None:
        """Keep what a process has recorded that was begun, if there is one and it came so far."""
        if key not in self._begun:
            return
        process, stack = self._begun.pop(key)
        with stack, suppress(Failed):
            self._recorded[key] = self._recorded_by(process)

    def first_steps(self, request: Request) -> list[Step]:
        """What a process for this request records. Raises Failed when it cannot be run."""
        with self.process(request) as process:
            return self._recorded_by(process)

    def _recorded_by(self, process: SideProcess) -> list[Step]:
        answer = process.answer(timeout_s=self.terms.timeout_s)
        if answer.what == "ended" and (answer.error or not answer.num_steps):
            raise Failed(answer.error or f"it ended after {answer.num_steps} steps")
        return read_recorded_steps(Path(process.request.folder))

    @contextmanager
    def _judging(self) -> Iterator[None]:
        """What goes by inside is spent once for all that are judged by it."""
        began = perf_counter()
        try:
            yield
        finally:
            self.recording_s += perf_counter() - began

    def _note_environments(self, request: Request) -> None:
        path = Path(request.folder) / FILE
        if path.exists() and request.seed is not None:
            self._environments[request.seed] = path


def _num_that_fit(dtypes: Sequence[str], peak_bytes: int, free_bytes: int) -> int:
    """How many of the first of these runs of a script go on a device at once, beside two that stand."""
    left, num = _SPARED * (free_bytes - peak_bytes), 0
    for dtype in dtypes:
        left -= (_WIDE if dtype == "float64" else _NOISY) * peak_bytes
        if left < 0:
            break
        num += 1
    return num
