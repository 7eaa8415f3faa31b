"""`flatout check` of several processes: who is which rank, where each leaves its Evidence, and how they are started and ended."""

from __future__ import annotations

import os
import signal
import stat
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Final, NamedTuple

from flatout.core.errors import CaptureError, UsageError

if TYPE_CHECKING:
    from flatout.app.session import Observation
    from flatout.core.records.evidence import Evidence

_LAST_WORDS_S: Final = 20.0
"""Other ranks end some seconds after this one; torchrun kills what is left after 30."""


_BY_SIGNAL: Final = 128
"""A process that a signal ended has this code and more."""


class Rank(NamedTuple):
    """What a launcher says of this process in its environment (torchrun's names, which Accelerate and others share)."""

    rank: int
    world_size: int
    local_world_size: int


def launched_rank(environment: Mapping[str, str]) -> Rank | None:
    """This process as one rank of several, or None when it is no such thing."""
    try:
        rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local = int(environment.get("LOCAL_WORLD_SIZE", world_size))
    except (KeyError, ValueError):
        return None
    return Rank(rank, world_size, local) if world_size > 1 else None


def launch_command(nproc: int, request: Path) -> list[str]:
    """The command that starts `nproc` observed ranks on this machine, with a rendezvous on a free port."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    return [*launcher, "-m", "flatout.app.cli.children.observe", str(request)]


def launch_environment(environment: Mapping[str, str], nproc: int) -> dict[str, str]:
    """The variables for a launcher of `nproc` ranks: the one thread a rank that torchrun sets where nothing says otherwise, which
    it then need not announce.
    """
    one = {"OMP_NUM_THREADS": "1"} if nproc > 1 else {}
    return {**one, **environment}


def as_rank(observation: Observation, rank: int, world_size: int) -> Observation:
    """The request as rank `rank` follows it: its Evidence goes to a file of its own in the folder that the request names."""
    import msgspec

    folder = Path(observation.evidence_path)
    path = evidence_path(folder, rank)
    pid_path(folder, rank).write_text(str(os.getpid()))
    return msgspec.structs.replace(observation, rank=rank, world_size=world_size, evidence_path=str(path))


def evidence_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


def pid_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.pid"


def shared_folder(environment: Mapping[str, str], rank: Rank) -> Path:
    """A folder that the ranks of one run on one host find without talking: named by what their launcher told them all.

    Raises UsageError when it belongs to another user, is open to others, or is a link.
    """
    parts = [environment.get(n, "") for n in ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")]
    name = "-".join("".join(c for c in part if c.isalnum()) for part in parts)
    folder = Path(tempfile.gettempdir()) / f"flatout-{os.getuid()}-{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077:
        raise UsageError(f"'{folder}' is not a folder of yours alone; set TMPDIR to a folder of your own")
    for stale in (evidence_path(folder, rank.rank), pid_path(folder, rank.rank)):
        stale.unlink(missing_ok=True)
        stale.with_suffix(".draft").unlink(missing_ok=True)
    return folder


def all_written(folder: Path, ranks: range) -> bool:
    """Whether each of the ranks has left its Evidence."""
    return all(evidence_path(folder, rank).exists() for rank in ranks)


def wait_for_others(folder: Path, ranks: range) -> None:
    """Give the ranks of this host some seconds to leave their Evidence too."""
    end = monotonic() + _LAST_WORDS_S
    while monotonic() < end and not all_written(folder, ranks):
        sleep(0.1)


def gather(folder: Path, world_size: int) -> Evidence:
    """What the ranks left in the folder, made one. Raises CaptureError when none left anything."""
    from flatout.app.session import draft_path
    from flatout.check.merge_ranks import merge
    from flatout.report.json_report import read_evidence

    found, notes = [], []
    for rank in range(world_size):
        path = evidence_path(folder, rank)
        draft = draft_path(path)
        if path.exists():
            found.append(read_evidence(path.read_bytes()))
        elif draft.exists():
            found.append(read_evidence(draft.read_bytes()))
            notes.append(f"rank {rank} was killed: what it had shown until its close looks is all there is of it")
    if not found:
        raise CaptureError("no rank could write what it saw (killed, or os._exit)")
    return merge(found, notes=notes)


def failed_code(evidence: Evidence) -> int:
    """The exit code of the first rank that failed by itself, not by a signal; 0 where none did. The launcher may have been ended
    before it could say so, when all ranks had left their Evidence.
    """
    ranks = evidence.distributed.ranks if evidence.distributed is not None else ()
    return next((rank.exit_code for rank in ranks if rank.exit_code and 0 < rank.exit_code < _BY_SIGNAL), 0)


def observing_ranks(folder: Path, world_size: int) -> list[int]:
    """The processes of the ranks of this host that still run."""
    found = []
    for rank in range(world_size):
        path = pid_path(folder, rank)
        with suppress(OSError):
            pid = int(path.read_text())
            if b"flatout.app.cli.children.observe" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def end_leftovers(folder: Path, world_size: int) -> None:
    """Kill ranks that outlived their launcher."""
    for pid in observing_ranks(folder, world_size):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
