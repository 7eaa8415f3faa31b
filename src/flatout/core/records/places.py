"""Whether the places in Evidence are places: its records name source lines, operators and calls by their number.

Evidence from a file may name what is not there, and whoever looks it up would fail far from the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from flatout.core.errors import RecordError
from flatout.core.records.evidence import Evidence

_LINES: Final = frozenset(
    {"source", "backward_source", "constructed", "taken_from", "backward_sources", "float64_sources", "callers"}
)
_OPERATORS: Final = frozenset({"operators", "operator"})


def check_places(evidence: Evidence) -> None:
    """Raise RecordError where a record names a source line, an operator or a call that the Evidence does not have."""
    num_lines, num_operators, num_calls = len(evidence.sources), len(evidence.operators), len(evidence.trace.operator)
    for field, number in _numbers(evidence):
        if field in _LINES and not -1 <= number < num_lines:
            raise RecordError(f"'{field}' names source line {number}, and there are {num_lines}; the file is damaged")
        if field in _OPERATORS and not -1 <= number < num_operators:
            raise RecordError(f"'{field}' names operator {number}, and there are {num_operators}; the file is damaged")
    producers = evidence.trace.producers
    for call in (*(evidence.trace.escapes or ()), *(call for row in producers for call in row)):
        if not -1 <= call < num_calls:
            raise RecordError(f"the trace names call {call}, and there are {num_calls}; the file is damaged")
    if producers and len(producers) != num_calls:
        raise RecordError(
            f"the trace has {num_calls} calls and what {len(producers)} of them read; the file is damaged"
        )


def _numbers(record: msgspec.Struct) -> Iterator[tuple[str, int]]:
    """The whole numbers in the fields that hold places, here and in all records below, with the field's name."""
    for field in record.__struct_fields__:
        value = getattr(record, field)
        if field in _LINES or field in _OPERATORS:
            yield from ((field, number) for number in _whole_numbers(value))
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, msgspec.Struct):
                yield from _numbers(one)


def _whole_numbers(value: object) -> Iterator[int]:
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from _whole_numbers(one)
    elif isinstance(value, dict):
        yield from _whole_numbers(tuple(value))
        yield from _whole_numbers(tuple(value.values()))
