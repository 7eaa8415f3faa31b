"""What a run leaves behind: where it ran, on what code, with which settings, and how its first steps came out."""

from __future__ import annotations

from typing import Literal

from flatout.core.records.record import Record

RUN_VERSION = 1


class FileLeftOut(Record, frozen=True, kw_only=True):
    """A file, a variable or an argument that was not recorded, and why."""

    name: str
    because: str


class Code(Record, frozen=True, kw_only=True):
    """The code of a run. `revision` is '' outside of git; then all of it lies in the run's folder.

    `sources` are SHA-256 sums, by path relative to `root`, of the files there that python had read at the end, and of those that
    were changed or untracked.
    """

    root: str
    revision: str = ""
    branch: str = ""
    changed: tuple[str, ...] = ()
    untracked: tuple[str, ...] = ()
    sources: dict[str, str] = {}


class Surroundings(Record, frozen=True, kw_only=True):
    """What a run runs in, as far as it can change its numbers."""

    python: str
    torch: str
    platform: str
    device: str
    driver: str = ""
    num_cores: int
    num_threads: int
    num_interop_threads: int
    world_size: int = 1
    environment: dict[str, str] = {}
    settings: dict[str, str] = {}
    packages: dict[str, str] = {}


class RunSpeed(Record, frozen=True, kw_only=True):
    """A light record of performance: seconds of a step, over `num_steps` of them after the first few."""

    num_steps: int
    median_s: float
    low_s: float
    high_s: float


class StepDigests(Record, frozen=True, kw_only=True):
    """Checksums of one optimizer step: what root modules were given (by call, and by row), gradients, weights, losses."""

    step: int
    inputs: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    gradients: dict[str, int] = {}
    weights: dict[str, int] = {}
    losses: tuple[int, ...] = ()


class RunRecord(Record, frozen=True, kw_only=True):
    """One run. `command` is what follows the interpreter; `folder` is the working directory relative to the code's root."""

    version: int = RUN_VERSION
    name: str
    command: tuple[str, ...]
    folder: str
    began: str
    seconds: float = 0.0
    outcome: Literal["running", "finished", "failed"] = "running"
    error: str = ""
    num_steps: int = 0
    config: dict[str, str] = {}
    seeds: dict[str, str] = {}
    code: Code
    surroundings: Surroundings
    speed: RunSpeed | None = None
    left_out: tuple[FileLeftOut, ...] = ()
