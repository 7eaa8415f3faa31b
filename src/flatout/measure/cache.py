"""Keeps the measured Machine between runs: one JSON file a machine, named by its identity.

The caller gives the folder (the command line's default is flatout's folder in the user's cache).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from flatout.errors import RecordError
from flatout.records.hardware import Identity, Machine
from flatout.records.record import from_json, to_json, write_file


class Cached(NamedTuple):
    """A machine, the file it is kept in, and why it was measured now; None when it came from the file."""

    machine: Machine
    path: Path
    measured_because: str | None


def path_of(folder: Path, identity: Identity) -> Path:
    """Where the record of this machine is kept; another core count, thread count, device or torch is another file."""
    return folder / f"machine-{identity.id}.json"


def read(folder: Path, identity: Identity) -> Machine:
    """The kept record.

    Raises RecordError when there is none, when it is damaged, or when it belongs to another machine or version.
    """
    path = path_of(folder, identity)
    try:
        data = path.read_bytes()
    except FileNotFoundError as e:
        raise RecordError(f"no measurement is kept in '{path}'; run 'flatout machine' once") from e
    except OSError as e:
        raise RecordError(f"cannot read '{path}': {e.strerror or e}; remove it") from e
    try:
        machine = from_json(data.decode(), Machine)
    except (RecordError, UnicodeDecodeError) as e:
        raise RecordError(f"'{path}' is damaged or from another version of flatout: {e}") from e
    if machine.id != identity.id:
        raise RecordError(f"'{path}' holds the machine '{machine.id}', not '{identity.id}'; remove it")
    return machine


def write(folder: Path, machine: Machine) -> Path:
    """Keep `machine`, whole or not at all; makes the folder.

    Raises RecordError when the folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise RecordError(f"cannot make the folder '{folder}': {e.strerror or e}; give another one") from e
    path = path_of(folder, machine)
    write_file(path, to_json(machine))
    return path


def read_or_measure(folder: Path, identity: Identity, measure: Callable[[], Machine]) -> Cached:
    """The kept record, or a fresh one from `measure`, which is then kept; says why it was measured."""
    try:
        return Cached(read(folder, identity), path_of(folder, identity), None)
    except RecordError as e:
        because = str(e)
    machine = measure()
    return Cached(machine, write(folder, machine), because)
