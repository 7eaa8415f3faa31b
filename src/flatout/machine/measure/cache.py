"""Keeps the measured Machine between runs: one JSON file a machine, named by its identity.

The caller gives the folder (the command line's default is flatout's folder in the user's cache).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from flatout.core.errors import RecordError
from flatout.core.files import read_regular_file, write_whole_file
from flatout.core.records.hardware import Identity, Machine
from flatout.core.records.record import from_json, to_json
from flatout.core.runtime.cache_folder import create_cache_folder

_LEAST_SHARE: Final = 0.9
_WIDEST_SPREAD: Final = 0.5
"""Of products and copies: they vary by a few per cent on a quiet machine, and by up to twice their median on one that others
use."""


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


def is_disturbed(machine: Machine) -> bool:
    """Whether others used the machine while it was measured, so that figures may be several times too low.

    Seen by the share of the processor that the probe got, or by samples of products and copies that differ among themselves.
    """
    share = machine.processor_share
    if share is not None and share < _LEAST_SHARE:
        return True
    return any(
        spread > _WIDEST_SPREAD
        for figure, spread in machine.spread.items()
        if figure.startswith(("matmul_flop_per_s.", "copy_bytes_per_s"))
    )


def faster_of(first: Machine, second: Machine) -> Machine:
    """Each figure of two disturbed measurements as it came out faster, since what else runs only slows it down."""
    products = dict(first.matmul_flop_per_s)
    spread, conditions = dict(first.spread), dict(first.conditions)
    changed: dict[str, object] = {}

    def take(figure: str) -> None:
        spread.pop(figure, None)
        spread.update({name: value for name, value in second.spread.items() if name == figure})
        conditions.update({name: text for name, text in second.conditions.items() if name == figure})

    for dtype, rate in second.matmul_flop_per_s.items():
        if rate > products.get(dtype, 0.0):
            products[dtype] = rate
            take(f"matmul_flop_per_s.{dtype}")
    if second.copy_bytes_per_s > first.copy_bytes_per_s:
        changed["copy_bytes_per_s"] = second.copy_bytes_per_s
        take("copy_bytes_per_s")
    for figure in ("dispatch_s", "dispatch_grad_s"):
        if getattr(second, figure) < getattr(first, figure):
            changed[figure] = getattr(second, figure)
            take(figure)
    shares = [m.processor_share for m in (first, second) if m.processor_share is not None]
    return msgspec.structs.replace(
        first,
        **changed,
        matmul_flop_per_s=products,
        spread=spread,
        conditions=conditions,
        processor_share=max(shares, default=None),
        measured_at=second.measured_at,
    )
