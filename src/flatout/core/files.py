"""Files written whole or not at all, wherever their path leads: links are followed, devices and pipes are written to.

And files read that somebody else may have written: regular ones alone, and none outside of the folder that names them.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from flatout.core.errors import RecordError

STANDARD_OUTPUT: Final = Path("-")
"""The path that names standard output on a command line."""
_READ: Final = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
"""A pipe is opened without waiting, where there are such; bytes stay as they are, where text would be changed."""
_ADVICE: Final = {
    errno.ENOSPC: "free some space, or give a path on another disk",
    errno.EDQUOT: "free some space, or give a path on another disk",
    errno.EACCES: "give a path that you may write to",
    errno.EPERM: "give a path that you may write to",
    errno.EROFS: "give a path that you may write to",
}


def write_whole_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` whole or not at all: written beside it, then renamed over it.

    `-` is standard output, which gets the data as text. A link stays a link: the file it leads to is written. What is no
    regular file (a device, a pipe) is written to as it is.

    Raises:
        RecordError: The folder does not exist, or it cannot be written; nothing is left behind.
    """
    try:
        if path == STANDARD_OUTPUT:
            sys.stdout.write(data.decode())
            sys.stdout.flush()
        elif is_stream(path):
            with path.open("ab") as stream:
                stream.write(data)
        else:
            _replace(Path(os.path.realpath(path)), data)
    except OSError as e:
        advice = _ADVICE.get(e.errno or 0, "give a path in a folder that exists")
        raise RecordError(f"cannot write '{path}': {e.strerror or e}; {advice}") from e


def write_all_files(files: Iterable[tuple[Path, Callable[[], bytes]]]) -> None:
    """Write each file; one that cannot be written goes to a new folder for temporary files, and the others are still written.

    Raises:
        RecordError: Some could not be written where they were wanted; it says where they are.
    """
    failures: list[str] = []
    for path, content in files:
        data = content()
        try:
            write_whole_file(path, data)
        except RecordError as e:
            failures.append(f"{e}; {_rescued(path, data)}")
    if failures:
        raise RecordError("\n".join(failures))


def read_regular_file(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        OSError: It cannot be read, or is no regular file: a pipe would wait for ever, and a device may never end.
    """
    descriptor = os.open(path, _READ)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return file.read()


def path_inside(folder: Path, name: str) -> Path:
    """The path of a file that a record in `folder` names.

    Raises:
        OSError: The name, or a link of that name, leads out of the folder.
    """
    path = folder / name if "\0" not in name else folder
    inside, parts = os.path.realpath(folder), Path(name).parts
    if not parts or os.path.isabs(name) or ".." in parts or not Path(os.path.realpath(path)).is_relative_to(inside):
        raise OSError(errno.EINVAL, f"the name {name[:80]!r} leads out of its folder", str(folder))
    if path == folder:
        raise OSError(errno.EINVAL, f"{name[:80]!r} is no name of a file", str(folder))
    return path


def is_stream(path: Path) -> bool:
    """Whether a path leads to something that is written to in place: a device, a pipe, a descriptor of this process."""
    absolute = Path(os.path.abspath(path))
    if absolute.parts[:2] == ("/", "proc") or absolute.parts[:3] == ("/", "dev", "fd"):
        return True
    if str(absolute) in ("/dev/stdout", "/dev/stderr"):
        return True
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def sync_to_disk(path: Path) -> None:
    """Have what was written to a file, or the names in a folder, lie on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(target: Path, data: bytes) -> None:
    beside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        beside.write_bytes(data)
        if target.exists():
            beside.chmod(stat.S_IMODE(target.stat().st_mode))
        os.replace(beside, target)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def _rescued(path: Path, data: bytes) -> str:
    """Where the content of a file is now that could not be written."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="flatout-"))
        write_whole_file(folder / path.name, data)
    except (OSError, RecordError):
        return "there is no other place for it, either"
    return f"it was written to '{folder / path.name}'"
