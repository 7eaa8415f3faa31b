"""Memory in a step: how much, when, what is alive at the peak and which lines created it, and what grows from step to step.

Bytes are bytes of storage, each storage counted once however many tensors look at it. Where the host's memory is concerned, pages
of a large storage that nobody has written are left out of the parts (they take none), and so of the peak.
"""

from __future__ import annotations

from typing import Literal

from flatout.core.records.record import Record

MemoryKind = Literal[
    "parameters",
    "buffers",
    "gradients",
    "optimizer state",
    "batch",
    "activations",
    "temporaries",
    "kept",
    "process",
    "cached",
]
"""activations: saved for the backward; temporaries: created in this step and not saved; kept: created before this step (in an
earlier one, or a data set in memory) and still alive; process: what was in use besides tensors as the step began (on a CPU the
interpreter and libraries, on a device the buffers of libraries such as cuBLAS); cached: not in use, and not given back by the
C library's malloc, fragmentation included (CPU only; on a device see `reserved_bytes`)."""


class MemoryPart(Record, frozen=True, kw_only=True):
    """What is alive at the peak, of one kind, created at one line in one module (-1 and '' where that is unknown)."""

    kind: MemoryKind
    bytes: int
    num_tensors: int
    source: int = -1
    module: str = ""
    example: str = ""
    """Shape and dtype of the largest tensor: 'float32[8, 1024, 50257]'."""


class MemoryPoint(Record, frozen=True, kw_only=True):
    """Bytes alive at one moment of the step that was watched; `at` runs from 0 (its start) to 1 (its end)."""

    at: float
    bytes: int
    phase: str


class Growth(Record, frozen=True, kw_only=True):
    """Tensors created at this line that stay alive from step to step.

    `holder` is the user's line that keeps them (an append, an assignment to an attribute), -1 where it was not found;
    `container` names what holds them ("list 'losses' of <module>").
    """

    source: int
    holder: int
    container: str
    bytes_per_step: int
    tensors_per_step: float
    has_graph: bool
    """Whether the tensors hold autograd graphs: then the whole step's activations stay alive with them."""


class RetainedGraph(Record, frozen=True, kw_only=True):
    """A backward with retain_graph=True whose graph no other backward went through.

    `bytes` is what its graph still occupied when the step ended, and so during the next step's forward.
    """

    source: int
    bytes: int
    num_calls: int


class Memory(Record, frozen=True, kw_only=True):
    """One step's memory on one device.

    `peak_bytes` is the sum of `at_peak`; `measured_peak_bytes` is what the machine's own accounting has for the same step
    (the largest resident size on a CPU, the allocator's peak on a device), None where that cannot be had.
    `reserved_bytes` is what the device's allocator took from the driver, `total_bytes` what the device has.
    """

    device: str
    peak_bytes: int
    peak_phase: str
    at_peak: tuple[MemoryPart, ...] = ()
    curve: tuple[MemoryPoint, ...] = ()
    measured_peak_bytes: int | None = None
    reserved_bytes: int | None = None
    total_bytes: int | None = None
    growth_bytes_per_step: float = 0.0
    """What malloc (or the device's allocator) had in use more after each light step, as measured; 0 when too few ran."""
    growth: tuple[Growth, ...] = ()
    retained: tuple[RetainedGraph, ...] = ()
    num_retries: int = 0
    """Times the device's allocator had to free its cache and ask again (cudaMalloc retries), in all observed steps."""
    num_cache_clears: float = 0.0
    """Calls of empty_cache a step."""


class PagesOfLine(Record, frozen=True, kw_only=True):
    """Page faults a step of the operators of one line, in the deep steps."""

    source: int
    faults: float


class FreshPages(Record, frozen=True, kw_only=True):
    """What the kernel counted for the thread that runs the steps, a step under light observation.

    `faults` are page faults served without reading a file (4 KiB each, where pages are not huge), `kernel_s` seconds in the
    kernel for whatever reason; `lines` the lines with most faults, by the deep steps.
    """

    faults: float
    kernel_s: float
    num_steps: int
    lines: tuple[PagesOfLine, ...] = ()
