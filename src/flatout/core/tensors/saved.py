"""Files of `torch.save` that somebody else may have written: tensors and plain values alone, and no larger than the file."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any, Final

import torch

from flatout.core.errors import CheckpointError
from flatout.core.files import read_regular_file
from flatout.core.tensors.nests import tensors_in

_SPARE_BYTES: Final = 1 << 20
"""What tensors may have more than the file: those that share memory are counted once each."""
_TIMES: Final = 4
"""How often the bytes of a file may be shared, as tied weights share them."""
_DAMAGED: Final = (
    RuntimeError, LookupError, TypeError, ValueError, AttributeError, EOFError, OverflowError, MemoryError,
    RecursionError, AssertionError, ImportError, NotImplementedError, zipfile.BadZipFile, struct.error, pickle.UnpicklingError,
)  # fmt: skip
"""What torch's reader raises for a file that is damaged; it has no error of its own for that."""


def load_saved_tensors(source: Path | bytes, *, name: str) -> Any:
    """What a file of `torch.save`, or its bytes, holds: tensors and plain values; none of its code is run.

    `name` is what messages call it.

    Raises:
        CheckpointError: It is damaged, packed (`torch.save` packs nothing), has tensors larger than itself, or other objects.
        OSError: It cannot be read.
    """
    data = source if isinstance(source, bytes) else read_regular_file(source)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            members = file.infolist()
        if any(one.compress_type != zipfile.ZIP_STORED for one in members):
            raise CheckpointError("it is packed")
        if sum(one.file_size for one in members) > len(data):
            raise CheckpointError(f"it has {len(data)} bytes and claims more")
        loaded = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        if any(tensor.nbytes > _TIMES * len(data) + _SPARE_BYTES for tensor in tensors_in(loaded)):
            raise CheckpointError(f"it has {len(data)} bytes and a tensor that is larger")
    except (*_DAMAGED, CheckpointError) as e:
        raise CheckpointError(
            f"'{name}' is no file of torch.save with tensors alone: {str(e)[:200] or type(e).__name__}"
        ) from e
    return loaded
