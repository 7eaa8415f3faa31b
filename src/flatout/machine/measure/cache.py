"""Keeps the measured Machine between runs: one JSON file a machine, named by its identity.

The caller gives the folder (the command line's default is flatout's folder in the user's cache).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from flatout.core.errors import RecordError
from flatout.core.files import read_regular_file, write_whole_file
from flatout.core.records.hardware import Identity, Machine
from flatout.core.records.record import from_json, to_json
from flatout.core.runtime.cache_folder import create_cache_folder


class CachedMachine(NamedTuple):
    """A machine, the file it is kept in, and why it was measured now; None when it came from the file."""

    machine: Machine
    path: Path
    measured_because: str | None


def machine_path(folder: Path, identity: Identity) -> Path:
    """The file for the record of this machine; another core count, thread count, device or torch is another file."""
    return folder / f"machine-{identity.id}.json"


def read_machine(folder: Path, identity: Identity) -> Machine:
    """The stored record of this machine.

    Raises RecordError when there is none, when it is damaged, or when it belongs to another machine or version.
    """
    path = machine_path(folder, identity)
    try:
        data = read_regular_file(path)
    except FileNotFoundError as e:
        raise RecordError(f"no measurement is stored in '{path}'; run 'flatout machine' once") from e
    except OSError as e:
        raise RecordError(f"cannot read '{path}': {e.strerror or e}; remove it") from e
    try:
        machine = from_json(data.decode(), Machine)
    except (RecordError, UnicodeDecodeError) as e:
        raise RecordError(f"'{path}' is damaged or from another version of flatout: {e}") from e
    if machine.id != identity.id:
        raise RecordError(f"'{path}' holds the machine '{machine.id}', not '{identity.id}'; remove it")
    return machine


def write_machine(folder: Path, machine: Machine) -> Path:
    """Store `machine`, whole or not at all; makes the folder.

    Raises RecordError when the folder cannot be made or written.
    """
    create_cache_folder(folder)
    path = machine_path(folder, machine)
    write_whole_file(path, to_json(machine))
    return path


def read_or_measure(folder: Path, identity: Identity, measure: Callable[[], Machine]) -> CachedMachine:
    """The stored record, or a fresh one from `measure`, which is then stored; says why it was measured."""
    try:
        return CachedMachine(read_machine(folder, identity), machine_path(folder, identity), None)
    except RecordError as e:
        because = str(e)
    machine = measure()
    return CachedMachine(machine, write_machine(folder, machine), because)
