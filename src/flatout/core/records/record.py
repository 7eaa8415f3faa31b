"""What every record is: a frozen, keyword-only struct that goes to JSON and back."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from flatout.core.errors import RecordError


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """Base of all records. Two records with equal fields are equal and hash alike."""


R = TypeVar("R", bound=Record)

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
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as e:
        try:
            return msgspec.convert(_with_present_names(msgspec.json.decode(data)), type=kind)
        except msgspec.DecodeError:  # the first error names the field that does not fit
            raise RecordError(f"not a {kind.__name__} record: {e}; was the file written by another version?") from e


def _with_present_names(value: object) -> object:
    """`value` with every key that is a former field name replaced by the present one."""
    if isinstance(value, dict):
        return {FORMER_FIELDS.get(key, key): _with_present_names(item) for key, item in value.items()}
    return [_with_present_names(item) for item in value] if isinstance(value, list) else value
