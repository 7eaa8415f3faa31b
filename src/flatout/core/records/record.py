"""What every record is: a frozen, keyword-only struct that goes to JSON and back."""

from __future__ import annotations

import re
import tomllib
from typing import Final, TypeVar

import msgspec

from flatout.core.errors import RecordError


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """Base of all records. Two records with equal fields are equal and hash alike."""


R = TypeVar("R", bound=Record)
T = TypeVar("T")
_MOST: Final = (1 << 63) - 1
"""Sums and products of such numbers still go into a float."""
_LONG_NUMBER: Final = re.compile(rb"[-:,\[\s]\d{19,}")
"""May be a number of more than 64 bits, or stand in a text."""

FORMER_FIELDS: Final[dict[str, str]] = {
    "choice": "architecture",
    "chosen": "selected",
    "front": "pareto",
    "given": "original",
    "given_judged": "original_search_score",
    "given_score": "original_score",
    "held": "num_live_outputs",
    "is_kept": "holds",
    "kept": "remaining",
    "num_calls_seen": "num_calls_observed",
    "num_kept": "num_remaining",
    "num_seen": "num_observed",
    "purpose": "kind",
    "rungs": "steps",
    "told": "notes",
    "way": "variant",
}
"""Field names in files that earlier versions wrote, and what they are called now. No record has a field of a former name."""


def to_json(record: Record) -> bytes:
    """The record as indented JSON (UTF-8)."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1)


def from_json(data: bytes | str, kind: type[R]) -> R:
    """The record of type `kind` that `data` holds; fields may have the names of earlier versions.

    Raises:
        RecordError: The text is not JSON, or does not fit the record's fields and types.
    """
    try:
        return decode_json(data, kind)
    except RecordError as e:
        try:
            return msgspec.convert(_with_present_names(decode_json(data, object)), type=kind)
        except (
            msgspec.ValidationError,
            RecordError,
            RecursionError,
        ):  # the first error names the field that does not fit
            raise RecordError(f"not a {kind.__name__} record: {e}; was the file written by another version?") from e


def decode_json(data: bytes | str, kind: type[T]) -> T:
    """What JSON holds, as a `kind`; for text that somebody else may have written.

    Raises:
        RecordError: It is no JSON of that kind, is nested deeper than it could be, or has a whole number of more than 64 bits.
    """
    try:
        if _LONG_NUMBER.search(data.encode() if isinstance(data, str) else data):
            _check_numbers(msgspec.json.decode(data))
        return msgspec.json.decode(data, type=kind)
    except RecursionError as e:
        raise RecordError("it is nested too deeply") from e
    except (msgspec.DecodeError, UnicodeError) as e:
        raise RecordError(str(e)) from e


def parse_toml(data: bytes) -> dict[str, object]:
    """What TOML holds; for text that somebody else may have written.

    Raises:
        RecordError: It is no TOML, is nested deeper than it could be, or has a whole number of more than 64 bits.
    """
    try:
        found = tomllib.loads(data.decode("utf-8"))
        _check_numbers(found)
    except RecursionError as e:
        raise RecordError("it is nested too deeply") from e
    except ValueError as e:  # TOMLDecodeError and UnicodeDecodeError are such, and what int() says of too many digits
        raise RecordError(str(e)) from e
    return found


def _check_numbers(value: object) -> None:
    """Raises RecordError for a whole number that no field of a record means."""
    if isinstance(value, dict):
        for item in value.values():
            _check_numbers(item)
    elif isinstance(value, list):
        for item in value:
            _check_numbers(item)
    elif isinstance(value, int) and not -_MOST <= value <= _MOST:
        raise RecordError(f"the number {str(value)[:24]}... has more than 64 bits")


def _with_present_names(value: object) -> object:
    """`value` with every key that is a former field name replaced by the present one."""
    if isinstance(value, dict):
        return {FORMER_FIELDS.get(key, key): _with_present_names(item) for key, item in value.items()}
    return [_with_present_names(item) for item in value] if isinstance(value, list) else value
