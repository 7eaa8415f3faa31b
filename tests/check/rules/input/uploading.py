"""A step on a GPU that copies its batch from line 20 of train.py, as the tests of several rules need it."""

from __future__ import annotations

import msgspec
from tests.evidence_builder import MACHINE, EvidenceBuilder

GPU = msgspec.structs.replace(MACHINE, device_kind="cuda", h2d_pageable_bytes_per_s=8e9, h2d_pinned_bytes_per_s=50e9)
BATCH_BYTES = 200_000_000


def on_gpu(*, device_s: float = 0.06) -> tuple[EvidenceBuilder, int]:
    """The builder, and the line of the copy."""
    run = EvidenceBuilder(device_s=device_s, machine=GPU)
    return run, run.line("train.py", 20, "x = x.to(device)")
