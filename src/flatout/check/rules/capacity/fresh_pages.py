"""Memory goes back to the system in every step and is taken, page by page, anew.

Costs        A page fault for every 4 KiB of a large tensor, each time it is made: the kernel finds a page, zeroes it and maps it,
             and unmaps it when the tensor is freed. On a CPU this can take more time than the arithmetic.
Evidence     The kernel's own accounting for the thread that runs the steps: minor page faults and seconds in the kernel, per step
             under light observation; by line in the deep steps.
Levers       memory.allocator-settings
False alarm  Kernel time that is not the faults': it counts only up to what so many faults can take. Not all of it comes back: the
             kernel's zeroing also brought the page into the cache, where the operator that writes to it now misses.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.memory import FreshPages
from flatout.machine.cost.accounting import milliseconds

_PAGE_BYTES: Final = 4096
_FEWEST_FAULTS: Final = 200
_MOST_S_PER_FAULT: Final = 4e-6
"""Fault, zeroing, and unmapping at the end: 1.5 to 2 us in a virtual machine on an EPYC, less on bare metal (measured)."""
_KEPT_BYTES: Final = 1 << 30
"""At least: malloc gives the end of its heap back when more than this is free there, and maps larger tensors each time."""
_SPREAD: Final = (0.55, 1.1)
"""Keeping the memory saved 0.62, 0.69, 0.80, 0.93 and 1.15 times the kernel's fault time of five scripts with steps of 20 to
630 ms (bench/results/2026-11-24-epyc-2-cores); of one it saved nothing, of one 1.67. Of scripts with smaller tensors
1.03 to 1.37 times (docs/experiments/2026-11-21-page-faults.md)."""


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for the step."""
    pages = evidence.fresh_pages
    if pages is None or pages.faults < _FEWEST_FAULTS or evidence.steps.is_device_bound:
        return
    kernel_s = min(pages.kernel_s, pages.faults * _MOST_S_PER_FAULT)
    threshold_bytes = _bytes_to_keep(evidence, pages)
    lines = [s for s in (evidence.source_of(line.source) for line in pages.lines) if s is not None]
    yield Finding(
        where=lines[0] if lines else None,
        cost_s=_SPREAD[1] * kernel_s,
        saved_s=(_SPREAD[0] * kernel_s, _SPREAD[1] * kernel_s),
        because=f"{pages.faults * _PAGE_BYTES / 2**20:.1f} MiB of memory are given back to the system and taken anew in every "
        f"step: {pages.faults:.0f} page faults, {milliseconds(kernel_s)} in the kernel (by its own accounting)",
        edit=f"keep the memory: start with MALLOC_MMAP_THRESHOLD_={threshold_bytes} "
        f"MALLOC_TRIM_THRESHOLD_={threshold_bytes} python ..., "
        "or with LD_PRELOAD=libtcmalloc.so or libjemalloc.so; the process then keeps what its peak needs",
        also=tuple(lines[1:3]),
    )


def _bytes_to_keep(evidence: Evidence, pages: FreshPages) -> int:
    """A power of two that holds all a step can free at once: its peak, or where that is not known the memory it takes anew."""
    peak_bytes = max((m.peak_bytes for m in evidence.memory if m.device == "cpu"), default=0)
    needed = peak_bytes or ceil(pages.faults * _PAGE_BYTES)
    return max(_KEPT_BYTES, 1 << (needed - 1).bit_length())


RULE = rule(__name__, check, is_cure=True, title="Memory taken anew from the system in every step")
