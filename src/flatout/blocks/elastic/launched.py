"""A rank that another launcher starts again, such as torchrun or Slurm: where copies of its state lie in the node's memory.

Nobody owns that folder while no rank lives. So it is found again by the name of the job, of the node and of the training's own
folder; the last rank that ends in order removes what it has written, and what a job left that was never started again is removed
by the next one on the node, an hour after it was last written.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import socket
import stat
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from flatout.blocks.elastic.messages import HeartbeatPage, RankContext
from flatout.core.errors import UsageError

PREFIX: Final = "flatout-job-"
_LOCK: Final = "lock"
_LEFT_S: Final = 3600.0
"""Seconds after which a folder is left, that no living rank has: a scheduler may take minutes to start a job again."""
_DYING_S: Final = 10.0
"""Seconds that a rank of the start before may still take to be gone."""
_RESERVE: Final = 1.2
"""Times the bytes that are to be written which must be free."""
_MEMINFO: Final = Path("/proc/meminfo")
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(kw_only=True)
class LaunchedContext(RankContext):
    """A rank's place where another launcher than `flatout survive` has started it."""

    lock: int
    """The descriptor of the folder's lock, which is shared by the ranks that live."""
    rank_lock: int
    """That of this rank's own, which keeps out a process that was left behind."""

    def reach(self, step: int) -> None:
        """Report that so many steps are done, and that the folder is in use."""
        super().reach(step)
        os.utime(self.memory)

    def room_bytes(self) -> float:
        """Bytes that can still be written into the folder."""
        free = float(shutil.disk_usage(self.memory).free)
        with suppress(OSError, StopIteration, ValueError, IndexError):
            line = next(one for one in _MEMINFO.read_text().splitlines() if one.startswith("MemAvailable:"))
            free = min(free, 1024.0 * int(line.split()[1]))
        return free / _RESERVE

    def written_bytes(self) -> int:
        """Bytes of the copies that lie there, which are written over."""
        return sum(path.stat().st_size for path in self.memory.glob("*-of-*"))

    def remove_at_end(self) -> None:
        """Remove the folder when the interpreter ends without an error; the last of its ranks does so."""
        atexit.register(self._remove)

    def _remove(self) -> None:
        if getattr(sys, "last_value", None) is not None:
            return  # an exception ended it: it may be started again
        fcntl.flock(self.lock, fcntl.LOCK_UN)
        with suppress(OSError):
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.memory, ignore_errors=True)
        os.close(self.lock)


def launched_context(memory: Path, training: str, environment: Mapping[str, str]) -> LaunchedContext | None:
    """The place of this process where another launcher has started it and may start it again; None where none has.

    `training` tells trainings of one job apart: the folder of its checkpoints, say. Raises UsageError where the folder cannot be
    had.
    """
    job = job_of(environment)
    if job is None or sys.platform != "linux":
        return None
    if not memory.is_dir() or not os.access(memory, os.W_OK):
        raise UsageError(f"'{memory}' is no folder to write to; give one in memory (such as /dev/shm), or memory=None")
    node = _node_of(environment, memory)
    name = _digest(f"{os.getuid()} {job} {node} {training}")
    folder = memory / f"{PREFIX}{name}"
    _remove_left(memory, besides=folder)
    lock = _opened(folder)
    local, number = int(environment.get("LOCAL_RANK", "0")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    return LaunchedContext(
        job=_digest(f"{job} {training}"),
        restart=int(environment.get("TORCHELASTIC_RESTART_COUNT") or environment.get("SLURM_RESTART_COUNT") or 0),
        node=int(_digest(f"{node}")[:12], 16),
        row=local,
        memory=folder,
        heartbeats=HeartbeatPage(folder / f"heartbeats-{local:05}", max(local + 1, number)),
        restart_s=None,
        lock=lock,
        rank_lock=_alone(folder, int(environment.get("RANK") or environment.get("SLURM_PROCID") or 0)),
    )


def job_of(environment: Mapping[str, str]) -> str | None:
    """The name of the job by which a launcher starts ranks again: what FLATOUT_JOB says, torchrun's run, else Slurm's job.

    None where there is none.

    A run without a name has that of the process that starts its ranks.

    >>> job_of({"FLATOUT_JOB": "mine", "SLURM_JOB_ID": "7"})
    'job mine'
    >>> job_of({"TORCHELASTIC_RUN_ID": "big"}), job_of({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}), job_of({})
    ('torchrun big', 'slurm 7', None)
    """
    if environment.get("FLATOUT_JOB"):
        return f"job {environment['FLATOUT_JOB']}"
    run, slurm = environment.get("TORCHELASTIC_RUN_ID"), environment.get("SLURM_JOB_ID")
    if run and run != "none":
        return f"torchrun {run}"
    if slurm and (run or "SLURM_PROCID" in environment):
        return f"slurm {slurm}"
    if run:
        parent = os.getppid()
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
        return f"torchrun of process {parent} since {began}"
    return None


def _node_of(environment: Mapping[str, str], memory: Path) -> str:
    """What this machine, container or node of Slurm is known by: those that share no memory differ. FLATOUT_NODE says
    otherwise."""
    if environment.get("FLATOUT_NODE"):
        return environment["FLATOUT_NODE"]
    node = environment.get("SLURMD_NODENAME", "")
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    there = memory.stat()
    return f"{socket.gethostname()} {node} {boot} {there.st_dev} {there.st_ino}"


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:32]


def _opened(folder: Path) -> int:
    """The folder of this user alone, made where it is not there; the descriptor of its lock, shared with other living ranks."""
    folder.mkdir(mode=0o700, exist_ok=True)
    there = folder.lstat()
    if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.getuid() or stat.S_IMODE(there.st_mode) & 0o077:
        raise UsageError(f"'{folder}' is not this user's alone; remove it, or give another folder as memory")
    os.utime(folder)
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _alone(folder: Path, rank: int) -> int:
    """The descriptor of a lock that one living process of a rank has. Raises UsageError where another one lives on."""
    path, began_s = folder / f"rank-{rank:05}", time.monotonic()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() - began_s < _DYING_S:
                time.sleep(0.1)
                continue
            other = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise UsageError(
                f"process {other} is rank {rank} of this job, too, and lives: end it, or give this job another name (--rdzv-id)"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return descriptor


def _remove_left(memory: Path, *, besides: Path) -> None:
    """Remove folders of this user's jobs that no rank lives in, and that were not written for long."""
    for folder in memory.glob(f"{PREFIX}*"):
        with suppress(OSError):
            there = folder.lstat()
            is_ours = stat.S_ISDIR(there.st_mode) and there.st_uid == os.getuid()
            age_s = time.time() - there.st_mtime  # noqa: TID251  # files have the wall clock's time
            if folder == besides or not is_ours or age_s < _LEFT_S:
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
