"""Running a user's own objects in a copy of this process, so that nothing they change is changed here."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import warnings
from collections.abc import Callable
from time import perf_counter
from typing import Final

import torch

from flatout.check.trials.context import Refused

_SECONDS_TO_START: Final = 2.0


def in_copy(measure: Callable[[], dict[str, float]], *, limit_s: float) -> dict[str, float]:
    """What `measure` returns in a fork of this process that has one thread; the fork is ended after `limit_s` and some.

    The random generators, caches and files of the user's objects stay as they are here. Raises Refused when `measure` raises or
    takes too long, and where a process cannot be forked.
    """
    if not hasattr(os, "fork"):
        raise Refused("the data set can only be tried in a copy of the process, which this system cannot make")
    reading, writing = os.pipe()
    # 3.12 warns of threads; DataLoader's own workers are forked beside the same ones.
    with warnings.catch_warnings(action="ignore"):
        child = os.fork()
    if child == 0:
        _answer(measure, writing)
    os.close(writing)
    try:
        text = _read(reading, limit_s + _SECONDS_TO_START)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    answer = json.loads(text) if text else {"refused": "its copy ended early"}
    if "refused" in answer:
        raise Refused(f"the data set could not be read here ({answer['refused']})")
    return {str(name): float(value) for name, value in answer.items()}


def _answer(measure: Callable[[], dict[str, float]], writing: int) -> None:
    """Measure in the fork, write the result, and end without any of the parent's clean-up."""
    try:
        gc.disable()  # collecting would touch, and so copy, every page of the parent
        torch.set_num_threads(1)  # the parent's other threads do not exist here
        try:
            answer: dict[str, float | str] = dict(measure())
        except Exception as e:  # noqa: BLE001  # the user's own data set may raise anything when asked outside its loop
            answer = {"refused": f"{type(e).__name__}: {str(e)[:80]}"}
        os.write(writing, json.dumps(answer).encode())
    finally:
        os._exit(0)


def _read(reading: int, limit_s: float) -> str:
    end = perf_counter() + limit_s
    parts: list[bytes] = []
    while (left := end - perf_counter()) > 0:
        if select.select([reading], [], [], left)[0]:
            part = os.read(reading, 1 << 16)
            if not part:
                return b"".join(parts).decode()
            parts.append(part)
    raise Refused("the data set took too long")
