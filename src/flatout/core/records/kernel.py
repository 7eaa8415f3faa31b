"""What a kernel is: one implementation of an operation that has a reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flatout.core.records.record import Record
from flatout.core.records.verdict import Guarantee


class Kernel(Record, frozen=True, kw_only=True):
    """One implementation of an operation.

    `id` is the operation's name and the implementation's, `norm.rms_norm.triton`; `op` is the former. `run` takes what the
    operation's reference takes, in the same order and by the same names, is differentiable where that is, and returns the same
    within `guarantee`. `refusal` takes the same and tells in a short sentence why these arguments cannot be run, None when they
    can; it looks at devices, dtypes and shapes, never at numbers. Of several that can be run the one with the lowest `order`
    is taken; the reference, with the highest, refuses nothing.
    """

    id: str
    title: str
    module: str
    run: Callable[..., Any]
    refusal: Callable[..., str | None]
    order: int
    guarantee: Guarantee = "bounded"

    @property
    def op(self) -> str:
        return self.id.rpartition(".")[0]
