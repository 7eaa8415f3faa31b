"""Calls of a script's modules that flatout makes besides the script's own, and which those who watch its steps do not count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local

_OF_THREAD = local()


@contextmanager
def own_calls() -> Iterator[None]:
    """Mark what this thread calls inside as flatout's own: runs of a module to warm up before a capture, for example."""
    before = is_own_call()
    _OF_THREAD.is_own_call = True
    try:
        yield
    finally:
        _OF_THREAD.is_own_call = before


def is_own_call() -> bool:
    """Whether this thread is inside `own_calls`."""
    return getattr(_OF_THREAD, "is_own_call", False)
