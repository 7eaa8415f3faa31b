"""Several processes that train together: each rank's steps, and the collectives between them."""

from __future__ import annotations

from flatout.records.record import Record


class Collective(Record, frozen=True, kw_only=True):
    """All calls of one collective from one line in one phase, in a step.

    `seconds` is from start to completion, `exposed_s` the part in which neither the host computed nor the device ran other
    kernels; `wait_s` the part of it spent waiting for slower ranks (this rank was ready, the last was not).
    """

    op: str
    source: int
    phase: str
    backend: str
    group_size: int
    num: float
    bytes: int
    seconds: float
    exposed_s: float
    wait_s: float = 0.0


class RankSummary(Record, frozen=True, kw_only=True):
    """One rank's steps: its median step, its own work (all but waiting for others), and the sizes of its batches."""

    rank: int
    host: str
    step_s: float
    work_s: float
    phases: dict[str, float] = {}
    batch_elements: tuple[int, ...] = ()
    """Elements of the largest tensor of each batch (positions that are no padding, where that is known), step by step."""
    num_steps: int = 0


class Replication(Record, frozen=True, kw_only=True):
    """A DistributedDataParallel module: its settings and its buckets."""

    source: int
    bucket_bytes: tuple[int, ...]
    find_unused_parameters: bool
    has_unused_parameters: bool | None
    static_graph: bool
    gradient_as_bucket_view: bool
    syncs_per_step: float
    """Backward passes with a gradient synchronisation, for each optimizer step; above 1 under accumulation without no_sync."""


class Distributed(Record, frozen=True, kw_only=True):
    """What all ranks showed together; collectives are those of the rank this Evidence belongs to."""

    backend: str
    rank: int
    world_size: int
    ranks: tuple[RankSummary, ...] = ()
    collectives: tuple[Collective, ...] = ()
    replications: tuple[Replication, ...] = ()
    missing_ranks: tuple[int, ...] = ()
