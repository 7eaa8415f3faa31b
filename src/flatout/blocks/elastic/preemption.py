"""A scheduler's notice that a job is to end soon: all ranks of a training learn of it at the same step.

Signals reach ranks at different moments, and some ranks not at all. So each rank's notice goes into an all-reduce beside the
step, and all of them see its result one step later."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist

from flatout.core.exit_codes import ENDED_ON_REQUEST

EXIT_CODE: Final = ENDED_ON_REQUEST
AGENT: Final = "FLATOUT_AGENT"
"""Set for ranks whose agent kills those whose peers have failed, and sends SIGTERM only where the job is to end."""
_RANKS_A_STEP: Final = 64
"""An all-reduce of gloo takes about 50 us a rank (a ring); with more ranks than this it is made once in several steps."""
_OFTEN_S: Final = 0.02
"""Seconds between two all-reduces, at least: beside steps of 2 ms each would take a tenth of a step on a CPU that trains."""
_MOST_STEPS: Final = 100
_SIGNALS: Final = "SigCgt:"


class Preempted(SystemExit):  # as SystemExit it ends a program, and is no error
    """The training was asked to end, and its state is saved: ends the program with exit code 75 where nobody handles it."""

    def __init__(self, step: int, where: str) -> None:
        super().__init__(EXIT_CODE)
        self.step, self.where = step, where

    def __str__(self) -> str:
        return f"asked to end: the state after step {self.step} is in {self.where}"


class PreemptionNotice:
    """Whether any rank was asked to end. All ranks make it, call `is_due` after each step, and `close` it, together.

    `signals` are those that ask for it; each is handled where it would end the process otherwise, in the main thread alone.
    """

    def __init__(self, signals: tuple[signal.Signals, ...], timeout: timedelta) -> None:
        has_peers = dist.is_initialized() and dist.get_world_size() > 1
        self._every = self._least = -(-dist.get_world_size() // _RANKS_A_STEP) if has_peers else 1
        self._group = dist.new_group(backend="gloo", timeout=timeout) if has_peers else None
        self._is_asked = False  # no Event: a second signal within its lock would wait for itself
        self._work: Any = None
        self._numbers = torch.zeros(2)
        self._calls, self._since_s = 0, perf_counter()
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                handler = signal.getsignal(number)
                if handler is signal.SIG_DFL or _is_of_a_notice(handler):
                    self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True
        handler = self._before.get(signal.Signals(number))
        # of another training of this process, or of one that was not closed
        if handler is not None and _is_of_a_notice(handler):
            handler(number, frame)

    def ask(self) -> None:
        """Ask for the end, as a signal does. One rank is enough."""
        self._is_asked = True

    def is_due(self) -> bool:
        """Whether the end was asked for, by a rank, before its step before this one; the same on all ranks.

        Where steps are short, it is found out once in several of them, by the seconds of the slowest rank's.
        """
        if self._group is None:
            return self._is_asked
        self._calls += 1
        if self._calls < self._every:
            return False
        now_s = perf_counter()
        step_s = (now_s - self._since_s) / self._calls
        self._calls, self._since_s = 0, now_s
        is_due = self._result()
        self._numbers = torch.tensor([float(self._is_asked), step_s], dtype=torch.float64)
        self._work = dist.all_reduce(self._numbers, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return is_due

    def _result(self) -> bool:
        work, self._work = self._work, None
        if work is None:
            return False
        work.wait()
        is_asked, step_s = self._numbers.tolist()  # the same on all ranks, and so is what follows
        self._every = max(self._least, min(_MOST_STEPS, int(_OFTEN_S / step_s))) if step_s > 0 else self._least
        return bool(is_asked)

    def restore(self) -> None:
        """Have signals handled as they were before."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
        self._before.clear()

    def close(self) -> None:
        """Handle signals as before, and let go of the group. Not after an error: other ranks may be gone."""
        self.restore()
        with suppress(RuntimeError):
            self._result()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def _is_of_a_notice(handler: object) -> bool:
    return isinstance(getattr(handler, "__self__", None), PreemptionNotice)


def usual_signals(environment: Mapping[str, str], *, is_supervised: bool = False) -> tuple[signal.Signals, ...]:
    """Signals that ask a rank to end: SIGUSR1, which `flatout-torchrun` sends.

    SIGTERM too, which schedulers send, but not under torchrun itself: it sends that to ranks whose peers have failed, and these
    have to end at once. `flatout-torchrun` kills them, and so does `flatout survive` (`is_supervised`).

    >>> [one.name for one in usual_signals({"SLURM_JOB_ID": "7"})]
    ['SIGUSR1', 'SIGTERM']
    >>> [one.name for one in usual_signals({"TORCHELASTIC_RUN_ID": "big"})]
    ['SIGUSR1']
    """
    is_torchruns = "TORCHELASTIC_RUN_ID" in environment and AGENT not in environment and not is_supervised
    return (signal.SIGUSR1,) if is_torchruns else (signal.SIGUSR1, signal.SIGTERM)


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process handles a signal by itself (proc(5), status).

    >>> catches(1, signal.SIGKILL)
    False
    """
    with suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        mask = int(next(line for line in lines if line.startswith(_SIGNALS)).split()[1], 16)
        return bool(mask & 1 << (number - 1))
    return False
