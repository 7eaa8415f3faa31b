"""Merging, ranking and pricing, with rules that find what the test tells them to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.diagnosis import diagnose, proposals
from flatout.records.evidence import Evidence
from flatout.records.finding import Diagnosis, Finding, Note, Rule
from flatout.records.trial import TimeDataset, TimeOptimizer, Trial
from tests.evidence_builder import MACHINE, EvidenceBuilder


def found(
    saved_s: float | tuple[float, float],
    *,
    line: int = 0,
    operators: Sequence[int] = (),
    phases: Sequence[str] = (),
    run: EvidenceBuilder | None = None,
) -> Finding:
    """A finding as a rule makes it; its `rule` is filled in by `rule_that`."""
    low, high = saved_s if isinstance(saved_s, tuple) else (saved_s, saved_s)
    source = (run or EvidenceBuilder()).line("model.py", line)
    return Finding(
        rule="",
        regime="overhead",
        where=(run or _LINES).sources[source]
        if run
        else _LINES.sources[_LINES.line("model.py", line)]
        if line
        else None,
        cost_s=high,
        saved_s=(low, high),
        because="it is slow",
        edit="make it fast",
        operators=tuple(operators),
        phases=tuple(phases),
    )


_LINES = EvidenceBuilder()
