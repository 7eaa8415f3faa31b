"""`flatout check` of several processes: who is which rank, where each leaves its Evidence, and how they are started and ended.

Ranks of one host leave it in a folder there. Those of other hosts bring it to rank 0: through the store of torchrun's agents, or
a folder that all hosts see."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from flatout.core.errors import CaptureError, UsageError

if TYPE_CHECKING:
    from flatout.app.session import Observation
    from flatout.core.records.evidence import Evidence

_LAST_WORDS_S: Final = 20.0
"""Other ranks end some seconds after this one; torchrun kills what is left after 30."""


_BY_SIGNAL: Final = 128
"""A process that a signal ended has this code and more."""


class Rank(NamedTuple):
    """What a launcher says of this process in its environment (torchrun's names, which Accelerate and others share, or
    Slurm's)."""

    rank: int
    world_size: int
    local_world_size: int


def launched_rank(environment: Mapping[str, str]) -> Rank | None:
    """This process as one rank of several, or None when it is no such thing.

    A task of Slurm's srun that nothing else has made a rank is one, too. Ranks of a host follow one another.
    """
    try:
        if "RANK" not in environment and "SLURM_STEP_ID" in environment:
            rank, world_size = int(environment["SLURM_PROCID"]), int(environment["SLURM_NTASKS"])
            local = _tasks_of_node(environment["SLURM_STEP_TASKS_PER_NODE"], int(environment["SLURM_NODEID"]))
        else:
            rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            local = int(environment.get("LOCAL_WORLD_SIZE", world_size))
    except (KeyError, ValueError, IndexError):
        return None
    return Rank(rank, world_size, local) if world_size > 1 else None


def _tasks_of_node(text: str, node: int) -> int:
    """Tasks of a step on one of its nodes, as Slurm says them.

    >>> [_tasks_of_node("2(x3),1", node) for node in (0, 2, 3)]
    [2, 2, 1]
    """
    every: list[int] = []
    for part in text.split(","):
        number, _, times = part.partition("(x")
        every += [int(number)] * int(times.rstrip(")") or 1)
    return every[node]


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
    node = environment.get("SLURMD_NODENAME", "")
    folder = _own_folder(
        Path(tempfile.gettempdir()) / f"flatout-{os.getuid()}-{_run_name(environment)}-{node}", "TMPDIR"
    )
    for stale in (evidence_path(folder, rank.rank), pid_path(folder, rank.rank)):
        stale.unlink(missing_ok=True)
        stale.with_suffix(".draft").unlink(missing_ok=True)
    return folder


def _run_name(environment: Mapping[str, str]) -> str:
    """What the ranks of one run have in common, and those of another have not."""
    names = ["TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"]
    if "RANK" not in environment:
        names = ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"]
    return "-".join("".join(c for c in environment.get(name, "") if c.isalnum()) for name in names)


def _own_folder(folder: Path, variable: str) -> Path:
    """A folder of this user alone, made where it is not there. Raises UsageError when it is another's."""
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077:
        raise UsageError(f"'{folder}' is not a folder of yours alone; set {variable} to a folder of your own")
    return folder


# -- from other hosts --------------------------------------------------------------------------------------------------------


class FolderExchange:
    """Evidence of ranks of other hosts in a folder that all hosts see."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, rank: int, data: bytes) -> None:
        """Leave what a rank has. Raises OSError, and UsageError when the folder is another user's."""
        from flatout.core.files import write_whole_file

        write_whole_file(evidence_path(_own_folder(self._folder, "--gather"), rank), data)

    def take(self, rank: int) -> bytes | None:
        """What a rank has left, None while it has not."""
        path = evidence_path(self._folder, rank)
        with suppress(FileNotFoundError):
            return path.read_bytes() if path.lstat().st_uid == os.getuid() else None
        return None

    def close(self) -> None:
        """Remove the folder; rank 0 does so at the end."""
        shutil.rmtree(self._folder, ignore_errors=True)


class StoreExchange:
    """The same in the store of torchrun's agents, which every rank of the job reaches, and which outlives the ranks."""

    def __init__(self, host: str, port: int, name: str) -> None:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        wait = timedelta(seconds=_LAST_WORDS_S)
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)
        self._store: Any = PrefixStore(f"flatout/check/{name}", store)

    def put(self, rank: int, data: bytes) -> None:
        """Leave what a rank has. Raises RuntimeError where the store is gone."""
        self._store.set(f"{rank}", zlib.compress(data))

    def take(self, rank: int) -> bytes | None:
        """What a rank has left, None while it has not."""
        return zlib.decompress(self._store.get(f"{rank}")) if self._store.check([f"{rank}"]) else None

    def close(self) -> None:
        """Nothing is left to do: the store ends with the job."""


Exchange = FolderExchange | StoreExchange


def exchange_of(environment: Mapping[str, str], rank: Rank, folder: Path | None) -> Exchange | None:
    """How Evidence of other hosts comes to rank 0; None where there are no others, or no way is known.

    `folder` is one that all hosts see; without it, torchrun's store, or in Slurm the folder in which the job was submitted.
    """
    if rank.local_world_size >= rank.world_size:
        return None
    name = _run_name(environment)
    if folder is None and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "RANK" in environment:
        with suppress(RuntimeError, ValueError, KeyError):
            return StoreExchange(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), name)
    if folder is None and environment.get("SLURM_SUBMIT_DIR"):
        folder = Path(environment["SLURM_SUBMIT_DIR"])
    if folder is None or not folder.is_dir() or not os.access(folder, os.W_OK):
        return None
    return FolderExchange(folder / f".flatout-{name}")


def bring(exchange: Exchange, folder: Path, rank: int) -> bool:
    """Bring what this rank has left in its host's folder to rank 0. Whether that went well."""
    from flatout.app.session import draft_path

    own = evidence_path(folder, rank)
    found = next((path for path in (own, draft_path(own)) if path.exists()), None)
    if found is None:
        return False
    try:
        exchange.put(rank, found.read_bytes())
    except (OSError, RuntimeError):
        return False
    for path in (own, draft_path(own), pid_path(folder, rank), folder / f"observation{rank}.json"):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()  # the last of this host
    return True


def fetch(exchange: Exchange, folder: Path, ranks: Iterable[int]) -> None:
    """Wait some seconds for what these ranks bring, and put it into the folder."""
    left, end = set(ranks), monotonic() + _LAST_WORDS_S
    while left and monotonic() < end:
        try:
            for rank in sorted(left):
                if (data := exchange.take(rank)) is not None:
                    evidence_path(folder, rank).write_bytes(data)
                    left.discard(rank)
        except (OSError, RuntimeError, zlib.error):
            return
        if left:
            sleep(0.1)


# -- the ranks of this host --------------------------------------------------------------------------------------------------


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
