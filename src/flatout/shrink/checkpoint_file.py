"""Files of models that are there whole or not at all."""

from __future__ import annotations

from pathlib import Path

from flatout.core.errors import CheckpointError, RecordError
from flatout.core.files import write_whole_file


def write_checkpoint_file(path: Path, data: bytes) -> None:
    """Write the bytes beside the place and rename them over it.

    Raises CheckpointError where the folder does not exist or cannot be written.
    """
    try:
        write_whole_file(path, data)
    except RecordError as e:
        raise CheckpointError(str(e)) from e
