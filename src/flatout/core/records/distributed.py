"""Several processes that train together: each rank's steps, and the collectives between them."""

from __future__ import annotations

from typing import NamedTuple

from flatout.core.records.record import Record


class Place(NamedTuple):
    """The rank of this process and the number of ranks, as their launcher says."""

    rank: int
    world_size: int


class Collective(Record, frozen=True, kw_only=True):
    """All calls of one collective from one line in one phase, in a step.

    `op` is the function's name ('all_reduce'), 'ddp.gradients' for the buckets of a DistributedDataParallel module (`source` is
    then the line of the backward). `num` and `bytes` are those of a step, all calls together. `seconds` is from start to
    completion, `exposed_s` the part in which neither the host computed nor the device ran other kernels; `wait_s` the part of it
    spent waiting for slower ranks (this rank was ready, the last was not): 0 until the ranks have been merged.
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
    caller: str = ""
    """The module of a library (torch's own included) that called it below the user's line; '' when the line itself did."""
    small_call_s: float = 0.0
    """Median exposed time of one call with at most 16 KiB: what a call costs however little it carries; 0 when there was none."""
    exposed_by_step: tuple[float, ...] = ()
    """Exposed seconds step by step, for the steps in the rank's `step_numbers`."""

    @property
    def transfer_s(self) -> float:
        """The exposed part that would remain if all ranks arrived together."""
        return max(0.0, self.exposed_s - self.wait_s)


class RankLine(Record, frozen=True, kw_only=True):
    """Sampled seconds of a step at one line of one rank."""

    source: int
    phase: str
    seconds: float


class RankSummary(Record, frozen=True, kw_only=True):
    """One rank's steps: its median step, its own work (all but exposed communication), and the sizes of its batches.

    `wait_s` is what it waited for slower ranks in a step, known once the ranks are merged. The columns `work_by_step` and
    `batch_elements` belong to the steps in `step_numbers`, which count alike on all ranks; `batch_elements` is the number of
    elements of the largest tensor passed to the model (padding included: it is computed on), summed over a step's model calls.
    """

    rank: int
    host: str
    step_s: float
    work_s: float
    wait_s: float = 0.0
    phases: dict[str, float] = {}
    step_numbers: tuple[int, ...] = ()
    work_by_step: tuple[float, ...] = ()
    batch_elements: tuple[int, ...] = ()
    lines: tuple[RankLine, ...] = ()
    """Its hottest sampled lines; `source` counts in the Evidence that holds this record."""
    num_steps: int = 0
    exit: str = ""
    exit_code: int | None = None


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
    backward_source: int = -1
    exposed_per_sync_s: float | None = None
    """Median time that a backward waited for its gradient synchronisation after its own work was done; None when unknown."""
    search_s: float = 0.0
    """Seconds a step spent looking for unused parameters."""
    bucket_cap_bytes: int = 0


class Distributed(Record, frozen=True, kw_only=True):
    """What all ranks showed together; collectives are those of the rank this Evidence belongs to."""

    backend: str
    rank: int
    world_size: int
    ranks: tuple[RankSummary, ...] = ()
    collectives: tuple[Collective, ...] = ()
    replications: tuple[Replication, ...] = ()
    missing_ranks: tuple[int, ...] = ()

    def summary_of(self, rank: int) -> RankSummary | None:
        """What rank `rank` showed; None when it is missing."""
        return next((r for r in self.ranks if r.rank == rank), None)
