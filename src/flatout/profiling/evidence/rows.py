"""Equal calls of the deep steps added up."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from flatout.profiling.operators.recorder import OperatorKey

Bound = Literal["sum", "device", "host"]
"""What a step waits for: operators and Python one after the other (a CPU), or the slower of device and host."""

_GROUPS: Final = {"backward": "backward", "optimizer": "optimizer"}


class Row(NamedTuple):
    """One row's seconds in all deep steps together.

    `op_s` is the operators' own time, on a device the device's; `python_s` the host's beside it, of which `dispatch_s` lies
    inside the operators' calls (0 on a CPU, where that is `op_s`).
    """

    key: OperatorKey
    num_calls: int
    op_s: float
    python_s: float
    dispatch_s: float = 0.0

    def scaled(self, factor: float) -> Row:
        """The row with all its times multiplied."""
        return self._replace(
            op_s=self.op_s * factor, python_s=self.python_s * factor, dispatch_s=self.dispatch_s * factor
        )


def group_of(phase: str) -> str:
    """The group of phases whose time a light step knows: 'backward', 'optimizer', or 'rest' for all others."""
    return _GROUPS.get(phase, "rest")
