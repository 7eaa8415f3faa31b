"""Sizes that grow over a training: smaller images or shorter texts first, which cost less and are learnt from nearly as well."""

from __future__ import annotations

from collections.abc import Callable

from flatout.errors import UsageError

Sizes = Callable[[float], int]
"""Of the epochs done, in parts of one; a pure function, so that a resumed run goes on with the size it had."""


def growing(low: int, high: int, *, epochs: float, start: float = 0.0, multiple: int = 1) -> Sizes:
    """`low` until `start` epochs are done, then in even steps up to `high`, which is reached `epochs` later.

    Sizes between the two are multiples of `multiple` (the patches of a vision transformer, the strides of a network, or what
    keeps the number of compiled shapes small), rounded down. Raises UsageError for sizes that do not grow.

    >>> size = growing(96, 224, epochs=4, multiple=32)
    >>> [size(done) for done in (0, 0.5, 1, 2, 3.9, 4, 10)]
    [96, 96, 128, 160, 192, 224, 224]
    """
    if not 1 <= low <= high or epochs <= 0 or start < 0 or multiple < 1:
        raise UsageError(
            f"from {low} to {high} within {epochs:g} epochs after {start:g}, multiples of {multiple}: sizes are 1 or more and "
            "grow, epochs are more than 0"
        )

    def size(done: float) -> int:
        part = (done - start) / epochs
        if part >= 1:
            return high
        return max(low, int(low + (high - low) * max(0.0, part)) // multiple * multiple)

    return size
