"""What every record is: a frozen, keyword-only struct that goes to JSON and back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import msgspec

from flatout.errors import RecordError


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """Base of all records. Two records with equal fields are equal and hash alike."""


R = TypeVar("R", bound=Record)


def to_json(record: Record) -> bytes:
    """The record as indented JSON (UTF-8)."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1)


def from_json(data: bytes | str, kind: type[R]) -> R:
    """The record of type `kind` held in `data`.

    Raises RecordError when the text is not JSON or does not fit the record's fields and types.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as e:
        raise RecordError(f"not a {kind.__name__} record: {e}; was the file written by another version?") from e


def write_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` whole or not at all: written beside it, then renamed over it.

    Raises RecordError when the folder does not exist or cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_bytes(data)
        os.replace(beside, path)
    except OSError as e:
        beside.unlink(missing_ok=True)
        raise RecordError(f"cannot write '{path}': {e.strerror or e}; give a path in a folder that exists") from e
