"""Records on disk: what earlier versions wrote is still read."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
from tests.evidence_builder import EvidenceBuilder

from flatout.core import records
from flatout.core.errors import RecordError
from flatout.core.records.evidence import Evidence
from flatout.core.records.record import FORMER_FIELDS, Record, from_json, to_json


def every_record() -> list[type[Record]]:
    for info in pkgutil.iter_modules(records.__path__, prefix=f"{records.__name__}."):
        importlib.import_module(info.name)
    found, waiting = [], [Record]
    while waiting:
        subclasses = [one for one in waiting.pop().__subclasses__() if one.__module__.startswith("flatout.")]
        found += subclasses
        waiting += subclasses
    return found


def test_no_record_has_a_field_of_a_former_name() -> None:
    names = {name for record in every_record() for name in record.__struct_fields__}
    assert len(every_record()) > 100
    assert names.isdisjoint(FORMER_FIELDS)


def test_every_present_name_is_a_field() -> None:
    names = {name for record in every_record() for name in record.__struct_fields__}
    assert set(FORMER_FIELDS.values()) <= names


def test_evidence_with_former_field_names_is_read() -> None:
    evidence = EvidenceBuilder().build()
    former = to_json(evidence).decode()
    for before, now in FORMER_FIELDS.items():
        former = former.replace(f'"{now}"', f'"{before}"')
    assert '"num_seen"' in former
    assert from_json(former, Evidence) == evidence


def test_what_fits_under_no_name_is_refused_with_the_first_reason() -> None:
    with pytest.raises(RecordError, match="missing required field"):
        from_json("{}", Evidence)
