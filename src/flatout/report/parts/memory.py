"""Memory in words: what the peak consists of, what a cure saves, when memory will be full."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core import units
from flatout.core.records.finding import RankedFinding
from flatout.core.records.memory import Memory
from flatout.machine.cost.accounting import bytes_by_kind

_KINDS_SHOWN: Final = 5
_ON_DEVICE: Final = {"process": "libraries", "kept": "kept from before"}
_NAMES: Final = {"process": "the process itself", "kept": "kept from before", "cached": "malloc's spare"}


def memory_line(memory: Memory, *, name_it: bool) -> str:
    """'memory: peak 412 MiB in backward: activations 61 %, optimizer state 20 %; measured 420 MiB'; '' without a peak."""
    if not memory.peak_bytes:
        return ""
    names = _NAMES if memory.device == "cpu" else _ON_DEVICE
    kinds = [(kind, size) for kind, size in bytes_by_kind(memory.at_peak).items() if size > 0][:_KINDS_SHOWN]
    shown = [f"{names.get(kind, kind)} {units.percent(size / memory.peak_bytes)}" for kind, size in kinds]
    where = f" on {memory.device}" if name_it else ""
    line = f"memory: peak {units.size(memory.peak_bytes)}{where} in {memory.peak_phase}: {', '.join(shown)}"
    if memory.measured_peak_bytes is not None:
        line += f"; measured {units.size(memory.measured_peak_bytes)}"
    if memory.reserved_bytes is not None:
        line += f", reserved {units.size(memory.reserved_bytes)}"
    return line


def memory_gain(finding: RankedFinding) -> str:
    """What is at stake, for the end of a finding's first line."""
    if finding.growth_bytes_per_step:
        return f"grows {units.size(finding.growth_bytes_per_step)} a step"
    return f"saves {units.size(finding.saved_bytes)}"


def memory_cost(finding: RankedFinding) -> Iterator[str]:
    """A sentence on the memory a cause takes; nothing when it takes none."""
    if finding.growth_bytes_per_step:
        grows = f"grows {units.size(finding.growth_bytes_per_step)} a step"
        if finding.steps_until_full is not None:
            grows += f": memory is full after {_round(finding.steps_until_full)} more steps"
        yield grows
    if finding.saved_bytes:
        of = f" of {units.size(finding.peak_bytes)}" if finding.peak_bytes else ""
        yield f"saves {units.size(finding.saved_bytes)}{of} at the peak"


def _round(steps: float) -> str:
    """Two significant digits, thousands apart.

    >>> _round(41_234.0), _round(7.0)
    ('41 000', '7')
    """
    return f"{int(float(f'{steps:.1e}')):,}".replace(",", " ")
