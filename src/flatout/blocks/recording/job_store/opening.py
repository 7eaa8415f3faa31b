"""The store at a path, and the site's policy beside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from flatout.blocks.recording.job_store.folder import FolderStore
from flatout.blocks.recording.job_store.policy import FleetPolicy, read_policy
from flatout.blocks.recording.job_store.sqlite import SqliteStore
from flatout.blocks.recording.job_store.store import JobStore
from flatout.core.errors import UsageError

_FILES: Final = (".sqlite", ".sqlite3", ".db")
POLICY: Final = "fleet.toml"
_NETWORK: Final = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "beegfs", "ceph", "gpfs", "fuse.sshfs", "9p")
"""File systems of several machines (names of /proc/mounts): SQLite's locks and its shared memory do not hold there."""


def default_store() -> Path:
    """The user's own store, `$XDG_DATA_HOME/flatout/fleet.sqlite` or below `~/.local/share`.

    On a file system of several machines it is the folder `fleet` there.
    """
    base = os.environ.get("XDG_DATA_HOME", "")
    folder = (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "share") / "flatout"
    return folder / ("fleet" if _file_system(folder) in _NETWORK else "fleet.sqlite")


def open_store(path: Path) -> JobStore:
    """The store at a path: an SQLite file where the name ends in .sqlite, .sqlite3 or .db, else a folder; it need not exist.

    Raises UsageError for an SQLite file on a file system of several machines, and for a path that is the other kind.
    """
    if path.suffix in _FILES:
        if path.is_dir():
            raise UsageError(f"the store '{path}' is a folder; call it something else than an SQLite file")
        if (kind := _file_system(path)) in _NETWORK:
            raise UsageError(
                f"the store '{path}' would be an SQLite file on {kind}, where its locks do not hold; give a folder"
            )
        return SqliteStore(path)
    if path.exists() and not path.is_dir():
        raise UsageError(f"the store '{path}' is a file; give a folder, or a file called .sqlite")
    return FolderStore(path)


def policy_of(path: Path) -> FleetPolicy:
    """The policy of the store at a path: its `fleet.toml`, in the folder or beside the SQLite file.

    Raises UsageError when there is one and it is wrong.
    """
    return read_policy((path.parent if path.suffix in _FILES else path) / POLICY)


def _file_system(path: Path) -> str:
    """The kind of file system that a path lies on, as /proc/mounts calls it; '' where that is not known."""
    try:
        mounts = [line.split(" ") for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return ""
    real = os.path.realpath(path)
    found = [(len(m[1]), m[2]) for m in mounts if len(m) > 2 and Path(real).is_relative_to(m[1].replace("\\040", " "))]
    return max(found, default=(0, ""))[1]
