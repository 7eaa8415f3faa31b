"""Running a user's own objects in a copy of this process, so that nothing they change is changed here."""

from __future__ import annotations

import gc
import json
import math
import os
import select
import signal
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import Thread
from time import perf_counter
from typing import Final

import torch

from flatout.check.trials.context import Refused

Results = Iterable[dict[str, float]]

_SECONDS_TO_START: Final = 2.0
_LOOK_EVERY_S: Final = 0.5
_ALL: Final = b"\n\n"
"""Ends the results: the pipe's own end may not come while something that the fork started is alive."""


def in_copy(measure: Callable[[], dict[str, float]], *, limit_s: float, left_s: float = math.inf) -> dict[str, float]:
    """What `measure` returns in a fork of this process that has one thread.

    The fork is ended after `limit_s` and some time to start, after `left_s` at the latest.

    The random generators, caches and files of the user's objects stay as they are here. Raises Refused when `measure` raises or
    takes too long, and where a process cannot be forked.
    """
    try:
        return latest_in_copy(lambda: [measure()], limit_s=min(limit_s + _SECONDS_TO_START, left_s), num_threads=1)
    except Refused as e:
        raise Refused(f"the data set could not be read here ({e})") from e


def latest_in_copy(measure: Callable[[], Results], *, limit_s: float, num_threads: int) -> dict[str, float]:
    """The last of the results that `measure` yields within `limit_s` in a fork of this process with so many CPU threads.

    The fork and all that it starts (compilers, worker processes) are ended then; nothing that it prints is shown.

    Raises:
        Refused: `measure` raises, or yields nothing in time, or a process cannot be forked.
    """
    if not hasattr(os, "fork"):
        raise Refused("this needs a copy of the process, which this system cannot make")
    reading, writing = os.pipe()
    # 3.12 warns of threads; DataLoader's own workers are forked beside the same ones.
    with warnings.catch_warnings(action="ignore"):
        child = os.fork()
    if child == 0:
        _answer(measure, writing, num_threads)
    os.close(writing)
    try:
        answers = _read(child, reading, limit_s)
    finally:
        os.close(reading)
        # The group is there once the fork has run its first lines; whoever is in it goes with it.
        for end in (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):
                end(child, signal.SIGKILL)
        os.waitpid(child, 0)
    measured = [answer for answer in answers if "refused" not in answer]
    if not measured:
        raise Refused(str(answers[-1]["refused"]) if answers else f"it took more than {limit_s:.0f} s, or failed")
    return {str(name): float(value) for name, value in measured[-1].items()}


def _answer(measure: Callable[[], Results], writing: int, num_threads: int) -> None:
    """Measure in the fork, write the results, and end without any of the parent's clean-up."""
    try:
        os.setpgid(0, 0)
        gc.disable()  # collecting would touch, and so copy, every page of the parent
        parent, silence = os.getppid(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        if num_threads == 1:
            torch.set_num_threads(1)  # the parent's other threads do not exist here
            _write_results(measure, writing)
        else:
            # OpenMP keeps its threads by the thread that started them: to a new one it gives new ones.
            thread = Thread(target=_with_threads, args=(measure, writing, num_threads), daemon=True)
            thread.start()
            while thread.is_alive() and os.getppid() == parent:
                thread.join(_LOOK_EVERY_S)
    finally:
        os._exit(0)


def _with_threads(measure: Callable[[], Results], writing: int, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    _write_results(measure, writing)


def _write_results(measure: Callable[[], Results], writing: int) -> None:
    try:
        for result in measure():
            os.write(writing, json.dumps(result).encode() + b"\n")
    except Refused as e:
        os.write(writing, json.dumps({"refused": str(e)}).encode() + b"\n")
    except Exception as e:  # noqa: BLE001  # the user's own objects may raise anything when used outside their loop
        os.write(writing, json.dumps({"refused": f"{type(e).__name__}: {str(e)[:80]}"}).encode() + b"\n")
    os.write(writing, b"\n")


def _read(child: int, reading: int, limit_s: float) -> list[dict[str, float | str]]:
    """What the fork wrote, a line each, until it said that this is all, or is gone, or the time was over."""
    end = perf_counter() + limit_s
    text = b""
    while (left := end - perf_counter()) > 0 and not text.endswith(_ALL):
        if select.select([reading], [], [], min(left, _LOOK_EVERY_S))[0]:
            part = os.read(reading, 1 << 16)
            if not part:
                break
            text += part
        elif _is_gone(child):  # what it has started may still have the pipe open
            break
    return [json.loads(line) for line in text.split(b"\n")[:-1] if line]


def _is_gone(child: int) -> bool:
    """Whether the fork has ended; it stays there to be waited for."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
