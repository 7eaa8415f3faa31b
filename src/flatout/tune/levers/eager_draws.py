"""Random numbers in compiled code, drawn as they are without compiling."""

from __future__ import annotations

from collections.abc import Callable


def draw_as_eager() -> Callable[[], None]:
    """Compiled code draws random numbers as eager code does; returns how to undo it."""
    from torch._inductor import config

    from flatout.core.runtime.patches import set_attributes

    return set_attributes(config, fallback_random=True)
