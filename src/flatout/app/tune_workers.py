"""Workers for a search, on other machines of a cluster: tasks of a Slurm job array, or of Ray. All see the same files."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final

from flatout.core.errors import FlatoutError, UsageError
from flatout.core.files import write_whole_file
from flatout.core.records.record import from_json, to_json
from flatout.core.records.verdict import Verdict
from flatout.core.registry import levers
from flatout.tune.search.comparisons import LeverComparison, Task, Workers, compare_here

_POLL_S: Final = 0.5
_ASK_S: Final = 10.0
"""How often Slurm is asked whether a task is still there: each question is work for the cluster's one controller."""
_GRACE_S: Final = 30.0
"""A file may be seen on one machine so long after it was written on another (NFS caches names for up to a minute by default; a
listing of the folder, which is made here, asks anew)."""
_MOST: Final = 1000


def workers_of(text: str, folder: Path, *, options: Sequence[str] = ()) -> Workers | None:
    """The workers that 'slurm:4' or 'ray:4' names, None for ''; `folder` is one that all machines see, made when it is needed.

    `options` are those of sbatch, as they stand on its command line; or 'name=number' for resources of a Ray task, such as
    'num_gpus=1'.

    Raises:
        UsageError: The text names none, or what it names is not here.
    """
    kind, _, digits = text.partition(":")
    if not text:
        if options:
            raise UsageError("options for workers need --workers, such as --workers slurm:4")
        return None
    if kind not in ("slurm", "ray") or not digits.isdigit() or not 0 < int(digits) <= _MOST:
        raise UsageError(f"--workers {text}: give slurm:N or ray:N, with N from 1 to {_MOST}")
    return _slurm(int(digits), folder, options) if kind == "slurm" else _ray(int(digits), options)


def _slurm(number: int, folder: Path, options: Sequence[str]) -> Workers:
    missing = [name for name in ("sbatch", "squeue", "scancel") if shutil.which(name) is None]
    if missing:
        raise UsageError(f"--workers slurm needs Slurm's commands, and there is no {', '.join(missing)} here")
    return SlurmWorkers(number, folder, options)


def _ray(number: int, options: Sequence[str]) -> Workers:
    resources: dict[str, float] = {}
    for option in options:
        name, _, value = option.partition("=")
        try:
            resources[name] = float(value)
        except ValueError as e:
            raise UsageError(f"--worker-option {option}: for Ray give name=number, such as num_gpus=1") from e
    return RayWorkers(number, resources)


class SlurmWorkers:
    """Each call of `start` is one job array; a task is done when its file is there."""

    def __init__(self, number: int, folder: Path, options: Sequence[str]) -> None:
        self.number = number
        self._folder, self._options = folder.absolute(), list(options)
        self._numbers = count()

    def start(self, comparisons: Sequence[LeverComparison]) -> Sequence[Task]:
        """Submit one array with a task for each comparison. Raises UsageError when sbatch refuses."""
        self._folder.mkdir(parents=True, exist_ok=True)
        numbers = [next(self._numbers) for _ in comparisons]
        for number, comparison in zip(numbers, comparisons, strict=True):
            for left in self._folder.glob(f"{number}.*"):
                left.unlink()
            write_whole_file(self._folder / f"{number}.json", to_json(comparison))
        program = [sys.executable, "-m", "flatout.app.cli.children.compare", str(self._folder)]
        command = [
            *("sbatch", "--parsable", f"--array={numbers[0]}-{numbers[-1]}", "--job-name=flatout-tune"),
            f"--output={self._folder}/%a.log",
            *self._options,
            f"--wrap=exec {shlex.join(program)} $SLURM_ARRAY_TASK_ID",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UsageError(f"sbatch refuses the workers: {done.stderr.strip() or done.stdout.strip()}")
        job = done.stdout.strip().partition(";")[0]
        return [_SlurmTask(self._folder, number, f"{job}_{number}") for number in numbers]


class _SlurmTask:
    def __init__(self, folder: Path, number: int, name: str) -> None:
        self._folder, self._number, self._name = folder, number, name
        self._is_done = False

    def verdict(self, timeout_s: float) -> Verdict | None:
        """The Verdict once its file is there; None where Slurm knows the task no more, or the time is up."""
        end_s, asked_s, gone_s = monotonic() + timeout_s, monotonic(), None
        while True:
            names = {path.name for path in self._folder.iterdir()}
            if f"{self._number}.verdict" in names:
                self._is_done = True
                with suppress(FlatoutError):
                    return from_json((self._folder / f"{self._number}.verdict").read_bytes(), Verdict)
                return None
            if f"{self._number}.failed" in names:
                self._is_done = True
                return None
            now_s = monotonic()
            if now_s > end_s or (gone_s is not None and now_s - gone_s > _GRACE_S):
                return None
            if gone_s is None and now_s - asked_s > _ASK_S:
                asked_s = now_s
                gone_s = None if self._is_known() else now_s
            sleep(_POLL_S)

    def cancel(self) -> None:
        if not self._is_done:
            subprocess.run(["scancel", self._name], capture_output=True, check=False)
            self._is_done = True

    def _is_known(self) -> bool:
        """Whether Slurm still has the task, waiting or running; one that cannot be asked may have it."""
        command = ["squeue", "--noheader", "--jobs", self._name, "--format=%T"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return bool(done.stdout.strip()) or (done.returncode != 0 and "Invalid job id" not in done.stderr)


class RayWorkers:
    """Tasks of the Ray cluster that is running, or of one on this machine where none is."""

    def __init__(self, number: int, resources: dict[str, float]) -> None:
        try:
            import ray
        except ImportError as e:
            raise UsageError("--workers ray needs Ray, which is not installed: pip install 'flatout[ray]'") from e
        self.number = number
        self._ray: Any = ray
        self._resources = resources
        self._function: Any = None

    def start(self, comparisons: Sequence[LeverComparison]) -> Sequence[Task]:
        """Begin a task for each comparison. Raises UsageError when Ray does not start, or does not know a resource's name."""
        if self._function is None:
            try:
                if not self._ray.is_initialized():
                    self._ray.init(log_to_driver=False, logging_level="error")
                self._function = self._ray.remote(_compared).options(
                    max_retries=0, **{name: int(v) if v.is_integer() else v for name, v in self._resources.items()}
                )
            except (ConnectionError, RuntimeError, ValueError) as e:
                raise UsageError(f"--workers ray: {e}") from e
        return [_RayTask(self._ray, self._function.remote(to_json(comparison))) for comparison in comparisons]


def _compared(comparison: bytes) -> bytes:
    """What a task of Ray does."""
    found = from_json(comparison, LeverComparison)
    return to_json(compare_here(found, {lever.id: lever for lever in levers()}))


class _RayTask:
    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self._reference = ray, reference

    def verdict(self, timeout_s: float) -> Verdict | None:
        """The Verdict once the task has it; None where the task or its worker failed, or the time is up."""
        try:
            return from_json(self._ray.get(self._reference, timeout=timeout_s), Verdict)
        except (self._ray.exceptions.RayError, FlatoutError):
            return None

    def cancel(self) -> None:
        with suppress(self._ray.exceptions.RayError):
            self._ray.cancel(self._reference, force=True)
