"""Keeping Python's garbage collector from running for a time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from flatout.core.runtime.patches import Patches


@contextmanager
def collections_put_off() -> Iterator[None]:
    """No collection starts by itself inside. One that our records set off would walk over all objects of the user's program.

    Whoever calls `gc.disable`, `gc.enable` or `gc.isenabled` meanwhile changes and sees the state that the program has
    afterwards; `gc.collect` works as ever. Where the collector is off already nothing changes.
    """
    if not gc.isenabled():
        yield
        return
    is_wanted = True

    def want(value: bool) -> None:
        nonlocal is_wanted
        is_wanted = value

    resume = gc.enable
    patches = Patches()
    gc.disable()
    patches.set(gc, "disable", lambda: want(False))
    patches.set(gc, "enable", lambda: want(True))
    patches.set(gc, "isenabled", lambda: is_wanted)
    try:
        yield
    finally:
        patches.undo()
        if is_wanted:
            resume()
