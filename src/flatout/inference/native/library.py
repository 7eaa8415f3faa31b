"""A model's shared library in this process: the table of functions that it exports (`flatout_native` in model.c)."""

from __future__ import annotations

import ctypes
import tempfile
from pathlib import Path
from typing import NamedTuple

from flatout.errors import NativeError

INTERFACE = 1
"""The number that model.c writes into its table."""
_Sizes = ctypes.POINTER(ctypes.c_uint64)


class Table(ctypes.Structure):
    """`flatout_native`, field by field."""

    _fields_ = (
        ("abi", ctypes.c_uint32),
        ("num_inputs", ctypes.c_uint32),
        ("num_outputs", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("isa", ctypes.c_char_p),
        ("input_bytes", _Sizes),
        ("output_bytes", _Sizes),
        ("weights_bytes", ctypes.c_uint64),
        ("state_bytes", ctypes.c_uint64),
        ("work_bytes", ctypes.c_uint64),
        ("streams_work_bytes", ctypes.c_uint64),
        ("snapshot_bytes", ctypes.c_uint64),
        ("reset", ctypes.c_void_p),
        ("step", ctypes.c_void_p),
        ("step_many", ctypes.c_void_p),
        ("step_streams", ctypes.c_void_p),
        ("snapshot", ctypes.c_void_p),
        ("restore", ctypes.c_void_p),
    )


class Library(NamedTuple):
    """A loaded library. It stays loaded until the process ends, as ctypes leaves it."""

    address: int
    """Of the table."""
    isa: str
    """That was chosen for this CPU."""
    state_bytes: int
    """Of one stream."""
    work_bytes: int


def open_library(path: Path) -> Library:
    """Load the library at `path` as it is now. Raises NativeError when this machine cannot, or it is no model's."""
    try:
        # The loader knows libraries by the name they were asked for under: a file that took the place of another at the same path
        # would give the code of the other. A new name for each load makes it look at the file.
        with tempfile.TemporaryDirectory(prefix="flatout-") as folder:
            link = Path(folder) / path.name
            link.symlink_to(path.resolve())
            function = ctypes.CDLL(str(link)).flatout_native_model
    except (OSError, AttributeError) as e:
        raise NativeError(
            f"cannot load '{path}': {e}; an engine runs on the architecture that it was built for: build it anew here"
        ) from e
    function.restype, function.argtypes = ctypes.c_void_p, ()
    address = int(function() or 0)
    table = Table.from_address(address) if address else None
    if table is None or table.abi != INTERFACE:
        raise NativeError(f"'{path}' has interface {table and table.abi}, {INTERFACE} is known; build the engine anew")
    return Library(address, (table.isa or b"").decode(), table.state_bytes, table.work_bytes)
