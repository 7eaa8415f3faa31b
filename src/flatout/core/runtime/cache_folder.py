"""The user's cache folder for flatout: measurements, and shared libraries, which are loaded only from a folder that is safe."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from flatout.core.errors import NativeError, RecordError


def default_cache_folder() -> Path:
    """The folder `$XDG_CACHE_HOME/flatout`, or `~/.cache/flatout`; it need not exist."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification (0.8): a relative path is to be ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "flatout"


def create_cache_folder(folder: Path) -> None:
    """Create a folder that only its owner can read, if it does not exist. Raises RecordError when it cannot be created."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as e:
        raise RecordError(f"cannot create the folder '{folder}': {e.strerror or e}; give another one") from e


def create_code_folder(folder: Path) -> None:
    """Create a cache folder for shared libraries, which are loaded from it.

    Raises NativeError when it cannot be created or written, or when another user could place a library in it.
    """
    try:
        create_cache_folder(folder)
    except RecordError as e:
        raise NativeError(f"no folder for compiled code: {e} as cache") from e
    require_trusted(folder)
    if not os.access(folder, os.W_OK):
        raise NativeError(f"the cache folder '{folder}' cannot be written; give another one")


def require_trusted_library(file: Path) -> None:
    """Check a shared library and its folder before it is loaded. Raises NativeError when others could have changed them."""
    require_trusted(file.parent)
    require_trusted(file)


def require_trusted(path: Path) -> None:
    """Check that nobody else could have put code into a folder, or into a file; links are followed.

    Raises NativeError when `path` belongs to another user than this one or root, when others can write to it, when it is missing,
    and where the system has no owners and modes to look at (Windows).
    """
    if not hasattr(os, "getuid"):
        raise NativeError(f"this system does not say who may write to '{path}', and code is loaded from it")
    try:
        status = path.stat()
    except OSError as e:
        raise NativeError(f"cannot read '{path}': {e.strerror or e}") from e
    if status.st_uid not in (0, os.getuid()):
        raise NativeError(
            f"'{path}' belongs to user {status.st_uid}, and code is loaded from it; use a folder of your own"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NativeError(
            f"'{path}' can be written by other users (mode {stat.S_IMODE(status.st_mode):o}), and code is loaded from it; "
            "remove it, or take that permission away with chmod go-w"
        )
