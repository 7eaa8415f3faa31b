"""The table of what was measured on this machine: for each problem the times of every variant, in one JSON file a machine.

What is selected was measured to be fastest, or is the vendor's library; nothing is selected by a guess.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, NamedTuple

import torch
from msgspec import structs

from flatout.blocks.kernels.matmul.problem import MatmulProblem
from flatout.blocks.kernels.matmul.variant import Variant
from flatout.blocks.kernels.matmul.vendor import VENDOR
from flatout.core.errors import RecordError, UsageError
from flatout.core.files import write_whole_file
from flatout.core.records.record import Record, from_json, to_json
from flatout.core.runtime.cache_folder import create_cache_folder, default_cache_folder
from flatout.machine.measure.probe import identify
from flatout.machine.measure.stats import Estimate

KERNELS: Final = 1
"""Raised when an implementation changes: what was measured before it does not hold any more."""


class MeasuredVariant(Record, frozen=True, kw_only=True):
    """The times of one variant in seconds a call, and its error.

    `call` is of calls from Python one after the other, `device` of calls in a replayed graph (None on a CPU). `call_ratio` and
    `device_ratio` are over the vendor's, paired by round, None for the vendor itself and for variants that were dropped
    early. `error` is the norm of the difference over that of the float64 result.
    """

    variant: Variant
    call: Estimate | None = None
    device: Estimate | None = None
    call_ratio: Estimate | None = None
    device_ratio: Estimate | None = None
    error: float


class MeasuredProblem(Record, frozen=True, kw_only=True):
    """A problem's measured variants, the vendor's first, and why others are not among them."""

    problem: str
    flop: float
    traffic_bytes: float
    dtype: str
    rows: tuple[MeasuredVariant, ...]
    refused: dict[str, str] = {}
    measured_at: str


class MatmulTable(Record, frozen=True, kw_only=True):
    """Every problem that one machine has measured, by the problem as text."""

    device_name: str
    torch_version: str
    triton_version: str | None
    num_threads: int
    kernels: int
    entries: dict[str, MeasuredProblem] = {}


class MatmulSelection(NamedTuple):
    """The variant that a product takes and, in a sentence, why."""

    variant: Variant
    because: str


_folder: list[Path] = []
_tables: dict[str, MatmulTable] = {}


def keep_in(folder: Path | str) -> None:
    """Read and keep tables in this folder from now on, and forget what was read from another."""
    _folder[:] = [Path(folder)]
    _tables.clear()


def folder() -> Path:
    """The folder of the tables: the user's cache folder for flatout unless `keep_in` set another."""
    return _folder[0] if _folder else default_cache_folder()


def table_path(device: torch.device) -> Path:
    """The file of a device's table; another device, torch, Triton or number of threads is another file."""
    return folder() / f"products-{identify(device).id}-{_triton_version() or 'without-triton'}-{KERNELS}.json"


def device_table(device: torch.device) -> MatmulTable:
    """The table of a device, read once; empty where nothing was measured.

    Raises RecordError when there is a file and it is damaged.
    """
    name = _name_of(device)
    if name not in _tables:
        _tables[name] = _read(device)
    return _tables[name]


def add(device: torch.device, measured: MeasuredProblem) -> Path:
    """Store a problem's measurement, beside what other processes have added meanwhile.

    Raises RecordError when the folder cannot be made or written.
    """
    now = _read(device)
    table = structs.replace(now, entries={**now.entries, measured.problem: measured})
    _tables[_name_of(device)] = table
    path = table_path(device)
    create_cache_folder(path.parent)
    write_whole_file(path, to_json(table))
    return path


def select_variant(problem: MatmulProblem, *, is_captured: bool = False) -> MatmulSelection:
    """Select the fastest variant measured, where it is faster than the vendor's for certain; else the vendor's.

    `is_captured`: of calls in a captured graph, whose host costs nothing.
    """
    measured = device_table(problem.device).entries.get(str(problem))
    if measured is None:
        shape = f"{problem.m}x{problem.n}x{problem.k}"
        how = f"run `flatout matmul --shapes {shape}`, or call within flatout.blocks.kernels.matmul.measuring()"
        return MatmulSelection(VENDOR, f"not measured: {how}")
    row = fastest(measured, is_captured=is_captured)
    ratio = _ratio(row, is_captured)
    if ratio is None:
        return MatmulSelection(row.variant, "measured: nothing is faster for certain")
    return MatmulSelection(
        row.variant, f"measured: {ratio.value:.2f} of the vendor's time ({ratio.low:.2f} - {ratio.high:.2f})"
    )


def fastest(measured: MeasuredProblem, *, is_captured: bool = False) -> MeasuredVariant:
    """The variant of the lowest ratio of those whose whole interval lies below the vendor's time; else the vendor's."""
    sure = [(r.value, i) for i, row in enumerate(measured.rows) if (r := _ratio(row, is_captured)) and r.high < 1]
    return measured.rows[min(sure)[1] if sure else 0]


def _ratio(row: MeasuredVariant, is_captured: bool) -> Estimate | None:
    return row.device_ratio if is_captured and row.device is not None else row.call_ratio


def _read(device: torch.device) -> MatmulTable:
    path = table_path(device)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return _empty(device)
    except OSError as e:
        raise RecordError(f"cannot read '{path}': {e.strerror or e}; remove it") from e
    try:
        return from_json(data.decode().replace(" kept", " constant"), MatmulTable)  # the word of earlier versions
    except (RecordError, UnicodeDecodeError) as e:
        raise RecordError(f"'{path}' is damaged or from another version of flatout: {e}; remove it") from e


def _empty(device: torch.device) -> MatmulTable:
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"products on '{device}' are not measured; 'cpu' and 'cuda' can be")
    identity = identify(device)
    return MatmulTable(
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
