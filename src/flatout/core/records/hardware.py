"""What a device can do: the vendor's figures (HardwareSpec) and what was measured on this machine (Machine).

A measured ceiling beats the data sheet. A figure that nobody knows is None, and `unknown` says why.
"""

from __future__ import annotations

import hashlib
import re
from typing import Literal

from flatout.core.records.record import Record

Engine = Literal["matrix", "vector"]
DeviceKind = Literal["cpu", "cuda"]


class Figure(Record, frozen=True, kw_only=True):
    """One number about a device with what is needed to use it: unit, the condition it holds under, and its source."""

    value: float
    unit: str
    condition: str
    source: str


class Rate(Record, frozen=True, kw_only=True):
    """Arithmetic of one dtype on one engine; 'matrix' means tensor or matrix cores, a multiply-add counts as two.

    `dtype` is torch's name without 'torch.', besides 'tf32' (float32 tensors, 10-bit mantissa in the product), 'float8'
    and 'float4' (any encoding). Integer rates have the unit 'OP/s'. Always dense.
    """

    dtype: str
    engine: Engine
    flop_per_s: Figure


class Link(Record, frozen=True, kw_only=True):
    """A connection of the device to others ('nvlink', 'infinity-fabric', 'pcie'); one direction, all lanes together.

    `reach` is how many devices one such network joins at most, 0 as many as a node has.
    """

    name: str
    bytes_per_s: Figure
    reach: int = 0


ReachedBy = Literal["products", "attention", "attention-backward", "memory"]
"""What reaches a share of a data sheet's rate: large products, fused attention forward and backward, and operators that only read
and write."""


class Reached(Record, frozen=True, kw_only=True):
    """The share of a data sheet's rate that programs were measured to reach on the product; training, on random numbers.

    `kernels` names the software whose kernels these are, '' any; `head_width` is that of attention's heads, 0 any.
    """

    what: ReachedBy
    dtype: str = "bfloat16"
    kernels: str = ""
    head_width: int = 0
    share: Figure


class HardwareSpec(Record, frozen=True, kw_only=True):
    """The vendor's data sheet of one product; `device_names` are the exact names that the driver reports.

    `cache_bytes` is the last-level cache, `num_units` streaming multiprocessors, compute units or cores. `reached` is what
    programs make of the rates.
    """

    id: str
    name: str
    vendor: str
    kind: Literal["gpu", "cpu"]
    device_names: tuple[str, ...] = ()
    memory_bytes: Figure | None = None
    memory_bytes_per_s: Figure | None = None
    cache_bytes: Figure | None = None
    num_units: Figure | None = None
    power_w: Figure | None = None
    rates: tuple[Rate, ...] = ()
    links: tuple[Link, ...] = ()
    reached: tuple[Reached, ...] = ()
    unknown: dict[str, str] = {}


class Identity(Record, frozen=True, kw_only=True):
    """What makes two measurements comparable: the same device, processor, cores, threads and torch. No host name."""

    device_kind: DeviceKind
    device_name: str
    cpu_model: str
    num_cores: int
    num_threads: int
    torch_version: str

    @property
    def id(self) -> str:
        """A short name made of these fields alone, fit for a file name."""
        fields = tuple(getattr(self, name) for name in Identity.__struct_fields__)
        digest = hashlib.sha256(repr(fields).encode()).hexdigest()[:10]
        slug = re.sub(r"[^a-z0-9]+", "-", self.device_name.lower()).strip("-")
        return f"{slug}-{digest}"


class Machine(Identity, frozen=True, kw_only=True):
    """What was measured on this very machine, as a PyTorch program reaches it: medians.

    `matmul_flop_per_s`    best square product of random data, by dtype; 'float32' is without TF32, 'tf32' with it. On a
                           GPU a burst after a rest: what the chip can do before its power limit slows it.
    `sustained_flop_per_s` the same without rest, where it was measured (a GPU, full effort): the power limit's share.
    `copy_bytes_per_s`     a copy far larger than the caches; bytes read plus bytes written.
    `cache_bytes_per_s`    the same for buffers that fit the cache, launches amortised; None when not measured.
    `cache_bytes`          size of the last-level cache that the device reports; on a CPU it may be shared with others.
    `dispatch_s`           host time of one tiny eager operator under no_grad, its launch included on a GPU.
    `dispatch_grad_s`      the same per forward operator with autograd: recording it and its backward.
    `launch_s`             device time from one tiny eager kernel to the next when many are queued; the host bounds it.
    `sync_s`               one `.item()` on an idle device.
    `processor_share`      processor time got over time asked for while all threads multiplied; below 0.9 the machine
                           was busy with something else and every figure is too low. None on a GPU.
    `spread`               interquartile range over median, by figure ('matmul_flop_per_s.float32').
    `conditions`           sizes the figures were measured at, by figure.
    `unknown`              why a figure is missing, by figure.
    `seconds`              how long the probe took.
    """

    measured_at: str
    effort: Literal["full", "quick"]
    matmul_flop_per_s: dict[str, float]
    sustained_flop_per_s: dict[str, float] = {}
    copy_bytes_per_s: float
    dispatch_s: float
    dispatch_grad_s: float
    seconds: float
    memory_bytes: int | None = None
    cache_bytes: int | None = None
    cache_bytes_per_s: float | None = None
    launch_s: float | None = None
    sync_s: float | None = None
    h2d_pageable_bytes_per_s: float | None = None
    h2d_pinned_bytes_per_s: float | None = None
    processor_share: float | None = None
    spec_id: str | None = None
    spread: dict[str, float] = {}
    conditions: dict[str, str] = {}
    unknown: dict[str, str] = {}
