"""What was measured on this machine: for each problem the times of every way. One JSON file a machine, named by its identity.

A choice is the measured one, or the vendor's library; nothing is chosen by a guess.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, NamedTuple

import torch

from flatout.errors import RecordError, UsageError
from flatout.kernels.matmul.problem import Problem
from flatout.kernels.matmul.vendor import VENDOR
from flatout.kernels.matmul.way import Way
from flatout.measure.probe import identify
from flatout.measure.stats import Estimate
from flatout.records.record import Record, from_json, to_json, write_file

KERNELS: Final = 1
"""Raised when a kernel or a way changes: what was measured before it does not hold any more."""


class Row(Record, frozen=True, kw_only=True):
    """One way. Seconds of a call: `call`, made from Python one after the other, and `device`, replayed in a captured graph
    (None on a CPU). `call_ratio` and `device_ratio` are over the vendor's, paired by round, None for the vendor itself and
    for ways that were left behind early. `error` is the norm of what is off over that of the float64 result.
    """

    way: Way
    call: Estimate | None = None
    device: Estimate | None = None
    call_ratio: Estimate | None = None
    device_ratio: Estimate | None = None
    error: float


class Measured(Record, frozen=True, kw_only=True):
    """A problem's rows, the vendor's first, and why ways are not among them."""

    problem: str
    flop: float
    traffic_bytes: float
    dtype: str
    rows: tuple[Row, ...]
    refused: dict[str, str] = {}
    measured_at: str


class Table(Record, frozen=True, kw_only=True):
    """What one machine has measured, by the problem's words."""

    device_name: str
    torch_version: str
    triton_version: str | None
    num_threads: int
    kernels: int
    entries: dict[str, Measured] = {}


class Chosen(NamedTuple):
    """A way and, in a sentence, why it."""

    way: Way
    because: str


_folder: list[Path] = []
_tables: dict[str, Table] = {}


def keep_in(folder: Path | str) -> None:
    """Read and keep tables in this folder from now on, and forget what was read from another."""
    _folder[:] = [Path(folder)]
    _tables.clear()


def folder() -> Path:
    """Where tables are kept: `~/.cache/flatout` unless `keep_in` said otherwise."""
    return _folder[0] if _folder else Path.home() / ".cache" / "flatout"


def path_of(device: torch.device) -> Path:
    """Of this device's table; another device, torch, Triton or number of threads is another file."""
    return folder() / f"products-{identify(device).id}-{_triton_version() or 'without-triton'}-{KERNELS}.json"


def table_of(device: torch.device) -> Table:
    """What is kept of this device, read once; empty where nothing is.

    Raises RecordError when there is a file and it is damaged.
    """
    name = _name_of(device)
    if name not in _tables:
        _tables[name] = _read(device)
    return _tables[name]


def add(device: torch.device, measured: Measured) -> Path:
    """Keep a problem's measurement, beside what other processes have added meanwhile.

    Raises RecordError when the folder cannot be made or written.
    """
    now = _read(device)
    table = Table(
        device_name=now.device_name,
        torch_version=now.torch_version,
        triton_version=now.triton_version,
        num_threads=now.num_threads,
        kernels=KERNELS,
        entries={**now.entries, measured.problem: measured},
    )
    _tables[_name_of(device)] = table
    path = path_of(device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise RecordError(f"cannot make the folder '{path.parent}': {e.strerror or e}; give another one") from e
    write_file(path, to_json(table))
    return path


def choose(problem: Problem, *, is_captured: bool = False) -> Chosen:
    """The fastest way measured, where it is faster than the vendor's for certain; else the vendor's.

    `is_captured`: of calls in a captured graph, whose host costs nothing.
    """
    measured = table_of(problem.device).entries.get(str(problem))
    if measured is None:
        shape = f"{problem.m}x{problem.n}x{problem.k}"
        how = f"run `flatout matmul --shapes {shape}`, or call within flatout.kernels.matmul.measuring()"
        return Chosen(VENDOR, f"not measured: {how}")
    row = fastest(measured, is_captured=is_captured)
    ratio = _ratio(row, is_captured)
    if ratio is None:
        return Chosen(row.way, "measured: nothing is faster for certain")
    return Chosen(row.way, f"measured: {ratio.value:.2f} of the vendor's time ({ratio.low:.2f} - {ratio.high:.2f})")


def fastest(measured: Measured, *, is_captured: bool = False) -> Row:
    """Of the ways whose whole interval lies below the vendor's time the one of the lowest ratio; else the vendor's."""
    sure = [(r.value, i) for i, row in enumerate(measured.rows) if (r := _ratio(row, is_captured)) and r.high < 1]
    return measured.rows[min(sure)[1] if sure else 0]


def _ratio(row: Row, is_captured: bool) -> Estimate | None:
    return row.device_ratio if is_captured and row.device is not None else row.call_ratio


def _read(device: torch.device) -> Table:
    path = path_of(device)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return _empty(device)
    except OSError as e:
        raise RecordError(f"cannot read '{path}': {e.strerror or e}; remove it") from e
    try:
        return from_json(data.decode(), Table)
    except (RecordError, UnicodeDecodeError) as e:
        raise RecordError(f"'{path}' is damaged or from another version of flatout: {e}; remove it") from e


def _empty(device: torch.device) -> Table:
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"products on '{device}' are not measured; 'cpu' and 'cuda' can be")
    identity = identify(device)
    return Table(
        device_name=identity.device_name,
        torch_version=identity.torch_version,
        triton_version=_triton_version(),
        num_threads=identity.num_threads,
        kernels=KERNELS,
    )


def _name_of(device: torch.device) -> str:
    return f"{device} {torch.get_num_threads() if device.type == 'cpu' else ''}"


def _triton_version() -> str | None:
    try:
        return version("triton")
    except PackageNotFoundError:
        return None
