"""The parent's handle of a side: starts it, orders steps, reads answers, and ends it whatever it does."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import IO, Final, Literal

import msgspec

from flatout.core.errors import VerificationError
from flatout.core.files import write_whole_file
from flatout.core.records.record import Record, from_json, to_json
from flatout.core.secrets import redacted_text
from flatout.tune.verify.fork_server import ChildProcess, ForkServers
from flatout.tune.verify.side import SideAnswer, StepOrder, proc_bytes

_PATIENCE_S: Final = 5.0
"""What a process has to end by itself, and again after a polite signal."""
_NUM_LAST_LINES: Final = 12
"""Last lines of a process's output that an error shows."""
_MOST_OF_A_LINE: Final = 100
_LOOK_S: Final = 0.25
"""How often a process that has not answered is looked at."""
_MEMORY_FRACTION: Final = 0.8
_READ: Final = 1 << 16


Precision = Literal["", "float64", "float32", "tf32", "float16", "bfloat16", "strict"]


class Request(Record, frozen=True, kw_only=True):
    """What a side is asked to run: a script or module with its arguments, and how."""

    target: str
    kind: Literal["script", "module"] = "script"
    arguments: tuple[str, ...] = ()
    folder: str = ""
    """Where recorded steps go."""
    num_recorded: int = 0
    seed: int | None = None
    """Random numbers start from here, and seeds that the script sets itself are moved by it; None: as the script has it."""
    plan: str = ""
    """Path of a plan whose levers are applied; '' for the untouched script."""
    environment: dict[str, str] = {}
    """Variables that the plan's levers want before the process starts."""
    texts: dict[str, str] = {}
    """Texts that take the place of those of files, by path; the files stay as they are."""
    dtype: Precision = ""
    """'float64' and 'float32' run models in that; 'float16' and 'bfloat16' run their
    forward under autocast; 'strict' is as the script has it, but never TF32."""
    noise_seed: int = 0
    """Multiply what operators return by rounding noise of this seed (see `rounding_noise`); 0: no noise."""
    has_ordered_draws: bool = False
    """Draw random numbers that do not depend on dtype and memory format (see `ordered_draws`)."""
    environment_answers: str = ""
    """Path of what environments answered in another run, to be given again (see `environment_answers`)."""
    is_whole: bool = False
    """Run to the end in one go; the only answer is that it has ended, with the seconds that took."""
    num_losses: int = 0
    """End a whole run after so many calls of backward, and answer with the mean of the last losses; 0: run to the end."""
    most_bytes: int = 0
    """A process that holds more of the machine's memory is ended; 0: most of what is free when it starts."""


class Failed(VerificationError):
    """A side ended, hung or could not be understood before it did what was ordered."""


class NoAnswer(Failed):
    """A side did not do in time what was ordered: whether it would compute the same is not known."""


class SideProcess:
    """One running script that takes steps on order. Use it in a `with`: nothing of it is left behind."""

    def __init__(self, request: Request, servers: ForkServers | None = None) -> None:
        """It is forked by one of the servers, where there are any, else started from nothing."""
        self.request = request
        self._servers = servers
        self._folder = tempfile.TemporaryDirectory(prefix="flatout-stage-")
        self._environment = {**os.environ, "PYTHONHASHSEED": "0", **request.environment}
        self._child: ChildProcess | None = None
        self._orders = self._answers = -1
        self._unread = b""
        self.missed: tuple[str, ...] = ()
        """Levers of its plan that had met nothing to change by its last answer."""
        self._most_bytes = request.most_bytes or _MEMORY_FRACTION * _available_bytes()

    def __enter__(self) -> SideProcess:
        path = Path(self._folder.name) / "request.json"
        write_whole_file(path, to_json(self.request))
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        with open(Path(self._folder.name) / "said", "wb") as output:
            if self._servers is not None:
                self._child = self._servers.start(str(path), (orders, answers), output, self._environment)
            else:
                self._child = self._started(path, (orders, answers), output)
        os.close(orders)
        os.close(answers)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.end()

    def _started(self, path: Path, descriptors: tuple[int, int], output: IO[bytes]) -> ChildProcess:
        return subprocess.Popen(
            [sys.executable, "-m", "flatout.app.cli.children.proof_side", str(path), *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=self._environment,
            pass_fds=descriptors,
            start_new_session=True,  # so that what it starts can be ended with it
        )

    def order(self, num_steps: int, *, is_lean: bool = False) -> None:
        """Have it take so many steps, and, where `is_lean`, cache no memory of the device after them (see `StepOrder`)."""
        try:
            os.write(self._orders, msgspec.json.encode(StepOrder(num_steps=num_steps, is_lean=is_lean)) + b"\n")
        except OSError as e:
            raise Failed(f"{self._name} ended before it was ordered to: {self._last_lines()}") from e

    def answer(self, *, timeout_s: float) -> SideAnswer:
        """The next answer of the process.

        Raises Failed when none comes in time, or the process ends without one.
        """
        deadline = monotonic() + timeout_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], min(_LOOK_S, max(0.0, deadline - monotonic())))
            if not ready and self._resident_bytes() > self._most_bytes:
                raise Failed(f"{self._name} took more than {self._most_bytes / 2**30:.1f} GiB: {self._last_lines()}")
            if not ready and monotonic() < deadline:
                continue
            if not ready:
                raise NoAnswer(
                    f"{self._name} did not answer within {timeout_s:.0f} s; the end of its output: {self._last_lines(1)}"
                )
            data = os.read(self._answers, _READ)
            if not data:
                raise Failed(f"{self._name} {self._how_it_ended()}: {self._last_lines()}")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        answer = from_json(line, SideAnswer)
        self.missed = answer.missed
        return answer

    def output(self) -> str:
        """All that it has printed so far."""
        return (Path(self._folder.name) / "said").read_text(errors="replace")

    def let_go(self) -> None:
        """Have it end by itself: a side without a parent ends at its next border."""
        for descriptor in (self._orders, self._answers):
            if descriptor >= 0:
                with suppress(OSError):
                    os.close(descriptor)
        self._orders = self._answers = -1

    def end(self) -> None:
        """End it and all that it has started."""
        self.let_go()
        child, self._child = self._child, None
        if child is None:
            return
        try:
            child.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            _signal(child, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                child.wait(_PATIENCE_S)
        _signal(child, signal.SIGKILL)  # the group: workers outlive a leader that has gone
        child.wait()
        self._folder.cleanup()

    def _resident_bytes(self) -> int:
        """What the process holds of the machine's memory now; 0 where the system does not tell."""
        if self._child is None:
            return 0
        try:
            pages = int(Path(f"/proc/{self._child.pid}/statm").read_text().split()[1])
        except (OSError, IndexError, ValueError):
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def _name(self) -> str:
        return f"'{self.request.target}'"

    def _how_it_ended(self) -> str:
        if self._child is None:
            return "ended"
        try:
            code = self._child.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        if code < 0:
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"ended with code {code}"

    def _last_lines(self, num_lines: int = _NUM_LAST_LINES) -> str:
        """The last lines that the process printed, in one: the first and the last 100 characters of each."""
        try:
            text = self.output()
        except OSError:
            return "it printed nothing"
        lines = [_shortened(line.strip()) for line in text.splitlines() if line.strip()]
        return redacted_text(" | ".join(lines[-num_lines:]))[-600:] or "it printed nothing"


def is_out_of_memory(error: str) -> bool:
    """Whether a device's memory ran out, by the text of an error."""
    return "out of memory" in error.lower()


def _shortened(line: str) -> str:
    """A line whose middle is left out where it is long: errors begin with what they are, and end with what to do."""
    return line if len(line) <= 2 * _MOST_OF_A_LINE else f"{line[:_MOST_OF_A_LINE]} ... {line[-_MOST_OF_A_LINE:]}"


def _signal(child: ChildProcess, number: int) -> None:
    if child.pid:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)


def _available_bytes() -> float:
    """What could be had of the machine's memory now; no limit where the system does not tell."""
    return proc_bytes("/proc/meminfo", "MemAvailable") or float("inf")
